"""Write a commented align.toml and an example target for a new user to start from."""

from __future__ import annotations

from pathlib import Path

from align.dumpers.errors import UsageError

CONFIG = """\
# Settings of align; every key may be left out, the value shown is the default. Command-line options win over this file.

[run]
target = "align_target.py:build"   # file.py:function or package.module:function; `demo` is the built-in workload
# candidate = "fused.py:build"     # your own fused variant; without it the catalog's fusions make the candidate
device = "auto"                    # auto takes npu, then cuda, then cpu
dtype = "bfloat16"                 # of baseline and candidate; float16, float32, or as-built
weights = "same"                   # the reference's: same = the low-precision ones widened; original = as built
fuse = []                          # globs of what to fuse, such as "attention@unet.*"; empty fuses all there is
no_fuse = []                       # globs of what to keep unfused
precision = []                     # parts of the candidate in another dtype, such as "float32@unet.mid"
flags = []                         # device flags of the candidate, such as "npu.conv.allow_hf32=on"; see `align doctor`
steps = 0                          # steps of a loop; 0 leaves it to the target
seed = 0
grad = ""                          # record gradients too: of `sum`, or of file.py:function(result)

[capture]
level = "both"                     # module, call or both
keep = "tensors"                   # tensors, stats or sample
include = []                       # globs over module paths and calls
exclude = []
operators = []                     # only calls and classes that match
inputs = false                     # record inputs of calls and modules too
max_bytes = 0                      # byte budget of each trace; 0 is none

[judge]
policy = "cann-l1"                 # cann-l0, cann-l1, cann-l2, standard, cosine or auto
# [judge.overrides]                # another policy for some nodes; the longest matching glob wins
# "unet.mid.*" = "cann-l2"

[timing]
budget_seconds = 5.0

[gate]                             # limits that `align gate` enforces; 0 is no limit
min_speedup = 0.0
max_slowdown = 0.0
max_memory_bytes = 0
min_coverage = 0.0
# policy = "cann-l2"               # another policy than [judge]'s
# [gate.limits]                    # largest error of nodes that match: relative L2, or a table of figures
# "unet.*" = 0.02
"""

TARGET = '''\
"""An example target for align: return a model and its inputs. Replace the model by your own."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return x + self.out(weights @ v)


def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = nn.Sequential(Block(), Block()).eval()
    return model, (torch.randn(2, 32, 64),)
'''


def write_example(folder: Path) -> tuple[Path, ...]:
    """Write align.toml and align_target.py. Raises UsageError if one is there already."""
    files = {folder / "align.toml": CONFIG, folder / "align_target.py": TARGET}
    for path in files:
        if path.exists():
            raise UsageError(f"{path} exists already", "move it away first; align does not overwrite it")
    try:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write to {folder}: {exc.strerror}", "choose a folder that you may write to") from exc
    return tuple(files)
