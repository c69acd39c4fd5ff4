"""`align run`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from align.commands.options import Config, Fuse, Json, NoFuse, Quiet, Target, given
from align.commands.output import progress, show_run


def run(
    target: Target = "",
    fused: Annotated[bool, typer.Option("--fused", help="run the fused candidate")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="run the unfused baseline")] = False,
    no_reference: Annotated[bool, typer.Option("--no-reference", help="skip the CPU FP32 reference")] = False,
    candidate: Annotated[str, typer.Option(help="your own fused variant: file.py:function", show_default=False)] = "",
    plan: Annotated[
        Path | None, typer.Option(help="run the choices of a plan file as the candidate", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu", show_default=False)] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or as-built", show_default=False)] = "",
    weights: Annotated[
        str, typer.Option(help="reference weights: same (rounded, then widened) or original", show_default=False)
    ] = "",
    fuse: Fuse = [],
    no_fuse: NoFuse = [],
    precision: Annotated[
        list[str], typer.Option(help="run a site in another dtype: float32@path", show_default=False)
    ] = [],
    flag: Annotated[list[str], typer.Option(help="set a device flag: name=value", show_default=False)] = [],
    steps: Annotated[int, typer.Option(help="steps of the loop; 0 leaves it to the workload")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and random numbers")] = 0,
    policy: Annotated[
        str, typer.Option(help="cann-l0, cann-l1, cann-l2, standard, cosine or auto", show_default=False)
    ] = "",
    grad: Annotated[
        str, typer.Option(help="record gradients too: of `sum`, or file.py:name(result)", show_default=False)
    ] = "",
    include: Annotated[list[str], typer.Option(help="record only nodes that match", show_default=False)] = [],
    exclude: Annotated[list[str], typer.Option(help="do not record nodes that match", show_default=False)] = [],
    inputs: Annotated[bool, typer.Option("--inputs", help="record inputs of calls and modules too")] = False,
    level: Annotated[str, typer.Option(help="module, call or both", show_default=False)] = "",
    keep: Annotated[str, typer.Option(help="tensors, stats or sample", show_default=False)] = "",
    max_bytes: Annotated[int, typer.Option(help="byte budget of each trace; 0 is none")] = 0,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="skip timing")] = False,
    out: Annotated[
        Path | None, typer.Option(help="run folder; made anew under align_runs/ by default", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing run folder")] = False,
    check: Annotated[bool, typer.Option("--check", help="exit 1 on drift, 3 if undecided")] = False,
    top: Annotated[int, typer.Option(help="how many nodes to list")] = 10,
    config: Config = Path("align.toml"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a model fused, unfused and as a CPU FP32 reference; compare, judge and time them."""
    from align.api import run_with_settings
    from align.judging import exit_code_of
    from align.settings import load_settings

    sections: dict[str, dict[str, Any]] = {
        "run": given(
            target=target, candidate=candidate, device=device, dtype=dtype, weights=weights, fuse=tuple(fuse),
            no_fuse=tuple(no_fuse), precision=tuple(precision), flags=tuple(flag), steps=steps, seed=seed,
            plan=str(plan or ""), grad=grad,
        ),
        "capture": given(
            level=level, keep=keep, max_bytes=max_bytes, include=tuple(include), exclude=tuple(exclude),
            inputs=inputs or None,
        ),
        "judge": given(policy=policy),
        "timing": {"enabled": False} if no_timing else {},
    }  # fmt: skip
    settings = load_settings(config, sections)
    both = fused == baseline
    roles = [
        *(() if no_reference else ("reference",)),
        *(("baseline",) if both or baseline else ()),
        *(("candidate",) if both or fused else ()),
    ]
    report = run_with_settings(settings, roles=roles, out=out, force=force, progress=progress(json or quiet))
    show_run(report, json=json, quiet=quiet, top=top)
    if check:
        raise typer.Exit(exit_code_of(report.judgement))
