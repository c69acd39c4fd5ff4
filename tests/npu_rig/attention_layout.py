"""Bring every attention layout of the device to [batch, heads, sequence, head size] and back.

B batch, S sequence, N heads, D head size, H = N * D, T = all sequences laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_bnsd(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """Return a [B, N, S, D] view; `heads` is read for BSH and SBH only, where the shape does not tell it."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "BSH":
        return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)
    if layout == "SBH":
        return tensor.reshape(*tensor.shape[:2], heads, -1).permute(1, 2, 0, 3)
    if layout == "TND":
        return tensor.transpose(0, 1).unsqueeze(0)
    raise RuntimeError(f"unknown attention layout {layout!r}")


def from_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return contiguous attention output in the given layout."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2).contiguous()
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(2).contiguous()
    if layout == "TND":
        return tensor.squeeze(0).transpose(0, 1).contiguous()
    raise RuntimeError(f"unknown attention layout {layout!r}")


def split_layout(layout: str) -> tuple[str, str]:
    """Split an inference layout such as BNSD_BSND into those of the inputs and of the output."""
    given, _, wanted = layout.partition("_")
    return given, wanted or given


def cumulative_pieces(ends: Sequence[int]) -> list[slice]:
    """Turn cumulative sequence ends, as TND wants them, into slices of T."""
    starts = [0, *ends[:-1]]
    if any(end < start for start, end in zip(starts, ends, strict=True)):
        raise RuntimeError(f"sequence ends must be cumulative, got {list(ends)}")
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]
