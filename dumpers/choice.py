"""What can be switched, where, and which switches one run has on: Choice, Site, Plan, and their text forms."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from align.dumpers.errors import UsageError
from align.dumpers.model import OpClass

_CHOICE = re.compile(r"^(?P<kind>[a-z]+):(?P<name>[^@]+?)(?:@(?P<site>.*))?$", re.DOTALL)


class ChoiceKind(StrEnum):
    """What kind of decision a choice is."""

    FUSION = "fusion"
    PRECISION = "precision"
    FLAG = "flag"
    USER = "user"  # a name the user's own builder or code declares
    COMPILER = "compiler"


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """One switchable decision at one site; `site` is empty for choices that hold for the whole run.

    Reads and prints as `fusion:attention@unet.mid.attn/scaled_dot_product_attention#0`,
    `precision:float32@decoder.norm_out`, `flag:npu.conv.allow_hf32=on`, `user:fast_norm`.
    """

    kind: ChoiceKind
    name: str
    site: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f"@{self.site}" if self.site else "")

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Read a choice as `str(choice)` wrote it. Raises UsageError with the accepted form."""
        match = _CHOICE.match(text)
        if match is None or match["kind"] not in set(ChoiceKind):
            kinds = ", ".join(ChoiceKind)
            raise UsageError(f"not a choice: {text!r}", f"write it as kind:name@site with kind one of {kinds}")
        return cls(ChoiceKind(match["kind"]), match["name"], match["site"] or "")

    def is_selected_by(self, glob: str) -> bool:
        """Whether a glob names this choice: `attention`, `attention@unet.*`, `unet.mid*`, or its whole text."""
        label = f"{self.name}@{self.site}" if self.site else self.name
        path = self.site.rpartition("/")[0]
        return any(fnmatch.fnmatchcase(form, glob) for form in (str(self), label, self.name, self.site, path))


@dataclass(frozen=True, slots=True)
class Site:
    """A place where the catalog found an operator: its calls in order, the last of which yields the output.

    `calls` and `output` are call names (`path/op#call`). `is_written_fused` tells whether the model's own code calls
    the fused operator there. `interior_nbytes` is what fusing saves: bytes of interior tensors in the run's dtype.
    """

    operator: str
    calls: tuple[str, ...]
    op_class: OpClass = OpClass.ORDINARY
    is_written_fused: bool = False
    interior_nbytes: int = 0
    note: str = ""

    @property
    def output(self) -> str:
        """Name of the call whose output equals the fused kernel's output."""
        return self.calls[-1]

    @property
    def name(self) -> str:
        """`operator@path/op#call`, as it stands in records and reports."""
        return f"{self.operator}@{self.output}"

    @property
    def choice(self) -> Choice:
        """The fusion choice that switches this site."""
        return Choice(ChoiceKind.FUSION, self.operator, self.output)


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run the workload: role, device, dtype and the choices that are on."""

    role: str
    device: str
    dtype: str
    choices: frozenset[Choice] = frozenset()

    def with_choices(self, choices: Iterable[Choice]) -> Plan:
        """The same plan with other choices on."""
        return replace(self, choices=frozenset(choices))

    @property
    def digest(self) -> str:
        """Twelve hex digits that name the plan: SHA-256 of its canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, sorted choices."""
        body = {
            "role": self.role,
            "device": self.device,
            "dtype": self.dtype,
            "choices": sorted(map(str, self.choices)),
        }
        return json.dumps(body, sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. Raises UsageError when it is not a plan."""
        try:
            body: dict[str, Any] = json.loads(text)
            choices = frozenset(Choice.parse(item) for item in body["choices"])
            return cls(str(body["role"]), str(body["device"]), str(body["dtype"]), choices)
        except (ValueError, KeyError, TypeError) as exc:
            raise UsageError(f"not a plan: {exc}", "give a file that `align run` or `align bisect` wrote") from exc
