"""Read Polygraphy's RunResults as saved to JSON: runners, their iterations, and arrays as base64 of .npy.

The format as of version 0.53, and older marks of the same things; read here so that nothing of Polygraphy is needed.
One runner is one run (`results.json#onnxrt-runner`), an iteration is a step. A list of feeds is read as a run `inputs`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from align.dumpers.dtypes import DTYPES, Array, RawTensor
from align.dumpers.errors import TraceFormatError
from align.dumpers.importers.arrays import common_dtype, is_void16, native
from align.dumpers.importers.found import (
    DumpFormat,
    FoundDump,
    FoundNode,
    UnreadableValuesError,
    choose_part,
    named_key,
)
from align.dumpers.importers.lenient_json import read_text
from align.dumpers.model import NodeKind, TraceHeader

Feed = dict[str, Any]


def read_polygraphy(path: Path, part: str) -> FoundDump:
    """One runner's outputs. Raises UsageError when one of several must be named, TraceFormatError when damaged."""
    try:
        runs = _runs(json.loads(read_text(path)))
        runner = choose_part(path, part, runs)
        nodes, warnings = _found(runs[runner])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as exc:
        raise TraceFormatError(f"{path} is no RunResults of Polygraphy: {exc}", "save it with --save-outputs") from exc
    environment = (("importer", "polygraphy"), ("runner", runner))
    header = TraceHeader(path.stem, runner, "unknown", common_dtype(nodes), 0, environment=environment)
    return FoundDump(DumpFormat.POLYGRAPHY, header, nodes, warnings=tuple(warnings))


def _runs(content: Any) -> dict[str, list[Feed]]:
    """Iterations by runner; a runner that was added twice counts on."""
    if isinstance(content, list):
        return {"inputs": list(content)}
    runs: dict[str, list[Feed]] = {}
    for name, iterations in content["lst"]:
        runs.setdefault(name, []).extend(iteration["outputs"] for iteration in iterations)
    return runs


def _found(feeds: list[Feed]) -> tuple[list[FoundNode], list[str]]:
    nodes: list[FoundNode] = []
    warnings: list[str] = []
    for step, feed in enumerate(feeds):
        for name, value in _items(feed):
            try:
                array = decode(value)
            except UnreadableValuesError as exc:
                warnings.append(f"{name} of iteration {step} left out: {exc}")
                continue
            load: Callable[[], RawTensor] = partial(_identity, array)
            nodes.append(FoundNode(named_key(name, step), NodeKind.MODULE, "", array.dtype, array.shape, load))
    return nodes, warnings


def _identity(raw: RawTensor) -> RawTensor:
    return raw


def _items(feed: Feed) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in feed.items() if not _is_mark(name))


def _is_mark(name: str) -> bool:
    return name == "polygraphy_class" or name.startswith("__polygraphy_encoded_")


def decode(value: Any) -> RawTensor:
    """The array in one encoded value: an ndarray, a lazy or a formatted array of one, or a torch tensor."""
    while isinstance(value, dict) and isinstance(value.get("values", value.get("array")), dict):
        value = value.get("values", value.get("array"))
    if isinstance(value, dict) and isinstance(value.get("tensor"), str):
        return _torch_tensor(value["tensor"])
    if not isinstance(value, dict) or not isinstance(value.get("array"), str):
        raise UnreadableValuesError(f"a {type(value).__name__} without an array")
    return _numpy_array(value["array"])


def _numpy_array(text: str) -> RawTensor:
    try:
        content = base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        content = text.encode("latin-1", "replace")  # before version 0.31
    try:
        loaded: Any = np.load(io.BytesIO(content), allow_pickle=False)
        array: Array = loaded if isinstance(loaded, np.ndarray) else loaded[loaded.files[0]]
    except (ValueError, OSError, EOFError, IndexError) as exc:
        raise UnreadableValuesError(f"no .npy inside: {exc}") from exc
    if array.dtype.name not in DTYPES and not is_void16(array.dtype):
        raise UnreadableValuesError(f"dtype {array.dtype} is no tensor dtype")
    return native(array)


def _torch_tensor(text: str) -> RawTensor:
    from align.dumpers.importers.torch_files import read_tensor

    return read_tensor(io.BytesIO(base64.b64decode(text.encode())))
