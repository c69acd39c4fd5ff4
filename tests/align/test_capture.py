import gc
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import align
from align.dumpers.errors import TraceBusyError, TraceError, UsageError
from align.dumpers.model import NodeKey, RunStatus, Storage
from align.dumpers.store import Trace
from align.dumpers.writer import BackgroundWriter
from align.recording import capture, largest_root, roots_of

ROOT = Path(__file__).parents[2]


def chain(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)).eval()


def keys_of(path: Path) -> list[str]:
    with Trace.open(path) as trace:
        return [str(record.key) for record in trace.nodes]


def notes_of(path: Path) -> str:
    with Trace.open(path) as trace:
        return trace.document("notes")


def test_it_is_reached_as_align_capture_and_the_trace_holds_the_values(tmp_path: Path) -> None:
    model, x = chain(), torch.ones(1, 4)
    with torch.no_grad(), align.capture(model, tmp_path / "run.h5") as running:
        result = model(x)
    assert running.path == tmp_path / "run.h5"
    with Trace.open(running.path) as trace:
        assert trace.status is RunStatus.COMPLETE
        assert (trace.header.workload, trace.header.role, trace.header.dtype, trace.header.level) == (
            "Sequential",
            "capture",
            "float32",
            "module",
        )
        assert np.array_equal(trace.read(NodeKey("", "forward")).bits, result.numpy())
        assert dict(trace.header.environment)["torch"] == torch.__version__
    assert running.notes == ()


def test_modules_by_name_and_pipelines_and_objects_with_modules_are_understood() -> None:
    unet, vae = nn.Linear(1, 1), nn.Linear(9, 9)
    assert roots_of(unet) == {"": unet}
    assert roots_of({"unet": unet, "scheduler": object()}) == {"unet": unet}
    assert roots_of(SimpleNamespace(components={"unet": unet, "vae": vae, "x": 1})) == {"unet": unet, "vae": vae}
    assert roots_of(SimpleNamespace(model=unet, tokenizer="t")) == {"model": unet}
    with pytest.raises(UsageError, match="holds no torch modules"):
        roots_of("text")


def test_steps_are_counted_by_the_module_that_does_them() -> None:
    small, large = nn.Linear(1, 1), nn.Linear(9, 9)
    assert largest_root({"a": small, "b": large}) == "b"
    assert largest_root({"unet": small, "text_encoder": large}) == "unet"


def test_a_step_module_can_be_named(tmp_path: Path) -> None:
    parts = {"a": nn.Linear(1, 1), "b": nn.Linear(9, 9)}
    with capture(parts, tmp_path / "t.h5", step_module="a"):
        parts["a"](torch.ones(1))
        parts["a"](torch.ones(1))
        parts["b"](torch.ones(9))
    assert keys_of(tmp_path / "t.h5") == ["a/forward#0:0", "a/forward#0:0@1", "b/forward#0:0@1"]
    with pytest.raises(UsageError, match="no module 'c'"):
        capture(parts, tmp_path / "u.h5", step_module="c")


def test_every_further_call_of_the_model_is_a_step_and_steps_can_be_chosen(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "t.h5", steps=(0, 2), include=("2",)) as running:
        for _ in range(2):
            model(torch.ones(1, 4))
        running.step()
        model(torch.ones(1, 4))
    assert keys_of(tmp_path / "t.h5") == ["2/forward#0:0", "2/forward#0:0@2"]


def test_a_rank_that_is_not_chosen_writes_nothing_and_changes_nothing(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "t.h5", ranks=(1,)) as running:
        assert "forward" not in vars(model)
        running.step()
    assert not running.path.exists()
    with capture(model, tmp_path / "t.h5", ranks=(0, 1)):
        model(torch.ones(1, 4))
    assert len(keys_of(tmp_path / "t.h5")) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": "modules"}, "unknown level 'modules'"),
        ({"keep": "all"}, "unknown keep 'all'"),
        ({"include": "unet.*"}, r"write include=\('unet.\*',\)"),
        ({"compression": "lzma"}, "unknown compression"),
    ],
)
def test_wrong_use_is_told_in_two_lines_and_leaves_the_model_alone(tmp_path: Path, options: Any, text: str) -> None:
    model = chain()
    with pytest.raises(UsageError, match=text), capture(model, tmp_path / "t.h5", **options):
        raise AssertionError
    assert "forward" not in vars(model)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error_before_the_model_is_touched(tmp_path: Path) -> None:
    model = chain()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "t.h5", tmp_path / "missing" / "t.h5"):
        with pytest.raises(TraceError), capture(model, path):
            raise AssertionError
    assert "forward" not in vars(model)


def test_a_second_writer_of_one_path_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "t.h5"):
        with pytest.raises(TraceBusyError), capture(model, tmp_path / "t.h5", overwrite=True):
            raise AssertionError
        model(torch.ones(1, 4))
    assert len(keys_of(tmp_path / "t.h5")) == 4


def test_an_existing_trace_is_kept_unless_told_and_a_capture_is_used_once(tmp_path: Path) -> None:
    model = chain()
    running = capture(model, tmp_path / "t.h5")
    with running:
        pass
    with pytest.raises(UsageError, match="used before"), running:
        pass
    with pytest.raises(TraceError), capture(model, tmp_path / "t.h5"):
        raise AssertionError
    with capture(model, tmp_path / "t.h5", overwrite=True):
        model(torch.ones(1, 4))
    assert len(keys_of(tmp_path / "t.h5")) == 4


def test_two_captures_of_one_model_can_be_nested(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "a.h5"), capture(model, tmp_path / "b.h5", level="both"):
        model(torch.ones(1, 4))
    assert len(keys_of(tmp_path / "a.h5")) == 4
    assert len(keys_of(tmp_path / "b.h5")) == 7
    assert "forward" not in vars(model)


def test_ctrl_c_marks_the_trace_as_interrupted(tmp_path: Path) -> None:
    model = chain()

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model.append(nn.Identity())
    model[3].forward = interrupted
    with pytest.raises(KeyboardInterrupt), capture(model, tmp_path / "t.h5"):
        model(torch.ones(1, 4))
    with Trace.open(tmp_path / "t.h5") as trace:
        assert trace.status is RunStatus.INTERRUPTED
        assert len(trace.nodes) == 3


SIGTERM_SCRIPT = """
import sys, torch, align
model = torch.nn.Linear(4, 4)
with align.capture(model, sys.argv[1]):
    while True:
        try:
            model(torch.ones(1, 4))
            print("step", flush=True)
        except Exception:
            pass
"""


def test_sigterm_closes_the_trace_as_interrupted_and_ends_the_process_as_it_would_without_us(tmp_path: Path) -> None:
    script = [sys.executable, "-c", SIGTERM_SCRIPT, str(tmp_path / "t.h5")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    with Trace.open(tmp_path / "t.h5") as trace:
        assert trace.status is RunStatus.INTERRUPTED
        assert len(trace.nodes) >= 3


def test_a_programs_own_handler_of_sigterm_stays_in_charge(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        model = chain()
        with capture(model, tmp_path / "t.h5"):
            signal.raise_signal(signal.SIGTERM)
            model(torch.ones(1, 4))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    with Trace.open(tmp_path / "t.h5") as trace:
        assert trace.status is RunStatus.COMPLETE


def test_the_signal_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with capture(chain(), tmp_path / "t.h5"):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_works_in_a_thread_and_for_a_model_called_in_one(tmp_path: Path) -> None:
    model, errors = chain(), []

    def work() -> None:
        try:
            with capture(model, tmp_path / "inside.h5", level="both"):
                model(torch.ones(1, 4))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with capture(model, tmp_path / "outside.h5", level="both"):
        thread = threading.Thread(target=lambda: model(torch.ones(1, 4)))
        thread.start()
        thread.join()
    assert errors == []
    assert keys_of(tmp_path / "inside.h5") == keys_of(tmp_path / "outside.h5")
    assert len(keys_of(tmp_path / "inside.h5")) == 7


def test_an_error_of_the_writer_is_raised_but_never_in_place_of_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise TraceError("disk full", "make room")

    monkeypatch.setattr(BackgroundWriter, "drain", full)
    model = chain()
    with pytest.raises(TraceError, match="disk full"), capture(model, tmp_path / "a.h5"):
        model(torch.ones(1, 4))
    with pytest.raises(ValueError, match="mine"), capture(model, tmp_path / "b.h5"):
        raise ValueError("mine")
    assert "forward" not in vars(model)


def test_a_budget_keeps_small_tensors_and_degrades_the_large_and_says_so(tmp_path: Path) -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow = nn.ModuleList(nn.Identity() for _ in range(40))

        def forward(self, x: torch.Tensor) -> None:
            for number, module in enumerate(self.grow):
                module(torch.full((1000 if number % 4 == 3 else 10,), float(number)))

    model = Sizes()
    with capture(model, tmp_path / "t.h5", max_bytes=10_000) as running:
        model(torch.ones(1))
    with Trace.open(tmp_path / "t.h5") as trace:
        kept = [record for record in trace.nodes if record.storage is Storage.TENSOR]
        degraded = [record for record in trace.nodes if record.storage is Storage.STATISTICS]
    assert sum(record.nbytes for record in kept) <= 10_000
    assert sum(record.shape == (10,) for record in kept) == 30
    assert sum(record.shape == (1000,) for record in kept) == 1
    assert {(record.shape, record.note) for record in degraded} == {((1000,), "over the byte budget")}
    assert all(record.statistics is not None and record.statistics.count == 1000 for record in degraded)
    assert "9 tensors, the largest of 4000 bytes, were kept as statistics only" in running.notes[0]
    assert "9 tensors" in notes_of(tmp_path / "t.h5")


def test_a_sample_is_the_same_positions_in_every_run_beside_exact_statistics(tmp_path: Path) -> None:
    x = torch.arange(100_000.0)
    for name in ("a", "b"):
        model = nn.Identity()
        with capture(model, tmp_path / f"{name}.h5", keep="sample"):
            model(x if name == "a" else x + 1)
    with Trace.open(tmp_path / "a.h5") as one, Trace.open(tmp_path / "b.h5") as two:
        key = NodeKey("", "forward")
        assert np.array_equal(one.read(key).bits + 1, two.read(key).bits)
        statistics = one.record(key).statistics
        assert statistics is not None
        assert (statistics.count, statistics.maximum) == (100_000, 99_999.0)


def test_identical_statistics_are_found_again_for_identical_content_only(tmp_path: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a(x)
            self.b(x)
            x.data.numpy()[0] = 100.0  # no version counter sees this
            return self.c(x)

    model = Writes()
    with capture(model, tmp_path / "t.h5", keep="stats"):
        model(torch.ones(4))
    with Trace.open(tmp_path / "t.h5") as trace:
        found = [record.statistics.maximum for record in trace.nodes if record.statistics]
        digests = [record.digest for record in trace.nodes]
    assert found == [1.0, 1.0, 100.0, 100.0]
    assert len(set(digests)) == 2


def test_memory_is_bounded_by_the_queue_and_not_by_the_model(tmp_path: Path) -> None:
    script = f"""
import resource, sys, torch
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_capture import *
model = type("M", (torch.nn.Module,), {{}})()
parts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(60))
def run(x, **options):
    with capture(parts, sys.argv[1], overwrite=True, **options):
        for part in parts:
            x = part(x + 1)
run(torch.zeros(16), queue_bytes=2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(torch.zeros(2**21), queue_bytes=2**24)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "t.h5")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    grown_mib = int(done.stdout)
    assert (tmp_path / "t.h5").stat().st_size > 60 * 8 * 2**20
    assert grown_mib < 200  # of the 480 MiB that went through: x, x + 1, a queue of 16, and buffers of the pool


def test_a_capture_that_is_over_keeps_nothing_of_the_model_alive(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "t.h5", level="both") as running:
        gone = weakref.ref(model(torch.ones(1, 4)))
    gc.collect()
    assert gone() is None
    assert running.notes == ()


def test_nothing_is_left_on_the_model_its_tensors_or_torch(tmp_path: Path) -> None:
    model = chain()
    model.register_buffer("total", torch.zeros(2))
    model.register_forward_hook(lambda module, args, output: module.total.add_(output.detach().sum()) is None or None)
    before = [dict(vars(module)) for module in model.modules()]
    with capture(model, tmp_path / "t.h5", level="both", inputs=True, grad=True):
        result = model(torch.ones(1, 4))
        result.sum().backward()
    assert [dict(vars(module)) for module in model.modules()] == before
    for tensor in (result, *model.parameters(), *model.buffers()):
        assert vars(tensor) == {}
    assert [parameter._backward_hooks for parameter in model.parameters()] == [None] * 4
    assert torch.overrides._get_current_function_mode() is None


def test_gradients_and_inputs_are_recorded_on_request(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "t.h5", include=("2",), inputs=True, grad=True):
        model(torch.ones(1, 4)).sum().backward()
    assert keys_of(tmp_path / "t.h5") == [
        "2/forward#0:in.0",
        "2/forward#0:0",
        "2/forward#0:grad.0",
        "2/parameter#0:grad.bias",
        "2/parameter#0:grad.weight",
    ]


def test_when_off_the_model_is_untouched_and_capture_allocates_nothing_for_it(tmp_path: Path) -> None:
    model = chain()
    with capture(model, tmp_path / "t.h5"):
        model(torch.ones(1, 4))
    x = torch.ones(1, 4)
    model(x)
    tracemalloc.start()
    try:
        model(x)
        ours = [trace for trace in tracemalloc.take_snapshot().traces if "dumpers" in str(trace.traceback)]
    finally:
        tracemalloc.stop()
    assert ours == []


def test_a_trace_of_nothing_says_so(tmp_path: Path) -> None:
    model = chain()
    compiled = torch.compile(lambda x: model(x), backend="eager")
    with torch.no_grad(), capture(model, tmp_path / "t.h5"):
        compiled(torch.ones(1, 4))
    assert notes_of(tmp_path / "t.h5").startswith("nothing was recorded")
