"""Time the measures: in memory against this machine's own reading speed, from files against other tools.

    python bench/compare.py [--quick] [--peer-python ENV/bin/python] [--folder FOLDER] [--only memory,small,...]

Peers need an environment of their own (`pip install torch mindstudio-probe polygraphy`); without one our figures are
printed alone. Everything compared is the same bytes; runs are interleaved; medians, and ratios, are printed.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from align.compare.detail import detail  # noqa: E402
from align.compare.engine import Pair, available_cores  # noqa: E402
from align.compare.measures import Depth, measure, measure_chunks, measure_core  # noqa: E402
from align.dumpers.dtypes import RawTensor  # noqa: E402

LARGE = 1 << 24
WINDOW = 1 << 22  # elements mapped at a time: what bounds the memory of a pair of any size

MAKE_DUMP = """
import json, pathlib, shutil, sys
import numpy, torch
from msprobe.pytorch import PrecisionDebugger, seed_all
out, noise, n, size, dtype = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
shutil.rmtree(out, ignore_errors=True)
config = {"task": "tensor", "dump_path": out, "rank": [], "step": [], "level": "L0",
          "tensor": {"scope": [], "list": [], "data_mode": ["all"]}}
pathlib.Path(out + ".json").write_text(json.dumps(config))
seed_all(1234)
class Shift(torch.nn.Module):
    def forward(self, x):
        return (x * 1.0001 + noise * torch.randn_like(x)).to(x.dtype)
model = torch.nn.Sequential(*[Shift() for _ in range(n)])
x = torch.randn(size).to(getattr(torch, dtype))
debugger = PrecisionDebugger(config_path=out + ".json")
with torch.no_grad():
    debugger.start(model=model); model(x); debugger.stop(); debugger.step()
plain = pathlib.Path(out + "_npy"); shutil.rmtree(plain, ignore_errors=True); plain.mkdir()
for path in sorted(pathlib.Path(out).rglob("*.pt")):
    if not path.name.startswith("Module.module."):
        numpy.save(plain / (path.stem + ".npy"), torch.load(path).numpy())
"""

TIME_POLYGRAPHY = """
import sys, time
import numpy as np
import polygraphy.comparator as pc
from polygraphy.comparator import CompareFunc, Comparator, RunResults
from polygraphy.logger import G_LOGGER
G_LOGGER.module_severity = G_LOGGER.CRITICAL
results = RunResults()
results.add([{"x": np.load(sys.argv[1])}], runner_name="a")
results.add([{"x": np.load(sys.argv[2])}], runner_name="b")
compare = (getattr(pc, "SimpleCompareFunc", None) or CompareFunc.simple)(atol=1e-2, rtol=1e-2, check_error_stat="max")
seconds = []
for _ in range(7):
    start = time.perf_counter()
    Comparator.compare_accuracy(results, compare_func=compare)
    seconds.append(time.perf_counter() - start)
print(sorted(seconds)[3])
"""


def pair_of(count: int, dtype: str) -> tuple[RawTensor, RawTensor]:
    """Random normal values, and the same with an error of a thousandth."""
    rng = np.random.default_rng(0)
    r = rng.standard_normal(count, dtype=np.float32)
    c = r + np.float32(1e-3) * rng.standard_normal(count, dtype=np.float32)
    if dtype == "bfloat16":
        return tuple(RawTensor((x.view(np.uint32) >> 16).astype(np.uint16), dtype) for x in (c, r))  # type: ignore[return-value]
    return RawTensor(c.astype(dtype), dtype), RawTensor(r.astype(dtype), dtype)


def interleaved(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each work, run in turns so that a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def reader(candidate: RawTensor, reference: RawTensor) -> Callable[[], Any]:
    """One pass over both tensors that does next to nothing with them: what this machine can read, on all cores."""
    from concurrent.futures import ThreadPoolExecutor

    from numba import njit

    @njit(nogil=True, fastmath=True)
    def touch(c: Any, r: Any) -> Any:
        a, b = np.float32(0), np.float32(0)
        for i in range(c.size):
            a += c[i]
            b += r[i]
        return a + b

    c, r = candidate.bits.view(np.float32), reference.bits.view(np.float32)
    pool, edges = ThreadPoolExecutor(), np.linspace(0, c.size, available_cores() + 1).astype(int)
    spans = list(itertools.pairwise(edges))
    return lambda: list(pool.map(lambda span: touch(c[span[0] : span[1]], r[span[0] : span[1]]), spans))


def bench_memory(options: argparse.Namespace) -> None:
    """In memory: GB/s of each dtype beside the machine's one-pass reading speed."""
    count = LARGE // 4 if options.quick else LARGE
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        c, r = pair_of(count, dtype)
        nbytes = c.bits.nbytes + r.bits.nbytes
        c, r = (RawTensor(x.bits.reshape(64, -1, 512), dtype) for x in (c, r))
        works = {
            "read": reader(RawTensor(c.bits.reshape(-1), dtype), RawTensor(r.bits.reshape(-1), dtype)),
            "core": lambda c=c, r=r: measure_core(c, r),
            "all": lambda c=c, r=r: measure(c, r),
            "detail": lambda c=c, r=r: detail(c, r),
        }
        found = interleaved(works, 7 if options.quick else 15)
        print(f"memory {dtype:9} {count} elements a side, {available_cores()} cores")
        for name, seconds in found.items():
            share = found["read"] / seconds
            print(f"  {name:7} {seconds * 1e3:8.2f} ms {nbytes / seconds / 1e9:7.2f} GB/s   {share:5.2f} of reading")


def bench_small(options: argparse.Namespace) -> None:
    """Microseconds a small pair, and 256K float32 against Polygraphy's comparator."""
    for count in (1, 4096, 1 << 18):
        c, r = pair_of(count, "float32")
        works = {"core": lambda c=c, r=r: measure_core(c, r), "all": lambda c=c, r=r: measure(c, r),
                 "detail": lambda c=c, r=r: detail(c, r)}  # fmt: skip
        found = interleaved(works, 200)
        print(f"small {count:7} elements: " + "  ".join(f"{name} {s * 1e6:.0f} us" for name, s in found.items()))
    if options.peer_python:
        for name, tensor in zip("cr", (c, r), strict=True):
            np.save(options.folder / f"{name}.npy", tensor.bits)
        files = [str(options.folder / f"{name}.npy") for name in "cr"]
        theirs = float(run([options.peer_python, "-c", TIME_POLYGRAPHY, *files]).split()[-1])
        print(f"small 256K against Polygraphy's {theirs * 1e3:.1f} ms: core {theirs / found['core']:.0f}x", end=" ")
        print(f"all {theirs / found['all']:.0f}x")


def windows(candidate: Path, reference: Path) -> Iterator[tuple[Any, Any]]:
    """Both arrays through short-lived maps of their files: no copy, and memory bounded by two windows."""
    heads = [np.load(path, mmap_mode="r") for path in (candidate, reference)]
    for low in range(0, heads[0].size, WINDOW):
        size = min(WINDOW, heads[0].size - low)
        yield tuple(
            np.memmap(path, head.dtype, "r", head.offset + low * head.itemsize, (size,))
            for path, head in zip((candidate, reference), heads, strict=True)
        )  # type: ignore[misc]


def measure_folders(candidate: Path, reference: Path, depth: str) -> int:
    """Measure every pair of .npy files of two folders; how many."""
    count = 0
    for path in sorted(candidate.glob("*.npy")):
        other, is_all = reference / path.name, depth != "core"
        if path.stat().st_size < 1 << 22:
            c, r = (RawTensor(array, array.dtype.name) for array in (np.load(path), np.load(other)))
            (measure if is_all else measure_core)(c, r)
            if depth == "detail":
                detail(c, r)
        elif depth == "detail":
            c, r = (RawTensor(array, array.dtype.name) for array in (np.load(p, mmap_mode="r") for p in (path, other)))
            measure(c, r)
            detail(c, r)
        else:
            head = np.load(path, mmap_mode="r")
            pair = Pair(head.shape, head.dtype.name, head.dtype.name)
            measure_chunks(windows(path, other), pair, depth=Depth.ALL if is_all else Depth.CORE)
        count += 1
    return count


def run(command: list[str]) -> str:
    """Run a command; its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def clock(command: list[str]) -> float:
    """Seconds of a whole process."""
    start = time.perf_counter()
    run(command)
    return time.perf_counter() - start


def make_folders(options: argparse.Namespace, dtype: str, modules: int, size: int) -> tuple[Path, Path]:
    """Two dumps by msprobe with their tensors as .npy beside them; without a peer, only the .npy."""
    folders = []
    for name, noise in (("a", "0"), ("b", "1e-3")):
        dump = options.folder / f"{name}_{dtype}_{size}"
        if options.peer_python:
            run([options.peer_python, "-c", MAKE_DUMP, str(dump), noise, str(modules), str(size), dtype])
        else:
            plain = Path(f"{dump}_npy")
            plain.mkdir()
            for index in range(2 * modules):
                np.save(plain / f"{index:05}.npy", pair_of(size, dtype)[name == "b"].bits)
        folders.append(dump)
    return folders[0], folders[1]


def bench_files(options: argparse.Namespace) -> None:
    """Whole process from files against `msprobe compare` on the same tensors."""
    cases = [("float32", 20, LARGE), ("float16", 20, LARGE), ("float32", 5000, 4096)]
    if options.quick:
        cases = [("float32", 4, LARGE // 4), ("float16", 4, LARGE // 4), ("float32", 200, 4096)]
    for dtype, modules, size in (cases[int(index)] for index in options.cases):
        a, b = make_folders(options, dtype, modules, size)
        ours: dict[str, list[float]] = {depth: [] for depth in ("core", "all", "detail")}
        theirs: list[float] = []
        for turn in range(3):
            for depth, seconds in ours.items():
                seconds.append(clock([sys.executable, __file__, "--measure", f"{a}_npy", f"{b}_npy", "--depth", depth]))
            if options.peer_python and turn < options.peer_rounds:
                theirs.append(clock(peer_compare(options, a, b)))
        report_files(dtype, len(list(Path(f"{a}_npy").glob("*.npy"))), size, ours, theirs)
        for path in options.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def peer_compare(options: argparse.Namespace, a: Path, b: Path) -> list[str]:
    """The command that has msprobe compare two of its dumps."""
    dumps = [str(next(folder.glob("step*/proc*/dump.json"))) for folder in (a, b)]
    tool = str(Path(options.peer_python).parent / "msprobe")
    return [tool, "compare", "-tp", dumps[0], "-gp", dumps[1], "-o", str(options.folder / "out")]


def report_files(dtype: str, pairs: int, size: int, ours: dict[str, list[float]], theirs: list[float]) -> None:
    """One block of the table of whole processes."""
    print(f"files {dtype} {pairs} pairs of {size}")
    for depth, seconds in ours.items():
        middle = statistics.median(seconds)
        factor = f"   {statistics.median(theirs) / middle:.1f}x" if theirs else ""
        print(f"  ours {depth:7} {middle:8.2f} s  {middle / pairs * 1e6:10.0f} us a pair{factor}")
    if theirs:
        print(f"  msprobe compare {statistics.median(theirs):6.2f} s")


def bench_peak(options: argparse.Namespace) -> None:
    """Peak memory of a process that measures one pair far larger than memory should be."""
    count = (1 << 28) if options.quick else 10 * (1 << 28)  # 10 GiB a side; files with holes, so the disk stays empty
    for name in "cr":
        np.lib.format.open_memmap(options.folder / f"{name}.npy", "w+", np.float32, (count,))
    out = run([sys.executable, __file__, "--peak", str(options.folder / "c.npy"), str(options.folder / "r.npy")])
    print(f"peak {count * 4 / 2**30:.0f} GiB a side: {out.strip()}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--cases", default="012", help="which of the file cases: large float32, large float16, small")
    parser.add_argument("--only", default="memory,small,files,peak")
    parser.add_argument("--measure", nargs=2, type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--depth", default="core", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    options = parse()
    if options.measure:
        print(measure_folders(*options.measure, options.depth))
        return
    if options.peak:
        head = np.load(options.peak[0], mmap_mode="r")
        start = time.perf_counter()
        measure_chunks(windows(*options.peak), Pair(head.shape, "float32", "float32"))
        seconds = time.perf_counter() - start
        print(f"{seconds:.1f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB peak")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.folder = Path(folder)
        for name in options.only.split(","):
            {"memory": bench_memory, "small": bench_small, "files": bench_files, "peak": bench_peak}[name](options)


if __name__ == "__main__":
    main()
