"""The pytest plugin: what a user's suite sees when a check passes, fails, or was asked for wrongly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import align.gating.pytest_check  # noqa: F401 - pytester forgets modules that an inner run loads first; torch cannot load twice

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]

MODELS = """
import pytest, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
    def hidden(self, x):
        return torch.relu(self.up(self.norm(x)))
    def forward(self, x):
        return x + self.down(self.hidden(x))

class Faulty(Block):
    def hidden(self, x):
        return super().hidden(x) * 1.05

def inputs():
    return (torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)),)

def build():
    return Faulty().eval(), inputs()
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    # By name, so that it does not matter whether the package is installed and brings its entry point.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini(
        "[pytest]\naddopts = -p align.pytest_plugin --strict-markers -p no:cacheprovider\n"
        # installed, the outer run has imported the plugin already
        "filterwarnings =\n    error\n    ignore:Module already imported:pytest.PytestAssertRewriteWarning\n"
    )
    return pytester


def run(suite: pytest.Pytester, body: str) -> pytest.RunResult:
    suite.makepyfile(MODELS + body)
    return suite.runpytest_inprocess()


def test_a_check_that_passes_returns_the_report_and_leaves_the_model_as_it_was(suite: pytest.Pytester) -> None:
    run(
        suite,
        """
def test_block(align_check):
    model = Block().eval()
    before = model.up.weight.clone()
    report = align_check(model, inputs(), device="cpu", dtype="bfloat16")
    assert report.judgement.status.value == "pass"
    assert [row.role for row in report.roles] == ["reference", "baseline", "candidate"]
    assert report.timing is None
    assert model.up.weight.dtype is torch.float32
    assert torch.equal(model.up.weight, before)
""",
    ).assert_outcomes(passed=1)


def test_a_failing_check_names_the_node_its_figures_and_how_to_bisect(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
def test_block(align_check):
    align_check(Block().eval(), inputs(), candidate=Faulty().eval(), device="cpu", dtype="bfloat16")

def test_target_of_a_file(align_check):
    align_check(lambda: (Block().eval(), inputs()), candidate=build, device="cpu", limits={"norm": 1e-9})
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            ">*align_check(Block().eval(), inputs(), candidate=Faulty().eval()*",
            "E *GATE FAIL: 1 of 1 limit missed*test_block",
            "E *missed*policy cann-l1: drift*",
            "E *worst*linear*relative L2*baseline*allowed*",
            "E *begins*down/linear#0:0: drift*",
            "E *look*align show *align-1",
            "E *bisect*align bisect FILE.py:build --candidate FILE.py:build_fused --device cpu --dtype *",
            "E *missed*limit norm rel_l2: *limit 1.00e-09*",
            "E *bisect*--candidate *.py:build --device cpu*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_check.py*")


def test_a_builder_in_the_test_file_is_named_for_bisecting(suite: pytest.Pytester) -> None:
    result = run(suite, '\ndef test_it(align_check):\n    align_check(build, device="cpu", limits={"/*": 0.0})\n')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *bisect*align bisect *.py:build --device cpu*"])


def test_a_marked_test_returns_what_is_checked(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
@pytest.fixture
def model():
    return Block().eval()

@pytest.mark.align_check(device="cpu", policy="standard")
def test_good(model):
    return model, inputs()

@pytest.mark.align_check(device="cpu", limits={"norm": 1e-9})
@pytest.mark.parametrize("width", [1])
def test_bad(model, width):
    return model, inputs()

@pytest.mark.align_check(device="cpu", limits={"norm": 1e-9})
def test_defaults(align_check):
    with pytest.raises(pytest.fail.Exception, match="limit norm"):
        align_check(Block().eval(), inputs())
    assert align_check(Block().eval(), inputs(), limits={}).judgement.policy == "cann-l1"

@pytest.mark.align_check
def test_nothing():
    pass
""",
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        ["*missed *limit norm rel_l2*", "*a test marked align_check returns what is to be checked*"]
    )


def test_a_wrong_option_fails_in_two_lines(suite: pytest.Pytester) -> None:
    result = run(
        suite,
        """
def test_option(align_check):
    align_check(Block(), inputs(), dtpye="float16")

def test_training_is_hinted_at(align_check):
    align_check(Block(), inputs(), device="cpu", limits={"norm": 0.0})

def test_model_that_raises(align_check):
    align_check(Block().eval(), (torch.zeros(3),), device="cpu")
""",
    )
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "E *align_check: unknown option 'dtpye'*",
            "E *hint*training mode*",
            "E *test_model_that_raises raised RuntimeError*",
        ]
    )


def test_a_suite_that_does_not_use_it_imports_no_torch(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
import sys

def test_light(request):
    assert request.config.pluginmanager.has_plugin("align.pytest_plugin")
    heavy = {"torch", "numpy", "pydantic", "h5py", "rich", "align.gating.pytest_check"}
    assert not heavy & sys.modules.keys()
"""
    )
    suite.runpytest_subprocess().assert_outcomes(passed=1)


def test_importing_the_plugin_imports_nothing_but_pytest_and_the_facade() -> None:
    code = (
        "import sys, pytest; old = set(sys.modules); import align.pytest_plugin; print(*sorted({*sys.modules} - old))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["align", "align.pytest_plugin"]
