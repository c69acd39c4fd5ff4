"""The Python interface: the same job as the command line, as values."""

from pathlib import Path

import pytest
import torch

import align
from align.compare.model import Status
from align.dumpers.errors import UsageError


def test_compare_is_a_package_that_can_be_called(tiny: str, tmp_path: Path) -> None:
    align.run(tiny, out=tmp_path / "run", device="cpu", enabled=False)
    paths = {role: tmp_path / "run" / f"{role}.h5" for role in ("candidate", "reference", "baseline")}
    compared = align.compare(paths["candidate"], paths["reference"], baseline=paths["baseline"])
    assert compared.judgement.status is Status.PASS
    assert compared.comparison.has_baseline


def test_an_unknown_option_is_answered_with_the_options_there_are(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown option 'devise'") as caught:
        align.run(tiny, out=tmp_path / "run", devise="cpu")
    assert "device" in caught.value.remedy


def test_capture_and_choice_work_in_a_users_own_script(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with align.capture(model, tmp_path / "mine.h5"):
        model(torch.ones(1, 2))
    assert (tmp_path / "mine.h5").is_file()
    assert align.choice("anything")


def test_choices_asked_for_in_code_are_on_in_the_candidate_only(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(
        "import torch, align\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x * 2 if align.choice('double') else x + x\n"
        "def build():\n    return M(), torch.ones(4)\n"
    )
    report = align.run(f"{tmp_path}/asking.py:build", out=tmp_path / "run", device="cpu", enabled=False)
    assert [str(row.choice) for row in report.choices] == ["user:double"]
    assert report.judgement.status is Status.PASS


def test_bisect_returns_the_culprit_as_a_value(tmp_path: Path) -> None:
    (tmp_path / "flagged.py").write_text(
        "import torch\n"
        "CHOICES = ('fine', 'bad')\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self, scale):\n        super().__init__(); self.scale = scale\n"
        "    def forward(self, x):\n        return x * self.scale\n"
        "def build(choices):\n    return M(1.2 if 'bad' in choices else 1.0), torch.randn(64)\n"
    )
    done = align.bisect(f"{tmp_path}/flagged.py:build", out=tmp_path / "bisect", device="cpu")
    assert [[str(choice) for choice in card.choices] for card in done.result.cards] == [["user:bad"]]
