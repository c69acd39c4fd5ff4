"""Tell a run in the terminal: the verdict first, then what supports it; everything fits in 100 columns.

All text goes through `printable`, never through markup, so that a module's name cannot colour or steer the terminal.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from align.compare.model import Status
from align.reports.ledger import OperatorRow, fused_line, operator_rows, timing_findings, written_files
from align.reports.model import ChoiceState, CulpritCard, RunReport
from align.reports.numbers import UNKNOWN, count, figure, nbytes, plural, seconds, times
from align.reports.summary import (
    MARKS,
    Finding,
    NodeRow,
    coverage_line,
    headline,
    node_rows,
    origin_remarks,
    origin_rows,
    output_findings,
    status_counts,
    worst_first,
    worst_nodes,
)
from align.reports.text import one_line, shorten
from align.reports.tree import Branch, module_tree

WIDTH = 100
_STYLES: Mapping[Status, str] = {
    Status.PASS: "green",
    Status.DRIFT: "bold red",
    Status.NONFINITE: "bold magenta",
    Status.COLLAPSED: "bold magenta",
    Status.MISMATCH: "bold red",
    Status.MISSING: "red",
    Status.FUSED_AWAY: "dim",
    Status.REFERENCE_SUSPECT: "yellow",
    Status.UNKNOWN: "dim",
}
_GAP = 2  # blank columns between two columns of a table


def print_run(report: RunReport, console: Console, *, top: int = 10) -> None:
    """The result of `align run`: verdict, worst nodes, where drift begins, culprits, fusions, timing, files."""
    _print_headline(report, console)
    _print_worst(report, console, top)
    _print_origins(report, console)
    _print_culprits(report.culprits, console)
    _print_fused(report, console)
    _print_timing(report, console)
    _print_notes(report, console)
    _print_files(report, console)


def print_nodes(
    report: RunReport, console: Console, *, top: int = 20, only: frozenset[Status] = frozenset(), glob: str = "*"
) -> None:
    """The node table of `align show`, worst first; an empty `only` means every status, `glob` selects by key."""
    rows = [
        row
        for row in node_rows(report)
        if (not only or row.status in only) and fnmatch.fnmatchcase(str(row.node.key), glob)
    ]
    _print(console, _node_table(worst_first(rows)[:top], console))
    hidden = len(rows) - top
    tally = ", ".join(f"{count(number)} {status}" for status, number in status_counts(rows))
    _line(
        console,
        f"{plural(len(rows), 'node')}"
        + (f": {tally}" if tally else "")
        + (f"; {count(hidden)} not shown" if hidden > 0 else ""),
        "dim",
    )


def print_tree(report: RunReport, console: Console, *, depth: int = 3, only: frozenset[Status] = frozenset()) -> None:
    """The module tree of `align show` with the worst excess below each module; `only` keeps some statuses."""
    rows = [row for row in node_rows(report) if not only or row.status in only]
    root = module_tree(rows)
    tree = Tree(_branch_text(root, console, report.workload), guide_style="dim")
    _grow(tree, root, console, depth)
    _print(console, tree)


def _grow(tree: Tree, branch: Branch, console: Console, depth: int) -> None:
    for child in branch.children if depth > 0 else ():
        _grow(tree.add(_branch_text(child, console, child.name)), child, console, depth - 1)


def _branch_text(branch: Branch, console: Console, name: str) -> Text:
    text = Text(shorten(one_line(name), 40), no_wrap=True)
    text.append(f"  {_mark(branch.status, console)}", _STYLES[branch.status])
    if math.isfinite(branch.heat):
        text.append(f" {times(branch.heat)}", _heat_style(branch.heat))
    faults = f", {count(branch.faults)} out of tolerance" if branch.faults else ""
    return text.append(f"  {plural(branch.nodes, 'node')}{faults}", "dim")


def _heat_style(heat: float) -> str:
    return "bold red" if heat >= 10 else "red" if heat >= 3 else "yellow" if heat >= 1.5 else "dim"


def _print_headline(report: RunReport, console: Console) -> None:
    top = headline(report)
    text = Text(f"{_mark(top.status, console)} {top.word}", _STYLES[top.status])
    text.append(f"  {one_line(top.sentence)}", "default")
    _print(console, text)
    lines = [
        Finding(f"output {shorten(one_line(f.label), 40)}", f.value, f.remark) for f in output_findings(report)[:4]
    ]
    lines.append(Finding("policy", one_line(report.judgement.policy), coverage_line(report)))
    _print_findings(lines, console)


def _print_worst(report: RunReport, console: Console, top: int) -> None:
    rows = worst_nodes(report, top)
    if rows:
        _title(console, "Worst nodes", "relative L2 against the reference")
        _print(console, _node_table(rows, console))


def _print_origins(report: RunReport, console: Console) -> None:
    rows = origin_rows(report)
    if not rows:
        return
    remarks = origin_remarks(report)
    _title(console, "Drift begins at", "first faulty nodes whose inputs all pass")
    for row in rows[:5]:
        key = shorten(one_line(str(row.node.key)), _room(console) - 4)
        _line(console, f"  {_mark(row.status, console)} {key}", _STYLES[row.status])
        _line(
            console,
            f"    {one_line(row.verdict.why) or _why(row)}"
            + (f"  [{one_line(row.node.site)}]" if row.node.site else ""),
        )
        for remark in remarks.get(str(row.node.key), ()):
            _line(console, f"    {one_line(remark)}")
    if len(rows) > 5:
        _line(console, f"  and {count(len(rows) - 5)} more", "dim")


def _why(row: NodeRow) -> str:
    verdict = row.verdict
    return (
        f"{verdict.metric} {figure(verdict.value)}, allowed {figure(verdict.limit)}"
        if verdict.metric
        else row.status.value
    )


def _print_culprits(cards: Sequence[CulpritCard], console: Console) -> None:
    if not cards:
        return
    _title(console, "Culprits", "switched off, they take the drift away")
    for card in cards:
        for choice in card.choices:
            _line(console, f"  {shorten(one_line(str(choice)), _room(console) - 2)}", "bold")
        drift = f"drift {figure(card.drift_with)} with, {figure(card.drift_without)} without"
        cost = "" if math.isnan(card.seconds_cost) else f"; switching it off costs {seconds(card.seconds_cost)}"
        _line(console, f"    {drift}; reproduced {card.reproduced} of {card.attempts}{cost}")
        _line(console, f"    {one_line(card.evidence)}", "dim")


def _print_fused(report: RunReport, console: Console) -> None:
    groups = operator_rows(report.choices)
    if not groups:
        return
    _title(console, "Choices", fused_line(report.choices))
    table = _table(
        "choice", "on", "off", "no kernel", "worst error", "baseline", "saves", "remark", left=("choice", "remark")
    )
    for group in groups:
        table.add_row(*_operator_cells(group))
    _print(console, table)


def _operator_cells(group: OperatorRow) -> tuple[Text | str, ...]:
    worst = group.worst
    errors = (figure(worst.candidate_error), figure(worst.baseline_error)) if worst else (UNKNOWN, UNKNOWN)
    numbers = tuple(count(group.count(state)) for state in (ChoiceState.ON, ChoiceState.OFF, ChoiceState.UNAVAILABLE))
    saves = nbytes(group.interior_nbytes) if group.interior_nbytes else UNKNOWN
    name = group.name if group.kind == "fusion" else f"{group.kind}:{group.name}"
    return (_plain(shorten(name, 26)), *numbers, *errors, saves, _plain("; ".join(group.reasons)))


def _print_timing(report: RunReport, console: Console) -> None:
    if report.timing is None:
        return
    _title(console, "Timing", "interleaved rounds, median")
    _print_findings(timing_findings(report.timing), console)
    for warning in report.timing.warnings:
        _line(console, f"  warning: {one_line(warning)}", "yellow")


def _print_notes(report: RunReport, console: Console) -> None:
    remarks = [f"{role.role}: {note}" for role in report.roles for note in role.notes]
    notes = [*report.comparison.warnings, *report.notes, *remarks]
    if notes:
        _title(console, "Notes", "")
    for note in notes:
        _line(console, f"  {one_line(note)}", "yellow")


def _print_files(report: RunReport, console: Console) -> None:
    files = written_files(report)
    if not files:
        return
    _title(console, "Files", one_line(report.folder))
    for name in files:
        _line(console, f"  {one_line(name)}")


def _node_table(rows: Iterable[NodeRow], console: Console) -> Table:
    heads = ("class", "candidate", "baseline", "ratio", "max abs", "status")
    kept = heads if console.width >= 90 else heads[1:]
    body = [(row, _node_cells(row, console)[-len(kept) :]) for row in rows]
    widths = [max([len(head), *(len(cells[index]) for _, cells in body)]) for index, head in enumerate(kept)]
    room = max(20, _room(console) - sum(widths) - _GAP * len(widths))
    table = _table("node", *kept, left=("node", "class", "status"))
    for row, cells in body:
        table.add_row(_node_name(row, room), *cells)
    return table


def _node_name(row: NodeRow, room: int) -> Text:
    repeated = f" (x{row.steps})" if row.steps > 1 else ""
    return Text(shorten(one_line(str(row.node.key)), room - len(repeated)) + repeated)


def _node_cells(row: NodeRow, console: Console) -> tuple[Text | str, ...]:
    errors = (figure(row.candidate_error), figure(row.baseline_error), times(row.node.excess), figure(row.max_abs))
    return (row.node.op_class.value, *errors, Text(f"{_mark(row.status, console)} {row.status}", _STYLES[row.status]))


def _table(*heads: str, left: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        is_left = head in left
        table.add_column(head, justify="left" if is_left else "right", no_wrap=head != "remark", overflow="fold")
    return table


def _print_findings(findings: Iterable[Finding], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for finding in findings:
        table.add_row(_plain(finding.label), _plain(finding.value), _plain(finding.remark))
    _print(console, Padding(table, (0, 0, 0, 2)))


def _title(console: Console, title: str, remark: str) -> None:
    console.print()
    text = Text(title, "bold")
    _print(console, text.append(f"  {remark}" if remark else "", "not bold dim"))


def _print(console: Console, shown: RenderableType) -> None:
    console.print(shown, width=_room(console))


def _line(console: Console, text: str, style: str = "") -> None:
    _print(console, Text(_indented(text), style))


def _indented(text: str) -> str:
    """A line whose leading blanks stay and whose inside is made safe."""
    body = text.lstrip(" ")
    return " " * (len(text) - len(body)) + one_line(body)


def _plain(text: str) -> Text:
    return Text(one_line(text))


def _mark(status: Status, console: Console) -> str:
    return "*" if console.options.ascii_only else MARKS[status]


def _room(console: Console) -> int:
    return min(WIDTH, console.width)
