"""Write a script that reproduces a site's error on its own: its inputs, the fused kernel, the unfused form, float32.

Inputs are stored as bits in an .npz beside the script, with their strides; nothing is pickled. The target's file is
imported first, so that operators of the user's own are in the catalog.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from align.dumpers.dtypes import Array
from align.dumpers.tensors import snapshot
from align.operators.base import Operator

_TEMPLATE = '''\
"""Reproduce the error of {site} on its own: the fused kernel and the unfused form on the same inputs.

Written by `align bisect`; the inputs, as the candidate run had them, lie beside this file in {npz}.
"""

import json
from pathlib import Path

import numpy as np
import torch

from align.operators.registry import catalog
from align.workload import find_target

HERE = Path(__file__).resolve().parent
TARGET, OPERATOR, SUMMARY, DEVICE = {target!r}, {operator!r}, {summary!r}, {device!r}
ARGUMENTS = json.loads({arguments!r})


def read(told, stored):
    """A stored argument: a tensor with its strides, a list, a dtype, or a plain value."""
    if not isinstance(told, dict):
        return told
    if "list" in told:
        items = [read(item, stored) for item in told["list"]]
        return tuple(items) if told["as"] == "tuple" else items
    if "tensor" not in told:
        return getattr(torch, told["dtype"])
    value = torch.from_numpy(stored[told["tensor"]].copy()).view(getattr(torch, told["dtype"])).reshape(told["shape"])
    return torch.empty_strided(told["shape"], told["strides"], dtype=value.dtype).copy_(value)


def each(value, change):
    """A value with every tensor in it changed."""
    if isinstance(value, (list, tuple)):
        return type(value)(each(item, change) for item in value)
    return change(value) if torch.is_tensor(value) else value


def first(value):
    return (value[0] if isinstance(value, (list, tuple)) else value).detach().cpu().double()


def main():
    find_target(TARGET)
    operator = next(item for item in catalog() if item.name == OPERATOR and item.summary == SUMMARY)
    stored = np.load(HERE / {npz!r})

    def arguments(change):
        return {{name: each(read(told, stored), change) for name, told in ARGUMENTS.items()}}

    def there():
        return arguments(lambda tensor: tensor.to(DEVICE))

    def wide(tensor):
        return tensor.float() if tensor.is_floating_point() else tensor

    with torch.no_grad():
        exact = first(operator.unfused(**arguments(wide)))
        forms = {{"unfused": operator.unfused(**there()), "fused": operator.kernels[DEVICE].run(**there())}}
    for form, result in forms.items():
        error = first(result) - exact
        share, largest = (error.norm() / exact.norm()).item(), error.abs().max().item()
        print(f"{{form:8}} relative L2 against float32 {{share:.4g}}, largest error {{largest:.4g}}")


if __name__ == "__main__":
    main()
'''


def write_script(
    path: Path, target: str, site: str, operator: Operator, device: str, arguments: Mapping[str, Any]
) -> bool:
    """Write the script and its inputs beside it; False where an argument is of a kind that cannot be stored."""
    arrays: dict[str, Array] = {}
    try:
        told = {name: _told(name, value, arrays) for name, value in arguments.items()}
    except TypeError:
        return False
    npz = path.with_suffix(".npz")
    np.savez(npz, **arrays)  # type: ignore[arg-type]
    text = _TEMPLATE.format(
        site=site, npz=npz.name, target=absolute(target), operator=operator.name, summary=operator.summary,
        device=device, arguments=json.dumps(told),
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
    return True


def absolute(target: str) -> str:
    """A target whose file is found from anywhere."""
    place, colon, name = target.rpartition(":")
    return f"{Path(place).resolve()}{colon}{name}" if place.endswith(".py") else target


def _told(name: str, value: Any, arrays: dict[str, Array]) -> Any:
    """An argument in JSON; tensors go into `arrays` as bits. Raises TypeError for what cannot be told."""
    if isinstance(value, torch.Tensor):
        raw = snapshot(value.contiguous()).wait()
        # viewed back through the stored dtype in the script: bfloat16 and float8 have none in numpy
        arrays[name] = np.ascontiguousarray(raw.bits).reshape(-1).view(np.uint8)
        strides = value.stride() if _is_dense(value) else value.contiguous().stride()
        return {"tensor": name, "dtype": raw.dtype, "shape": list(value.shape), "strides": list(strides)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return {
            "as": type(value).__name__,
            "list": [_told(f"{name}.{i}", item, arrays) for i, item in enumerate(value)],
        }
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(type(value).__name__)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no two elements share a place and none is left out, so that the strides can be made again."""
    return all(stride > 0 or extent == 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
