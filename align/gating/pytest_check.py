"""What the pytest plugin does once it is used: run objects three ways, hold them against limits, explain a failure."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from align.api import by_section, run_folder
from align.dumpers.errors import UsageError
from align.gating.checks import check_limits
from align.gating.model import GateResult
from align.gating.objects import finder, target_of
from align.gating.outputs import gate_lines
from align.progress import Silent
from align.reports.ledger import fused_line
from align.reports.numbers import figure
from align.reports.summary import NodeRow, against_baseline, origin_rows, output_findings, worst_nodes
from align.reports.text import one_line
from align.settings import Settings, load_settings
from align.three_way import ROLES, run_three_way

_NEEDS_TIMING = frozenset({"min_speedup", "max_slowdown", "max_memory_bytes"})
_LISTED = 3
_FILE = "FILE.py"


@dataclass(frozen=True, slots=True)
class Checked:
    """A result with what explains it: the settings, the words that name the workload to `align bisect`, hints."""

    result: GateResult
    settings: Settings
    target: tuple[str, ...]
    hints: tuple[str, ...] = ()


def check_objects(name: str, folder: Path, workload: Any, candidate: Any, options: dict[str, Any]) -> Checked:
    """Run a workload three ways into a folder. `candidate` is the fused variant, or () for the catalog's fusions.

    workload, candidate   what a target's function may return, a function that returns it, or the text of a target
    options               keys of align.toml; nothing is timed unless a limit or `enabled=True` asks for it
    Raises AlignError for wrong use and for models that fail.
    """
    settings = _settings(name, workload, candidate, options)
    targets = {
        text: target_of(text, made)
        for text, made in ((settings.run.target, workload), (settings.run.candidate, candidate))
        if text and not isinstance(made, str)
    }
    report = run_three_way(settings, run_folder(folder, name, force=False), ROLES, Silent(), find=finder(targets))
    return Checked(
        GateResult(report, check_limits(report, settings.gate)), settings, _words(workload, candidate), _hints(workload)
    )


def _settings(name: str, workload: Any, candidate: Any, options: dict[str, Any]) -> Settings:
    taken = sorted({"target", "candidate", "plan"} & options.keys())
    if taken:
        raise UsageError(
            f"align_check cannot take {', '.join(taken)} as options", "give model and candidate as its first arguments"
        )
    told = {"enabled": bool(_NEEDS_TIMING & options.keys())} | options
    texts = {
        "target": workload if isinstance(workload, str) else name,
        "candidate": candidate if isinstance(candidate, str) else f"{name} (candidate)" if candidate != () else "",
    }
    return load_settings(Path(), by_section({**texts, **told}))


def _words(workload: Any, candidate: Any) -> tuple[str, ...]:
    """How the command line names workload and candidate."""
    return (
        _text_of(workload, "build"),
        *(("--candidate", _text_of(candidate, "build_fused")) if candidate != () else ()),
    )


def _text_of(made: Any, placeholder: str) -> str:
    """A target's text; a placeholder where only this process has it."""
    if isinstance(made, str):
        return made
    if inspect.isfunction(made) and made.__qualname__.isidentifier():
        return f"{os.path.relpath(inspect.getfile(made))}:{made.__name__}"
    return f"{_FILE}:{placeholder}"


def _hints(workload: Any) -> tuple[str, ...]:
    first = workload[0] if isinstance(workload, tuple) and workload else workload
    model = first if isinstance(first, nn.Module) else getattr(first, "model", None)
    if isinstance(model, nn.Module) and model.training:
        return (
            "the model is in training mode, where dropout and batch statistics are at work: call model.eval() first",
        )
    return ()


# -- explaining -------------------------------------------------------------------------------------------------------


def explain(checked: Checked) -> str:
    """Why a check failed: limits, outputs, worst nodes with figures, where it begins, where to look, how to bisect."""
    result = checked.result
    report = result.report
    plan = next(row.plan for row in report.roles if row.role == "candidate")
    lines = [
        *gate_lines(result, top=0),
        *(
            f"  output    {one_line(item.label)}: relative L2 {item.value}, {item.remark}"
            for item in output_findings(report)[-_LISTED:]
        ),
        *(f"  worst     {_node(row)}" for row in worst_nodes(report, _LISTED)),
        *(f"  begins    {_node(row)}" for row in origin_rows(report)[:_LISTED]),
        f"  fused     {one_line(fused_line(report.choices))} ({plan.device}, {plan.dtype}; reference cpu, float32)",
        *(f"  hint      {hint}" for hint in checked.hints),
        f"  look      align show {report.folder}",
        f"  bisect    {_bisect(checked)}",
    ]
    return "\n".join(lines)


def _bisect(checked: Checked) -> str:
    run, policy = checked.settings.run, checked.settings.judge.policy
    options = f"--device {run.device} --dtype {run.dtype} --policy {policy}"
    command = one_line(f"align bisect {' '.join(checked.target)} {options}")
    return f"{command} (functions you write, that return (model, inputs))" if _FILE in command else command


def _node(row: NodeRow) -> str:
    verdict = row.verdict
    allowed = f"; {verdict.metric} {figure(verdict.value)}, allowed {figure(verdict.limit)}" if verdict.metric else ""
    baseline = f", {against_baseline(row)}" if row.node.baseline is not None else ""
    figures = f"relative L2 {figure(row.candidate_error)}{baseline}, max abs {figure(row.max_abs)}{allowed}"
    return one_line(f"{row.node.key}: {row.status}, {figures}")


def failures(checked: Checked) -> Iterator[str]:
    """The explanation, if the check failed."""
    if checked.result.exit_code:
        yield explain(checked)
