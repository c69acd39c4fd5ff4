"""Tell a bisect in the terminal and as JSON: culprits first, then the plan to ship. Decides nothing."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from align.bisecting.bisection import Fault
from align.bisecting.question import Question, Topic
from align.bisecting.run import BisectDone
from align.bisecting.shared import Bargain, SharedGuilt
from align.compare.search import Status as Found
from align.compare.signature_model import SignatureKind
from align.reports.machine import plain
from align.reports.model import CulpritCard
from align.reports.numbers import figure, percent, plural, seconds
from align.reports.text import printable

_TITLES = {
    Found.FOUND: ("✗ CULPRIT", "bold red"),
    Found.NO_CULPRIT: ("✓ NO CULPRIT", "bold green"),
    Found.CANNOT_TELL: ("? CANNOT TELL", "bold yellow"),
    Found.BUDGET_SPENT: ("? STOPPED EARLY", "bold yellow"),
}
WIDTH = 100
_LABEL = 12
Line = tuple[str, str]
"""(text, style)"""


def print_bisect(done: BisectDone, console: Console) -> None:
    """The result of `align bisect`, within the console's width and 100 columns."""
    width = min(WIDTH, console.width)
    for text, style in lines_of(done):
        for part in wrap(printable(text.replace("\n", " ")), width):
            console.print(Text(part, style=style), soft_wrap=True)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; what follows a label hangs behind it."""
    indent = len(text) - len(text.lstrip())
    is_labelled = text[indent : indent + _LABEL].rstrip() in _LABELS
    hang = " " * (indent + (_LABEL if is_labelled else 2))
    return textwrap.wrap(text, width, subsequent_indent=hang, break_on_hyphens=False, drop_whitespace=True) or [""]


_LABELS = frozenset({"drift", "judged", "first bad", "looks like", "reproduced", "price", "error"})


def lines_of(done: BisectDone) -> Iterator[Line]:
    """Everything that is told, line by line, not wrapped yet."""
    result, outcome = done.result, done.result.outcome
    title, style = _TITLES[result.status]
    if result.is_interrupted:
        title = "? INTERRUPTED"
    yield f"{title}  {_headline(done)}", style
    for number, card in enumerate(result.cards[:2] if result.is_spread else result.cards, 1):
        yield from _card(done, card, number)
    if result.is_spread and len(result.cards) > 2:
        yield f"  and {plural(len(result.cards) - 2, 'set')} more: the drift is shared, see below", "yellow"
    for core in outcome.masked:
        yield f"  hidden: {' together with '.join(sorted(core))} fails alone, but passes beside other choices", "yellow"
    for item in outcome.unknown[:3] if result.fault is Fault.DRIFT else ():
        yield f"  could not be told: {len(item.on)} choices on: {item.reason}", "yellow"
    yield from _plan(done)
    if done.shared is not None:
        yield from _shared(done.shared)
    for note in result.notes:
        yield f"note: {note}", "yellow"
    yield "", ""
    yield _spent(done), "dim"
    yield f"Files  {done.artifacts.folder}", ""
    for name in done.artifacts.names:
        yield f"  {name}", ""


def _headline(done: BisectDone) -> str:
    result = done.result
    count = len(result.question.suspects)
    what = _nouns(result.question)
    if result.cards:
        found = str(len(result.cards)) if len(result.cards) > 1 else "one"
        if result.fault is Fault.CRASH:
            return f"{found} of {count} {what} make{'s' if found == 'one' else ''} the candidate fail to run"
        if result.question.topic.is_precision:
            return f"{found} of {count} {what} must stay in float32"
        return (
            f"{found} of {count} {what}"
            if not result.is_spread
            else f"no small set of the {count} {what} explains the drift"
        )
    if result.status is Found.NO_CULPRIT:
        why = result.verdicts.everything.why if result.verdicts.everything else ""
        return f"all {count} {what} on pass: {why}"
    return result.outcome.reason


def _nouns(question: Question) -> str:
    if question.topic is Topic.BY_CALL:
        return "calls"
    return "modules" if question.off else "choices"


def _card(done: BisectDone, card: CulpritCard, number: int) -> Iterator[Line]:
    names = [str(choice) for choice in card.choices]
    yield f"  {number}. {' together with '.join(names)}", "bold"
    if done.result.fault is Fault.CRASH:
        yield f"    {'error':<{_LABEL}}{card.evidence}", ""
    else:
        yield from _evidence(card)
    yield f"    {'reproduced':<{_LABEL}}{card.reproduced} of {card.attempts} times", ""
    if not math.isnan(card.seconds_cost):
        yield f"    {'price':<{_LABEL}}{_cost(card)}", ""


def _evidence(card: CulpritCard) -> Iterator[Line]:
    why, _, first = card.evidence.partition("; first bad node ")
    yield (
        f"    {'drift':<{_LABEL}}{figure(card.drift_with)} with it alone, {figure(card.drift_without)} with all off",
        "",
    )
    yield f"    {'judged':<{_LABEL}}{why}", ""
    if first:
        yield f"    {'first bad':<{_LABEL}}{first}", ""
    if card.signature and not card.signature.startswith(SignatureKind.NONE_FITS):
        yield f"    {'looks like':<{_LABEL}}{card.signature}", ""


def _cost(card: CulpritCard) -> str:
    between = f"95 % interval {seconds(card.seconds_low)} to {seconds(card.seconds_high)}"
    if card.seconds_low > 0:
        return f"switching it off costs {seconds(card.seconds_cost)} a run ({between})"
    if card.seconds_high < 0:
        return f"switching it off saves {seconds(-card.seconds_cost)} a run ({between})"
    return f"cannot tell what switching it off costs: within noise ({between})"


def _plan(done: BisectDone) -> Iterator[Line]:
    result, outcome, question = done.result, done.result.outcome, done.result.question
    if outcome.largest_passing is None or not done.artifacts.largest_passing:
        return
    kept, total = len(outcome.largest_passing), len(question.suspects)
    what = _nouns(question)
    yield "", ""
    if question.topic.is_precision:
        yield f"{kept} of {total} {what} may stay in {question.suspects[0].name}", "bold"
    else:
        yield f"Keep {kept} of {total} {what}{_gain(done)}", "bold"
    if result.verdicts.kept is not None and result.fault is Fault.DRIFT:
        yield f"  drift {figure(result.verdicts.kept.drift)}; {result.verdicts.kept.why}", ""
    run = done.request.settings.run
    variant = f" --candidate {shlex.quote(run.candidate)}" if run.candidate else ""
    plan = shlex.quote(str(done.artifacts.folder / done.artifacts.largest_passing))
    yield f"  align run {shlex.quote(run.target)}{variant} --plan {plan}", ""


def _gain(done: BisectDone) -> str:
    gain = done.result.share_of_gain
    if not done.result.outcome.culprits or done.result.fault is Fault.CRASH or done.result.question.topic.is_precision:
        return ""
    if not math.isnan(gain):
        return f": {percent(gain)} of the gain"
    was_timed = any(not math.isnan(card.seconds_cost) for card in done.result.cards)
    return "; the gain of all choices is within noise here" if was_timed else ""


def _shared(shared: SharedGuilt) -> Iterator[Line]:
    yield "", ""
    yield (
        f"Shared guilt  of the squared drift, by {shared.subsets} random subsets (fit {figure(shared.goodness)})",
        "bold",
    )
    for row in shared.shares[:10]:
        yield f"  {percent(row.fraction):>7}  ({percent(max(row.low, 0.0))} to {percent(row.high)})  {row.choice}", ""
    for bargain in _thinned(shared.bargains):
        yield f"  switch off {len(bargain.off)}: drift {figure(bargain.drift)}, {_lost(bargain.seconds_lost)}", ""
    if shared.picked is not None:
        tried = (
            f": tried, {shared.tried.status}, drift {figure(shared.tried.drift)}" if shared.tried is not None else ""
        )
        yield f"  within your limits: switch off {', '.join(shared.picked.off) or 'nothing'}{tried}", "bold"
    for warning in shared.warnings:
        yield f"  warning: {warning}", "yellow"


def _lost(value: float) -> str:
    if abs(value) < 1e-6:
        return "no measurable time lost"
    return f"{seconds(value)} lost a run" if value >= 0 else f"{seconds(-value)} saved a run"


def _thinned(bargains: tuple[Bargain, ...]) -> tuple[Bargain, ...]:
    """At most eight, the ends among them."""
    if len(bargains) <= 8:
        return bargains
    return tuple(bargains[round(index * (len(bargains) - 1) / 7)] for index in range(8))


def _spent(done: BisectDone) -> str:
    outcome = done.result.outcome
    replayed = f", {done.replayed} of them from the journal" if done.replayed else ""
    sure = f"; confidence {percent(outcome.confidence)}" if outcome.confidence else ""
    return f"{plural(outcome.probes, 'probe')} and {plural(outcome.confirmations, 'repeat')}{replayed}{sure}"


def to_json(done: BisectDone) -> str:
    """The result as one object."""
    result, outcome = done.result, done.result.outcome
    verdicts = result.verdicts
    body = {
        "schema_version": 1,
        "status": outcome.status.value,
        "fault": result.fault.value,
        "interrupted": result.is_interrupted,
        "reason": outcome.reason,
        "culprits": [asdict(card) | {"choices": [str(choice) for choice in card.choices]} for card in result.cards],
        "masked": [sorted(core) for core in outcome.masked],
        "suspects": [str(choice) for choice in result.question.suspects],
        "switch_off": sorted(outcome.switch_off),
        "largest_passing": sorted(outcome.largest_passing) if outcome.largest_passing is not None else None,
        "smallest_failing": sorted(outcome.smallest_failing) if outcome.smallest_failing is not None else None,
        "share_of_gain": result.share_of_gain,
        "baseline": asdict(verdicts.nothing) if verdicts.nothing else None,
        "candidate": asdict(verdicts.everything) if verdicts.everything else None,
        "kept": asdict(verdicts.kept) if verdicts.kept else None,
        "unknown": [{"on": sorted(item.on), "reason": item.reason} for item in outcome.unknown],
        "probes": outcome.probes,
        "confirmations": outcome.confirmations,
        "trials": done.trials,
        "replayed": done.replayed,
        "confidence": outcome.confidence,
        "shared": asdict(done.shared) if done.shared is not None else None,
        "notes": list(result.notes),
        "folder": str(done.artifacts.folder),
        "files": list(done.artifacts.names),
    }
    return json.dumps(plain(body), indent=1)
