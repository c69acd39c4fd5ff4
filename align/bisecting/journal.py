"""Every trial on disk, one JSON line each, so that a killed bisect goes on where it stopped.

A search is deterministic: asked the same questions again, the journal answers them in the order they were answered in,
repeats included, until it has no more. Trials without an answer are run again.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
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
        """Replay nothing that was written up to now, not even in later runs: the code has changed since."""
        self._left.clear()
        self._append({"bisect": self._name, "forget": True})

    def record(self, on: On, result: TrialResult) -> None:
        """Append a trial."""
        entry = {
            "bisect": self._name, "on": sorted(on), "status": result.status.value, "drift": _plain(result.drift),
            "seconds": _plain(result.seconds), "why": result.why, "digest": result.digest,
        }  # fmt: skip
        self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _read(self) -> Iterator[tuple[On, TrialResult]]:
        for entry in self._entries():
            if entry["status"] != Status.UNKNOWN.value:
                told = (
                    Status(entry["status"]),
                    float(entry["drift"]),
                    float(entry["seconds"]),
                    entry["why"],
                    entry["digest"],
                )
                yield frozenset(entry["on"]), TrialResult(*told)

    def _entries(self) -> list[dict[str, Any]]:
        """Whole lines of this bisect, since it was last told to forget."""
        found: list[dict[str, Any]] = []
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the line under way when the process was killed
            if entry.get("bisect") == self._name:
                found = [] if "forget" in entry else [*found, entry]
        return found


def _plain(value: float) -> float | str:
    """JSON has no NaN and no infinity; `float` reads their names."""
    return value if math.isfinite(value) else str(value)
