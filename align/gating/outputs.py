"""Tell what the gate found: lines, JSON, JUnit, Markdown, annotations. Decides nothing; its texts are untrusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from align.gating.model import Check, GateResult, Outcome
from align.reports.forge import Flavour, to_annotations, to_markdown
from align.reports.junit import CaseUnit, to_junit
from align.reports.machine import as_object, plain
from align.reports.text import one_line

_WIDTH = max(len(outcome) for outcome in Outcome)
_SUITE = "align.gating.gate"


def gate_lines(result: GateResult, *, top: int) -> Iterator[str]:
    """Verdict first, then a line a limit with at most `top` more nodes below it, then remarks."""
    yield one_line(f"GATE {result.sentence} (exit {result.exit_code}): {result.report.workload}")
    for check in result.checks:
        yield f"  {check.outcome:<{_WIDTH}}  {one_line(check.line)}"
        yield from (f"  {'':<{_WIDTH}}    {one_line(detail)}" for detail in check.details[1 : top + 1])
        if top and len(check.details) > top + 1:
            yield f"  {'':<{_WIDTH}}    and {len(check.details) - top - 1} more"
    yield from (f"  {'note':<{_WIDTH}}  {one_line(remark)}" for remark in result.remarks)


def gate_json(result: GateResult) -> str:
    """One object: `gate` with outcome, exit code and checks, and `run` as `align run --json` writes it."""
    gate = {
        "outcome": result.outcome.value, "exit_code": result.exit_code, "sentence": result.sentence,
        "checks": plain(result.checks), "remarks": plain(result.remarks),
    }  # fmt: skip
    body: dict[str, Any] = {"schema_version": 1, "tool": "align", "gate": gate, "run": as_object(result.report)}
    return json.dumps(body, indent=1, allow_nan=False)


def gate_junit(result: GateResult, unit: CaseUnit) -> str:
    """JUnit XML: a suite of the nodes or sites, and one of the limits. What cannot be told is skipped, with why."""
    xml: Any = JUnitXml.fromstring(to_junit(result.report, unit).encode("utf-8"))
    suite = TestSuite(one_line(f"align gate {result.report.workload}"))
    suite.add_testcases([_case(check) for check in result.checks])
    xml.add_testsuite(suite)
    written: bytes = xml.tostring()
    return written.decode("utf-8") + "\n"


def _case(check: Check) -> TestCase:
    case = TestCase(one_line(check.name), classname=_SUITE)
    if check.outcome is Outcome.MISSED:
        found = Failure(one_line(check.reason), check.outcome.value)
        found.text = "\n".join(map(one_line, check.details))
        case.result = [found]
    elif check.outcome is Outcome.CANNOT_TELL:
        case.result = [Skipped(one_line(check.reason), check.outcome.value)]
    return case


def gate_markdown(result: GateResult, *, top: int) -> str:
    """A job page's summary: the limits first, then the run."""
    rows = [f"| {check.outcome} | {_code(check.name)} | {_code(check.reason)} |" for check in result.checks]
    remarks = [f"- {_code(remark)}" for remark in result.remarks]
    head = [f"# Gate {result.sentence}", "", "| | limit | found |", "| --- | --- | --- |", *rows, ""]
    return "\n".join([*head, *remarks, *([""] if remarks else []), to_markdown(result.report, top=top)])


def gate_annotations(result: GateResult, flavour: Flavour) -> str:
    """GitHub workflow commands for the run and each limit that is not kept; for GitLab its Code Quality JSON."""
    text = to_annotations(result.report, flavour)
    if flavour is Flavour.GITLAB:
        return text
    kinds = {Outcome.MISSED: "error", Outcome.CANNOT_TELL: "warning"}
    return text + "".join(
        f"::{kinds[check.outcome]} title=align gate {check.outcome}::{_command(check.line)}\n"
        for check in result.checks
        if check.outcome in kinds
    )


def _code(text: str) -> str:
    """A code span that no name can leave."""
    return "`" + one_line(text).replace("`", "'").replace("|", "\\|") + "`"


def _command(text: str) -> str:
    return one_line(text).replace("%", "%25")
