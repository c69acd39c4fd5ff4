"""Every trial on disk, one JSON line each, so that a killed bisect goes on where it stopped.

A search is deterministic: asked the same questions again, the journal answers them in the order they were answered in,
repeats included, until it has no more. Trials without an answer are run again.
"""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

from align.bisecting.trial import TrialResult
from align.compare.model import Status

On = frozenset[str]


class Journal:
    """Trials of one bisect, told from others in the same file by its name."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._left: dict[On, deque[TrialResult]] = {}
        for on, result in self._read():
            self._left.setdefault(on, deque()).append(result)
        self.replayed = 0

    def __bool__(self) -> bool:
        """Whether there are answers left."""
        return any(self._left.values())

    def replay(self, on: On) -> TrialResult | None:
        """The next answer that a set gave in an earlier run, or None."""
        waiting = self._left.get(on)
        if not waiting:
            return None
        self.replayed += 1
        return waiting.popleft()

    def digests(self, on: On) -> frozenset[str]:
        """Digests of the results that a set gave in an earlier run."""
        return frozenset(result.digest for result in self._left.get(on, ()))

    def forget(self) -> None:
        """Replay nothing: the code has changed since."""
        self._left.clear()

    def record(self, on: On, result: TrialResult) -> None:
        """Append a trial."""
        entry = {
            "bisect": self._name, "on": sorted(on), "status": result.status.value, "drift": _plain(result.drift),
            "seconds": _plain(result.seconds), "why": result.why, "digest": result.digest,
        }  # fmt: skip
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _read(self) -> list[tuple[On, TrialResult]]:
        if not self._path.is_file():
            return []
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [entry for line in lines if (entry := self._entry(line)) is not None]

    def _entry(self, line: str) -> tuple[On, TrialResult] | None:
        try:
            entry: dict[str, Any] = json.loads(line)
            if entry["bisect"] != self._name or entry["status"] == Status.UNKNOWN.value:
                return None
            told = Status(entry["status"]), float(entry["drift"]), float(entry["seconds"]), str(entry["why"]), str(entry["digest"])
            return frozenset(entry["on"]), TrialResult(*told)
        except (ValueError, KeyError, TypeError):
            return None  # the line under way when the process was killed


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity; `float` reads their names."""
    return value if math.isfinite(value) else str(value)
