"""Write pictures and the differences between two of them as PNG files."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from align.dumpers.errors import UsageError

# Black, purple, orange, white: darkest for equal, and told apart without colour as well.
HEAT = ((0.0, 0.0, 0.0), (0.45, 0.1, 0.5), (0.95, 0.5, 0.15), (1.0, 1.0, 1.0))


def save_png(image: Tensor, path: Path) -> None:
    """Write a picture [3, h, w] or [1, 3, h, w] with values in 0..1; what lies outside is clipped, NaN is black."""
    pixels = _three_channels(image).nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(path, format="PNG")


def difference_png(candidate: Tensor, reference: Tensor, path: Path, *, gain: float = 10.0) -> None:
    """Write each pixel's largest absolute difference, times `gain`, as heat: 0 black, 1 and above and NaN white."""
    distance = (_three_channels(candidate) - _three_channels(reference)).abs().amax(dim=0)
    save_png(_heat(distance.nan_to_num(1.0, posinf=1.0).mul(gain).clamp(0, 1)), path)


def _three_channels(image: Tensor) -> Tensor:
    pixels = image.detach().to("cpu", torch.float32)
    pixels = pixels[0] if pixels.ndim == 4 and pixels.shape[0] == 1 else pixels
    if pixels.ndim != 3 or pixels.shape[0] != 3:
        raise UsageError(f"a tensor of shape {list(image.shape)} is not a picture", "give [3, h, w] or [1, 3, h, w]")
    return pixels


def _heat(level: Tensor) -> Tensor:
    """Map levels [h, w] in 0..1 to colours [3, h, w], linearly between the stops of HEAT."""
    stops = torch.tensor(HEAT)
    place = level * (len(HEAT) - 1)
    below = place.floor().long().clamp(max=len(HEAT) - 2)
    share = (place - below)[..., None]
    return torch.lerp(stops[below], stops[below + 1], share).permute(2, 0, 1)
