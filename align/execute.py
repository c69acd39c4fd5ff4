"""Run one plan of a workload: place the model, set the flags, open the wire, step the loop, hand back the outputs.

One model instance serves every run. Weights are rounded to the low dtype once; the reference is that very model
widened to float32 (exact) on the CPU, so no copy is made and models that refuse to be copied work too. Buffers that
a run has changed are put back before the next.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from align.devices.base import Device
from align.devices.cpu import Cpu
from align.dumpers.errors import InterruptedRun, TargetError, UndecidedError
from align.dumpers.naming import walk_tensors
from align.dumpers.wire import Tap, Wire
from align.scalar import Scalar, backward
from align.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run returned: its result, the values its steps yielded, and seconds of each step and in all."""

    result: Any
    steps: tuple[Any, ...]
    seconds: float
    step_seconds: tuple[float, ...]
    opaque: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is the same in all runs of a comparison. `steps` 0 leaves the number of steps to the workload.

    With a `scalar` of the result, every run also computes its gradients.
    """

    seed: int = 0
    steps: int = 0
    weights: str = "same"
    scalar: Scalar | None = None


class Executor:
    """Hold a workload's model and run plans on it.

    low     the dtype of baseline and candidate; None keeps the dtypes the model was built with
    """

    def __init__(self, workload: Workload, device: Device, low: torch.dtype | None, options: RunOptions) -> None:
        self.workload = self._whole = workload
        self.device = device
        self.options = options
        self._model = workload.model
        self._original = _snapshot(self._model) if options.weights == "original" else None
        if low is not None:
            _convert(self._model, lambda tensor: tensor.to(low) if tensor.is_floating_point() else tensor)
        self._layout = {
            id(holder): {key: tensor.dtype for key, tensor in tensors.items()}
            for holder, tensors in _holders(self._model)
        }
        self.low = low or _lowest_dtype(workload)
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor, int]] = []
        self._place = ""

    def use_inputs(self, name: str) -> None:
        """Run on the named set of the workload's `input_sets` from now on; "" is its own inputs."""
        sets = self._whole.input_sets or {}
        if name and name not in sets:
            raise TargetError(f"{self._whole.name} has no input set {name!r}", f"its sets: {', '.join(sets) or 'none'}")
        args, kwargs = sets[name] if name else (self._whole.args, self._whole.kwargs)
        self.workload = replace(self._whole, args=args, kwargs=kwargs)

    # -- placing ----------------------------------------------------------------------------------------------------

    def place_reference(self) -> None:
        """Put the model on the CPU in float32, its values exactly those of the low-precision model."""
        self._restore_buffers()
        if self._place == "reference":
            return
        self._model.to("cpu")
        _convert(self._model, _wide)
        if self._original is not None:
            _load(self._model, self._original)
        self._mark("reference")

    def place_low(self, flags: Mapping[str, str] = MappingProxyType({})) -> None:
        """Put the model on the device in its low dtypes, laid out as these flags have it."""
        layout_flags = sorted(item for item in flags.items() if item[0] in self.device.placing_flags)
        place = f"low {layout_flags}"
        self._restore_buffers()
        if self._place == place:
            return
        if self._place.startswith("low"):
            self._model.to("cpu")
        for holder, tensors in _holders(self._model):
            layout = self._layout[id(holder)]
            for key, tensor in tensors.items():
                _replace(holder, key, tensor, tensor.to(layout[key]))
        with self.device.set_flags(flags):
            self._model.to(self.device.torch_device)
        self._mark(place)

    def _mark(self, place: str) -> None:
        self._place = place
        self._buffers = [
            (module._buffers, name, buffer.detach().clone(), buffer._version)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def _restore_buffers(self) -> None:
        for buffers, name, value, version in self._buffers:
            now = buffers.get(name)
            if now is None or now._version != version or now.shape != value.shape:
                buffers[name] = value.clone()

    # -- running ----------------------------------------------------------------------------------------------------

    def run_reference(self, taps: Sequence[Tap], *, on_value: Callable[[Any, Wire], None]) -> Outcome:
        """Run on the CPU in float32."""
        self.place_reference()
        device = Cpu()
        with device.set_flags(device.exact_flags()):
            return self._run(device, torch.float32, taps, on_value, sees_calls=True)

    def run_low(
        self,
        taps: Sequence[Tap],
        *,
        on_value: Callable[[Any, Wire], None],
        sees_calls: bool = True,
        flags: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run on the device in the low dtype. What is float32 is computed in float32, unless `flags` say otherwise."""
        wanted = self.device.float32_flags() | dict(flags or {})
        self.place_low(wanted)
        with self.device.set_flags(wanted):
            return self._run(self.device, None, taps, on_value, sees_calls=sees_calls)

    def _run(
        self,
        device: Device,
        dtype: torch.dtype | None,
        taps: Sequence[Tap],
        on_value: Callable[[Any, Wire], None],
        *,
        sees_calls: bool,
    ) -> Outcome:
        args, kwargs = self.workload.fresh_inputs(lambda tensor: self._input(tensor, device, dtype))
        wire = Wire({"": self._model}, taps, sees_calls=sees_calls)
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(self.options.seed)
            stack.enter_context(torch.set_grad_enabled(self.options.scalar is not None))
            stack.enter_context(_without_fast_path())
            device.synchronize()
            with wire:
                outcome = _drive(self.workload, args, kwargs, self.options.steps, wire, device, on_value)
                if self.options.scalar is not None:
                    self._backward(self.options.scalar, outcome.result)
        if next(walk_tensors((outcome.result, outcome.steps)), None) is None:
            raise TargetError(
                f"{self.workload.name} returned no tensor but a {type(outcome.result).__name__}",
                "return, or yield, tensors: they are what is compared",
            )
        return outcome

    def _backward(self, scalar: Scalar, result: Any) -> None:
        try:
            backward(scalar, result)
        except (TargetError, UndecidedError):
            raise
        except Exception as exc:
            raise model_failed(f"{self.workload.name}, in backward,", exc) from exc
        finally:
            for parameter in self._model.parameters():
                parameter.grad = None

    def _input(self, tensor: torch.Tensor, device: Device, dtype: torch.dtype | None) -> torch.Tensor:
        if tensor.is_floating_point():
            tensor = tensor.to(self.low) if tensor.dtype != self.low and tensor.dtype.itemsize >= 2 else tensor
            tensor = tensor.to(dtype) if dtype is not None and tensor.dtype.itemsize >= 2 else tensor
        return tensor.detach().clone().to(device.torch_device)


def _drive(
    workload: Workload, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int, wire: Wire, device: Device,
    on_value: Callable[[Any, Wire], None],
) -> Outcome:  # fmt: skip
    started = time.perf_counter()
    if workload.loop is None:
        try:
            result = workload.model(*args, **kwargs)
        except Exception as exc:
            raise model_failed(workload.name, exc) from exc
        device.synchronize()
        seconds = time.perf_counter() - started
        on_value(result, wire)
        return Outcome(result, (), seconds, (seconds,), wire.opaque)
    yielded: list[Any] = []
    marks = [started]
    paused = 0.0
    result = None
    for value, is_last in _values(workload, args, kwargs, steps):
        device.synchronize()
        marks.append(time.perf_counter() - paused)
        on_value(value, wire)
        paused = time.perf_counter() - marks[-1]
        result = value
        if not is_last:
            yielded.append(value)
            wire.next_step()
    durations = tuple(after - before for before, after in pairwise(marks))
    return Outcome(result, tuple(yielded), marks[-1] - started, durations, wire.opaque)


def _values(
    workload: Workload, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int
) -> Iterator[tuple[Any, bool]]:
    """Yield (value, is it the loop's result) from a step loop."""
    assert workload.loop is not None
    if steps and "steps" in inspect.signature(workload.loop).parameters:
        kwargs = kwargs | {"steps": steps}
    try:
        loop = workload.loop(workload.model, *args, **kwargs)
        if not inspect.isgenerator(loop):
            raise TargetError(
                f"{workload.name}: loop returned {type(loop).__name__}",
                "write it as a generator: `yield` after every step",
            )
        count = 0
        while True:
            try:
                value = next(loop)
            except StopIteration as stop:
                if stop.value is not None:
                    yield stop.value, True
                return
            yield value, False
            count += 1
            if steps and count >= steps and "steps" not in kwargs:
                loop.close()
                return
    except (KeyboardInterrupt, TargetError, UndecidedError, InterruptedRun):
        raise
    except Exception as exc:
        raise model_failed(workload.name, exc) from exc


def model_failed(name: str, exc: Exception) -> Exception:
    """The error a failing model ends with: our own errors as they are, the model's in two lines."""
    from align.dumpers.errors import AlignError

    if isinstance(exc, AlignError):
        return exc
    first = next(iter(str(exc).strip().splitlines()), "")
    return ModelError(
        f"{name} raised {type(exc).__name__}: {first}",
        "run the model without align in the same dtype and on the same device; it should fail alike",
    )


class ModelError(UndecidedError):
    """The user's model raised while it ran."""


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Keep nn.TransformerEncoderLayer and nn.MultiheadAttention off their fused path: their calls are to be seen."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# -- weights ----------------------------------------------------------------------------------------------------------


def _holders(model: nn.Module) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            yield holder, {key: tensor for key, tensor in holder.items() if tensor is not None}


def _convert(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    done: dict[int, torch.Tensor] = {}
    for holder, tensors in _holders(model):
        for key, tensor in tensors.items():
            if id(tensor) not in done:
                done[id(tensor)] = tensor if isinstance(tensor, nn.Parameter) else change(tensor)
                if isinstance(tensor, nn.Parameter):
                    tensor.data = change(tensor.data)
            holder[key] = done[id(tensor)]


def _replace(holder: dict[str, Any], key: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        tensor.data = value.detach()
    else:
        holder[key] = value


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _load(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(state[name])


def _lowest_dtype(workload: Workload) -> torch.dtype:
    """The lowest dtype that a model was built with; where it holds no floating tensor, that of its inputs."""
    held = [tensor for _, tensors in _holders(workload.model) for tensor in tensors.values()]
    given = [tensor for _, tensor in walk_tensors((workload.args, dict(workload.kwargs)))]
    for tensors in (held, given):
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if dtypes:
            return next((low for low in (torch.bfloat16, torch.float16) if low in dtypes), torch.float32)
    return torch.float32


def digest_of(value: Any) -> str:
    """A digest of all tensors in a result, equal exactly if bits, shapes and dtypes are."""
    from align.dumpers.statistics import digest
    from align.dumpers.tensors import to_raw

    parts = [f"{slot}={digest(to_raw(tensor.detach().cpu()))}" for slot, tensor in walk_tensors(value)]
    return parts[0].partition("=")[2] if len(parts) == 1 else _combined(parts)


def _combined(parts: Sequence[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
