"""`align gate`: yes or no for a machine, with one line of reason for each limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from align.commands.options import Config, Fuse, Json, NoFuse, Quiet, Target, given
from align.commands.output import console, progress, write

if TYPE_CHECKING:
    from align.gating.model import GateResult
    from align.settings import Settings

_GITLAB_FILE = Path("gl-code-quality-report.json")


def gate(
    target: Target = "",
    run: Annotated[
        Path | None, typer.Option("--run", help="judge this run folder instead of running anything", show_default=False)
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="write this run's errors and speed as the accepted budget")
    ] = False,
    lock: Annotated[
        Path | None, typer.Option(help="the budget; align.lock.json by default", show_default=False)
    ] = None,
    policy: Annotated[
        str, typer.Option(help="cann-l0, cann-l1, cann-l2, standard, cosine, auto or ignore", show_default=False)
    ] = "",
    limit: Annotated[
        list[str], typer.Option("--limit", help="node glob = largest relative L2; GLOB:max_abs=0.1", show_default=False)
    ] = [],
    min_speedup: Annotated[float, typer.Option(help="least speed-up over the baseline; 0 is no limit")] = 0.0,
    max_slowdown: Annotated[
        float, typer.Option(help="most seconds over the baseline's, as a ratio; 0 is no limit")
    ] = 0.0,
    max_memory_bytes: Annotated[int, typer.Option(help="most peak memory of the candidate; 0 is no limit")] = 0,
    min_coverage: Annotated[float, typer.Option(help="least share of nodes compared; 0 is no limit")] = 0.0,
    candidate: Annotated[str, typer.Option(help="your own fused variant: file.py:function", show_default=False)] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu", show_default=False)] = "",
    plan: Annotated[
        Path | None, typer.Option(help="run the choices of a plan file as the candidate", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or as-built", show_default=False)] = "",
    fuse: Fuse = [],
    no_fuse: NoFuse = [],
    flag: Annotated[list[str], typer.Option(help="set a device flag: name=value", show_default=False)] = [],
    steps: Annotated[int, typer.Option(help="steps of the loop; 0 leaves it to the workload")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and random numbers")] = 0,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="skip timing")] = False,
    out: Annotated[
        Path | None, typer.Option(help="run folder; made anew under align_runs/ by default", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing run folder")] = False,
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML", show_default=False)] = None,
    cases: Annotated[
        Literal["node", "site"], typer.Option(help="what a test case of the JUnit file stands for")
    ] = "node",
    sarif: Annotated[Path | None, typer.Option(help="write SARIF", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="write a Markdown summary", show_default=False)] = None,
    annotations: Annotated[
        str,
        typer.Option(help="github (stdout and the job's summary) or gitlab (a Code Quality file)", show_default=False),
    ] = "",
    top: Annotated[int, typer.Option(help="how many nodes to list below a missed limit")] = 5,
    config: Config = Path("align.toml"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Hold a fused model against [gate] and the accepted budget; exit 0, 1 (missed) or 3 (cannot tell)."""
    from align.settings import load_settings

    flavour = _flavour(annotations)
    how = given(
        target=target, candidate=candidate, plan=str(plan or ""), device=device, dtype=dtype, fuse=tuple(fuse),
        no_fuse=tuple(no_fuse), flags=tuple(flag), steps=steps, seed=seed,
    )  # fmt: skip
    limits = given(
        policy=policy, min_speedup=min_speedup, max_slowdown=max_slowdown, max_memory_bytes=max_memory_bytes,
        min_coverage=min_coverage, lock=str(lock or ""), limits=_limits(limit) if limit else None,
    )  # fmt: skip
    settings = load_settings(config, {"run": how, "gate": limits, "timing": {"enabled": False} if no_timing else {}})
    if run is not None:
        _refuse(how, out, no_timing=no_timing)
    result = _judged(settings, run, out, is_accepted=accept, is_forced=force, is_silent=json or quiet)
    _write_files(result, {"junit": junit, "sarif": sarif, "markdown": markdown}, cases, top)
    _tell(result, top=top, is_json=json, is_quiet=quiet)
    _annotate(result, flavour, top, to_stderr=json)
    raise typer.Exit(result.exit_code)


def _limits(texts: list[str]) -> dict[str, dict[str, float]]:
    """`--limit` options as the table that align.toml would hold."""
    from align.dumpers.errors import UsageError
    from align.gating.limits import METRICS, parse_limit

    limits: dict[str, dict[str, float]] = {}
    for text in texts:
        try:
            glob, figure = parse_limit(text)
        except ValueError as exc:
            raise UsageError(
                f"--limit: {exc}",
                f"write GLOB=0.02 (relative L2) or GLOB:metric=value, metric one of {', '.join(METRICS)}",
            ) from exc
        limits.setdefault(glob, {}).update(figure)
    return limits


def _refuse(how: dict[str, Any], out: Path | None, *, no_timing: bool) -> None:
    """With --run nothing runs, so options that say how to run are a mistake."""
    from align.dumpers.errors import UsageError

    said = [*how, *(["out"] if out is not None else []), *(["no-timing"] if no_timing else [])]
    if said:
        raise UsageError(
            f"--run judges a run that was made already; it cannot take {', '.join(said)}",
            "leave them out, or leave out --run",
        )


def _flavour(name: str) -> Any:
    from align.dumpers.errors import UsageError
    from align.reports.forge import Flavour

    if name and name not in set(Flavour):
        raise UsageError(f"unknown annotations {name!r}", f"there are {', '.join(Flavour)}")
    return Flavour(name) if name else None


def _judged(
    settings: Settings, run: Path | None, out: Path | None, *, is_accepted: bool, is_forced: bool, is_silent: bool
) -> GateResult:
    from align.gating import gate as gating

    if run is not None:
        report = gating.read_for_gate(run, settings)
    else:
        report = gating.run_for_gate(settings, out=out, force=is_forced, progress=progress(is_silent))
    lock = Path(settings.gate.lock)
    return gating.accept(report, settings, lock) if is_accepted else gating.check(report, settings, lock)


def _write_files(result: GateResult, files: dict[str, Path | None], cases: str, top: int) -> None:
    from align.gating.outputs import gate_junit, gate_markdown
    from align.reports.forge import to_sarif
    from align.reports.junit import CaseUnit

    makers = {
        "junit": lambda: gate_junit(result, CaseUnit(cases)),
        "sarif": lambda: to_sarif(result.report),
        "markdown": lambda: gate_markdown(result, top=top),
    }
    for kind, path in files.items():
        if path is not None:
            _write_file(path, makers[kind](), "w")


def _write_file(path: Path, text: str, mode: Literal["a", "w"]) -> None:
    from align.dumpers.errors import UsageError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as exc:
        raise UsageError(
            f"cannot write {path}: {exc.strerror or exc}", "name another file, or mend its permissions"
        ) from exc


def _tell(result: GateResult, *, top: int, is_json: bool, is_quiet: bool) -> None:
    from align.gating.outputs import gate_json, gate_lines

    if is_json:
        write(gate_json(result))
        return
    lines = list(gate_lines(result, top=top))
    for line in lines[:1] if is_quiet else lines:
        write(line)


def _annotate(result: GateResult, flavour: Any, top: int, *, to_stderr: bool) -> None:
    """GitHub reads commands from both streams; with --json stdout holds the object only."""
    from align.gating.outputs import gate_annotations, gate_markdown
    from align.reports.forge import Flavour

    if flavour is None:
        return
    text = gate_annotations(result, flavour)
    if flavour is Flavour.GITLAB:
        _write_file(_GITLAB_FILE, text, "w")
        return
    console(stderr=to_stderr).file.write(text)
    summary = os.environ.get("GITHUB_STEP_SUMMARY", "")
    if summary:
        _write_file(Path(summary), gate_markdown(result, top=top), "a")
