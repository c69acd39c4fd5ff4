"""The values every folder speaks in: which node, what was seen of it, how it is stored. Never holds an array.

A node is one output tensor of one call. Its key reads `module.path/op#call:slot@step%rank`; step and rank are
left out when 0. `op` is `forward` for a module call and the torch function's name for a function call, so a key
does not depend on the class that happens to stand behind a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from align.dumpers.errors import UsageError

MODULE_OP = "forward"
OUTPUT_OP = "output"
"""Op of the nodes that hold what the workload itself returned or yielded: `/output#0:slot@step`."""
_KEY = re.compile(
    r"^(?P<path>.*)/(?P<op>[^/#:]+)#(?P<call>\d+):(?P<slot>[^@%]*)(?:@(?P<step>\d+))?(?:%(?P<rank>\d+))?$"
)


class NodeKind(StrEnum):
    """What produced a node."""

    MODULE = "module"
    CALL = "call"
    INPUT = "input"
    GRADIENT = "gradient"


class Storage(StrEnum):
    """What a trace holds of a node besides its record."""

    TENSOR = "tensor"
    SAMPLE = "sample"
    STATISTICS = "statistics"
    ABSENT = "absent"  # meta or fake tensor: a shape without data
    FUSED = "fused"  # a fused kernel swallowed the node: it never existed in this run


class OpClass(StrEnum):
    """How strictly a node is judged."""

    SENSITIVE = "sensitive"
    ORDINARY = "ordinary"
    MOVEMENT = "movement"
    EXACT = "exact"  # integer, boolean, index results


@dataclass(frozen=True, slots=True, order=True)
class NodeKey:
    """Name one output tensor of one call, the same in every run of one model."""

    path: str
    op: str
    call: int = 0
    slot: str = "0"
    step: int = 0
    rank: int = 0

    @property
    def call_name(self) -> str:
        """`path/op#call`: the name of the call within a step, as sites use it."""
        return f"{self.path}/{self.op}#{self.call}"

    def __str__(self) -> str:
        step = f"@{self.step}" if self.step else ""
        rank = f"%{self.rank}" if self.rank else ""
        return f"{self.path}/{self.op}#{self.call}:{self.slot}{step}{rank}"

    @classmethod
    def parse(cls, text: str) -> NodeKey:
        """Read a key as `str(key)` wrote it. Raises UsageError when the text is not a key."""
        match = _KEY.match(text)
        if match is None:
            raise UsageError(
                f"not a node key: {text!r}", "write it as module.path/op#call:slot, for example unet.mid/forward#0:0"
            )
        part = match.groupdict()
        return cls(
            part["path"], part["op"], int(part["call"]), part["slot"], int(part["step"] or 0), int(part["rank"] or 0)
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """Describe the values of one tensor, from one pass over all of them in float64.

    `minimum`, `maximum`, `mean`, `std` (population), `l2` and `absmax` are over the finite values and NaN when there
    are none; complex tensors are described by their magnitudes. `near_limit` counts finite values of magnitude above
    half the dtype's largest finite value; `zero` and `subnormal` are counted in the tensor's own dtype.
    """

    count: int
    minimum: float
    maximum: float
    mean: float
    std: float
    l2: float
    absmax: float
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    subnormal: int = 0
    near_limit: int = 0

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite values."""
        return self.nan + self.posinf + self.neginf


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What one run saw of one node; the tensor itself, if kept, lies in the trace under the same key.

    `order` counts nodes in order of completion within the run. `producers` are the keys of the nodes the call read.
    `type_name` is the module's class or the function's qualified name. `site` names the fused site (`operator@call`)
    that produced or swallowed the node, empty otherwise. `digest` is empty when no content was read.
    """

    key: NodeKey
    order: int
    kind: NodeKind
    type_name: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    op_class: OpClass = OpClass.ORDINARY
    producers: tuple[NodeKey, ...] = ()
    storage: Storage = Storage.ABSENT
    statistics: Statistics | None = None
    digest: str = ""
    site: str = ""
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in its own dtype, in bytes."""
        from align.dumpers.dtypes import itemsize

        count = 1
        for extent in self.shape:
            count *= extent
        return count * itemsize(self.dtype)


class RunStatus(StrEnum):
    """How the run that wrote a trace ended."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"  # still running, or killed
    FAILED = "failed"  # the model raised
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Say what run a trace is of. `environment` holds (name, value) pairs of versions, chip and variables."""

    workload: str
    role: str
    device: str
    dtype: str
    seed: int
    level: str = "both"
    rank: int = 0
    world_size: int = 1
    created: str = ""
    environment: tuple[tuple[str, str], ...] = ()
