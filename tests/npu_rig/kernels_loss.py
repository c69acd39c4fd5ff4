"""Reference kernel of the fused cross entropy."""

from __future__ import annotations

import torch
from npu_rig.registry import kernel
from torch.nn import functional as F


@kernel("npu_cross_entropy_loss")
def cross_entropy_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, log-probabilities, z-loss, log-sum-exp); a reduced loss has shape [1], all in x's dtype."""
    if return_zloss or lse_square_scale_for_zloss:
        raise RuntimeError("npu_cross_entropy_loss: z-loss is not supported on this device")
    wide = x.float()
    loss = F.cross_entropy(
        wide,
        target,
        None if weight is None else weight.float(),
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    shaped = loss if reduction == "none" else loss.reshape(1)
    # Without z-loss the last two are there and hold nothing of use.
    return (
        shaped.to(x.dtype),
        wide.log_softmax(-1).to(x.dtype),
        torch.zeros_like(shaped, dtype=x.dtype),
        x.new_zeros(x.size(0)),
    )
