"""Every kind of error, planted in random tensors, is named first; ordinary noise is never called anything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from align.compare.signature import Signature, SignatureKind, diagnose
from align.dumpers.dtypes import RawTensor

Array = npt.NDArray[Any]
Random = np.random.Generator
Plant = Callable[[Array, Random], Array]

SHAPES = ((64, 48), (2, 4, 32, 16), (3, 8, 12, 12), (2, 24, 64))
SEEDS = 3  # with each of four shapes and two dtypes: 24 planted tensors a kind (100 of 100 in a longer run)
SEEDS_OF_NOISE = 15  # with each of six shapes
DTYPES = ("float32", "bfloat16")
NEEDED = 0.95


def bfloat16(values: Array) -> RawTensor:
    """Round to the nearest bfloat16 (ties to even) by adding half a unit to the float32 bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return RawTensor(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), "bfloat16")


def stored(values: Array, dtype: str) -> RawTensor:
    if dtype == "bfloat16":
        return bfloat16(values)
    return RawTensor(values.astype(dtype), dtype)


def widened(raw: RawTensor) -> Array:
    return (raw.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def swap_rows(values: Array, random: Random) -> Array:
    order = random.permutation(values.shape[-2])
    order = np.roll(order, 1) if np.array_equal(order, np.arange(order.size)) else order
    return values[..., order, :]


def spoil(values: Array, random: Random, where: Any) -> Array:
    out = values.copy()
    out[where] += random.standard_normal(out[where].shape)
    return out


def zero_rows(values: Array, random: Random) -> Array:
    out = values.copy().reshape(-1, values.shape[-1])
    out[random.choice(len(out), 3, replace=False)] = 0.0
    return out.reshape(values.shape)


def interleave(values: Array, _: Random) -> Array:
    half = values.shape[-1] // 2
    return np.stack((values[..., :half], values[..., half:]), axis=-1).reshape(values.shape)


def shift_and_fill(values: Array, random: Random) -> Array:
    step = int(random.integers(1, 4))
    return np.concatenate((values[..., step:, :], np.zeros_like(values[..., :step, :])), axis=-2)


def misread(values: Array, _: Random) -> Array:
    return values.swapaxes(-1, -2).reshape(values.shape)


def average(values: Array, _: Random) -> Array:
    return np.broadcast_to(values.mean(-2, keepdims=True), values.shape).copy()


def per_channel(values: Array, random: Random) -> Array:
    return values * random.uniform(0.5, 2.0, values.shape[-1])


def per_channel_bias(values: Array, random: Random) -> Array:
    return values + random.standard_normal(values.shape[-1])


PLANTS: dict[str, tuple[SignatureKind, Plant]] = {
    "missing 1/sqrt(64)": (SignatureKind.FACTOR, lambda v, _: v * 8.0),
    "factor 1.05": (SignatureKind.FACTOR, lambda v, _: v * 1.05),
    "int8 scale left in": (SignatureKind.FACTOR, lambda v, _: v * 127.0),
    "sign flipped": (SignatureKind.SIGN, lambda v, _: -v),
    "offset": (SignatureKind.OFFSET, lambda v, _: v + 0.3),
    "rows permuted": (SignatureKind.PERMUTED, swap_rows),
    "reversed": (SignatureKind.PERMUTED, lambda v, _: v[..., ::-1]),
    "half to interleaved": (SignatureKind.INTERLEAVED, interleave),
    "misread layout": (SignatureKind.TRANSPOSED, misread),
    "rotated axis": (SignatureKind.SHIFTED, lambda v, _: np.roll(v, 2, axis=-2)),
    "shifted rows": (SignatureKind.SHIFTED, shift_and_fill),
    "rows zeroed": (SignatureKind.ZEROED, zero_rows),
    "rows averaged": (SignatureKind.AVERAGED, average),
    "clipped": (SignatureKind.CLIPPED, lambda v, _: np.clip(v, -1.5, 1.5)),
    "an extra relu": (SignatureKind.CLIPPED, lambda v, _: np.maximum(v, 0.0)),
    "tail columns": (SignatureKind.CONFINED, lambda v, r: spoil(v, r, np.s_[..., -3:])),
    "positions beyond 8": (SignatureKind.CONFINED, lambda v, r: spoil(v, r, np.s_[..., 8:, :])),
    "one index": (SignatureKind.CONFINED, lambda v, r: spoil(v, r, np.s_[:, 2])),
    "channel factors": (SignatureKind.SLICE_FACTOR, per_channel),
    "channel offsets": (SignatureKind.SLICE_OFFSET, per_channel_bias),
}


def reference_for(shape: tuple[int, ...], random: Random) -> Array:
    return random.standard_normal(shape) * 2.0 ** random.integers(-3, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_error_is_named_first(name: str, dtype: str) -> None:
    kind, plant = PLANTS[name]
    wrong = []
    for shape in SHAPES:
        for seed in range(SEEDS):
            random = np.random.default_rng(seed)
            reference = random.standard_normal(shape)
            found = diagnose(stored(plant(reference, random), dtype), stored(reference, "float32"))
            if found[0].kind is not kind:
                wrong.append((shape, seed, found[0]))
    assert len(wrong) <= (1.0 - NEEDED) * SEEDS * len(SHAPES), wrong


def first(candidate: RawTensor, reference: RawTensor, **more: Any) -> Signature:
    return diagnose(candidate, reference, **more)[0]


def share_named(
    kinds: set[SignatureKind], make: Callable[[tuple[int, ...], Random], tuple[RawTensor, RawTensor]]
) -> float:
    hits = [
        first(*make(shape, np.random.default_rng(1000 + seed))).kind in kinds
        for shape in (*SHAPES, (257,), (5, 7))
        for seed in range(SEEDS_OF_NOISE)
    ]
    return float(np.mean(hits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rounding_is_called_rounding_and_nothing_else(dtype: str) -> None:
    def make(shape: tuple[int, ...], random: Random) -> tuple[RawTensor, RawTensor]:
        reference = reference_for(shape, random)
        return stored(reference, dtype), stored(reference, "float32")

    assert share_named({SignatureKind.ROUNDING}, make) >= 0.99


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_at_many_terms_is_called_rounding(dtype: str) -> None:
    epsilon = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}[dtype]

    def make(shape: tuple[int, ...], random: Random) -> tuple[RawTensor, RawTensor]:
        reference = reference_for(shape, random)
        noise = random.standard_normal(shape) * reference.std() * epsilon * math.sqrt(random.integers(1, 64) / 12)
        return stored(reference + noise, dtype), stored(reference, "float64")

    assert share_named({SignatureKind.ROUNDING}, make) >= 0.98


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_heavy_random_noise_fits_nothing(dtype: str) -> None:
    def make(shape: tuple[int, ...], random: Random) -> tuple[RawTensor, RawTensor]:
        reference = reference_for(shape, random)
        return stored(reference + 0.3 * reference.std() * random.standard_normal(shape), dtype), stored(
            reference, "float32"
        )

    assert share_named({SignatureKind.NONE_FITS}, make) >= 0.98


def test_unrelated_tensors_fit_nothing() -> None:
    def make(shape: tuple[int, ...], random: Random) -> tuple[RawTensor, RawTensor]:
        return stored(random.standard_normal(shape), "float32"), stored(random.standard_normal(shape), "float32")

    assert share_named({SignatureKind.NONE_FITS}, make) >= 0.98


def test_rounding_of_rows_of_very_different_size_is_not_called_confined() -> None:
    def make(shape: tuple[int, ...], random: Random) -> tuple[RawTensor, RawTensor]:
        reference = random.standard_normal(shape) * 10.0 ** random.uniform(-4, 4, (*shape[:-1], 1))
        return stored(reference, "bfloat16"), stored(reference, "float32")

    assert share_named({SignatureKind.ROUNDING}, make) >= 0.99


@pytest.mark.parametrize(("format_", "mantissa"), [("bfloat16", 7), ("tf32", 10), ("hf32", 11)])
def test_values_of_a_narrower_dtype_are_recognised(format_: str, mantissa: int) -> None:
    cut = np.uint32(23 - mantissa)
    for seed in range(40):
        reference = np.random.default_rng(seed).standard_normal((32, 24)).astype(np.float32) * 1e5
        bits = reference.view(np.uint32)
        nearest = ((bits + (np.uint32(1) << (cut - 1))) >> cut << cut).view(np.float32)
        found = first(RawTensor(nearest, "float32"), RawTensor(reference, "float32"))
        assert found.kind is SignatureKind.COARSE, (format_, found)
        assert found.parameter("mantissa_bits") == mantissa


def test_float16_values_in_a_float32_tensor_are_recognised() -> None:
    reference = np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32)
    found = first(stored(reference.astype(np.float16), "float32"), stored(reference, "float32"))
    assert found.kind is SignatureKind.COARSE
    assert "float16" in found.evidence


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounding_toward_zero_is_told_from_rounding_to_nearest(dtype: str) -> None:
    for seed in range(40):
        reference = np.random.default_rng(seed).standard_normal((16, 48))
        if dtype == "bfloat16":
            bits = (reference.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            nearest = reference.astype(np.float32)
            bits = np.where(np.abs(nearest) > np.abs(reference), np.nextafter(nearest, np.float32(0)), nearest)
        found = first(RawTensor(bits, dtype), stored(reference, "float64"))
        assert found.kind is SignatureKind.TRUNCATED, found
        assert found.parameter("mean_spacings") < 0


def test_truncation_of_float32_to_bfloat16_and_back_is_named() -> None:
    reference = np.random.default_rng(0).standard_normal((16, 48)).astype(np.float32)
    cut = (reference.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    kinds = [found.kind for found in diagnose(RawTensor(cut, "float32"), RawTensor(reference, "float32"))]
    assert kinds[:2] == [SignatureKind.TRUNCATED, SignatureKind.COARSE]


@pytest.mark.parametrize("limit", [448.0, 57344.0, 127.0, 65504.0])
def test_saturation_names_the_limit(limit: float) -> None:
    reference = np.random.default_rng(0).standard_normal((64, 64)) * limit / 3
    found = first(stored(np.clip(reference, -limit, limit), "float32"), stored(reference, "float32"))
    assert found.kind is SignatureKind.CLIPPED
    assert found.parameter("high") == limit
    assert "largest" in found.evidence


def test_a_limit_missing_in_the_candidate_is_named_too() -> None:
    whole = np.random.default_rng(0).standard_normal((64, 64))
    found = first(stored(whole, "float32"), stored(np.maximum(whole, 0), "float32"))
    assert found.kind is SignatureKind.CLIPPED
    assert "the reference stops at 0" in found.evidence


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (8.0, "8"),
        (1 / math.sqrt(80), "1/sqrt(80)"),
        (math.sqrt(64), "8"),
        (2.0, "2"),
        (127.0, "127"),
        (1 / 127, "1/127"),
    ],
)
def test_known_factors_are_named(factor: float, name: str) -> None:
    reference = np.random.default_rng(0).standard_normal((6, 80))
    found = first(stored(reference * factor, "bfloat16"), stored(reference, "float32"))
    assert found.kind is SignatureKind.FACTOR
    assert found.parameter("factor") == pytest.approx(factor, rel=1e-3)
    assert name in found.evidence


def test_an_unknown_factor_gets_no_name() -> None:
    reference = np.random.default_rng(0).standard_normal((6, 80))
    assert first(stored(reference * 1.2345, "float32"), stored(reference, "float32")).evidence.endswith("reference")


def test_stale_values_name_the_other_node() -> None:
    random = np.random.default_rng(0)
    before, now, unrelated = (stored(random.standard_normal((8, 32)), "float16") for _ in range(3))
    found = first(before, now, others={"unrelated": unrelated, "block/forward#0:0@1": before})
    assert found.kind is SignatureKind.STALE
    assert "block/forward#0:0@1" in found.evidence


def test_others_that_do_not_match_change_nothing() -> None:
    random = np.random.default_rng(0)
    reference = stored(random.standard_normal((8, 32)), "float32")
    others = {
        "elsewhere": stored(random.standard_normal((8, 32)), "float32"),
        "scalar": stored(np.float64(3.0), "float32"),
    }
    noisy = stored(reference.bits + random.standard_normal((8, 32)), "float32")
    assert first(noisy, reference, others=others).kind is SignatureKind.NONE_FITS


def erf_gelu(x: Array) -> Array:
    return np.array([0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x.ravel()]).reshape(x.shape)


def tanh_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("has_input", [True, False])
def test_tanh_gelu_against_erf_is_named_with_and_without_the_input(has_input: bool) -> None:
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((16, 64)) * 2
        inputs = (stored(x, "float32"),) if has_input else ()
        found = first(stored(tanh_gelu(x), "float32"), stored(erf_gelu(x), "float32"), inputs=inputs)
        assert found.kind is SignatureKind.GELU_FORM, found
        assert found.parameter("sign") == 1.0
        back = first(stored(erf_gelu(x), "float32"), stored(tanh_gelu(x), "float32"), inputs=inputs)
        assert (back.kind, back.parameter("sign")) == (SignatureKind.GELU_FORM, -1.0)


def rotate(x: Array, layout: str) -> Array:
    angle = np.outer(np.arange(x.shape[-2]), 100.0 ** -np.linspace(0, 1, x.shape[-1] // 2))
    cos, sin = np.cos(angle), np.sin(angle)
    half = x.shape[-1] // 2
    a, b = (x[..., :half], x[..., half:]) if layout == "half" else (x[..., 0::2], x[..., 1::2])
    parts = (a * cos - b * sin, b * cos + a * sin)
    return np.concatenate(parts, -1) if layout == "half" else np.stack(parts, -1).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_wrong_rotary_layout_is_named_from_the_lengths_of_pairs(dtype: str) -> None:
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((2, 4, 32, 16))
        candidate, reference = stored(rotate(x, "interleaved"), dtype), stored(rotate(x, "half"), "float32")
        assert first(candidate, reference, inputs=(stored(x, "float32"),)).kind is SignatureKind.INTERLEAVED


def test_swapped_kept_and_dropped_rows_are_a_mask_polarity() -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        values, keep = random.standard_normal((4, 16, 8)), random.random((4, 16, 1)) < 0.6
        candidate, reference = (
            stored(np.where(keep, 0, values), "float16"),
            stored(np.where(keep, values, 0), "float32"),
        )
        assert first(candidate, reference).kind is SignatureKind.MASK_POLARITY


@pytest.mark.parametrize("dropped", [-1e4, -np.inf])
def test_an_inverted_mask_on_scores_is_a_mask_polarity(dropped: float) -> None:
    random = np.random.default_rng(0)
    scores, keep = random.standard_normal((2, 8, 8)), np.tril(np.ones((8, 8), dtype=bool))
    candidate, reference = (stored(np.where(mask, scores, dropped), "float32") for mask in (~keep, keep))
    assert first(candidate, reference).kind is SignatureKind.MASK_POLARITY


def test_an_error_where_a_mask_is_unset_names_the_input() -> None:
    random = np.random.default_rng(0)
    reference, keep = random.standard_normal((4, 16, 8)), random.random((4, 16)) < 0.7
    candidate = np.where(keep[..., None], reference, random.standard_normal((4, 16, 8)))
    found = first(stored(candidate, "float32"), stored(reference, "float32"), inputs=(RawTensor(keep, "bool"),))
    assert found.kind is SignatureKind.CONFINED
    assert "input 0 is unset" in found.evidence


def test_rows_without_a_pattern_are_confined_rows() -> None:
    random = np.random.default_rng(0)
    reference, dirty = random.standard_normal((4, 16, 8)), random.random((4, 16)) < 0.3
    candidate = np.where(dirty[..., None], random.standard_normal((4, 16, 8)), reference)
    found = first(stored(candidate, "bfloat16"), stored(reference, "float32"))
    assert found.kind is SignatureKind.CONFINED
    assert found.parameter("rows") == dirty.sum()


def test_confined_tells_the_places() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal((2, 8, 32, 16))
    found = first(stored(spoil(reference, random, np.s_[:, 3, 20:]), "bfloat16"), stored(reference, "float32"))
    assert "axis 1 index 3, axis 2 from 20 on" in found.evidence


def test_growth_along_an_axis_is_named() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        reference = random.standard_normal((4, 512, 16))
        noise = random.standard_normal((4, 512, 16)) * np.arange(1, 513)[:, None] / 512
        found = first(stored(reference + noise, "float32"), stored(reference, "float32"))
        assert found.kind is SignatureKind.GROWING, found
        assert found.parameter("exponent") == pytest.approx(1.0, abs=0.1)


def test_equal_tensors_are_equal_also_with_nan() -> None:
    values = stored(np.array([1.0, np.nan, np.inf, -2.0]), "float32")
    assert first(values, values).kind is SignatureKind.EQUAL


def test_nonfinite_on_one_side_is_counted_and_placed() -> None:
    reference = np.random.default_rng(0).standard_normal((2, 8, 16))
    candidate = reference.copy()
    candidate[1, 5] = np.nan
    found = first(stored(candidate, "float16"), stored(reference, "float32"))
    assert found.kind is SignatureKind.NONFINITE
    assert (found.parameter("nan"), found.parameter("rows")) == (16, 1)
    assert "candidate holds 16 NaN" in found.evidence
    assert "axis 0 index 1, axis 1 index 5" in found.evidence


def test_the_side_with_more_nonfinite_values_is_told() -> None:
    reference = np.random.default_rng(0).standard_normal((4, 8))
    candidate = reference.copy()
    candidate[0, 0], reference[3, 1:4] = np.nan, np.inf
    found = first(stored(candidate, "float32"), stored(reference, "float32"))
    assert found.evidence.startswith("reference holds 0 NaN and 3 Inf")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_result_of_zeros_is_zeroed(dtype: str) -> None:
    reference = np.random.default_rng(0).standard_normal((4, 8))
    assert first(stored(np.zeros((4, 8)), dtype), stored(reference, "float32")).kind is SignatureKind.ZEROED


def test_an_inverted_boolean_result_is_a_mask_polarity() -> None:
    keep = np.random.default_rng(0).random((8, 16)) < 0.7
    assert first(RawTensor(~keep, "bool"), RawTensor(keep, "bool")).kind is SignatureKind.MASK_POLARITY


def test_permuted_indices_are_permuted() -> None:
    ids = np.random.default_rng(0).integers(0, 10_000, (16, 8))
    assert first(RawTensor(ids[::-1].copy(), "int64"), RawTensor(ids, "int64")).kind is SignatureKind.PERMUTED


def test_an_overflow_says_whether_the_true_values_fit() -> None:
    reference = np.random.default_rng(0).standard_normal((64, 64)) * 3e4
    with np.errstate(over="ignore"):
        candidate = stored(reference, "float16")
    assert "beyond float16's 65504" in first(candidate, stored(reference, "float32")).evidence
    inside = np.where(np.abs(reference) > 65504, 1.0, reference)
    assert "lies inside the computation" in first(candidate, stored(inside, "float32")).evidence


def test_error_no_larger_than_the_baselines_is_ordinary() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal((16, 64))
    candidate, baseline = (stored(reference + 0.2 * random.standard_normal((16, 64)), "bfloat16") for _ in range(2))
    found = first(candidate, stored(reference, "float32"), baseline=baseline)
    assert found.kind is SignatureKind.ROUNDING
    assert "the unfused run's own" in found.evidence
    assert first(candidate, stored(reference, "float32")).kind is SignatureKind.NONE_FITS


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 4), (1,), (1, 1), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64", "float8_e4m3fn"])
def test_odd_shapes_and_dtypes_get_an_answer(shape: tuple[int, ...], dtype: str) -> None:
    random = np.random.default_rng(0)
    if dtype in ("bfloat16", "float8_e4m3fn"):
        carrier = np.uint16 if dtype == "bfloat16" else np.uint8
        sides = [RawTensor(np.asarray(random.integers(0, 100, shape)).astype(carrier), dtype) for _ in range(2)]
    else:
        sides = [RawTensor(np.asarray(random.integers(0, 100, shape)).astype(dtype), dtype) for _ in range(2)]
    assert 0.0 <= first(sides[0], sides[1]).explained <= 1.0


def test_shapes_that_differ_fit_nothing_and_are_said() -> None:
    found = first(stored(np.ones((2, 3)), "float32"), stored(np.ones((3, 2)), "float32"))
    assert found.kind is SignatureKind.NONE_FITS
    assert "(2, 3) against (3, 2)" in found.evidence


def test_a_huge_tensor_is_thinned_and_indices_stay_true() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal((512, 64, 256)).astype(np.float32)
    candidate = reference.copy()
    candidate[:, 48:] += 1.0 * random.standard_normal((512, 16, 256)).astype(np.float32)
    found = first(RawTensor(candidate, "float32"), RawTensor(reference, "float32"))
    assert found.kind is SignatureKind.CONFINED
    assert "axis 1 from 48 on" in found.evidence


def test_infinities_in_what_the_node_read_raise_no_warning() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal((4, 8)).astype(np.float32)
    source = reference.copy()
    source[0, 0], source[0, 4] = np.inf, -np.inf
    candidate = reference.copy()
    candidate[0] = np.inf
    inputs = (RawTensor(source, "float32"),)
    assert diagnose(RawTensor(candidate, "float32"), RawTensor(reference, "float32"), inputs=inputs)
