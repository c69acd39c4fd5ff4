"""Which modules, and which calls, must stay in float32 for the verdict to pass."""

import pytest

from align.bisecting.question import Topic
from align.compare.search import Status
from align.dumpers.errors import UsageError

OVERFLOW = """
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((32, 128), (32, 128), (128, 32)))

    def forward(self, x):
        h = F.layer_norm(x, (32,))
        return x + self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h)) / 300


def build():
    model = nn.Sequential(*[Gated() for _ in range(4)])
    model[2].gate.weight.data.mul_(60)
    model[2].up.weight.data.mul_(60)
    model[2].down.weight.data.mul_(300)
    return model.eval(), torch.randn(3, 32)
"""

NORM = """
class RMS(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def build():
    x = torch.randn(6, 64)
    x[2] *= 100
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), RMS(), nn.Linear(64, 8))
    model[2].weight.data.mul_(8)
    return model.eval(), x
"""


def test_the_one_module_whose_output_overflows_in_half_must_stay_in_float32(target, bisect, named) -> None:
    """2.down gives 3e5, beyond 65504; what divides it by 300 reads the infinity, so it has to be wide as well."""
    done = bisect(target(OVERFLOW), topic=Topic.PRECISION, dtype="float16")
    assert named(done) == {frozenset({"precision:float16@2.down/*"}), frozenset({"precision:float16@2/*"})}
    assert done.result.verdicts.kept is not None
    assert done.result.verdicts.kept.status.value == "pass"


def test_a_norm_that_squares_in_half_must_stay_in_float32_and_nothing_else(target, bisect, named) -> None:
    done = bisect(target(NORM), topic=Topic.PRECISION, dtype="float16")
    assert named(done) == {frozenset({"precision:float16@3/*"})}
    plan = done.result.verdicts.largest_passing
    assert plan is not None
    assert {str(choice) for choice in plan.choices} == {"precision:float32@3/*"}


def test_single_calls_are_told_where_calls_are_asked_for(target, bisect, named) -> None:
    """The square overflows; its mean is read as infinite by every later call that is narrow, down to the product."""
    done = bisect(target(NORM), topic=Topic.BY_CALL, dtype="float16")
    calls = {choice.site for card in done.result.cards for choice in card.choices}
    assert "3/pow#0" in calls
    assert all(call.startswith("3/") for call in calls)
    assert done.result.status is Status.FOUND


def test_a_model_that_is_right_in_half_needs_no_float32(target, bisect) -> None:
    text = "def build():\n    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).eval(), torch.randn(4, 32)\n"
    assert bisect(target(text), topic=Topic.PRECISION, dtype="float16").result.status is Status.NO_CULPRIT


def test_a_run_in_float32_leaves_nothing_to_ask(target, bisect) -> None:
    with pytest.raises(UsageError, match="float32 already"):
        bisect(target(NORM), topic=Topic.PRECISION, dtype="float32")


def test_the_plan_that_keeps_the_module_wide_passes_when_run(target, bisect, align) -> None:
    build = target(NORM)
    done = bisect(build, topic=Topic.PRECISION, dtype="float16")
    plan = done.artifacts.folder / done.artifacts.largest_passing
    ended = align("run", build, "--plan", plan, "--dtype", "float16", "--no-timing", "--policy", "standard", "--check")
    assert ended.code == 0, ended.out
    assert 'precision = ["float32@3/*"]' in (done.artifacts.folder / "align.snippet.toml").read_text()
