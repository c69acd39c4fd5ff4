"""What is known of calls that became other calls: sites that swallow interior calls, and origin ids of fused calls."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from align.compare.source import TraceSource
from align.dumpers.choice import Site
from align.dumpers.errors import AlignError
from align.dumpers.model import NodeRecord


@dataclass(frozen=True, slots=True)
class FusionMap:
    """Why calls of the reference have no node of their own name in the candidate.

    sites    places that the candidate's plan fused: `calls[:-1]` are interior, `calls[-1]` yields the output
    origins  (call of the candidate, calls of the reference it stands for), as compilers and importers report them
    """

    sites: tuple[Site, ...] = ()
    origins: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def interior(self) -> dict[str, str]:
        """Name of the site by interior call."""
        return {call: site.name for site in self.sites for call in site.calls[:-1]}


@dataclass(frozen=True, slots=True)
class Component:
    """N calls of the reference that became M calls of the candidate, both in order of execution."""

    candidate: tuple[str, ...]
    reference: tuple[str, ...]

    @property
    def name(self) -> str:
        """Names the component by the call that yields its output in the candidate."""
        return f"origin@{self.candidate[-1]}"


NO_FUSIONS = FusionMap()


def components(
    fusions: FusionMap, candidate: Iterable[NodeRecord], reference: Iterable[NodeRecord]
) -> tuple[Component, ...]:
    """Connected components of the graph that joins each candidate call with its origins; unseen calls are left out."""
    candidate_order, reference_order = _first_seen(candidate), _first_seen(reference)
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for call, originals in fusions.origins:
        for original in originals:
            parent[root(("reference", original))] = root(("candidate", call))
    groups: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: {"candidate": [], "reference": []})
    for side, order in (("candidate", candidate_order), ("reference", reference_order)):
        for call in sorted((name for s, name in parent if s == side and name in order), key=order.__getitem__):
            groups[root((side, call))][side].append(call)
    whole = (group for group in groups.values() if group["candidate"] and group["reference"])
    return tuple(Component(tuple(group["candidate"]), tuple(group["reference"])) for group in whole)


def _first_seen(records: Iterable[NodeRecord]) -> dict[str, int]:
    order: dict[str, int] = {}
    for record in records:
        order.setdefault(record.key.call_name, record.order)
    return order


def fusion_map(candidate: TraceSource) -> FusionMap:
    """Read the documents `sites` and `origins` of a candidate; only sites that its records say were fused count.

    `sites` is a list (or {"sites": list}) of objects with `calls` and `operator`, or `name` as `operator@call`;
    `origins` is an object {call: [calls of the reference]}.
    """
    fused = {record.site for record in candidate.nodes if record.site}
    listed = _document(candidate, "sites")
    entries = listed.get("sites", []) if isinstance(listed, Mapping) else listed
    sites = tuple(site for site in map(_site, entries or ()) if site is not None and site.name in fused)
    origins = _document(candidate, "origins")
    named = origins.items() if isinstance(origins, Mapping) else ()
    return FusionMap(sites, tuple((str(call), tuple(map(str, originals))) for call, originals in named))


def _document(source: TraceSource, name: str) -> Any:
    """A document as parsed JSON; None when there is none, or it is not JSON."""
    try:
        body = source.document(name)
        return json.loads(body) if isinstance(body, str | bytes) else body
    except (AlignError, KeyError, ValueError):
        return None


def _site(entry: Any) -> Site | None:
    if isinstance(entry, Site):
        return entry
    if not isinstance(entry, Mapping) or not entry.get("calls"):
        return None
    operator = entry.get("operator") or str(entry.get("name", "fused")).partition("@")[0]
    return Site(str(operator), tuple(map(str, entry["calls"])))
