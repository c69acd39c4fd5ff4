"""Capture under torch.distributed: every process its own trace, of the same keys but for the rank."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import align
from align.dumpers.model import RunStatus
from align.dumpers.store import Trace
from align.recording import capture


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


WORLD = 4


def joined(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        for work in (forward_only, data_parallel, chosen_rank, one_fails):
            place = Path(folder) / work.__name__
            place.mkdir(exist_ok=True)
            dist.barrier()
            work(rank, place)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four processes have run all that is asked about below: starting them costs more than their work."""
    place = tmp_path_factory.mktemp("ranks")
    mp.spawn(joined, (str(place),), WORLD)
    return place


def forward_only(rank: int, folder: Path) -> None:
    for name, change in (("a", 0.0), ("b", 0.5 if rank == 1 else 0.0)):
        (folder / name).mkdir(exist_ok=True)
        dist.barrier()
        net = model()
        with torch.no_grad(), capture(net, folder / name / "run.h5"):
            net(torch.full((1, 4), float(rank)) + change)


def data_parallel(rank: int, folder: Path) -> None:
    net = nn.parallel.DistributedDataParallel(model())
    with capture(net, folder / "run.h5", grad=True):
        net(torch.full((1, 4), float(rank))).sum().backward()


def chosen_rank(rank: int, folder: Path) -> None:
    net = model()
    with capture(net, folder / "run.h5", ranks=(1,), keep="stats"):
        net(torch.ones(1, 4))


def one_fails(rank: int, folder: Path) -> None:
    net = model()
    try:
        with capture(net, folder / "run.h5"):
            net(torch.ones(1, 5 if rank == 1 else 4))
    except RuntimeError:
        assert rank == 1


def test_each_rank_writes_its_own_trace_and_folders_are_compared_rank_by_rank(folder: Path) -> None:
    place = folder / "forward_only"
    assert sorted(path.name for path in (place / "a").iterdir()) == [f"run.rank{rank}.h5" for rank in range(WORLD)]
    for rank in range(WORLD):
        with Trace.open(place / "a" / f"run.rank{rank}.h5") as trace:
            assert (trace.header.rank, trace.header.world_size) == (rank, WORLD)
            assert {record.key.rank for record in trace.nodes} == {rank}
            assert [record.key.call_name for record in trace.nodes] == [
                "0/forward#0",
                "1/forward#0",
                "2/forward#0",
                "/forward#0",
            ]
    nodes = align.compare(place / "b", place / "a").comparison.nodes
    assert {node.key.rank for node in nodes} == set(range(WORLD))
    assert {node.key.rank for node in nodes if node.candidate is not None and node.candidate.max_abs > 0} == {1}


def test_ranks_of_a_data_parallel_model_have_the_bare_models_keys(folder: Path, tmp_path: Path) -> None:
    net = model()
    with capture(net, tmp_path / "bare.h5", grad=True):
        net(torch.zeros(1, 4)).sum().backward()

    def keys(path: Path) -> list[tuple[str, str]]:
        with Trace.open(path) as trace:
            return sorted((record.key.call_name, record.key.slot) for record in trace.nodes)

    bare = keys(tmp_path / "bare.h5")
    assert len(bare) == 12
    paths = [folder / "data_parallel" / f"run.rank{rank}.h5" for rank in range(WORLD)]
    assert all(keys(path) == bare for path in paths)
    values = []
    for path in paths[:2]:
        with Trace.open(path) as trace:
            values.append(
                trace.read(
                    next(r.key for r in trace.nodes if r.key.call_name == "0/forward#0" and r.key.slot == "0")
                ).bits
            )
    assert not np.array_equal(*values)


def test_only_chosen_ranks_write(folder: Path) -> None:
    assert [path.name for path in (folder / "chosen_rank").iterdir()] == ["run.rank1.h5"]


def test_a_rank_that_fails_marks_its_own_trace_only(folder: Path) -> None:
    statuses = []
    for rank in range(WORLD):
        with Trace.open(folder / "one_fails" / f"run.rank{rank}.h5") as trace:
            statuses.append(trace.status)
    assert statuses == [RunStatus.COMPLETE, RunStatus.FAILED, RunStatus.COMPLETE, RunStatus.COMPLETE]


def test_outside_torch_distributed_the_launchers_variables_tell_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert capture(model(), tmp_path / "run.h5").path == tmp_path / "run.rank1.h5"
