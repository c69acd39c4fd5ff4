"""The measures, against plain statements of each formula in float64 or with 50 digits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from align.compare.engine import Pair
from align.compare.measures import Accumulator, Depth, measure, measure_chunks, measure_core
from align.compare.model import Measures
from align.dumpers.dtypes import DTYPES, RawTensor, float8_table, widen
from align.dumpers.errors import UsageError

Array = npt.NDArray[Any]
BLOCK = 16384


def raw(values: Any, dtype: str = "float32") -> RawTensor:
    """A tensor of a numpy dtype."""
    return RawTensor(np.asarray(values, dtype=dtype), dtype)


def stored(values: Array, dtype: str) -> RawTensor:
    """Values rounded in any way to a dtype of the table."""
    if dtype == "bfloat16":
        return RawTensor((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), dtype)
    if dtype.startswith("float8"):
        table = float8_table(dtype).astype(np.float64)
        table[~np.isfinite(table)] = 1e30
        return RawTensor(np.abs(values[..., None] - table).argmin(axis=-1).astype(np.uint8), dtype)
    if dtype == "complex32":
        return RawTensor(np.stack([values, -values], axis=-1).astype(np.float16), dtype)
    if dtype.startswith("complex"):
        return RawTensor((values * (1 - 1j)).astype(dtype), dtype)
    if dtype.startswith("uint"):
        return RawTensor(np.abs(values * 50).astype(dtype), dtype)
    return RawTensor(
        (values * 50 if "int" in dtype else values > 0 if dtype == "bool" else values).astype(dtype), dtype
    )


def exact_norms(c: Array, r: Array) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Cosine distance and relative L2 with 50 digits."""
    with mpmath.workdps(60):
        left, right = [mpmath.mpf(float(x)) for x in c.ravel()], [mpmath.mpf(float(x)) for x in r.ravel()]
        cc, rr = mpmath.fsum(x * x for x in left), mpmath.fsum(x * x for x in right)
        dd = mpmath.fsum((x - y) ** 2 for x, y in zip(left, right, strict=True))
        dot = mpmath.fsum(x * y for x, y in zip(left, right, strict=True))
        return 1 - dot / mpmath.sqrt(cc * rr), mpmath.sqrt(dd / rr)


def close(value: float, expected: Any, rel: float = 1e-9, absolute: float = 1e-300) -> bool:
    """Whether a figure is the expected one but for rounding."""
    if math.isinf(value):
        return float(expected) == value
    return bool(abs(value - expected) <= rel * abs(expected) + absolute)


def plain(c: Array, r: Array) -> dict[str, float]:
    """Each formula as it is written down, in float64, of finite values."""
    c, r = c.astype(np.float64).ravel(), r.astype(np.float64).ravel()
    d = np.abs(c - r)
    relative = d / (np.abs(r) + 1e-7)
    normal = relative[np.abs(r) >= 2.0**-14]
    return {
        "max_abs": d.max(),
        "mare": relative.max(),
        "mere": relative.mean(),
        "rmse": math.sqrt(np.mean(d**2)),
        "share_close": np.mean(relative < 1e-3),
        "mare_normal": normal.max(initial=0.0),
        "mere_normal": normal.mean() if normal.size else 0.0,
        "small_count": np.sum(np.abs(r) < 2.0**-14),
        "small_errors": np.sum((np.abs(r) < 2.0**-14) & (d > 2.0**-30)),
        "mean_candidate": c.mean(),
        "mean_reference": r.mean(),
        "min_candidate": c.min(),
        "max_candidate": c.max(),
        "min_reference": r.min(),
        "max_reference": r.max(),
    }


def ulps(c: Array, r: Array, rounded: Array) -> Array:
    """|c - r| in units of the last place of `rounded`, which numpy knows."""
    return np.abs(c.astype(np.float64) - r.astype(np.float64)) / np.abs(np.spacing(rounded)).astype(np.float64)


FLOATS = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_figure_is_that_of_its_formula(data: st.DataObject) -> None:
    c = data.draw(FLOATS)
    r = data.draw(hnp.arrays(np.float32, c.shape, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    r = np.where(data.draw(hnp.arrays(np.bool_, c.shape)), r, c)
    found = measure(raw(c), raw(r))
    for name, value in plain(c, r).items():
        scale = np.abs(c).mean(dtype=np.float64) * 1e-14 + np.abs(r).mean(dtype=np.float64) * 1e-14
        assert close(getattr(found, name), value, 1e-12, scale if "mean" in name else 1e-300), name
    index = found.max_abs_index[0]
    assert index == int(np.argmax(np.abs(c.astype(np.float64) - r.astype(np.float64))))
    if np.any(c) and np.any(r):
        distance, relative = exact_norms(c, r)
        assert close(found.cosine_distance, distance, 1e-12, 1e-15)
        assert close(found.rel_l2, relative, 1e-12)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1e-3, 1e-6, 0.0, 1.0]),
    st.floats(-3, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "float64"]),
)
def test_cosine_distance_keeps_its_digits_at_any_factor(noise: float, power: float, seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    r = rng.standard_normal(50).astype(dtype)
    c = ((r + noise * rng.standard_normal(50)) * 10**power).astype(dtype)
    distance, relative = exact_norms(c, r)
    found = measure_core(raw(c, dtype), raw(r, dtype))
    assert close(found.cosine_distance, distance, 1e-7, 1e-28)
    assert close(found.rel_l2, relative, 1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(-1020, 1000), st.integers(-1060, 1010), st.integers(0, 2**32 - 1))
def test_extreme_float64_neither_overflows_nor_vanishes(high: int, low: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    r = np.ldexp(rng.standard_normal(20), rng.choice([high, low], 20))
    c = r + np.ldexp(rng.standard_normal(20), low - 10)
    if not (np.isfinite(c).all() and np.isfinite(r).all() and np.any(c) and np.any(r)):
        return
    distance, relative = exact_norms(c, r)
    found = measure(raw(c, "float64"), raw(r, "float64"))
    assert close(found.cosine_distance, distance, 1e-7, 1e-24)
    assert close(found.rel_l2, relative, 1e-10)


@pytest.mark.parametrize("scale", [1e300, 1e-300, 1.7e308, 5e-324])
def test_huge_and_tiny_float64_have_the_figures_of_their_shape(scale: float) -> None:
    c, r = np.array([1.0, -1.0, 1.0]) * scale, np.array([1.0, 1.0, -1.0]) * scale
    found = measure(raw(c, "float64"), raw(r, "float64"))
    assert close(found.rel_l2, math.sqrt(8 / 3))
    assert close(found.cosine_distance, 4 / 3)
    if scale > 1:
        assert close(found.mare, 2.0)
        assert close(found.mean_candidate, scale / 3)


def test_blocks_of_different_scales_add_up() -> None:
    r = np.concatenate([np.full(BLOCK, 1e-280), np.zeros(BLOCK), np.full(BLOCK, 1e290), np.ones(5)])
    c = r * 1.5
    found = measure(raw(c, "float64"), raw(r, "float64"))
    assert close(found.rel_l2, 0.5)
    assert close(found.rmse, 0.5e290 * math.sqrt(BLOCK / r.size))
    assert found.cosine_distance < 1e-15


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float16", np.float16), ("float32", np.float32), ("float64", np.float64)]
)
def test_ulp_distances_are_in_units_of_the_rounded_reference(dtype: str, rounding: type) -> None:
    rng = np.random.default_rng(1)
    r: Array = (rng.standard_normal(3001) * 10.0 ** rng.uniform(-6, 4, 3001)).astype(rounding)
    c: Array = np.array(
        [x + n * np.spacing(x) for x, n in zip(r, rng.integers(0, 90, r.size), strict=True)], dtype=rounding
    )
    expected = np.sort(ulps(c, r, r))
    found = measure(raw(c, dtype), raw(r, dtype))
    assert found.ulp_max == expected[-1]
    assert found.ulp_p50 == expected[math.ceil(0.5 * r.size) - 1]
    assert found.ulp_p99 == expected[math.ceil(0.99 * r.size) - 1]


def test_the_reference_is_rounded_to_the_candidates_dtype_before_its_ulp_is_taken() -> None:
    r = np.array([1.9999999, 2.0 - 2.0**-11, 2.0 - 2.0**-11 - 1e-6, 6e-8, 0.0, 1e9], np.float32)
    c = np.array([2.0, 1.0, 1.0, 0.0, 1e-7, 65504.0], np.float16)
    expected = ulps(c, r, np.append(r[:-1].astype(np.float16), np.float16(40_000)))
    for i in range(r.size):
        assert measure(raw(c[i : i + 1], "float16"), raw(r[i : i + 1])).ulp_max == expected[i]
    assert (
        measure(raw(r[:1]), raw(c[:1], "float16")).ulp_max == abs(float(r[0]) - 2.0) * 512
    )  # the narrower side's units


def test_ulp_quantiles_are_at_most_one_part_in_64_below_the_truth() -> None:
    rng = np.random.default_rng(2)
    r = rng.standard_normal(50_000).astype(np.float32)
    c = (r * (1 + 1e-4 * rng.standard_normal(r.size))).astype(np.float32)
    expected = np.sort(ulps(c, r, r))
    found = measure(raw(c), raw(r))
    for value, truth in ((found.ulp_p50, expected[24_999]), (found.ulp_p99, expected[49_499])):
        assert truth * (1 - 1 / 64) <= value <= truth


@pytest.mark.parametrize("candidate", DTYPES)
@pytest.mark.parametrize("reference", DTYPES)
def test_any_pair_of_dtypes_is_measured_as_its_values(candidate: str, reference: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.uniform(0.25, 2, 200)
    left, right = stored(values, candidate), stored(values * rng.uniform(0.99, 1.01, 200), reference)
    found = measure(left, right)
    c, r = widen(left).astype(np.complex128), widen(right).astype(np.complex128)
    assert close(found.max_abs, np.abs(c - r).max())
    assert close(found.rel_l2, np.linalg.norm(c - r) / np.linalg.norm(r))
    assert close(found.mere, np.mean(np.abs(c - r) / (np.abs(r) + 1e-7)))
    assert close(
        found.cosine_distance, np.sum(np.abs(c / np.linalg.norm(c) - r / np.linalg.norm(r)) ** 2) / 2, 1e-9, 1e-15
    )
    assert found.mismatched == 0
    core = measure_core(left, right)
    assert (core.max_abs, core.mare, core.max_abs_index) == (found.max_abs, found.mare, found.max_abs_index)
    assert close(core.rel_l2, found.rel_l2, 1e-14)


@pytest.mark.parametrize("name", [n for n in DTYPES if n.startswith("float8") or n in ("float16", "bfloat16")])
def test_every_code_of_a_narrow_float_equals_itself_widened(name: str) -> None:
    bits = np.arange(256 if name.startswith("float8") else 65536).astype(
        DTYPES[name].carrier if name != "float16" else "uint16"
    )
    narrow = RawTensor(bits.view(np.float16) if name == "float16" else bits, name)
    found = measure(narrow, raw(widen(narrow)))
    assert (found.max_abs, found.mismatched) == (0.0, 0)
    values = widen(narrow)
    assert found.nan_candidate == found.nan_reference == np.isnan(values).sum()
    assert found.max_candidate == values[np.isfinite(values)].max()


def test_64_bit_integers_are_compared_exactly() -> None:
    c, r = np.array([2**53 + 1, -(2**62), 5]), np.array([2**53, 2**62, 5])
    found = measure(raw(c[:1], "int64"), raw(r[:1], "int64"))
    assert (found.max_abs, found.ulp_max, found.max_abs_index) == (1.0, 1.0, (0,))
    assert measure(raw(c, "int64"), raw(r, "int64")).max_abs == 2.0**63
    wide = measure(raw([2**64 - 1], "uint64"), raw([-1], "int64"))
    assert wide.max_abs == 2.0**64


def test_booleans_count_as_zero_and_one() -> None:
    found = measure(raw([True, False, True], "bool"), raw([True, True, True], "bool"))
    assert (found.max_abs, found.max_abs_index, found.ulp_max) == (1.0, (1,), 1.0)
    assert close(found.mean_candidate, 2 / 3)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize(
    ("c", "r", "mismatched"),
    [(NAN, NAN, 0), (INF, INF, 0), (-INF, -INF, 0), (INF, -INF, 1), (NAN, INF, 1), (INF, 1.0, 1), (1.0, NAN, 1)],
)
def test_nan_and_inf_agree_only_with_the_same(dtype: str, c: float, r: float, mismatched: int) -> None:
    def tensor(value: float) -> RawTensor:
        if dtype == "bfloat16":
            return stored(np.array([1.0, value, 2.0], np.float32), dtype)
        return raw([1.0, value, 2.0], dtype)

    found = measure(tensor(c), tensor(r))
    assert found.mismatched == mismatched
    assert (found.nan_candidate, found.nan_reference) == (int(math.isnan(c)), int(math.isnan(r)))
    assert (found.inf_candidate, found.inf_reference) == (int(math.isinf(c)), int(math.isinf(r)))
    assert (found.count, found.max_abs, found.rel_l2, found.max_candidate) == (3, 0.0, 0.0, 2.0)


def test_figures_leave_out_what_is_not_finite() -> None:
    rng = np.random.default_rng(4)
    c, r = (rng.standard_normal(3 * BLOCK + 7).astype(np.float32) for _ in "cr")
    odd = rng.random(c.size) < 0.001
    odd[BLOCK : 2 * BLOCK] = True
    hurt = np.where(odd, np.float32(INF), c)
    found, wanted = measure(raw(hurt), raw(r)), measure(raw(c[~odd]), raw(r[~odd]))
    place = found.max_abs_index[0]
    assert abs(float(hurt[place]) - float(r[place])) == found.max_abs == wanted.max_abs
    for name in (
        "rel_l2",
        "cosine_distance",
        "mere",
        "mare",
        "rmse",
        "mean_candidate",
        "min_reference",
        "ulp_p50",
        "ulp_max",
    ):
        assert close(getattr(found, name), getattr(wanted, name), 1e-12), name
    assert (found.inf_candidate, found.mismatched) == (odd.sum(), odd.sum())


def test_zero_reference_has_stated_results() -> None:
    zero, one = raw(np.zeros(5)), raw(np.ones(5))
    both, only = measure(zero, zero), measure(one, zero)
    assert (both.rel_l2, both.cosine_distance, both.snr_db, both.ulp_max) == (0.0, 0.0, INF, 0.0)
    assert (only.rel_l2, only.cosine_distance, only.snr_db) == (INF, 1.0, -INF)
    assert measure(zero, one).cosine_distance == 1.0
    assert measure(raw(np.zeros(5), "float64"), raw(np.ones(5), "float64")).rel_l2 == 1.0


@pytest.mark.parametrize("found", [
    measure(raw(np.zeros((3, 0))), raw(np.zeros((3, 0)))),
    measure(raw([NAN, INF]), raw([NAN, INF])),
])  # fmt: skip
def test_with_nothing_to_compare_every_error_is_zero(found: Measures) -> None:
    assert (found.cosine_distance, found.max_abs, found.rel_l2, found.mere, found.ulp_p99, found.rmse) == (0,) * 6
    assert (found.max_abs_index, found.share_close, found.snr_db) == ((), 1.0, INF)
    assert math.isnan(found.mean_candidate)
    assert math.isnan(found.min_reference)


def test_a_scalar_is_a_tensor_of_one_element() -> None:
    found = measure(raw(3.0), raw(2.0))
    assert (found.count, found.max_abs, found.max_abs_index, found.rel_l2) == (1, 1.0, (), 0.5)
    assert found.cosine_distance == 0.0


def test_opposite_tensors_are_two_apart() -> None:
    r = np.random.default_rng(5).standard_normal(100).astype(np.float32)
    assert close(measure(raw(-r), raw(r)).cosine_distance, 2.0)


def test_an_exact_multiple_has_no_cosine_distance() -> None:
    r = np.random.default_rng(6).standard_normal(100_000).astype(np.float32)
    assert measure(raw(r * np.float32(3)), raw(r)).cosine_distance < 1e-14
    assert measure(raw(r * np.float32(2)), raw(r)).cosine_distance == 0.0


@pytest.mark.parametrize("width", [2, 5, 64, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 40_000])
def test_zero_rows_are_found_wherever_blocks_end(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = max(6, 70_000 // width)
    r = rng.standard_normal((rows, width)).astype(np.float32)
    c = np.where(rng.random(r.shape) < 0.3, np.float32(0), r)
    c[::2] = 0
    r[::4] = 0
    expected = int((~c.any(axis=1) & r.any(axis=1)).sum())
    assert measure(raw(c), raw(r)).zero_rows == expected > 0
    assert measure_core(raw(c, "float64"), raw(r, "float64")).zero_rows == expected
    if width < 1001:
        assert measure(raw(c, "complex64"), raw(r, "complex64")).zero_rows == expected


def test_an_index_has_the_tensors_axes_and_ties_go_to_the_first() -> None:
    r = np.zeros((3, 200, 100), np.float32)
    c = r.copy()
    c[1, 150, 7] = c[2, 0, 0] = 5
    assert measure(raw(c), raw(r)).max_abs_index == (1, 150, 7)


def test_shapes_that_differ_are_refused_with_both() -> None:
    with pytest.raises(UsageError, match=r"candidate \[2, 3\], reference \[3, 2\]"):
        measure(raw(np.zeros((2, 3))), raw(np.zeros((3, 2))))


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown dtype"):
        measure(RawTensor(np.zeros(3), "float3"), raw(np.zeros(3)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
def test_threads_and_chunks_do_not_change_a_bit(dtype: str) -> None:
    rng = np.random.default_rng(7)
    count = 600_001 if dtype.startswith("complex") else 5_000_011
    values = rng.standard_normal(count)
    left = stored(values, dtype)
    right = stored(values + 1e-3 * rng.standard_normal(count), dtype)
    one = measure(left, right, threads=1)
    assert measure(left, right, threads=2) == one
    assert measure(left, right, threads=3) == one
    cuts = [0, 1, 100_000, 400_000, 400_001, count]
    chunks = [(left.bits[a:b], right.bits[a:b]) for a, b in itertools.pairwise(cuts)]
    assert measure_chunks(chunks, Pair((count,), dtype, dtype)) == one
    core = measure_chunks(chunks, Pair((count,), dtype, dtype), depth=Depth.CORE, threads=1)
    assert str(core) == str(measure_core(left, right, threads=2))


def test_a_stream_may_reuse_its_buffers_and_must_be_whole() -> None:
    buffer = np.zeros(1000, np.float32)
    accumulator = Accumulator(Pair((2000,), "float32", "float32"))
    for value in (1, 2):
        buffer[:] = value
        accumulator.add(buffer, np.ones(1000, np.float32))
        buffer[:] = 99
    assert accumulator.finish().max_abs == 1.0
    with pytest.raises(UsageError, match="1000 elements came"):
        measure_chunks([(buffer, buffer)], Pair((2000,), "float32", "float32"))


def test_more_than_2_to_the_24_elements_keep_their_digits() -> None:
    count = 2**24 + 12_345
    r = np.full(count, 0.1, np.float32)
    c = r.copy()
    c[-1] += np.float32(0.1)
    found = measure(raw(c), raw(r))
    error = float(c[-1]) - float(r[-1])
    size = float(r[0])
    assert found.max_abs_index == (count - 1,)
    assert close(found.rel_l2, error / (size * math.sqrt(count)), 1e-13)
    assert close(found.mean_reference, size, 1e-13)
    with mpmath.workdps(50):
        rr, cr = count * mpmath.mpf(size) ** 2, (count - 1) * mpmath.mpf(size) ** 2 + mpmath.mpf(float(c[-1])) * size
        cc = (count - 1) * mpmath.mpf(size) ** 2 + mpmath.mpf(float(c[-1])) ** 2
        assert close(found.cosine_distance, 1 - cr / mpmath.sqrt(cc * rr), 1e-9)


def test_strided_tensors_are_measured_as_they_read() -> None:
    r = np.random.default_rng(8).standard_normal((30, 40)).astype(np.float32)
    assert measure(RawTensor(r.T, "float32"), raw(np.ascontiguousarray(r.T))).max_abs == 0.0
