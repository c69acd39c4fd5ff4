"""Turn a finished search into culprits with evidence, price and plans. Nothing here changes what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from align.bisecting.bisection import Bisection, Fault, On
from align.bisecting.locate import first_bad_node
from align.bisecting.pricing import price_of, share_of_gain, time_plans
from align.bisecting.result import FEW, BisectResult, Verdicts
from align.bisecting.trial import Criterion, unknown
from align.compare.search import Answer, Outcome
from align.compare.search import Status as Found
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.reports.model import CulpritCard
from align.taps.shadow import diagnose_site


def conclude(bisection: Bisection, outcome: Outcome, fault: Fault, criterion: Criterion) -> BisectResult:
    """Everything that can be said of an outcome. After Ctrl-C nothing more is run."""
    verdicts = _verdicts(bisection, outcome)
    culprits = {culprit: _card(bisection, culprit, outcome) for culprit in outcome.culprits}
    result = BisectResult(
        outcome, verdicts, tuple(culprits.values()), bisection.question, fault,
        notes=_notes(bisection), is_interrupted=bisection.is_interrupted,
    )  # fmt: skip
    if bisection.is_interrupted:
        return result
    if fault is Fault.DRIFT and len(culprits) <= FEW:
        culprits = {culprit: _explained(bisection, criterion, card) for culprit, card in culprits.items()}
        result = replace(result, cards=tuple(culprits.values()))
    is_worth_pricing = outcome.status is Found.FOUND and fault is Fault.DRIFT and len(culprits) <= FEW
    return _priced(bisection, result, culprits) if is_worth_pricing and bisection.options.is_priced else result


def _verdicts(bisection: Bisection, outcome: Outcome) -> Verdicts:
    first = {on: results[0] for on, results in bisection.results.items()}
    passing, failing = outcome.largest_passing, outcome.smallest_failing
    return Verdicts(
        first.get(frozenset()), first.get(bisection.question.all_on),
        bisection.plan(passing) if passing is not None else None,
        bisection.plan(failing) if failing is not None else None,
        first.get(passing) if passing is not None else None,
    )  # fmt: skip


def _card(bisection: Bisection, culprit: On, outcome: Outcome) -> CulpritCard:
    choices = tuple(sorted(Choice.parse(text) for text in culprit))
    evidence = next((item for item in outcome.evidence if item.on == culprit and item.answer is Answer.BAD), None)
    alone, nothing = bisection.results.get(culprit, [_NEVER])[0], bisection.results.get(frozenset(), [_NEVER])[0]
    reproduced, attempts = (evidence.agreeing, evidence.asked) if evidence else (1, 1)
    return CulpritCard(choices, choices[0].site, alone.why, "", alone.drift, nothing.drift, reproduced, attempts)


_NEVER = unknown("never run")


def _explained(bisection: Bisection, criterion: Criterion, card: CulpritCard) -> CulpritCard:
    """Add the first bad node, with only the culprit on, and the kind of error its site makes on its own inputs."""
    alone = bisection.plan(frozenset(map(str, card.choices)))
    try:
        first = first_bad_node(bisection.session, criterion, alone)
    except Exception:  # where it is seen is a help; that it is guilty has been shown
        first = ""
    return replace(
        card,
        evidence=f"{card.evidence}; first bad node {first}" if first else card.evidence,
        signature=signature_of(bisection, card.choices),
    )


def signature_of(bisection: Bisection, choices: Sequence[Choice]) -> str:
    """What kind of error the first culprit site makes on its own inputs; empty where it cannot be shadowed."""
    fusions = [choice for choice in choices if choice.kind is ChoiceKind.FUSION]
    try:
        return (
            diagnose_site(bisection.session, bisection.plan(frozenset(map(str, choices))), fusions[0])
            if fusions
            else ""
        )
    except Exception:  # a site that runs within the model may yet have no unfused form for its inputs here
        return ""


def _priced(bisection: Bisection, result: BisectResult, culprits: Mapping[On, CulpritCard]) -> BisectResult:
    """Add what switching each culprit off costs, and the share of the gain that the largest passing plan keeps."""
    whole = bisection.question.all_on
    nothing, everything, kept = bisection.plan(frozenset()), bisection.plan(whole), result.verdicts.largest_passing
    without = {culprit: bisection.plan(whole - culprit) for culprit in culprits}
    wanted: list[Plan] = [nothing, everything, *without.values(), *([kept] if kept else [])]
    try:
        rounds = time_plans(bisection.session, wanted)
    except Exception as exc:  # such as a flag of process start, which holds in processes of its own only
        return replace(result, notes=(*result.notes, f"not priced: {str(exc).partition(chr(10))[0]}"))
    if not rounds:
        return replace(result, notes=(*result.notes, "not priced: a run takes too long to be repeated often enough"))
    prices = {culprit: price_of(rounds, plan, everything) for culprit, plan in without.items()}
    cards = tuple(
        replace(
            card,
            seconds_cost=prices[culprit].seconds,
            seconds_low=prices[culprit].low,
            seconds_high=prices[culprit].high,
        )
        for culprit, card in culprits.items()
    )
    share = share_of_gain(rounds, nothing, everything, kept) if kept else result.share_of_gain
    return replace(result, cards=cards, share_of_gain=share)


def _notes(bisection: Bisection) -> tuple[str, ...]:
    """Bits that differ between equal runs: whatever the verdict, the user has to know."""
    unsteady = [
        on
        for on, results in bisection.results.items()
        if len({result.digest for result in results if result.digest}) > 1
    ]
    if not unsteady:
        return ()
    least = min(unsteady, key=len)
    where = (
        "even with every choice off"
        if not least
        else f"with {len(least)} of {len(bisection.question.suspects)} choices on"
    )
    return (f"not deterministic: equal runs gave different bits {where}; figures of single runs vary",)
