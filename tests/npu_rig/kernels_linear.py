"""Reference kernels of products: linear, batched, convolution, feed-forward, grouped.

The cube unit accumulates half-precision products in fp32 and casts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from npu_rig.registry import kernel
from torch.nn import functional as F

_Tensors = Sequence[torch.Tensor]


@kernel("npu_linear")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, for two-dimensional x."""
    if x.dim() != 2:
        raise RuntimeError(f"npu_linear takes a two-dimensional input, got {tuple(x.shape)}")
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


@kernel("npu_bmmV2")
def bmm_v2(x: torch.Tensor, mat2: torch.Tensor, output_sizes: Sequence[int]) -> torch.Tensor:
    """Return x @ mat2, in the given sizes unless they are empty."""
    out = (x.float() @ mat2.float()).to(x.dtype)
    return out.reshape(tuple(output_sizes)) if len(output_sizes) else out


@kernel("npu_conv2d")
def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Return the convolution."""
    wide_bias = None if bias is None else bias.float()
    return F.conv2d(x.float(), weight.float(), wide_bias, stride, padding, dilation, groups).to(x.dtype)


def _reglu(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return F.relu(left) * right


def _geglu(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return F.gelu(left, approximate="tanh") * right


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fastgelu": lambda x: x * (1.702 * x).sigmoid(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "geglu": _geglu,
    "swiglu": _swiglu,
    "reglu": _reglu,
}


@kernel("npu_ffn")
def ffn(
    x: torch.Tensor,
    weight1: torch.Tensor,
    weight2: torch.Tensor,
    activation: str,
    *,
    expert_tokens: Sequence[int] | None = None,
    expert_tokens_index: Sequence[int] | None = None,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    inner_precise: int | None = None,
    **rest: object,
) -> torch.Tensor:
    """Return act(x @ weight1 + bias1) @ weight2 + bias2; weights are [K, N], or [E, K, N] with token counts."""
    used = sorted(key for key, value in rest.items() if value is not None)
    if used:
        raise NotImplementedError(f"npu::npu_ffn: the rig has no {', '.join(used)}")
    if activation not in _ACTIVATIONS:
        raise RuntimeError(f"npu_ffn: activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    if inner_precise == 1 and x.dtype is not torch.float16:
        raise RuntimeError("npu_ffn: inner_precise 1 is for float16 only")
    weights = (weight1, bias1, weight2, bias2)
    if weight1.dim() == 2:
        return _feed_forward(x, activation, *weights)
    ends = list(expert_tokens_index) if expert_tokens_index is not None else _running_sum(expert_tokens or ())
    return torch.cat(
        [
            _feed_forward(x[start:end], activation, *(None if w is None else w[expert] for w in weights))
            for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        ]
    )


def _feed_forward(
    x: torch.Tensor,
    activation: str,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    weight2: torch.Tensor | None,
    bias2: torch.Tensor | None,
) -> torch.Tensor:
    assert weight1 is not None
    assert weight2 is not None
    hidden = _ACTIVATIONS[activation](_product(x, weight1, bias1))
    # The second product reads its input in the weights' dtype again.
    return _product(hidden.to(x.dtype), weight2, bias2).to(x.dtype)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.float() @ weight.float()
    return out if bias is None else out + bias.float()


def _running_sum(counts: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total)
    return ends


@kernel("npu_grouped_matmul", "npu_grouped_matmul.List")
def grouped_matmul(
    x: _Tensors,
    weight: _Tensors,
    *,
    bias: _Tensors | None = None,
    group_list: torch.Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | int | None = None,
    **rest: object,
) -> list[torch.Tensor]:
    """Multiply each group of rows by its expert's weight.

    group_list holds cumulative ends (group_list_type 0) or counts (1). One x with many weights is cut by it; as many
    x as weights need none. split_item 2 and 3 return one tensor, 0 and 1 one a group.
    """
    used = sorted(key for key, value in rest.items() if value is not None and value != [])
    if used or act_type or output_dtype is not None or group_type not in {None, -1, 0}:
        raise NotImplementedError(f"npu::npu_grouped_matmul: the rig has no {used or 'act_type, dtype or K split'}")
    experts = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    offsets: list[torch.Tensor | None] = [None] * len(experts) if not bias else _per_expert(bias, len(experts))
    pieces = list(x) if len(x) == len(experts) and len(x) > 1 else _cut(x[0], group_list, group_list_type or 0)
    outs = [_product(p, w, b).to(p.dtype) for p, w, b in zip(pieces, experts, offsets, strict=True)]
    return [_padded(torch.cat(outs), x[0])] if split_item in {2, 3} else outs


def _per_expert(bias: _Tensors, experts: int) -> list[torch.Tensor | None]:
    return list(bias[0]) if len(bias) == 1 and experts > 1 else list(bias)


def _cut(x: torch.Tensor, group_list: torch.Tensor | Sequence[int] | None, kind: int) -> list[torch.Tensor]:
    if group_list is None:
        return [x]
    numbers = [int(number) for number in group_list]
    ends = _running_sum(numbers) if kind == 1 else numbers
    if ends != sorted(ends) or ends[-1] > x.size(0):
        # Counts passed as ends (or the reverse) is a real and common fault.
        raise RuntimeError(f"group_list {numbers} of type {kind} does not fit {x.size(0)} rows")
    return [x[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _padded(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Keep the row count of x: rows beyond the last group are zero here, undefined on a device."""
    return F.pad(out, (0, 0, 0, x.size(0) - out.size(0))) if out.size(0) < x.size(0) else out
