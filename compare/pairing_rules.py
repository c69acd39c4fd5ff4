"""Rename rules: how a user says that a module of the candidate stands under another name in the reference.

A rules file is TOML:

    [[rename]]
    from = "encoder.layer.*"          # glob: * one component, ** any number; the rest of the path is kept
    to = "blocks.*"                   # each * and ** in turn takes what the glob's took

    [[rename]]
    from = 're:h\\.(\\d+)\\.mlp'      # or a regular expression, for the whole front of the path
    to = 'blocks.\\1.feed_forward'

A pattern with a `/` is matched against the whole call `path/op#call`. The first rule that matches a node is applied,
once. A rule that renames no node to a node of the reference is an error that names it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from align.dumpers.errors import ConfigError
from align.dumpers.model import NodeKey

_CALL = re.compile(r"^(?P<path>.*)/(?P<op>[^/#]+)#(?P<call>\d+)$")


@dataclass(frozen=True, slots=True)
class RenameRule:
    """One rule of a rules file, `source` and `target` as written there."""

    source: str
    target: str

    def apply(self, key: NodeKey) -> NodeKey | None:
        """The key under its new name; None when the rule does not speak of it."""
        if "/" in self.source:
            return self._apply_to_call(key)
        match = re.match(rf"(?:{_regex(self.source)})(?=\.|$)", key.path)
        if match is None:
            return None
        return replace(key, path=self._expand(match) + key.path[match.end() :])

    def _apply_to_call(self, key: NodeKey) -> NodeKey | None:
        match = re.fullmatch(_regex(self.source), key.call_name)
        if match is None:
            return None
        call = _CALL.match(self._expand(match))
        if call is None:
            raise ConfigError(
                f"rename rule {self.source!r} has no call in its target {self.target!r}",
                'a rule whose `from` has a "/" needs a `to` like module.path/op#0',
            )
        return replace(key, path=call["path"], op=call["op"], call=int(call["call"]))

    def _expand(self, match: re.Match[str]) -> str:
        if self.source.startswith("re:"):
            return match.expand(self.target)
        captured = iter(match.groups())
        return re.sub(r"\*+", lambda _: next(captured, ""), self.target)


@dataclass(frozen=True, slots=True)
class RenameRules:
    """Rules in the order of the file."""

    rules: tuple[RenameRule, ...] = ()

    def apply(self, key: NodeKey) -> NodeKey | None:
        """The key as the first matching rule renames it; None when no rule speaks of it."""
        for rule in self.rules:
            renamed = rule.apply(key)
            if renamed is not None:
                return renamed
        return None

    def check(self, candidate: Iterable[NodeKey], reference: frozenset[NodeKey]) -> None:
        """Raise ConfigError naming a rule that brings no node of the candidate to a node of the reference."""
        for rule, hit in zip(self.rules, self._hits(candidate, reference), strict=True):
            if hit is None:
                raise ConfigError(f"rename rule {rule.source!r} matches no node of the candidate", _CORRECT)
            if not hit:
                raise ConfigError(
                    f"rename rule {rule.source!r} -> {rule.target!r} leads to no node of the reference", _CORRECT
                )

    def applicable(self, candidate: Iterable[NodeKey], reference: frozenset[NodeKey]) -> RenameRules:
        """Only the rules that hold for this run: a baseline need not have the candidate's names."""
        hits = self._hits(candidate, reference)
        return RenameRules(tuple(rule for rule, hit in zip(self.rules, hits, strict=True) if hit))

    def _hits(self, candidate: Iterable[NodeKey], reference: frozenset[NodeKey]) -> tuple[bool | None, ...]:
        keys = tuple(candidate)
        return tuple(_hit(rule, keys, reference) for rule in self.rules)


_CORRECT = "correct or delete the rule: `from` names modules of the candidate, `to` modules of the reference"
NONE = RenameRules()


def _hit(rule: RenameRule, keys: tuple[NodeKey, ...], reference: frozenset[NodeKey]) -> bool | None:
    renamed = [key for key in map(rule.apply, keys) if key is not None]
    return any(key in reference for key in renamed) if renamed else None


def _regex(pattern: str) -> str:
    if pattern.startswith("re:"):
        return pattern[3:]
    pieces = re.split(r"(\*\*|\*)", pattern)
    groups = {"**": "(.*)", "*": r"([^./]*)"}
    return "".join(groups.get(piece, re.escape(piece)) for piece in pieces)


def read_rules(path: Path) -> RenameRules:
    """Read a rules file. Raises ConfigError when it is not TOML, or an entry lacks `from` or `to`, or has more."""
    try:
        body: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(
            f"cannot read rename rules from {path}: {exc}", "write [[rename]] entries with from and to"
        ) from exc
    unknown = sorted(set(body) - {"rename"})
    entries = body.get("rename", [])
    if unknown or not isinstance(entries, list):
        raise ConfigError(f"{path}: unknown keys {unknown}", "write [[rename]] entries with from and to, nothing else")
    return RenameRules(tuple(_rule(path, number, entry) for number, entry in enumerate(entries, start=1)))


def _rule(path: Path, number: int, entry: Any) -> RenameRule:
    is_right = (
        isinstance(entry, dict) and set(entry) == {"from", "to"} and all(isinstance(v, str) for v in entry.values())
    )
    if not is_right:
        raise ConfigError(f"{path}: rename {number} is {entry!r}", 'give exactly from = "..." and to = "..."')
    try:
        re.compile(_regex(entry["from"]))
    except re.error as exc:
        raise ConfigError(
            f"{path}: rename {number}: {entry['from']!r} is no regular expression: {exc}", "mend the pattern"
        ) from exc
    return RenameRule(entry["from"], entry["to"])
