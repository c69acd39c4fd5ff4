"""The operator catalog on the simulated device: schemas of the real package, agreement of both forms, conventions.

Agreement here proves that names, arguments and conventions are right; it says nothing about an NPU's rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch_npu
from npu_rig.calls import rig_calls
from npu_rig.registry import KERNELS
from torch.nn import functional as F

from align.dumpers.naming import map_tensors, op_name, walk_tensors
from align.operators import (
    _npu_activation,
    _npu_attention,
    _npu_call,
    _npu_norm,
    _npu_quant,
    _npu_rotary,
    geglu,
    group_norm_silu,
    layer_norm,
    quant_linear,
    rms_norm,
    rotary,
    swiglu,
)
from align.operators import attention as attention_file
from align.operators._npu_call import arguments_of, op_of
from align.operators.base import Kernel, Operator
from align.operators.registry import catalog

npu = torch.ops.npu
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# The kernels of these operators that are plugged into files of other operators, with the operator each belongs to.
KERNELS_OF: list[tuple[Operator, Kernel]] = [
    (attention_file.ATTENTION, _npu_attention.NPU_ATTENTION_KERNEL),
    (rms_norm.RMS_NORM, _npu_norm.NPU_RMS_NORM_KERNEL),
    (layer_norm.LAYER_NORM, _npu_norm.NPU_LAYER_NORM_KERNEL),
    (group_norm_silu.GROUP_NORM_SILU, _npu_norm.NPU_GROUP_NORM_SILU_KERNEL),
    (swiglu.SWIGLU, _npu_activation.NPU_SWIGLU_KERNEL),
    (geglu.GEGLU, _npu_activation.NPU_GEGLU_KERNEL),
    (rotary.ROTARY, _npu_rotary.NPU_ROTARY_KERNEL),
    (quant_linear.QUANT_LINEAR, _npu_quant.NPU_QUANT_LINEAR_KERNEL),
]
WRITTEN = {op_of(item): item for item in catalog() if item.summary.endswith("as called by the model")}
OWN = [(item, item.kernels["npu"]) for item in catalog() if "npu" in item.kernels]
PAIRS = [
    (operator, kernel)
    for operator, kernel in [*(pair for pair in KERNELS_OF if "npu" not in pair[0].kernels), *OWN]
    if not kernel.label.startswith("torch_npu.") or kernel.label.removeprefix("torch_npu.") in KERNELS
]
HALF_ONLY = {"npu_prompt_flash_attention", "npu_incre_flash_attention"}
ATEN_GELU = "aclnnGelu"


def _on(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.npu())


def _wide(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor.clone())


def _apart(got: torch.Tensor, exact: torch.Tensor) -> float:
    difference = (got.detach().cpu().double() - exact.double()).norm()
    return float(difference / exact.double().norm().clamp_min(1e-9))


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(WRITTEN))
def test_an_unfused_form_has_the_signature_of_the_real_schema(op: str) -> None:
    schema = getattr(npu, op).default._schema
    ours = {argument.name.rstrip("_"): argument for argument in arguments_of(WRITTEN[op].unfused)}
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(WRITTEN[op].unfused).parameters.values())
    assert set(ours) <= {argument.name for argument in schema.arguments}
    for place, argument in enumerate(schema.arguments):
        if argument.name not in ours:
            assert takes_rest, f"{op} does not know {argument.name}"
            continue
        assert ours[argument.name].position == (-1 if argument.kwarg_only else place), argument.name
        if argument.has_default_value():
            assert ours[argument.name].default == argument.default_value, argument.name


class _Binder:
    """Stands for torch.ops.npu: binds every call to the real schema, then makes it."""

    def __init__(self) -> None:
        self.bound: list[str] = []

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(npu, op)
        names = [[argument.name for argument in getattr(packet, each)._schema.arguments] for each in packet.overloads()]
        assert any(set(kwargs) <= set(known[len(args) :]) for known in names), (op, len(args), sorted(kwargs))
        self.bound.append(op)
        return packet(*args, **kwargs)


@pytest.fixture
def binder(monkeypatch: pytest.MonkeyPatch) -> _Binder:
    found = _Binder()
    from align.operators import add_layer_norm, add_rms_norm, cross_entropy, ffn, gelu, grouped_matmul, moe_gating

    for module in (
        _npu_call, _npu_activation, _npu_attention, _npu_norm, _npu_quant, _npu_rotary, add_layer_norm, add_rms_norm,
        cross_entropy, ffn, gelu, grouped_matmul, moe_gating,
    ):  # fmt: skip
        monkeypatch.setattr(module, "run_npu", found)
    return found


def _label(item: Any) -> str:
    return item.name if isinstance(item, Operator) else item.label.replace("torch_npu.", "").split(" ")[0].rstrip(",")


@pytest.mark.parametrize(("operator", "kernel"), PAIRS, ids=_label)
def test_every_npu_call_we_make_binds_to_the_real_schema(operator: Operator, kernel: Kernel, binder: _Binder) -> None:
    kernel.run(**_on(operator.example("cpu", torch.float16, 0)))
    # aten's own kernels and torch's attention need no npu:: call of ours.
    assert binder.bound or kernel.is_native or kernel.label.startswith("aclnn")


# -- agreement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("operator", "kernel"), PAIRS, ids=_label)
def test_kernel_and_unfused_form_agree_with_float32(operator: Operator, kernel: Kernel, dtype: torch.dtype) -> None:
    example = operator.example("cpu", dtype, 5)
    if dtype is torch.float32 and _is_half_only(kernel):
        with pytest.raises(RuntimeError, match="float16 and bfloat16"):
            kernel.run(**_on(example))
        return
    limit = max(LIMITS[dtype], 1e-3 if kernel.label.startswith(ATEN_GELU) else 0.0)
    with _exact_products():
        exact = operator.unfused(**_wide(map_tensors(example, torch.clone)))
        fused, plain = kernel.run(**_on(example)), operator.unfused(**_on(example))
    slots = list(zip(walk_tensors(exact), walk_tensors(fused), walk_tensors(plain), strict=True))
    for (slot, wanted), (_, got), (_, other) in slots:
        assert wanted.shape == got.shape == other.shape, slot
        assert got.dtype == other.dtype, slot
        assert got.device.type == other.device.type == "npu", slot
        if wanted.numel():
            assert _apart(got, wanted) < limit, (slot, "kernel")
            assert _apart(other, wanted) < 2 * limit, (slot, "unfused")


def _is_half_only(kernel: Kernel) -> bool:
    op = kernel.label.removeprefix("torch_npu.")
    return op in HALF_ONLY or op.startswith("npu_fused_infer")


@contextmanager
def _exact_products() -> Iterator[None]:
    """FP32 means FP32: aten's convolution is HF32 here unless told otherwise."""
    before, torch.npu.conv.allow_hf32 = torch.npu.conv.allow_hf32, False
    try:
        yield
    finally:
        torch.npu.conv.allow_hf32 = before


@pytest.mark.parametrize(("operator", "kernel"), PAIRS, ids=_label)
def test_the_unfused_form_runs_no_fused_kernel(operator: Operator, kernel: Kernel) -> None:
    arguments = _on(operator.example("cpu", torch.float16, 0))
    with rig_calls() as calls:
        operator.unfused(**arguments)
    assert [name for name in calls if name.startswith("npu::") or "gelu" in name or "attention" in name] == []
    assert [name for name in calls if name.startswith("fallback:")] == []


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", sorted(WRITTEN))
def test_the_wire_names_a_call_by_its_short_and_qualified_name(op: str) -> None:
    name = op_name(getattr(npu, op))
    assert (name.short, name.qualified) == (op, f"npu::{op}")
    assert getattr(torch_npu, op, getattr(npu, op)) is getattr(npu, op)
    assert op_name(getattr(npu, op).default).short == op


# -- conventions of the canonical attention ----------------------------------------------------------------------------


def _attention(queries: int = 5, keys: int = 8) -> dict[str, Any]:
    torch.manual_seed(2)
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16))
    query, key, value = (torch.randn(shape) for shape in shapes)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": None,
        "is_causal": False,
        "scale": None,
        "enable_gqa": True,
    }


def _fused_attention(**arguments: Any) -> torch.Tensor:
    result: torch.Tensor = _npu_attention.NPU_ATTENTION_KERNEL.run(**_on(arguments))
    return result.cpu()


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, is_causal: bool, **options: Any
) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, **options)


def _masks() -> dict[str, dict[str, Any]]:
    keep = torch.rand(2, 1, 5, 8, generator=torch.Generator().manual_seed(1)) > 0.4
    keep[..., 0] = True
    floor = torch.zeros(2, 1, 5, 8).masked_fill(~keep, torch.finfo(torch.float32).min)
    closed = keep.clone()
    closed[0, :, 3] = False
    return {
        "nothing": {},
        "causal, fewer queries than keys": {"is_causal": True},
        "bool": {"mask": keep},
        "bool of two axes": {"mask": keep[0, 0]},
        "bool with a row closed altogether": {"mask": closed},
        "bool a head": {"mask": keep.expand(2, 4, 5, 8).clone()},
        "padding": {"mask": keep[:, :, :1]},
        "additive": {"mask": torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(4))},
        "additive floor": {"mask": floor},
        "additive -inf": {"mask": torch.zeros(2, 1, 5, 8).masked_fill(~keep, -math.inf)},
        "scale": {"scale": 0.7},
    }


@pytest.mark.parametrize("case", _masks())
def test_the_attention_kernel_means_what_torch_means(case: str) -> None:
    arguments = _attention() | _masks()[case]
    assert _apart(_fused_attention(**arguments), _sdpa(**arguments)) < 1e-6


def test_attention_with_one_query_or_three_axes() -> None:
    arguments = _attention(queries=1)
    assert _apart(_fused_attention(**arguments), _sdpa(**arguments)) < 1e-6
    flat = {name: arguments[name][0] for name in ("query", "key", "value")} | {"mask": torch.ones(1, 8).bool()}
    flat |= {"is_causal": False, "scale": None, "enable_gqa": True}
    assert _apart(_fused_attention(**flat), _sdpa(**(flat | {"mask": None}))) < 1e-6


# -- conventions of the other canonical kernels ------------------------------------------------------------------------


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_geglu_activates_the_gate_wherever_it_lies(gate_first: bool, act: str) -> None:
    x = torch.randn(3, 16)
    left, right = x.chunk(2, -1)
    gate, up = (left, right) if gate_first else (right, left)
    wanted = up * F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")
    for arguments in ({"gate": None, "up": None, "packed": x}, {"gate": gate, "up": up, "packed": None}):
        got = _npu_activation.fused_geglu(**_on(arguments), gate_first=gate_first, act=act)
        assert _apart(got, wanted) < 1e-6


@pytest.mark.parametrize("gate_first", [True, False])
def test_swiglu_activates_the_gate_wherever_it_lies(gate_first: bool) -> None:
    x = torch.randn(3, 16)
    left, right = x.chunk(2, -1)
    gate, up = (left, right) if gate_first else (right, left)
    for arguments in ({"gate": None, "up": None, "packed": x}, {"gate": gate, "up": up, "packed": None}):
        got = _npu_activation.fused_swiglu(**_on(arguments), gate_first=gate_first)
        assert _apart(got, F.silu(gate) * up) < 1e-6


def test_gemma_norm_and_a_wide_weight() -> None:
    x, weight = torch.randn(3, 16), torch.randn(16)
    for plus_one in (False, True):
        got = _npu_norm.fused_rms_norm(x.npu(), weight.npu(), 1e-5, plus_one)
        assert _apart(got, rms_norm.unfused(x, weight, 1e-5, plus_one)) < 1e-6
    low = _npu_norm.fused_rms_norm(x.bfloat16().npu(), weight.npu(), 1e-5)
    assert low.dtype == rms_norm.unfused(x.bfloat16(), weight, 1e-5).dtype


def test_static_quantisation_uses_the_models_own_scale() -> None:
    arguments = quant_linear.static_example("cpu", torch.float16, 0)
    exact = quant_linear.unfused(**_wide(arguments))
    assert _apart(_npu_quant.fused_quant_linear(**_on(arguments)), exact) < 2e-3
    assert _npu_quant.refuses_quant_linear({}, torch.float32)


def test_interleaved_rotary_is_not_half_rotary() -> None:
    arguments = rotary.example("cpu", torch.float32, 0) | {"interleaved": True}
    assert _apart(_npu_rotary.fused_rotary(**_on(arguments)), rotary.unfused(**arguments)) < 1e-6
    assert (
        _apart(_npu_rotary.fused_rotary(**_on(arguments | {"interleaved": False})), rotary.unfused(**arguments)) > 0.1
    )
