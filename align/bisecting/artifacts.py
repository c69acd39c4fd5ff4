"""What a bisect leaves on disk: plan files, a settings snippet, and scripts that reproduce the fault at one site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from align.bisecting.result import FEW, BisectResult
from align.bisecting.script import write_script
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.plan import PlannedSite
from align.session import Session
from align.taps.shadow import shadow_pass
from align.taps.transplant import is_transplant


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Names of the files written, relative to `folder`; empty where there was nothing to write."""

    folder: Path
    largest_passing: str = ""
    smallest_failing: str = ""
    snippet: str = ""
    picked: str = ""
    scripts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All files."""
        return tuple(
            name
            for name in (self.largest_passing, self.smallest_failing, self.picked, self.snippet, *self.scripts)
            if name
        )


def write_artifacts(folder: Path, session: Session, result: BisectResult, picked: Plan | None = None) -> Artifacts:
    """Write what the result gives rise to; scripts, which take a run, only of a search that came to its end."""
    verdicts = result.verdicts
    largest = verdicts.largest_passing if result.outcome.culprits or result.is_interrupted else None
    choices = [choice for card in result.cards[:FEW] for choice in card.choices]
    return Artifacts(
        folder,
        _write_plan(folder / "largest-passing.plan.json", largest),
        _write_plan(folder / "smallest-failing.plan.json", verdicts.smallest_failing),
        _write_snippet(folder / "align.snippet.toml", session, result) if largest is not None else "",
        _write_plan(folder / "picked.plan.json", picked),
        () if result.is_interrupted else tuple(_write_scripts(folder, session, result, choices)),
    )


def _write_plan(path: Path, plan: Plan | None) -> str:
    if plan is None:
        return ""
    path.write_text(plan.to_json() + "\n", encoding="utf-8")
    return path.name


def _write_snippet(path: Path, session: Session, result: BisectResult) -> str:
    text = snippet_of(session, result)
    if text:
        path.write_text(text, encoding="utf-8")
    return path.name if text else ""


def snippet_of(session: Session, result: BisectResult) -> str:
    """Lines for align.toml that switch the culprits off; parts of the user's own variant become comments."""
    question = result.question
    off = [choice for choice in sorted(question.suspects) if str(choice) in result.outcome.switch_off]
    keep = [
        question.off[choice] for choice in off if choice in question.off and not is_transplant(question.off[choice])
    ]
    parts = [choice for choice in off if choice in question.off and is_transplant(question.off[choice])]
    plain = [choice for choice in off if choice not in question.off]
    named = [choice for choice in plain if choice.kind in (ChoiceKind.FUSION, ChoiceKind.USER)]
    entries = [
        *_entry("precision", [f"{choice.name}@{choice.site}" for choice in keep]),
        *_entry("no_fuse", [f"{choice.name}@{choice.site}" if choice.site else choice.name for choice in named]),
        *(f"# leave out of flags and precision: {choice}" for choice in plain if choice not in named),
        *(
            f"# in your variant, take the baseline's {choice.name.replace('_', ' ')} {choice.site}".rstrip()
            for choice in parts
        ),
    ]
    run = ["[run]", f"target = {json.dumps(session.settings.target)}"]
    run += [f"candidate = {json.dumps(session.settings.candidate)}"] if session.settings.candidate else []
    return "\n".join([*run, *entries]) + "\n" if entries else ""


def _entry(key: str, values: Sequence[str]) -> list[str]:
    return [f"{key} = {json.dumps(list(values))}"] if values else []


def _write_scripts(folder: Path, session: Session, result: BisectResult, choices: Sequence[Choice]) -> list[str]:
    """A script for each fused site of a culprit, with the inputs that the site had in the candidate run."""
    written: list[str] = []
    for choice in choices:
        planned = next((item for item in session.sites if item.choice == choice), None)
        path = folder / f"reproduce-{choice.name}-{len(written) + 1}.py"
        if planned is not None and _write_script(path, session, result.question.everything, planned):
            written.append(path.name)
    return written


def _write_script(path: Path, session: Session, plan: Plan, planned: PlannedSite) -> bool:
    try:
        arguments = shadow_pass(session, plan, keep=planned.site.name).arguments
    except Exception:  # the candidate fails to run as a whole
        return False
    if not arguments:
        return False
    return write_script(
        path, session.settings.target, planned.site.name, planned.match.operator, session.device.kind, arguments
    )
