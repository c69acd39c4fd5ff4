"""The terminal shows the verdict first, fits its width, and obeys nothing that stands in a name."""

from __future__ import annotations

import io
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from align.compare.model import Comparison, Coverage, Judgement, Status
from align.reports.model import Confidence, RunReport
from align.reports.terminal import print_nodes, print_run, print_tree

HOSTILE = "[bold red]x[/]\x1b[2J\x1b]0;owned\x07\u202e[link=http://evil]\n\r" + "long" * 60


def console(width: int = 100, *, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    return Console(file=file, width=width)


def shown(screen: Console) -> str:
    screen.file.flush()
    raw = screen.file.buffer.getvalue()  # type: ignore[attr-defined]
    assert isinstance(raw, bytes)
    return raw.decode(screen.file.encoding)


def test_the_verdict_is_the_first_line(unet: RunReport) -> None:
    screen = console()
    print_run(unet, screen)
    assert shown(screen).startswith("▲ DRIFT  the output's rel. L2 error is 12.9 times the baseline's")


@pytest.mark.parametrize(
    "part",
    [
        "Worst nodes",
        "Drift begins at",
        "Culprits",
        "70 of 72 sites fused",
        "no kernel",
        "412 ms",
        "1.27-1.33",
        "candidate.h5",
        "Notes",
    ],
)
def test_a_run_tells_all_its_parts(unet: RunReport, part: str) -> None:
    screen = console()
    print_run(unet, screen)
    assert part in shown(screen)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_console_or_a_hundred_columns(
    unet: RunReport, samples: ModuleType, width: int
) -> None:
    for report in (unet, samples.hostile(HOSTILE)):
        screen = console(width)
        print_run(report, screen)
        print_nodes(report, screen)
        assert max(map(len, shown(screen).splitlines())) <= min(width, 100)


def test_nothing_in_a_name_steers_the_terminal(samples: ModuleType) -> None:
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor", legacy_windows=False)
    report = samples.hostile(HOSTILE)
    print_run(report, screen)
    print_nodes(report, screen, top=5)
    print_tree(report, screen)
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[bold red]x[/]" in text


def test_without_a_terminal_there_is_no_colour(unet: RunReport) -> None:
    screen = console()
    print_run(unet, screen)
    assert "\x1b" not in shown(screen)


def test_an_ascii_terminal_is_served(unet: RunReport) -> None:
    screen = console(encoding="ascii")
    print_run(unet, screen)
    print_tree(unet, screen)
    assert shown(screen).startswith("* DRIFT")


def test_only_and_top_choose_the_rows(unet: RunReport) -> None:
    screen = console()
    print_nodes(unet, screen, top=3, only=frozenset({Status.DRIFT}))
    lines = shown(screen).splitlines()
    assert len([line for line in lines if "▲ drift" in line]) == 3
    assert lines[-1].endswith("not shown")
    assert "nonfinite" not in shown(screen)


def test_a_glob_chooses_by_key(unet: RunReport) -> None:
    screen = console()
    print_nodes(unet, screen, glob="decoder.*")
    assert "3 nodes" in shown(screen)
    assert "unet" not in shown(screen)


def test_an_undecided_timing_is_not_dressed_up(unet: RunReport) -> None:
    assert unet.timing is not None
    screen = console()
    print_run(replace(unet, timing=replace(unet.timing, confidence=Confidence.CANNOT_TELL)), screen)
    assert "cannot tell which is faster" in shown(screen)


def test_the_tree_goes_as_deep_as_asked(unet: RunReport) -> None:
    shallow, deep = console(), console()
    print_tree(unet, shallow, depth=1)
    print_tree(unet, deep, depth=4)
    assert "resnets" not in shown(shallow)
    assert "resnets" in shown(deep)


def test_an_empty_run_has_a_verdict_and_no_tables(unet: RunReport) -> None:
    nothing = RunReport(
        "w", "f", (), Comparison((), Coverage(0, 0, 0, 0, 0, 0), False), Judgement("cann-l1", (), Status.UNKNOWN, "")
    )
    screen = console()
    print_run(nothing, screen)
    print_nodes(nothing, screen)
    print_tree(nothing, screen)
    assert shown(screen).startswith("· UNKNOWN  0 nodes, none out of tolerance")
    assert "Worst" not in shown(screen)
