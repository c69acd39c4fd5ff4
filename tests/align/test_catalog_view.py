"""What `align ops` says of operators and sites, and where it doubts that fusing pays."""

from align.catalog_view import catalog_rows, doubt_of, site_rows
from align.dumpers.choice import Site
from align.dumpers.model import OpClass
from align.operators.base import Match
from align.operators.registry import catalog
from align.plan import PlannedSite


def planned(*ops: str, nbytes: int = 0) -> PlannedSite:
    operator = catalog()[0]
    calls = tuple(("", op, index) for index, op in enumerate(ops))
    site = Site("attention", tuple(f"/{op}#{i}" for _, op, i in calls), OpClass.SENSITIVE, False, nbytes)
    return PlannedSite(site, Match(operator, calls, {}), None, "")


def test_a_site_is_doubted_for_a_large_interior_or_a_change_of_layout() -> None:
    assert doubt_of(planned("matmul", "softmax", "matmul", nbytes=1 << 20)) == ""
    assert "on-chip" in doubt_of(planned("matmul", "softmax", "matmul", nbytes=1 << 30))
    assert "contiguous" in doubt_of(planned("matmul", "contiguous", "matmul"))
    assert doubt_of(planned("matmul", "contiguous")) == ""  # the last call's own layout is the result's


def test_operators_are_told_by_what_they_are_and_not_by_one_call_of_a_vendor() -> None:
    rows = {row.name: row for row in catalog_rows(())}
    for name in ("rms_norm", "swiglu", "rotary", "quant_linear", "geglu"):
        assert not rows[name].summary.startswith("torch_npu.")
    assert rows["attention"].kernels == ("npu", "cuda", "cpu")


def test_sites_of_a_workload_are_counted_and_say_what_fusing_saves(tiny: str) -> None:
    sites = site_rows(tiny, "cpu", "float32")
    by_operator = {site.operator: site for site in sites}
    assert by_operator["conv_bn_act_add"].interior_nbytes == 2 * (2 * 8 * 6 * 6 * 4)
    rows = {row.name: row.sites for row in catalog_rows(sites)}
    assert rows["attention"] == 1
    assert rows["linear_act"] == 1
