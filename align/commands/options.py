"""Options that several commands share, and the difference between what was typed and what was not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Target = Annotated[str, typer.Argument(help="file.py:function, package.module:function, or demo", show_default=False)]
Fuse = Annotated[
    list[str], typer.Option("--fuse", help="fuse only choices that match, e.g. attention@unet.*", show_default=False)
]
NoFuse = Annotated[list[str], typer.Option("--no-fuse", help="keep choices that match unfused", show_default=False)]
Config = Annotated[Path, typer.Option("--config", help="settings file")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the verdict line only")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were typed: those that differ from 'nothing'."""
    return {name: value for name, value in options.items() if value not in ("", 0, (), None)}
