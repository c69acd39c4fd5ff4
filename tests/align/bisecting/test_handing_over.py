"""What a bisect hands over: the plan that passes, the snippet, the reproduction script, prices, the screen."""

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from align.bisecting.bisection import BisectOptions
from align.bisecting.pricing import price_of, share_of_gain
from align.bisecting.script import write_script
from align.bisecting.tell import print_bisect, to_json
from align.dumpers.choice import Plan
from align.operators.registry import catalog

ROOT = Path(__file__).resolve().parents[3]
INT8 = "fusion:quant_linear@denoiser.mid_mix.feed.proj/linear#0"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory):
    """The demo, bisected and priced, as the README does it."""
    from align.bisecting.run import BisectRequest, run_bisect
    from align.progress import Silent
    from align.settings import load_settings

    out = tmp_path_factory.mktemp("demo") / "out"
    settings = load_settings(Path(), {"run": {"target": "demo", "device": "cpu", "steps": 2}})
    return run_bisect(BisectRequest(settings, options=BisectOptions(is_priced=False), out=out), Silent())


def reproduce(script: Path) -> dict[str, float]:
    """Run a script from elsewhere; the errors it prints, by form."""
    done = subprocess.run(
        [sys.executable, script], cwd=script.parent.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {
        form: float(value)
        for form, value in re.findall(r"(\w+)\s+relative L2 against float32 ([\d.e+-]+)", done.stdout)
    }


def test_the_demos_int8_site_is_named_in_a_handful_of_probes(demo) -> None:
    assert [list(map(str, card.choices)) for card in demo.result.cards] == [[INT8]]
    assert demo.result.outcome.probes <= 8
    card = demo.result.cards[0]
    assert card.drift_with > 5 * card.drift_without
    assert (card.reproduced, card.attempts) == (3, 3)
    assert "first bad node denoiser.mid_mix.feed.proj/linear#0: " in card.evidence


def test_the_largest_passing_plan_passes_when_run(demo, align) -> None:
    plan = demo.artifacts.folder / demo.artifacts.largest_passing
    ended = align("run", "demo", "--steps", "2", "--plan", plan, "--no-timing", "--json")
    assert json.loads(ended.out)["verdict"]["status"] == "pass"


def test_the_smallest_failing_plan_fails_when_run(target, bisect, align) -> None:
    build = target("""
import time

CHOICES = ("wrong", "fine")

class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.linear, self.on = nn.Linear(16, 16), frozenset(on)
    def forward(self, x):
        time.sleep(0.01 if "fine" in self.on else 0.02)
        h = self.linear(x)
        return h * 1.5 if "wrong" in self.on else h

def build(choices):
    return Net(choices).eval(), torch.randn(4, 16)
""")
    done = bisect(build, options=BisectOptions(repeats=0))
    plan = done.artifacts.folder / done.artifacts.smallest_failing
    assert align("run", build, "--plan", plan, "--no-timing", "--check", "--device", "cpu").code == 1
    assert done.result.share_of_gain == pytest.approx(1.0, abs=0.1)
    assert done.result.cards[0].seconds_low < 0.002


def test_the_script_shows_the_error_of_the_int8_kernel_on_its_own(demo) -> None:
    (script,) = demo.artifacts.scripts
    errors = reproduce(demo.artifacts.folder / script)
    assert errors["fused"] > 10 * errors["unfused"]


def test_the_snippet_switches_the_culprit_off(demo) -> None:
    text = (demo.artifacts.folder / demo.artifacts.snippet).read_text()
    assert f'no_fuse = ["{INT8.removeprefix("fusion:")}"]' in text


def test_a_bisect_starts_from_the_folder_of_a_run(align, target) -> None:
    build = target("def build():\n    return nn.Sequential(nn.Linear(16, 16), nn.GELU()).eval(), torch.randn(4, 16)\n")
    assert align("run", build, "--device", "cpu", "--no-timing", "--out", "ran").code == 0
    ended = align("bisect", "ran", "--no-price")
    assert ended.code == 0
    assert ended.out.startswith("✓ NO CULPRIT  all 1 choices on pass")


def test_the_screen_is_at_most_a_hundred_columns_wide_and_escapes_what_it_shows(demo) -> None:
    screen = StringIO()
    print_bisect(demo, Console(file=screen, width=200))
    lines = screen.getvalue().splitlines()
    assert lines[0] == f"✗ CULPRIT  one of {len(demo.result.question.suspects)} choices"
    assert max(map(len, (line for line in lines if "--plan" not in line and not line.startswith("Files")))) <= 100
    narrow = StringIO()
    print_bisect(demo, Console(file=narrow, width=60))
    assert max(map(len, (line for line in narrow.getvalue().splitlines() if "/" not in line))) <= 60


def test_the_object_holds_what_the_screen_tells(demo) -> None:
    told = json.loads(to_json(demo))
    assert told["status"] == "found"
    assert told["culprits"][0]["choices"] == [INT8]
    assert told["switch_off"] == [INT8]
    assert set(told["files"]) >= {"largest-passing.plan.json", "smallest-failing.plan.json", "align.snippet.toml"}


def test_every_operator_with_a_kernel_here_has_a_script_that_runs(tmp_path: Path) -> None:
    """All in one process: each script's main, on the operator's own example."""
    lines = ["import runpy"]
    for index, operator in enumerate(operator for operator in catalog() if "cpu" in operator.kernels):
        path = tmp_path / f"reproduce-{index}.py"
        assert write_script(path, "demo", "a/b#0", operator, "cpu", operator.example("cpu", torch.bfloat16, 0))
        lines.append(f"runpy.run_path({str(path)!r}, run_name='__main__')")
    (tmp_path / "all.py").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "all.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative L2 against float32") == 2 * (len(lines) - 1)


def test_a_script_gives_arguments_back_as_they_were(tmp_path: Path) -> None:
    """Strides, lists, dtypes and plain values; bits of bfloat16."""
    from align.bisecting.script import _told

    arrays: dict = {}
    value = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    told = _told("x", [value, None, 1.5, torch.float16, (1, 2)], arrays)
    assert told["list"][0] == {"tensor": "x.0", "dtype": "bfloat16", "shape": [3, 2], "strides": [1, 3]}
    assert told["list"][1:4] == [None, 1.5, {"dtype": "float16"}]
    back = torch.from_numpy(arrays["x.0"]).view(torch.bfloat16).reshape(3, 2)
    assert torch.equal(back, value)


def test_a_price_is_known_only_where_its_interval_leaves_zero_out() -> None:
    fast, slow, same = (Plan(name, "cpu", "float32") for name in ("fast", "slow", "same"))
    steady = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.0]
    rounds = {fast: steady, slow: [1.5 * value for value in steady], same: [*steady[3:], *steady[:3]]}
    price = price_of(rounds, slow, fast)
    assert price.is_known
    assert price.seconds == pytest.approx(0.5)
    assert not price_of(rounds, same, fast).is_known


def test_the_share_of_the_gain_is_told_only_where_there_is_a_gain() -> None:
    nothing, everything, kept = (Plan(name, "cpu", "float32") for name in ("nothing", "everything", "kept"))
    rounds = {
        nothing: [2.0, 2.01, 1.99, 2.0, 2.0, 2.0, 2.0],
        everything: [1.0, 1.01, 0.99, 1.0, 1.0, 1.0, 1.0],
        kept: [1.1] * 7,
    }
    assert share_of_gain(rounds, nothing, everything, kept) == pytest.approx(0.9, abs=0.02)
    assert share_of_gain(rounds, everything, nothing, kept) != share_of_gain(rounds, everything, nothing, kept)
