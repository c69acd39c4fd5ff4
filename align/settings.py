"""Everything a run can be told, with real defaults; read from align.toml and overridden by the command line."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from align.dumpers.errors import ConfigError
from align.gating.limits import ErrorLimits, read_limits

CONFIG_NAME = "align.toml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSettings(_Section):
    """`[run]`: what is run, and how."""

    target: str = "demo"
    candidate: str = ""
    device: str = "auto"
    dtype: str = "bfloat16"
    weights: Literal["same", "original"] = "same"
    fuse: tuple[str, ...] = ()
    no_fuse: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    plan: str = ""
    grad: str = ""
    steps: int = Field(0, ge=0)
    seed: int = 0


class CaptureSettings(_Section):
    """`[capture]`: what is dumped of every run."""

    level: Literal["module", "call", "both"] = "both"
    keep: Literal["tensors", "stats", "sample"] = "tensors"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    inputs: bool = False
    max_bytes: int = Field(0, ge=0)
    compression: str = "none"


class JudgeSettings(_Section):
    """`[judge]`: the policy, and other policies for some nodes (the longest matching glob wins)."""

    policy: str = "cann-l1"
    overrides: dict[str, str] = Field(default_factory=dict)
    perturbed_runs: int = Field(8, ge=3)


class TimingSettings(_Section):
    """`[timing]`: how long baseline and candidate are timed."""

    budget_seconds: float = Field(5.0, gt=0)
    min_rounds: int = Field(7, ge=3)
    max_rounds: int = Field(60, ge=3)
    enabled: bool = True


class GateSettings(_Section):
    """`[gate]`: what a rollout must keep. 0 means no limit; without a policy that of `[judge]` holds.

    limits            node glob = largest relative L2, or {rel_l2, max_abs, excess}; the longest matching glob holds
    max_slowdown      candidate's seconds over the baseline's, for every input shape: 1.05 allows 5 % more
    tolerance         share by which a node may pass its accepted error before it counts (see align/gating/budget.py)
    speed_tolerance   share of the accepted speed-up that may be lost
    """

    policy: str = ""
    limits: Annotated[dict[str, ErrorLimits], BeforeValidator(read_limits)] = Field(default_factory=dict)
    min_speedup: float = Field(0.0, ge=0)
    max_slowdown: float = Field(0.0, ge=0)
    max_memory_bytes: int = Field(0, ge=0)
    min_coverage: float = Field(0.0, ge=0, le=1)
    lock: str = "align.lock.json"
    tolerance: float = Field(0.25, ge=0)
    speed_tolerance: float = Field(0.05, ge=0, lt=1)


class Settings(_Section):
    """The whole file."""

    run: RunSettings = RunSettings()
    capture: CaptureSettings = CaptureSettings()
    judge: JudgeSettings = JudgeSettings()
    timing: TimingSettings = TimingSettings()
    gate: GateSettings = GateSettings()


def load_settings(path: Path, overrides: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Read a settings file, if it is there, and lay overrides of single keys over it. Raises ConfigError."""
    content = _read(path) if path.is_file() else {}
    for section, values in overrides.items():
        content.setdefault(section, {})
        if not isinstance(content[section], dict):
            raise ConfigError(f"{path}: [{section}] is not a table", f"write [{section}] and its keys below")
        content[section].update(values)
    try:
        return Settings.model_validate(content)
    except ValidationError as exc:
        raise _explain(path, exc) from exc


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path} is not valid TOML: {exc}", "mend the file; `align init` writes a commented one"
        ) from exc


def _explain(path: Path, exc: ValidationError) -> ConfigError:
    error = exc.errors()[0]
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return ConfigError(
            f"{path}: {place} = {error['input']!r}: {error['msg']}", "see the comments that `align init` writes"
        )
    known = _keys_beside(error["loc"])
    near = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
    return ConfigError(f"{path}: unknown key {place!r}", hint)


def _keys_beside(place: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Settings
    for part in place[:-1]:
        model = model.model_fields[str(part)].annotation  # type: ignore[assignment]
    return list(model.model_fields)
