"""The profile says where time and memory went, and names what moves, waits, or is too small."""

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from align.devices.base import Device
from align.devices.cpu import Cpu
from align.dumpers.choice import Plan
from align.dumpers.errors import TargetError, TraceFormatError
from align.dumpers.families import Family
from align.dumpers.wire import Call, Tap, Wire
from align.profiling import Profile, ProfileOptions, profile_target
from align.profiling.booking import (
    Booking,
    call_label,
    call_times,
    family_label,
    family_of_site,
    grouped,
    op_label,
    path_label,
    tiny_calls,
)
from align.profiling.cuda_kernels import totals
from align.profiling.hot_spot import hot_spot
from align.profiling.layout import Layout, memory_order
from align.profiling.memory import LiveOutputs
from align.profiling.npu_kernels import kernel_totals, read_kernel_details
from align.profiling.remarks import merged_trips, remarks_on
from align.profiling.synchronisation import Synchronisations, is_library
from align.profiling.tell import print_profile, to_json
from align.profiling.values import CallTime, HotSpot, Memory, PlanProfile, RoundTrip, Turning
from align.progress import Silent
from align.reports.model import Confidence
from align.session import Session
from align.settings import RunSettings
from align.taps.clock import Clock, ClockCost, Interval, clock_cost
from align.timing import TimingOptions

QUICK = ProfileOptions(
    TimingOptions(6, 6, 0.0, max_warm_up=2), TimingOptions(6, 6, 0.0, max_warm_up=2), clocked_rounds=3
)


def watch(tap: Tap, run: Callable[[], Any], model: nn.Module | None = None) -> None:
    with torch.no_grad(), Wire({"": model} if model is not None else {}, (tap,), sees_calls=True):
        run()


# -- the clock --------------------------------------------------------------------------------------------------------


class Sleeper(Tap):
    """Makes the calls of one op take long."""

    def __init__(self, op: str, seconds: float) -> None:
        self._op, self._seconds = op, seconds

    def execute(self, call: Call) -> Any:
        if call.op == self._op:
            time.sleep(self._seconds)
        return super().execute(call)


def test_the_clock_books_a_slow_call_where_it_is() -> None:
    clock, x = Clock(Cpu()), torch.ones(4)
    with Wire({}, (Sleeper("mul", 0.02), clock), sees_calls=True):
        (x + 1) * 2
    found = {interval.ident[1]: interval for interval in clock.intervals(ClockCost())}
    assert found["mul"].host_seconds >= 0.02
    assert found["add"].host_seconds < 0.01
    assert found["mul"].device_seconds == found["mul"].host_seconds  # the CPU has no clock of its own


class FakeAccelerator(Device):
    """A device beside the host: every mark comes 3 s after the one before it, whatever the host does."""

    kind = "fake"
    has_own_clock = True

    def __init__(self) -> None:
        self.now = 0.0

    def why_unavailable(self) -> str:
        return ""

    def mark(self) -> Any:
        self.now += 3.0
        return self.now


def test_device_time_comes_from_the_devices_own_marks() -> None:
    clock = Clock(FakeAccelerator())
    watch(clock, lambda: torch.ones(2).add(1))
    (interval,) = (found for found in clock.intervals(ClockCost()) if found.ident[1] == "add")
    assert interval.device_seconds == 3.0
    assert interval.host_seconds < 1.0


def test_time_of_calls_inside_a_call_is_booked_once() -> None:
    class Nested(Tap):
        def execute(self, call: Call) -> Any:
            if call.op != "relu":
                return super().execute(call)
            time.sleep(0.01)
            wire.call(names["add"], torch.add, (call.args[0], 1), {})
            return call.args[0]

    names: dict[str, Any] = {}

    class Names(Tap):
        def prepare(self, call: Call) -> None:
            names.setdefault(call.op, call.name)

    clock, x = Clock(Cpu()), torch.ones(2)
    wire = Wire({}, (Names(), Nested(), Sleeper("add", 0.03), clock), sees_calls=True)
    with wire:
        torch.add(x, 1)
        F.relu(x)
    seconds: dict[str, float] = {}
    for interval in clock.intervals(ClockCost()):
        seconds[interval.ident[1]] = seconds.get(interval.ident[1], 0.0) + interval.host_seconds
    assert 0.06 <= seconds["add"] < 0.09
    assert 0.01 <= seconds["relu"] < 0.03


def test_the_clock_forgets_a_call_that_raised() -> None:
    clock = Clock(Cpu())
    with Wire({}, (clock,), sees_calls=True):
        with contextlib.suppress(RuntimeError):
            torch.ones(2).add(torch.ones(3))
        torch.ones(2).mul(2)
    ops = [interval.ident[1] for interval in clock.intervals(ClockCost())]
    assert "mul" in ops
    assert "add" not in ops


def test_the_clock_keeps_no_tensor_alive() -> None:
    live, clock = LiveOutputs(), Clock(Cpu())
    with Wire({}, (live, clock), sees_calls=True):
        x = torch.ones(1000)
        for _ in range(10):
            x = x + 1
    assert live.peak()[0] == 2 * 4000


def test_the_clocks_own_cost_is_measured_and_taken_off() -> None:
    cost = clock_cost(Cpu(), calls=50, rounds=3)
    assert 0.0 <= cost.inside <= 50e-6
    clock = Clock(Cpu())
    watch(clock, lambda: torch.ones(2).add(1))
    bare = clock.intervals(ClockCost())[-1].host_seconds
    assert clock.intervals(ClockCost(inside=1.0))[-1].host_seconds == 0.0
    assert clock.intervals(ClockCost(inside=bare / 2))[-1].host_seconds == pytest.approx(bare / 2)


# -- layouts ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2).contiguous()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trips_of(run: Callable[[], Any], model: nn.Module | None = None) -> tuple[RoundTrip, ...]:
    layout = Layout()
    watch(layout, run, model)
    return layout.round_trips({})


def test_axes_permuted_around_a_norm_and_back_are_one_round_trip_named_by_module() -> None:
    model, x = Blocks(), torch.randn(2, 4, 5, 6)
    trips = [trip for trip in trips_of(lambda: model(x), model) if trip.turning is Turning.AXES]
    assert [(trip.first, trip.last, trip.count) for trip in trips] == [
        (f"blocks.{index}/permute", f"blocks.{index}/permute", 1) for index in range(3)
    ]
    assert (trips[0].layout, trips[0].other_layout) == ("0123", "0231")


def test_trips_of_numbered_modules_are_told_as_one() -> None:
    model, x = Blocks(), torch.randn(2, 4, 5, 6)
    merged = merged_trips(trip for trip in trips_of(lambda: model(x), model) if trip.turning is Turning.AXES)
    assert [(trip.first, trip.count) for trip in merged] == [("blocks.*/permute", 3)]


def test_a_transpose_that_is_not_undone_is_no_round_trip() -> None:
    assert trips_of(lambda: torch.randn(2, 3).t().relu()) == ()


def test_a_cycle_of_three_permutations_is_a_round_trip() -> None:
    def cycle() -> Tensor:
        x = torch.randn(2, 3, 4)
        for _ in range(3):
            x = x.permute(1, 2, 0)
        return x

    (trip,) = trips_of(cycle)
    assert (trip.layout, trip.other_layout, trip.copied_nbytes) == ("012", "120", 0)


def test_channels_last_and_back_is_a_round_trip_of_memory_and_counts_what_it_copies() -> None:
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(3, 3, 1, 1)
    trips = trips_of(lambda: F.conv2d(x.contiguous(memory_format=torch.channels_last), weight).contiguous())
    (trip,) = trips
    assert trip.turning is Turning.MEMORY
    assert (trip.first, trip.last) == ("/contiguous", "/contiguous")
    assert (trip.layout, trip.other_layout) == ("0123", "0231")
    assert trip.copied_nbytes == 2 * 3 * 64 * 4


def test_a_cast_up_and_down_is_a_round_trip_of_dtype() -> None:
    x = torch.randn(4, dtype=torch.bfloat16)
    (trip,) = trips_of(lambda: (x.float() * 2).to(torch.bfloat16))
    assert (trip.turning, trip.layout, trip.other_layout) == (Turning.DTYPE, "bfloat16", "float32")


def test_time_of_a_round_trip_is_the_time_of_its_moves() -> None:
    layout, x = Layout(), torch.randn(2, 3)
    watch(layout, lambda: x.transpose(0, 1).relu().transpose(0, 1))
    seconds = {(0, ("", "transpose", 0)): 1.0, (0, ("", "relu", 0)): 10.0, (0, ("", "transpose", 1)): 2.0}
    assert layout.round_trips(seconds)[0].seconds == 3.0


def test_memory_order_reads_from_the_slowest_axis_to_the_fastest() -> None:
    assert memory_order(torch.zeros(2, 3, 4)) == (0, 1, 2)
    assert memory_order(torch.zeros(2, 3, 4).permute(2, 0, 1)) == (1, 2, 0)
    assert memory_order(torch.zeros(1, 3, 8, 8).contiguous(memory_format=torch.channels_last)) == (0, 2, 3, 1)


# -- waits ------------------------------------------------------------------------------------------------------------


def waits_of(run: Callable[[], Any]) -> list[tuple[str, str, int]]:
    tap = Synchronisations("cpu")
    watch(tap, run)
    return [(wait.op, wait.line.rpartition("/")[2], wait.count) for wait in tap.waits()]


def test_reads_are_named_with_the_line_of_user_code() -> None:
    x = torch.ones(3)

    def reads() -> None:
        for _ in range(4):
            x.sum().item()

    line = reads.__code__.co_firstlineno + 2
    assert waits_of(reads) == [("item", f"test_profile.py:{line}", 4)]


@pytest.mark.parametrize(
    ("op", "run"),
    [
        ("bool(tensor)", lambda x: bool(x[0] > 0)),
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.numpy()),
        ("cpu", lambda x: x.cpu()),
        ("nonzero", lambda x: x.nonzero()),
        ("getitem", lambda x: x[x > 1]),
        ("where", lambda x: torch.where(x > 1)),
        ("masked_select", lambda x: torch.masked_select(x, x > 1)),
        ("repeat_interleave", lambda x: x.repeat_interleave(torch.tensor([1, 2, 1]))),
    ],
)
def test_every_kind_of_synchronising_call_is_found(op: str, run: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3)
    assert [found[0] for found in waits_of(lambda: run(x))] == [op]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[:2],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.where(x > 1, x, -x),
        lambda x: x.to("cpu"),
        lambda x: x.repeat_interleave(2),
        lambda x: x.shape[0] + x.dim(),
    ],
)
def test_calls_that_wait_for_nothing_are_not_named(run: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3)
    assert waits_of(lambda: run(x)) == []


def test_reads_of_tensors_on_the_host_do_not_make_it_wait_for_an_accelerator() -> None:
    tap = Synchronisations("cuda")
    watch(tap, lambda: torch.ones(1).item())
    assert tap.waits() == ()


def test_torch_and_the_tool_are_not_user_code_but_the_demo_is() -> None:
    import align.demo.pipeline
    import align.execute

    assert is_library(F.__file__ or "")
    assert is_library(align.execute.__file__)
    assert not is_library(align.demo.pipeline.__file__)
    assert not is_library(__file__)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_peak_of_live_outputs_counts_what_is_alive_together() -> None:
    def chain() -> Tensor:
        x = torch.ones(1000)  # 4000 bytes
        y = x + 1
        del x
        z = torch.cat((y, y))  # 8000 bytes: the peak, with y
        del y
        return z[:10] * 2

    tap = LiveOutputs()
    watch(tap, chain)
    most, largest = tap.peak()
    assert most == 12000
    assert [(tensor.name, tensor.nbytes) for tensor in largest] == [("/cat#0", 8000), ("/add#0", 4000)]


def test_views_and_weights_take_no_memory_of_their_own() -> None:
    linear = nn.Linear(8, 8)
    tap = LiveOutputs()

    def run() -> Tensor:
        return linear(torch.ones(1, 8)) @ linear.weight.t()

    with torch.no_grad(), Wire({"": linear}, (tap,), sees_calls=True):
        run()
    assert all(not tensor.name.endswith("/t#0") for tensor in tap.peak()[1])


# -- booking ----------------------------------------------------------------------------------------------------------


def call(op: str, seconds: float, *, path: str = "m", family: Family = Family.OTHER, step: int = 0) -> CallTime:
    return CallTime(step, f"{path}/{op}#0", path, op, family, "", seconds, seconds)


def test_groups_add_up_and_come_in_order_of_time() -> None:
    groups = grouped([call("add", 1.0), call("mul", 3.0), call("add", 1.0, path="n")], op_label)
    assert [(group.name, group.seconds, group.share, group.count) for group in groups] == [
        ("mul", 3.0, 0.6, 1),
        ("add", 2.0, 0.4, 2),
    ]


def test_a_call_takes_the_mean_of_the_middle_rounds_and_stand_ins_take_nothing() -> None:
    ident, inner = ("m", "relu", 0), ("m", "conv2d", 0)
    rounds = [[Interval(0, inner, 9.0, 9.0, True), Interval(0, ident, s, 2 * s)] for s in (1.0, 50.0, 2.0)]
    (found,) = call_times(rounds, Booking({ident: "conv_bn_act_add"}, {"conv_bn_act_add": Family.CONVOLUTION}))
    assert (found.host_seconds, found.device_seconds, found.family) == (2.0, 4.0, Family.CONVOLUTION)
    assert op_label(found) == "conv_bn_act_add (fused)"


@pytest.mark.parametrize(
    ("operator", "ops", "family"),
    [
        ("attention", ["matmul", "softmax", "matmul"], Family.ATTENTION),
        ("add_rms_norm", ["add", "pow", "mean", "rsqrt", "mul"], Family.NORMALISATION),
        ("conv_bn_act_add", ["conv2d", "batch_norm", "relu"], Family.CONVOLUTION),
        ("linear_act", ["linear", "gelu"], Family.MATMUL),
        ("masked_softmax", ["add", "softmax"], Family.ATTENTION),
        ("rotary", ["mul", "cat", "add"], Family.OTHER),
    ],
)
def test_a_fused_site_is_booked_as_its_heaviest_part(operator: str, ops: list[str], family: Family) -> None:
    assert family_of_site(operator, ops) is family


def test_hundreds_of_tiny_calls_are_found_with_the_module_that_makes_most() -> None:
    calls = [call("add", 2e-6, path="loop") for _ in range(250)] + [call("mm", 1e-3)]
    tiny = tiny_calls(calls, limit_seconds=1e-5, fewest=200)
    assert tiny is not None
    assert (tiny.count, tiny.of, tiny.path, tiny.path_count) == (250, 251, "loop", 250)
    assert tiny_calls(calls[100:], limit_seconds=1e-5, fewest=200) is None


def test_a_hot_spot_that_only_moved_is_said_to_have_moved() -> None:
    before = [
        call("softmax", 6.0, family=Family.ATTENTION),
        call("cat", 1.0, family=Family.MOVEMENT),
        call("mm", 5.0, family=Family.MATMUL),
    ]
    after = [
        call("softmax", 2.0, family=Family.ATTENTION),
        call("cat", 4.5, family=Family.MOVEMENT),
        call("mm", 5.0, family=Family.MATMUL),
    ]
    spot = hot_spot(before, after)
    assert spot.sentence.startswith("the time only moved: attention -4.00 s, but data movement +3.50 s")
    assert (spot.before, spot.after) == ("attention", "matmul")


def test_saved_time_is_said_to_be_saved() -> None:
    before = [call("softmax", 6.0, family=Family.ATTENTION), call("mm", 5.0, family=Family.MATMUL)]
    after = [call("softmax", 2.0, family=Family.ATTENTION), call("mm", 5.05, family=Family.MATMUL)]
    assert hot_spot(before, after).sentence.startswith(
        "time was saved (attention -4.00 s), and no kind of work became slower"
    )


def plan_profile(role: str, calls: list[CallTime], **fields: Any) -> PlanProfile:
    total = sum(found.device_seconds for found in calls)
    groups = (grouped(calls, label) for label in (op_label, path_label, call_label, family_label))
    given: dict[str, Any] = {"tiny": None, "round_trips": (), "waits": (), **fields}
    return PlanProfile(
        Plan(role, "cpu", "float32"),
        total,
        total,
        total,
        0.0,
        0.0,
        len(calls),
        *groups,
        memory=Memory(1.0, 1, ()),
        **given,
    )


def test_data_movement_above_a_tenth_is_called_out_with_its_operations() -> None:
    calls = [call("cat", 2.0, family=Family.MOVEMENT), call("mm", 8.0, family=Family.MATMUL)]
    profile = plan_profile("candidate", calls)
    remarks = remarks_on(profile, profile, HotSpot("", 0, "", 0, 0, 0, ""), "cpu")
    texts = [remark.text for remark in remarks if remark.subject == "data movement"]
    assert texts[0] == "data movement takes 20 % of the calls' time, above 10 %: cat 20 %"


def test_an_accelerator_that_idles_is_called_host_bound() -> None:
    profile = replace(plan_profile("candidate", [call("mm", 1.0)]), seconds=4.0)
    remarks = remarks_on(profile, profile, HotSpot("", 0, "", 0, 0, 0, ""), "cuda")
    assert any(remark.subject == "host-bound" and "25 %" in remark.text for remark in remarks)


# -- the devices' own profilers ---------------------------------------------------------------------------------------

LEVEL_1 = """Step Id,Device_id,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,Start Time(us),Duration(us),\
Wait Time(us),Block Num,Mix Block Num,HF32 Eligible,Input Shapes
,0,1,2,aclnnFlashAttentionScore_1,FlashAttentionScore,dynamic,MIX_AIC,"1.0\t",300.5,1.5,24,48,NO,"""
LEVEL_0 = """Device_id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Dim
0,MatMulV2_7,MatMulV2,AI_CORE,1.0,100.0,N/A,20
0,MatMulV2_8,MatMulV2,AI_CORE,2.0,50.0,0.5,20
0,Transpose_1,Transpose,AI_VECTOR_CORE,3.0,50.0,0.5,8
"""


def test_kernel_details_are_read_by_column_name_in_old_and_new_form(tmp_path: Path) -> None:
    path = tmp_path / "kernel_details.csv"
    path.write_text(LEVEL_1 + '"""1,2"""\n', encoding="utf-8-sig")
    (row,) = read_kernel_details(path)
    assert (row.type, row.core, row.blocks, row.is_hf32) == ("FlashAttentionScore", "MIX_AIC", 24, False)
    assert row.seconds == pytest.approx(300.5e-6)
    path.write_text(LEVEL_0)
    assert [row.blocks for row in read_kernel_details(path)] == [20, 20, 8]


def test_kernels_of_one_type_are_added_up(tmp_path: Path) -> None:
    path = tmp_path / "kernel_details.csv"
    path.write_text(LEVEL_0)
    totals_found = kernel_totals(read_kernel_details(path))
    assert [(kernel.name, kernel.count) for kernel in totals_found] == [("MatMulV2", 2), ("Transpose", 1)]
    assert totals_found[0].seconds == pytest.approx(150e-6)
    assert totals_found[0].share == pytest.approx(0.75)


def test_hf32_is_noted_beside_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "kernel_details.csv"
    path.write_text("Name,Type,Duration(us),HF32 Eligible,Accelerator Core\nm,MatMulV2,1,YES,AI_CORE\n")
    assert kernel_totals(read_kernel_details(path))[0].note == "AI_CORE; HF32"


def test_a_file_that_is_no_kernel_details_is_refused_by_the_column_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "kernel_details.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceFormatError, match="no column 'Duration"):
        read_kernel_details(path)
    with pytest.raises(TraceFormatError, match="cannot read"):
        read_kernel_details(tmp_path / "missing.csv")


def test_cuda_kernels_are_added_up_without_what_the_host_did() -> None:
    def event(name: str, microseconds: float, where: Any) -> Any:
        return SimpleNamespace(
            name=name, device_type=where, time_range=SimpleNamespace(elapsed_us=lambda: microseconds)
        )

    events = [
        event("gemm", 30, DeviceType.CUDA),
        event("gemm", 30, DeviceType.CUDA),
        event("aten::mm", 99, DeviceType.CPU),
    ]
    (kernel,) = totals(events)
    assert (kernel.name, kernel.count, kernel.share) == ("gemm", 2, 1.0)
    assert kernel.seconds == pytest.approx(60e-6)


# -- a whole profile --------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
import torch.nn.functional as F

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = F.silu(self.norm(x))
        x = F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2).contiguous()
        x = torch.cat([x, x], 1)[:, :8].contiguous()
        return torch.relu(self.conv(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        x = self.part(x)
        if x.mean().item() > 1e9:
            raise ValueError
        return x

class Workload:
    def __init__(self, loop=None):
        self.model = Model().eval()
        self.inputs = (torch.randn(1, 8, 24, 24),)
        self.input_sets = {"small": (torch.randn(1, 8, 12, 12),), "broken": (torch.randn(1, 7, 12, 12),)}
        if loop:
            self.loop = loop

def single():
    return Workload()

def steps(model, x):
    for _ in range(3):
        x = model(x)
        yield x

def generator():
    return Workload(steps)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("target") / "shapes.py"
    path.write_text(SCRIPT)
    yield path
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def single(script: Path) -> Profile:
    return profile_target(RunSettings(target=f"{script}:single", dtype="float32", device="cpu"), Silent(), QUICK)


@pytest.fixture(scope="module")
def generator(script: Path) -> Profile:
    return profile_target(RunSettings(target=f"{script}:generator", dtype="bfloat16", device="cpu"), Silent(), QUICK)


def test_shares_of_a_profile_add_up_to_one(single: Profile) -> None:
    for plan in (single.baseline, single.candidate):
        for groups in (plan.by_op, plan.by_path, plan.by_call, plan.families):
            assert sum(group.share for group in groups) == pytest.approx(1.0)
            assert sum(group.count for group in groups) == plan.calls


def test_the_candidate_books_its_fused_sites_under_their_operators(single: Profile) -> None:
    fused = {site.operator for site in single.sites}
    assert fused
    labels = {group.name for group in single.candidate.by_op}
    assert all(f"{operator} (fused)" in labels for operator in fused)
    assert not any(label.endswith("(fused)") for label in (group.name for group in single.baseline.by_op))
    assert single.candidate.calls < single.baseline.calls


def test_saved_traffic_is_the_interior_of_every_run_of_a_site(single: Profile, generator: Profile) -> None:
    interior = 8 * 24 * 24 * 4  # one interior tensor of every site here: conv -> relu, group_norm -> silu
    chains = {site.operator: site for site in single.sites if site.operator in ("conv_bn_act_add", "group_norm_silu")}
    assert chains
    assert all(site.saved_nbytes == interior * site.runs for site in chains.values())
    assert single.saved_nbytes == sum(site.saved_nbytes for site in chains.values())
    assert all(site.runs == 3 * site.sites for site in generator.sites)


def test_the_layout_round_trip_of_a_module_is_named(single: Profile) -> None:
    trips = [trip for trip in single.candidate.round_trips if trip.turning is Turning.AXES]
    assert [(trip.first, trip.last, trip.count) for trip in trips] == [("part/permute", "part/permute", 1)]
    assert trips[0].seconds > 0


def test_the_line_that_synchronises_is_named(single: Profile) -> None:
    line = SCRIPT.splitlines().index("        if x.mean().item() > 1e9:") + 1
    (wait,) = single.candidate.waits
    assert (wait.op, wait.count) == ("item", 1)
    assert wait.line.endswith(f"shapes.py:{line}")


def test_every_input_shape_gets_its_latency_and_accuracy(single: Profile) -> None:
    own, small, _ = single.shapes
    assert (own.name, own.inputs) == ("inputs", "1x8x24x24")
    assert (small.name, small.inputs) == ("small", "1x8x12x12")
    for row in (own, small):
        assert row.timing is not None
        assert row.cold_candidate_seconds > 0
        assert 0 <= row.error_candidate < 1e-5


def test_a_shape_that_fails_is_told_and_takes_nothing_else_away(single: Profile) -> None:
    broken = single.shapes[2]
    assert broken.timing is None
    assert "raised RuntimeError" in broken.note


def test_other_inputs_leave_the_session_as_it_was(script: Path) -> None:
    session = Session(RunSettings(target=f"{script}:single", dtype="float32", device="cpu"))
    session.survey()
    sites = session.sites
    with session.on_inputs("small"):
        assert session.survey().result.shape == (1, 8, 12, 12)
        assert session.run(session.candidate_plan())[0].result.shape == (1, 8, 12, 12)
    assert session.sites is sites
    assert session.run(session.candidate_plan())[0].result.shape == (1, 8, 24, 24)
    with pytest.raises(TargetError, match="no input set 'large'"), session.on_inputs("large"):
        pass
    assert session.run(session.baseline_plan())[0].result.shape == (1, 8, 24, 24)


def test_steps_of_a_generator_have_latency_and_drift(generator: Profile, single: Profile) -> None:
    assert [step.index for step in generator.steps] == [0, 1, 2]
    assert all(step.candidate_seconds > 0 and 0 < step.error_baseline < 0.1 for step in generator.steps)
    assert single.steps == ()


def test_memory_names_the_largest_live_tensors(single: Profile) -> None:
    memory = single.baseline.memory
    assert memory.largest[0].nbytes == 2 * 8 * 24 * 24 * 4
    assert memory.largest[0].name == "part/cat#0"
    assert memory.live_peak_nbytes >= memory.largest[0].nbytes


def test_the_terminal_output_fits_and_names_the_share_of_data_movement(single: Profile, generator: Profile) -> None:
    for profile in (single, generator):
        console = Console(width=100, record=True, file=io.StringIO())
        print_profile(profile, console, top=5)
        lines = console.export_text().splitlines()
        assert max(len(line.rstrip()) for line in lines) <= 100
        assert any("data movement takes" in line for line in lines)
        assert any("synchronising" in line for line in lines)


def test_names_cannot_steer_the_terminal(single: Profile) -> None:
    evil = replace(single.candidate.by_op[0], name="\x1b[31mred\nnext")
    hostile = replace(
        single, candidate=replace(single.candidate, by_op=(evil,), by_path=(evil,), by_call=(evil,)), notes=("\x1b[2J",)
    )
    console = Console(width=100, record=True, file=io.StringIO())
    print_profile(hostile, console)
    assert "\x1b" not in console.export_text()


def test_the_json_is_complete_and_has_a_version(single: Profile) -> None:
    body = json.loads(to_json(single))
    assert body["schema_version"] == 1
    assert body["candidate"]["movement_share"] == pytest.approx(single.candidate.movement_share)
    assert body["timing"]["confidence"] in set(Confidence)
    assert len(body["shapes"]) == 3
    assert body["candidate"]["plan"]["role"] == "candidate"


def test_the_demo_names_its_share_of_data_movement() -> None:
    profile = profile_target(RunSettings(target="demo", steps=1), Silent(), QUICK)
    shares = {remark.plan: remark.text for remark in profile.remarks if remark.subject == "data movement"}
    assert set(shares) == {"baseline", "candidate"}
    assert 0.0 < profile.candidate.movement_share < 0.5
    assert profile.saved_nbytes > 0
