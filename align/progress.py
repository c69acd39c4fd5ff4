"""Tell a waiting user how far a stage has come; silent by default, a bar with an ETA on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Stage(Protocol):
    """One stage under way."""

    def reach(self, done: int) -> None:
        """So many units are done."""


class Reporter(Protocol):
    """Shows stages."""

    def stage(self, name: str, total: int = 0) -> AbstractContextManager[Stage]:
        """Begin a stage of `total` units, 0 if unknown."""


class _Quiet:
    def reach(self, done: int) -> None:
        return None


class Silent:
    """Show nothing."""

    @contextmanager
    def stage(self, name: str, total: int = 0) -> Iterator[Stage]:
        """Show nothing."""
        yield _Quiet()


class Bars:
    """Progress bars on a console (stderr, so that stdout holds results only)."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, name: str, total: int = 0) -> Iterator[Stage]:
        """Show a bar for as long as the stage lasts."""
        columns = (
            SpinnerColumn(), TextColumn("{task.description:<28}"), BarColumn(24), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield _Bar(progress, name, total)


class _Bar:
    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress = progress
        self._total = total
        self._task = progress.add_task(name, total=total or None)

    def reach(self, done: int) -> None:
        if self._total and done > self._total:
            self._progress.update(self._task, total=done)
        self._progress.update(self._task, completed=done)
