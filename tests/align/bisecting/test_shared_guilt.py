"""Drift that many choices make together: shares, bargains, and the plan picked by the user's limits."""

import json
import math

import pytest

from align.bisecting.bisection import BisectOptions
from align.bisecting.shared import Bargain, Limits, pick
from align.compare.search import Status

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

NOISE = """
CHOICES = tuple(f"c{i}" for i in range(8))


class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.on = tuple(on)
        noise = torch.Generator().manual_seed(1)
        self.noise = {f"c{i}": torch.randn(4096, generator=noise) * (2.0 if i == 0 else 1.0) for i in range(8)}

    def forward(self, x):
        return x + 0.01 * sum((self.noise[name] for name in self.on), torch.zeros(4096))


def build(choices):
    return Net(choices).eval(), torch.randn(4096)


def error(candidate, reference):
    return (candidate.double() - reference.double()).norm() / reference.double().norm()
"""

MANY = BisectOptions(repeats=0, audits=0, is_priced=False)


def test_where_no_small_set_explains_the_drift_each_choice_gets_its_share(target, bisect) -> None:
    """Squares add: c0 has 4 of 11 parts, the others one each. The limit needs at least four of them on."""
    build = target(NOISE)
    done = bisect(build, metric=build.replace(":build", ":error"), metric_limit=0.0255, dtype="float32", options=MANY)
    assert done.result.status is Status.FOUND
    assert done.shared is not None
    shares = {row.choice: row for row in done.shared.shares}
    assert done.shared.shares[0].choice == "user:c0"
    assert shares["user:c0"].fraction == pytest.approx(4 / 11, abs=0.03)
    for index in range(1, 8):
        row = shares[f"user:c{index}"]
        assert row.fraction == pytest.approx(1 / 11, abs=0.03)
        assert row.low <= 1 / 11 + 0.01
        assert row.high >= 1 / 11 - 0.01
    assert done.shared.goodness > 0.95


def test_the_bargain_within_the_users_limits_is_tried_and_written_as_a_plan(target, bisect, align) -> None:
    build = target(NOISE)
    limits = Limits(drift=0.026)
    done = bisect(
        build, metric=build.replace(":build", ":error"), metric_limit=0.02, dtype="float32", options=MANY, limits=limits
    )
    assert done.shared is not None
    assert done.shared.picked is not None
    assert "user:c0" in done.shared.picked.off
    assert done.shared.tried is not None
    assert done.shared.tried.drift <= 0.027
    text = (done.artifacts.folder / "picked.plan.json").read_text()
    assert not set(done.shared.picked.off) & set(json.loads(text)["choices"])


def test_picking_takes_the_least_drift_for_the_time_and_the_least_time_for_the_drift() -> None:
    bargains = (Bargain((), 1.0, 0.0), Bargain(("a",), 0.5, 0.1), Bargain(("a", "b"), 0.2, 0.4))
    assert pick(bargains, Limits(seconds=0.2)) is bargains[1]
    assert pick(bargains, Limits(drift=0.3)) is bargains[2]
    assert pick(bargains, Limits(drift=0.6)) is bargains[1]
    assert pick(bargains, Limits(seconds=0.2, drift=0.3)) is None
    assert pick(bargains, Limits()) is None
    assert not Limits(math.inf, math.inf).is_given
