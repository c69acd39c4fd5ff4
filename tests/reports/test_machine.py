"""JSON, SARIF, annotations and Markdown: readable by their readers, whatever figures and names a run holds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from align.compare.model import Status
from align.reports.forge import Flavour, findings, to_annotations, to_markdown, to_sarif
from align.reports.machine import SCHEMA_VERSION, plain, to_json
from align.reports.model import RunReport

HOSTILE = "a|b`c<img src=x onerror=alert(1)>\n::error::x%0A*_[l](http://e) \x1b\ud800"


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_a_version_first_and_a_stable_order(unet: RunReport) -> None:
    body = strict(to_json(unet))
    assert list(body)[:3] == ["schema_version", "tool", "workload"]
    assert body["schema_version"] == SCHEMA_VERSION
    assert to_json(unet) == to_json(unet)


def test_json_holds_every_nodes_error_and_the_baselines(unet: RunReport) -> None:
    body = strict(to_json(unet))
    node = next(node for node in body["nodes"] if node["key"] == "unet.mid.attn.to_out/linear#0:0")
    assert node["verdict"]["status"] == "drift"
    assert node["candidate"]["rel_l2"] > 10 * node["baseline"]["rel_l2"]
    assert len(body["nodes"]) == len(unet.comparison.nodes)
    assert body["verdict"]["origins"] == ["unet.mid.attn.to_out/linear#0:0"]


def test_the_keys_of_the_schema_are_these(unet: RunReport) -> None:
    body = strict(to_json(unet))
    assert list(body) == [
        "schema_version",
        "tool",
        "workload",
        "folder",
        "command",
        "verdict",
        "coverage",
        "has_baseline",
        "runs",
        "choices",
        "timing",
        "culprits",
        "origins",
        "floors",
        "warnings",
        "notes",
        "pictures",
        "files",
        "environment",
        "nodes",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, None), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (0.25, 0.25), (True, True)],
)
def test_figures_that_json_cannot_hold_become_null_or_words(value: float, expected: object) -> None:
    assert plain(value) == expected


def test_choices_and_plans_are_written_as_text(unet: RunReport) -> None:
    body = strict(to_json(unet))
    assert body["runs"][2]["plan"]["choices"] == sorted(map(str, unet.roles[2].plan.choices))
    assert body["culprits"][0]["choices"] == ["precision:int8@unet.mid.attn.to_out/linear#0"]


def test_sarif_points_at_the_culprits_site(unet: RunReport) -> None:
    run = strict(to_sarif(replace(unet, workload="model/unet.py:build")))["runs"][0]
    (result,) = run["results"]
    (location,) = result["locations"]
    assert (result["ruleId"], result["level"]) == ("align/culprit", "error")
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "model/unet.py"
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "quant_linear@unet.mid.attn.to_out/linear#0"
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} >= {result["ruleId"]}


def test_without_culprits_the_origins_are_pointed_at(unet: RunReport) -> None:
    assert [item.rule for item in findings(replace(unet, culprits=()))] == ["align/drift-origin"]


def test_a_failed_run_without_a_place_is_still_a_finding_and_a_good_one_is_none(unet: RunReport) -> None:
    placeless = replace(unet, culprits=(), judgement=replace(unet.judgement, origins=()))
    assert [item.rule for item in findings(placeless)] == ["align/verdict"]
    good = replace(placeless, judgement=replace(placeless.judgement, status=Status.PASS))
    assert findings(good) == ()
    assert to_annotations(good, Flavour.GITHUB) == ""


def test_a_fingerprint_stays_when_only_the_figures_change(unet: RunReport) -> None:
    (before,) = findings(unet)
    (after,) = findings(replace(unet, culprits=(replace(unet.culprits[0], drift_with=0.5),)))
    assert before.fingerprint == after.fingerprint
    assert before.message != after.message


def test_github_annotations_are_one_line_each_and_cannot_be_forged(samples: ModuleType) -> None:
    lines = to_annotations(samples.hostile(HOSTILE), Flavour.GITHUB).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("::error file=align.toml,title=align/culprit::")
    assert "%250A" in lines[0]
    assert "\x1b" not in lines[0]


def test_gitlab_gets_a_code_quality_list(unet: RunReport) -> None:
    (item,) = strict(to_annotations(unet, Flavour.GITLAB))
    assert item["severity"] == "major"
    assert item["location"] == {"path": "align.toml", "lines": {"begin": 1}}


def test_markdown_says_the_verdict_first_and_has_every_table(unet: RunReport) -> None:
    text = to_markdown(unet)
    assert text.startswith("## ▲ DRIFT: align.demo:build\n")
    for part in (
        "| node | candidate | baseline |",
        "### Culprits",
        "### Timing",
        "<details><summary>70 of 72 sites fused",
    ):
        assert part in text


def test_markdown_tables_keep_their_columns_and_hold_no_markup_from_names(samples: ModuleType) -> None:
    text = to_markdown(samples.hostile(HOSTILE))
    assert "<img" not in re.sub(r"(`+).*?\1", "", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "class" not in line]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {7}


@pytest.mark.parametrize("write", [to_json, to_sarif, lambda r: to_annotations(r, Flavour.GITLAB)])
def test_hostile_names_stay_valid_json(samples: ModuleType, write: Any) -> None:
    text = write(samples.hostile(HOSTILE))
    strict(text)
    text.encode("utf-8")
