"""Render a run as one HTML file that needs nothing else: styles, scripts, data and pictures stand inside it.

What comes from the model or the user is escaped by Jinja or written by scripts as text, never as markup; a content
security policy forbids the page every request and every script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from align.reports import ledger, numbers, summary
from align.reports.model import RunReport, Timing
from align.reports.pages import NodePage
from align.reports.payload import as_script, packed
from align.reports.text import one_line, printable

_TEMPLATES = Path(__file__).with_name("templates")
_SCRIPTS = ("core.js", "chart.js", "tree.js", "table.js", "figures.js", "drawer.js", "main.js")
_PRINTED_NODES = 40
_INFINITE = re.compile(r"\binf\b")
_FACTOR = re.compile(r"(?<=\d)x(?!\d)")
_IMAGE_KINDS = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a timing chart; positions in per cent of the chart's width."""

    label: str
    value: str
    width: float
    low: float
    high: float
    remark: str = ""


def render_html(report: RunReport, pages: Sequence[NodePage] = (), pictures: Mapping[str, bytes] | None = None) -> str:
    """The page of a run. `pictures` are image files by path or label; a path named in the report gets its label.

    `pages` are for the nodes a reader will open; each adds a few kilobytes.
    """
    script = _script()
    page = _environment().get_template("report.html.j2").render(
        report=report,
        top=summary.headline(report),
        coverage=summary.coverage_line(report),
        outputs=summary.output_findings(report),
        origins=summary.origin_rows(report),
        causes=summary.origin_remarks(report),
        worst=summary.worst_nodes(report, _PRINTED_NODES),
        groups=ledger.operator_rows(report.choices),
        bars=timing_bars(report.timing) if report.timing else (),
        ratio=_ratio_axis(report.timing) if report.timing else None,
        images=_images(report, pictures or {}),
        data=_own(as_script(packed(report, pages))),
        style=_own((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=_own(script),
        script_digest=_digest(script),
    )  # fmt: skip
    return page.encode("utf-8", "replace").decode("utf-8")


@cache
def _environment() -> Environment:
    # No block of data is ever trusted as markup: only the page's own style, script and packed data are.
    env = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=_shown,
                      trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    env.filters.update(
        figure=lambda value: _typeset(numbers.figure(value)),
        times=lambda value: _typeset(numbers.times(value)),
        seconds=lambda value: _typeset(numbers.seconds(value)),
        nbytes=lambda value: _typeset(numbers.nbytes(value)),
        percent=lambda value: _typeset(numbers.percent(value)),
        typeset=_typeset,
        count=numbers.count,
        sentence=lambda text: text[:1].upper() + text[1:],
        node=node_anchor,
        excess=ledger.excess,
        mark=lambda status: summary.MARKS[status],
    )
    env.globals.update(ledger=ledger, is_known=lambda value: not math.isnan(value), excess_of=ledger.excess)
    return env


@cache
def _script() -> str:
    """All scripts in one closed scope."""
    parts = [(_TEMPLATES / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    return "\n".join(["(() => {", '"use strict";', *parts, "})();"])


def _shown(value: Any) -> Any:
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _typeset(text: str) -> str:
    """Figures as print has them: a multiplication sign, a micro sign, an en dash for what is not known."""
    if text == numbers.UNKNOWN:
        return "–"
    return _FACTOR.sub("×", _INFINITE.sub("∞", text)).replace(" us", " µs")


def node_anchor(key: object) -> str:
    """The fragment that opens a node's page: `#node=` and the percent-encoded key."""
    return "#node=" + quote(printable(str(key)), safe="", errors="replace")


def _own(text: str) -> Markup:
    """Text of this package, or packed by it, which stands in the page as it is."""
    return Markup(text)  # noqa: S704 - the only door, and nothing from outside passes it unpacked


def _digest(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def timing_bars(timing: Timing) -> tuple[Bar, ...]:
    """Baseline and candidate from zero to the median, with their p10-p90 spans, on one scale."""
    full = max(timing.baseline.p90, timing.candidate.p90, timing.baseline.median, timing.candidate.median) or 1.0
    return tuple(
        Bar(label, _typeset(numbers.seconds(q.median)), 100 * q.median / full, 100 * q.p10 / full, 100 * q.p90 / full,
            _typeset(ledger.quantiles_line(q)))
        for label, q in (("baseline", timing.baseline), ("candidate", timing.candidate))
    )  # fmt: skip


def _ratio_axis(timing: Timing) -> dict[str, float] | None:
    """Where the speed-up, its interval and 1 lie on a logarithmic axis, in per cent; None if there is no interval."""
    values = (timing.low, timing.high, timing.speedup)
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    reach = 1.15 * max(0.1, *(abs(math.log(value)) for value in values))
    low, high, middle = (50 + 50 * math.log(value) / reach for value in values)
    return {"low": low, "high": high, "middle": middle, "left": math.exp(-reach), "right": math.exp(reach)}


def _images(report: RunReport, pictures: Mapping[str, bytes]) -> tuple[tuple[str, str], ...]:
    """(label, data URI) of each picture that is an image, in the report's order, then the others."""
    labels = {path: label for label, path in report.pictures}
    order = [*(name for _, path in report.pictures for name in (path,) if name in pictures), *pictures]
    found = ((labels.get(name, name), _data_uri(pictures[name])) for name in dict.fromkeys(order))
    return tuple((label, uri) for label, uri in found if uri)


def _data_uri(content: bytes) -> str:
    """A data URI of a raster image; empty for anything else (SVG can carry scripts)."""
    kind = next((kind for magic, kind in _IMAGE_KINDS if content.startswith(magic)), "")
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}" if kind else ""
