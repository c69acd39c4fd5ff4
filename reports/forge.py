"""Write a run for code forges: SARIF for culprit sites, GitHub and GitLab annotations, a Markdown job summary."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from align.reports.ledger import fused_line, operator_rows, timing_findings
from align.reports.model import ChoiceState, CulpritCard, RunReport
from align.reports.numbers import count, figure, nbytes, times
from align.reports.summary import (
    NodeRow,
    coverage_line,
    headline,
    origin_rows,
    output_findings,
    worst_nodes,
)
from align.reports.text import one_line

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_RULES = {
    "align/culprit": "A fusion or precision choice whose error exceeds what rounding explains",
    "align/drift-origin": "The first node that is out of tolerance while its inputs are not",
    "align/verdict": "The run is out of tolerance",
}
_PYTHON_FILE = re.compile(r"^(?P<file>[^:*?\"<>|]+\.py)(?::.*)?$", re.DOTALL)
_MARKDOWN = re.compile(
    r"([\\`*_\[\]#!|~]|^[-+=]|(?<=^\d)[.)])"
)  # what starts a span anywhere, a block at the beginning


class Flavour(StrEnum):
    """Whose annotations."""

    GITHUB = "github"
    GITLAB = "gitlab"


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing to point at: the rule it breaks, the place in the model, and what to say."""

    rule: str
    place: str
    message: str
    is_fault: bool

    @property
    def fingerprint(self) -> str:
        """A digest of rule and place, so that a forge knows the same finding again in the next run."""
        return hashlib.sha256(f"{self.rule}\n{self.place}".encode("utf-8", "replace")).hexdigest()[:32]


def findings(report: RunReport) -> tuple[Remark, ...]:
    """Culprits if known, else the origins of drift, else the verdict of a failed run; empty when all is well."""
    is_fault = report.judgement.status.is_fault
    if report.culprits:
        return tuple(_culprit(card, is_fault=is_fault) for card in report.culprits)
    rows = origin_rows(report)
    if rows:
        return tuple(_origin(row) for row in rows)
    top = headline(report)
    return (
        (Remark("align/verdict", one_line(report.workload), f"{top.word}: {one_line(top.sentence)}", True),)
        if is_fault
        else ()
    )


def _culprit(card: CulpritCard, *, is_fault: bool) -> Remark:
    names = ", ".join(map(str, card.choices))
    drift = f"drift {figure(card.drift_with)} with it, {figure(card.drift_without)} without"
    message = f"{names}: {drift}; reproduced {card.reproduced} of {card.attempts}. {card.evidence}"
    return Remark("align/culprit", one_line(card.site or names), one_line(message), is_fault)


def _origin(row: NodeRow) -> Remark:
    verdict = row.verdict
    why = verdict.why or f"{verdict.metric} {figure(verdict.value)}, allowed {figure(verdict.limit)}"
    site = f" (site {row.node.site})" if row.node.site else ""
    return Remark(
        "align/drift-origin", one_line(str(row.node.key)), one_line(f"{row.status}: {why}{site}"), row.status.is_fault
    )


def to_sarif(report: RunReport) -> str:
    """SARIF 2.1.0, one result a culprit (or origin). The place is a logical location; the file is the workload's."""
    driver = {
        "name": "align",
        "rules": [{"id": rule, "shortDescription": {"text": text}} for rule, text in _RULES.items()],
    }
    run = {"tool": {"driver": driver}, "results": [_sarif_result(item, report) for item in findings(report)]}
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False) + "\n"


def _sarif_result(finding: Remark, report: RunReport) -> dict[str, Any]:
    return {
        "ruleId": finding.rule,
        "level": "error" if finding.is_fault else "warning",
        "message": {"text": f"{finding.place}: {finding.message}"},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": _source_file(report)}, "region": {"startLine": 1}},
                "logicalLocations": [{"fullyQualifiedName": finding.place, "kind": "member"}],
            }
        ],
        "partialFingerprints": {"align/v1": finding.fingerprint},
    }


def _source_file(report: RunReport) -> str:
    """The file of a `file.py:build` workload; else the settings file, since forges refuse a finding without a file."""
    match = _PYTHON_FILE.match(one_line(report.workload))
    return match["file"].replace("\\", "/") if match else "align.toml"


def to_annotations(report: RunReport, flavour: Flavour) -> str:
    """GitHub workflow commands, one a line, or GitLab's Code Quality JSON."""
    found = findings(report)
    if flavour is Flavour.GITHUB:
        return "".join(_github(item, _source_file(report)) + "\n" for item in found)
    return json.dumps([_gitlab(item, _source_file(report)) for item in found], indent=1) + "\n"


def _github(finding: Remark, file: str) -> str:
    level = "error" if finding.is_fault else "warning"
    message = _github_data(f"{finding.place}: {finding.message}")
    return f"::{level} file={_github_property(file)},title={_github_property(finding.rule)}::{message}"


def _github_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _github_property(text: str) -> str:
    return _github_data(text).replace(":", "%3A").replace(",", "%2C")


def _gitlab(finding: Remark, file: str) -> dict[str, Any]:
    return {
        "description": f"{finding.place}: {finding.message}",
        "check_name": finding.rule,
        "fingerprint": finding.fingerprint,
        "severity": "major" if finding.is_fault else "minor",
        "location": {"path": file, "lines": {"begin": 1}},
    }


def to_markdown(report: RunReport, *, top: int = 10) -> str:
    """A job page's summary: verdict, worst nodes, origins, culprits, fusions, timing."""
    blocks = [
        _verdict_block(report),
        _worst_block(report, top),
        _findings_block(report),
        _timing_block(report),
        _fused_block(report),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _verdict_block(report: RunReport) -> str:
    top = headline(report)
    lines = [f"## {top.mark} {top.word}: {_escaped(report.workload)}", "", _escaped(top.sentence), ""]
    lines += [
        f"- output {_code(item.label)}: relative L2 {item.value}" + (f" ({item.remark})" if item.remark else "")
        for item in output_findings(report)
    ]
    return "\n".join([*lines, f"- policy {_code(report.judgement.policy)}; {coverage_line(report)}"])


def _worst_block(report: RunReport, top: int) -> str:
    rows = worst_nodes(report, top)
    body = [
        (
            _cell(str(row.node.key)),
            figure(row.candidate_error),
            figure(row.baseline_error),
            times(row.node.excess),
            figure(row.max_abs),
            row.status.value,
        )
        for row in rows
    ]
    return (
        _block("Worst nodes", _table(("node", "candidate", "baseline", "ratio", "max abs", "status"), body))
        if rows
        else ""
    )


def _findings_block(report: RunReport) -> str:
    lines = [
        f"- {_code(item.place)}: {_escaped(item.message)}" for item in findings(report) if item.rule != "align/verdict"
    ]
    return _block("Culprits" if report.culprits else "Drift begins at", "\n".join(lines)) if lines else ""


def _timing_block(report: RunReport) -> str:
    if report.timing is None:
        return ""
    lines = [f"- {item.label}: **{item.value}** {_escaped(item.remark)}" for item in timing_findings(report.timing)]
    lines += [f"- warning: {_escaped(warning)}" for warning in report.timing.warnings]
    return _block("Timing", "\n".join(lines))


def _fused_block(report: RunReport) -> str:
    groups = operator_rows(report.choices)
    if not groups:
        return ""
    states = (ChoiceState.ON, ChoiceState.OFF, ChoiceState.UNAVAILABLE)
    body = [
        (
            _cell(f"{group.kind}:{group.name}"),
            *(count(group.count(state)) for state in states),
            nbytes(group.interior_nbytes),
            _escaped("; ".join(group.reasons)),
        )
        for group in groups
    ]
    table = _table(("choice", "on", "off", "unavailable", "interior bytes saved", "remark"), body)
    return f"<details><summary>{_escaped(fused_line(report.choices))}</summary>\n\n{table}\n\n</details>"


def _block(title: str, body: str) -> str:
    return f"### {title}\n\n{body}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(heads)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(text: str) -> str:
    """A code span around text that may hold backticks: the fence is longer than any run inside."""
    body = one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{fence} {body} {fence}" if "`" in body else f"`{body}`" if body else ""


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    plain = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", plain)
