"""What a bisect leaves on disk: plan files, a settings snippet, and a script that reproduces the fault at one site."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from align.bisecting.bisection import BisectResult
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.dumpers.naming import walk_tensors
from align.dumpers.tensors import snapshot
from align.session import Session
from align.taps.shadow import shadow_pass

_SCRIPT = '''\
"""Reproduce the error of {site} on its own: the fused kernel and the unfused form on the same inputs.

Written by `align bisect`. The inputs lie beside this file in {inputs}.
"""

import json
from pathlib import Path

import numpy as np
import torch

from align.operators.registry import catalog

HERE = Path(__file__).resolve().parent
OPERATOR, DEVICE = {operator!r}, {device!r}
SUMMARY = {summary!r}


def load():
    stored = np.load(HERE / {inputs!r})
    scalars = json.loads({scalars!r})
    arguments = dict(scalars)
    for name in stored.files:
        argument, _, dtype = name.partition("|")
        bits = torch.from_numpy(stored[name].copy())
        arguments[argument] = bits.view(getattr(torch, dtype)) if dtype else bits
    return arguments


def main():
    operator = next(o for o in catalog() if o.name == OPERATOR and o.summary == SUMMARY)
    arguments = load()
    wide = {{k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}}
    there = {{k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in arguments.items()}}
    with torch.no_grad():
        exact = operator.unfused(**wide)
        forms = {{"unfused": operator.unfused(**there), "fused": operator.kernels[DEVICE].run(**there)}}
    first = lambda value: (value[0] if isinstance(value, tuple) else value).detach().cpu().double()
    for form, result in forms.items():
        error = (first(result) - first(exact)).norm() / first(exact).norm()
        print(f"{{form:8}} relative L2 against float32: {{error.item():.4g}}")


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Names of the files written, relative to `folder`; empty where there was nothing to write."""

    folder: Path
    largest_passing: str = ""
    smallest_failing: str = ""
    snippet: str = ""
    scripts: tuple[str, ...] = ()


def write_artifacts(folder: Path, session: Session, result: BisectResult) -> Artifacts:
    """Write what the result gives rise to."""
    verdicts = result.verdicts
    return Artifacts(
        folder,
        _write_plan(folder / "largest-passing.plan.json", verdicts.largest_passing),
        _write_plan(folder / "smallest-failing.plan.json", verdicts.smallest_failing),
        _write_snippet(folder / "align.snippet.toml", session, result),
        tuple(name for card in result.cards for name in _write_script(folder, session, result, card.choices)),
    )


def _write_plan(path: Path, plan: Plan | None) -> str:
    if plan is None:
        return ""
    path.write_text(plan.to_json() + "\n", encoding="utf-8")
    return path.name


def _write_snippet(path: Path, session: Session, result: BisectResult) -> str:
    off = sorted(choice for choice in result.question.suspects if str(choice) in result.outcome.switch_off)
    if not off:
        return ""
    if result.question.off:
        key, values = "precision", [str(result.question.off[choice]).partition(":")[2] for choice in off]
    else:
        key, values = "no_fuse", [f"{choice.name}@{choice.site}" if choice.site else choice.name for choice in off]
    lines = ["[run]", f"target = {json.dumps(session.settings.target)}", f"{key} = {json.dumps(values)}"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path.name


def _write_script(folder: Path, session: Session, result: BisectResult, choices: tuple[Choice, ...]) -> tuple[str, ...]:
    """A script for each fused site of a culprit, with the inputs that the site had in the candidate run."""
    written = []
    for choice in choices:
        planned = next((item for item in session.sites if item.choice == choice), None)
        if choice.kind is not ChoiceKind.FUSION or planned is None:
            continue
        arguments = shadow_pass(session, result.question.everything, keep=planned.site.name).arguments
        name = f"reproduce-{choice.name}-{len(written) + 1}"
        arrays, scalars = {}, {}
        for argument, value in arguments.items():
            tensors = list(walk_tensors(value))
            if len(tensors) == 1 and tensors[0][0] == "0":
                raw = snapshot(tensors[0][1]).wait()
                needs_view = raw.dtype in ("bfloat16",) or raw.dtype.startswith("float8")
                bits = raw.bits.view(np.int16) if raw.dtype == "bfloat16" else raw.bits
                arrays[f"{argument}|{raw.dtype if needs_view else ''}"] = bits
            elif not tensors:
                scalars[argument] = value
        if not _is_plain(scalars):
            continue
        np.savez(folder / f"{name}.npz", **arrays)
        operator = planned.match.operator
        text = _SCRIPT.format(
            site=planned.site.name, inputs=f"{name}.npz", operator=operator.name, device=session.device.kind, summary=operator.summary,
            scalars=json.dumps(scalars),
        )  # fmt: skip
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        written.append(f"{name}.py")
    return tuple(written)


def _is_plain(scalars: dict[str, object]) -> bool:
    try:
        json.dumps(scalars)
    except TypeError:
        return False
    return True
