import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from align.compare.model import Pairing, Status
from align.compare.serial import from_json, to_json
from align.compare.source import MemorySource, MergedSource, NodeSelection, open_source
from align.compare.traces import compare, compare_folders, compare_traces
from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import AlignError, UsageError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, RunStatus, Statistics, Storage, TraceHeader
from align.dumpers.schema import sample_positions
from align.dumpers.store import TraceWriter

SIZES = {"candidate": 0.1, "reference": 0.0, "baseline": 0.05}
align_compare = importlib.import_module("align.compare")


def statistics(array):
    finite = array[np.isfinite(array)].astype(np.float64)
    norm, largest = np.linalg.norm(finite), np.abs(finite).max()
    values = (finite.min(), finite.max(), finite.mean(), finite.std(), norm, largest)
    nonfinite = (np.isnan(array), np.isposinf(array), np.isneginf(array))
    return Statistics(array.size, *map(float, values), *(int(np.sum(mask)) for mask in nonfinite))


def source(role, tensors, *, workload="toy", status=RunStatus.COMPLETE, documents=None, rank=0, **fields):
    """A trace in memory of {key text: array}; `fields` maps key texts to changes of the record."""
    records, kept = [], {}
    for order, (text, array) in enumerate(tensors.items()):
        key = replace(NodeKey.parse(text), rank=rank)
        kind = NodeKind.MODULE if key.op == "forward" else NodeKind.CALL
        dtype = str(array.dtype)
        record = NodeRecord(
            key,
            order,
            kind,
            "T",
            dtype,
            array.shape,
            storage=Storage.TENSOR,
            statistics=statistics(array),
            digest=str(hash(array.tobytes())),
        )
        records.append(replace(record, **fields.get(text, {})))
        kept[key] = RawTensor(array, dtype)
    return MemorySource(
        TraceHeader(workload, role, "cpu", "float32", 0, rank=rank), records, kept, status=status, documents=documents
    )


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal((8, 16)).astype(np.float32)
        for name in ("a/forward#0:0", "b/forward#0:0", "/forward#0:0")
    }


def noisy(tensors, size, seed=1):
    rng = np.random.default_rng(seed)
    return {
        name: (array + size * rng.standard_normal(array.shape)).astype(np.float32) for name, array in tensors.items()
    }


def test_each_node_is_measured_for_candidate_and_baseline_against_the_reference(tensors):
    ours, base = noisy(tensors, 1e-2), noisy(tensors, 1e-3, seed=2)
    found = compare_traces(source("candidate", ours), source("reference", tensors), source("baseline", base))
    assert [str(node.key) for node in found.nodes] == list(tensors)
    for node in found.nodes:
        exact = tensors[str(node.key)].astype(np.float64)
        for measures, run in ((node.candidate, ours), (node.baseline, base)):
            error = np.linalg.norm(run[str(node.key)].astype(np.float64) - exact) / np.linalg.norm(exact)
            assert measures.rel_l2 == pytest.approx(error, rel=1e-12)
    assert found.has_baseline
    assert (found.coverage.nodes, found.coverage.compared, found.coverage.share) == (3, 3, 1.0)
    assert found.coverage.nbytes == found.coverage.nbytes_compared == 3 * 8 * 16 * 4


def test_results_do_not_depend_on_the_number_of_threads(tensors):
    many = {f"l{i}/forward#0:0": array + i for i in range(30) for array in tensors.values()}
    runs = source("candidate", noisy(many, 0.1)), source("reference", many)
    assert compare_traces(*runs, threads=1) == compare_traces(*runs, threads=7)


def test_equal_digests_are_zero_error_without_reading(tensors):
    def refuse(key):
        raise AssertionError(key)

    ours, theirs = source("candidate", tensors), source("reference", tensors)
    ours.read = theirs.read = refuse
    found = compare_traces(ours, theirs)
    assert [(node.candidate.rel_l2, node.candidate.max_abs, node.candidate.share_close) for node in found.nodes] == [
        (0.0, 0.0, 1.0)
    ] * 3
    assert found.coverage.compared == 3


def test_equal_digests_give_what_measuring_would_have_given(tensors):
    blind = {name: {"digest": ""} for name in tensors}
    fast = compare_traces(source("candidate", tensors), source("reference", tensors))
    slow = compare_traces(source("candidate", tensors, **blind), source("reference", tensors))
    for one, other in zip(fast.nodes, slow.nodes, strict=True):
        assert replace(one.candidate, small_count=0, mean_candidate=0, mean_reference=0) == replace(
            other.candidate, small_count=0, mean_candidate=0, mean_reference=0
        )


def test_a_node_equal_to_the_baselines_is_measured_once(tensors):
    ours = noisy(tensors, 0.1)
    base = source("baseline", ours)
    base.read = None  # never called
    found = compare_traces(source("candidate", ours), source("reference", tensors), base)
    assert all(node.baseline == node.candidate for node in found.nodes)


def test_other_shapes_and_kinds_of_dtype_are_a_problem_and_no_crash(tensors):
    ours = dict(tensors) | {
        "a/forward#0:0": np.zeros((8, 15), np.float32),
        "b/forward#0:0": np.zeros((8, 16), np.int64),
    }
    result = compare(source("candidate", ours), source("reference", tensors))
    problems = [node.problem for node in result.comparison.nodes]
    assert problems == ["shape 8x15 against 8x16", "dtype int64 against float32", ""]
    assert [verdict.status for verdict in result.judgement.verdicts] == [Status.MISMATCH, Status.MISMATCH, Status.PASS]


def test_nodes_with_statistics_only_say_so_and_what_follows_from_them(tensors):
    only = {"a/forward#0:0": {"storage": Storage.STATISTICS}}
    ours = dict(tensors) | {"a/forward#0:0": 2 * tensors["a/forward#0:0"]}
    found = compare_traces(source("candidate", ours, **only), source("reference", tensors))
    assert found.nodes[0].candidate is None
    assert "statistics only" in found.nodes[0].problem
    assert found.nodes[0].problem.endswith("the relative L2 error is at least 1")
    assert any("statistics only" in warning for warning in found.warnings)
    assert found.coverage.compared == 2


def test_nan_is_seen_in_statistics_alone(tensors):
    ours = {name: array.copy() for name, array in tensors.items()}
    ours["a/forward#0:0"][0, :3] = np.nan
    result = compare(
        source("candidate", ours, **{"a/forward#0:0": {"storage": Storage.STATISTICS}}), source("reference", tensors)
    )
    assert result.judgement.verdicts[0].status is Status.NONFINITE
    assert result.comparison.coverage.compared == 2


def test_meta_tensors_and_unreadable_nodes_are_unknown_and_the_rest_is_compared(tensors):
    ours = source("candidate", noisy(tensors, 0.1), **{"a/forward#0:0": {"storage": Storage.ABSENT}})
    del ours._tensors[NodeKey("b", "forward")]
    result = compare(ours, source("reference", tensors))
    assert [verdict.status for verdict in result.judgement.verdicts[:2]] == [Status.UNKNOWN, Status.UNKNOWN]
    assert result.comparison.nodes[2].candidate is not None


def test_fused_nodes_keep_their_place_and_the_kernels_name(tensors):
    site = {"site": "norm@b/forward#0"}
    ours = source(
        "candidate",
        noisy(tensors, 0.1),
        **{"a/forward#0:0": site | {"storage": Storage.FUSED}, "b/forward#0:0": site | {"type_name": "Kernel"}},
    )
    found = compare_traces(ours, source("reference", tensors), source("baseline", noisy(tensors, 0.1, seed=3)))
    assert [node.pairing for node in found.nodes] == [Pairing.FUSED_AWAY, Pairing.FUSED_OUTPUT, Pairing.EXACT]
    assert found.nodes[0].candidate is None
    assert found.nodes[0].baseline is not None
    assert found.nodes[1].type_name == "Kernel"
    assert found.coverage.share == 1.0


def test_fused_outputs_equal_to_the_baselines_bits_are_called_out(tensors):
    site = {"b/forward#0:0": {"site": "norm@b/forward#0"}}
    ours = noisy(tensors, 0.1)
    stale = compare_traces(source("candidate", ours, **site), source("reference", tensors), source("baseline", ours))
    fresh = compare_traces(
        source("candidate", ours, **site), source("reference", tensors), source("baseline", noisy(tensors, 0.1, seed=4))
    )
    assert any("byte-identical" in warning for warning in stale.warnings)
    assert not any("byte-identical" in warning for warning in fresh.warnings)


@pytest.mark.parametrize("workload", ["toy", "other"])
def test_traces_without_a_common_node_are_refused_with_both_names(tensors, workload):
    other = {f"x.{name}": array for name, array in tensors.items()}
    with pytest.raises(UsageError) as caught:
        compare_traces(source("candidate", other, workload=workload), source("reference", tensors))
    assert f"{workload} (candidate" in caught.value.problem
    assert "toy (reference" in caught.value.problem
    assert len(str(caught.value).splitlines()) == 2


def test_another_workload_with_other_shapes_is_refused_and_with_the_same_nodes_a_warning(tensors):
    small = {name: array[:, :4] for name, array in tensors.items()}
    with pytest.raises(UsageError, match="two different models"):
        compare_traces(source("candidate", small, workload="other"), source("reference", tensors))
    found = compare_traces(source("candidate", tensors, workload="other"), source("reference", tensors))
    assert any("different workloads" in warning for warning in found.warnings)


def test_a_broken_off_run_is_compared_as_far_as_it_went_with_a_warning(tensors):
    part = dict(list(tensors.items())[:1])
    result = compare(source("candidate", part, status=RunStatus.INCOMPLETE), source("reference", tensors))
    assert any("incomplete" in warning for warning in result.comparison.warnings)
    assert [node.pairing for node in result.comparison.nodes] == [Pairing.EXACT, Pairing.MISSING, Pairing.MISSING]
    assert result.judgement.status is Status.MISSING


def test_other_inputs_are_called_out(tensors):
    fields = {"a/forward#0:0": {"kind": NodeKind.INPUT}}
    found = compare_traces(source("candidate", noisy(tensors, 1.0), **fields), source("reference", tensors, **fields))
    assert any("same input a/forward#0:0" in warning for warning in found.warnings)


def test_a_selection_limits_what_is_compared(tensors):
    runs = source("candidate", tensors), source("reference", tensors)
    found = compare_traces(*runs, select=NodeSelection(globs=("b",)))
    assert [node.key.path for node in found.nodes] == ["b"]
    assert compare_traces(*runs, select=NodeSelection(steps=frozenset({3}))).nodes == ()


def test_ranks_of_one_run_are_compared_as_one(tensors):
    ours, theirs = (
        MergedSource([source(role, tensors, rank=rank) for rank in (1, 0)]) for role in ("candidate", "reference")
    )
    found = compare_traces(ours, theirs)
    assert [node.key.rank for node in found.nodes] == [0, 1, 0, 1, 0, 1]
    assert len(compare(ours, theirs).judgement.outputs) == 2
    with pytest.raises(UsageError, match="several traces of one rank"):
        MergedSource([source("candidate", tensors), source("candidate", tensors)])


def test_sites_and_origins_come_from_the_candidates_documents(tensors):
    reference = source("reference", dict(tensors) | {"a/softmax#0:0": tensors["a/forward#0:0"]})
    documents = {
        "sites": json.dumps(
            [{"operator": "attention", "calls": ["a/softmax#0", "b/forward#0"], "op_class": "sensitive"}]
        )
    }
    ours = source("candidate", tensors, documents=documents, **{"b/forward#0:0": {"site": "attention@b/forward#0"}})
    assert compare_traces(ours, reference).nodes[3].pairing is Pairing.FUSED_AWAY


def test_a_comparison_survives_json_exactly_with_nan_and_infinity(tensors):
    ours = {name: array.copy() for name, array in tensors.items()}
    ours["a/forward#0:0"][0, 0] = np.inf
    ours["b/forward#0:0"][:] = 0
    zero = dict(tensors) | {"b/forward#0:0": np.zeros((8, 16), np.float32)}
    for reference in (tensors, zero):
        found = compare_traces(
            source("candidate", ours), source("reference", reference), source("baseline", noisy(tensors, 0.1))
        )
        text = to_json(found)
        assert "NaN" not in text
        assert "Infinity" not in text
        assert repr(from_json(text)) == repr(found)
        assert to_json(from_json(text)) == text
    for wrong in ("", "{}", '{"schema": "align.comparison/0"}', "[]"):
        with pytest.raises(UsageError, match="not a comparison"):
            from_json(wrong)


def test_a_path_that_is_not_there_or_holds_no_trace_is_a_two_line_error(tmp_path):
    for place in (tmp_path / "none.h5", tmp_path):
        with pytest.raises(AlignError) as caught, open_source(place):
            pass
        assert len(str(caught.value).splitlines()) == 2


def written(path, source):
    """Write a trace in memory to a file."""
    with TraceWriter.create(path, source.header) as writer:
        for record in source.nodes:
            writer.put(record, source.read(record.key))
    return path


def test_files_and_folders_of_ranks_give_what_memory_gives(tensors, tmp_path):
    runs = {
        role: [source(role, noisy(tensors, size, seed=rank), rank=rank) for rank in (0, 1)]
        for role, size in SIZES.items()
    }
    for role, ranks in runs.items():
        (tmp_path / role).mkdir()
        for rank, one in enumerate(ranks):
            written(tmp_path / role / f"rank{rank}.h5", one)
    ours = compare_folders(*(tmp_path / role for role in SIZES))
    assert ours == compare_traces(*(MergedSource(runs[role]) for role in SIZES))
    assert align_compare(*(str(tmp_path / role / "rank1.h5") for role in SIZES)).comparison.nodes == tuple(
        node for node in ours.nodes if node.key.rank == 1
    )


def test_other_tools_dumps_are_opened_directly(tensors, tmp_path):
    for role in ("candidate", "reference"):
        (tmp_path / role).mkdir()
        for name, array in noisy(tensors, 0.1 if role == "candidate" else 0.0).items():
            np.save(tmp_path / role / f"{name.split('/')[0] or 'root'}.npy", array)
    found = compare(tmp_path / "candidate", tmp_path / "reference")
    assert found.comparison.coverage.compared == 3


def test_samples_are_compared_with_samples_and_with_whole_tensors_and_say_where(tensors):
    reference = {"a/forward#0:0": np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)}
    ours = noisy(reference, 0.1)
    at = sample_positions(NodeKey("a", "forward"), 64_000)
    runs = {}
    for role, run in (("candidate", ours), ("reference", reference)):
        runs[role] = source(role, run)
        runs[f"sampled {role}"] = source(role, run, **{"a/forward#0:0": {"storage": Storage.SAMPLE}})
        runs[f"sampled {role}"]._tensors[NodeKey("a", "forward")] = RawTensor(
            run["a/forward#0:0"].ravel()[at], "float32"
        )
    pairs = [
        ("sampled candidate", "reference"),
        ("candidate", "sampled reference"),
        ("sampled candidate", "sampled reference"),
    ]
    found = [compare_traces(runs[one], runs[other]) for one, other in pairs]
    measured = found[0].nodes[0].candidate
    assert [comparison.nodes[0].candidate for comparison in found] == [measured] * 3
    error = np.abs(ours["a/forward#0:0"] - reference["a/forward#0:0"])
    assert measured.count == 4096
    assert error[measured.max_abs_index] == pytest.approx(measured.max_abs) == error.ravel()[at].max()
    assert any("sample" in warning for warning in found[0].warnings)


def test_samples_under_different_names_are_not_compared(tensors):
    sampled = {"storage": Storage.SAMPLE}
    ours = source(
        "candidate", {"module.a/forward#0:0": 2 * tensors["a/forward#0:0"]}, **{"module.a/forward#0:0": sampled}
    )
    found = compare_traces(ours, source("reference", tensors, **{"a/forward#0:0": sampled}))
    assert found.nodes[0].candidate is None
    assert "different names" in found.nodes[0].problem


def test_large_tensors_are_streamed_to_the_same_figures(monkeypatch, tmp_path):
    reference = {"a/forward#0:0": np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)}
    ours = noisy(reference, 0.1)
    files = [
        written(tmp_path / f"{role}.h5", source(role, run))
        for role, run in (("candidate", ours), ("reference", reference))
    ]
    whole = compare(*files)
    monkeypatch.setattr("align.compare.measuring.LARGE_NBYTES", 1000)
    monkeypatch.setattr("align.compare.traces.LARGE_NBYTES", 1000)
    monkeypatch.setattr("align.compare.measuring._CHUNK_ELEMENTS", 7001)
    assert compare(*files) == whole


def test_the_module_itself_compares(tensors):
    result = align_compare(
        source("candidate", noisy(tensors, 0.5)), source("reference", tensors), source("baseline", noisy(tensors, 0.1))
    )
    assert result.judgement.status is Status.DRIFT
    assert result.judgement.policy == "cann-l1"
    with pytest.raises(UsageError, match="unknown policy"):
        align_compare(source("candidate", tensors), source("reference", tensors), policy="can-l1")


def test_importing_the_module_imports_no_engine():
    code = "import align.compare, sys; print(sorted({'numpy', 'numba', 'h5py', 'torch'} & set(sys.modules)))"
    root = Path(__file__).parents[2]  # a checkout imports from where it lies
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert ended.stdout.strip() == "[]"
