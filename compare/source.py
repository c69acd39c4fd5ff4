"""What the comparison needs of a trace: records, tensors, documents. Files, folders of ranks, memory look alike.

`align.dumpers.store.Trace` has these methods; `MemorySource` is the same without a file; `MergedSource` makes one
source of the files that the ranks of one run left.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from align.dumpers.dtypes import RawTensor
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, RunStatus, TraceHeader

if TYPE_CHECKING:
    from collections.abc import Iterator


class TraceSource(Protocol):
    """Records of one run and the way to their tensors."""

    @property
    def header(self) -> TraceHeader:
        """What run this is."""

    @property
    def status(self) -> RunStatus:
        """How the run ended."""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """All records in order of completion."""

    def read(self, key: NodeKey) -> RawTensor:
        """The bits kept of a node."""

    def read_flat(self, key: NodeKey, start: int, stop: int) -> RawTensor:
        """Elements `start` to `stop` of a kept tensor, flattened."""

    def document(self, name: str) -> Any:
        """A text or parsed JSON kept beside the nodes; raises KeyError or AlignError, or is empty, if there is none."""


class MemorySource:
    """A trace that never was a file: for tests and for tensors that are already at hand."""

    def __init__(
        self,
        header: TraceHeader,
        records: Sequence[NodeRecord],
        tensors: Mapping[NodeKey, RawTensor],
        *,
        status: RunStatus = RunStatus.COMPLETE,
        documents: Mapping[str, Any] | None = None,
    ) -> None:
        self.header = header
        self.status = status
        self.nodes = tuple(records)
        self._tensors = dict(tensors)
        self._documents = dict(documents or {})

    def read(self, key: NodeKey) -> RawTensor:
        """The bits kept of a node. Raises KeyError when none were kept."""
        return self._tensors[key]

    def read_flat(self, key: NodeKey, start: int, stop: int) -> RawTensor:
        """Elements `start` to `stop` of a kept tensor, flattened."""
        raw = self._tensors[key]
        halves = (2,) if raw.dtype == "complex32" else ()
        return RawTensor(raw.bits.reshape(-1, *halves)[start:stop], raw.dtype)

    def document(self, name: str) -> Any:
        """A document given at construction. Raises KeyError."""
        return self._documents[name]


class MergedSource:
    """The ranks of one run as one source: records by (order, rank), each tensor read from its own rank's file."""

    def __init__(self, sources: Sequence[TraceSource]) -> None:
        ranks = [source.header.rank for source in sources]
        if len(set(ranks)) != len(ranks):
            raise UsageError(f"several traces of one rank: {sorted(ranks)}", "keep one trace file a rank in the folder")
        self._by_rank = {source.header.rank: source for source in sources}
        first = self._by_rank[min(ranks)]
        self.header = first.header
        ended = [source.status for source in sources if source.status is not RunStatus.COMPLETE]
        self.status = ended[0] if ended else RunStatus.COMPLETE
        records = (record for rank in sorted(ranks) for record in self._by_rank[rank].nodes)
        self.nodes = tuple(sorted(records, key=lambda record: (record.order, record.key.rank)))

    def read(self, key: NodeKey) -> RawTensor:
        """The bits kept of a node, from the trace of its rank."""
        return self._by_rank[key.rank].read(key)

    def read_flat(self, key: NodeKey, start: int, stop: int) -> RawTensor:
        """Elements `start` to `stop` of a kept tensor, from the trace of its rank."""
        return self._by_rank[key.rank].read_flat(key, start, stop)

    def document(self, name: str) -> Any:
        """The first rank's document."""
        return self._by_rank[min(self._by_rank)].document(name)


@dataclass(frozen=True, slots=True)
class NodeSelection:
    """Which nodes to compare: globs over the key, `path/op#call` or the module path; all kinds and steps by default."""

    globs: tuple[str, ...] = ("*",)
    kinds: frozenset[NodeKind] = frozenset(NodeKind)
    steps: frozenset[int] = frozenset()  # empty: every step

    def accepts(self, record: NodeRecord) -> bool:
        """Whether a record is to be compared."""
        if record.kind not in self.kinds or (self.steps and record.key.step not in self.steps):
            return False
        return any(matches_glob(record.key, glob) for glob in self.globs)


EVERYTHING = NodeSelection()


def matches_glob(key: NodeKey, glob: str) -> bool:
    """Whether a glob names a node by its whole key, its call, or its module path; `[` is a plain character."""
    plain = glob.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(form, plain) for form in (str(key), key.call_name, key.path))


def name_of(source: TraceSource) -> str:
    """How messages name a run: its file if it has one, else workload and role."""
    path = getattr(source, "path", None)
    header = source.header
    label = f"{header.workload or 'unnamed workload'} ({header.role}, {header.device}, {header.dtype})"
    return f"{path}: {label}" if path else label


@contextmanager
def open_source(place: TraceSource | str | Path) -> Iterator[TraceSource]:
    """Open a trace, a folder of rank traces, or another tool's dump, for a with block; pass an open source through.

    Raises AlignError when there is nothing at the path, or nothing that can be read.
    """
    if not isinstance(place, str | Path):
        yield place
        return
    from align.dumpers.importers import open_any
    from align.dumpers.store import Trace

    files = trace_files(Path(place))
    with ExitStack() as stack:
        if not files:
            yield stack.enter_context(open_any(place))
            return
        sources: list[TraceSource] = [stack.enter_context(Trace.open(file)) for file in files]
        yield sources[0] if len(sources) == 1 else MergedSource(sources)


def trace_files(place: Path) -> tuple[Path, ...]:
    """The traces (`*.h5`) of a folder by name, without those made by importing; none when it is not a folder."""
    if not place.is_dir():
        return ()
    return tuple(sorted(file for file in place.glob("*.h5") if not file.name.endswith(".imported.h5")))
