"""Placing one model for reference and device runs: exact widening, flags in force, buffers put back."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from align.devices.base import Device, Flag, When
from align.devices.cpu import Cpu
from align.dumpers.errors import TargetError
from align.dumpers.wire import Call, Tap
from align.execute import Executor, ModelError, RunOptions, digest_of
from align.workload import Workload


class Counting(nn.Module):
    """Counts its calls in a buffer and adds the count, as a cache would."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0009765625, 1.0000001]))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.weight + self.count


class Seen(Tap):
    """Notes dtypes of tensors and the flags in force while the model runs."""

    def __init__(self, device: Device | None = None) -> None:
        self.dtypes: list[torch.dtype] = []
        self.flags: list[str] = []
        self._device = device

    def finish(self, call: Call, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            self.dtypes.append(output.dtype)
        if self._device is not None:
            self.flags.append(self._device.flags()["toy.hf32"].read())
        return output


class Toy(Cpu):
    """A CPU with a switch that lets float32 be less than float32, on as an NPU's convolutions have it."""

    hf32 = "on"
    layout = "nd"
    placing_flags = frozenset({"toy.layout"})

    def flags(self) -> dict[str, Flag]:
        def flag(name: str, attribute: str, values: tuple[str, str], *, narrows: bool) -> Flag:
            return Flag(
                name, values, values[-1], When.ANY_TIME,
                lambda: str(getattr(self, attribute)), lambda value: setattr(self, attribute, value), narrows,
            )  # fmt: skip

        return {
            "toy.hf32": flag("toy.hf32", "hf32", ("on", "off"), narrows=True),
            "toy.layout": flag("toy.layout", "layout", ("nz", "nd"), narrows=False),
        }


def ignore(value: Any, wire: Any) -> None:
    """Leave what a step yields alone."""


def executor(model: nn.Module, low: torch.dtype | None, device: Device | None = None, **options: Any) -> Executor:
    workload = Workload("toy", model, (torch.ones(2),), {})
    return Executor(workload, device or Cpu(), low, RunOptions(**options))


def test_the_reference_is_the_rounded_model_widened() -> None:
    runs = executor(Counting(), torch.bfloat16)
    reference = runs.run_reference([], on_value=ignore).result
    low = runs.run_low([], on_value=ignore).result
    assert reference.dtype is torch.float32
    assert low.dtype is torch.bfloat16
    assert reference.tolist() == [2.0, 2.0]  # bfloat16 has no 1.0009765625


def test_original_weights_are_those_before_rounding() -> None:
    runs = executor(Counting(), torch.bfloat16, weights="original")
    assert runs.run_reference([], on_value=ignore).result.tolist() == [2.0009765625, pytest.approx(2.0000001)]
    assert runs.run_low([], on_value=ignore).result.tolist() == [2.0, 2.0]


def test_buffers_that_a_run_has_changed_are_put_back() -> None:
    runs = executor(Counting(), torch.float32)
    results = [runs.run_low([], on_value=ignore).result.tolist() for _ in range(3)]
    results += [runs.run_reference([], on_value=ignore).result.tolist() for _ in range(2)]
    assert results == [results[0]] * 5


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_float32_is_float32_on_the_device_unless_the_plan_says_otherwise(low: torch.dtype) -> None:
    device = Toy()
    runs = executor(Counting(), low, device)
    for wanted, flags in (("off", {}), ("on", {"toy.hf32": "on"})):
        seen = Seen(device)
        runs.run_low([seen], on_value=ignore, flags=flags)
        assert set(seen.flags) == {wanted}
        assert device.hf32 == "on"


def test_a_flag_of_layout_places_the_model_anew() -> None:
    device, model = Toy(), Counting()
    runs = executor(model, torch.bfloat16, device)
    placed: list[str] = []
    model.to = lambda *_: placed.append(device.layout) or model  # type: ignore[assignment,func-returns-value]
    for flags in ({}, {}, {"toy.layout": "nz"}, {"toy.layout": "nz"}, {}):
        runs.place_low(flags)
    assert placed == ["nd", "nd", "nz", "nd", "nd"]  # to the device; back and there again at each change


def test_a_model_that_raises_ends_in_two_lines_and_leaves_nothing_behind() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no kernel\nand a long trace")

    runs = executor(Broken(), torch.float32, Toy())
    with pytest.raises(ModelError) as caught:
        runs.run_low([], on_value=ignore)
    assert caught.value.problem == "toy raised RuntimeError: no kernel"
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("result", [3, (), "text", None])
def test_a_model_that_returns_no_tensor_is_refused(result: object) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return result

    with pytest.raises(TargetError, match=f"returned no tensor but a {type(result).__name__}"):
        executor(Odd(), torch.float32).run_low([], on_value=ignore)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), -torch.zeros(2), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        ((torch.zeros(2), torch.ones(1)), (torch.ones(1), torch.zeros(2)), False),
    ],
)
def test_digests_are_equal_exactly_if_bits_shapes_and_dtypes_are(first: Any, second: Any, equal: bool) -> None:
    assert (digest_of(first) == digest_of(second)) is equal


def test_every_call_of_a_reference_is_in_float32() -> None:
    seen = Seen()
    taps: Sequence[Tap] = [seen]
    executor(Counting(), torch.float16).run_reference(taps, on_value=ignore)
    assert set(seen.dtypes) == {torch.float32}
