"""What a bisect judges by: nodes, a metric, a policy; and what it refuses to judge by."""

import math

import pytest

from align.bisecting.trial import scale_of
from align.compare.search import Status
from align.dumpers.errors import TargetError, UndecidedError, UsageError

BRANCHES = """
CHOICES = ("left", "right")


class Branch(nn.Module):
    def __init__(self, is_on):
        super().__init__()
        self.linear, self.is_on = nn.Linear(32, 32), is_on

    def forward(self, x):
        h = self.linear(x)
        return h * 1.3 if self.is_on else h


class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.left, self.right = Branch("left" in on), Branch("right" in on)

    def forward(self, x):
        return self.left(x), self.right(x) * 1e-3


def build(choices):
    return Net(choices).eval(), torch.randn(8, 32)


def psnr(candidate, reference):
    a, b = candidate[1].double(), reference[1].double()
    return 10 * torch.log10(b.abs().max() ** 2 / (a - b).square().mean())


def left_error(candidate, reference):
    return (candidate[0].double() - reference[0].double()).abs().max()


def broken(candidate, reference):
    return candidate["image"]
"""


def test_results_are_judged_by_default(target, bisect, named) -> None:
    assert named(bisect(target(BRANCHES))) == {frozenset({"user:left"}), frozenset({"user:right"})}


def test_only_the_nodes_that_a_glob_names_are_judged(target, bisect, named) -> None:
    done = bisect(target(BRANCHES), nodes=("left",))
    assert named(done) == {frozenset({"user:left"})}
    assert bisect(target(BRANCHES), nodes=("right/forward#0",)).result.cards[0].choices[0].name == "right"


def test_a_metric_may_be_an_error_or_a_score(target, bisect, named) -> None:
    build = target(BRANCHES)
    by_error = bisect(build, metric=build.replace(":build", ":left_error"))
    by_score = bisect(build, metric=build.replace(":build", ":psnr"))
    assert named(by_error) == {frozenset({"user:left"})}
    assert named(by_score) == {frozenset({"user:right"})}
    assert "psnr is " in by_score.result.cards[0].evidence
    assert "at least" in by_score.result.cards[0].evidence


def test_the_metrics_limit_may_be_the_users(target, bisect) -> None:
    build = target(BRANCHES)
    metric = build.replace(":build", ":left_error")
    assert bisect(build, metric=metric, metric_limit=10.0).result.status is Status.NO_CULPRIT


def test_without_a_limit_half_again_the_baselines_error_is_allowed() -> None:
    assert scale_of(0.0, 0.2, math.nan).limit == pytest.approx(0.3)
    score = scale_of(1.0, 0.9, math.nan)
    assert (score.is_score, score.limit) == (True, pytest.approx(0.85))
    decibels = scale_of(math.inf, 40.0, math.nan)
    assert (decibels.is_score, decibels.limit) == (True, pytest.approx(40 - 3.52, abs=0.01))
    assert not decibels.allows(math.nan)


def test_a_policy_decides_what_is_a_fault(target, bisect) -> None:
    text = """
CHOICES = ("a",)

class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.linear, self.on = nn.Linear(32, 32), frozenset(on)
    def forward(self, x):
        h = self.linear(x)
        return h * 1.02 if "a" in self.on else h

def build(choices):
    return Net(choices).eval(), torch.randn(64, 32)
"""
    assert bisect(target(text), policy="cann-l1").result.status is Status.FOUND
    assert bisect(target(text), policy="cosine").result.status is Status.NO_CULPRIT


def test_a_metric_that_cannot_be_called_is_the_users_to_mend(target, bisect) -> None:
    build = target(BRANCHES)
    with pytest.raises(TargetError, match="broken raised"):
        bisect(build, metric=build.replace(":build", ":broken"))


def test_a_glob_that_names_no_node_is_wrong_use(target, bisect) -> None:
    with pytest.raises(UsageError, match="no node matches middle"):
        bisect(target(BRANCHES), nodes=("middle",))


def test_nobody_is_blamed_where_observing_changes_the_results(target, bisect, monkeypatch) -> None:
    from align.taps.collect import Collect

    def disturb(self, call, output):
        return output * 1.01 if call.path == "left" and call.op == "forward" else output

    monkeypatch.setattr(Collect, "leave", disturb)
    with pytest.raises(UndecidedError, match="change when nodes are observed"):
        bisect(target(BRANCHES), nodes=("left.linear",))


def test_a_node_that_a_kernel_swallowed_is_not_held_against_it(target, bisect) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1)
    def forward(self, x):
        return self.out(F.relu(self.norm(self.conv(x))))

def build():
    return Net().eval(), torch.randn(1, 3, 8, 8)
"""
    done = bisect(target(text), nodes=("conv*", "out*"))
    assert any(choice.name == "conv_bn_act_add" for choice in done.result.question.suspects)
    assert done.result.status is Status.NO_CULPRIT
