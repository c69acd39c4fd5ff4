"""The lock file: sorted, a line an entry, environments side by side, and broken files refused in two lines."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.compare.model import Comparison, Coverage, Judgement, Status
from align.dumpers.choice import Plan
from align.dumpers.errors import ConfigError, UsageError
from align.gating.lockfile import Accepted, differences, find_entry, fingerprint, read_lock, replace_entry, write_lock
from align.reports.model import RoleRow, RunReport

HERE = (("chip", "Ascend 910B"), ("device", "npu"), ("dtype", "bfloat16"), ("torch", "2.13.0"))
THERE = (("chip", "Ascend 310P"), ("device", "npu"), ("dtype", "float16"), ("torch", "2.13.0"))
ENTRY = Accepted(
    "unet.py:build", HERE, (("a/linear#0:0", 0.001234567), ("b/norm#0:0", 0.0)), "0123456789ab", 1.2345, 0.56789
)


def test_the_file_has_sorted_keys_and_one_entry_a_line(tmp_path: Path) -> None:
    path = tmp_path / "align.lock.json"
    write_lock(path, [ENTRY])
    text = path.read_text()
    lines = text.splitlines()
    assert '    "a/linear#0:0": 0.00123,' in lines
    assert '    "b/norm#0:0": 0.0' in lines
    assert '    "speedup": 1.23' in lines
    body = json.loads(text)
    assert text == json.dumps(body, indent=1, sort_keys=True) + "\n"
    (name,) = body["accepted"]
    assert name.startswith("unet.py:build | npu bfloat16 | Ascend 910B | ")


def test_what_was_written_is_read_to_three_digits(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    write_lock(path, [ENTRY])
    assert read_lock(path) == (
        replace(ENTRY, nodes=(("a/linear#0:0", 0.00123), ("b/norm#0:0", 0.0)), speedup=1.23, seconds=0.568),
    )


def test_infinite_errors_and_untimed_runs_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    write_lock(path, [replace(ENTRY, nodes=(("a/log#0:0", math.inf),), speedup=math.nan, seconds=math.nan)])
    (entry,) = read_lock(path)
    assert entry.nodes == (("a/log#0:0", math.inf),)
    assert math.isnan(entry.speedup)
    assert "speed" not in json.loads(path.read_text())["accepted"][entry.name]


@given(st.dictionaries(st.text(max_size=20), st.floats(0, 1e30), max_size=5))
def test_a_second_writing_changes_nothing(tmp_path_factory: pytest.TempPathFactory, nodes: dict[str, float]) -> None:
    path = tmp_path_factory.mktemp("lock") / "lock.json"
    write_lock(path, [replace(ENTRY, nodes=tuple(sorted(nodes.items())))])
    first = path.read_text()
    write_lock(path, read_lock(path))
    assert path.read_text() == first


def test_environments_live_side_by_side_and_only_the_like_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    other = replace(ENTRY, environment=THERE)
    newer = replace(ENTRY, nodes=(("a/linear#0:0", 0.5),))
    write_lock(path, replace_entry(replace_entry((ENTRY,), other), newer))
    entries = read_lock(path)
    assert len(entries) == 2
    found = find_entry(entries, "unet.py:build", HERE)
    assert found is not None
    assert found.nodes == (("a/linear#0:0", 0.5),)
    assert find_entry(entries, "other.py:build", HERE) is None
    assert find_entry(entries, "unet.py:build", (*HERE, ("threads", "4"))) is None


def test_differences_are_named_from_theirs_to_ours() -> None:
    assert differences(HERE, THERE) == ("chip Ascend 310P -> Ascend 910B", "dtype float16 -> bfloat16")
    assert differences((("threads", "4"),), ()) == ("threads unset -> 4",)


def test_the_fingerprint_leaves_out_what_changes_no_result() -> None:
    role = RoleRow("candidate", Plan("candidate", "cpu", "bfloat16"), "candidate.h5", 1.0, 1, "")
    environment = (
        ("torch", "2.13.0"),
        ("platform", "Linux-6.1"),
        ("python", "3.11.7"),
        ("threads", "2"),
        ("OMP_NUM_THREADS", "2"),
    )
    comparison = Comparison((), Coverage(0, 0, 0, 0, 0, 0), has_baseline=True)
    judgement = Judgement("cann-l1", (), Status.PASS, "")
    report = RunReport("demo", "", (role,), comparison, judgement, environment=environment)
    assert fingerprint(report) == (("device", "cpu"), ("dtype", "bfloat16"), ("threads", "2"), ("torch", "2.13.0"))


def test_no_file_is_no_entry(tmp_path: Path) -> None:
    assert read_lock(tmp_path / "lock.json") == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<<<<<<< HEAD\n{}",
        "[]",
        "{}",
        '{"schema_version": 2, "accepted": {}}',
        '{"schema_version": 1, "accepted": {"a": {"nodes": 3}}}',
        '{"schema_version": 1, "accepted": []}x',
    ],
)
def test_a_file_that_is_no_lock_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"lock\.json"):
        read_lock(path)


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_lock(tmp_path / "nowhere" / "lock.json", [ENTRY])
