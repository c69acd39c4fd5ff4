"""Rows and sentences of a report: gravest first, honest about what is not known."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest

from align.compare.model import Status
from align.dumpers.choice import Choice
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey
from align.reports.ledger import excess, fused_line, operator_rows, speed_line, timing_findings, written_files
from align.reports.model import ChoiceRow, ChoiceState, Confidence, RunReport
from align.reports.summary import (
    SEVERITY,
    coverage_line,
    headline,
    node_rows,
    origin_rows,
    output_findings,
    parse_statuses,
    status_counts,
    worst_nodes,
)
from align.reports.tree import module_tree


def test_every_status_has_a_place_in_the_order_of_gravity() -> None:
    assert sorted(SEVERITY) == sorted(Status)


def test_the_headline_is_the_judgements_word_and_reason(unet: RunReport) -> None:
    top = headline(unet)
    assert (top.word, top.sentence) == ("DRIFT", unet.judgement.why)


def test_a_judgement_without_words_is_counted(unet: RunReport) -> None:
    quiet = replace(unet, judgement=replace(unet.judgement, why=""))
    faults = sum(verdict.status.is_fault for verdict in unet.judgement.verdicts)
    assert headline(quiet).sentence == f"{faults} of {len(unet.comparison.nodes):,} nodes out of tolerance"


def test_worst_nodes_come_gravest_first_and_once_a_call(unet: RunReport) -> None:
    rows = worst_nodes(unet, 10)
    assert [row.status for row in rows[:3]] == [Status.NONFINITE, Status.MISMATCH, Status.DRIFT]
    assert len({(row.node.key.call_name, row.node.key.slot) for row in rows}) == 10
    assert rows[2].steps == 4
    assert rows[2].node.excess >= rows[3].node.excess


def test_a_node_without_a_verdict_is_unknown_not_passed(unet: RunReport) -> None:
    bare = replace(unet, judgement=replace(unet.judgement, verdicts=()))
    assert {row.status for row in node_rows(bare)} == {Status.UNKNOWN}


def test_origins_are_those_of_the_judgement(unet: RunReport) -> None:
    assert [str(row.node.key) for row in origin_rows(unet)] == ["unet.mid.attn.to_out/linear#0:0"]


def test_an_origin_that_is_not_in_the_comparison_is_left_out(unet: RunReport) -> None:
    odd = replace(unet, judgement=replace(unet.judgement, origins=(NodeKey("gone", "forward"),)))
    assert origin_rows(odd) == ()


def test_outputs_are_told_beside_the_baseline(unet: RunReport) -> None:
    (found,) = output_findings(unet)
    assert found.remark.startswith("baseline 0.00")
    assert found.remark.endswith("x")


def test_counts_add_up(unet: RunReport) -> None:
    assert sum(number for _, number in status_counts(node_rows(unet))) == len(unet.comparison.nodes)


def test_coverage_names_what_fusion_hides(unet: RunReport) -> None:
    assert "356 inside fused kernels, 1 without a partner" in coverage_line(unet)


def test_statuses_are_read_by_name_and_by_group() -> None:
    assert parse_statuses("drift, fused-away") == {Status.DRIFT, Status.FUSED_AWAY}
    assert parse_statuses("fault") == {status for status in Status if status.is_fault}


def test_an_unknown_status_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown status 'drfit'(.|\n)*drift"):
        parse_statuses("drfit")


def test_choices_are_gathered_by_operator(unet: RunReport) -> None:
    groups = {group.name: group for group in operator_rows(unet.choices)}
    assert groups["attention"].count(ChoiceState.OFF) == 1
    assert groups["resize_conv"].reasons == ("the kernel wants an even number of channels per group",)
    assert groups["int8"].worst is not None
    assert groups["int8"].worst.choice.site.startswith("unet.mid.attn.to_out")
    assert fused_line(unet.choices) == "70 of 72 sites fused, 1 unavailable"


def test_a_choice_without_figures_saves_and_costs_nothing_known() -> None:
    row = ChoiceRow(Choice.parse("user:fast_norm"), ChoiceState.ON)
    (group,) = operator_rows([row])
    assert group.worst is None
    assert math.isnan(group.seconds_saved)
    assert group.interior_nbytes == 0


@pytest.mark.parametrize(
    ("candidate", "baseline", "expected"),
    [(0.0, 0.0, 1.0), (1e-9, 0.0, math.inf), (0.4, 0.2, 2.0), (0.4, math.nan, 0.4)],
)
def test_the_excess_of_a_choice_has_a_result_for_zero_and_for_no_baseline(
    candidate: float, baseline: float, expected: float
) -> None:
    row = ChoiceRow(
        Choice.parse("fusion:gelu@a/gelu#0"), ChoiceState.ON, candidate_error=candidate, baseline_error=baseline
    )
    assert excess(row) == expected


def test_a_slower_candidate_is_called_slower(unet: RunReport) -> None:
    assert unet.timing is not None
    slow = replace(unet.timing, speedup=0.8, low=0.77, high=0.83, confidence=Confidence.SLOWER)
    assert speed_line(slow) == "candidate is 1.25x slower than baseline (speed-up 0.800, 95 % interval 0.770-0.830)"


def test_an_undecided_timing_says_that_it_cannot_tell(unet: RunReport) -> None:
    assert unet.timing is not None
    unsure = replace(unet.timing, speedup=1.02, low=0.94, high=1.09, confidence=Confidence.CANNOT_TELL)
    assert speed_line(unsure).startswith("cannot tell which is faster")
    assert "peak memory" in {finding.label for finding in timing_findings(unsure)}


def test_unknown_memory_and_cost_are_left_out(unet: RunReport) -> None:
    assert unet.timing is not None
    bare = replace(
        unet.timing, peak_bytes_baseline=math.nan, peak_bytes_candidate=math.nan, wire_seconds_per_call=math.nan
    )
    assert [finding.label for finding in timing_findings(bare)] == ["baseline", "candidate", "speed-up"]


def test_files_are_listed_once(unet: RunReport) -> None:
    files = written_files(replace(unet, files=("report.html", "candidate.h5")))
    assert len(files) == len(set(files))
    assert files[0] == "reference.h5"


def test_the_tree_carries_the_worst_of_what_lies_below(unet: RunReport) -> None:
    root = module_tree(node_rows(unet))
    unet_branch = next(child for child in root.children if child.name == "unet")
    down, mid, up = unet_branch.children
    assert (down.status, mid.status, up.status) == (Status.PASS, Status.DRIFT, Status.NONFINITE)
    assert root.nodes == len(unet.comparison.nodes)
    assert up.heat == math.inf
    assert mid.faults == 28


def test_a_path_of_thousands_of_dots_does_not_exhaust_the_stack(samples: ModuleType) -> None:
    assert module_tree(node_rows(samples.hostile("." * 20_000))).nodes > 0


def test_without_a_baseline_a_fault_is_as_hot_as_it_is_over_its_limit(unet: RunReport) -> None:
    row = next(row for row in node_rows(unet) if row.status is Status.DRIFT)
    alone = replace(row, node=replace(row.node, baseline=None), verdict=replace(row.verdict, value=12.0, limit=4.0))
    assert alone.heat == 3.0
    assert replace(alone, verdict=replace(alone.verdict, status=Status.PASS)).heat == 1.0
