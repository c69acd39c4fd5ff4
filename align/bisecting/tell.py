"""Tell a bisect in the terminal and as JSON: culprits first, then the plan to ship."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from align.bisecting.run import BisectDone
from align.bisecting.shared import SharedGuilt
from align.compare.search import Status as Found
from align.reports.machine import plain
from align.reports.model import CulpritCard
from align.reports.numbers import figure, percent, seconds
from align.reports.text import printable

_TITLES = {
    Found.FOUND: ("✗ CULPRIT", "bold red"),
    Found.NO_CULPRIT: ("✓ NO CULPRIT", "bold green"),
    Found.CANNOT_TELL: ("? CANNOT TELL", "bold yellow"),
    Found.BUDGET_SPENT: ("? STOPPED EARLY", "bold yellow"),
}


def print_bisect(done: BisectDone, console: Console) -> None:
    """The result of `align bisect`."""
    result, outcome = done.result, done.result.outcome
    title, style = _TITLES[result.status]
    _line(console, f"{title}  {_headline(done)}", style)
    for card in result.cards:
        _print_card(card, console)
    for item in outcome.unknown[:3]:
        _line(console, f"  could not be told: {len(item.on)} choices on: {item.reason}", "yellow")
    if result.cards or result.status is Found.FOUND:
        _print_plan(done, console)
    if done.shared is not None:
        _print_shared(done.shared, console)
    for note in result.notes:
        _line(console, f"  note: {note}", "yellow")
    _line(
        console,
        f"\n{outcome.probes} probes, {outcome.confirmations} repeats, {done.trials} trials in this process; confidence {percent(outcome.confidence)}",
        "dim",
    )
    _line(console, f"Files  {done.artifacts.folder}")
    for name in (
        done.artifacts.largest_passing,
        done.artifacts.smallest_failing,
        done.artifacts.snippet,
        *done.artifacts.scripts,
    ):
        if name:
            _line(console, f"  {name}")


def _headline(done: BisectDone) -> str:
    result = done.result
    count = len(result.question.suspects)
    if result.status is Found.FOUND:
        names = "; ".join(" together with ".join(str(choice) for choice in card.choices) for card in result.cards)
        return printable(f"{names}  (of {count} choices)")
    if result.status is Found.NO_CULPRIT:
        return f"all {count} choices on pass: {printable(result.verdicts.candidate.why)}"
    return printable(result.outcome.reason)


def _print_card(card: CulpritCard, console: Console) -> None:
    for choice in card.choices:
        _line(console, f"  {choice}")
    _line(console, f"    drift      {figure(card.drift_with)} with it alone, {figure(card.drift_without)} without any")
    _line(console, f"    evidence   {card.evidence}")
    if card.signature:
        _line(console, f"    looks like {card.signature}")
    _line(console, f"    reproduced {card.reproduced} of {card.attempts} times")
    if card.seconds_cost == card.seconds_cost:
        _line(
            console,
            f"    switching it off costs {seconds(card.seconds_cost)} a run (95 % interval {seconds(card.seconds_low)} to {seconds(card.seconds_high)})",
        )


def _print_plan(done: BisectDone, console: Console) -> None:
    outcome, question = done.result.outcome, done.result.question
    if outcome.largest_passing is None:
        return
    kept, total = len(outcome.largest_passing), len(question.suspects)
    gain = done.result.share_of_gain
    share = f": {percent(gain)} of the gain" if gain == gain else ": the gain is too small to be told from noise here"
    what = "sites may stay low" if question.off else "fusions"
    _line(console, f"\nKeep {kept} of {total} {what}{share}", "bold")
    if done.artifacts.largest_passing:
        _line(
            console,
            f"  align run {done.request.settings.run.target} --plan {done.artifacts.folder / done.artifacts.largest_passing}",
        )


def _print_shared(shared: SharedGuilt, console: Console) -> None:
    _line(console, f"\nShared guilt  share of the squared drift (goodness {figure(shared.goodness)})", "bold")
    for row in shared.shares[:8]:
        _line(console, f"  {percent(row.fraction):>7}  ({percent(row.low)} to {percent(row.high)})  {row.choice}")
    for bargain in shared.bargains[:8]:
        _line(
            console,
            f"  switch off {len(bargain.off)}: drift {figure(bargain.drift)}, {seconds(bargain.seconds_lost)} lost a run",
        )
    if shared.picked is not None:
        _line(console, f"  within your limits: switch off {', '.join(shared.picked.off) or 'nothing'}", "bold")
    for warning in shared.warnings:
        _line(console, f"  warning: {warning}", "yellow")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text) if "\n" not in text else text, style=style))


def to_json(done: BisectDone) -> str:
    """The result as one object."""
    result, outcome = done.result, done.result.outcome
    body = {
        "schema_version": 1,
        "status": outcome.status.value,
        "reason": outcome.reason,
        "culprits": [asdict(card) | {"choices": [str(choice) for choice in card.choices]} for card in result.cards],
        "suspects": [str(choice) for choice in result.question.suspects],
        "switch_off": sorted(outcome.switch_off),
        "largest_passing": sorted(outcome.largest_passing) if outcome.largest_passing is not None else None,
        "smallest_failing": sorted(outcome.smallest_failing) if outcome.smallest_failing is not None else None,
        "share_of_gain": result.share_of_gain,
        "baseline": asdict(result.verdicts.baseline),
        "candidate": asdict(result.verdicts.candidate),
        "probes": outcome.probes,
        "confirmations": outcome.confirmations,
        "confidence": outcome.confidence,
        "shared": asdict(done.shared) if done.shared is not None else None,
        "notes": list(result.notes),
        "folder": str(done.artifacts.folder),
    }
    return json.dumps(plain(body), indent=1)
