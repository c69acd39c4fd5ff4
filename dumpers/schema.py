"""How a trace is laid out: names of its parts, one row per node, one pool of strings. Knows no HDF5 and no torch.

/                      attributes: format, version, status, and the header
/environment           (name, value) pairs of strings
/nodes/table           one row per node, fields as in ROW; text fields are numbers of strings in the pool
/nodes/text            the pool: UTF-8, every string ends with a zero byte; string 0 is empty
/nodes/producers       row numbers of the nodes a call read (or -1 - n: string n, a key without a row)
/tensors/<module path>/<op>#<call>:<slot>@<step>    a kept tensor
/samples/...           values at fixed positions, of nodes kept as samples
/documents/<name>      UTF-8 text
/identity              16 random bytes that name this file
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from align.dumpers.dtypes import Array
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, OpClass, Statistics, Storage

FORMAT = "align-trace"
VERSION = 1
ROOT_MODULE = "(model)"
SAMPLE_SIZE = 4096
DIGEST_LENGTH = 32

_TEXTS = ("path", "op", "slot", "kind", "type_name", "dtype", "shape", "device", "op_class", "storage", "site", "note")
_REALS = ("minimum", "maximum", "mean", "std", "l2", "absmax")
_COUNTS = ("count", "nan", "posinf", "neginf", "zero", "subnormal", "near_limit")
ROW = np.dtype(
    [
        *((name, "<u4") for name in _TEXTS),
        ("call", "<i8"),
        ("step", "<i8"),
        ("order", "<i8"),
        ("rank", "<i4"),
        ("producers_count", "<u4"),
        ("producers_start", "<u8"),
        ("digest", f"S{DIGEST_LENGTH}"),
        ("described", "<u1"),
        *((name, "<f8") for name in _REALS),
        *((name, "<i8") for name in _COUNTS),
    ]
)
_UNDESCRIBED = (0, *(6 * (float("nan"),)), *(7 * (0,)))


def escape(name: str) -> str:
    """Make one HDF5 link name of any text: no slash, no zero byte, never `.`; `%XX` as in addresses."""
    for mark in "%/\0":
        if mark in name:
            name = name.replace(mark, f"%{ord(mark):02X}")
    return name.replace(".", "%2E") if name in (".", "..") else name


@cache
def group_name(path: str) -> str:
    """Link name of a module's group under `/tensors`."""
    if path == ROOT_MODULE:
        return "%28model)"
    return escape(path) if path else ROOT_MODULE


def dataset_name(key: NodeKey, rank: int) -> str:
    """Link name of a node's dataset in its module's group, in a trace of the given rank."""
    step = f"@{key.step}" if key.step else ""
    other = f"%{key.rank}" if key.rank != rank else ""
    return escape(f"{key.op}#{key.call}:{key.slot}{step}") + other


def sample_positions(key: NodeKey, count: int) -> npt.NDArray[np.int64]:
    """Flat positions kept of a sampled tensor of `count` elements: sorted, distinct, the same in every run and rank.

    One position in each of SAMPLE_SIZE equal strata, drawn by splitmix64 (Steele, Lea, Flood 2014) from the key's text.
    """
    size = min(count, SAMPLE_SIZE)
    if size == 0:
        return np.zeros(0, np.int64)
    seed = np.uint64(_fnv1a(f"{key.call_name}:{key.slot}@{key.step}"))
    edges = np.array([i * count // size for i in range(size + 1)], np.uint64)
    draw = _splitmix(seed + np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (edges[:-1] + draw % (edges[1:] - edges[:-1])).astype(np.int64)


def _fnv1a(text: str) -> int:
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def _splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class RowPacker:
    """Turn records into rows, and hand out the rows, strings and producers that are new since the last batch."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self._rows_of: dict[NodeKey, int] = {}
        self._rows: list[tuple[Any, ...]] = []
        self._strings: list[str] = [""]
        self._producers: list[int] = []
        self._producers_total = 0

    def add(self, record: NodeRecord) -> None:
        """Append one record. Raises UsageError when its key has a row already or its digest is too long."""
        if record.key in self._rows_of:
            raise UsageError(f"node {record.key} is stored already", "give each output of each call its own key")
        if len(record.digest) > DIGEST_LENGTH:
            raise UsageError(f"digest of {record.key} is longer than {DIGEST_LENGTH} characters", "shorten it")
        start, producers = self._producers_total, [self._reference(key) for key in record.producers]
        self._producers += producers
        self._producers_total += len(producers)
        self._rows.append(self._row(record, start, len(producers)))
        self._rows_of[record.key] = len(self._rows_of)

    def take(self) -> tuple[Array, bytes, Array]:
        """Return and forget the new rows, the new text of the pool, and the new producers."""
        rows, text = np.array(self._rows, ROW), "".join(f"{string}\0" for string in self._strings)
        producers = np.array(self._producers, "<i8")
        self._rows, self._strings, self._producers = [], [], []
        return rows, text.encode("utf-8", "surrogatepass"), producers

    def _row(self, record: NodeRecord, start: int, count: int) -> tuple[Any, ...]:
        key, number = record.key, self._number
        seen = record.statistics
        numbers = _UNDESCRIBED if seen is None else _described(seen)
        return (
            number(key.path),
            number(key.op),
            number(key.slot),
            number(record.kind),
            number(record.type_name),
            number(record.dtype),
            number(shape_text(record.shape)),
            number(record.device),
            number(record.op_class),
            number(record.storage),
            number(record.site),
            number(record.note),
            key.call,
            key.step,
            record.order,
            key.rank,
            count,
            start,
            record.digest.encode(),
            *numbers,
        )

    def _number(self, text: str) -> int:
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._numbers)
            self._strings.append(text.replace("\0", "\N{SYMBOL FOR NULL}"))
        return number

    def _reference(self, key: NodeKey) -> int:
        row = self._rows_of.get(key)
        return -1 - self._number(str(key)) if row is None else row


def _described(seen: Statistics) -> tuple[Any, ...]:
    reals = (seen.minimum, seen.maximum, seen.mean, seen.std, seen.l2, seen.absmax)
    return (1, *reals, seen.count, seen.nan, seen.posinf, seen.neginf, seen.zero, seen.subnormal, seen.near_limit)


@cache
def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as text: `4x128x256`, empty for a scalar."""
    return "x".join(map(str, shape))


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that `shape_text` wrote."""
    return tuple(int(extent) for extent in text.split("x")) if text else ()


def unpack_rows(rows: Array, text: bytes, producers: Sequence[int]) -> tuple[NodeRecord, ...]:
    """Return the records of the rows, in the rows' order. Raises ValueError or IndexError when the parts do not fit."""
    collecting = gc.isenabled()
    gc.disable()  # half a million small objects in one go: the collector would walk them again and again
    try:
        return _unpacked(rows, text, producers)
    finally:
        if collecting:
            gc.enable()


def _unpacked(rows: Array, text: bytes, producers: Sequence[int]) -> tuple[NodeRecord, ...]:
    pool = text.decode("utf-8", "surrogatepass").split("\0")
    columns: dict[str, Any] = {name: rows[name].tolist() for name in ROW.names or ()}
    for name in _TEXTS:
        columns[name] = [pool[number] for number in columns[name]]
    for name, convert in (("kind", NodeKind), ("op_class", OpClass), ("storage", Storage), ("shape", parse_shape)):
        columns[name] = _converted(columns[name], convert)
    keys = list(map(NodeKey, *(columns[name] for name in ("path", "op", "call", "slot", "step", "rank"))))
    numbers = zip(*(columns[name] for name in ("count", *_REALS, *_COUNTS[1:])), strict=True)
    columns["statistics"] = [
        Statistics(*n) if has else None for has, n in zip(columns["described"], numbers, strict=True)
    ]
    columns["producers"] = _sources(columns["producers_start"], columns["producers_count"], producers, keys, pool)
    columns["digest"] = [digest.decode() for digest in columns["digest"]]
    fields = (field.name for field in dataclasses.fields(NodeRecord) if field.name != "key")
    return tuple(map(NodeRecord, keys, *(columns[name] for name in fields)))


def _converted(column: list[str], convert: Any) -> list[Any]:
    """Convert a column of few distinct texts, each of them once."""
    meaning = {text: convert(text) for text in set(column)}
    return [meaning[text] for text in column]


def _sources(
    starts: Iterable[int], counts: Iterable[int], producers: Sequence[int], keys: list[NodeKey], pool: list[str]
) -> Iterator[tuple[NodeKey, ...]]:
    parsed: dict[int, NodeKey] = {}
    for start, count in zip(starts, counts, strict=True):
        part = []
        for reference in producers[start : start + count]:
            if reference >= 0:
                part.append(keys[reference])
                continue
            if reference not in parsed:
                parsed[reference] = NodeKey.parse(pool[-1 - reference])
            part.append(parsed[reference])
        yield tuple(part)
