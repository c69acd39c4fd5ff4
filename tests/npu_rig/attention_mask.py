"""Work out which positions an attention call hides, from mask, sparse_mode, windows and prefix.

Invariant: True hides. Without a mask nothing is hidden, whatever sparse_mode says: that is the device's rule, and the
cause of causal masks that silently were none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALL_TOKENS = 2147483647
COMPRESSED = 2048  # modes 2, 3, 4 read the causal pattern from one upper-triangular tile of this size
DEFAULT, ALL, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND, PREFIX, PREFIX_COMPRESSED = range(7)


def hidden_positions(
    mask: torch.Tensor | None,
    queries: int,
    keys: int,
    *,
    sparse_mode: int = DEFAULT,
    pre_tokens: int = ALL_TOKENS,
    next_tokens: int = ALL_TOKENS,
    prefix: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """Return a bool tensor that broadcasts to [B, N, queries, keys], or None if nothing is hidden."""
    if mask is None:
        return None
    if mask.dtype not in {torch.bool, torch.uint8, torch.int8}:
        raise RuntimeError(f"atten_mask must be bool, int8 or uint8 with 1 = hidden, not {mask.dtype}")
    hides = mask.bool()
    if sparse_mode == DEFAULT:
        full = _full(hides, queries, keys)
        return full | _outside_band(queries, keys, pre_tokens, next_tokens, shift=0)
    if sparse_mode in {ALL, PREFIX}:
        return _full(hides, queries, keys)
    _check_compressed(hides, sparse_mode)
    shift = 0 if sparse_mode == LEFT_UP_CAUSAL else keys - queries
    if sparse_mode in {LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL}:
        return _outside_band(queries, keys, ALL_TOKENS, 0, shift)
    if sparse_mode == BAND:
        return _outside_band(queries, keys, pre_tokens, next_tokens, shift)
    if sparse_mode == PREFIX_COMPRESSED and prefix is not None:
        seen = torch.arange(keys) < torch.tensor(list(prefix))[:, None, None, None]
        return _outside_band(queries, keys, ALL_TOKENS, 0, shift) & ~seen
    raise NotImplementedError(f"the rig has no sparse_mode {sparse_mode} (prefix {prefix})")


def _full(hides: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    if hides.shape[-2:] not in {(queries, keys), (1, keys)}:
        raise RuntimeError(f"atten_mask {tuple(hides.shape)} does not fit {queries} queries and {keys} keys")
    return hides.unsqueeze(1) if hides.dim() == 3 else hides


def _outside_band(queries: int, keys: int, before: int, after: int, shift: int) -> torch.Tensor:
    """Hide keys more than `before` behind or `after` ahead of the query, whose diagonal is moved by `shift`."""
    distance = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - shift
    return (distance > after) | (distance < -before)


def _check_compressed(hides: torch.Tensor, sparse_mode: int) -> None:
    rows = COMPRESSED + COMPRESSED // 2 if sparse_mode == PREFIX_COMPRESSED else COMPRESSED
    if hides.shape[-2:] != (rows, COMPRESSED):
        shape = tuple(hides.shape)
        raise RuntimeError(
            f"sparse_mode {sparse_mode} needs the compressed {rows}x{COMPRESSED} atten_mask, got {shape}"
        )
    tile = hides.reshape(-1, COMPRESSED)[:COMPRESSED]
    if not torch.equal(tile, torch.ones_like(tile).triu(1)):
        raise RuntimeError("the compressed atten_mask must be upper triangular: torch.triu(ones(2048, 2048), 1)")
