"""`align profile`: where the time goes, before and after fusion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from align.commands.options import Config, Fuse, Json, NoFuse, Target, given
from align.commands.output import console, progress, write


def profile(
    target: Target = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or npu", show_default=False)] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or as-built", show_default=False)] = "",
    fuse: Fuse = [],
    no_fuse: NoFuse = [],
    steps: Annotated[int, typer.Option(help="steps of the loop; 0 leaves it to the workload")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and random numbers")] = 0,
    top: Annotated[int, typer.Option(help="how many calls to list")] = 12,
    config: Config = Path("align.toml"),
    json: Json = False,
) -> None:
    """Time every call of baseline and candidate: the top list, kinds of work, and what only moves data."""
    from align.profiling import profile_target
    from align.profiling.tell import print_profile, to_json
    from align.settings import load_settings

    run = given(
        target=target, device=device, dtype=dtype, fuse=tuple(fuse), no_fuse=tuple(no_fuse), steps=steps, seed=seed
    )
    found = profile_target(load_settings(config, {"run": run}).run, progress(json))
    if json:
        write(to_json(found))
    else:
        print_profile(found, console(), top=top)
