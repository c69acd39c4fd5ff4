"""Reference kernels of the other npu:: operators: schema, output shapes against the real package, and conventions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from npu_rig.registry import KERNELS
from torch.nn import functional as F

npu = torch.ops.npu


def _schema(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(npu, base), overload or "default")._schema


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_kernel_takes_every_argument_of_the_real_schema_with_its_default(name: str) -> None:
    parameters = list(inspect.signature(KERNELS[name]).parameters.values())
    named = {parameter.name: parameter for parameter in parameters}
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for place, argument in enumerate(_schema(name).arguments):
        if argument.kwarg_only:
            assert argument.name in named or takes_rest, argument.name
            parameter = named.get(argument.name)
        else:
            assert place < len(parameters) or takes_more, argument.name
            parameter = parameters[place] if place < len(parameters) else None
        if parameter is not None and parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}:
            assert argument.has_default_value() == (parameter.default is not parameter.empty), argument.name
            if argument.has_default_value():
                assert parameter.default == argument.default_value, argument.name


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float16)


def _int8(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8)


# One call an operator, whose output shapes and dtypes the real package's meta registration tells independently.
CASES: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "rms_norm": lambda d: npu.npu_rms_norm(d(_half(2, 3, 8)), d(_half(8))),
    "gemma_rms_norm": lambda d: npu.npu_gemma_rms_norm(d(_half(2, 3, 8)), d(_half(8))),
    "add_rms_norm": lambda d: npu.npu_add_rms_norm(d(_half(2, 3, 8)), d(_half(2, 3, 8)), d(_half(8))),
    "add_rms_norm_cast": lambda d: npu.npu_add_rms_norm_cast(d(_half(2, 8)), d(_half(2, 8)), d(_half(8))),
    "add_layer_norm": lambda d: npu.npu_add_layer_norm(d(_half(2, 3, 8)), d(_half(2, 3, 8)), d(_half(8)), d(_half(8))),
    "layer_norm_eval": lambda d: npu.npu_layer_norm_eval(d(_half(2, 8)), [8], d(_half(8)), d(_half(8))),
    "deep_norm": lambda d: npu.npu_deep_norm(d(_half(2, 3, 8)), d(_half(2, 3, 8)), d(_half(8)), d(_half(8))),
    "group_norm_silu": lambda d: npu.npu_group_norm_silu(d(_half(2, 8, 4, 4)), d(_half(8)), d(_half(8)), 4),
    "group_norm_swish": lambda d: npu.npu_group_norm_swish(d(_half(2, 8, 4)), 4, d(_half(8)), d(_half(8))),
    "swiglu": lambda d: npu.npu_swiglu(d(_half(2, 8))),
    "geglu": lambda d: npu.npu_geglu(d(_half(2, 8))),
    "gelu": lambda d: npu.npu_gelu(d(_half(2, 8))),
    "gelu_mul": lambda d: npu.npu_gelu_mul(d(_half(2, 8))),
    "npu_fast_gelu": lambda d: npu.npu_fast_gelu(d(_half(2, 8))),
    "fast_gelu": lambda d: npu.fast_gelu(d(_half(2, 8))),
    "silu": lambda d: npu.npu_silu(d(_half(2, 8))),
    "scaled_masked_softmax": lambda d: npu.npu_scaled_masked_softmax(
        d(_half(1, 2, 32, 32)), d(torch.zeros(1, 1, 32, 32, dtype=torch.bool))
    ),
    "rotary_mul": lambda d: npu.npu_rotary_mul(d(_half(1, 2, 3, 8)), d(_half(1, 1, 3, 8)), d(_half(1, 1, 3, 8))),
    "interleave_rope": lambda d: npu.npu_interleave_rope(
        d(_half(1, 2, 3, 64)), d(_half(1, 1, 3, 64)), d(_half(1, 1, 3, 64))
    ),
    "linear": lambda d: npu.npu_linear(d(_half(3, 8)), d(_half(5, 8)), d(_half(5))),
    "bmmV2": lambda d: npu.npu_bmmV2(d(_half(2, 3, 8)), d(_half(2, 8, 5)), []),
    "conv2d": lambda d: npu.npu_conv2d(
        d(_half(1, 3, 8, 8)), d(_half(4, 3, 3, 3)), d(_half(4)), [1, 1], [1, 1], [1, 1], 1
    ),
    "ffn": lambda d: npu.npu_ffn(d(_half(3, 8)), d(_half(8, 16)), d(_half(16, 8)), "gelu"),
    "grouped_matmul": lambda d: npu.npu_grouped_matmul(
        [d(_half(5, 8))], [d(_half(2, 8, 4))], group_list=d(torch.tensor([2, 5])), split_item=3, group_type=0
    ),
    "moe_gating_top_k_softmax": lambda d: npu.npu_moe_gating_top_k_softmax(d(_half(5, 8)), None, 2),
    "moe_gating_top_k": lambda d: npu.npu_moe_gating_top_k(d(_half(5, 8)), 2, k_group=1, group_count=2),
    "quant_matmul": lambda d: npu.npu_quant_matmul(
        d(_int8(3, 8)), d(_int8(8, 4)), d(torch.ones(4)), output_dtype=torch.bfloat16
    ),
    "weight_quant_batchmatmul": lambda d: npu.npu_weight_quant_batchmatmul(d(_half(3, 8)), d(_int8(8, 4)), d(_half(4))),
    "dynamic_quant": lambda d: npu.npu_dynamic_quant(d(_half(3, 8))),
    "anti_quant": lambda d: npu.npu_anti_quant(d(_int8(3, 8)), d(torch.ones(8)), dst_dtype=torch.float16),
    "quantize": lambda d: npu.npu_quantize(d(_half(3, 8)), d(torch.ones(8)), None, torch.qint8, 1),
    "trans_quant_param": lambda d: npu.npu_trans_quant_param(d(torch.ones(4))),
    "cross_entropy_loss": lambda d: npu.npu_cross_entropy_loss(d(_half(3, 8)), d(torch.tensor([0, 1, 2]))),
    "attention_v1": lambda d: npu.npu_fusion_attention(*[d(_half(1, 2, 4, 16))] * 3, 2, "BNSD")[:4],
    "attention_v2": lambda d: npu.npu_fusion_attention_v2(*[d(_half(1, 2, 4, 16))] * 3, 2, "BNSD")[:4],
    "attention_v3": lambda d: npu.npu_fusion_attention_v3(*[d(_half(1, 2, 4, 16))] * 3, 2, "BNSD"),
    "fused_infer": lambda d: npu.npu_fused_infer_attention_score(
        *[d(_half(1, 4, 32))] * 3, num_heads=2, softmax_lse_flag=True
    ),
    "fused_infer_v2": lambda d: npu.npu_fused_infer_attention_score_v2(*[d(_half(1, 4, 32))] * 3, num_query_heads=2),
    "prompt_flash": lambda d: npu.npu_prompt_flash_attention(*[d(_half(1, 4, 32))] * 3, num_heads=2),
    "incre_flash": lambda d: npu.npu_incre_flash_attention(d(_half(1, 1, 32)), *[d(_half(1, 4, 32))] * 2, num_heads=2),
}


def _described(result: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    tensors = result if isinstance(result, (list, tuple)) else [result]
    return [(x.dtype, tuple(x.shape)) for x in tensors]


@pytest.mark.parametrize("case", sorted(CASES))
def test_outputs_have_the_dtypes_and_shapes_that_the_real_package_infers(case: str) -> None:
    # The meta registration of v1 warns about torch.compile unless it believes that it did.
    torch_npu.op_plugin.meta._meta_registrations._npu_fusion_attention_warning_printed = True
    assert _described(CASES[case](lambda x: x.npu())) == _described(CASES[case](lambda x: x.to("meta")))


def test_geglu_activates_the_right_half_by_tanh() -> None:
    x = torch.randn(3, 8)
    left, right = x.chunk(2, -1)
    out, gelu = torch_npu.npu_geglu(x.npu())
    torch.testing.assert_close(out.cpu(), left * F.gelu(right, approximate="tanh"))
    torch.testing.assert_close(gelu.cpu(), F.gelu(right, approximate="tanh"))
    out, _ = torch_npu.npu_geglu(x.npu(), -1, 0, True)
    torch.testing.assert_close(out.cpu(), right * F.gelu(left))


def test_swiglu_activates_the_left_half_and_rounds_once() -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    left, right = x.double().chunk(2, -1)
    assert torch.equal(torch_npu.npu_swiglu(x.npu()).cpu(), (F.silu(left) * right).float().bfloat16())


def test_rms_norm_rounds_once_unlike_the_form_of_the_libraries() -> None:
    torch.manual_seed(0)
    x, gamma = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    y, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    scale = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = x.double() * scale * gamma.double()
    rounded_early = (x.double() * scale).bfloat16() * gamma
    assert (y.cpu() == exact.float().bfloat16()).float().mean() > 0.999
    assert (y.cpu() == rounded_early).float().mean() < 0.95
    torch.testing.assert_close(rstd.cpu(), scale.float())


def test_add_rms_norm_returns_the_rounded_sum_and_fp16_normalises_it() -> None:
    x1, x2 = torch.randn(4, 8, dtype=torch.float16), torch.randn(4, 8, dtype=torch.float16)
    y, rstd, total = torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), torch.ones(8, dtype=torch.float16).npu())
    assert torch.equal(total.cpu(), x1 + x2)
    torch.testing.assert_close(rstd.cpu(), ((x1 + x2).float().square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    torch.testing.assert_close(y.cpu().float(), (x1 + x2).float() * rstd.cpu(), atol=2e-3, rtol=2e-3)


def test_deep_norm_takes_beta_before_gamma() -> None:
    x, gx, beta, gamma = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
    _, _, y = torch_npu.npu_deep_norm(*(t.npu() for t in (x, gx, beta, gamma)), 0.5, 1e-6)
    torch.testing.assert_close(y.cpu(), F.layer_norm(0.5 * x + gx, (8,), gamma, beta, 1e-6), atol=1e-5, rtol=1e-5)


def test_the_two_group_norms_agree_though_their_arguments_are_ordered_differently() -> None:
    x, weight, bias = torch.randn(2, 8, 4, 4), torch.randn(8), torch.randn(8)
    expected = F.silu(F.group_norm(x, 4, weight, bias))
    device = (x.npu(), weight.npu(), bias.npu())
    silu = torch_npu.npu_group_norm_silu(*device, 4)[0]
    swish = torch_npu.npu_group_norm_swish(device[0], 4, *device[1:])[0]
    torch.testing.assert_close(silu.cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(swish.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_masked_softmax_is_uniform_where_everything_is_hidden() -> None:
    out = torch_npu.npu_scaled_masked_softmax(
        torch.randn(1, 1, 32, 32).npu(), torch.ones(1, 1, 32, 32, dtype=torch.bool).npu(), 2.0, False
    )
    assert out.cpu().tolist() == torch.full((1, 1, 32, 32), 1 / 32).tolist()


def _complex_turn(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs by multiplication with exp(i angle), an independent form of "interleave"."""
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2).float()


def test_rotary_modes_pair_halves_or_neighbours() -> None:
    x, angle = torch.randn(1, 2, 3, 8), torch.rand(3, 4, dtype=torch.float64)
    neighbours = angle.repeat_interleave(2, -1).float()
    got = torch_npu.npu_rotary_mul(
        x.npu(), neighbours.cos()[None, None].npu(), neighbours.sin()[None, None].npu(), "interleave"
    )
    torch.testing.assert_close(got.cpu(), _complex_turn(x, angle), atol=1e-6, rtol=1e-5)
    halves = torch.cat((angle, angle), -1).float()
    table = (halves.cos()[None, None].npu(), halves.sin()[None, None].npu())
    shuffled = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    expected = _complex_turn(shuffled, angle).unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(torch_npu.npu_rotary_mul(x.npu(), *table).cpu(), expected, atol=1e-6, rtol=1e-5)
    gathered = torch_npu.npu_interleave_rope(x.npu(), *table).cpu()
    expected = _complex_turn(x, angle).unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(gathered, expected, atol=1e-6, rtol=1e-5)


def test_apply_rotary_overwrites_its_inputs() -> None:
    q, k = torch.randn(1, 3, 2, 64).npu(), torch.randn(1, 3, 1, 64).npu()
    before = q.cpu()
    zero, one = torch.zeros(1, 3, 1, 64).npu(), torch.ones(1, 3, 1, 64).npu()
    out_q, out_k = torch_npu.npu_apply_rotary_pos_emb(q, k, zero, one)
    assert (out_q.data_ptr(), out_k.data_ptr()) == (q.data_ptr(), k.data_ptr())
    assert torch.equal(q.cpu(), torch.cat((-before[..., 32:], before[..., :32]), -1))


def test_confusion_transpose_moves_bits_only() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    first = torch_npu.npu_confusion_transpose(x.npu(), [1, 0, 2], [3, 8], True)
    second = torch_npu.npu_confusion_transpose(x.npu(), [1, 0], [6, 4], False)
    assert torch.equal(first.cpu(), x.permute(1, 0, 2).reshape(3, 8))
    assert torch.equal(second.cpu(), x.reshape(6, 4).t())


@pytest.mark.parametrize(("group_list", "kind"), [([2, 5], 0), ([2, 3], 1)])
def test_grouped_matmul_reads_ends_or_counts(group_list: list[int], kind: int) -> None:
    x, weight = torch.randn(5, 8), torch.randn(2, 8, 4)
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight.npu()], group_list=torch.tensor(group_list).npu(), split_item=3, group_type=0,
        group_list_type=kind,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), torch.cat((x[:2] @ weight[0], x[2:] @ weight[1])))


def test_grouped_matmul_refuses_counts_taken_for_ends() -> None:
    arguments = {"group_list": torch.tensor([3, 2]).npu(), "split_item": 3, "group_type": 0}
    with pytest.raises(RuntimeError, match="does not fit 5 rows"):
        torch_npu.npu_grouped_matmul([torch.ones(5, 8).npu()], [torch.ones(2, 8, 4).npu()], **arguments)


def test_gating_returns_the_best_experts_and_k_major_rows() -> None:
    x = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    y, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), k=2)
    assert experts.cpu().tolist() == [[1, 2], [0, 2]]
    assert rows.cpu().tolist() == [[0, 2], [1, 3]]
    torch.testing.assert_close(y.cpu(), x.softmax(-1).gather(-1, experts.cpu().long()))


def test_the_packed_scale_keeps_nineteen_bits() -> None:
    scale = torch.tensor([1 / 3])
    packed = torch_npu.npu_trans_quant_param(scale.npu())
    x1, x2 = torch.full((1, 32), 3, dtype=torch.int8), torch.full((32, 1), 1, dtype=torch.int8)
    out = torch_npu.npu_quant_matmul(x1.npu(), x2.npu(), packed, output_dtype=torch.float16)
    cut = (scale.view(torch.int32) >> 13 << 13).view(torch.float32)
    assert cut.item() != scale.item()
    assert out.cpu().item() == (96 * cut).half().item()
    with pytest.raises(RuntimeError, match="npu_trans_quant_param"):
        torch_npu.npu_quant_matmul(x1.npu(), x2.npu(), scale.npu(), output_dtype=torch.float16)


def test_quant_matmul_applies_bias_and_row_scale() -> None:
    x1, x2 = torch.randint(-9, 9, (3, 8), dtype=torch.int8), torch.randint(-9, 9, (8, 4), dtype=torch.int8)
    bias, scale, rows = torch.arange(4, dtype=torch.int32), torch.rand(4), torch.rand(3)
    out = torch_npu.npu_quant_matmul(
        x1.npu(), x2.npu(), scale.npu(), pertoken_scale=rows.npu(), bias=bias.npu(), output_dtype=torch.bfloat16
    )
    expected = (x1.long() @ x2.long() + bias) * scale.double() * rows.double()[:, None]
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-2, rtol=1e-2)


def test_weight_quantisation_adds_its_offset_before_the_scale() -> None:
    x, weight = torch.ones(1, 2, dtype=torch.float16), torch.tensor([[1], [2]], dtype=torch.int8)
    half = torch.tensor([0.5], dtype=torch.float16)
    out = torch_npu.npu_weight_quant_batchmatmul(x.npu(), weight.npu(), half.npu(), (half * 6).npu())
    assert out.cpu().item() == (1 + 3) * 0.5 + (2 + 3) * 0.5


def test_dynamic_quantisation_spans_each_row_and_anti_quantisation_undoes_it() -> None:
    x = torch.randn(4, 16, dtype=torch.float16)
    y, scale = torch_npu.npu_dynamic_quant(x.npu())
    assert y.cpu().abs().amax(-1).tolist() == [127] * 4
    torch.testing.assert_close(scale.cpu(), x.float().abs().amax(-1) / 127)
    back = y.cpu().float() * scale.cpu()[:, None]
    assert (back - x.float()).abs().max() <= scale.max().item() * 0.51
    undone = torch_npu.npu_anti_quant(y[:1], scale[:1].expand(16).contiguous(), dst_dtype=torch.float16)
    torch.testing.assert_close(undone.cpu().float(), back[:1], atol=1e-3, rtol=1e-3)


def test_quantize_divides_by_default_and_along_axis_one() -> None:
    x, scales = torch.tensor([[2.0, 9.0]]), torch.tensor([2.0, 3.0])
    divided = torch_npu.npu_quantize(x.npu(), scales.npu(), torch.tensor([1.0, 1.0]).npu(), torch.qint8)
    multiplied = torch_npu.npu_quantize(x.npu(), scales.npu(), None, torch.qint8, 1, False)
    assert divided.cpu().tolist() == [[2, 4]]
    assert multiplied.cpu().tolist() == [[4, 27]]


def test_cross_entropy_ignores_its_index_and_returns_one_element() -> None:
    x, target = torch.randn(4, 5), torch.tensor([1, -100, 0, 3])
    loss, log_probabilities, _, _ = torch_npu.npu_cross_entropy_loss(x.npu(), target.npu())
    assert loss.shape == (1,)
    torch.testing.assert_close(loss.cpu()[0], F.cross_entropy(x, target))
    torch.testing.assert_close(log_probabilities.cpu(), x.log_softmax(-1))


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "fastgelu", "swiglu", "geglu", "reglu"])
def test_ffn_is_two_products_around_the_activation(activation: str) -> None:
    x, gated = torch.randn(3, 8), activation.endswith("glu")
    w1, w2 = torch.randn(8, 32 if gated else 16), torch.randn(16, 8)
    hidden = x @ w1
    left, right = hidden.chunk(2, -1)
    expected = {
        "gelu": F.gelu(hidden, approximate="tanh"),
        "relu": hidden.relu(),
        "silu": F.silu(hidden),
        "fastgelu": hidden * torch.sigmoid(1.702 * hidden),
        "swiglu": F.silu(left) * right,
        "geglu": F.gelu(left, approximate="tanh") * right,
        "reglu": left.relu() * right,
    }[activation]
    out = torch_npu.npu_ffn(x.half().npu(), w1.half().npu(), w2.half().npu(), activation)
    torch.testing.assert_close(out.cpu().float(), expected @ w2, atol=0.15, rtol=0.05)
