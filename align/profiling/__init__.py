"""Where the time and memory of a target go, before and after fusion: `profile_target`."""

from align.profiling.shapes import measure_shapes
from align.profiling.target import ProfileOptions, profile_target
from align.profiling.values import Profile

__all__ = ["Profile", "ProfileOptions", "measure_shapes", "profile_target"]
