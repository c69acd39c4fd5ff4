"""Faults that people met in real models, rebuilt small in torch: the node where each begins shows its signature."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from align.compare.signature import Signature, SignatureKind, diagnose
from align.dumpers.dtypes import RawTensor

torch = pytest.importorskip("torch")
F = torch.nn.functional

Tensor = "torch.Tensor"


def raw(tensor: Tensor) -> RawTensor:
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return RawTensor(tensor.view(torch.uint16).numpy(), "bfloat16")
    return RawTensor(tensor.numpy(), str(tensor.dtype).removeprefix("torch."))


def first(candidate: Tensor, reference: Tensor, *inputs: Tensor) -> Signature:
    return diagnose(raw(candidate), raw(reference), inputs=tuple(map(raw, inputs)))[0]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def test_a_query_without_any_key_is_nan_in_the_composite_only() -> None:
    query, keep = drawn(1, 6, 16), torch.ones(6, 6, dtype=torch.bool).tril()
    keep[5] = False
    scores = (query @ query.mT / 4).masked_fill(~keep, -math.inf)
    composite, fused = torch.softmax(scores, -1) @ query, F.scaled_dot_product_attention(query, query, query, keep)
    found = first(fused, composite)
    assert found.kind is SignatureKind.NONFINITE
    assert "reference holds 16 NaN" in found.evidence
    assert "axis 1 from 5 on" in found.evidence or "axis 1 index 5" in found.evidence


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype.*:UserWarning")
def test_padding_zeroed_by_the_nested_tensor_path_is_zeroed_rows() -> None:
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 1).eval()
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    x, outputs = drawn(2, 6, 32), []
    for is_fast in (True, False):
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(is_fast)
        try:
            outputs.append(encoder(x, src_key_padding_mask=padding))
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
    found = first(outputs[0], outputs[1])
    assert found.kind is SignatureKind.ZEROED
    assert found.parameter("rows") == 2
    assert "axis 0 index 1, axis 1 from 4 on" in found.evidence


def test_an_additive_mask_taken_for_a_boolean_one_is_a_mask_polarity() -> None:
    query, bias = drawn(1, 6, 16), torch.zeros(6, 6)
    bias[:, 4:] = -1e4
    right = F.scaled_dot_product_attention(query, query, query, bias)
    wrong = F.scaled_dot_product_attention(query, query, query, bias.bool())
    assert first(wrong, right, query, query, query, bias).kind is SignatureKind.MASK_POLARITY


def test_a_boolean_mask_of_the_opposite_sense_is_a_mask_polarity() -> None:
    query, key, value = drawn(2, 4, 8, 16), drawn(2, 4, 8, 16, seed=2), drawn(2, 4, 8, 16, seed=3)
    keep = torch.rand(2, 1, 8, 8) < 0.7
    right, wrong = (F.scaled_dot_product_attention(query, key, value, mask) for mask in (keep, ~keep))
    assert first(wrong, right, query, key, value, keep).kind is SignatureKind.MASK_POLARITY


def test_a_mask_left_out_is_said() -> None:
    query, keep = drawn(2, 4, 8, 16), torch.ones(8, 8, dtype=torch.bool).tril()
    right, wrong = (F.scaled_dot_product_attention(query, query, query, mask) for mask in (keep, None))
    assert first(wrong, right, query, query, query, keep).kind is SignatureKind.MASK_IGNORED


def test_attention_without_its_softmax_is_averaged_rows() -> None:
    query, key, value = (drawn(1, 24, 32, seed=seed).half() for seed in (1, 2, 3))
    averaged = value.mean(-2, keepdim=True).expand_as(value)
    found = first(averaged, F.scaled_dot_product_attention(query * 3, key, value))
    assert found.kind is SignatureKind.AVERAGED
    assert found.parameter("axis") == 1


def test_batch_norm_folded_in_bfloat16_is_an_error_of_few_roundings() -> None:
    conv, norm = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16).eval()
    norm.running_mean.normal_(0, 3)
    norm.running_var.uniform_(1e-3, 2)
    scale = (norm.weight * torch.rsqrt(norm.running_var + norm.eps)).bfloat16()
    weight = conv.weight.bfloat16() * scale[:, None, None, None]
    bias = norm.bias.bfloat16() - norm.running_mean.bfloat16() * scale
    x = drawn(2, 16, 16, 16).bfloat16()
    folded, truth = F.conv2d(x, weight, bias, padding=1), norm(conv(x.float()))
    # Each channel keeps the rounding of its own folded bias, so an offset a channel is a right answer too.
    assert first(folded, truth).kind in (SignatureKind.ROUNDING, SignatureKind.SLICE_OFFSET)


def test_statistics_overflowed_in_half_make_channels_constant() -> None:
    norm = torch.nn.BatchNorm2d(4).eval()
    norm.running_var.fill_(1e5)
    norm.bias.normal_()
    x = 300 * drawn(1, 4, 8, 8)
    truth, half = norm(x), torch.nn.BatchNorm2d(4).eval()
    half.load_state_dict(norm.state_dict())
    found = first(half.half()(x.half()), truth)
    assert found.kind is SignatureKind.AVERAGED
    assert found.parameter("is_mean") in (0.0, 1.0)


def test_squares_overflowed_in_rms_norm_zero_the_row() -> None:
    x = drawn(6, 64)
    x[2] *= 900

    def rms_norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    found = first(rms_norm(x.half()), rms_norm(x.half().float()))
    assert found.kind is SignatureKind.ZEROED
    assert "axis 0 index 2" in found.evidence


def test_scores_overflowed_before_the_scale_are_an_overflow_inside() -> None:
    query, key = ((100 * drawn(1, 12, 64, seed=seed)).half() for seed in (1, 2))
    scale = 64**-0.5
    found = first((query @ key.mT) * scale, (query.float() * scale) @ key.float().mT)
    assert found.kind is SignatureKind.NONFINITE
    assert "lies inside the computation" in found.evidence


def test_the_smallest_half_as_mask_makes_whole_rows_nan() -> None:
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[:, :2] = False
    scores = (drawn(6, 6) - 40).half()

    def softmax(scores: Tensor) -> Tensor:
        mask = torch.zeros_like(scores).masked_fill(~keep, torch.finfo(scores.dtype).min)
        return torch.softmax(scores + mask, -1)

    found = first(softmax(scores), softmax(scores.float()))
    assert found.kind is SignatureKind.NONFINITE
    assert found.parameter("rows") == 2
    assert "axis 0 up to 1" in found.evidence


@pytest.mark.parametrize("has_input", [True, False])
def test_tanh_gelu_in_place_of_erf_is_named(has_input: bool) -> None:
    x = 2 * drawn(256, 64)
    found = first(F.gelu(x, approximate="tanh"), F.gelu(x), *((x,) if has_input else ()))
    assert found.kind is SignatureKind.GELU_FORM
    assert found.parameter("is_tanh") == 1.0


def test_a_gelu_tail_lost_to_cancellation_is_not_called_a_fault() -> None:
    x = torch.linspace(-8, 8, 4001)
    inner = 0.7978845608 * (x + 0.044715 * x**3)
    lost, truth = 0.5 * x * (1 + torch.tanh(inner)), F.gelu(x.double(), approximate="tanh")
    assert first(lost, truth).kind is SignatureKind.ROUNDING


def rotary_table(dtype: torch.dtype) -> Tensor:
    frequency = 1e4 ** (-torch.arange(0, 64, 2).float() / 64)
    return torch.outer(torch.arange(2048).to(dtype), frequency.to(dtype)).float()


def test_rotary_angles_in_bfloat16_have_the_size_of_its_roundings() -> None:
    found = first(rotary_table(torch.bfloat16), rotary_table(torch.float32))
    assert found.kind is SignatureKind.COARSE
    assert "bfloat16" in found.evidence


def test_rotary_cosines_of_angles_in_bfloat16_grow_wrong_with_the_position() -> None:
    right, wrong = (rotary_table(dtype).cos() for dtype in (torch.float32, torch.bfloat16))
    kinds = [found.kind for found in diagnose(raw(wrong), raw(right))]
    assert kinds[0] is SignatureKind.GROWING


def test_a_sum_that_stalls_in_bfloat16_stops_at_a_limit() -> None:
    x = torch.rand(2, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    total, sums = torch.zeros(2, dtype=torch.bfloat16), []
    for column in x.unbind(-1):
        total = total + column
        sums.append(total)
    found = first(torch.stack(sums, -1), x.float().cumsum(-1))
    assert found.kind is SignatureKind.CLIPPED
    assert found.parameter("high") == 256.0


def test_float32_products_of_bfloat16_inputs_have_the_size_of_bfloat16_roundings() -> None:
    x, weight = drawn(64, 512), drawn(512, 512, seed=2) / 20
    cut = x.bfloat16().float() @ weight.bfloat16().float()
    found = first(cut, x.double() @ weight.double())
    assert found.kind is SignatureKind.ROUNDING
    assert "bfloat16 (stored as float32)" in found.evidence


def test_float32_products_cut_to_hf32_are_told_from_float32_rounding() -> None:
    def hf32(x: Tensor) -> Tensor:
        return torch.from_numpy(
            (x.numpy().view(np.uint32) + np.uint32(1 << 11) & np.uint32(0xFFFFF000)).view(np.float32)
        )

    x, weight = drawn(64, 512), drawn(512, 512, seed=2) / 20
    found = first(hf32(x) @ hf32(weight), x.double() @ weight.double())
    assert found.kind is SignatureKind.ROUNDING
    assert "hf32" in found.evidence
    exact = first(x @ weight, x.double() @ weight.double())
    assert exact.kind is SignatureKind.ROUNDING
    assert "in float32" in exact.evidence


def test_a_fused_linear_that_rounds_once_is_ordinary_rounding() -> None:
    linear, x = torch.nn.Linear(64, 64).bfloat16(), drawn(32, 64).bfloat16()
    truth = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    assert first(linear(x), truth).kind is SignatureKind.ROUNDING
    assert first(x @ linear.weight.T + linear.bias, truth).kind is SignatureKind.ROUNDING


def test_a_missing_bias_is_an_offset_a_channel() -> None:
    linear, x = torch.nn.Linear(64, 64).bfloat16(), drawn(32, 64).bfloat16()
    found = first(F.linear(x, linear.weight), F.linear(x.float(), linear.weight.float(), linear.bias.float()))
    assert found.kind is SignatureKind.SLICE_OFFSET
    assert found.parameter("axis") == 1


def test_a_scale_left_at_one_is_a_factor_on_the_scores() -> None:
    query, key = drawn(2, 4, 32, 80).half(), drawn(2, 4, 32, 80, seed=2).half()
    found = first(query @ key.mT, query.float() @ key.float().mT / math.sqrt(80))
    assert found.kind is SignatureKind.FACTOR
    assert "sqrt(80)" in found.evidence


def test_heads_merged_without_a_transpose_are_a_misread_layout() -> None:
    heads = drawn(2, 4, 16, 8)
    merged, truth = heads.reshape(2, 16, 32), heads.transpose(1, 2).reshape(2, 16, 32)
    assert first(merged.reshape(2, 16, 4, 8), truth.reshape(2, 16, 4, 8)).kind is SignatureKind.TRANSPOSED


def test_channels_in_the_opposite_order_are_a_permutation() -> None:
    image = torch.rand(2, 3, 16, 16)
    found = first(image.flip(1), image)
    assert found.kind is SignatureKind.PERMUTED
    assert found.parameter("axis") == 1


def test_a_cache_read_one_step_late_is_stale() -> None:
    steps = [drawn(1, 4, 8, 16, seed=seed).half() for seed in range(3)]
    others = {f"cache/forward#0:0@{step}": raw(tensor) for step, tensor in enumerate(steps[:2])}
    found = diagnose(raw(steps[1]), raw(steps[2].float()), others=others)[0]
    assert found.kind is SignatureKind.STALE
    assert "@1" in found.evidence


def test_int8_pairs_saturated_inside_an_accumulator_fit_nothing_invented() -> None:
    left, right = torch.randint(0, 256, (16, 64)), torch.randint(-128, 128, (64, 16))
    pairs = left.reshape(16, 32, 2)[:, :, :, None] * right.reshape(32, 2, 16)[None]
    saturated = pairs.sum(2).clamp(-32768, 32767).sum(1).float()
    if torch.equal(saturated, (left @ right).float()):
        pytest.skip("no pair saturates")
    kinds = {found.kind for found in diagnose(raw(saturated), raw((left @ right).float()))}
    assert kinds <= {SignatureKind.NONE_FITS, SignatureKind.ROUNDING, SignatureKind.ZEROED, SignatureKind.CONFINED}
