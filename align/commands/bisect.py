"""`align bisect`: name the guilty choices, prove it, price it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from align.commands.options import Config, Fuse, Json, NoFuse, given
from align.commands.output import console, progress, write

Target = Annotated[
    str,
    typer.Argument(
        help="file.py:function, package.module:function, demo, or the folder of an `align run`", show_default=False
    ),
]


def bisect(
    target: Target = "",
    candidate: Annotated[str, typer.Option(help="your own fused variant: file.py:function", show_default=False)] = "",
    plan: Annotated[Path | None, typer.Option(help="search the choices of a plan file", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu", show_default=False)] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or as-built", show_default=False)] = "",
    fuse: Fuse = [],
    no_fuse: NoFuse = [],
    flag: Annotated[
        list[str], typer.Option(help="a device flag of the candidate: name=value", show_default=False)
    ] = [],
    precision: Annotated[bool, typer.Option("--precision", help="ask which modules must stay in float32")] = False,
    by_call: Annotated[bool, typer.Option("--by-call", help="with --precision: ask it of single calls")] = False,
    nodes: Annotated[
        list[str], typer.Option(help="judge these nodes instead of the results (globs)", show_default=False)
    ] = [],
    metric: Annotated[
        str,
        typer.Option(
            help="judge by your function file.py:name(candidate, reference), an error or a score", show_default=False
        ),
    ] = "",
    metric_limit: Annotated[
        float, typer.Option(help="the metric's limit; by default 1.5 times the baseline's error", show_default=False)
    ] = math.nan,
    policy: Annotated[str, typer.Option(help="cann-l0, cann-l1, cann-l2, standard or cosine", show_default=False)] = "",
    steps: Annotated[int, typer.Option(help="steps of the loop; 0 leaves it to the workload")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and random numbers")] = 0,
    max_trials: Annotated[int, typer.Option(min=2, help="budget of trials")] = 400,
    repeats: Annotated[int, typer.Option(min=0, help="how often each claim is tried again")] = 2,
    no_price: Annotated[bool, typer.Option("--no-price", help="skip timing the plans")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="trials at a time, each in a process of its own")] = 1,
    isolate: Annotated[bool, typer.Option("--isolate", help="a new process for each trial")] = False,
    timeout: Annotated[float, typer.Option(min=0.0, help="seconds after which a trial is given up; 0 is never")] = 0.0,
    ray: Annotated[str, typer.Option(help="address of a Ray cluster to run trials on", show_default=False)] = "",
    max_latency_loss: Annotated[
        float,
        typer.Option(help="share the drift out; best plan that loses at most so many seconds", show_default=False),
    ] = math.inf,
    max_drift: Annotated[
        float, typer.Option(help="share the drift out; fastest plan with at most this drift", show_default=False)
    ] = math.inf,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for plans, journal and scripts; a killed bisect resumes there", show_default=False),
    ] = None,
    config: Config = Path("align.toml"),
    json: Json = False,
) -> None:
    """Search over every choice that differs between baseline and candidate for the ones that make it drift."""
    from align.bisecting.bisection import BisectOptions
    from align.bisecting.question import Topic
    from align.bisecting.run import BisectRequest, run_bisect
    from align.bisecting.shared import Limits
    from align.bisecting.tell import print_bisect, to_json
    from align.bisecting.workers import WorkerOptions
    from align.settings import load_settings

    run: dict[str, Any] = _of_run_folder(target) | given(
        candidate=candidate, device=device, dtype=dtype, fuse=tuple(fuse), no_fuse=tuple(no_fuse), flags=tuple(flag),
        steps=steps, seed=seed, plan=str(plan or ""),
    )  # fmt: skip
    topic = Topic.BY_CALL if by_call else Topic.PRECISION if precision else Topic.CHOICES
    request = BisectRequest(
        load_settings(config, {"run": run, "judge": given(policy=policy)}), tuple(nodes), metric, metric_limit, topic,
        Limits(max_latency_loss, max_drift), BisectOptions(max_trials, repeats, is_priced=not no_price),
        WorkerOptions(jobs, isolate, timeout, ray), out,
    )  # fmt: skip
    done = run_bisect(request, progress(json))
    if json:
        write(to_json(done))
    else:
        print_bisect(done, console())
    if done.result.is_interrupted:
        raise typer.Exit(130)


def _of_run_folder(target: str) -> dict[str, Any]:
    """The settings of [run] that a target stands for; the folder of an `align run` stands for its target and plan."""
    if not Path(target).is_dir():
        return given(target=target)
    from align.dumpers.choice import Plan
    from align.reports.stored import load

    folder, report = Path(target), load(Path(target))
    told = folder / "candidate.plan.json"
    plan = Plan.from_json(told.read_text(encoding="utf-8"))
    return {"target": report.workload, "plan": str(told), "device": plan.device, "dtype": plan.dtype}
