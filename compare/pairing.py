"""Match the nodes of two runs: exactly, by a stated rule, or not at all. Each pair says how it was made, or why not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from align.compare.model import Pairing
from align.compare.pairing_fusion import NO_FUSIONS, Component, FusionMap, components
from align.compare.pairing_rules import NONE, RenameRules
from align.dumpers.model import NodeKey, NodeRecord, Storage

# Attribute names under which DataParallel and DDP, torch.compile, FSDP and checkpointing hold the user's module.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

Stem = tuple[str, str, int, int]  # path, op, step, rank: what calls are counted within


class Counting(StrEnum):
    """What to make of a candidate that called a function another number of times than the reference."""

    STRICT = "strict"  # none of these calls is paired: their numbers need not mean the same work
    TRUNCATED = "truncated"  # the candidate's run stopped early: its calls are the reference's first ones


@dataclass(frozen=True, slots=True)
class Pair:
    """A node of the reference and its partner; one of them is None when unmatched, and `problem` says why."""

    reference: NodeRecord | None
    candidate: NodeRecord | None
    pairing: Pairing
    site: str = ""
    problem: str = ""

    @property
    def key(self) -> NodeKey:
        """The reference's key; the candidate's for an extra node."""
        record = self.reference or self.candidate
        assert record is not None
        return record.key


@dataclass(frozen=True, slots=True)
class _Match:
    record: NodeRecord
    pairing: Pairing
    site: str = ""


def pair(
    candidate: Sequence[NodeRecord],
    reference: Sequence[NodeRecord],
    *,
    rules: RenameRules = NONE,
    fusions: FusionMap = NO_FUSIONS,
    counting: Counting = Counting.STRICT,
) -> tuple[Pair, ...]:
    """Pair every node of the reference, in its order; nodes only the candidate has follow at the end.

    By precedence: origin components, the user's rules, the exact key, the key without wrapper names (only where that is
    unambiguous on both sides). Raises ConfigError for a rule that matches nothing.
    """
    keys = frozenset(record.key for record in reference)
    rules.check((record.key for record in candidate), keys)
    groups = components(fusions, candidate, reference)
    matches = _match_components(groups, candidate, reference)
    taken = {call for group in groups for call in group.candidate}
    named = _match_names([record for record in candidate if record.key.call_name not in taken], reference, rules)
    absorbed = fusions.interior() | {call: group.name for group in groups for call in group.reference}
    uneven = _uneven_calls(named, reference, absorbed, counting)
    matches |= {
        key: match for key, match in named.items() if key in keys and _stem(key) not in uneven and key not in matches
    }
    pairs = [_pair_of(record, matches.get(record.key), absorbed, uneven) for record in reference]
    used = {id(match.record) for match in matches.values()}
    renamed = {id(match.record): key for key, match in named.items()}
    extras = (record for record in candidate if id(record) not in used)
    return (*pairs, *(_extra(record, renamed.get(id(record), record.key), uneven) for record in extras))


def plain(key: NodeKey) -> NodeKey:
    """The key without wrapper names, wherever in the path they stand."""
    if not WRAPPERS.intersection(key.path.split(".")):
        return key
    return replace(key, path=".".join(part for part in key.path.split(".") if part not in WRAPPERS))


def _match_names(
    candidate: Sequence[NodeRecord], reference: Sequence[NodeRecord], rules: RenameRules
) -> dict[NodeKey, _Match]:
    """Candidate nodes by the name they claim, of the reference where there is one; the first rank of claim wins."""
    keys = {record.key for record in reference}
    renamed = [rules.apply(record.key) for record in candidate]
    claims: dict[NodeKey, _Match] = {}
    for record, key in zip(candidate, renamed, strict=True):
        if key is not None and key in keys:
            claims.setdefault(key, _Match(record, Pairing.RULE))
    claimed = {id(match.record) for match in claims.values()}
    for record in candidate:
        if id(record) not in claimed and record.key in keys and record.key not in claims:
            claims[record.key] = _Match(record, Pairing.EXACT)
            claimed.add(id(record))
    return _match_plain([record for record in candidate if id(record) not in claimed], keys, claims)


def _match_plain(
    free: Sequence[NodeRecord], keys: set[NodeKey], claims: dict[NodeKey, _Match]
) -> dict[NodeKey, _Match]:
    """Add the candidate nodes whose key fits without wrapper names; those that fit nothing keep their own name."""
    open_keys = _unique_by_plain(key for key in keys if key not in claims)
    records = {record.key: record for record in free}
    for name, key in _unique_by_plain(records).items():
        claims.setdefault(open_keys.get(name, name), _Match(records[key], Pairing.PREFIX))
    return claims


def _unique_by_plain(keys: Iterable[NodeKey]) -> dict[NodeKey, NodeKey]:
    """Keys by their plain form, where only one key has that form."""
    found: dict[NodeKey, list[NodeKey]] = defaultdict(list)
    for key in keys:
        found[plain(key)].append(key)
    return {name: same[0] for name, same in found.items() if len(same) == 1}


def _match_components(
    groups: Sequence[Component], candidate: Sequence[NodeRecord], reference: Sequence[NodeRecord]
) -> dict[NodeKey, _Match]:
    """Pair the last candidate call of each component with its last reference call, slot by slot."""
    output = {group.candidate[-1]: group for group in groups}
    keys = {record.key for record in reference}
    matches: dict[NodeKey, _Match] = {}
    for record in candidate:
        group = output.get(record.key.call_name)
        if group is not None:
            key = _key_of_call(group.reference[-1], record.key)
            if key in keys:
                matches[key] = _Match(record, Pairing.FUSED_OUTPUT, group.name)
    return matches


def _key_of_call(call_name: str, like: NodeKey) -> NodeKey:
    called = NodeKey.parse(f"{call_name}:{like.slot}")
    return replace(called, step=like.step, rank=like.rank)


def _uneven_calls(
    named: dict[NodeKey, _Match], reference: Sequence[NodeRecord], absorbed: dict[str, str], counting: Counting
) -> dict[Stem, str]:
    """Stems whose calls differ between the runs beyond what fusions explain, with the reason in words."""
    ours: dict[Stem, set[int]] = defaultdict(set)
    theirs: dict[Stem, set[int]] = defaultdict(set)
    for key in named:
        ours[_stem(key)].add(key.call)
    for record in reference:
        if record.key.call_name not in absorbed or record.key in named:
            theirs[_stem(record.key)].add(record.key.call)
    uneven = {}
    for stem in ours.keys() & theirs.keys():
        is_prefix = counting is Counting.TRUNCATED and ours[stem] <= theirs[stem]
        if ours[stem] != theirs[stem] and not is_prefix:
            uneven[stem] = (
                f"called {_times(len(ours[stem]))} in the candidate, {_times(len(theirs[stem]))} in the reference"
            )
    return uneven


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _stem(key: NodeKey) -> Stem:
    return (plain(key).path, key.op, key.step, key.rank)


def _pair_of(record: NodeRecord, match: _Match | None, absorbed: dict[str, str], uneven: dict[Stem, str]) -> Pair:
    if match is None:
        site = absorbed.get(record.key.call_name, "")
        if site:
            return Pair(record, None, Pairing.FUSED_AWAY, site)
        return Pair(
            record,
            None,
            Pairing.MISSING,
            problem=uneven.get(_stem(record.key), "no node of this name in the candidate"),
        )
    partner = match.record
    if Storage.FUSED in (partner.storage, record.storage):
        return Pair(record, partner, Pairing.FUSED_AWAY, partner.site or record.site)
    if partner.site or match.site:
        return Pair(record, partner, Pairing.FUSED_OUTPUT, partner.site or match.site)
    return Pair(record, partner, match.pairing)


def _extra(record: NodeRecord, name: NodeKey, uneven: dict[Stem, str]) -> Pair:
    return Pair(
        None, record, Pairing.EXTRA, record.site, uneven.get(_stem(name), "no node of this name in the reference")
    )
