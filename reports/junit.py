"""Write a run as JUnit XML: a test case per node or per site, so that any CI shows which one failed and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TypeVar

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from junitparser.junitparser import FinalResult

from align.compare.model import Status
from align.reports.model import RunReport
from align.reports.numbers import figure, times
from align.reports.summary import NodeRow, headline, node_rows, worst_first
from align.reports.text import one_line

Result = TypeVar("Result", bound=FinalResult)
_UNJUDGED = (Status.FUSED_AWAY, Status.UNKNOWN, Status.REFERENCE_SUSPECT)


class CaseUnit(StrEnum):
    """What one test case stands for."""

    NODE = "node"
    SITE = "site"


def to_junit(report: RunReport, unit: CaseUnit = CaseUnit.NODE) -> str:
    """JUnit XML. Faults are failures, NaN and infinities errors, what cannot be judged is skipped with the reason."""
    suite = TestSuite(one_line(f"align {report.workload}"))
    cases = {CaseUnit.NODE: _node_cases, CaseUnit.SITE: _site_cases}[unit]
    # In one call: junitparser counts a suite's cases anew after each call, which takes minutes for 10,000 nodes.
    suite.add_testcases([_run_case(report), *cases(node_rows(report))])
    suite.add_property("policy", one_line(report.judgement.policy))
    for name, value in report.environment:
        suite.add_property(one_line(name), one_line(value))
    xml = JUnitXml("align")
    xml.add_testsuite(suite)
    written: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return written.decode("utf-8") + "\n"


def _run_case(report: RunReport) -> TestCase:
    """The verdict on the whole run, so that a run without nodes still says something."""
    top = headline(report)
    case = TestCase("verdict", classname="align.run")
    if top.status.is_fault:
        case.result = [_finding(Failure, top.sentence, top.word)]
    elif top.status in _UNJUDGED:
        case.result = [_finding(Skipped, top.sentence, top.word)]
    return case


def _node_cases(rows: Iterable[NodeRow]) -> Iterable[TestCase]:
    for row in rows:
        yield _case(row, one_line(str(row.node.key)), f"align.node.{row.node.key.path or 'root'}")


def _site_cases(rows: Iterable[NodeRow]) -> Iterable[TestCase]:
    """One case a fused site: of its nodes the worst."""
    sites: dict[str, list[NodeRow]] = {}
    for row in rows:
        if row.node.site:
            sites.setdefault(row.node.site, []).append(row)
    for site, members in sites.items():
        yield _case(worst_first(members)[0], one_line(site), f"align.site.{site.partition('@')[0]}")


def _case(row: NodeRow, name: str, group: str) -> TestCase:
    case = TestCase(name, classname=one_line(group))
    if row.status in _UNJUDGED:
        case.result = [_finding(Skipped, row.verdict.why or row.node.problem or row.status.value, row.status.value)]
    elif row.status.is_fault:
        why = row.verdict.why or row.node.problem or row.status.value
        result: Callable[[str, str], Error | Failure] = Error if row.status is Status.NONFINITE else Failure
        case.result = [_finding(result, why, row.status.value, _figures(row))]
    return case


def _finding(result: Callable[[str, str], Result], message: str, kind: str, body: str = "") -> Result:
    found = result(one_line(message), kind)
    if body:
        found.text = body
    return found


def _figures(row: NodeRow) -> str:
    verdict = row.verdict
    lines = [
        f"candidate rel_l2 {figure(row.candidate_error)}, baseline {figure(row.baseline_error)}",
        f"ratio {times(row.node.excess)}",
        f"max abs {figure(row.max_abs)}",
    ]
    if verdict.metric:
        lines.insert(0, f"{one_line(verdict.metric)} {figure(verdict.value)}, allowed {figure(verdict.limit)}")
    if row.node.site:
        lines.append(f"site {one_line(row.node.site)}")
    return "\n".join(lines)
