"""Random last-place noise on the outputs of a baseline run: the spread that mere rounding explains.

Two correct implementations round the same exact value independently; each error is uniform in half a unit in the last
place, so their difference has a root mean square of 1/sqrt(6) = 0.41 units. The noise here has just that: every element
moves one unit up or down with probability 1/12 each. Zeros, infinities, NaN and pure data movement (which rounds
nothing) are left alone.
"""

from __future__ import annotations

from typing import Any

import torch

from align.dumpers.families import op_class_of
from align.dumpers.model import OpClass
from align.dumpers.naming import map_tensors
from align.dumpers.tensors import dtype_name
from align.dumpers.wire import Call, Tap

_CODES = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
}
_ONE_IN = 12


class Perturb(Tap):
    """Move output elements by one unit in the last place at random."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def finish(self, call: Call, output: Any) -> Any:
        if call.op.endswith("_") or call.kwargs.get("out") is not None:
            return output
        return map_tensors(output, lambda tensor: self._moved(call.op, tensor))

    def _moved(self, op: str, tensor: torch.Tensor) -> torch.Tensor:
        codes_dtype = _CODES.get(tensor.dtype)
        if codes_dtype is None or op_class_of(op, dtype_name(tensor)) is OpClass.MOVEMENT or tensor.is_meta:
            return tensor
        draw = torch.randint(0, _ONE_IN, tensor.shape, generator=self._generator, dtype=torch.int8).to(tensor.device)
        step = (draw == 0).to(codes_dtype) - (draw == 1).to(codes_dtype)
        codes = tensor.contiguous().view(codes_dtype)
        is_fixed = (tensor == 0) | ~torch.isfinite(tensor)
        moved = torch.where(is_fixed, codes, codes + step).view(tensor.dtype)
        return torch.where(torch.isfinite(moved) | is_fixed, moved, tensor)
