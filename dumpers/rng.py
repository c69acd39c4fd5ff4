"""Give every run the same random numbers: drawn on the CPU in float32 from one seed, then rounded and moved.

A draw is rounded to the low dtype of the comparison in every run, the reference included, so that all runs see the
very same values whatever dtype each asked for. Order of draws is program order, which all runs share.
"""

from __future__ import annotations

from typing import Any

import torch

from align.dumpers.wire import PASS, Call, Tap

_FACTORIES = frozenset({"rand", "randn", "randint", "randperm", "normal"})
_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_IN_PLACE = frozenset({
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "geometric_", "cauchy_",
    "kaiming_uniform_",  # of torch.nn.init, whose others are seen as the tensor methods they call
})  # fmt: skip
_FROM_VALUES = frozenset({"bernoulli", "multinomial", "poisson"})
_DROPOUTS = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
)


class AlignRandom(Tap):
    """Replace torch's random calls by draws that do not depend on device, dtype or kernel."""

    def __init__(self, seed: int, rounding: torch.dtype) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._rounding = rounding if rounding.is_floating_point else torch.float32
        self.draws = 0

    def execute(self, call: Call) -> Any:
        op = call.op
        if op in _FACTORIES:
            return self._factory(call)
        if op in _LIKE:
            return self._like(call)
        if op in _IN_PLACE:
            return self._in_place(call)
        if op in _FROM_VALUES:
            return self._from_values(call)
        if op in _DROPOUTS:
            return self._dropout(call)
        return PASS

    def _factory(self, call: Call) -> torch.Tensor:
        kwargs = dict(call.kwargs)
        device = kwargs.pop("device", None)
        kwargs.pop("generator", None)
        kwargs.pop("pin_memory", None)
        out = kwargs.pop("out", None)
        dtype = kwargs.pop("dtype", None)
        args = tuple(_host(a) for a in call.args if not isinstance(a, torch.Generator))
        if call.op in {"rand", "randn"}:
            kwargs["dtype"] = torch.float32
            dtype = dtype or torch.get_default_dtype()
        elif dtype is not None:
            kwargs["dtype"] = dtype
        drawn: torch.Tensor = call.func(
            *args, generator=self._generator, **{name: _host(v) for name, v in kwargs.items()}
        )
        if device is None:
            device = next((a.device for a in call.args if isinstance(a, torch.Tensor)), torch.get_default_device())
        if call.op == "rand":
            drawn = self._below_one(drawn)
        result = self._deliver(drawn, device, dtype or drawn.dtype)
        if isinstance(out, torch.Tensor):
            return out.copy_(result)
        return result

    def _like(self, call: Call) -> torch.Tensor:
        source = call.args[0] if call.args else call.kwargs["input"]
        dtype = call.kwargs.get("dtype") or source.dtype
        device = call.kwargs.get("device") or source.device
        shape = tuple(source.shape)
        if call.op == "randint_like":
            bounds = list(call.args[1:]) or [call.kwargs[n] for n in ("low", "high") if n in call.kwargs]
            low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
            return self._deliver(torch.randint(low, high, shape, generator=self._generator), device, dtype)
        if call.op == "rand_like":
            return self._deliver(self._below_one(torch.rand(shape, generator=self._generator)), device, dtype)
        return self._deliver(torch.randn(shape, generator=self._generator), device, dtype)

    def _in_place(self, call: Call) -> torch.Tensor:
        target: torch.Tensor = call.args[0] if call.args else call.kwargs["tensor"]  # torch.nn.init names all arguments
        kwargs = {name: _host(v) for name, v in call.kwargs.items() if name not in {"generator", "tensor"}}
        work = torch.float32 if target.is_floating_point() else target.dtype
        scratch = torch.zeros(target.shape, dtype=work)
        call.func(scratch, *(_host(a) for a in call.args[1:]), generator=self._generator, **kwargs)
        target.copy_(self._deliver(scratch, target.device, target.dtype))
        return target

    def _from_values(self, call: Call) -> torch.Tensor:
        source: torch.Tensor = call.args[0] if call.args else call.kwargs["input"]
        kwargs = {name: _host(v) for name, v in call.kwargs.items() if name not in {"generator", "input"}}
        drawn: torch.Tensor = call.func(
            source.detach().cpu().float(), *(_host(a) for a in call.args[1:]), generator=self._generator, **kwargs
        )
        self.draws += 1
        return drawn.to(source.device) if call.op == "multinomial" else drawn.to(source.device, source.dtype)

    def _dropout(self, call: Call) -> Any:
        arguments = dict(zip(("input", "p", "training", "inplace"), call.args, strict=False)) | call.kwargs
        source: torch.Tensor = arguments["input"]
        probability = float(arguments.get("p", 0.5))
        if not arguments.get("training", True) or probability == 0.0:
            return PASS
        if call.op in {"alpha_dropout", "feature_alpha_dropout"}:
            return PASS
        shape = tuple(source.shape)
        if call.op != "dropout":  # whole channels
            shape = shape[:2] + (1,) * (len(shape) - 2)
        keep = torch.rand(shape, generator=self._generator) >= probability
        self.draws += 1
        scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
        mask = keep.to(source.device, source.dtype)
        # the scale stays a Python number: rounded to bfloat16 it would be off by as much as 0.4 %
        return source.mul_(mask).mul_(scale) if arguments.get("inplace", False) else source * mask * scale

    def _below_one(self, drawn: torch.Tensor) -> torch.Tensor:
        """Uniform draws that stay below 1 when rounded, as torch's do: models take logarithms of 1 - u."""
        return drawn.clamp(max=1.0 - torch.finfo(self._rounding).eps / 2)

    def _deliver(self, drawn: torch.Tensor, device: Any, dtype: torch.dtype) -> torch.Tensor:
        self.draws += 1
        if drawn.is_floating_point():
            drawn = drawn.to(self._rounding)
        return drawn.to(device=device, dtype=dtype)


def _host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
