"""Survey small models, find sites in them, and run them with chosen sites in another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from align.dumpers.naming import walk_tensors
from align.dumpers.survey import CallGraph, Survey
from align.dumpers.wire import Call, CallId, Tap, Wire
from align.operators.base import Match, Operator
from align.operators.registry import catalog, find_sites, site_of
from align.taps.substitute import Form, Substitute, Substitution


class Names(Tap):
    """Note the name of every call that ran."""

    def __init__(self) -> None:
        self.idents: list[CallId] = []

    def finish(self, call: Call, output: Any) -> Any:
        self.idents.append(call.ident)
        return output


@dataclass(frozen=True)
class Run:
    output: Tensor
    idents: tuple[CallId, ...]


@dataclass(frozen=True)
class Surveyed:
    """A model whose sites are known, ready to be run in any form."""

    model: nn.Module
    args: tuple[Any, ...]
    graph: CallGraph
    matches: tuple[Match, ...]

    def named(self, name: str) -> tuple[Match, ...]:
        return tuple(match for match in self.matches if match.operator.name == name)

    def ops(self, name: str) -> list[str]:
        return ["+".join(ident[1] for ident in match.calls) for match in self.named(name)]

    def refusal(self, match: Match, dtype: torch.dtype) -> str:
        return match.operator.kernels["cpu"].refuses(match.bound(self.graph, 0), dtype)

    def run(self, form: Form | None = None) -> Run:
        names = Names()
        taps: list[Tap] = [names] if form is None else [Substitute(self._substitutions(form)), names]
        with torch.no_grad(), Wire({"": self.model}, taps, sees_calls=True):
            output = self.model(*self.args)
        return Run(next(tensor for _, tensor in walk_tensors(output)), tuple(names.idents))

    def _substitutions(self, form: Form) -> tuple[Substitution, ...]:
        chosen = []
        for match in self.matches:
            kernel = match.operator.kernels.get("cpu") if form is Form.FUSED else None
            if form is Form.FUSED and (kernel is None or self.refusal(match, torch.float32)):
                continue
            chosen.append(Substitution(site_of(match, self.graph, torch.float32), match, form, kernel))
        return tuple(chosen)


Surveyor = Callable[..., Surveyed]


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def survey() -> Surveyor:
    """Survey a model's forward and find the sites of some operators, or of all."""

    def run(model: nn.Module, *args: Any, operators: Iterable[Operator] | None = None) -> Surveyed:
        tap = Survey()
        model.eval()
        with torch.no_grad(), Wire({"": model}, [tap], sees_calls=True) as wire:
            output = model(*args)
            tap.note_outside(output, wire.step)
        return Surveyed(model, args, tap.graph, find_sites(tap.graph, tuple(operators or catalog()), "cpu"))

    return run


@pytest.fixture
def distance() -> Callable[[Tensor, Tensor], float]:
    """Relative L2 distance in float64."""

    def measure(candidate: Tensor, reference: Tensor) -> float:
        return float((candidate.double() - reference.double()).norm() / reference.double().norm())

    return measure


@pytest.fixture
def agrees_in_every_form(survey: Surveyor, distance: Callable[[Tensor, Tensor], float]) -> Callable[..., Surveyed]:
    """A model's float32 output and call names are the same as written, unfused and fused."""

    def check(
        model: nn.Module, *args: Any, operators: Iterable[Operator] | None = None, limit: float = 1e-5
    ) -> Surveyed:
        found = survey(model, *args, operators=operators)
        plain = found.run()
        for form in Form:
            other = found.run(form)
            assert other.idents == plain.idents
            assert other.output.dtype == plain.output.dtype
            assert other.output.shape == plain.output.shape
            assert distance(other.output, plain.output) <= limit, form
        return found

    return check
