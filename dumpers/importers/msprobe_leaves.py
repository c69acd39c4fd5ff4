"""Read what msprobe writes of one tensor in dump.json: dtype, shape, statistics, checksum; walk nested arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from align.dumpers.dtypes import DTYPES
from align.dumpers.model import Statistics

Leaf = dict[str, Any]

_STATISTICS = ("Min", "Max", "Mean", "Norm")
_MINDSPORE = {name.replace("_", ""): name for name in DTYPES} | {"bfloat16": "bfloat16", "bool_": "bool"}


def walk_leaves(value: Any, slot: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield (slot, tensor entry) of nested lists and dicts, in order; a slot is the dotted path to the tensor."""
    if isinstance(value, list):
        for position, item in enumerate(value):
            yield from walk_leaves(item, f"{slot}.{position}" if slot else str(position))
    elif isinstance(value, dict):
        if is_tensor(value):
            yield slot or "0", value
        elif not isinstance(value.get("type"), str):  # a leaf of another type holds no tensor
            for name, item in value.items():
                yield from walk_leaves(item, f"{slot}.{name}" if slot else str(name))


def is_tensor(leaf: Leaf) -> bool:
    """Whether an entry describes a tensor (torch, DTensor, FakeTensor, mindspore...)."""
    kind = leaf.get("type")
    return isinstance(kind, str) and kind.endswith("Tensor") and "dtype" in leaf and isinstance(leaf.get("shape"), list)


def dtype_name(text: object) -> str:
    """Our name of a dtype: `torch.bfloat16`, `Float32` (mindspore). Unknown ones keep their own name, less `torch.`."""
    plain = str(text).removeprefix("torch.").removeprefix("mindspore.")
    return plain if plain in DTYPES else _MINDSPORE.get(plain.lower(), plain)


def shape_of(leaf: Leaf) -> tuple[int, ...]:
    """The tensor's shape."""
    return tuple(int(extent) for extent in leaf["shape"])


def digest_of(leaf: Leaf) -> str:
    """msprobe's checksum, marked as such so that it never equals a digest of ours; empty without one."""
    md5 = leaf.get("md5")
    if not isinstance(md5, str) or not md5:
        return ""
    return f"xor:{md5}"[:32] if md5.startswith("0x") else f"crc32:{md5}"[:32]


def statistics_of(leaf: Leaf) -> Statistics | None:
    """Statistics as far as msprobe has them: they are in the tensor's own dtype, and count no zeros and no subnormals.

    NaN or Inf as minimum or maximum says that there is one at least. Norm of a 0-d tensor is its value, with its sign.
    """
    values = [_number(leaf.get(name)) for name in _STATISTICS]
    if all(value is None for value in values):
        return None
    low, high, mean, norm = (math.nan if value is None else value for value in values)
    count = math.prod(shape_of(leaf))
    norm = abs(norm)
    marks = {value for value in (low, high) if not math.isfinite(value)}
    unknown = values[0] is None and values[1] is None
    return Statistics(
        count, _finite(low), _finite(high), _finite(mean), _deviation(count, mean, norm), _finite(norm),
        _finite(max(abs(low), abs(high))),
        nan=int(not unknown and any(math.isnan(value) for value in (low, high))),
        posinf=int(math.inf in marks), neginf=int(-math.inf in marks),
    )  # fmt: skip


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _deviation(count: int, mean: float, norm: float) -> float:
    """Population standard deviation from mean and norm; NaN without them."""
    if count == 0 or not (math.isfinite(mean) and math.isfinite(norm)):
        return math.nan
    return math.sqrt(max(0.0, norm * norm / count - mean * mean))
