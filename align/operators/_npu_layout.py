"""How torch_npu's attention lays out its tensors and says what is hidden, in terms of [batch, heads, sequence, size].

Letters: B batch, S sequence, N heads, D head size, H = N * D, T the sequences of a batch end to end. True hides, and
without a mask nothing is hidden whatever `sparse_mode` says. Source: the vendor's documents of npu_fusion_attention
and npu_fused_infer_attention_score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from align.dumpers.errors import UndecidedError

ALL_TOKENS = 2147483647
TILE = 2048  # side of the compressed causal mask that sparse modes 2, 3 and 4 want
DEFAULT, ALL, TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL, BAND, PREFIX, PREFIX_TILE = range(7)


def to_heads(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """View a tensor as [B, N, S, D]; `heads` matters only where the layout hides it (BSH, SBH)."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.permute(0, 2, 1, 3)
    if layout == "BSH":
        return _by_head(tensor, heads).permute(0, 2, 1, 3)
    if layout == "SBH":
        return _by_head(tensor, heads).permute(1, 2, 0, 3)
    if layout == "TND":
        return tensor.permute(1, 0, 2)[None]
    raise UndecidedError(f"attention layout {layout!r} has no unfused form", "use BSH, SBH, BSND, BNSD or TND")


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:-1], heads, -1)


def from_heads(tensor: Tensor, layout: str) -> Tensor:
    """Lay out [B, N, S, D] as asked, contiguous as the fused kernels return it."""
    if layout == "BSND":
        tensor = tensor.permute(0, 2, 1, 3)
    elif layout == "BSH":
        tensor = tensor.permute(0, 2, 1, 3).flatten(2)
    elif layout == "SBH":
        tensor = tensor.permute(2, 0, 1, 3).flatten(2)
    elif layout == "TND":
        tensor = tensor[0].permute(1, 0, 2)
    elif layout != "BNSD":
        raise UndecidedError(f"attention layout {layout!r} has no unfused form", "use BSH, SBH, BSND, BNSD or TND")
    return tensor.contiguous()


def shared_heads(tensor: Tensor, layout: str, size: int) -> int:
    """Number of key or value heads in a layout that hides it, given the head size."""
    return tensor.shape[-1] // size if layout in ("BSH", "SBH") else 0


def sequences(ends: Sequence[int] | Tensor) -> Iterator[slice]:
    """The rows of each sequence of a TND tensor; `ends` is cumulative."""
    start = 0
    for end in ends.tolist() if isinstance(ends, Tensor) else ends:
        yield slice(start, int(end))
        start = int(end)


def hidden_positions(
    mask: Tensor | None, queries: int, keys: int, *,
    sparse_mode: int = DEFAULT, before: int = ALL_TOKENS, after: int = ALL_TOKENS, prefix: Sequence[int] | None = None,
) -> Tensor | None:  # fmt: skip
    """A bool tensor that broadcasts to [B, N, queries, keys] and is True where a key is not attended, or None.

    before, after   how far behind and ahead of a query's own position a key may be (modes 0 and 4)
    """
    if mask is None:
        return None
    corner = keys - queries
    if sparse_mode == DEFAULT:
        given = _fitted(mask, queries, keys)
        if before >= ALL_TOKENS and after >= ALL_TOKENS:
            return given
        return given | _outside(mask, queries, keys, before, after)
    if sparse_mode in (ALL, PREFIX):
        return _fitted(mask, queries, keys)
    if sparse_mode == TOP_LEFT_CAUSAL:
        return _outside(mask, queries, keys, ALL_TOKENS, 0)
    if sparse_mode == BOTTOM_RIGHT_CAUSAL:
        return _outside(mask, queries, keys, ALL_TOKENS, corner)
    if sparse_mode == BAND:
        return _outside(mask, queries, keys, before - corner, after + corner)
    if sparse_mode == PREFIX_TILE and prefix is not None:
        ends = torch.tensor(list(prefix), device=mask.device)[:, None, None, None]
        return _outside(mask, queries, keys, ALL_TOKENS, corner) & (torch.arange(keys, device=mask.device) >= ends)
    raise UndecidedError(f"attention with sparse_mode {sparse_mode} has no unfused form", "use sparse_mode 0 to 6")


def _fitted(mask: Tensor, queries: int, keys: int) -> Tensor:
    """The full mask as bool, with a head axis, cut to one sequence of a TND call."""
    full = mask.bool()
    full = full[..., : queries if full.shape[-2] > 1 else 1, :keys]
    return full[:, None] if full.dim() == 3 else full


def _outside(mask: Tensor, queries: int, keys: int, before: int, after: int) -> Tensor:
    rows = torch.arange(queries, device=mask.device)[:, None]
    ahead = torch.arange(keys, device=mask.device)[None, :] - rows
    return (ahead > after) | (ahead < -before)


def beyond(lengths: Sequence[int] | Tensor, keys: int, device: torch.device) -> Tensor:
    """[B, 1, 1, keys], True behind the end of each sequence."""
    ends = torch.as_tensor(lengths, device=device).reshape(-1, 1, 1, 1)
    return torch.arange(keys, device=device) >= ends


def causal_tile(device: torch.device) -> Tensor:
    """The compressed mask of sparse modes 2 to 4: True above the diagonal of 2048 x 2048."""
    return torch.ones(TILE, TILE, dtype=torch.bool, device=device).triu(1)
