"""Statistics are exact for every dtype, and a digest names dtype, shape and bits."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.dumpers.dtypes import DTYPES, RawTensor, widen
from align.dumpers.model import Statistics
from align.dumpers.statistics import describe, describe_tensor, digest
from align.dumpers.tensors import describe_on_device, to_raw


def _raw(values: Any, dtype: str = "float32") -> RawTensor:
    return RawTensor(np.asarray(values, DTYPES[dtype].carrier), dtype)


def _expect(values: np.ndarray[Any, Any]) -> tuple[float, float, float, float, float, float]:
    """min, max, mean, std, l2, absmax of finite values in 60 digits."""
    finite = values[np.isfinite(values)].reshape(-1)
    with mpmath.workdps(60):
        exact = [mpmath.mpf(float(value)) for value in finite]
        mean = mpmath.fsum(exact) / len(exact)
        std = mpmath.sqrt(mpmath.fsum((value - mean) ** 2 for value in exact) / len(exact))
        l2 = mpmath.sqrt(mpmath.fsum(value * value for value in exact))
        return float(finite.min()), float(finite.max()), float(mean), float(std), float(l2), float(abs(finite).max())


def _reals(seen: Statistics) -> tuple[float, ...]:
    return seen.minimum, seen.maximum, seen.mean, seen.std, seen.l2, seen.absmax


def _close(seen: Statistics, values: np.ndarray[Any, Any]) -> None:
    expected = _expect(values)
    largest = expected[-1]
    assert _reals(seen)[:2] == expected[:2]
    assert seen.absmax == largest
    assert _reals(seen)[2:5] == pytest.approx(expected[2:5], rel=1e-13, abs=1e-14 * largest)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (4097,), (3, 5, 1111)])
def test_floats_are_described_exactly(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 1).to(getattr(torch, dtype))
    seen = describe(to_raw(tensor))
    assert seen.count == tensor.numel()
    _close(seen, np.asarray(tensor.double().numpy()))


@pytest.mark.parametrize(
    "dtype", [name for name, entry in DTYPES.items() if name.startswith("float8") or name in ("float16", "bfloat16")]
)
def test_all_codes_of_a_small_float_are_counted_right(dtype: str) -> None:
    codes = np.arange(2 ** (8 * DTYPES[dtype].itemsize)).astype(f"u{DTYPES[dtype].itemsize}")
    tensor = torch.from_numpy(codes.view(f"i{codes.itemsize}")).view(getattr(torch, dtype))
    values = tensor.double().numpy()
    seen = describe(to_raw(tensor))
    info = torch.finfo(getattr(torch, dtype))
    size = np.abs(values[np.isfinite(values)])
    assert (seen.nan, seen.posinf, seen.neginf) == (
        np.isnan(values).sum(),
        (values == np.inf).sum(),
        (values == -np.inf).sum(),
    )
    assert seen.zero == (values == 0).sum()
    tiny = 0.0 if dtype == "float8_e8m0fnu" else info.smallest_normal
    assert seen.subnormal == ((size > 0) & (size < tiny)).sum()
    assert seen.near_limit == (size > info.max / 2).sum()
    assert (seen.minimum, seen.maximum) == (values[np.isfinite(values)].min(), values[np.isfinite(values)].max())


def test_odd_values_are_counted_and_left_out_of_the_figures() -> None:
    tiny = np.float32(1e-40)
    seen = describe(_raw([np.nan, np.inf, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, 3.0e38, 1.0, -5.0]))
    assert (seen.nan, seen.posinf, seen.neginf, seen.zero, seen.subnormal, seen.near_limit) == (1, 2, 1, 2, 2, 1)
    assert seen.nonfinite == 4
    assert (seen.minimum, seen.maximum) == (-5.0, float(np.float32(3e38)))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 9999])
def test_one_bad_value_anywhere_is_found(bad: float, place: int) -> None:
    values = np.linspace(-2, 5, 10_000).astype(np.float32)
    values[place] = bad
    seen = describe(_raw(values))
    assert seen.nonfinite == 1
    _close(seen, values.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
def test_nothing_finite_gives_nan_figures(dtype: str) -> None:
    seen = describe(_raw([np.nan, np.inf, np.inf], dtype))
    assert all(math.isnan(value) for value in _reals(seen))
    assert (seen.count, seen.nan, seen.posinf) == (3, 1, 2)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_empty_tensors_have_a_stated_description(dtype: str) -> None:
    shape = (0, 3, 2) if dtype == "complex32" else (0, 3)
    seen = describe(RawTensor(np.zeros(shape, DTYPES[dtype].carrier), dtype))
    assert seen.count == 0
    assert all(math.isnan(value) for value in _reals(seen))
    assert len(digest(RawTensor(np.zeros(shape, DTYPES[dtype].carrier), dtype))) == 32


@pytest.mark.parametrize("scale", [1e300, 1.7e308, 1e-300, 5e-324 * 2**20])
def test_norms_of_huge_and_tiny_doubles_neither_overflow_nor_vanish(scale: float) -> None:
    values = np.array([0.5, -0.25, 0.125]) * scale
    seen = describe(_raw(values, "float64"))
    assert seen.l2 == pytest.approx(scale * math.sqrt(0.25 + 0.0625 + 0.015625), rel=1e-14)
    with mpmath.workdps(60):
        _close(seen, values)


def test_a_norm_beyond_float64_is_infinite() -> None:
    assert describe(_raw(np.full(1000, 1.7e308), "float64")).l2 == math.inf


def test_large_mean_costs_no_digits_of_the_spread() -> None:
    values = 1e6 + np.tile([0.0, 1.0], 50_000)
    seen = describe(_raw(values, "float64"))
    assert seen.mean == 1e6 + 0.5
    assert seen.std == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_reach_their_extremes(dtype: str) -> None:
    info = np.iinfo(dtype)
    seen = describe(_raw([info.min, info.max, 0, 1], dtype))
    assert (seen.minimum, seen.maximum) == (float(info.min), float(info.max))
    assert seen.absmax == max(abs(float(info.min)), float(info.max))
    assert seen.zero == (2 if info.min == 0 else 1)
    assert (seen.subnormal, seen.near_limit, seen.nonfinite) == (0, 0, 0)
    assert seen.mean == pytest.approx((info.min + info.max + 1) / 4, abs=seen.absmax * 1e-15)


def test_booleans_are_zeros_and_ones() -> None:
    seen = describe(_raw([True, False, True, True], "bool"))
    assert _reals(seen) == pytest.approx((0.0, 1.0, 0.75, math.sqrt(3) / 4, math.sqrt(3), 1.0))
    assert seen.zero == 1


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_is_described_by_magnitude(dtype: str) -> None:
    seen = describe(_raw([3 + 4j, 0j, -6 + 8j, complex(np.inf, np.nan), complex(np.nan, 0)], dtype))
    assert (seen.minimum, seen.maximum, seen.mean, seen.absmax) == (0.0, 10.0, 5.0, 10.0)
    assert (seen.zero, seen.posinf, seen.nan, seen.count) == (1, 1, 1, 5)


def test_half_complex_is_described_by_magnitude() -> None:
    seen = describe(RawTensor(np.array([[3, 4], [0, 0]], np.float16), "complex32"))
    assert (seen.count, seen.maximum, seen.zero) == (2, 5.0, 1)


def test_finite_complex_parts_never_make_an_infinite_magnitude() -> None:
    seen = describe(_raw([1.7e308 + 1.7e308j], "complex128"))
    assert (seen.posinf, seen.near_limit) == (0, 1)
    assert math.isfinite(seen.absmax)


def test_more_than_two_to_the_31_elements_are_counted() -> None:
    zeros = np.zeros(2**31 + 5, np.bool_)  # only ever read: the system maps one page of zeros
    seen = describe(RawTensor(zeros, "bool"))
    assert (seen.count, seen.zero, seen.maximum) == (2**31 + 5, 2**31 + 5, 0.0)


def test_parts_read_through_the_scratch_join_to_the_whole() -> None:
    values = np.random.default_rng(3).standard_normal(2**18 * 2 + 77).astype(np.float16)
    seen = describe(RawTensor(values, "float16"))
    wide = values.astype(np.float64)
    assert seen.mean == pytest.approx(wide.mean(), rel=1e-9)
    assert seen.std == pytest.approx(wide.std(), rel=1e-12)
    assert (seen.minimum, seen.maximum) == (wide.min(), wide.max())


def test_strided_and_read_only_arrays_are_described() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    values.setflags(write=False)
    assert describe(RawTensor(values[:, ::2], "float32")).mean == 11.0


def test_flushing_subnormals_does_not_lose_half_precision_ones() -> None:
    tensor = torch.full((64,), 2.0**-24, dtype=torch.float16)
    torch.set_flush_denormal(True)
    try:
        seen = describe(to_raw(tensor))
    finally:
        torch.set_flush_denormal(False)
    assert (seen.mean, seen.subnormal, seen.zero) == (2.0**-24, 64, 0)


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
@settings(max_examples=150, deadline=None)
def test_any_singles_agree_with_sixty_digits(values: list[float]) -> None:
    array = np.array(values, np.float32)
    seen = describe(RawTensor(array, "float32"))
    if np.isfinite(array).any():
        _close(seen, array.astype(np.float64))
    assert seen.nonfinite == (~np.isfinite(array)).sum()


def test_results_do_not_depend_on_the_thread_count() -> None:
    values = _raw(np.random.default_rng(0).standard_normal(100_000), "float32")
    before, threads = describe(values), torch.get_num_threads()
    torch.set_num_threads(threads + 3)
    try:
        assert describe(values) == before
    finally:
        torch.set_num_threads(threads)


def test_digest_names_dtype_shape_and_bits() -> None:
    base = _raw([1, 2, 3, 4], "int32")
    assert digest(base) == digest(_raw([1, 2, 3, 4], "int32"))
    others = [
        _raw([1, 2, 3, 5], "int32"),
        RawTensor(base.bits.reshape(2, 2), "int32"),
        RawTensor(base.bits.view(np.float32), "float32"),
    ]
    assert len({digest(base), *map(digest, others)}) == 4


def test_digest_reads_a_strided_array_as_its_values() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest(RawTensor(values.T, "float32")) == digest(RawTensor(values.T.copy(), "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "complex64", "bool"])
def test_the_device_way_agrees_with_the_host_way(dtype: str) -> None:
    tensor = (torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 4).to(getattr(torch, dtype))
    host, device = describe(to_raw(tensor)), describe_on_device(tensor)
    assert _reals(device) == pytest.approx(_reals(host), rel=1e-6 if dtype == "complex64" else 1e-12)
    assert (device.count, device.zero, device.near_limit) == (host.count, host.zero, host.near_limit)


def test_the_device_way_counts_odd_values() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1.0, 3e38])
    device = describe_on_device(tensor)
    assert (device.nan, device.posinf, device.neginf, device.zero, device.near_limit) == (1, 1, 1, 1, 1)
    assert describe_tensor(tensor).near_limit == 1
    assert math.isnan(describe_on_device(torch.empty(0)).mean)


def test_widened_values_are_what_is_described() -> None:
    codes = np.array([0x3F80, 0xC000, 0x0001], np.uint16)
    seen = describe(RawTensor(codes, "bfloat16"))
    assert (seen.minimum, seen.maximum) == (-2.0, 1.0)
    assert widen(RawTensor(codes, "bfloat16"))[2] == np.float32(2.0**-133)
    assert seen.subnormal == 1
