"""A small workload with real fusions, and the command line in this process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY = """
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)))
        tokens = h.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return F.gelu(self.out(tokens + mixed))


def build():
    return Tiny().eval(), torch.randn(2, 3, 6, 6)
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a conv+norm+relu, an attention and a linear+gelu."""
    path = tmp_path_factory.mktemp("target") / "tiny.py"
    path.write_text(TINY, encoding="utf-8")
    return f"{path}:build"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run `align ...` in this process, in an empty folder."""
    from align.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["align", *map(str, words)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run
