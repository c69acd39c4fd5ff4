"""JUnit: failures where there are faults, skips where nothing can be judged, valid XML whatever the names are."""

from __future__ import annotations

from types import ModuleType
from xml.etree import ElementTree

from junitparser import JUnitXml

from align.compare.model import Status
from align.reports.junit import CaseUnit, to_junit
from align.reports.model import RunReport


def test_each_node_is_a_case_and_the_run_is_one_more(unet: RunReport) -> None:
    suite = next(iter(JUnitXml.fromstring(to_junit(unet).encode())))
    said = [verdict.status for verdict in unet.judgement.verdicts]
    faults = sum(status.is_fault for status in said)
    assert suite.tests == len(said) + 1
    assert suite.errors == said.count(Status.NONFINITE)
    assert suite.failures == faults - suite.errors + 1
    assert suite.skipped == said.count(Status.FUSED_AWAY)


def test_a_failure_carries_the_reason_and_the_figures(unet: RunReport) -> None:
    root = ElementTree.fromstring(to_junit(unet))
    case = next(case for case in root.iter("testcase") if case.get("name") == "unet.mid.attn.to_out/linear#0:0")
    failure = case.find("failure")
    assert failure is not None
    assert "times the baseline's" in failure.get("message", "")
    assert "max abs" in (failure.text or "")
    assert case.get("classname") == "align.node.unet.mid.attn.to_out"


def test_a_site_takes_the_worst_of_its_nodes(unet: RunReport) -> None:
    root = ElementTree.fromstring(to_junit(unet, CaseUnit.SITE))
    names = [case.get("name") for case in root.iter("testcase")]
    assert names[0] == "verdict"
    assert len(names) == len(set(names))
    bad = next(
        case for case in root.iter("testcase") if case.get("name") == "quant_linear@unet.mid.attn.to_out/linear#0"
    )
    assert bad.find("failure") is not None


def test_names_with_control_characters_and_markup_stay_valid_xml(samples: ModuleType) -> None:
    text = '\x00\x1b\ufffe\ud800]]></failure><img onerror="x">&\n'
    root = ElementTree.fromstring(to_junit(samples.hostile(text)))
    assert not list(root.iter("img"))
    assert any("onerror" in case.get("name", "") for case in root.iter("testcase"))
