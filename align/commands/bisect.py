"""`align bisect`: name the guilty choices, prove it, price it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.commands.options import Config, Fuse, Json, NoFuse, Target, given
from align.commands.output import console, progress, write


def bisect(
    target: Target = "",
    candidate: Annotated[str, typer.Option(help="your own fused variant: file.py:function", show_default=False)] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu", show_default=False)] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or as-built", show_default=False)] = "",
    fuse: Fuse = [],
    no_fuse: NoFuse = [],
    flag: Annotated[
        list[str], typer.Option(help="a device flag of the candidate: name=value", show_default=False)
    ] = [],
    precision: Annotated[bool, typer.Option("--precision", help="ask which modules must stay in float32")] = False,
    nodes: Annotated[
        list[str], typer.Option(help="judge these nodes instead of the results (globs)", show_default=False)
    ] = [],
    metric: Annotated[
        str,
        typer.Option(help="judge by your function: file.py:name(candidate, reference) -> error", show_default=False),
    ] = "",
    max_error: Annotated[float, typer.Option(help="limit of the metric; 0 is 1.5 times the baseline's")] = 0.0,
    policy: Annotated[str, typer.Option(help="cann-l0, cann-l1, cann-l2, standard or cosine", show_default=False)] = "",
    steps: Annotated[int, typer.Option(help="steps of the loop; 0 leaves it to the workload")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and random numbers")] = 0,
    max_trials: Annotated[int, typer.Option(help="budget of trials")] = 400,
    repeats: Annotated[int, typer.Option(help="how often the answer is reproduced")] = 3,
    jobs: Annotated[int, typer.Option(help="trials at a time")] = 1,
    isolate: Annotated[bool, typer.Option("--isolate", help="a process of its own for each trial")] = False,
    timeout: Annotated[float, typer.Option(help="seconds after which a trial is given up; 0 is never")] = 0.0,
    ray: Annotated[str, typer.Option(help="address of a Ray cluster to run trials on", show_default=False)] = "",
    max_latency_loss: Annotated[float, typer.Option(help="shared guilt: seconds you would give up")] = 0.0,
    max_drift: Annotated[float, typer.Option(help="shared guilt: drift you would accept")] = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for plans, journal and scripts; a killed bisect resumes there", show_default=False),
    ] = None,
    config: Config = Path("align.toml"),
    json: Json = False,
) -> None:
    """Search over every choice that differs between baseline and candidate for the ones that make it drift."""
    from align.bisecting.tell import print_bisect, to_json
    from align.bisecting.run import BisectRequest, run_bisect
    from align.settings import load_settings
    from align.bisecting.workers import WorkerOptions

    sections = {
        "run": given(
            target=target, candidate=candidate, device=device, dtype=dtype, fuse=tuple(fuse), no_fuse=tuple(no_fuse), flags=tuple(flag),
            steps=steps, seed=seed,
        ),
        "judge": given(policy=policy),
    }  # fmt: skip
    request = BisectRequest(
        load_settings(config, sections), tuple(nodes), metric, max_error, precision, max_trials, repeats, max_latency_loss, max_drift,
        WorkerOptions(jobs, isolate, timeout, ray), out,
    )  # fmt: skip
    done = run_bisect(request, progress(json))
    if json:
        write(to_json(done))
    else:
        print_bisect(done, console())
