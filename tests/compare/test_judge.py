import math
from dataclasses import replace

import numpy as np
import pytest

from align.compare.judge import final_outputs, judge
from align.compare.judge_rules import chance_ratio
from align.compare.measures import measure
from align.compare.model import Comparison, Coverage, Measures, NodeComparison, Pairing, Status
from align.compare.policy import POLICIES, policy_named
from align.compare.tolerance import NodeLimit, NoiseFloors
from align.dumpers.dtypes import RawTensor
from align.dumpers.model import NodeKey, NodeKind, OpClass

ROOT = NodeKey("", "forward")


def bf16(values):
    """Round to the nearest bfloat16, ties to even, kept as float32 values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def carried(values):
    return RawTensor((np.ascontiguousarray(bf16(values)).view(np.uint32) >> 16).astype(np.uint16), "bfloat16")


def distance(candidate, reference):
    return measure(carried(candidate), RawTensor(np.asarray(reference, np.float32), "float32"), threads=1)


def figures(**changes):
    """Measures of a million-element node with an error of 1 %, changed as told."""
    plain = dict.fromkeys(Measures.__slots__, 0.0) | dict.fromkeys(
        (
            "small_count",
            "small_errors",
            "zero_rows",
            "nan_candidate",
            "nan_reference",
            "inf_candidate",
            "inf_reference",
            "mismatched",
        ),
        0,
    )
    plain |= {
        "count": 1_000_000, "cosine_distance": 5e-5, "max_abs": 0.05, "max_abs_index": (0,), "rel_l2": 0.01,
        "mare": 50.0,
        "mere": 0.03, "rmse": 0.01, "mare_normal": 2.0, "mere_normal": 0.03, "share_close": 0.1, "min_reference": -5.0,
        "max_reference": 5.0,
    }  # fmt: skip
    return Measures(**(plain | changes))


def node(key=ROOT, *, candidate=None, baseline=None, **fields):
    standard = {
        "order": 1,
        "kind": NodeKind.MODULE,
        "op_class": OpClass.ORDINARY,
        "type_name": "T",
        "dtype": "bfloat16",
        "shape": (1000, 1000),
        "pairing": Pairing.EXACT,
    }
    return NodeComparison(key=key, candidate=candidate, baseline=baseline, **(standard | fields))


def compare(*nodes):
    return Comparison(nodes, Coverage(len(nodes), len(nodes), 0, 0, 0, 0), has_baseline=True)


def verdict(found, policy="cann-l1", **options):
    return judge(compare(found), policy_named(policy), **options).verdicts[0]


@pytest.mark.parametrize(("policy", "limit"), [("cann-l0", 2.0), ("cann-l1", 1.5), ("cann-l2", 1.2)])
def test_an_error_ratio_above_the_level_is_drift_and_below_it_passes(policy, limit):
    base = figures()
    over = verdict(node(candidate=figures(rel_l2=0.0101 * limit), baseline=base), policy)
    under = verdict(node(candidate=figures(rel_l2=0.0099 * limit), baseline=base), policy)
    assert (over.status, over.metric, over.limit) == (Status.DRIFT, "rmse_ratio", limit)
    assert under.status is Status.PASS


def test_sensitive_operators_get_four_fifths_of_the_allowance():
    found = node(candidate=figures(rel_l2=0.0145), baseline=figures(), op_class=OpClass.SENSITIVE)
    assert verdict(found).limit == pytest.approx(1.4)
    assert verdict(found).status is Status.DRIFT
    assert verdict(replace(found, op_class=OpClass.ORDINARY)).status is Status.PASS


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "ignore"])
def test_a_candidate_nearer_than_the_baseline_is_never_at_fault(policy):
    bad = figures(
        rel_l2=0.9,
        max_abs=40.0,
        cosine_distance=0.5,
        mare_normal=1e6,
        mere_normal=50.0,
        small_errors=900,
        small_count=1000,
    )
    better = replace(bad, rel_l2=0.89)
    assert (
        verdict(
            node(candidate=better, baseline=replace(bad, small_errors=0, mare_normal=1.0, mere_normal=1.0)), policy
        ).status
        is Status.PASS
    )


def test_a_tiny_baseline_error_does_not_make_one_rounding_a_fault():
    one_rounding = figures(rel_l2=0.0015, max_abs=2.0**-7, mere_normal=0.002)
    tiny = figures(rel_l2=1e-9, max_abs=1e-9, mere_normal=1e-9, mare_normal=1e-9)
    assert verdict(node(candidate=one_rounding, baseline=tiny)).status is Status.PASS


def test_a_tiny_baseline_error_does_not_hide_a_fault_either():
    tiny = figures(rel_l2=1e-9, max_abs=1e-9, mere_normal=1e-9)
    assert verdict(node(candidate=figures(rel_l2=0.05), baseline=tiny)).status is Status.DRIFT


@pytest.mark.parametrize(("error", "status"), [(2e-5, Status.PASS), (2.6e-4, Status.DRIFT), (6.6e-3, Status.DRIFT)])
def test_a_float32_baseline_equal_to_the_reference_leaves_the_absolute_rule(error, status):
    """2e-5: another order of long sums; 2.6e-4: inputs in HF32; 6.6e-3: inputs in bfloat16."""
    same = figures(rel_l2=0.0, max_abs=0.0, mere_normal=0.0, mare_normal=0.0, rmse=0.0)
    ours = figures(rel_l2=error, max_abs=5 * error, mere_normal=10 * error, mare_normal=1e4 * error)
    assert verdict(node(candidate=ours, baseline=same, dtype="float32")).status is status


def test_a_large_mare_alone_convicts_nobody_but_a_large_error_in_one_place_does():
    base = figures()
    by_chance = verdict(node(candidate=figures(mare=5e6, mare_normal=200.0), baseline=base))
    local = verdict(node(candidate=figures(max_abs=0.6), baseline=base))
    assert by_chance.status is Status.PASS
    assert (local.status, local.metric) == (Status.DRIFT, "max_abs_ratio")


def test_small_value_errors_count_only_beyond_chance_and_with_a_larger_error():
    base = figures(small_count=1000, small_errors=10)
    assert (
        verdict(node(candidate=figures(rel_l2=0.011, small_count=1000, small_errors=25), baseline=base)).status
        is Status.PASS
    )
    over = verdict(node(candidate=figures(rel_l2=0.011, small_count=1000, small_errors=90), baseline=base))
    assert (over.status, over.metric, over.value) == (Status.DRIFT, "small_error_ratio", 9.0)
    assert verdict(node(candidate=figures(small_count=1000, small_errors=90), baseline=base)).status is Status.PASS


def test_few_elements_raise_the_limit_to_what_chance_explains():
    few = verdict(node(candidate=figures(count=64, rel_l2=0.006), baseline=figures(count=64, rel_l2=0.003)))
    assert few.status is Status.PASS
    assert few.limit == pytest.approx(chance_ratio(8.0))


def test_chance_ratio_is_the_quantile_of_simulated_ratios():
    rng = np.random.default_rng(1)
    for count in (8, 32, 128):
        squares = rng.chisquare(count, (2, 400_000))
        ratios = np.sqrt(squares[0] / squares[1])
        assert np.mean(ratios > chance_ratio(count)) == pytest.approx(1e-4, abs=7e-5)


@pytest.mark.parametrize(
    ("changes", "fields", "status"),
    [
        ({"nan_candidate": 3, "mismatched": 3}, {}, Status.NONFINITE),
        ({"inf_candidate": 1, "inf_reference": 1, "mismatched": 1}, {}, Status.NONFINITE),  # +Inf against -Inf
        ({"nan_candidate": 16, "nan_reference": 16}, {}, Status.PASS),  # both sides agree: it came with the input
        ({"nan_reference": 16, "mismatched": 16}, {}, Status.REFERENCE_SUSPECT),
        ({"rel_l2": 0.2, "zero_rows": 2}, {}, Status.COLLAPSED),
        ({"zero_rows": 2}, {}, Status.PASS),  # rows of tiny values that rounded to zero
        (None, {"pairing": Pairing.MISSING, "problem": "no node"}, Status.MISSING),
        (None, {"pairing": Pairing.FUSED_AWAY}, Status.FUSED_AWAY),
        (None, {"pairing": Pairing.EXTRA}, Status.UNKNOWN),
        (None, {"problem": "shape 2x3 against 2x4"}, Status.MISMATCH),
        (None, {"problem": "dtype int64 against float32"}, Status.MISMATCH),
        (None, {"problem": "statistics only: mean 1 against 1"}, Status.UNKNOWN),
    ],
)
def test_each_status_has_its_figures_in_words(changes, fields, status):
    measures = None if changes is None else figures(**changes)
    found = verdict(node(candidate=measures, baseline=None if measures is None else figures(), **fields))
    assert found.status is status
    assert found.why or fields.get("pairing") or fields.get("problem")


def test_overflow_that_the_baseline_shares_is_told_apart():
    both = figures(inf_candidate=4, mismatched=4)
    assert "not the candidate's choices" in verdict(node(candidate=both, baseline=both)).why


def test_two_runs_that_agree_far_from_the_reference_after_right_inputs_accuse_the_reference():
    right = node(NodeKey("a", "forward"), candidate=figures(), baseline=figures(), order=0)
    far = node(
        candidate=figures(rel_l2=0.7, max_abs=4.0), baseline=figures(rel_l2=0.701, max_abs=4.0), producers=(right.key,)
    )
    assert judge(compare(right, far), policy_named("cann-l1")).verdicts[1].status is Status.REFERENCE_SUSPECT
    wrong = replace(right, candidate=figures(rel_l2=0.6), baseline=figures(rel_l2=0.6))
    assert judge(compare(wrong, far), policy_named("cann-l1")).verdicts[1].status is Status.PASS


@pytest.mark.parametrize(
    ("dtype", "ours", "base", "status"),
    [("int64", 0.0, None, Status.PASS), ("int64", 1.0, None, Status.DRIFT), ("int8", 1.0, None, Status.PASS),
     ("int8", 2.0, None, Status.DRIFT), ("bool", 1.0, 0.0, Status.DRIFT), ("int64", 9.0, 9.0, Status.PASS)],
)  # fmt: skip
def test_integers_must_be_equal_and_quantised_ones_within_one(dtype, ours, base, status):
    baseline = None if base is None else figures(max_abs=base, share_close=0.9 if base else 1.0)
    assert (
        verdict(node(candidate=figures(max_abs=ours, share_close=0.9), baseline=baseline, dtype=dtype)).status is status
    )


def test_without_a_baseline_the_standard_holds_on_the_scale_of_a_network():
    inner = [
        node(NodeKey(f"l{i}", "forward"), candidate=figures(), order=i, producers=(NodeKey(f"l{i - 1}", "forward"),))
        for i in range(16)
    ]

    def status(error):
        last = node(candidate=figures(rel_l2=error), order=20, producers=(inner[-1].key,))
        return judge(compare(*inner, last), policy_named("cann-l1")).verdicts[-1]

    assert status(0.03).status is Status.PASS
    assert status(0.04).status is Status.DRIFT
    assert status(0.03).limit == pytest.approx(2.0**-7 * math.sqrt(16))


def test_a_float32_node_inside_a_bfloat16_model_has_the_models_precision():
    before = node(NodeKey("a", "forward"), candidate=figures(rel_l2=0.003), order=0)
    widened = node(candidate=figures(rel_l2=0.003), order=1, dtype="float32", producers=(before.key,))
    assert judge(compare(before, widened), policy_named("standard")).verdicts[1].status is Status.PASS
    assert verdict(replace(widened, producers=()), "standard").status is Status.DRIFT


def test_the_letter_of_the_absolute_standard_passes_without_more():
    exact = figures(rel_l2=0.02, mere_normal=0.001, mare_normal=0.01)
    assert verdict(node(candidate=exact), "standard").metric == "mere"


def test_the_cosine_policy_looks_at_cosine_and_largest_error_only():
    base = figures(cosine_distance=1e-9, max_abs=0.0, rel_l2=0.0)
    assert verdict(node(candidate=figures(rel_l2=0.04, mere_normal=9.0), baseline=base), "cosine").status is Status.PASS
    assert verdict(node(candidate=figures(cosine_distance=2e-3), baseline=base), "cosine").metric == "cosine_distance"
    assert verdict(node(candidate=figures(max_abs=0.6), baseline=base), "cosine").metric == "max_abs"


def test_auto_judges_by_the_measured_spread_and_falls_back_without_one():
    floors = NoiseFloors((NodeLimit(ROOT, 0.02, 0.2, 0.01, 0.0, 8),))
    base = figures(rel_l2=0.009)
    assert verdict(node(candidate=figures(rel_l2=0.019), baseline=base), "auto", floors=floors).status is Status.PASS
    over = verdict(node(candidate=figures(rel_l2=0.021), baseline=base), "auto", floors=floors)
    assert (over.status, over.limit) == (Status.DRIFT, 0.02)
    assert verdict(node(candidate=figures(rel_l2=0.019), baseline=base), "auto").status is Status.DRIFT


def test_the_longest_glob_decides_an_override():
    found = node(NodeKey("unet.mid.attn", "forward"), candidate=figures(rel_l2=0.018), baseline=figures())
    rules = (("unet.*", POLICIES["cann-l2"]), ("unet.mid.*", POLICIES["cann-l0"]))
    assert verdict(found, overrides=rules).status is Status.PASS
    assert verdict(found, overrides=rules[:1]).status is Status.DRIFT
    assert verdict(found, overrides=(("*attn*", POLICIES["ignore"]),)).status is Status.UNKNOWN


def test_an_inner_fault_decides_the_run_though_the_output_passes():
    inner = node(NodeKey("q", "forward"), candidate=figures(rel_l2=0.1), baseline=figures(), order=0)
    output = node(candidate=figures(), baseline=figures(), producers=(inner.key,))
    result = judge(compare(inner, output), policy_named("cann-l1"))
    assert result.status is Status.DRIFT
    assert result.origins == (inner.key,)
    assert "q/forward#0:0" in result.why
    assert "/forward#0:0 pass" in result.why
    accepted = judge(compare(inner, output), policy_named("cann-l1"), overrides=(("q", POLICIES["ignore"]),))
    assert accepted.status is Status.PASS


def test_a_missing_inner_node_does_not_decide_the_run_but_a_missing_output_does():
    missing = node(NodeKey("a", "mul"), pairing=Pairing.MISSING, problem="no node", order=0)
    output = node(candidate=figures(), baseline=figures())
    passed = judge(compare(missing, output), policy_named("cann-l1"))
    assert (passed.status, passed.verdicts[0].status) == (Status.PASS, Status.MISSING)
    assert "1 nodes are missing" in passed.why
    assert judge(compare(missing, output), policy_named("cann-l1"), outputs=(missing.key,)).status is Status.MISSING


def test_a_missing_node_inside_a_compared_module_is_accounted_for():
    module = node(NodeKey("block.attn", "forward"), candidate=figures(), baseline=figures())
    missing = node(NodeKey("block.attn", "softmax"), pairing=Pairing.MISSING, problem="no node", order=0)
    assert judge(compare(missing, module), policy_named("cann-l1")).verdicts[0].status is Status.UNKNOWN


def test_nothing_measured_is_never_a_pass():
    nothing = judge(compare(node(problem="no data kept: absent against tensor")), policy_named("cann-l1"))
    assert nothing.status is Status.UNKNOWN
    assert (
        judge(Comparison((), Coverage(0, 0, 0, 0, 0, 0), has_baseline=False), policy_named("cann-l1")).status
        is Status.UNKNOWN
    )


def test_final_outputs_are_the_roots_of_the_last_step():
    keys = [NodeKey("", "forward", step=step, slot=slot) for step in (0, 1) for slot in ("0", "1")]
    assert final_outputs(compare(*(node(key) for key in keys))) == tuple(keys[2:])


def legitimate_runs(rng, width, depth):
    """One random residual network in float32, and twice in bfloat16 with other rounding points: unfused, fused."""
    x = rng.standard_normal((max(4, 2048 // width), width)).astype(np.float32)
    runs = [x, bf16(x), bf16(x)]
    for _ in range(depth):
        a, b = (bf16(rng.standard_normal((width, width)) / math.sqrt(width)) for _ in range(2))
        exact, unfused, fused = runs

        def norm(values, keep):
            scaled = keep(values / np.sqrt(np.mean(keep(values * values), axis=-1, keepdims=True) + 1e-6))
            return scaled.astype(np.float32)

        def same(values):
            return values

        h = [norm(exact, same) @ a, bf16(norm(unfused, bf16) @ a), norm(bf16(fused), same) @ a]
        act = [values / (1 + np.exp(-values)) for values in h]
        act[1], act[2] = bf16(act[1]), bf16(act[2])
        runs = [exact + act[0] @ b, bf16(unfused + bf16(act[1] @ b)), bf16(fused + act[2] @ b)]
        yield runs


def judged_runs(rng, policy, networks, side):
    """Statuses of all nodes of random networks; side 0: the fused run is the candidate, 1: the unfused one is."""
    for trial in range(networks):
        chain = []
        for at, (exact, *runs) in enumerate(legitimate_runs(rng, (4, 16, 64, 128)[trial % 4], 6)):
            unfused, fused = (distance(run, exact) for run in runs)
            ours, base = (unfused, fused) if side else (fused, unfused)
            above = (chain[-1].key,) if chain else ()
            chain.append(
                node(NodeKey(f"layer{at}", "forward"), order=at, candidate=ours, baseline=base, producers=above)
            )
        yield from (found.status for found in judge(compare(*chain), policy_named(policy)).verdicts)


@pytest.mark.parametrize("policy", ["cann-l0", "cann-l1", "cann-l2"])
def test_a_legitimate_fused_run_is_hardly_ever_at_fault(policy):
    statuses = list(judged_runs(np.random.default_rng(7), policy, networks=60, side=0))
    assert len(statuses) == 360
    assert all(status is Status.PASS for status in statuses)


@pytest.mark.parametrize("policy", ["cann-l0", "cann-l1"])
def test_a_legitimate_run_with_more_roundings_than_the_baseline_is_hardly_ever_at_fault(policy):
    statuses = list(judged_runs(np.random.default_rng(8), policy, networks=60, side=1))
    assert sum(status is not Status.PASS for status in statuses) <= 1


@pytest.mark.parametrize("fault", ["int8", "row", "scale", "tanh", "head"])
def test_planted_faults_in_a_bfloat16_tensor_are_caught(fault):
    rng = np.random.default_rng(3)
    exact = rng.standard_normal((256, 128)).astype(np.float32)
    noise = [exact * (1 + 0.003 * rng.standard_normal(exact.shape)) for _ in range(2)]
    wrong = noise[1].copy()
    if fault == "int8":
        wrong[:, 0] *= 30
        step = np.abs(wrong).max() / 127
        wrong = np.round(wrong / step) * step
        wrong[:, 0] /= 30
    elif fault == "row":
        wrong[17] = 0
    elif fault == "scale":
        wrong *= 1.02
    elif fault == "tanh":
        wrong = np.tanh(wrong)
    else:
        wrong[:, 32:48] = wrong[:, 48:64]
    found = verdict(node(candidate=distance(wrong, exact), baseline=distance(noise[0], exact)))
    assert found.status is (Status.COLLAPSED if fault == "row" else Status.DRIFT)
