"""torch_npu's own calls, unfused, against plain statements of what the vendor documents say. No NPU is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from align.dumpers.errors import UndecidedError
from align.dumpers.naming import CallUse, OpName, walk_tensors
from align.dumpers.survey import CallGraph, CallRecord, Operand
from align.dumpers.wire import PASS, Call
from align.operators._gelu import gelu_primitive
from align.operators._npu_call import op_of
from align.operators._npu_layout import causal_tile
from align.operators.base import Operator
from align.operators.registry import catalog
from align.taps.unfuse import UnfuseCalls

torch.manual_seed(0)


def _written() -> dict[str, Operator]:
    return {op_of(item): item for item in catalog() if item.summary.endswith("as called by the model")}


def run(op: str, *args: Any, **kwargs: Any) -> Any:
    """Run a call through the tap that the CPU reference uses, as the wire would hand it over."""
    call = Call(("", op, 0), 0, _never, args, kwargs, OpName(op, f"npu::{op}", CallUse.COMPUTE))
    result = UnfuseCalls(tuple(_written().values())).execute(call)
    assert result is not PASS
    return result


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("torch_npu was called")


def close(got: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)


# -- the entries -------------------------------------------------------------------------------------------------------

OPS = sorted(_written())


def test_every_call_of_the_issue_is_in_the_catalog() -> None:
    wanted = [
        "npu_fusion_attention",
        "npu_fusion_attention_v2",
        "npu_fusion_attention_v3",
        "npu_fused_infer_attention_score",
        "npu_prompt_flash_attention",
        "npu_incre_flash_attention",
        "npu_rms_norm",
        "npu_gemma_rms_norm",
        "npu_layer_norm_eval",
        "npu_group_norm_silu",
        "npu_group_norm_swish",
        "npu_swiglu",
        "npu_geglu",
        "npu_gelu",
        "npu_gelu_mul",
        "npu_fast_gelu",
        "fast_gelu",
        "npu_silu",
        "npu_rotary_mul",
        "npu_apply_rotary_pos_emb",
        "npu_interleave_rope",
        "npu_scaled_masked_softmax",
        "npu_linear",
        "npu_conv2d",
        "npu_quant_matmul",
        "npu_weight_quant_batchmatmul",
        "npu_dynamic_quant",
        "npu_anti_quant",
        "npu_quantize",
        "npu_trans_quant_param",
        "npu_add_rms_norm",
        "npu_add_rms_norm_cast",
        "npu_add_layer_norm",
        "npu_deep_norm",
        "npu_grouped_matmul",
        "npu_ffn",
        "npu_moe_gating_top_k",
        "npu_moe_gating_top_k_softmax",
        "npu_cross_entropy_loss",
        "npu_format_cast",
        "npu_confusion_transpose",
        "npu_bmmV2",
    ]
    assert set(wanted) - set(OPS) == set()


@pytest.mark.parametrize("op", OPS)
def test_the_low_precision_form_stays_close_to_the_wide_one(op: str) -> None:
    operator = _written()[op]
    wide, low = (operator.unfused(**operator.example("cpu", dtype, 3)) for dtype in (torch.float32, torch.bfloat16))
    for (slot, exact), (_, rounded) in zip(walk_tensors(wide), walk_tensors(low), strict=True):
        assert exact.shape == rounded.shape, slot
        if exact.dtype.is_floating_point and exact.numel():
            error = (rounded.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-9)
            assert error < 0.05, (slot, float(error))


@pytest.mark.parametrize("op", OPS)
def test_a_call_with_positional_arguments_is_recognised_and_binds_them_all(op: str) -> None:
    operator = _written()[op]
    values = operator.example("cpu", torch.float32, 0)
    kept = {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float, str, bool, list)) or value is None
    }
    record = CallRecord(
        ("blocks.0", op, 2),
        0,
        0,
        f"npu::{op}",
        (),
        {name.rstrip("_"): _described(item) for name, item in values.items()},
        (),
    )
    match = operator.finders[0](record, CallGraph())
    assert match is not None
    assert match.is_written_fused
    assert match.calls == (("blocks.0", op, 2),)
    graph = CallGraph()
    graph.add(record)
    bound = match.bound(graph, 0)
    assert set(values) <= set(bound)
    assert all(
        bound[name] == kept[name] for name in kept if not isinstance(kept[name], list) or not kept[name] or name != "x"
    )


def _described(value: Any) -> Any:
    return Operand(None, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def test_no_entry_mistakes_another_call_for_its_own() -> None:
    record = CallRecord(("", "npu_new_kernel", 0), 0, 0, "npu::npu_new_kernel", (), {}, ())
    assert all(item.finders[0](record, CallGraph()) is None for item in _written().values())


def test_an_unknown_npu_call_is_an_error_that_names_it() -> None:
    with pytest.raises(UndecidedError, match="npu_new_kernel runs on an NPU only"):
        run("npu_new_kernel", torch.ones(2))


def test_an_argument_the_unfused_form_does_not_know_is_an_error_that_names_it() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UndecidedError, match="block_table"):
        run("npu_fused_infer_attention_score", q, q, q, num_heads=2, input_layout="BNSD", block_table=torch.zeros(1, 1))


# -- attention ---------------------------------------------------------------------------------------------------------


def qkv(queries: int = 5, keys: int = 8, heads: int = 4, kv_heads: int = 4, size: int = 16) -> list[torch.Tensor]:
    shapes = ((2, heads, queries, size), (2, kv_heads, keys, size), (2, kv_heads, keys, size))
    return [torch.randn(shape) for shape in shapes]


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """Row by row in float64: what each query may see, and nothing else."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if hidden is None or not hidden[i, j]]
                scores = torch.stack([q[b, n, i].double().dot(k[b, n // share, j].double()) * scale for j in seen])
                weights = scores.exp() / scores.exp().sum()
                out[b, n, i] = sum(w * v[b, n // share, j].double() for w, j in zip(weights, seen, strict=True))
    return out.float()


def test_true_in_a_mask_hides() -> None:
    tensors, mask = qkv(), torch.rand(5, 8) > 0.6
    mask[:, 0] = False
    close(
        run("npu_fusion_attention", *tensors, 4, "BNSD", atten_mask=mask, scale=0.25)[0],
        expected(*tensors, scale=0.25, hidden=mask),
    )


@pytest.mark.parametrize("op", ["npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"])
def test_the_scale_is_one_unless_given(op: str) -> None:
    tensors = qkv()
    close(run(op, *tensors, 4, "BNSD")[0], expected(*tensors, scale=1.0))


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_sparse_mode_does_nothing_without_a_mask(mode: int) -> None:
    tensors = qkv()
    close(
        run("npu_fusion_attention", *tensors, 4, "BNSD", scale=0.25, sparse_mode=mode)[0],
        expected(*tensors, scale=0.25),
    )


@pytest.mark.parametrize(("mode", "shift"), [(2, 0), (3, 3)])
def test_causal_modes_align_top_left_and_bottom_right(mode: int, shift: int) -> None:
    tensors, tile = qkv(), causal_tile(torch.device("cpu"))
    hidden = torch.tensor([[j > i + shift for j in range(8)] for i in range(5)])
    got = run("npu_fusion_attention", *tensors, 4, "BNSD", atten_mask=tile, scale=0.25, sparse_mode=mode)[0]
    close(got, expected(*tensors, scale=0.25, hidden=hidden))


def test_the_band_mode_is_anchored_bottom_right() -> None:
    tensors, tile = qkv(), causal_tile(torch.device("cpu"))
    hidden = torch.tensor([[j > i + 3 or j < i + 3 - 2 for j in range(8)] for i in range(5)])
    got = run(
        "npu_fusion_attention",
        *tensors,
        4,
        "BNSD",
        atten_mask=tile,
        scale=0.25,
        sparse_mode=4,
        pre_tockens=2,
        next_tockens=0,
    )
    close(got[0], expected(*tensors, scale=0.25, hidden=hidden))


def test_a_row_hidden_throughout_averages_v_or_gives_zeros() -> None:
    q, k, v = qkv()
    mask = torch.zeros(5, 8, dtype=torch.bool)
    mask[2] = True
    mean = run("npu_fusion_attention", q, k, v, 4, "BNSD", atten_mask=mask, scale=0.25)[0]
    zeros = run("npu_fusion_attention", q, k, v, 4, "BNSD", atten_mask=mask, scale=0.25, inner_precise=2)[0]
    close(mean[:, :, 2], v.mean(dim=2))
    assert (zeros[:, :, 2] == 0).all()


def test_the_bias_is_scaled_in_v1_and_added_behind_the_scale_with_pse_type_zero() -> None:
    q, k, v = qkv()
    bias = torch.randn(2, 4, 5, 8)
    scaled = run("npu_fusion_attention", q, k, v, 4, "BNSD", pse=bias, scale=0.25)[0]
    plain = run("npu_fusion_attention_v2", q, k, v, 4, "BNSD", pse=bias, scale=0.25, pse_type=0)[0]
    close(scaled, F.scaled_dot_product_attention(q, k, v, bias * 0.25, scale=0.25))
    close(plain, F.scaled_dot_product_attention(q, k, v, bias, scale=0.25))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_attention_with_shared_heads(layout: str) -> None:
    q, k, v = qkv(kv_heads=2)
    lay = LAYOUTS[layout]
    got, maximum, total, *_ = run("npu_fusion_attention", lay(q), lay(k), lay(v), 4, layout, scale=0.25)
    close(got, lay(expected(q, k, v, scale=0.25)))
    scores = torch.matmul(q, k.repeat_interleave(2, 1).mT) * 0.25
    assert maximum.shape == total.shape == (2, 4, 5, 8)
    close((maximum + total.log())[..., 0], scores.logsumexp(-1))


def test_tnd_takes_cumulative_ends() -> None:
    q, k, v = (torch.randn(rows, 2, 16) for rows in (7, 9, 9))
    got = run("npu_fusion_attention", q, k, v, 2, "TND", scale=0.25, actual_seq_qlen=[3, 7], actual_seq_kvlen=[5, 9])
    parts = [(slice(0, 3), slice(0, 5)), (slice(3, 7), slice(5, 9))]
    wanted = [
        expected(*(x[piece].transpose(0, 1)[None] for x, piece in ((q, rows), (k, cols), (v, cols))), scale=0.25)[
            0
        ].transpose(0, 1)
        for rows, cols in parts
    ]
    close(got[0], torch.cat(wanted))
    assert got[1].shape == (7, 2, 8)


def test_dropout_inside_the_kernel_is_refused() -> None:
    with pytest.raises(UndecidedError, match="dropout"):
        run("npu_fusion_attention", *qkv(), 4, "BNSD", keep_prob=0.9)


def test_prompt_attention_hides_the_future_once_a_mask_is_given() -> None:
    q, k, v = qkv(queries=6, keys=6)
    rows = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    nothing = torch.zeros(6, 6, dtype=torch.bool)
    free = run("npu_prompt_flash_attention", *rows, num_heads=4, scale_value=0.25)
    causal = run("npu_prompt_flash_attention", *rows, num_heads=4, scale_value=0.25, atten_mask=nothing)
    close(free, LAYOUTS["BSH"](expected(q, k, v, scale=0.25)))
    close(causal, LAYOUTS["BSH"](expected(q, k, v, scale=0.25, hidden=~torch.ones(6, 6).tril().bool())))


def test_inference_attention_reads_lengths_and_gives_the_log_sum() -> None:
    q, k, v = qkv(kv_heads=2)
    options = {
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
        "scale": 0.25,
        "softmax_lse_flag": True,
    }
    got, log_sum = run("npu_fused_infer_attention_score", q, k, v, actual_seq_lengths_kv=[3, 8], **options)
    close(got[:1], expected(q[:1], k[:1, :, :3], v[:1, :, :3], scale=0.25))
    close(got[1:], expected(q[1:], k[1:], v[1:], scale=0.25))
    scores = torch.matmul(q[1:], k[1:].repeat_interleave(2, 1).mT) * 0.25
    close(log_sum[1:], scores.logsumexp(-1, keepdim=True))


def test_the_output_layout_may_differ_from_the_input_layout() -> None:
    q, k, v = qkv()
    got, _ = run("npu_fused_infer_attention_score", q, k, v, num_heads=4, input_layout="BNSD_BSND", scale=0.25)
    close(got, expected(q, k, v, scale=0.25).transpose(1, 2))


def test_a_sink_takes_its_share() -> None:
    q, k, v = qkv()
    sink = torch.randn(4)
    got, _ = run(
        "npu_fused_infer_attention_score_v2",
        q,
        k,
        v,
        num_query_heads=4,
        input_layout="BNSD",
        softmax_scale=0.25,
        learnable_sink=sink,
    )
    scores = torch.matmul(q, k.mT) * 0.25
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sink.exp().view(1, 4, 1, 1))
    close(got, torch.matmul(weights, v))


def test_incremental_attention_takes_one_token() -> None:
    q, k, v = qkv(queries=1)
    rows = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    got = run("npu_incre_flash_attention", *rows, num_heads=4, scale_value=0.25, actual_seq_lengths=[8, 8])
    close(got, LAYOUTS["BSH"](expected(q, k, v, scale=0.25)))


# -- norms -------------------------------------------------------------------------------------------------------------


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.stack(
        [row / math.sqrt(float((row.double() ** 2).sum()) / len(row) + eps) for row in x.reshape(-1, x.shape[-1])]
    ).view(x.shape)


def test_the_rms_family_uses_one_millionth_and_gemma_adds_one() -> None:
    x, gamma = torch.randn(3, 16) * 1e-3, torch.randn(16)
    y, rstd = run("npu_rms_norm", x, gamma)
    close(y, rms(x, 1e-6) * gamma)
    close(rstd[:, 0], 1 / (x.square().mean(-1) + 1e-6).sqrt())
    close(run("npu_gemma_rms_norm", x, gamma)[0], rms(x, 1e-6) * (1 + gamma))


def test_add_rms_norm_returns_the_sum_too() -> None:
    a, b, gamma = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    y, _, total = run("npu_add_rms_norm", a, b, gamma)
    assert torch.equal(total, a + b)
    close(y, rms(a + b, 1e-6) * gamma)
    wide, low, *_ = run("npu_add_rms_norm_cast", a.bfloat16(), b.bfloat16(), gamma.bfloat16())
    assert (wide.dtype, low.dtype) == (torch.float32, torch.bfloat16)


def test_layer_norms_use_their_defaults_and_order() -> None:
    x, g, w, b = torch.randn(3, 16) * 1e-2, torch.randn(3, 16) * 1e-2, torch.randn(16), torch.randn(16)
    close(run("npu_layer_norm_eval", x, [16], w, b), F.layer_norm(x, (16,), w, b, 1e-5))
    close(run("npu_add_layer_norm", x, g, w, b)[0], F.layer_norm(x + g, (16,), w, b, 1e-5))
    close(run("npu_deep_norm", x, g, b, w, 0.5)[2], F.layer_norm(0.5 * x + g, (16,), w, b, 1e-6))


def test_add_layer_norm_is_float32_where_dtypes_differ() -> None:
    x, w = torch.randn(3, 16).bfloat16(), torch.randn(16)
    y, *_, total = run("npu_add_layer_norm", x, x, w, w, 1e-5, True)
    assert (y.dtype, total.dtype) == (torch.float32, torch.float32)


def test_the_two_group_norms_take_their_groups_at_different_places() -> None:
    x, w, b = torch.randn(2, 8, 5), torch.randn(8), torch.randn(8)
    silu, mean, rstd = run("npu_group_norm_silu", x, w, b, 4)
    close(silu, F.silu(F.group_norm(x, 4, w, b, 1e-5)))
    close(mean, x.view(2, 4, -1).mean(-1))
    close(rstd, (x.view(2, 4, -1).var(-1, unbiased=False) + 1e-5).rsqrt())
    t = F.group_norm(x, 4, w, b, 1e-5)
    close(run("npu_group_norm_swish", x, 4, w, b, 1e-5, 1.5)[0], t * torch.sigmoid(1.5 * t))


# -- activations -------------------------------------------------------------------------------------------------------


def test_which_half_is_activated() -> None:
    x = torch.randn(3, 8)
    left, right = x[:, :4], x[:, 4:]
    close(run("npu_swiglu", x), F.silu(left) * right)
    close(run("npu_geglu", x)[0], left * F.gelu(right, approximate="tanh"))
    close(run("npu_geglu", x)[1], F.gelu(right, approximate="tanh"))
    close(run("npu_geglu", x, -1, 0, True)[0], F.gelu(left) * right)
    close(run("npu_gelu_mul", x), F.gelu(left) * right)


def test_gelu_by_erf_by_tanh_and_by_sigmoid() -> None:
    x = torch.linspace(-6, 6, 101)
    close(run("npu_gelu", x), F.gelu(x))
    close(run("npu_gelu", x, approximate="tanh"), F.gelu(x, approximate="tanh"))
    for op in ("npu_fast_gelu", "fast_gelu"):
        close(run(op, x), x / (1 + torch.exp(-1.702 * x)))
    assert (gelu_primitive(x) - gelu_primitive(x, "tanh")).abs().max() > 1e-4


def test_clipped_swiglu_interleaves_clamps_and_shifts_by_default() -> None:
    x = torch.randn(2, 8) * 8
    gate, up = x[:, ::2].clamp(max=7.0), x[:, 1::2].clamp(-7.0, 7.0)
    close(run("npu_clipped_swiglu", x), gate * torch.sigmoid(1.702 * gate) * (up + 1.0))


def test_a_fully_masked_row_is_uniform_and_a_triangle_can_be_built_in() -> None:
    x, mask = torch.randn(1, 1, 32, 32), torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 3, :] = True
    got = run("npu_scaled_masked_softmax", x, mask, 0.5)
    close(got[..., 3, :], torch.full((1, 1, 32), 1 / 32))
    close(got[..., 0, :], (x * 0.5).softmax(-1)[..., 0, :])
    triangle = run("npu_scaled_masked_softmax", x, mask, 0.5, True)
    assert triangle[0, 0].triu(1).abs().max() == 0


def test_in_place_silu_writes_its_input() -> None:
    x = torch.randn(5)
    wanted = F.silu(x)
    assert run("npu_silu_", x) is x
    close(x, wanted)


# -- rotary ------------------------------------------------------------------------------------------------------------


def turned(x: torch.Tensor, angle: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """Turn each pair of places by its angle, number by number."""
    out = x.double().clone()
    for (i, j), a in zip(pairs, angle, strict=True):
        out[..., i] = x[..., i].double() * math.cos(a) - x[..., j].double() * math.sin(a)
        out[..., j] = x[..., j].double() * math.cos(a) + x[..., i].double() * math.sin(a)
    return out.float()


def test_rotary_styles_pair_different_places() -> None:
    x, angle = torch.randn(1, 1, 2, 8), torch.rand(4)
    halves, pairs = torch.cat((angle, angle)), angle.repeat_interleave(2)
    close(run("npu_rotary_mul", x, halves.cos(), halves.sin()), turned(x, angle, [(i, i + 4) for i in range(4)]))
    close(
        run("npu_rotary_mul", x, pairs.cos(), pairs.sin(), "interleave"),
        turned(x, angle, [(2 * i, 2 * i + 1) for i in range(4)]),
    )
    gathered = x[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    close(
        run("npu_interleave_rope", x, halves.cos(), halves.sin()),
        turned(gathered, angle, [(i, i + 4) for i in range(4)]),
    )


def test_rotary_casts_its_table_to_the_dtype_of_x() -> None:
    x, angle = torch.randn(1, 1, 2, 8).bfloat16(), torch.rand(8)
    got = run("npu_rotary_mul", x, angle.cos(), angle.sin())
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, run("npu_rotary_mul", x, angle.cos().bfloat16(), angle.sin().bfloat16()))


def test_apply_rotary_writes_query_and_key_in_place() -> None:
    q, k, angle = torch.randn(1, 2, 3, 64), torch.randn(1, 2, 1, 64), torch.rand(32)
    table = torch.cat((angle, angle))
    wanted = [turned(x, angle, [(i, i + 32) for i in range(32)]) for x in (q, k)]
    got = run("npu_apply_rotary_pos_emb", q, k, table.cos(), table.sin())
    assert got[0] is q
    assert got[1] is k
    for x, exact in zip((q, k), wanted, strict=True):
        close(x, exact)


# -- quantised ---------------------------------------------------------------------------------------------------------


def test_quant_matmul_scales_rows_and_columns_and_saturates() -> None:
    x1, x2 = torch.randint(-127, 128, (3, 8), dtype=torch.int8), torch.randint(-127, 128, (8, 4), dtype=torch.int8)
    scale, rows, bias = torch.rand(4), torch.rand(3), torch.randint(-50, 50, (4,), dtype=torch.int32)
    total = torch.tensor(
        [[sum(int(x1[i, t]) * int(x2[t, j]) for t in range(8)) + int(bias[j]) for j in range(4)] for i in range(3)]
    )
    got = run("npu_quant_matmul", x1, x2, scale, bias=bias, pertoken_scale=rows, output_dtype=torch.bfloat16)
    close(got.float(), total * scale * rows[:, None], 1e-2)
    small = run("npu_quant_matmul", x1, x2, scale, bias=bias)
    assert torch.equal(small, (total * scale).round().clamp(-128, 127).to(torch.int8))


def test_a_packed_scale_keeps_nineteen_bits() -> None:
    scale = torch.tensor([1 / 3, 0.1, 1e-3])
    cut = (scale.view(torch.int32) >> 13 << 13).view(torch.float32)
    one = torch.ones(1, 1, dtype=torch.int8)
    got = run("npu_quant_matmul", one, one.expand(1, 3), run("npu_trans_quant_param", scale), output_dtype=6)
    assert torch.equal(got[0], cut)
    assert not torch.equal(cut, scale)
    rounded = run(
        "npu_quant_matmul", one, one.expand(1, 3), run("npu_trans_quant_param", scale, None, 1), output_dtype=6
    )[0]
    assert (rounded - scale).abs().max() <= (scale * 2**-11).max()


def test_the_offset_is_added_before_the_scale() -> None:
    weight, x = torch.tensor([[10, -3], [4, 7]], dtype=torch.int8), torch.eye(2)
    got = run("npu_weight_quant_batchmatmul", x, weight, torch.tensor([0.5, 2.0]), torch.tensor([1.0, -1.0]))
    assert got.tolist() == [[5.5, -8.0], [2.5, 12.0]]
    assert run("npu_anti_quant", weight, torch.tensor([2.0]), offset=torch.tensor([1.0])).dtype == torch.float16


def test_weight_groups_run_along_the_rows() -> None:
    weight = torch.ones(4, 1, dtype=torch.int8)
    got = run(
        "npu_weight_quant_batchmatmul", torch.eye(4), weight, torch.tensor([[2.0], [3.0]]), antiquant_group_size=2
    )
    assert got[:, 0].tolist() == [2.0, 2.0, 3.0, 3.0]


def test_dynamic_quantisation_spans_each_row() -> None:
    values, scale = run("npu_dynamic_quant", torch.tensor([[1.0, -4.0], [0.0, 0.0]]))
    assert values.tolist() == [[32, -127], [0, 0]]
    close(scale, torch.tensor([4 / 127, 0.0]))


def test_quantize_divides_along_axis_one_by_default() -> None:
    x, scales = torch.full((2, 2), 6.0), torch.tensor([2.0, 3.0])
    assert run("npu_quantize", x, scales, None, torch.qint8).tolist() == [[3, 2], [3, 2]]
    assert run("npu_quantize", x, scales, torch.ones(2), torch.qint8, 0, False).tolist() == [[13, 13], [19, 19]]


# -- products, experts, loss -------------------------------------------------------------------------------------------


def test_products_and_moves_say_what_their_names_do() -> None:
    x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    close(run("npu_linear", x, w, b), x @ w.t() + b)
    a, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    close(run("npu_bmmV2", a, c, []), a @ c)
    assert run("npu_bmmV2", a, c, [2, 15]).shape == (2, 15)
    assert torch.equal(run("npu_confusion_transpose", a, [1, 0, 2], [3, 8], True), a.permute(1, 0, 2).reshape(3, 8))
    assert torch.equal(run("npu_confusion_transpose", a, [1, 0], [6, 4], False), a.reshape(6, 4).t())
    cast = run("npu_format_cast", a, 29)
    assert cast is not a
    assert cast.data_ptr() == a.data_ptr()


def test_group_lists_are_ends_or_counts() -> None:
    x, w = torch.randn(6, 4), torch.randn(2, 4, 3)
    wanted = torch.cat((x[:2] @ w[0], x[2:] @ w[1]))
    options = {"split_item": 3, "group_type": 0}
    ends = run("npu_grouped_matmul", [x], [w], group_list=torch.tensor([2, 6]), group_list_type=0, **options)
    counts = run("npu_grouped_matmul", [x], [w], group_list=[2, 4], group_list_type=1, **options)
    close(ends[0], wanted)
    close(counts[0], wanted)
    with pytest.raises(UndecidedError, match="does not fit 6 rows"):
        run("npu_grouped_matmul", [x], [w], group_list=[4, 2], group_list_type=0, **options)
    apart = run("npu_grouped_matmul", [x[:2], x[2:]], list(w), bias=[torch.ones(3), torch.zeros(3)])
    close(apart[0], x[:2] @ w[0] + 1)


def test_a_feed_forward_block_with_experts() -> None:
    x, w1, w2 = torch.randn(5, 4), torch.randn(2, 4, 6), torch.randn(2, 3, 4)
    got = run("npu_ffn", x, w1, w2, "geglu", expert_tokens=[2, 3])
    parts = []
    for rows, expert in ((x[:2], 0), (x[2:], 1)):
        left, right = (rows @ w1[expert]).chunk(2, -1)
        parts.append((F.gelu(left, approximate="tanh") * right) @ w2[expert])
    close(got, torch.cat(parts), 1e-4)


def test_gating_counts_rows_k_major() -> None:
    x = torch.randn(4, 6)
    weights, experts, rows = run("npu_moe_gating_top_k_softmax", x, None, 2)
    probabilities = x.softmax(-1).sort(-1, descending=True)
    close(weights, probabilities.values[:, :2])
    assert torch.equal(experts, probabilities.indices[:, :2].int())
    assert rows.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_grouped_gating_chooses_by_bias_and_weighs_without_it() -> None:
    x, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 5.0, 4.0])
    weights, experts, scores = run(
        "npu_moe_gating_top_k", x, 2, bias=bias, k_group=1, group_count=2, group_select_mode=1, norm_type=1,
        routed_scaling_factor=2.0, out_flag=True,
    )  # fmt: skip
    assert experts.tolist() == [[2, 3]]
    close(weights, torch.tensor([[1.0, 1.0]]))
    close(scores, torch.full((1, 4), 0.5))


def test_a_reduced_loss_has_one_axis() -> None:
    x, target = torch.randn(4, 5), torch.tensor([0, -100, 2, 4])
    loss, log_probabilities, *_ = run("npu_cross_entropy_loss", x, target)
    assert loss.shape == (1,)
    close(loss[0], -x.log_softmax(-1)[[0, 2, 3], [0, 2, 4]].mean())
    close(log_probabilities, x.log_softmax(-1))
