"""Conventions of the attention kernels that cause most public accuracy faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch_npu
from torch.nn import functional as F

TILE = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)
HEADS, SIZE = 2, 16


def _qkv(queries: int, keys: int, dtype: torch.dtype = torch.float32, kv_heads: int = HEADS) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = ((1, HEADS, queries, SIZE), (1, kv_heads, keys, SIZE), (1, kv_heads, keys, SIZE))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Attention in float64 with scale 1/sqrt(D), True hides."""
    scores = (q.double() @ k.double().mT) / math.sqrt(SIZE)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v.double()).float()


def _fused(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    moved = {key: value.npu() if torch.is_tensor(value) else value for key, value in options.items()}
    scaled = {"scale": 1 / math.sqrt(SIZE), **moved}
    out: torch.Tensor = torch_npu.npu_fusion_attention(*(x.npu() for x in tensors), HEADS, "BNSD", **scaled)[0]
    return out.cpu()


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_true_in_a_mask_hides() -> None:
    tensors, mask = _qkv(4, 6), torch.zeros(4, 6, dtype=torch.bool)
    mask[:, 4:] = True
    assert _close(_fused(tensors, atten_mask=mask), _reference(*tensors, hidden=mask))
    assert not _close(_fused(tensors, atten_mask=mask), F.scaled_dot_product_attention(*tensors, attn_mask=mask))


def test_the_scale_is_one_unless_given() -> None:
    q, k, v = tensors = _qkv(4, 4)
    default = torch_npu.npu_fusion_attention(*(x.npu() for x in tensors), HEADS, "BNSD")[0].cpu()
    assert _close(default, F.scaled_dot_product_attention(q, k, v, scale=1.0))
    assert not _close(default, _reference(*tensors))


@pytest.mark.parametrize("sparse_mode", [0, 2, 3, 4])
def test_without_a_mask_sparse_mode_means_nothing(sparse_mode: int) -> None:
    tensors = _qkv(4, 6)
    got = _fused(tensors, sparse_mode=sparse_mode, next_tockens=0)
    assert _close(got, _reference(*tensors))


@pytest.mark.parametrize(("sparse_mode", "diagonal"), [(2, 1), (3, 3)])
def test_causal_modes_align_top_left_or_bottom_right(sparse_mode: int, diagonal: int) -> None:
    tensors = _qkv(4, 6)
    hidden = torch.ones(4, 6, dtype=torch.bool).triu(diagonal)
    got = _fused(tensors, sparse_mode=sparse_mode, atten_mask=TILE)
    assert _close(got, _reference(*tensors, hidden=hidden))


def test_both_causal_modes_agree_on_a_square() -> None:
    tensors = _qkv(5, 5)
    assert torch.equal(*(_fused(tensors, sparse_mode=mode, atten_mask=TILE) for mode in (2, 3)))


def test_causal_modes_refuse_a_full_mask_and_an_inverted_tile() -> None:
    tensors = _qkv(4, 6)
    with pytest.raises(RuntimeError, match="compressed 2048x2048"):
        _fused(tensors, sparse_mode=3, atten_mask=torch.ones(4, 6, dtype=torch.bool).triu(1))
    with pytest.raises(RuntimeError, match="upper triangular"):
        _fused(tensors, sparse_mode=3, atten_mask=~TILE)


def test_the_band_mode_hides_outside_its_window() -> None:
    tensors = _qkv(4, 6)
    distance = torch.arange(6)[None, :] - torch.arange(4)[:, None] - 2
    got = _fused(tensors, sparse_mode=4, atten_mask=TILE, pre_tockens=1, next_tockens=0)
    assert _close(got, _reference(*tensors, hidden=(distance > 0) | (distance < -1)))


def test_a_row_hidden_throughout_averages_v_or_is_zero_with_inner_precise_two() -> None:
    tensors, mask = _qkv(4, 6), torch.zeros(4, 6, dtype=torch.bool)
    mask[2] = True
    mean = tensors[2].mean(2)
    assert _close(_fused(tensors, atten_mask=mask)[:, :, 2], mean)
    assert _fused(tensors, atten_mask=mask, inner_precise=2)[:, :, 2].abs().max() == 0.0


def test_the_bias_is_scaled_in_v1_and_added_after_the_scale_in_v2_type_zero() -> None:
    q, k, v = tensors = _qkv(4, 4)
    bias, scale = torch.randn(1, HEADS, 4, 4), 1 / math.sqrt(SIZE)
    device = [x.npu() for x in tensors]
    scaled = F.scaled_dot_product_attention(q, k, v, attn_mask=bias * scale)
    added = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    v1 = torch_npu.npu_fusion_attention(*device, HEADS, "BNSD", pse=bias.npu(), scale=scale)[0].cpu()
    v2 = torch_npu.npu_fusion_attention_v2(*device, HEADS, "BNSD", pse=bias.npu(), scale=scale, pse_type=0)[0].cpu()
    assert _close(v1, scaled)
    assert _close(v2, added)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "SBH", "BNSD"])
def test_layouts_hold_the_same_attention(layout: str) -> None:
    tensors = _qkv(4, 6, kv_heads=1)
    expected = _reference(tensors[0], *(x.repeat_interleave(HEADS, 1) for x in tensors[1:]))
    laid = [_lay(x, layout).npu() for x in tensors]
    got = torch_npu.npu_fusion_attention(*laid, HEADS, layout, scale=1 / math.sqrt(SIZE))
    assert _close(got[0].cpu(), _lay(expected, layout))
    assert got[1].shape == got[2].shape == (1, HEADS, 4, 8)


def _lay(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    rows = x.transpose(1, 2).flatten(2)
    return (rows if layout == "BSH" else rows.transpose(0, 1)).contiguous()


def test_tnd_reads_cumulative_ends() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(5, HEADS, SIZE) for _ in range(3))
    ends = [2, 5]
    got = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), HEADS, "TND", scale=1 / math.sqrt(SIZE), actual_seq_qlen=ends, actual_seq_kvlen=ends
    )
    pieces = [
        _reference(*(x[piece].transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
        for piece in (slice(0, 2), slice(2, 5))
    ]
    assert _close(got[0].cpu(), torch.cat(pieces))
    assert got[1].shape == (5, HEADS, 8)


def test_probabilities_are_rounded_to_the_input_dtype_before_the_product() -> None:
    q, k, v = _qkv(1, 512, torch.bfloat16)
    got = _fused([q, k, v]).double()
    scores = (q.double() @ k.double().mT) / math.sqrt(SIZE)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = (weights.bfloat16().double() @ v.double()) / weights.sum(-1, keepdim=True)
    assert torch.equal(got.bfloat16(), rounded.bfloat16())


def test_inference_attention_takes_no_fp32_and_hides_beyond_the_key_length() -> None:
    tensors = _qkv(4, 6, torch.float16)
    options: dict[str, Any] = {"num_heads": HEADS, "input_layout": "BNSD", "scale": 1 / math.sqrt(SIZE)}
    device = [x.npu() for x in tensors]
    out, lse = torch_npu.npu_fused_infer_attention_score(*device, actual_seq_lengths_kv=[4], **options)
    expected = _reference(*(x.float() for x in (tensors[0], tensors[1][:, :, :4], tensors[2][:, :, :4])))
    assert _close(out.cpu(), expected, 2e-3)
    assert lse.numel() == 0
    with pytest.raises(RuntimeError, match="float16 and bfloat16"):
        torch_npu.npu_fused_infer_attention_score(*(x.float() for x in device), **options)


def test_prompt_attention_looks_ahead_by_no_token_unless_told() -> None:
    tensors = _qkv(4, 4, torch.float16)
    wide = [x.float() for x in tensors]
    device, mask = [x.npu() for x in tensors], torch.zeros(4, 4, dtype=torch.bool)
    options: dict[str, Any] = {"num_heads": HEADS, "input_layout": "BNSD", "scale_value": 1 / math.sqrt(SIZE)}
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    plain = torch_npu.npu_prompt_flash_attention(*device, **options).cpu()
    masked = torch_npu.npu_prompt_flash_attention(*device, atten_mask=mask.npu(), **options).cpu()
    assert _close(plain, _reference(*wide), 2e-3)
    assert _close(masked, _reference(*wide, hidden=causal), 2e-3)


def test_incremental_attention_takes_one_query() -> None:
    tensors = _qkv(1, 6, torch.float16)
    options: dict[str, Any] = {"num_heads": HEADS, "input_layout": "BNSD", "scale_value": 1 / math.sqrt(SIZE)}
    got = torch_npu.npu_incre_flash_attention(*(x.npu() for x in tensors), **options).cpu()
    # inner_precise is 1 by default: the softmax runs in fp16.
    assert _close(got, _reference(*(x.float() for x in tensors)), 1e-2)
    with pytest.raises(RuntimeError, match="one query token"):
        torch_npu.npu_incre_flash_attention(*(x.npu() for x in _qkv(2, 6, torch.float16)), **options)
