"""Results that are pictures are saved as such: people look at pictures before they read figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from align.demo.picture import difference_png, save_png
from align.dumpers.naming import walk_tensors

GAIN = 10


class Album:
    """Save each run's picture, and beside the reference's what differs from it, amplified."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reference: torch.Tensor | None = None

    def add(self, role: str, result: Any) -> list[tuple[str, str]]:
        """Save a run's picture, if its result is one; return (label, file name) of what was written."""
        image = as_picture(result)
        if image is None:
            return []
        save_png(image, self._folder / f"{role}.png")
        written = [(role, f"{role}.png")]
        if self._reference is None:
            self._reference = image
        elif image.shape == self._reference.shape:
            difference_png(image, self._reference, self._folder / f"{role}-difference.png", gain=GAIN)
            written.append((f"{role} - reference, x{GAIN}", f"{role}-difference.png"))
        return written


def as_picture(result: Any) -> torch.Tensor | None:
    """The result on the CPU if it looks like a picture: one tensor of [1,] 3 x H x W with values in 0..1."""
    tensors = [tensor for _, tensor in walk_tensors(result)]
    if len(tensors) != 1 or not tensors[0].is_floating_point() or tensors[0].ndim not in (3, 4):
        return None
    image = tensors[0].detach().float().cpu()
    if image.ndim == 4 and image.shape[0] != 1:
        return None
    if image.shape[-3] != 3 or min(image.shape[-2:]) < 16 or image.min() < -0.01 or image.max() > 1.01:
        return None
    return image.clamp(0, 1)
