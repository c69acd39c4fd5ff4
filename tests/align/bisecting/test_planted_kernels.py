"""A fused operator replaced by a subtly wrong kernel at one site of a real model: the site is named, and nobody else.

`python -m bench.bisect --planted 20` does this for every operator and fault with twenty seeds.
"""

from pathlib import Path

import pytest

from align.bisecting.bisection import Bisection, BisectOptions, Fault, rank
from align.bisecting.journal import Journal
from align.bisecting.question import choice_question
from align.bisecting.trial import Criterion, Trials
from align.bisecting.workers import Here
from align.compare.policy import policy_named
from align.compare.search import Outcome
from align.compare.search import Status as Found
from align.session import Session
from align.settings import RunSettings
from bench.bisect import UNET, small_llama
from bench.planted import FAULTS, Plant, planted

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("diffusers", reason="diffusers is not installed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama") / "llama.py"
    path.write_text(small_llama(), encoding="utf-8")
    return f"{path}:build"


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("unet") / "unet.py"
    path.write_text(UNET, encoding="utf-8")
    return f"{path}:build"


def search(target: str, plant: Plant, folder: Path) -> tuple[frozenset[str], Outcome]:
    """Plant and search; the guilty choices and the outcome."""
    with planted(plant) as guilty:
        session = Session(RunSettings(target=target, device="cpu", seed=plant.seed))
        trials = Trials(session, Criterion(policy_named("cann-l1")))
        trials.prepare(session.baseline_plan())
        question = choice_question(session)
        options = BisectOptions(repeats=1, audits=2)
        bisection = Bisection(
            session, question, Here(trials), Journal(folder / "journal", ""), options, lambda *_: None
        )
        return frozenset(guilty), bisection.search(rank(session, question), Fault.DRIFT)


LLAMA = [
    ("attention", "missing scale"), ("attention", "mask polarity"), ("attention", "tail columns"),
    ("rms_norm", "wrong eps"), ("rms_norm", "narrow sums"), ("add_rms_norm", "wrong eps"),
    ("add_rms_norm", "tail columns"), ("rotary", "tail columns"), ("rotary", "missing scale"),
    ("linear_act", "missing scale"), ("linear_act", "tail columns"),
]  # fmt: skip
UNETS = [
    ("group_norm_silu", "wrong eps"), ("group_norm_silu", "tail columns"), ("resize_conv", "tail columns"),
    ("resize_conv", "narrow sums"), ("layer_norm", "wrong eps"), ("attention", "tail columns"),
    ("geglu", "missing scale"), ("linear_act", "missing scale"),
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("operator", "fault"), LLAMA)
def test_the_faulty_kernel_of_a_llama_is_named(
    llama: str, tmp_path: Path, operator: str, fault: str, seed: int
) -> None:
    guilty, outcome = search(llama, Plant({operator: fault}, seed), tmp_path)
    assert outcome.culprits == (guilty,)
    assert outcome.probes <= 8


@pytest.mark.parametrize(("operator", "fault"), UNETS)
def test_the_faulty_kernel_of_a_unet_is_named(unet: str, tmp_path: Path, operator: str, fault: str) -> None:
    guilty, outcome = search(unet, Plant({operator: fault}), tmp_path)
    assert outcome.culprits == (guilty,)


@pytest.mark.parametrize("seed", [0, 1])
def test_two_faulty_kernels_at_once_are_both_named(llama: str, tmp_path: Path, seed: int) -> None:
    plant = Plant({"attention": "tail columns", "add_rms_norm": "wrong eps"}, seed)
    guilty, outcome = search(llama, plant, tmp_path)
    assert len(guilty) == 2
    assert set(outcome.culprits) == {frozenset({choice}) for choice in guilty}


def test_right_kernels_are_not_blamed(llama: str, unet: str, tmp_path: Path) -> None:
    for target in (llama, unet):
        _, outcome = search(target, Plant({}), tmp_path)
        assert outcome.status is Found.NO_CULPRIT


def test_each_fault_is_planted_somewhere_here() -> None:
    assert {fault for _, fault in (*LLAMA, *UNETS)} == {fault.name for fault in FAULTS}


def test_an_unranked_search_names_the_same_site(llama: str, tmp_path: Path) -> None:
    with planted(Plant({"attention": "missing scale"})) as guilty:
        session = Session(RunSettings(target=llama, device="cpu"))
        trials = Trials(session, Criterion(policy_named("cann-l1")))
        trials.prepare(session.baseline_plan())
        bisection = Bisection(
            session,
            choice_question(session),
            Here(trials),
            Journal(tmp_path / "journal", ""),
            BisectOptions(repeats=0),
            lambda *_: None,
        )
        outcome = bisection.search({}, Fault.DRIFT)
    assert outcome.culprits == (frozenset(guilty),)
