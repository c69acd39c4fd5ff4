"""Figures are written as people read them, at every border of their formats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from align.reports.numbers import UNKNOWN, count, figure, nbytes, percent, plural, seconds, shape, times
from align.reports.text import one_line, printable, shorten


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (123.45, "123"),
        (9.996, "10.0"),
        (99.96, "100"),
        (0.001, "0.00100"),
        (0.0123456, "0.0123"),
        (0.00099, "9.90e-04"),
        (-3.14159, "-3.14"),
        (99999.0, "99999"),
        (123456.0, "1.23e+05"),
        (math.nan, UNKNOWN),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (5e-324, "4.94e-324"),
    ],
)
def test_a_figure_has_three_significant_digits(value: float, expected: str) -> None:
    assert figure(value) == expected


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_a_figure_is_within_half_a_per_cent_of_its_value(value: float) -> None:
    assert float(figure(value)) == pytest.approx(value, rel=0.0051, abs=1e-322)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0 s"),
        (1.234, "1.23 s"),
        (0.3173, "317 ms"),
        (4.1e-6, "4.10 us"),
        (2e-9, "2.00 ns"),
        (125.0, "2 min 5 s"),
        (0.9996, "1.00 s"),
        (math.nan, UNKNOWN),
        (-0.002, "-2.00 ms"),
        (3e-11, "0.0300 ns"),
    ],
)
def test_seconds_take_the_unit_that_suits(value: float, expected: str) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0 B"), (999, "999 B"), (999.7, "1.00 kB"), (1.41e9, "1.41 GB"), (math.nan, UNKNOWN)]
)
def test_bytes_are_decimal(value: float, expected: str) -> None:
    assert nbytes(value) == expected


@pytest.mark.parametrize(
    ("share", "expected"), [(1.0, "100 %"), (0.99999, "> 99.9 %"), (0.973, "97.3 %"), (0.0, "0 %"), (math.nan, UNKNOWN)]
)
def test_per_cent_never_claims_everything_when_it_is_not(share: float, expected: str) -> None:
    assert percent(share) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.3, "1.30x"), (812.0, "812x"), (1.23e6, "1.2e+06x"), (math.inf, "inf"), (math.nan, UNKNOWN)],
)
def test_factors_end_in_x(value: float, expected: str) -> None:
    assert times(value) == expected


def test_counts_shapes_and_plurals_read_well() -> None:
    assert (count(12345), plural(1, "node"), plural(0, "node")) == ("12,345", "1 node", "0 nodes")
    assert (shape((1, 3, 64)), shape(())) == ("1x3x64", "scalar")


@given(st.text(), st.integers(min_value=0, max_value=40))
def test_a_shortened_text_fits_and_keeps_its_end(text: str, width: int) -> None:
    short = shorten(text, width)
    assert len(short) <= width
    assert short == text or width <= 3 or ("..." in short and text.endswith(short[-1]))


@given(st.text(alphabet=st.characters()))
def test_no_control_or_direction_character_survives(text: str) -> None:
    shown = printable(text)
    assert not any(
        ord(char) < 32 or 0x7F <= ord(char) <= 0x9F or 0x202A <= ord(char) <= 0x202E or 0xD800 <= ord(char) <= 0xDFFF
        for char in shown
    )


def test_an_escape_sequence_is_shown_not_obeyed() -> None:
    assert one_line("a\x1b[2J\nb\t\u202ec") == "a\\x1b[2J b \\u202ec"
