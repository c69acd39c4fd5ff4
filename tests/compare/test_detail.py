"""Where the error lies: counts, quantiles, places and slices against plain statements of each."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from align.compare.detail import PROBABILITIES, WORST, detail, detail_chunks, histogram_edges
from align.compare.engine import Pair
from align.dumpers.dtypes import RawTensor

Array = npt.NDArray[Any]


def raw(values: Any, dtype: str = "float32") -> RawTensor:
    """A tensor of a numpy dtype."""
    return RawTensor(np.asarray(values, dtype=dtype), dtype)


def counted(errors: Array) -> tuple[int, ...]:
    """The histogram as written down: below 1e-12, 72 quarter decades, the last one open."""
    edges = np.array(histogram_edges())
    places = np.minimum(np.searchsorted(edges, errors.ravel(), side="right"), 72)
    return tuple(np.bincount(places, minlength=73).tolist())


def share(squares: Array, axis: int) -> float:
    """Share of the worst eighth of an axis' slices."""
    sums = np.sort(np.moveaxis(squares, axis, 0).reshape(squares.shape[axis], -1).sum(axis=1))[::-1]
    return float(sums[: math.ceil(sums.size / 8)].sum() / sums.sum())


SHAPES = st.sampled_from([(7,), (1,), (40, 9), (3, 5, 7, 2), (2, 70_000), (300, 300), (70_001,), (9, 1, 4)])


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from(["float32", "float64", "float16", "complex64", "int64"]), st.integers(0, 2**32 - 1))
def test_detail_is_what_its_plain_statement_says(shape: tuple[int, ...], dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    r = rng.standard_normal(shape)
    c = r + rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, 0, shape) * (rng.random(shape) < 0.9)
    left, right = ((x * 1e6 if dtype == "int64" else x).astype(dtype) for x in (c, r))
    wide = "complex128" if dtype == "complex64" else "int64" if dtype == "int64" else "float64"
    errors = np.abs(left.astype(wide) - right.astype(wide)).astype(np.float64)
    found = detail(raw(left, dtype), raw(right, dtype))
    assert found.histogram == counted(errors)
    ordered = np.sort(errors.ravel())
    for (p, value), wanted in zip(found.quantiles, PROBABILITIES, strict=True):
        truth = ordered[math.ceil(wanted * ordered.size) - 1]
        assert p == wanted
        assert abs(value - truth) <= truth / 256
    places = np.lexsort((np.arange(errors.size), -errors.ravel()))[:WORST]
    assert [index for index, _, _ in found.worst] == [tuple(map(int, np.unravel_index(i, shape))) for i in places]
    if dtype != "complex64":
        assert [(a, b) for _, a, b in found.worst] == [(float(left.flat[i]), float(right.flat[i])) for i in places]
    assert [(axis, extent) for axis, extent, _ in found.axes] == list(enumerate(shape))
    if errors.any():
        for axis, _, value in found.axes:
            assert abs(value - share(errors**2, axis)) < 1e-9 or (shape[axis] > 65_536 and 0.125 < value < 0.3)


def test_a_faulty_head_stands_out_on_its_axis_only() -> None:
    rng = np.random.default_rng(0)
    r = rng.standard_normal((2, 16, 64, 32)).astype(np.float32)
    c = r + np.float32(1e-6) * rng.standard_normal(r.shape).astype(np.float32)
    c[:, 5] += np.float32(0.1)
    shares = [value for _, _, value in detail(raw(c), raw(r)).axes]
    assert shares[1] > 0.99
    assert max(shares[0], shares[2], shares[3]) < 0.6


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_what_is_not_finite_is_left_out(dtype: str) -> None:
    c, r = np.arange(20.0), np.arange(20.0) + 1
    c[3], r[4], c[5], r[5] = np.nan, np.inf, -np.inf, -np.inf
    found = detail(raw(c, dtype), raw(r, dtype))
    assert sum(found.histogram) == 17
    assert len(found.worst) == min(WORST, 17)
    assert not {(3,), (4,), (5,)} & {index for index, _, _ in found.worst}
    assert found.quantiles[-1] == (1.0, 1.0)


@pytest.mark.parametrize(("shape", "axes"), [((), ()), ((0, 3), ((0, 0, 0.0), (1, 3, 0.0)))])
def test_scalars_and_empty_tensors_have_a_detail(shape: tuple[int, ...], axes: tuple[Any, ...]) -> None:
    found = detail(raw(np.ones(shape)), raw(np.zeros(shape)))
    assert found.axes == axes
    assert sum(found.histogram) == int(np.prod(shape))
    assert found.worst == (((((), 1.0, 0.0)),) if shape == () else ())


def test_threads_and_chunks_do_not_change_a_bit() -> None:
    rng = np.random.default_rng(1)
    r = rng.standard_normal((1001, 1100)).astype(np.float32)
    c = r + np.float32(1e-3) * rng.standard_normal(r.shape).astype(np.float32)
    one = detail(raw(c), raw(r), threads=1)
    assert detail(raw(c), raw(r), threads=3) == one
    cuts = [0, 5, 700_000, 700_001, r.size]
    chunks = [(c.ravel()[a:b], r.ravel()[a:b]) for a, b in itertools.pairwise(cuts)]
    assert detail_chunks(chunks, Pair(r.shape, "float32", "float32")) == one


def test_identical_tensors_have_no_error_anywhere() -> None:
    found = detail(raw(np.ones((8, 8))), raw(np.ones((8, 8))))
    assert found.histogram[0] == 64
    assert {value for _, value in found.quantiles} == {0.0}
    assert [value for _, _, value in found.axes] == [0.0, 0.0]


def test_slices_of_a_very_long_axis_are_taken_in_groups() -> None:
    r = np.zeros(5_000_001, np.float32)
    c = r.copy()
    c[:500_000] = 1
    assert detail(raw(c), raw(r)).axes[0][2] > 0.99


def test_places_left_out_do_not_crowd_out_the_others() -> None:
    c = np.ones(30)
    c[:20] = np.nan
    found = detail(raw(c), raw(np.ones(30)))
    assert found.quantiles[-1] == (1.0, 0.0)
    assert found.histogram[0] == 10
