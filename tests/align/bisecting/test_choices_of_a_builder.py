"""Culprits among names that a builder declares: independent ones, pairs, ones that hide each other, none."""

import pytest

from align.bisecting.bisection import Fault
from align.compare.search import Status

LAYERS = """
CHOICES = tuple(f"low{i}" for i in range(8))


class Layer(nn.Module):
    def __init__(self, index, on):
        super().__init__()
        self.linear, self.index, self.on = nn.Linear(64, 64), index, on

    def forward(self, x):
        h = self.linear(x)
        if self.is_coarse():
            h = h.mul(40).round().div(40)
        elif f"low{self.index}" in self.on:
            h = h.double().float()
        return torch.tanh(h)

    def is_coarse(self):
        return RULE(self.index, self.on)


def build(choices):
    return nn.Sequential(*[Layer(i, frozenset(choices)) for i in range(8)]).eval(), torch.randn(32, 64)
"""


def layers(rule: str) -> str:
    """Eight layers, of which `rule(index, on)` says whether one computes coarsely."""
    return LAYERS + f"\n\ndef RULE(index, on):\n    return {rule}\n"


def test_two_independent_culprits_are_named_and_no_other(target, bisect, named) -> None:
    done = bisect(target(layers("index in (2, 5) and f'low{index}' in on")), dtype="float32")
    assert named(done) == {frozenset({"user:low2"}), frozenset({"user:low5"})}
    assert done.result.outcome.largest_passing == {f"user:low{i}" for i in (0, 1, 3, 4, 6, 7)}
    firsts = {card.choices[0].name: card.evidence.partition("first bad node ")[2] for card in done.result.cards}
    assert firsts["low2"].startswith("2/tanh#0: ")
    assert firsts["low5"].startswith("5/tanh#0: ")


def test_a_pair_that_only_fails_together_is_one_culprit(target, bisect, named) -> None:
    done = bisect(target(layers("index == 3 and {'low1', 'low6'} <= on")), dtype="float32")
    assert named(done) == {frozenset({"user:low1", "user:low6"})}
    assert len(done.result.outcome.switch_off) == 1


def test_a_culprit_that_another_choice_hides_is_told_beside_the_one_that_shows(target, bisect, named) -> None:
    rule = "(index == 2 and 'low2' in on and 'low7' not in on) or (index == 5 and 'low5' in on)"
    done = bisect(target(layers(rule)), dtype="float32")
    assert named(done) == {frozenset({"user:low5"})}
    assert frozenset({"user:low2"}) in done.result.outcome.masked


def test_nobody_is_blamed_where_every_choice_is_harmless(target, bisect) -> None:
    done = bisect(target(layers("False")), dtype="float32")
    assert done.result.status is Status.NO_CULPRIT
    assert not done.artifacts.names


def test_choices_asked_for_in_code_are_found_and_switched(target, bisect, named) -> None:
    text = """
import align

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
    def forward(self, x):
        h = self.first(x)
        if align.choice("fast_tanh"):
            h = h.clamp(-1, 1)
        else:
            h = torch.tanh(h)
        return self.second(h).double().float() if align.choice("harmless") else self.second(h)

def build():
    return Net().eval(), torch.randn(16, 32) * 2
"""
    assert named(bisect(target(text), dtype="float32")) == {frozenset({"user:fast_tanh"})}


@pytest.mark.parametrize("stage", ["build", "forward"])
def test_the_choice_that_makes_the_candidate_crash_is_found(target, bisect, named, stage: str) -> None:
    text = (
        layers("BOOM(index, on)")
        + f"""
def BOOM(index, on):
    if "low3" in on and {stage == "forward"}:
        raise RuntimeError("no such kernel")
    return False

plain = build
def build(choices):
    if "low3" in choices and {stage == "build"}:
        raise RuntimeError("no such kernel")
    return plain(choices)
"""
    )
    done = bisect(target(text), dtype="float32")
    assert done.result.fault is Fault.CRASH
    assert named(done) == {frozenset({"user:low3"})}
    assert "no such kernel" in done.result.cards[0].evidence


def test_a_crash_beside_a_culprit_does_not_hide_it(target, bisect, named) -> None:
    """low1 and low4 cannot run together, but each can; low5 is wrong."""
    text = (
        layers("CAREFUL(index, on)")
        + """
def CAREFUL(index, on):
    if {"low1", "low4"} <= on and "low6" not in on:
        raise RuntimeError("cannot run together")
    return index == 5 and "low5" in on
"""
    )
    done = bisect(target(text), dtype="float32")
    assert frozenset({"user:low5"}) in named(done)
    assert all("cannot run together" in item.reason for item in done.result.outcome.unknown)
