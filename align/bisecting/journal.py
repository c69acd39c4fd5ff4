"""Every answered trial on disk, one JSON line each, so that a killed bisect goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

from align.compare.search import Answer, Probe, Reply


class Journal:
    """Answers of one bisect, told from others in the same file by its name."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def known(self) -> dict[frozenset[str], Reply]:
        """Answers of an earlier bisect of the same plan."""
        answers: dict[frozenset[str], Reply] = {}
        if not self._path.is_file():
            return answers
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                if entry["bisect"] == self._name and entry["answer"] != Answer.UNKNOWN.value:
                    answers[frozenset(entry["on"])] = Reply(Answer(entry["answer"]), str(entry["reason"]))
            except (ValueError, KeyError, TypeError):
                continue  # the line under way when the process was killed
        return answers

    def record(self, probe: Probe) -> None:
        """Append an answer."""
        entry = {"bisect": self._name, "on": sorted(probe.on), "answer": probe.answer.value, "reason": probe.reason}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
