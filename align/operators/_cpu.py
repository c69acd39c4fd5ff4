"""The CPU's fused kernels as functions of tensors: layouts, types, output, threads. The loops are in `_loops`.

numba is imported, and a loop compiled for a combination of types, at first use; compiled loops stay in numba's cache
folder. Nothing here is differentiable. An input that does not lie as a loop wants it is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from align.dumpers.errors import UsageError
from align.dumpers.survey import Operand
from align.operators._probe import probe
from align.operators.base import Bound

_TAGS: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0),
}  # fmt: skip
"""A number whose type tells a loop how to read a tensor."""

_SHARED = 1 << 18
"""Elements from which on threads share the work: handing it over takes about 30 us."""


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float | None, plus_one: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """The RMS norm of the last axis, times the gain, rounded once to the dtype that the unfused form returns."""
    x, width = _forward_only(x, weight).contiguous(), x.shape[-1]
    out = _empty(x, dtype or _norm_dtype(x.dtype, weight, plus_one))
    gain, offset = _gain(x, weight, plus_one)
    _share(
        "rms_norm", _ratio(x.numel(), width), x.numel(),
        x.data_ptr(), _TAGS[x.dtype], gain.data_ptr(), _TAGS[gain.dtype], offset, out.data_ptr(), _TAGS[out.dtype],
        width, width, torch.finfo(x.dtype).eps if eps is None else float(eps),
    )  # fmt: skip
    return out


def add_rms_norm(
    x1: Tensor, x2: Tensor, weight: Tensor | None, eps: float | None, plus_one: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As `rms_norm` of x1 + x2; the sum is not rounded."""
    kind = _joint(x1.dtype, x2.dtype)
    x1, x2 = _as(_forward_only(x1, weight), kind).contiguous(), _as(_forward_only(x2), kind).contiguous()
    width = x1.shape[-1]
    out = _empty(x1, dtype or _norm_dtype(kind, weight, plus_one))
    gain, offset = _gain(x1, weight, plus_one)
    _share(
        "add_rms_norm", _ratio(x1.numel(), width), x1.numel(),
        x1.data_ptr(), x2.data_ptr(), _TAGS[kind], gain.data_ptr(), _TAGS[gain.dtype], offset,
        out.data_ptr(), _TAGS[out.dtype], width, torch.finfo(kind).eps if eps is None else float(eps),
    )  # fmt: skip
    return out


def _norm_dtype(kind: torch.dtype, weight: Tensor | None, plus_one: bool) -> torch.dtype:
    return kind if weight is None or plus_one else _joint(kind, weight.dtype)


_NOTHING, _WHOLE = np.float32(0.0), np.float32(1.0)


def _gain(x: Tensor, weight: Tensor | None, plus_one: bool) -> tuple[Tensor, Any]:
    """A row of gains and what is added to each; no weight is a gain of 0 + 1."""
    if weight is None:
        return x.new_zeros(x.shape[-1]), _WHOLE
    return weight.contiguous(), _WHOLE if plus_one else _NOTHING


def group_norm_silu(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """SiLU of the group norm, rounded once; channels-last inputs are read and written as they lie."""
    is_last = _forward_only(x, weight, bias).dim() == 4 and not x.is_contiguous()
    is_last = is_last and x.is_contiguous(memory_format=torch.channels_last)
    x = x if is_last else x.contiguous()
    out = torch.empty_like(x)
    samples, whole = x.shape[0], x.shape[1]
    if groups < 1 or whole % groups:
        raise RuntimeError(f"{whole} channels cannot be cut into {groups} groups")
    gains = x.new_ones(whole) if weight is None else weight
    biases = gains.new_zeros(whole) if bias is None else _as(bias, gains.dtype)
    gains, biases = gains.contiguous(), biases.contiguous()
    _share(
        "group_norm_silu_rows" if is_last else "group_norm_silu", samples * groups, x.numel(),
        x.data_ptr(), _TAGS[x.dtype], gains.data_ptr(), biases.data_ptr(), _TAGS[gains.dtype], out.data_ptr(),
        groups, whole // groups, _ratio(x.numel(), samples * whole), float(eps),
    )  # fmt: skip
    return out


def gated(loop: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up in one pass, rounded once; `loop` names the activation's loop."""
    kind = _joint(gate.dtype, up.dtype)
    gate, up = _as(_forward_only(gate), kind), _as(_forward_only(up), kind)
    width, count = gate.shape[-1] if gate.dim() else 1, gate.numel()
    out = _empty(gate, kind)
    gate, gate_stride = _rows(gate, width)
    up, up_stride = _rows(up, width)
    if gate_stride == up_stride == width and count < _SHARED:
        width = gate_stride = up_stride = count
    _share(
        loop, _ratio(count, width), count,
        gate.data_ptr(), up.data_ptr(), _TAGS[kind], out.data_ptr(), width, gate_stride, up_stride,
    )  # fmt: skip
    return out


def _rows(x: Tensor, width: int) -> tuple[Tensor, int]:
    """The tensor and the distance of its rows; it is copied unless its rows lie at one distance, each in one piece."""
    if x.is_contiguous():
        return x, width
    strides, shape = x.stride(), x.shape
    if strides[-1] == 1:
        expected = stride = strides[-2]
        for extent, step in zip(shape[-2::-1], strides[-2::-1], strict=True):
            if extent != 1 and step != expected:
                break
            expected = step * extent if extent != 1 else expected
        else:
            return x, stride
    return x.contiguous(), width


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x * cos + rotate_half(x) * sin in one pass, rounded once; the result lies in memory as x does."""
    kind = _joint(cos.dtype, sin.dtype)
    cos, sin, x = _dense(_as(_forward_only(cos), kind)), _dense(_as(_forward_only(sin), kind)), _dense(_forward_only(x))
    if x.dim() > 4:
        last = x.dim() - 4
        flat = (x.flatten(0, last), cos.expand(x.shape).flatten(0, last), sin.expand(x.shape).flatten(0, last))
        return rotary(*flat).view(x.shape)
    out = torch.empty_like(x, dtype=_joint(x.dtype, kind))
    shape = (*_ONES[: 4 - x.dim()], *x.shape)
    _share(
        "rotary", _ratio(x.numel(), shape[3]), x.numel(),
        x.data_ptr(), _TAGS[x.dtype], cos.data_ptr(), sin.data_ptr(), _TAGS[kind], out.data_ptr(), _TAGS[out.dtype],
        (shape[1], shape[2], shape[3] // 2),
        _outer_strides(x, shape), _outer_strides(cos, shape), _outer_strides(sin, shape), _outer_strides(out, shape),
    )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    """The tensor with its rows in one piece each, copied if they do not lie so."""
    return x if x.dim() and x.stride(-1) == 1 else x.contiguous()


def _outer_strides(value: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the first three of four axes when a tensor is broadcast to a shape."""
    own: tuple[int, ...] = value.shape
    strides = value.stride()
    missing = 4 - len(own)
    if missing:
        own, strides = _ONES[:missing] + tuple(own), _ZEROS[:missing] + strides
    if own == shape:
        return strides[:3]
    for axis in range(4):
        if own[axis] != shape[axis] and (own[axis] != 1 or axis == 3):
            raise RuntimeError(f"angles of shape {tuple(value.shape)} do not fit rows of shape {shape}")
    return tuple(0 if own[axis] == 1 else strides[axis] for axis in (0, 1, 2))


_ONES, _ZEROS = (1, 1, 1), (0, 0, 0)


def refusal(kernel: Callable[..., Any], unfused: Callable[..., Any], example: Callable[..., Any]) -> Callable[..., str]:
    """What a kernel of this file is asked before it is used: does it work here, in that dtype and on such operands."""

    def refuses(bound: Bound, dtype: torch.dtype) -> str:
        if dtype not in _TAGS:
            return f"no loop in {_name(dtype)}"
        for name, value in bound.items():
            if isinstance(value, Operand) and value.dtype not in _TAGS:
                return f"no loop for {name} in {_name(value.dtype)}"
        return probe("cpu", dtype, kernel, unfused, example)

    return refuses


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- running a loop ----------------------------------------------------------------------------------------------------


@cache
def _loop(name: str) -> Callable[..., None]:
    """The loop of that name. RuntimeError where numba is missing or does not work."""
    try:
        from align.operators import _loops
    except Exception as exc:  # numba's own errors and the loader's share no base
        raise RuntimeError(f"numba does not work here: {exc}") from exc
    loop: Callable[..., None] = getattr(_loops, name)
    return loop


def _share(name: str, units: int, count: int, *arguments: Any) -> None:
    """Run a loop over all its units, on as many threads as torch uses if there are many elements."""
    loop = _loop(name)
    threads = min(torch.get_num_threads(), units) if count >= _SHARED else 1
    if threads < 2:
        return _call(loop, 0, units, arguments)
    marks = [units * part // threads for part in range(threads + 1)]
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(_call, loop, marks[k], marks[k + 1], arguments) for k in range(1, threads)]
    _call(loop, 0, marks[1], arguments)
    for other in others:
        other.result()
    return None


def _call(loop: Callable[..., None], first: int, last: int, arguments: tuple[Any, ...]) -> None:
    try:
        loop(first, last, *arguments)
    except Exception as exc:  # compiled at first use; see `_loop`
        raise RuntimeError(f"numba cannot compile this loop here: {exc}") from exc


@cache
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Threads of this process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(workers, thread_name_prefix="align-loops")


def _joint(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if one == other else torch.promote_types(one, other)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of that shape; `empty_like` takes half the time of `empty`."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _ratio(count: int, size: int) -> int:
    return count // size if size else 0


def _forward_only(tensor: Tensor, *others: Tensor | None) -> Tensor:
    """The tensor, its sign applied, unless autograd would have to follow."""
    if torch.is_grad_enabled() and any(item is not None and item.requires_grad for item in (tensor, *others)):
        raise UsageError(
            "a fused CPU kernel was asked for gradients, which it does not give",
            "run under torch.no_grad(), or leave the site unfused (--no-fuse)",
        )
    return tensor.resolve_neg() if tensor.is_neg() else tensor
