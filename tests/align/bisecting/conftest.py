"""Targets written to files, so that worker processes can import them too, and a bisect of one in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from align.bisecting.bisection import BisectOptions
from align.bisecting.question import Topic
from align.bisecting.run import BisectDone, BisectRequest, run_bisect
from align.progress import Silent
from align.settings import load_settings

Write = Callable[..., str]
Bisect = Callable[..., BisectDone]

QUICK = BisectOptions(repeats=1, is_priced=False)


@pytest.fixture
def target(tmp_path: Path) -> Write:
    """Write a target's text to a file of its own; hands back `file.py:build`."""

    def write(text: str, name: str = "target.py", function: str = "build") -> str:
        path = tmp_path / name
        path.write_text(
            "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n" + text, encoding="utf-8"
        )
        return f"{path}:{function}"

    return write


@pytest.fixture
def bisect(tmp_path: Path) -> Bisect:
    """Bisect a target, into a folder of the test's own."""

    def run(
        target: str, *, topic: Topic = Topic.CHOICES, options: BisectOptions = QUICK, policy: str = "", **more: Any
    ) -> BisectDone:
        keys = ("candidate", "dtype", "fuse", "no_fuse", "plan", "seed", "device")
        told = {"target": target, "device": "cpu"} | {key: more.pop(key) for key in keys if key in more}
        settings = load_settings(Path(), {"run": told, "judge": {"policy": policy} if policy else {}})
        out = more.pop("out", tmp_path / "out")
        return run_bisect(BisectRequest(settings, topic=topic, options=options, out=out, **more), Silent())

    return run


@pytest.fixture
def named() -> Callable[[BisectDone], set[frozenset[str]]]:
    """The culprit sets, by the texts of their choices."""
    return _named


def _named(done: BisectDone) -> set[frozenset[str]]:
    """The culprit sets, by the texts of their choices."""
    return {frozenset(map(str, card.choices)) for card in done.result.cards}
