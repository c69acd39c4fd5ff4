"""`align doctor`, `align ops`, `align init`: what is here, what can be fused, and a start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.commands.options import Json, Target
from align.commands.output import console, write


def doctor(json: Json = False) -> None:
    """Say what this machine has for align, what is missing, and how to get it."""
    from dataclasses import asdict
    from json import dumps

    from rich.table import Table

    from align.doctor import examine

    findings = examine()
    if json:
        write(dumps({"schema_version": 1, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("", "subject", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(
            "ok" if finding.is_good else "!!",
            finding.subject,
            finding.found,
            f"-> {finding.remedy}" if finding.remedy else "",
        )
    console().print(table, markup=False)


def ops(
    target: Target = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu")] = "auto",
    dtype: Annotated[str, typer.Option(help="dtype of the fused run")] = "bfloat16",
    json: Json = False,
) -> None:
    """List the catalog; with a target, the sites found in it and what fusing each saves."""
    from json import dumps

    from align.catalog_view import catalog_rows, print_catalog, print_sites, site_rows

    sites = site_rows(target, device, dtype) if target else ()
    if json:
        write(
            dumps(
                {
                    "schema_version": 1,
                    "operators": [row.as_object() for row in catalog_rows(sites)],
                    "sites": [row.as_object() for row in sites],
                },
                indent=1,
            )
        )
        return
    print_catalog(catalog_rows(sites), console())
    if target:
        print_sites(sites, console())


def init(folder: Annotated[Path, typer.Argument(help="where to write")] = Path()) -> None:
    """Write a commented align.toml and an example target."""
    from align.init import write_example

    for path in write_example(folder):
        write(f"wrote {path}")
    write("next: align run --fused --baseline")
