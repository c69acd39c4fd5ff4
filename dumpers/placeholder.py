"""Stand-ins for tensors that a fused kernel never makes: right shape, dtype and device, no data.

The interior calls of a fused site return placeholders, and the site's last call swallows them. Reading one anywhere
else is an error that names the reader, never a wrong number.
"""

from __future__ import annotations

from typing import Any

import torch

from align.dumpers.errors import UndecidedError


class PlaceholderReadError(UndecidedError):
    """A value that a fused kernel has swallowed was needed after all; `reader` is the call that needed it."""

    reader: str = ""

    def __str__(self) -> str:
        return f"{self.reader or 'Python code'}: {super().__str__()}"


class Placeholder(torch.Tensor):
    """A tensor without data that stands for an interior value of the fused site `site`."""

    site: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device, site: str) -> Placeholder:
        """Make one with the shape, strides and dtype of `like` (which may be on the meta device)."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
        )
        made.site = site
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        site = next((item.site for item in args if isinstance(item, Placeholder)), "a fused site")
        raise PlaceholderReadError(
            f"{func} reads an interior value of {site}, which its fused kernel never computes",
            f"keep that site unfused: --no-fuse '{site}' (the value had no such reader in the reference run)",
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({tuple(self.shape)}, {self.dtype}, interior of {self.site})"
