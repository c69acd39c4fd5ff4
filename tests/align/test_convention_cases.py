"""Conventions and precisions that people got wrong: the run is at fault, and drift begins at the line that does it."""

from pathlib import Path

import pytest
import torch

import align
from align.compare.model import Status
from align.reports.model import RunReport

TARGETS = Path(__file__).with_name("convention_targets.py")


def run(target: str, folder: Path, **options: object) -> RunReport:
    return align.run(f"{TARGETS}:{target}", device="cpu", enabled=False, out=folder / "run", **options)


@pytest.mark.parametrize(
    ("case", "status", "origin"),
    [
        ("mask_polarity", Status.DRIFT, "attend/scaled_dot_product_attention#0"),
        ("averaged", Status.DRIFT, "attend/forward#0"),
        ("hidden_row", Status.NONFINITE, "attend/forward#0"),
        ("squares", Status.NONFINITE, "1/pow#0"),
        ("late_scale", Status.NONFINITE, "scores/matmul#0"),
        ("gelu_form", Status.DRIFT, "3/gelu#0"),
        ("rope_table", Status.DRIFT, "table/cos#0"),
        ("statistics", Status.DRIFT, "1/batch_norm#0"),
        ("least_number", Status.NONFINITE, "hide/masked_fill#0"),
    ],
)
def test_a_broken_convention_is_a_fault_that_begins_where_it_is_broken(
    case: str, status: Status, origin: str, tmp_path: Path
) -> None:
    report = run(case, tmp_path, dtype="as-built", candidate=f"{TARGETS}:{case}_fused")
    assert report.judgement.status is status, report.judgement.why
    assert origin in [key.call_name for key in report.judgement.origins]


@pytest.mark.parametrize("case", ["mask_polarity", "squares", "gelu_form", "rope_table", "statistics", "products"])
def test_the_same_workload_beside_itself_passes(case: str, tmp_path: Path) -> None:
    report = run(case, tmp_path, dtype="as-built")
    assert report.judgement.status is Status.PASS, report.judgement.why


def _has_low_products() -> bool:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    torch.set_float32_matmul_precision("medium")
    try:
        low = x @ x.T
    finally:
        torch.set_float32_matmul_precision("highest")
    exact = x.double() @ x.double().T
    return bool((low.double() - exact).norm() > 1e-4 * exact.norm())


@pytest.mark.skipif(not _has_low_products(), reason="this CPU has no bfloat16 products for float32")
def test_float32_products_in_bfloat16_are_seen_though_every_dtype_says_float32(tmp_path: Path) -> None:
    flags = ("cpu.float32_matmul_precision=medium",)
    report = run("products", tmp_path, dtype="float32", flags=flags)
    assert report.judgement.status is Status.DRIFT
    assert report.judgement.origins[0].call_name == "0/linear#0"
    assert dict(report.environment)["cpu.float32_matmul_precision"] == "medium"
    assert torch.get_float32_matmul_precision() == "highest"


def test_bisect_blames_the_flag_and_not_the_fusions(tmp_path: Path) -> None:
    if not _has_low_products():
        pytest.skip("this CPU has no bfloat16 products for float32")
    done = align.bisect(
        f"{TARGETS}:products", device="cpu", dtype="float32", flags=("cpu.float32_matmul_precision=medium",),
        out=tmp_path / "b",
    )  # fmt: skip
    blamed = [str(choice) for card in done.result.cards for choice in card.choices]
    assert blamed == ["flag:cpu.float32_matmul_precision=medium"]
