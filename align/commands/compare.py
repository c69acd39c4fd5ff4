"""`align compare`: traces or dumps from anywhere, compared and judged without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.commands.options import Json, Quiet
from align.commands.output import show_run


def compare(
    candidate: Annotated[Path, typer.Argument(help="trace, folder of ranks, another tool's dump, or a run folder")],
    reference: Annotated[Path | None, typer.Argument(help="what it is compared with", show_default=False)] = None,
    baseline: Annotated[Path | None, typer.Option(help="the unfused run beside it", show_default=False)] = None,
    policy: Annotated[str, typer.Option(help="cann-l0, cann-l1, cann-l2, standard or cosine")] = "cann-l1",
    rules: Annotated[Path | None, typer.Option(help="TOML file that renames modules", show_default=False)] = None,
    include: Annotated[list[str], typer.Option(help="compare only nodes that a glob matches", show_default=False)] = [],
    check: Annotated[bool, typer.Option("--check", help="exit 1 on drift, 3 if undecided")] = False,
    top: Annotated[int, typer.Option(help="how many nodes to list")] = 10,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two or three traces node by node; a run folder alone is judged anew under another policy."""
    from align.judging import exit_code_of
    from align.offline import Comparing, compare_files, rejudge

    if reference is None:
        report = rejudge(candidate, policy)
    else:
        report = compare_files(Comparing(candidate, reference, baseline, policy, rules, tuple(include)))
    show_run(report, json=json, quiet=quiet, top=top)
    if check:
        raise typer.Exit(exit_code_of(report.judgement))
