"""Where commands write: results to stdout, progress to stderr, colour only on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from align.progress import Reporter
    from align.reports.model import RunReport


def write(text: str) -> None:
    """Write a line to stdout."""
    sys.stdout.write(text + "\n")


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; 100 columns where there is no terminal to ask."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, soft_wrap=False, width=100)


def progress(is_silent: bool) -> Reporter:
    """Bars on a terminal, nothing elsewhere."""
    from align.progress import Bars, Silent

    errors = console(stderr=True)
    return Silent() if is_silent or not errors.is_terminal else Bars(errors)


def show_run(report: RunReport, *, json: bool, quiet: bool, top: int) -> None:
    """Tell a run in the form that was asked for."""
    from align.reports.machine import to_json
    from align.reports.summary import headline
    from align.reports.terminal import print_run

    if json:
        write(to_json(report))
    elif quiet:
        told = headline(report)
        write(f"{told.mark} {told.word}  {told.sentence}")
    else:
        print_run(report, console(), top=top)
