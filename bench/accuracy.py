"""Compare our cosine distance and relative L2 with 50-digit arithmetic, beside torch, numpy and Polygraphy's formulas.

    python bench/accuracy.py

Each row is an input; each figure is the relative error of 1 - cos (or of relative L2) as that formula gives it.
Polygraphy's formulas are restated from its comparator, which sums in the tensor's own dtype (float16 as float32).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from align.compare.measures import measure_core  # noqa: E402
from align.dumpers.dtypes import RawTensor  # noqa: E402

Array = npt.NDArray[Any]
Figures = tuple[float, float]


def truth(c: Array, r: Array) -> tuple[Any, Any]:
    """1 - cos and relative L2 with 50 digits and more."""
    with mpmath.workdps(700 if c.dtype == np.float64 and np.abs(r).max() > 1e200 else 80):
        left, right = [mpmath.mpf(float(x)) for x in c], [mpmath.mpf(float(x)) for x in r]
        cc, rr = mpmath.fsum(x * x for x in left), mpmath.fsum(x * x for x in right)
        dot = mpmath.fsum(x * y for x, y in zip(left, right, strict=True))
        dd = mpmath.fsum((x - y) ** 2 for x, y in zip(left, right, strict=True))
        return 1 - dot / mpmath.sqrt(cc * rr), mpmath.sqrt(dd / rr)


def ours(c: Array, r: Array) -> Figures:
    """`align.compare.measures`."""
    found = measure_core(RawTensor(c, c.dtype.name), RawTensor(r, r.dtype.name))
    return found.cosine_distance, found.rel_l2


def by_torch(c: Array, r: Array) -> Figures:
    """torch.nn.functional.cosine_similarity and torch.linalg.norm in the tensors' dtype."""
    import torch

    left, right = torch.from_numpy(c), torch.from_numpy(r)
    cosine = torch.nn.functional.cosine_similarity(left, right, dim=0)
    return float(1 - cosine), float(torch.linalg.norm(left - right) / torch.linalg.norm(right))


def by_numpy(c: Array, r: Array) -> Figures:
    """The textbook quotient in the tensors' dtype."""
    norm = np.linalg.norm
    return float(1 - np.dot(c, r) / (norm(c) * norm(r))), float(norm(c - r) / norm(r))


def by_numpy_wide(c: Array, r: Array) -> Figures:
    """The textbook quotient in float64."""
    return by_numpy(c.astype(np.float64), r.astype(np.float64))


def by_polygraphy(c: Array, r: Array) -> Figures:
    """Polygraphy's CosineSimilarityCompareFunc (clamped to 1) and L2CompareFunc (here over the reference's norm)."""
    cosine = float(np.sum(c * r) / (np.sqrt(np.sum(np.power(c, 2))) * np.sqrt(np.sum(np.power(r, 2)))))
    distance = np.sqrt(np.sum(np.power(c - r, 2))) / np.sqrt(np.sum(np.power(r, 2)))
    return 1 - (cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))), float(distance)


def inputs() -> dict[str, tuple[Array, Array]]:
    """Inputs that formulas trip over."""
    rng = np.random.default_rng(0)
    r = rng.standard_normal(200_000).astype(np.float32)
    noise = rng.standard_normal(r.size).astype(np.float32)
    short, small = rng.standard_normal(2000), rng.standard_normal(2000)
    offset = r + np.float32(100)
    return {
        "rounded to bfloat16": ((r.view(np.uint32) & 0xFFFF0000).view(np.float32), r),
        "rounded to float16": (r.astype(np.float16).astype(np.float32), r),
        "error of 1e-7": (r * (1 + np.float32(1e-7) * noise), r),
        "one ulp in one place": (np.concatenate([[np.nextafter(r[0], np.float32(9))], r[1:]]).astype(np.float32), r),
        "mean of 100, error 1e-4": (offset + np.float32(1e-4) * noise, offset),
        "times 3, rounded": (r * np.float32(3), r),
        "times 1.001, error 1e-6": (r * np.float32(1.001) + np.float32(1e-6) * noise, r),
        "scale 1e-30": ((r + np.float32(1e-3) * noise) * np.float32(1e-30), r * np.float32(1e-30)),
        "scale 1e30": ((r + np.float32(1e-3) * noise) * np.float32(1e30), r * np.float32(1e30)),
        "float64, scale 1e300": ((short + 1e-6 * small) * 1e300, short * 1e300),
        "float64, scale 1e-300": ((short + 1e-6 * small) * 1e-300, short * 1e-300),
        "float64, error of 1e-12": (short + 1e-12 * small, short),
        "one huge value": (np.append(short + 1e-3 * small, 1e8), np.append(short, 1e8)),
        "orthogonal": (noise, r),
        "opposite": (-r, r),
    }


def shown(value: float, expected: Any) -> str:
    """Relative error, or what the formula gave instead of a number near it."""
    if not math.isfinite(value):
        return str(value)
    error = float(abs((value - expected) / expected)) if expected else abs(value)
    return "0" if error < 1e-17 else f"{error:.0e}"


def main() -> None:
    """Print both tables as Markdown."""
    warnings.simplefilter("ignore")
    formulas: dict[str, Callable[[Array, Array], Figures]] = {
        "ours": ours,
        "torch": by_torch,
        "numpy": by_numpy,
        "numpy float64": by_numpy_wide,
        "Polygraphy": by_polygraphy,
    }
    cases = {name: (pair, truth(*pair)) for name, pair in inputs().items()}
    for index, figure in enumerate(("1 - cos", "relative L2")):
        print(f"\n| input | {figure} | " + " | ".join(formulas) + " |")
        print("|---|---|" + "---|" * len(formulas))
        for name, (pair, expected) in cases.items():
            errors = [shown(formula(*pair)[index], expected[index]) for formula in formulas.values()]
            print(f"| {name} | {float(expected[index]):.6g} | " + " | ".join(errors) + " |")


if __name__ == "__main__":
    main()
