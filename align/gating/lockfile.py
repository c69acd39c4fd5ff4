"""The committed budget, `align.lock.json`: accepted figures of each workload in each environment, side by side.

JSON with sorted keys and one entry a line, so that a change shows as the lines that changed. Figures keep three digits:
less than any tolerance, and noise in the fourth would rewrite every line. Paths and host names never go in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.dumpers.errors import ConfigError, UsageError
from align.reports.model import RunReport

SCHEMA_VERSION = 1

# Not in the fingerprint: what changes no result. The number of threads is recorded as such.
_IRRELEVANT = frozenset(
    {
        "python", "numpy", "platform", "ASCEND_HOME_PATH", "ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    }
)  # fmt: skip

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What was accepted for one workload in one environment.

    `nodes` are (key, relative L2); `speedup` and `seconds` are NaN if not timed.
    """

    workload: str
    environment: Pairs
    nodes: tuple[tuple[str, float], ...]
    plan: str
    speedup: float
    seconds: float

    @property
    def name(self) -> str:
        """The entry's name in the file: readable, and different wherever the environment is."""
        known = dict(self.environment)
        digest = hashlib.sha256(json.dumps(sorted(self.environment)).encode()).hexdigest()[:8]
        device, dtype, chip = (known.get(name, "?") for name in ("device", "dtype", "chip"))
        return f"{self.workload} | {device} {dtype} | {chip} | {digest}"


def fingerprint(report: RunReport) -> Pairs:
    """What a figure depends on besides the model: device, dtype, chip, threads, versions, flags; sorted."""
    plan = next((row.plan for row in report.roles if row.role == "candidate"), None)
    pairs = {name: value for name, value in report.environment if name not in _IRRELEVANT}
    if plan is not None:
        pairs |= {"device": plan.device, "dtype": plan.dtype}
    return tuple(sorted(pairs.items()))


def read_lock(path: Path) -> tuple[Accepted, ...]:
    """All entries; none if there is no file. Raises ConfigError when it is not such a file."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        version, entries = body["schema_version"], body["accepted"]
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has version {version}, this align reads {SCHEMA_VERSION}",
                "use the align that wrote it, or accept anew",
            )
        return tuple(_entry(entries[name]) for name in sorted(entries))
    except FileNotFoundError:
        return ()
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path}: {exc.strerror or exc}", "mend its permissions, or name another --lock"
        ) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{path} is not a lock file: {exc}", "resolve merge conflicts in it, or delete it and `align gate --accept`"
        ) from exc


def write_lock(path: Path, entries: Iterable[Accepted]) -> None:
    """Write all entries, in the order of their names. Raises UsageError when the file cannot be written."""
    body = {"schema_version": SCHEMA_VERSION, "accepted": {entry.name: _object(entry) for entry in entries}}
    try:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as exc:
        raise UsageError(
            f"cannot write {path}: {exc.strerror or exc}", "name another --lock, or mend its permissions"
        ) from exc


def find_entry(entries: Iterable[Accepted], workload: str, environment: Pairs) -> Accepted | None:
    """The entry of just this workload and environment."""
    return next((entry for entry in entries if (entry.workload, entry.environment) == (workload, environment)), None)


def replace_entry(entries: Iterable[Accepted], entry: Accepted) -> tuple[Accepted, ...]:
    """The entries with this one in the place of its like."""
    return (
        *(other for other in entries if (other.workload, other.environment) != (entry.workload, entry.environment)),
        entry,
    )


def differences(ours: Pairs, theirs: Pairs) -> tuple[str, ...]:
    """`torch 2.12.0 -> 2.13.0` for everything in which two environments differ, from theirs to ours."""
    mine, other = dict(ours), dict(theirs)
    names = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
    return tuple(f"{name} {other.get(name, 'unset')} -> {mine.get(name, 'unset')}" for name in names)


def _object(entry: Accepted) -> dict[str, Any]:
    timed = (
        {"speed": {"speedup": _short(entry.speedup), "seconds": _short(entry.seconds)}}
        if entry.speedup == entry.speedup
        else {}
    )
    return {
        "workload": entry.workload, "environment": dict(entry.environment), "plan": entry.plan,
        "rel_l2": {key: _short(value) for key, value in entry.nodes}, **timed,
    }  # fmt: skip


def _short(value: float) -> float | str:
    return float(f"{value:.3g}") if abs(value) != float("inf") else "Infinity"


def _entry(body: dict[str, Any]) -> Accepted:
    speed = body.get("speed", {})
    environment = tuple(sorted((str(name), str(value)) for name, value in body["environment"].items()))
    nodes = tuple(sorted((str(key), float(value)) for key, value in body["rel_l2"].items()))
    nan = float("nan")
    return Accepted(
        str(body["workload"]),
        environment,
        nodes,
        str(body["plan"]),
        float(speed.get("speedup", nan)),
        float(speed.get("seconds", nan)),
    )
