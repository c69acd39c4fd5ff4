"""The gate: each limit's three outcomes, the budget's rule, and whole runs with their exit codes and JUnit files."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from junitparser import Failure, JUnitXml, Skipped

from align.cli import main
from align.compare.model import Comparison, Coverage, Judgement, Measures, NodeComparison, Pairing, Status
from align.dumpers.choice import Plan
from align.dumpers.errors import ConfigError
from align.dumpers.model import NodeKey, NodeKind, OpClass
from align.dumpers.survey import CallGraph, CallRecord
from align.gating.budget import allowed_error, budget_checks, entry_of, review
from align.gating.checks import check_limits
from align.gating.limits import ErrorLimits, parse_limit, read_limits
from align.gating.model import Check, GateResult, Outcome
from align.gating.outputs import gate_annotations, gate_json, gate_junit, gate_lines, gate_markdown
from align.operators._patterns import take
from align.operators.base import Kernel, Match, Operator
from align.operators.registry import register, unregister
from align.reports.forge import Flavour
from align.reports.junit import CaseUnit
from align.reports.model import Confidence, Quantiles, RoleRow, RunReport, Timing
from align.settings import GateSettings, load_settings

ZERO = Measures(**{field.name: () if field.name == "max_abs_index" else 0 for field in fields(Measures)})  # type: ignore[arg-type]


def measures(rel_l2: float, **more: Any) -> Measures:
    return replace(ZERO, rel_l2=rel_l2, count=10_000, **more)


def node(key: str, error: float, base: float = 0.01, **more: Any) -> NodeComparison:
    told: dict[str, Any] = {
        "candidate": measures(error),
        "baseline": measures(base),
        "pairing": Pairing.EXACT,
        "dtype": "bfloat16",
    }
    return NodeComparison(NodeKey.parse(key), 0, NodeKind.CALL, OpClass.ORDINARY, "", shape=(100, 100), **(told | more))


def timing(speedup: float, low: float, high: float, **more: Any) -> Timing:
    rounds = Quantiles(1.0, 0.9, 1.1, 9)
    return Timing(rounds, rounds, speedup, low, high, Confidence.FASTER, **more)


def report(*nodes: NodeComparison, status: Status = Status.PASS, why: str = "all well", **more: Any) -> RunReport:
    role = RoleRow("candidate", Plan("candidate", "cpu", "bfloat16"), "candidate.h5", 1.0, len(nodes), "")
    comparison = Comparison(nodes, Coverage(10, 8, 1, 1, 0, 0), has_baseline=True)
    told = {"environment": (("torch", "2.13.0"),)} | more
    return RunReport("demo", "", (role,), comparison, Judgement("cann-l1", (), status, why), **told)


def only(found: tuple[Check, ...], name: str) -> Check:
    (check,) = (check for check in found if check.name == name)
    return check


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "outcome", "code"),
    [(Status.PASS, Outcome.OK, 0), (Status.DRIFT, Outcome.MISSED, 1), (Status.NONFINITE, Outcome.MISSED, 1),
     (Status.REFERENCE_SUSPECT, Outcome.CANNOT_TELL, 3), (Status.UNKNOWN, Outcome.CANNOT_TELL, 3)],
)  # fmt: skip
def test_the_policy_decides_by_the_status_of_the_run(status: Status, outcome: Outcome, code: int) -> None:
    seen = report(status=status)
    (check,) = check_limits(seen, GateSettings())
    assert (check.name, check.outcome) == ("policy cann-l1", outcome)
    assert GateResult(seen, (check,)).exit_code == code


def test_under_the_policy_ignore_only_limits_decide() -> None:
    seen = report(status=Status.UNKNOWN)
    seen = replace(seen, judgement=replace(seen.judgement, policy="ignore"))
    assert check_limits(seen, GateSettings())[0].outcome is Outcome.OK


def test_a_missed_limit_outweighs_one_that_cannot_be_told() -> None:
    checks = tuple(Check(outcome, outcome, 0.0, 0.0, "") for outcome in Outcome)
    assert GateResult(report(), checks).exit_code == 1
    assert GateResult(report(), checks[::2]).exit_code == 3
    assert GateResult(report(), ()).exit_code == 0


def test_the_longest_glob_that_names_a_node_holds() -> None:
    seen = report(node("unet.mid/linear#0:0", 0.03), node("unet.up/linear#0:0", 0.01))
    gate = GateSettings.model_validate({"limits": {"unet.*": 0.02, "unet.mid*": 0.05}})
    checks = check_limits(seen, gate)
    wide, narrow = only(checks, "limit unet.* rel_l2"), only(checks, "limit unet.mid* rel_l2")
    assert (wide.outcome, wide.value) == (Outcome.OK, 0.01)
    assert (narrow.outcome, narrow.value) == (Outcome.OK, 0.03)


def test_a_missed_error_limit_names_the_worst_node_and_all_over_it() -> None:
    seen = report(*(node(f"unet.{at}/linear#0:0", error) for at, error in enumerate((0.03, 0.001, 0.05))))
    check = check_limits(seen, GateSettings.model_validate({"limits": {"unet.*": 0.02}}))[1]
    assert check.outcome is Outcome.MISSED
    assert check.reason == "0.0500 at unet.2/linear#0:0, limit 0.0200; 2 of 3 nodes over it"
    assert check.details == ("unet.2/linear#0:0: 0.0500", "unet.0/linear#0:0: 0.0300")


def test_other_figures_can_be_limited_and_a_table_gives_a_check_a_figure() -> None:
    seen = report(node("a/linear#0:0", 0.03, base=0.01, candidate=measures(0.03, max_abs=2.0)))
    checks = check_limits(seen, GateSettings.model_validate({"limits": {"a": {"max_abs": 3.0, "excess": 2.0}}}))
    assert only(checks, "limit a max_abs").outcome is Outcome.OK
    assert (only(checks, "limit a excess").outcome, only(checks, "limit a excess").value) == (
        Outcome.MISSED,
        pytest.approx(3.0),
    )


def test_an_error_below_half_a_unit_in_the_last_place_is_no_excess() -> None:
    gate = GateSettings.model_validate({"limits": {"a": {"excess": 2.0}}})
    assert check_limits(report(node("a/cast#0:0", 0.0015, base=0.0)), gate)[1].value == 1.0
    assert check_limits(report(node("a/cast#0:0", 0.0050, base=0.0)), gate)[1].value == math.inf


def test_nan_on_one_side_misses_every_error_limit() -> None:
    seen = report(node("a/log#0:0", 0.0, candidate=measures(0.0, mismatched=1)))
    assert check_limits(seen, GateSettings.model_validate({"limits": {"a": 1e9}}))[1].outcome is Outcome.MISSED


def test_what_was_not_measured_cannot_be_told() -> None:
    gate = GateSettings.model_validate({"limits": {"a": 0.1}})
    hidden = node("a/mul#0:0", 0.0, candidate=None, pairing=Pairing.FUSED_AWAY)
    missing = node("a/mul#0:0", 0.0, candidate=None, pairing=Pairing.MISSING)
    assert check_limits(report(hidden), gate)[1].reason == "a fused kernel hides all its nodes, limit 0.100"
    assert check_limits(report(missing), gate)[1].outcome is Outcome.CANNOT_TELL
    assert check_limits(report(missing, node("a/add#0:0", 0.01)), gate)[1].reason.endswith(
        "worst of 1 node, 1 not measured"
    )


def test_a_glob_that_names_no_node_is_wrong_use() -> None:
    with pytest.raises(ConfigError, match="'nix' names no node") as caught:
        check_limits(report(node("unet.mid/linear#0:0", 0.0)), GateSettings.model_validate({"limits": {"nix": 1.0}}))
    assert caught.value.remedy == "module paths here: unet"


@pytest.mark.parametrize(
    ("interval", "outcome"), [((1.2, 1.4), Outcome.OK), ((1.0, 1.1), Outcome.MISSED), ((1.1, 1.3), Outcome.CANNOT_TELL)]
)
def test_a_speed_up_counts_only_with_its_whole_interval(interval: tuple[float, float], outcome: Outcome) -> None:
    seen = report(timing=timing(sum(interval) / 2, *interval, warnings=("spikes",)))
    check = check_limits(seen, GateSettings(min_speedup=1.2))[1]
    assert (check.name, check.outcome) == ("speed-up", outcome)
    assert check.reason.endswith("at least 1.20x; spikes")


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [((0.96, 1.1), Outcome.OK), ((0.5, 0.9), Outcome.MISSED), ((0.9, 1.0), Outcome.CANNOT_TELL)],
)
def test_a_slow_down_counts_only_with_its_whole_interval(interval: tuple[float, float], outcome: Outcome) -> None:
    seen = report(timing=timing(sum(interval) / 2, *interval))
    assert check_limits(seen, GateSettings(max_slowdown=1.05))[1].outcome is outcome


def test_limits_on_what_was_not_timed_cannot_be_told() -> None:
    gate = GateSettings(min_speedup=1.0, max_slowdown=1.0, max_memory_bytes=1)
    assert [check.outcome for check in check_limits(report(), gate)[1:]] == [Outcome.CANNOT_TELL] * 3


@pytest.mark.parametrize(
    ("peak", "outcome"), [(1e9, Outcome.OK), (3e9, Outcome.MISSED), (math.nan, Outcome.CANNOT_TELL)]
)
def test_peak_memory_is_limited_where_the_device_tells_it(peak: float, outcome: Outcome) -> None:
    seen = report(timing=timing(1.0, 0.9, 1.1, peak_bytes_candidate=peak))
    assert check_limits(seen, GateSettings(max_memory_bytes=2_000_000_000))[1].outcome is outcome


@pytest.mark.parametrize(("least", "outcome"), [(0.9, Outcome.OK), (0.95, Outcome.MISSED)])
def test_coverage_counts_what_was_compared_or_fused(least: float, outcome: Outcome) -> None:
    check = check_limits(report(), GateSettings(min_coverage=least))[1]
    assert (check.value, check.outcome) == (0.9, outcome)


def test_limits_are_read_from_figures_and_tables() -> None:
    read = read_limits({"a.*": 0.02, "b": {"max_abs": 1, "excess": math.inf}})
    assert read == {"a.*": ErrorLimits(rel_l2=0.02), "b": ErrorLimits(max_abs=1.0)}
    assert list(read["b"].stated) == [("max_abs", 1.0)]
    assert parse_limit("a:b.*=0.5") == ("a:b.*", {"rel_l2": 0.5})
    assert parse_limit("a/linear#0:0:max_abs=2") == ("a/linear#0:0", {"max_abs": 2.0})


@pytest.mark.parametrize(
    "limits", ['{"a" = -1}', '{"a" = "x"}', '{"a" = true}', '{"a" = {rel_l3 = 1}}', '{"a" = nan}', "3"]
)
def test_a_wrong_limit_is_an_error_that_names_the_key(tmp_path: Path, limits: str) -> None:
    path = tmp_path / "align.toml"
    path.write_text(f"[gate]\nlimits = {limits}\n")
    with pytest.raises(ConfigError, match=r"gate\.limits"):
        load_settings(path, {})


# -- budget -----------------------------------------------------------------------------------------------------------


def test_a_node_is_worse_only_beyond_tolerance_scatter_unit_and_floor() -> None:
    wide = node("a/linear#0:0", 0.0)
    assert allowed_error(wide, 0.01, 0.25, {}) == pytest.approx(0.0125)  # the tolerance
    small = replace(wide, candidate=replace(ZERO, count=64))
    assert allowed_error(small, 0.01, 0.25, {}) == pytest.approx(0.02)  # 8 / sqrt(64)
    assert allowed_error(wide, 0.0, 0.25, {}) == 2.0**-8  # half a unit in the last place of bfloat16
    assert allowed_error(wide, 0.01, 0.25, {"a/linear#0:0": 0.5}) == 0.5
    assert allowed_error(replace(wide, dtype="int64"), 0.0, 0.25, {}) == 0.0


def test_the_review_sorts_nodes_into_worse_better_new_and_gone() -> None:
    accepted = entry_of(report(*(node(f"{name}/linear#0:0", 0.02) for name in ("same", "worse", "better", "gone"))))
    now = report(
        *(
            node(f"{name}/linear#0:0", error)
            for name, error in (("same", 0.022), ("worse", 0.04), ("better", 0.01), ("new", 9.0))
        )
    )
    found = review(now, accepted, 0.25)
    assert [change.key for change in found.worse] == ["worse/linear#0:0"]
    assert [change.key for change in found.better] == ["better/linear#0:0"]
    assert (found.compared, found.new, found.gone) == (3, 1, 1)
    assert found.worse[0].line == "worse/linear#0:0: 0.0400, accepted 0.0200, allowed 0.0250"


def test_a_node_accepted_as_nonfinite_may_stay_so() -> None:
    broken = report(node("a/log#0:0", 0.0, candidate=measures(0.0, mismatched=3)))
    assert review(broken, entry_of(broken), 0.25).worse == ()
    assert len(review(report(node("a/log#0:0", 0.01)), entry_of(broken), 0.25).better) == 1
    assert len(review(broken, entry_of(report(node("a/log#0:0", 0.01))), 0.25).worse) == 1


@pytest.mark.parametrize(
    ("interval", "outcome"), [((1.0, 1.1), Outcome.MISSED), ((1.0, 1.2), Outcome.OK), ((1.4, 1.5), Outcome.OK)]
)
def test_a_speed_up_is_worse_only_if_its_whole_interval_is(interval: tuple[float, float], outcome: Outcome) -> None:
    accepted = entry_of(report(node("a/linear#0:0", 0.0), timing=timing(1.2, 1.1, 1.3)))
    now = report(node("a/linear#0:0", 0.0), timing=timing(sum(interval) / 2, *interval))
    checks, remarks = budget_checks(now, accepted, GateSettings())
    assert only(checks, "accepted speed-up").outcome is outcome
    assert any("faster than accepted" in remark for remark in remarks) is (interval[0] == 1.4)


def test_an_accepted_speed_up_that_was_not_timed_is_remarked() -> None:
    accepted = entry_of(report(node("a/linear#0:0", 0.0), timing=timing(1.2, 1.1, 1.3)))
    checks, remarks = budget_checks(report(node("a/linear#0:0", 0.0)), accepted, GateSettings())
    assert [check.name for check in checks] == ["accepted errors"]
    assert remarks == ("nothing was timed: the accepted speed-up of 1.20x was not checked",)


# -- outputs ----------------------------------------------------------------------------------------------------------

HOSTILE = GateResult(
    report(node("a/linear#0:0", 0.0)),
    (
        Check("limit `x`|\x1b[31m", Outcome.MISSED, math.inf, 0.1, "at a<b>|`\n::error::100%", ("first", "second")),
        Check("speed-up", Outcome.CANNOT_TELL, math.nan, 1.0, "not timed"),
    ),
    ("remark",),
)


def test_lines_tell_the_verdict_first_and_a_line_a_limit() -> None:
    lines = list(gate_lines(HOSTILE, top=5))
    assert lines[0] == "GATE FAIL: 1 of 2 limits missed (exit 1): demo"
    assert [line.split("  ")[1] for line in lines[1:2]] == ["missed"]
    assert lines[2].strip() == "second"
    assert lines[-1].strip() == "note         remark"


def test_json_holds_the_checks_and_the_run() -> None:
    body = json.loads(gate_json(HOSTILE))
    assert body["gate"]["exit_code"] == 1
    assert body["gate"]["checks"][0]["value"] == "Infinity"
    assert body["gate"]["checks"][1]["value"] is None
    assert body["run"]["workload"] == "demo"


def test_untrusted_text_cannot_leave_its_place() -> None:
    markdown = gate_markdown(HOSTILE, top=5)
    assert "\x1b" not in markdown
    assert "\\|'" in markdown
    annotations = gate_annotations(HOSTILE, Flavour.GITHUB).splitlines()
    assert [line.partition(" ")[0] for line in annotations] == ["::error", "::warning"]
    assert "100%25" in annotations[0]


def test_junit_has_a_suite_of_limits_beside_that_of_the_nodes() -> None:
    xml = JUnitXml.fromstring(gate_junit(HOSTILE, CaseUnit.NODE).encode())
    nodes, limits = xml
    assert [case.name for case in nodes] == ["verdict", "a/linear#0:0"]
    (missed,), (skipped,) = (case.result for case in limits)
    assert isinstance(missed, Failure)
    assert missed.text == "first\nsecond"
    assert isinstance(skipped, Skipped)


# -- whole runs -------------------------------------------------------------------------------------------------------

TARGET = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        return self.b(F.softplus(self.a(x)))

def build():
    return Net().eval(), (torch.randn(64, 64),)
"""


def softplus_operator(factor: float) -> Operator:
    """A fused kernel of a call that the catalog does not know, wrong by `factor`."""

    def find(record: CallRecord, graph: CallGraph) -> Match | None:
        return Match(made[0], (record.ident,), {"x": take(record, 0, "input")}) if record.op == "softplus" else None

    def unfused(x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x)

    def fused(x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x.float()).mul(factor).to(x.dtype)

    kernel = Kernel(fused, "softplus of the test")
    made = [
        Operator("test_softplus", OpClass.ORDINARY, "softplus", "", (find,), unfused, {"cpu": kernel},
                 lambda device, dtype, seed: {"x": torch.zeros(1, device=device, dtype=dtype)})
    ]  # fmt: skip
    return made[0]


@pytest.fixture
def planted() -> Iterator[Callable[[float], None]]:
    """Register the operator with a fault of some size; the last one holds."""

    def plant(factor: float) -> None:
        unregister("test_softplus")
        register(softplus_operator(factor))

    yield plant
    unregister("test_softplus")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Align = Callable[..., Ended]


@pytest.fixture
def align(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Align:
    """Run the command line in a folder with a small target; returns the exit code and what was written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "net.py").write_text(TARGET)
    (tmp_path / "align.toml").write_text(
        '[run]\ntarget = "net.py:build"\ndevice = "cpu"\nfuse = ["test_softplus"]\n[timing]\nbudget_seconds = 0.1\n'
    )

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["align", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


def failures(path: Path) -> dict[str, str]:
    """Name and message of every failed case of a JUnit file."""
    return {
        case.name: found.message
        for suite in JUnitXml.fromfile(str(path))
        for case in suite
        for found in case.result
        if isinstance(found, Failure)
    }


def test_a_sound_kernel_passes_with_exit_0(align: Align, planted: Callable[[float], None], tmp_path: Path) -> None:
    planted(1.0)
    (tmp_path / "align.toml").write_text(
        (tmp_path / "align.toml").read_text() + '[gate]\nmin_coverage = 0.9\n[gate.limits]\n"b" = 0.02\n'
    )
    ended = align("gate", "--junit", "junit.xml", "--sarif", "align.sarif", "--markdown", "summary.md", "--no-timing")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("GATE PASS: 3 limits kept (exit 0): net.py:build\n")
    assert failures(tmp_path / "junit.xml") == {}
    assert json.loads((tmp_path / "align.sarif").read_text())["runs"][0]["results"] == []
    assert "# Gate PASS" in (tmp_path / "summary.md").read_text()


def test_a_planted_fault_fails_with_exit_1_and_names_its_node(
    align: Align, planted: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(1.03)
    summary = tmp_path / "step.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ended = align(
        "gate",
        "--junit",
        "junit.xml",
        "--cases",
        "site",
        "--sarif",
        "align.sarif",
        "--annotations",
        "github",
        "--no-timing",
    )
    assert ended.code == 1
    failed = failures(tmp_path / "junit.xml")
    assert set(failed) == {"verdict", "test_softplus@/softplus#0", "policy cann-l1"}
    assert "first at /softplus#0:0" in failed["policy cann-l1"]
    (result,) = json.loads((tmp_path / "align.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "/softplus#0:0"
    assert "::error file=net.py,title=align/drift-origin::/softplus#0:0: drift" in ended.out
    assert summary.read_text().startswith("# Gate FAIL")


def test_speed_fails_with_exit_1_where_no_kernel_can_be_that_fast(
    align: Align, planted: Callable[[float], None], tmp_path: Path
) -> None:
    planted(1.0)
    ended = align("gate", "--min-speedup", "100", "--junit", "junit.xml", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["gate"]["outcome"] == "missed"
    failed = failures(tmp_path / "junit.xml")
    assert set(failed) == {"speed-up"}
    assert failed["speed-up"].startswith(("0.", "1.", "2."))


def test_a_node_worse_than_accepted_fails_with_exit_1(
    align: Align, planted: Callable[[float], None], tmp_path: Path
) -> None:
    planted(1.0)
    assert align("gate", "--accept", "--no-timing", "--out", "good").code == 0
    before = (tmp_path / "align.lock.json").read_text()
    assert '    "/softplus#0:0": ' in before
    again = align("gate", "--run", "good")
    assert again.code == 0
    assert "none of 7 nodes is worse than accepted" in again.out

    planted(1.006)
    ended = align("gate", "--policy", "standard", "--no-timing", "--out", "worse", "--junit", "junit.xml")
    assert ended.code == 1
    failed = failures(tmp_path / "junit.xml")
    assert set(failed) == {"accepted errors"}
    assert "worse than accepted, most at /softplus#0:0" in failed["accepted errors"]
    assert (tmp_path / "align.lock.json").read_text() == before

    assert align("gate", "--run", "worse", "--policy", "standard", "--accept").code == 0
    better = align("gate", "--run", "good", "--policy", "standard")
    assert better.code == 0
    assert "better than accepted, most /softplus#0:0" in better.out


def test_an_entry_of_another_environment_is_not_reused(
    align: Align, planted: Callable[[float], None], tmp_path: Path
) -> None:
    planted(1.0)
    assert align("gate", "--accept", "--no-timing", "--out", "good").code == 0
    lock = tmp_path / "align.lock.json"
    lock.write_text(lock.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    ended = align("gate", "--run", "good")
    assert ended.code == 3
    assert f"no entry for this environment; the nearest differs in torch 1.0 -> {torch.__version__}" in ended.out
    assert align("gate", "--run", "good", "--accept").code == 0
    assert len(json.loads(lock.read_text())["accepted"]) == 2
    assert align("gate", "--run", "good").code == 0


def test_gitlab_gets_a_code_quality_file_and_auto_needs_a_run_of_its_own(
    align: Align, planted: Callable[[float], None], tmp_path: Path
) -> None:
    planted(1.03)
    assert align("gate", "--no-timing", "--out", "bad", "--annotations", "gitlab", "-q").code == 1
    (found,) = json.loads((tmp_path / "gl-code-quality-report.json").read_text())
    assert found["location"]["path"] == "net.py"
    ended = align("gate", "--run", "bad", "--policy", "auto")
    assert ended.code == 2
    assert "bad holds no perturbed runs" in ended.err
    ignored = align("gate", "--run", "bad", "--policy", "ignore", "--limit", "b=0.5")
    assert ignored.code == 0, ignored.out


def test_wrong_use_ends_with_exit_2_and_two_lines(
    align: Align, planted: Callable[[float], None], tmp_path: Path
) -> None:
    for words in (
        ["--run", "nowhere"],
        ["net.py:build", "--run", "."],
        ["--limit", "x"],
        ["--annotations", "jenkins"],
        ["--policy", "cann-l9"],
    ):
        ended = align("gate", *words)
        assert ended.code == 2, words
        assert len(ended.err.splitlines()) == 2, words


def test_a_model_that_raises_ends_with_exit_3(align: Align, planted: Callable[[float], None], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TARGET.replace("torch.randn(64, 64)", "torch.randn(64, 3)"))
    ended = align("gate", "--no-timing")
    assert ended.code == 3
    assert "raised RuntimeError" in ended.err


def test_the_demo_drifts_with_its_int8_layers_fused_and_passes_without(align: Align, tmp_path: Path) -> None:
    (tmp_path / "align.toml").unlink()
    words = ["gate", "demo", "--device", "cpu", "--steps", "1", "--no-timing"]
    drifted = align(*words, "--junit", "drift.xml", "--cases", "site")
    assert drifted.code == 1
    assert any(name.startswith("quant_linear@") for name in failures(tmp_path / "drift.xml"))
    passed = align(*words, "--no-fuse", "quant_linear", "--junit", "pass.xml", "--cases", "site")
    assert passed.code == 0, passed.out
    assert failures(tmp_path / "pass.xml") == {}
