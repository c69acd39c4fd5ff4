"""The built-in workload: a miniature text-to-image pipeline with seeded weights."""

from align.demo.picture import difference_png, save_png
from align.demo.pipeline import Demo, TextToImage, build, sample

__all__ = ["Demo", "TextToImage", "build", "difference_png", "sample", "save_png"]
