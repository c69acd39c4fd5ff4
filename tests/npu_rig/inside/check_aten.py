"""aten operators on the simulated device: same numbers as the CPU, under every mode, and the documented deviations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from npu_rig.calls import rig_calls
from npu_rig.deviations import round_to_hf32
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(16, 4))
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_linear_layer_norm_gelu_agree_with_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    model, x = _model(), torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
        got = copy.deepcopy(model).to("npu", dtype)(x.to("npu", dtype))
    assert got.dtype is dtype
    assert got.device.type == "npu"
    torch.testing.assert_close(got.cpu().float(), expected, atol=tolerance, rtol=tolerance)


def test_training_steps_agree_with_the_cpu() -> None:
    torch.npu.conv.allow_hf32 = False
    try:
        cpu = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.GroupNorm(2, 8),
            torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 5),
        )  # fmt: skip
        npu = copy.deepcopy(cpu).npu()
        x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
        for model, device in ((cpu, "cpu"), (npu, "npu")):
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                optimizer.step()
        for ours, theirs in zip(npu.parameters(), cpu.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), atol=1e-5, rtol=1e-5)
    finally:
        torch.npu.conv.allow_hf32 = True


def test_out_arguments_views_and_in_place_writes_reach_the_device() -> None:
    x, out = torch.arange(6.0, device="npu").view(2, 3), torch.empty(0, device="npu")
    torch.add(x, 1, out=out)
    assert out.cpu().tolist() == [[1, 2, 3], [4, 5, 6]]
    x[:, 1] = 9
    x.t()[2].mul_(2)
    x[x > 8.5] -= 1
    assert x.cpu().tolist() == [[0, 8, 4], [3, 8, 9]]
    assert torch.where(x > 7)[0].cpu().tolist() == [0, 1, 1]


def test_results_are_the_same_under_every_mode() -> None:
    x = torch.randn(4, 4, device="npu")
    expected = (x @ x).cpu()
    functions, ops = _Names(), _Ops()
    with functions, _Names(), torch.no_grad():
        under_function = (x @ x).cpu()
    with torch.inference_mode():
        under_inference = (x @ x).cpu()
    with ops:
        under_dispatch = (x @ x).cpu()
    assert torch.equal(under_function, expected)
    assert torch.equal(under_inference, expected)
    assert torch.equal(under_dispatch, expected)
    assert "matmul" in functions.names
    # The mode saw the call, and nothing of how the simulated device computes it.
    assert [name for name in ops.names if "frombuffer" in name or "as_strided" in name] == []


def test_the_strides_of_a_result_are_those_of_the_cpu() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert (x.npu() * 2).stride() == (x * 2).stride()
    assert x.npu().transpose(1, 2).relu().stride() == x.transpose(1, 2).relu().stride()


def test_aten_gelu_is_the_tanh_formula_whatever_was_asked() -> None:
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(F.gelu(x.npu()).cpu(), F.gelu(x, approximate="tanh"))
    assert (F.gelu(x.npu()).cpu() - F.gelu(x)).abs().max() > 1e-4


def test_fp32_convolution_uses_hf32_until_it_is_switched_off() -> None:
    x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    expected = F.conv2d(x, w)
    error = (F.conv2d(x.npu(), w.npu()).cpu() - expected).abs().max().item()
    torch.npu.conv.allow_hf32 = False
    try:
        exact = (F.conv2d(x.npu(), w.npu()).cpu() - expected).abs().max().item()
    finally:
        torch.npu.conv.allow_hf32 = True
    assert error > 1e-4
    assert exact < 1e-5


def test_fp32_matrix_product_uses_hf32_only_when_allowed() -> None:
    x, w = torch.randn(8, 64), torch.randn(64, 8)
    assert torch.equal((x.npu() @ w.npu()).cpu(), x @ w)
    torch.npu.matmul.allow_hf32 = True
    try:
        rounded = (x.npu() @ w.npu()).cpu()
    finally:
        torch.npu.matmul.allow_hf32 = False
    assert not torch.equal(rounded, x @ w)


def test_hf32_keeps_eleven_bits_and_rounds_to_even() -> None:
    one_ulp, half = 2.0**-11, 2.0**-12
    values = torch.tensor([1 + one_ulp, 1 + half, 1 + 3 * half, 1 + half * 1.001, float("inf")])
    expected = [1 + one_ulp, 1.0, 1 + 2 * one_ulp, 1 + one_ulp, float("inf")]
    assert round_to_hf32(values).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(5, 7).tril().bool()}])
def test_aten_sdpa_arrives_as_fusion_attention_v3(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    moved = {key: value.npu() if torch.is_tensor(value) else value for key, value in options.items()}
    with rig_calls() as calls:
        got = F.scaled_dot_product_attention(*(x.to("npu", dtype) for x in (q, k, v)), **moved)
    assert calls[-1] == "npu::npu_fusion_attention_v3"
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(got.cpu().float(), expected, atol=2e-2, rtol=2e-2)


def test_aten_sdpa_with_an_additive_mask_runs_unfused() -> None:
    q = torch.randn(1, 2, 5, 8, device="npu", dtype=torch.float16)
    with rig_calls() as calls:
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(5, 5, device="npu", dtype=torch.float16))
    assert [name for name in calls if name.startswith("npu::")] == []
    assert "aten::softmax.int" in calls


def test_an_operator_without_a_kernel_raises_and_names_itself() -> None:
    x = torch.ones(4, 4, device="npu")
    with pytest.raises(NotImplementedError, match="npu::npu_sort_v2 has no reference kernel"):
        torch.ops.npu.npu_sort_v2(x, -1, False)


def test_npu_operators_still_refuse_cpu_tensors() -> None:
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.npu.npu_swiglu(torch.ones(2, 4))
