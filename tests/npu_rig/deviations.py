"""Where the device's aten kernels are documented to differ from torch's formula, imitated so that a flag has an effect.

* gelu ignores `approximate` and uses the tanh formula, unless the compatible implementation is on.
* fp32 products go through HF32 when allowed: convolutions by default, matrix products not. HF32 keeps 11 mantissa
  bits of each factor; the sum stays fp32.

These are leads from documents (nothing here ran on an NPU), good for testing that flags are set and told, no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

_HF32_DROPPED_BITS = 12
_USE_FP16, _USE_HF32 = 2, 3

# Which positional arguments are the factors of the product.
_MATMULS = {
    **dict.fromkeys(
        ("mm", "mm.out", "bmm", "bmm.out", "matmul", "matmul.out", "mv", "mv.out", "dot", "dot.out"), (0, 1)
    ),
    **dict.fromkeys(
        ("addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_", "addmv", "addmv.out"), (1, 2)
    ),
}
_CONVOLUTIONS = dict.fromkeys(("convolution", "convolution_overrideable", "_convolution"), (0, 1))


def deviation(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the device runs under an aten name, given torch's own CPU kernel."""
    if name == "gelu.out":
        return _always_tanh(run)
    if name in _MATMULS:
        return _through_cube(run, _MATMULS[name], _matmul_dtype)
    if name in _CONVOLUTIONS:
        return _through_cube(run, _CONVOLUTIONS[name], _convolution_dtype)
    return run


def round_to_hf32(tensor: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to 11 explicit mantissa bits, to nearest even; infinities and NaN stay."""
    bits = tensor.contiguous().view(torch.int32)
    half = (1 << (_HF32_DROPPED_BITS - 1)) - 1
    rounded = bits + half + ((bits >> _HF32_DROPPED_BITS) & 1)
    kept = rounded >> _HF32_DROPPED_BITS << _HF32_DROPPED_BITS
    return torch.where(tensor.isfinite(), kept.view(torch.float32), tensor)


def _always_tanh(run: Callable[..., Any]) -> Callable[..., Any]:
    def gelu(x: torch.Tensor, *, approximate: str = "none", out: torch.Tensor) -> Any:
        compatible = os.environ.get("TORCH_NPU_USE_COMPATIBLE_IMPL") == "1"
        return run(x, approximate=approximate if compatible else "tanh", out=out)

    return gelu


def _through_cube(
    run: Callable[..., Any], factors: tuple[int, int], factor_dtype: Callable[[], str]
) -> Callable[..., Any]:
    def product(*args: Any, **kwargs: Any) -> Any:
        if args[factors[0]].dtype is not torch.float32 or (kind := factor_dtype()) == "float32":
            return run(*args, **kwargs)
        cut = round_to_hf32 if kind == "hf32" else _through_half
        lowered = [cut(value) if place in factors else value for place, value in enumerate(args)]
        return run(*lowered, **kwargs)

    return product


def _through_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float()


def _matmul_dtype() -> str:
    matmul = torch.npu.matmul  # type: ignore[attr-defined]
    return _named(matmul.cube_math_type, matmul.allow_hf32)


def _convolution_dtype() -> str:
    return "hf32" if torch.npu.conv.allow_hf32 else "float32"  # type: ignore[attr-defined]


def _named(cube_math_type: int | None, allow_hf32: bool) -> str:
    if cube_math_type is None:
        return "hf32" if allow_hf32 else "float32"
    return {_USE_FP16: "float16", _USE_HF32: "hf32"}.get(int(cube_math_type), "float32")
