"""The command line: a thin layer of options over `align.api`. Imports nothing heavy until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from align.dumpers.errors import AlignError

if TYPE_CHECKING:
    from rich.console import Console

    from align.progress import Reporter
    from align.reports.model import RunReport

app = typer.Typer(
    name="align",
    help="Find which fusion or precision choice changed a model's numbers, and say what it is worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Target = Annotated[str, typer.Argument(help="file.py:function, package.module:function, or demo", show_default=False)]
Fuse = Annotated[list[str], typer.Option("--fuse", help="fuse only choices that match, e.g. attention@unet.*", show_default=False)]
NoFuse = Annotated[list[str], typer.Option("--no-fuse", help="keep choices that match unfused", show_default=False)]
Config = Annotated[Path, typer.Option("--config", help="settings file")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the verdict line only")]


@app.callback()
def _root() -> None:
    """Find which fusion or precision choice changed a model's numbers, and say what it is worth."""


@app.command()
def run(
    target: Target = "",
    fused: Annotated[bool, typer.Option("--fused", help="run the fused candidate")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="run the unfused baseline")] = False,
    no_reference: Annotated[bool, typer.Option("--no-reference", help="skip the CPU FP32 reference")] = False,
    candidate: Annotated[str, typer.Option(help="your own fused variant: file.py:function", show_default=False)] = "",
    plan: Annotated[Path | None, typer.Option(help="run the choices of a plan file as the candidate", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu", show_default=False)] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or as-built", show_default=False)] = "",
    weights: Annotated[str, typer.Option(help="reference weights: same (rounded, then widened) or original", show_default=False)] = "",
    fuse: Fuse = [],
    no_fuse: NoFuse = [],
    precision: Annotated[list[str], typer.Option(help="run a site in another dtype: float32@path", show_default=False)] = [],
    flag: Annotated[list[str], typer.Option(help="set a device flag: name=value", show_default=False)] = [],
    steps: Annotated[int, typer.Option(help="steps of the loop; 0 leaves it to the workload")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and random numbers")] = 0,
    policy: Annotated[str, typer.Option(help="cann-l0, cann-l1, cann-l2, standard, cosine or auto", show_default=False)] = "",
    level: Annotated[str, typer.Option(help="module, call or both", show_default=False)] = "",
    keep: Annotated[str, typer.Option(help="tensors, stats or sample", show_default=False)] = "",
    max_bytes: Annotated[int, typer.Option(help="byte budget of each trace; 0 is none")] = 0,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="skip timing")] = False,
    out: Annotated[Path | None, typer.Option(help="run folder; made anew under align_runs/ by default", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing run folder")] = False,
    check: Annotated[bool, typer.Option("--check", help="exit 1 on drift, 3 if undecided")] = False,
    top: Annotated[int, typer.Option(help="how many nodes to list")] = 10,
    config: Config = Path("align.toml"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a model fused, unfused and as a CPU FP32 reference; compare, judge and time them."""
    from align.api import exit_code_of, run_with_settings
    from align.settings import load_settings

    sections: dict[str, dict[str, Any]] = {
        "run": _given(
            target=target, candidate=candidate, device=device, dtype=dtype, weights=weights, fuse=tuple(fuse), no_fuse=tuple(no_fuse),
            precision=tuple(precision), flags=tuple(flag), steps=steps, seed=seed, plan=str(plan or ""),
        ),
        "capture": _given(level=level, keep=keep, max_bytes=max_bytes),
        "judge": _given(policy=policy),
        "timing": {"enabled": False} if no_timing else {},
    }  # fmt: skip
    settings = load_settings(config, sections)
    both = fused == baseline
    roles = [
        *(() if no_reference else ("reference",)),
        *(("baseline",) if both or baseline else ()),
        *(("candidate",) if both or fused else ()),
    ]
    report = run_with_settings(settings, roles=roles, out=out, force=force, progress=_progress(json or quiet))
    _show(report, json=json, quiet=quiet, top=top)
    if check:
        raise typer.Exit(exit_code_of(report.judgement))


def _given(**options: Any) -> dict[str, Any]:
    """The options that were typed: those that differ from 'nothing'."""
    return {name: value for name, value in options.items() if value not in ("", 0, (), None)}


def _show(report: RunReport, *, json: bool, quiet: bool, top: int) -> None:
    from align.reports.machine import to_json
    from align.reports.summary import headline
    from align.reports.terminal import print_run

    if json:
        sys.stdout.write(to_json(report) + "\n")
    elif quiet:
        sys.stdout.write(headline(report).text + "\n")
    else:
        print_run(report, _console(), top=top)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def _progress(is_silent: bool) -> Reporter:
    from align.progress import Bars, Silent

    console = _console(stderr=True)
    return Silent() if is_silent or not console.is_terminal else Bars(console)


def main() -> NoReturn:
    """Run the command line; a user's mistake ends in two lines on stderr and its exit code, without a traceback."""
    try:
        app(standalone_mode=False)
        code = 0
    except AlignError as exc:
        sys.stderr.write(f"align: {exc.problem}\n       {exc.remedy}\n")
        code = exc.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("align: interrupted; what was finished is kept\n       run the same command again to start over\n")
        code = 130
    except BrokenPipeError:
        code = 0
    except Exception as exc:
        code = _foreign(exc)
    sys.exit(code)


def _foreign(exc: Exception) -> int:
    """Click's own errors in its own words (it imports lazily, so they are recognised by what they can do)."""
    if hasattr(exc, "exit_code") and not hasattr(exc, "show"):
        return int(exc.exit_code)
    if hasattr(exc, "show"):
        exc.show()
        return 2
    raise exc


if __name__ == "__main__":
    main()
