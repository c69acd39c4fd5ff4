"""The page as text: one file, no outside address, nothing untrusted as markup, small enough."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from types import ModuleType
from typing import Any

import pytest

from align.compare.model import Comparison, Coverage, Judgement, Status
from align.reports.html import node_anchor, render_html, timing_bars
from align.reports.model import Confidence, RunReport
from align.reports.payload import as_script, brief, packed

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`&{{7*7}}\u2028\u202e\ud800\x00"


class Page(HTMLParser):
    """Collects tags with their attributes, and the packed data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside = ""
        self.packed = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if ("id", "data") in attrs else ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.packed += data

    @property
    def values(self) -> dict[str, Any]:
        body = json.loads(self.packed)
        assert isinstance(body, dict)
        return body


@pytest.fixture(scope="module")
def page(unet: RunReport, samples: ModuleType) -> str:
    return render_html(unet, samples.pages(unet), samples.pictures())


def test_the_verdict_stands_before_everything_else(page: str) -> None:
    text = re.sub(r"<[^>]+>", " ", page[page.index("<main>") :])
    assert text.split()[:2] == ["▲", "DRIFT"]


def test_no_address_outside_the_file_is_named(page: str) -> None:
    for tag, attributes in Page(page).tags:
        for name in ("src", "href", "action", "srcset", "data"):
            target = attributes.get(name)
            assert target is None or target.startswith(("#", "data:")), (tag, name, target)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_allows_only_the_pages_own_script(page: str) -> None:
    tags = Page(page).tags
    policy = next(a["content"] for t, a in tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "script-src 'sha256-" in policy
    assert len([tag for tag, _ in tags if tag == "script"]) == 2
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]


def test_hostile_text_never_becomes_markup(samples: ModuleType) -> None:
    text = render_html(samples.hostile(HOSTILE), (), {HOSTILE: samples.picture(1, side=4)})
    tags = Page(text).tags
    assert not [a for t, a in tags if t == "img" and not (a.get("src") or "data:").startswith("data:")]
    assert not [a for _, a in tags if any(name.startswith("on") for name in a)]
    assert [tag for tag, _ in tags].count("script") == 2
    assert "{{7*7}}" in text
    assert "\u202e" not in text
    assert "\u2028" not in text
    assert "\x00" not in text
    assert text.encode("utf-8")


def test_packed_data_cannot_leave_its_element_and_reads_back() -> None:
    value = {"a": "</script><!-- ]]> & \u2028"}
    text = as_script(value)
    assert "<" not in text
    assert "&" not in text
    assert "\u2028" not in text
    assert json.loads(text) == value


def test_the_packed_columns_are_as_long_as_the_run(page: str, unet: RunReport) -> None:
    values, total = Page(page).values, len(unet.comparison.nodes)
    columns = [
        *values["columns"].values(),
        *values["measures"]["candidate"].values(),
        values["status"],
        values["producers"],
        values["floor"],
    ]
    assert {len(column) for column in columns} == {total}
    assert values["strings"][values["columns"]["key"][values["origins"][0]]] == "unet.mid.attn.to_out/linear#0:0"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, None), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (0.123456, 0.1235), (7, 7)],
)
def test_packed_figures_are_short_and_valid(value: float, expected: object) -> None:
    assert brief(value) == expected


def test_an_error_map_keeps_zero_and_not_finite_apart(unet: RunReport, samples: ModuleType) -> None:
    import base64

    page = replace(samples.pages(unet, 1)[0], error_map=((0.0, 1e-3), (1.0, math.nan), (math.inf,)))
    kept = next(iter(packed(unet, [page])["pages"].values()))["map"]
    assert (kept["rows"], kept["columns"]) == (3, 2)
    assert list(base64.b64decode(kept["levels"])) == [0, 1, 254, 255, 255, 0]


def test_pictures_stand_inside_and_other_files_do_not(unet: RunReport, samples: ModuleType) -> None:
    files = {**samples.pictures(), "script.svg": b"<svg onload='alert(1)'/>", "extra.png": samples.picture(3, side=4)}
    images = [a for t, a in Page(render_html(unet, (), files)).tags if t == "img" and a.get("alt")]
    assert [image["alt"] for image in images] == ["reference", "baseline", "candidate", "difference x8", "extra.png"]


def test_a_node_anchor_survives_any_key() -> None:
    assert node_anchor("a/b#0:0@2") == "#node=a%2Fb%230%3A0%402"
    assert node_anchor("\ud800").startswith("#node=")


def test_timing_bars_share_one_scale(unet: RunReport) -> None:
    assert unet.timing is not None
    baseline, candidate = timing_bars(unet.timing)
    assert baseline.high == 100.0
    assert candidate.width == pytest.approx(100 * 0.3173 / 0.4307)
    assert baseline.low <= baseline.width <= baseline.high


def test_an_undecided_timing_says_so_in_the_first_screen(unet: RunReport) -> None:
    assert unet.timing is not None
    text = render_html(replace(unet, timing=replace(unet.timing, confidence=Confidence.CANNOT_TELL)))
    assert text.count("annot tell") >= 2


def test_a_run_with_nothing_in_it_is_still_a_page() -> None:
    nothing = RunReport(
        "w", "f", (), Comparison((), Coverage(0, 0, 0, 0, 0, 0), False), Judgement("cann-l1", (), Status.UNKNOWN, "")
    )
    values = Page(render_html(nothing)).values
    assert values["status"] == []
    assert values["floor"] == []


def test_ten_thousand_nodes_stay_under_fifteen_megabytes(samples: ModuleType) -> None:
    big = samples.report(scale=15)
    text = render_html(big, samples.pages(big), samples.pictures())
    assert len(big.comparison.nodes) >= 10_000
    assert len(text.encode("utf-8")) < 15e6
