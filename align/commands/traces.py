"""`align show`, `align report`, `align import`: look at what is on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.commands.options import Json
from align.commands.output import console, write


def show(
    trace: Annotated[Path, typer.Argument(help="a trace, or a run folder")],
    node: Annotated[str, typer.Argument(help="print one node: statistics and values", show_default=False)] = "",
    verify: Annotated[bool, typer.Option("--verify", help="check every stored tensor against its digest")] = False,
    top: Annotated[int, typer.Option(help="how many nodes to list; 0 lists all")] = 40,
    only: Annotated[str, typer.Option(help="statuses of a run folder: drift, nonfinite, ...", show_default=False)] = "",
    tree: Annotated[bool, typer.Option("--tree", help="the module tree of a run folder, coloured by error")] = False,
    json: Json = False,
) -> None:
    """List the nodes of a trace or run folder, or print one node."""
    from align import show as view

    if trace.is_dir() and (trace / "report.json").is_file():
        view.show_run(trace, console(), view.RunView(top=top, only=only, is_tree=tree, node=node, is_json=json))
    elif verify:
        if not view.verify(trace, console()):
            raise typer.Exit(1)
    elif node:
        view.show_node(trace, node, console(), is_json=json)
    else:
        view.list_nodes(trace, console(), top=top, is_json=json)


def report(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[
        Path | None,
        typer.Option(help="where to write it; report.html in the run folder by default", show_default=False),
    ] = None,
    details: Annotated[int, typer.Option(help="nodes that get a page with histogram and error map")] = 200,
) -> None:
    """Write the HTML report of a run: one file that works offline."""
    from align.html_report import write_html
    from align.reports.stored import load

    path = write_html(load(run), run, out or run / "report.html", pages=details)
    write(f"wrote {path}")


def import_dump(
    source: Annotated[
        Path, typer.Argument(help="msprobe dump, Polygraphy results, .npz or folder of .npy, safetensors")
    ],
    out: Annotated[Path, typer.Argument(help="the trace to write")],
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing trace")] = False,
) -> None:
    """Turn another tool's dump into a trace."""
    from align.dumpers.importers import import_dump as convert

    summary = convert(source, out, overwrite=force)
    write(f"{out}: {summary}")
