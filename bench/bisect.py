"""Measure the bisector: what a trial costs over a bare forward, how many probes a search takes, and whether planted
faults are named.

    python -m bench.bisect                      the cost of a trial, and the table of probes
    python -m bench.bisect --planted 20         plant each fault 20 times and bisect (minutes)
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from align.bisecting.bisection import Bisection, BisectOptions, Fault, rank
from align.bisecting.journal import Journal
from align.bisecting.question import choice_question, plan_with
from align.bisecting.trial import Criterion, Trials
from align.bisecting.workers import Here
from align.compare.policy import policy_named
from align.compare.search import Outcome
from align.session import Session
from align.settings import RunSettings
from bench import probes
from bench.planted import FAULTS, Plant, faults_of, planted

ROUNDS = 9

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    config = LlamaConfig(vocab_size={vocab}, hidden_size={width}, intermediate_size={inner}, num_hidden_layers={layers},
                         num_attention_heads=8, num_key_value_heads=4, initializer_range={spread})
    ids = torch.randint(0, {vocab}, (2, {length}))
    return LlamaForCausalLM(config).eval(), {{"input_ids": ids, "use_cache": False}}
"""

UNET = """
import torch
from diffusers import UNet2DConditionModel

def build():
    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    return model, (torch.randn(1, 4, 16, 16), 500, torch.randn(1, 8, 32)), {"return_dict": False}
"""


def big_llama() -> str:
    """A decoder whose forward takes about 100 ms on one core."""
    return LLAMA.format(vocab=2048, width=512, inner=1376, layers=6, spread=0.02, length=96)


def small_llama() -> str:
    """A decoder with weights large enough for attention to be peaked, so that a wrong rotary embedding matters."""
    return LLAMA.format(vocab=256, width=64, inner=172, layers=2, spread=0.15, length=24)


# -- the cost of a trial ----------------------------------------------------------------------------------------------


def cost_of_trial(target: str, prepare: Callable[[Session], None] = lambda session: None) -> tuple[float, float, float]:
    """Median seconds of a bare forward and of a trial, and the median ratio, in alternating rounds."""
    session = Session(RunSettings(target=target))
    trials = Trials(session, Criterion(policy_named("cann-l1")))
    trials.prepare(session.baseline_plan())
    plan = choice_question(session).everything
    workload = session.executor.workload
    args, kwargs = workload.fresh_inputs(
        lambda tensor: tensor.to(session.executor.low) if tensor.is_floating_point() else tensor
    )

    def bare() -> float:
        started = time.perf_counter()
        with torch.no_grad():
            workload.model(*args, **kwargs)
        return time.perf_counter() - started

    def trial() -> float:
        started = time.perf_counter()
        trials.run(plan)
        return time.perf_counter() - started

    trial(), bare()
    pairs = [(bare(), trial()) for _ in range(ROUNDS)]
    return (
        statistics.median(b for b, _ in pairs),
        statistics.median(t for _, t in pairs),
        statistics.median(t / b for b, t in pairs),
    )


# -- planted faults ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """One planted problem: what is guilty, whether it leaves the limits (alone and beside all others), the answer."""

    guilty: frozenset[str]
    matters: bool
    named: frozenset[str]
    harmless: frozenset[str]
    probes: int

    @property
    def is_right(self) -> bool:
        """Exactly the guilty are named, but for those that pass beside all the rest; nobody where results pass."""
        return bool(self.named) == self.matters and (not self.matters or self.named | self.harmless == self.guilty)


def find(target: str, plant: Plant, policy: str, folder: Path) -> Found | None:
    """Plant, bisect, and compare; None where the workload has no site for the fault."""
    with planted(plant) as guilty:
        session = Session(RunSettings(target=target, seed=plant.seed))
        trials = Trials(session, Criterion(policy_named(policy)))
        trials.prepare(session.baseline_plan())
        if len(guilty) < len(plant.faults):
            return None
        question = choice_question(session)
        matters = trials.run(question.everything).status.is_fault
        if matters and not all(
            trials.run(plan_with(question, frozenset({choice}))).status.is_fault for choice in guilty
        ):
            return None  # within the limits alone, over them beside others: neither answer would be wrong
        journal = Journal(folder / "none", "")
        bisection = Bisection(session, question, Here(trials), journal, BisectOptions(repeats=1), lambda *_: None)
        outcome: Outcome = bisection.search(rank(session, question), Fault.DRIFT)
        (folder / "none").unlink(missing_ok=True)
    named = frozenset(choice for culprit in outcome.culprits for choice in culprit)
    harmless = frozenset(guilty) & (outcome.largest_passing or frozenset())
    return Found(frozenset(guilty), matters, named, harmless, outcome.probes)


def operators_of(target: str) -> dict[str, set[str]]:
    """Operators with sites in a workload, each with the faults that some site of it can have."""
    with planted(Plant({})):
        session = Session(RunSettings(target=target))
        session.survey()
    found: dict[str, set[str]] = {}
    for planned in session.sites:
        arguments = dict.fromkeys(planned.match.binding)
        found.setdefault(planned.match.operator.name, set()).update(faults_of(planned, arguments))
    return found


def problems(target: str, seeds: int) -> Iterator[Plant]:
    """Every operator with every fault, the faults in turn over the seeds; then two operators at once."""
    operators = sorted(operators_of(target))
    for seed in range(seeds):
        for index, operator in enumerate(operators):
            yield Plant({operator: FAULTS[(seed + index) % len(FAULTS)].name}, seed)
        if len(operators) > 1:
            first, second = operators[seed % len(operators)], operators[(seed + 1) % len(operators)]
            yield Plant({first: "tail columns", second: "missing scale"}, seed)
        yield Plant({}, seed)


def sweep(name: str, target: str, seeds: int, folder: Path) -> None:
    """Print one line for each kind of planted problem: how often the answer was right."""
    tally: dict[str, Counter[str]] = {}
    spent: dict[str, list[int]] = {}
    for plant in problems(target, seeds):
        found = find(target, plant, "cann-l1", folder)
        if found is None:
            continue
        kind = " and ".join(plant.faults) or "nothing"
        count = tally.setdefault(kind if len(plant.faults) < 2 else "two operators at once", Counter())
        count.update(
            [
                "planted",
                *(["matters"] if found.matters and found.guilty else []),
                *(["right"] if found.is_right else []),
            ]
        )
        spent.setdefault(kind if len(plant.faults) < 2 else "two operators at once", []).append(found.probes)
        if not found.is_right:
            print(
                f"  wrong: {plant}: guilty {set(found.guilty)}, named {set(found.named)}",
                flush=True,
            )
    for kind, count in sorted(tally.items()):
        print(
            f"{name:<8} {kind:<24} planted {count['planted']:>3}, over the limits {count['matters']:>3}, "
            f"right {count['right']:>3}, probes {statistics.median(spent[kind]):g} (most {max(spent[kind])})",
            flush=True,
        )  # fmt: skip


# -- all --------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--planted", type=int, default=0, metavar="SEEDS", help="plant faults with so many seeds instead"
    )
    parser.add_argument("--problems", type=int, default=20, help="simulated problems a row of the table of probes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, text in (("big", big_llama()), ("llama", small_llama()), ("unet", UNET)):
            (folder / f"{kind}.py").write_text(text, encoding="utf-8")
        if options.planted:
            for kind in ("llama", "unet"):
                sweep(kind, f"{folder / kind}.py:build", options.planted, folder)
            return
        bare, trial, ratio = cost_of_trial(f"{folder / 'big'}.py:build")
        print(f"bare forward {1e3 * bare:.1f} ms, trial {1e3 * trial:.1f} ms: {ratio:.2f} times\n", flush=True)
    probes.print_table(options.problems)


if __name__ == "__main__":
    main()
