"""Read msprobe's dumps (L0, L1, mix, debug; tensors or statistics), whole or torn, without msprobe.

Accepts a dump.json, the folder of a rank or process, a step's folder, or the dump's root: then all its steps are one
run, and a rank is one part (`dump#rank3`). Entries lie in order of execution, and stay in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import TraceFormatError
from align.dumpers.importers.arrays import common_dtype, native
from align.dumpers.importers.found import DumpFormat, FoundDump, FoundNode, UnreadableValuesError, choose_part
from align.dumpers.importers.lenient_json import read_object, read_text
from align.dumpers.importers.msprobe_keys import CallName, CallNames
from align.dumpers.importers.msprobe_leaves import Leaf, digest_of, dtype_name, shape_of, statistics_of, walk_leaves
from align.dumpers.model import NodeKey, NodeKind, RunStatus, TraceHeader

_STEP = re.compile(r"^step(\d+)$")
_PART = re.compile(r"^(?:rank|proc)(\d+)$")
_FILES = ("dump.json", "debug.json")
_KEPT = ("stack.json", "construct.json", "dump_error_info.log")
_LARGEST_DOCUMENT = 64 << 20


class StepFolder(NamedTuple):
    """Where one step of one rank lies."""

    step: int
    part: str
    file: Path


def read_msprobe(path: Path, part: str) -> FoundDump:
    """One rank of a dump. Raises UsageError when several are there and none is named, TraceFormatError without any."""
    folders = find_steps(path)
    if not folders:
        raise TraceFormatError(f"no dump.json in {path}", "give the dump's folder, or a dump.json in it")
    parts = _parts(folders)
    chosen = choose_part(path, part, parts)
    nodes: list[FoundNode] = []
    warnings: list[str] = []
    documents: list[tuple[str, str]] = []
    is_whole = True
    content: dict[str, Any] = {}
    for folder in parts[chosen]:
        content, whole = read_object(folder.file)
        is_whole &= whole
        if not whole:
            warnings.append(f"{folder.file} breaks off: {len(_entries(content))} entries are whole")
        documents += _documents(folder)
        nodes += _StepReader(folder, warnings).nodes(content)
    status = RunStatus.COMPLETE if is_whole else RunStatus.INCOMPLETE
    header = _header(path, chosen, content, nodes)
    return FoundDump(DumpFormat.MSPROBE, header, nodes, status, tuple(documents), tuple(warnings))


def find_steps(path: Path) -> list[StepFolder]:
    """All dumps at or below a path, by step; a process folder counts only where its step has no rank folder."""
    if path.is_file():
        return [_placed(path)]
    for base in (path, path / "pynative"):
        for pattern in ("", "*/", "*/*/"):
            files = [file for name in _FILES for file in base.glob(f"{pattern}{name}")]
            if files:
                return _without_leftovers(sorted(map(_placed, files)))
    return []


def _placed(file: Path) -> StepFolder:
    parts = file.absolute().parent.parts[-2:]
    step = next((int(match[1]) for name in parts if (match := _STEP.match(name))), 0)
    part = next((name for name in parts if _PART.match(name)), "rank0")
    return StepFolder(step, part, file)


def _without_leftovers(folders: list[StepFolder]) -> list[StepFolder]:
    ranked = {folder.step for folder in folders if folder.part.startswith("rank")}
    kept = [folder for folder in folders if folder.part.startswith("rank") or folder.step not in ranked]
    both = {folder.file.parent for folder in kept if folder.file.name == "dump.json"}
    return [folder for folder in kept if folder.file.name == "dump.json" or folder.file.parent not in both]


def _parts(folders: list[StepFolder]) -> dict[str, list[StepFolder]]:
    """Steps by part. One process folder a step is one run, even if it was started anew under another process number."""
    parts: dict[str, list[StepFolder]] = {}
    for folder in folders:
        parts.setdefault(folder.part, []).append(folder)
    steps = [folder.step for folder in folders]
    is_one_run = len(parts) > 1 and len(set(steps)) == len(steps) and all(part.startswith("proc") for part in parts)
    return {folders[0].part: folders} if is_one_run else parts


def _entries(content: dict[str, Any]) -> dict[str, Any]:
    entries = content.get("data")
    return entries if isinstance(entries, dict) else {}


def _documents(folder: StepFolder) -> Iterator[tuple[str, str]]:
    for name in _KEPT:
        file = folder.file.parent / name
        if file.is_file() and 2 < file.stat().st_size <= _LARGEST_DOCUMENT:
            yield f"step{folder.step}.{name}", read_text(file)


def _header(path: Path, part: str, content: dict[str, Any], nodes: list[FoundNode]) -> TraceHeader:
    rank = int(part[4:]) if part.startswith("rank") else 0
    facts = [(name, str(content[name])) for name in ("task", "level", "framework") if name in content]
    return TraceHeader(
        path.absolute().stem, "imported", "unknown", common_dtype(nodes), 0, str(content.get("level", "")), rank,
        environment=(("importer", "msprobe"), *facts, ("part", part)),
    )  # fmt: skip


class _StepReader:
    """Turn the entries of one dump.json into nodes; notes in `warnings` what it cannot use."""

    def __init__(self, folder: StepFolder, warnings: list[str]) -> None:
        self._step, self._part, self._file = folder
        self._warnings = warnings
        self._taken: set[NodeKey] = set()
        self._names = CallNames(self._parents())

    def nodes(self, content: dict[str, Any]) -> Iterator[FoundNode]:
        """Nodes in order of execution, a call's inputs before its outputs."""
        tensors = self._tensor_folder(content.get("dump_data_dir"))
        for key, entry in _entries(content).items():
            call = self._names.name(key)
            if call is None:
                self._warnings.append(f"entry {key} left out: its name has no known form")
                continue
            for slot, kind, leaf in _slots(call, entry):
                node = self._node(call, slot, kind, leaf, tensors)
                if node.key in self._taken:
                    self._warnings.append(f"{node.key} ({key}) left out: that node is there already")
                else:
                    self._taken.add(node.key)
                    yield node._replace(note=f"msprobe {key}" + (f"; {node.note}" if node.note else ""))

    def _node(self, call: CallName, slot: str, kind: NodeKind, leaf: Leaf, tensors: Path | None) -> FoundNode:
        rank = int(self._part[4:]) if self._part.startswith("rank") else 0
        key = NodeKey(call.path, call.op, call.call, _clean_slot(slot), self._step, rank)
        load, note = None, ""
        if "data_name" in leaf:
            file = _inside(tensors, leaf["data_name"])
            load, note = (partial(read_file, file), "") if file else (None, f"{leaf['data_name']} is missing")
        elif statistics_of(leaf):
            note = "statistics by msprobe, in the tensor's dtype"
        return FoundNode(
            key, kind, call.type_name, dtype_name(leaf["dtype"]), shape_of(leaf), load, statistics_of(leaf),
            digest_of(leaf), note,
        )  # fmt: skip

    def _tensor_folder(self, written: object) -> Path | None:
        """Beside dump.json; else where the file says, which is a path of the machine it was written on."""
        beside = self._file.parent / "dump_tensor_data"
        if beside.is_dir() or not isinstance(written, str):
            return beside
        return Path(written) if Path(written).is_dir() else beside

    def _parents(self) -> dict[str, str | None]:
        file = self._file.parent / "construct.json"
        if not file.is_file():
            return {}
        try:
            content, _ = read_object(file)
        except TraceFormatError:
            return {}
        # Megatron writes [parent, micro step] in place of a parent.
        parents = {key: value[0] if isinstance(value, list) and value else value for key, value in content.items()}
        return {key: value for key, value in parents.items() if value is None or isinstance(value, str)}


def _slots(call: CallName, entry: Any) -> Iterator[tuple[str, NodeKind, Leaf]]:
    """(slot, kind, tensor entry) of a call: inputs as `in.`, parameters as `param.`, outputs by position."""
    if call.op == "debug":
        yield from ((slot, NodeKind.CALL, leaf) for slot, leaf in walk_leaves(entry))
        return
    if not isinstance(entry, dict):
        return
    if call.op == "parameters_grad":
        for name, gradient in entry.items():
            yield from ((name, NodeKind.GRADIENT, leaf) for _, leaf in walk_leaves(gradient))
        return
    if call.is_backward:  # `input` are gradients of the forward outputs, `output` those of the forward inputs
        yield from ((slot, NodeKind.GRADIENT, leaf) for slot, leaf in walk_leaves(entry.get("input")))
        yield from ((f"in.{slot}", NodeKind.GRADIENT, leaf) for slot, leaf in walk_leaves(entry.get("output")))
        return
    for field, prefix in (("input_args", "in"), ("input_kwargs", "in"), ("parameters", "param")):
        yield from ((f"{prefix}.{slot}", NodeKind.INPUT, leaf) for slot, leaf in walk_leaves(entry.get(field)))
    kind = NodeKind.MODULE if call.is_module else NodeKind.CALL
    yield from ((slot, kind, leaf) for slot, leaf in walk_leaves(_unwrapped(entry.get("output"))))


def _unwrapped(output: Any) -> Any:
    """msprobe wraps a lone output in a list; a lone mapping's slots are its names, as in our own traces."""
    is_mapping = isinstance(output, list) and len(output) == 1 and isinstance(output[0], dict)
    return output[0] if is_mapping and not isinstance(output[0].get("type"), str) else output


def _clean_slot(slot: str) -> str:
    return re.sub(r"[@%]", "_", slot)


def _inside(folder: Path | None, name: object) -> Path | None:
    """The file of that name in the folder; None when it is not there, or the name leads elsewhere."""
    if folder is None or not isinstance(name, str) or Path(name).name != name:
        return None
    file = folder / name
    return file if file.is_file() else None


def read_file(file: Path) -> RawTensor:
    """The tensor of a .npy or .pt file. Raises UnreadableValuesError."""
    if file.suffix == ".npy":
        try:
            return native(np.load(file, allow_pickle=False))
        except (OSError, ValueError, EOFError) as exc:
            raise UnreadableValuesError(f"{file.name}: {exc}") from exc
    from align.dumpers.importers.torch_files import read_tensor

    return read_tensor(file)
