"""Time a forward under capture beside the same forward without, on encoders of two sizes.

Each figure is the median over interleaved rounds of (that arm's seconds / the bare forward's seconds of its round); an
arm's time is that of a whole capture, from opening the trace to sealing it, over a loop of `--forwards` forwards. `open
and close` is what remains of it when the loop is empty. `plain write` stores the same bytes by plain file writes.

    python -m bench.capture [--rounds 7] [--forwards 4] [--shape small|base|both] [--peer-python PATH]

`--peer-python` names the interpreter of an environment that has torch and mindstudio-probe; its figures are taken on
the same encoder, a dump of one forward each, as its users run it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

from align.dumpers.statistics import warm_up
from align.dumpers.store import Trace
from align.dumpers.wire import Wire
from align.recording import capture

Arm = Callable[[], object]
TOKENS = 30_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers x width of an encoder, batch x length of its input, and the ratios the arms are to stay below."""

    name: str
    layers: int
    width: int
    batch: int
    length: int
    limits: dict[str, float]


SHAPES = {
    "small": Shape(
        "small",
        6,
        256,
        4,
        128,
        {
            "wire, modules": 1.15,
            "wire, calls": 1.15,
            "statistics, modules": 1.6,
            "statistics, calls": 2.5,
            "tensors, modules": 4.0,
        },
    ),
    "base": Shape(
        "BERT-base",
        12,
        768,
        8,
        128,
        {
            "wire, modules": 1.02,
            "wire, calls": 1.02,
            "statistics, modules": 1.1,
            "statistics, calls": 1.3,
            "tensors, modules": 1.5,
        },
    ),
}

PEER = """
import json, os, shutil, sys, tempfile, time
os.chdir(tempfile.mkdtemp())
import torch
from msprobe.pytorch import PrecisionDebugger
layers, width, batch, length, level, task, rounds = [json.loads(a) if a[0].isdigit() else a for a in sys.argv[1:8]]
from torch import nn
torch.manual_seed(0)
heads = max(4, width // 64)
layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, activation="gelu")
model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
torch.backends.mha.set_fastpath_enabled(False)
x = torch.randn(batch, length, width)
settings = {"task": task, "dump_path": "out", "rank": [], "step": [], "level": level}
settings[task] = {"scope": [], "list": [], "data_mode": ["all"]}
json.dump(settings, open("settings.json", "w"))
debugger = PrecisionDebugger(config_path="settings.json")
ratios = []
with torch.no_grad():
    model(x)
    for _ in range(rounds):
        start = time.perf_counter(); model(x); bare = time.perf_counter() - start
        start = time.perf_counter()
        debugger.start(model=model); model(x); debugger.stop(); debugger.step()
        ratios.append((time.perf_counter() - start) / bare)
        shutil.rmtree("out", ignore_errors=True)
print("RATIO", sorted(ratios)[len(ratios) // 2])
"""


def encoder(shape: Shape, attention: str) -> tuple[BertModel, torch.Tensor]:
    """A BERT of random weights and a batch for it."""
    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=max(4, shape.width // 64),
        intermediate_size=4 * shape.width,
        attn_implementation=attention,
    )
    return BertModel(config).eval(), torch.randint(0, TOKENS, (shape.batch, shape.length))


class Bench:
    """The arms: each runs the same loop of forwards, seen in its own way."""

    def __init__(self, shape: Shape, folder: Path, forwards: int, attention: str) -> None:
        self._model, self._ids = encoder(shape, attention)
        self._path = folder / "run.h5"
        self._forwards = forwards

    def bare(self) -> None:
        """The forwards alone, each of other tokens: content that is known already would cost less."""
        for number in range(self._forwards):
            self._model((self._ids + number) % TOKENS)

    def wire(self, *, sees_calls: bool) -> None:
        """The wire without taps."""
        with Wire({"": self._model}, (), sees_calls=sees_calls):
            self.bare()

    def captured(self, **options: Any) -> None:
        """A capture, from opening to sealing."""
        with capture(self._model, self._path, overwrite=True, **options):
            self.bare()

    def opened(self) -> None:
        """A capture of nothing."""
        with capture(self._model, self._path, overwrite=True):
            pass

    def written(self, contents: Sequence[bytes]) -> None:
        """The forwards, and then the bytes of a capture of tensors written plainly."""
        self.bare()
        with self._path.open("wb", buffering=0) as file:
            for content in contents:
                file.write(content)

    def contents(self) -> tuple[list[bytes], int]:
        """What a capture of tensors stores, identical content once, and how many nodes it has."""
        self.captured()
        with Trace.open(self._path) as trace:
            distinct = {record.digest: record.key for record in trace.nodes}
            return [trace.read(key).bits.tobytes() for key in distinct.values()], len(trace.nodes)

    def arms(self) -> dict[str, Arm]:
        """All arms by name, the bare one first."""
        contents, nodes = self.contents()
        print(
            f"  {nodes} module nodes, {sum(map(len, contents)) / 2**20:.1f} MiB of distinct content"
            f" in {self._forwards} forwards"
        )
        return {
            "bare": self.bare,
            "open and close": self.opened,
            "wire, modules": lambda: self.wire(sees_calls=False),
            "wire, calls": lambda: self.wire(sees_calls=True),
            "statistics, modules": lambda: self.captured(keep="stats"),
            "statistics, calls": lambda: self.captured(keep="stats", level="call"),
            "plain write": lambda: self.written(contents),
            "tensors, modules": self.captured,
            "tensors, calls": lambda: self.captured(level="call"),
        }


def timed(bare: Arm, arm: Arm, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of both in every round, one right after the other and in turns first; a first round does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            (bare, arm)[which]()
            if number:
                seconds[which].append(time.perf_counter() - started)
    return seconds


def show(shape: Shape, name: str, seconds: tuple[list[float], list[float]], forwards: int) -> None:
    """Print one arm's ratio, its limit, and what it adds to a forward."""
    ratio = statistics.median(mine / bare for bare, mine in zip(*seconds, strict=True))
    added = statistics.median(mine - bare for bare, mine in zip(*seconds, strict=True)) / forwards * 1e3
    if name == "open and close":
        print(f"  {name:22}{'':8}{'':8}{statistics.median(seconds[1]) * 1e3:17.1f} once", flush=True)
    else:
        print(f"  {name:22}{ratio:8.2f}{shape.limits.get(name, ''):>8}{added:22.1f}", flush=True)


def show_peer(python: str, shape: Shape, rounds: int) -> None:
    """Print the ratios of msprobe on an encoder of that shape."""
    for level, task, name in (
        ("L0", "statistics", "statistics, modules"),
        ("mix", "statistics", "statistics, calls"),
        ("L0", "tensor", "tensors, modules"),
    ):
        arguments = [shape.layers, shape.width, shape.batch, shape.length, level, task, rounds]
        done = subprocess.run([python, "-c", PEER, *map(str, arguments)], capture_output=True, text=True, check=False)
        found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("RATIO")]
        print(
            f"  msprobe {name:20}{float(found[0]):8.2f}"
            if found
            else f"  msprobe {name}: failed: {done.stderr.strip()[-200:]}"
        )


def main() -> None:
    """Run the bench and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--forwards", type=int, default=4)
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--peer-python", default="")
    options = parser.parse_args()
    warm_up()
    for name in SHAPES if options.shape == "both" else [options.shape]:
        shape = SHAPES[name]
        print(
            f"{shape.name}: {shape.layers} x {shape.width}, {shape.batch} x {shape.length} tokens,"
            f" {torch.get_num_threads()} threads"
        )
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            bench = Bench(shape, Path(folder), options.forwards, options.attention)
            arms = bench.arms()
            print(f"  {'':22}{'ratio':>8}{'limit':>8}{'ms added a forward':>22}")
            for arm, run in arms.items():
                seconds = timed(bench.bare, run, options.rounds)
                if arm == "bare":
                    print(f"  bare forward: {statistics.median(seconds[0]) / options.forwards * 1e3:.1f} ms")
                show(shape, arm, seconds, options.forwards)
        if options.peer_python:
            show_peer(options.peer_python, shape, options.rounds)


if __name__ == "__main__":
    main()
