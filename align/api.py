"""The Python interface: what the command line does, as functions that return the design's values."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.choices import choice
from align.dumpers.errors import UsageError
from align.own import fuses_module, replaces_call
from align.progress import Reporter, Silent
from align.recording import capture
from align.reports.model import RunReport
from align.settings import Settings, load_settings

if TYPE_CHECKING:
    from align.bisecting.run import BisectDone

_RUNS = Path("align_runs")


def run(target: str = "demo", *, out: str | Path | None = None, force: bool = False, **options: Any) -> RunReport:
    """Run a target three ways and return everything that was found out.

    target   `file.py:function`, `package.module:function` or `demo`
    options  keys of any section of align.toml: device="cpu", dtype="float16", fuse=("attention",), policy="cosine"
    Raises AlignError (two lines, an exit code) for wrong use and for models that fail.
    """
    settings = load_settings(Path(), by_section({"target": target, **options}))
    return run_with_settings(
        settings, roles=("reference", "baseline", "candidate"), out=Path(out) if out else None, force=force
    )


def by_section(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort options into the sections of align.toml that have such a key. Raises UsageError for an unknown one."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        for section, entry in Settings.model_fields.items():
            if name in entry.annotation.model_fields:  # type: ignore[union-attr]
                sections.setdefault(section, {})[name] = value
                break
        else:
            known = sorted(key for entry in Settings.model_fields.values() for key in entry.annotation.model_fields)  # type: ignore[union-attr]
            raise UsageError(f"unknown option {name!r}", f"options: {', '.join(known)}")
    return sections


def run_with_settings(
    settings: Settings, *, roles: Sequence[str], out: Path | None, force: bool, progress: Reporter | None = None
) -> RunReport:
    """Run with settings read elsewhere, into `out` or a new folder under align_runs/."""
    from align.three_way import run_three_way

    folder = run_folder(out, settings.run.target, force=force)
    try:
        return run_three_way(settings, folder, roles, progress or Silent())
    except BaseException:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise


def run_folder(out: Path | None, target: str, *, force: bool) -> Path:
    """Make the folder a run writes to. Raises UsageError if it exists already, or cannot be written."""
    folder = out if out is not None else _next_folder(target)
    try:
        if folder.exists() and any(folder.iterdir()):
            if not force:
                raise UsageError(
                    f"run folder exists already: {folder}", "choose another --out, or add --force to overwrite it"
                )
            _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        raise UsageError(
            f"cannot write to {folder}: {exc.strerror or exc}", "choose another --out, or mend its permissions"
        ) from exc
    return folder


def _next_folder(target: str) -> Path:
    name = target.rpartition(":")[2] or target
    taken = [int(path.name[:4]) for path in _RUNS.glob("[0-9][0-9][0-9][0-9]-*") if path.is_dir()]
    return _RUNS / f"{max(taken, default=0) + 1:04d}-{name}"


def _clear(folder: Path) -> None:
    """Empty a folder that an earlier run of ours filled; anything else is not ours to delete."""
    if not (folder / "sites.json").exists() and not list(folder.glob("*.h5")):
        raise UsageError(f"{folder} was not made by align", "choose another --out; --force overwrites run folders only")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def bisect(
    target: str = "demo",
    *,
    out: str | Path | None = None,
    nodes: Sequence[str] = (),
    metric: str = "",
    precision: bool = False,
    **options: Any,
) -> BisectDone:
    """Find the choices that make a target's candidate drift, or with `precision` the modules that must stay float32.

    nodes    globs of what is judged; the results without any
    metric   `file.py:function(candidate, reference)` to judge by instead of a policy
    options  keys of align.toml, as for `run`. The folder `out` is reused: a bisect that was killed goes on there.
    """
    from align.bisecting.question import Topic
    from align.bisecting.run import BisectRequest, run_bisect

    settings = load_settings(Path(), by_section({"target": target, **options}))
    topic = Topic.PRECISION if precision else Topic.CHOICES
    request = BisectRequest(settings, tuple(nodes), metric, topic=topic, out=Path(out) if out else None)
    return run_bisect(request, Silent())


__all__ = ["bisect", "capture", "choice", "fuses_module", "replaces_call", "run", "run_folder", "run_with_settings"]
