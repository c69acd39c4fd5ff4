"""Draw random numbers on the host from the simulated device's own generator.

Invariant: the numbers are a function of the device generator's seed and offset, and each draw moves the offset, so
torch.npu.manual_seed, get_rng_state and set_rng_state mean what they mean on a device. The numbers themselves are not
an NPU's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_STEP = 4  # Philox hands out four numbers a step: torch_npu refuses an offset that is not a multiple of it.


def host_generator(device_generator: torch.Generator | None) -> torch.Generator:
    """Return a CPU generator for one draw and move the device generator on."""
    source = device_generator if device_generator is not None else _default_generator()
    state = source.get_state()
    seed, offset = (int(word) for word in state.view(torch.int64)[-2:])
    digest = hashlib.sha256(f"{seed} {offset}".encode()).digest()
    moved = state.clone()
    moved.view(torch.int64)[-1] = offset + _STEP
    source.set_state(moved)
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


@contextmanager
def host_default_seeded() -> Iterator[None]:
    """Seed the CPU's default generator for an operator that takes no generator argument, then restore it."""
    before = torch.get_rng_state()
    torch.default_generator.set_state(host_generator(None).get_state())
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _default_generator() -> torch.Generator:
    generator: torch.Generator = torch.npu.default_generators[0]  # type: ignore[attr-defined]
    return generator
