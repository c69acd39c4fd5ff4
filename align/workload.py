"""Load what the user hands us: a model, its inputs, and for generators a step loop; their code is never changed.

A target is `path/to/file.py:function`, `package.module:function`, or `demo`. The function returns one of
    (module, args)             args a tuple of positional arguments, a dict of keyword arguments, or one tensor
    (module, args, kwargs)
    an object with `model` and `inputs` (as above), and optionally
        `loop(model, *args, **kwargs)`: a generator function; each `yield` ends a step, its return value is the result
        `input_sets`: a dict of further named inputs
If the function takes `choices`, and its module (or the function) declares CHOICES, the names in CHOICES are switched
like fusions: all on in the candidate, all off in the baseline.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from align.dumpers.errors import AlignError, InterruptedRun, TargetError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_FORMS = "return (module, args), (module, args, kwargs), or an object with `model` and `inputs`"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with inputs, ready to run. `loop` is None for a single forward."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loop: Callable[..., Iterator[Any]] | None = None
    input_sets: Mapping[str, Arguments] | None = None

    def fresh_inputs(self, change: Callable[[torch.Tensor], Any]) -> Arguments:
        """Copies of the inputs with every tensor changed: caches and lists inside them must not leak between runs."""
        from align.dumpers.naming import map_tensors

        try:
            args, kwargs = copy.deepcopy((self.args, dict(self.kwargs)))
        except Exception:  # inputs that refuse to be copied are shared, as they would be without us
            args, kwargs = self.args, dict(self.kwargs)
        changed: Arguments = map_tensors((args, kwargs), change)
        return changed


@dataclass(frozen=True, slots=True)
class Target:
    """Where a workload comes from: its text, the function to call, and the choices it declares."""

    text: str
    build: Callable[..., Any]
    choices: tuple[str, ...] = ()

    def load(self, seed: int, choices: frozenset[str] = frozenset()) -> Workload:
        """Build the workload under a fixed seed. Raises TargetError naming what the function did wrong."""
        with _seeded(seed):
            try:
                made = self.build(choices=set(choices)) if self.choices else self.build()
            except (AlignError, KeyboardInterrupt):
                raise
            except Exception as exc:
                where = _last_line_of(exc)
                raise TargetError(
                    f"{self.text} raised {type(exc).__name__}: {exc}{where}", "make the function run on its own first"
                ) from exc
        return _workload(self.text, made)


def find_target(text: str) -> Target:
    """Resolve a target's text. Raises TargetError when file, module or function is missing."""
    if text == "demo":
        from align import demo

        return Target("demo", demo.build)
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise TargetError(f"not a target: {text!r}", "write file.py:function or package.module:function, or `demo`")
    module = _module_from_file(Path(place)) if place.endswith(".py") else _module_by_name(place)
    build = getattr(module, name, None)
    if not callable(build):
        names = ", ".join(sorted(n for n, v in vars(module).items() if inspect.isfunction(v))) or "none"
        raise TargetError(f"{place} has no function {name!r}", f"functions there: {names}")
    declared = getattr(build, "CHOICES", getattr(module, "CHOICES", ()))
    takes = "choices" in inspect.signature(build).parameters
    return Target(text, build, tuple(str(item) for item in declared) if takes else ())


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"target file not found: {path}", "give the path of an existing Python file before the colon")
    name = f"_align_target_{abs(hash(str(path.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"not a Python file: {path}", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _import_path(path.resolve().parent):
        _run_import(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    return module


def _module_by_name(name: str) -> ModuleType:
    with _import_path(Path.cwd()):
        return _run_import(lambda: importlib.import_module(name), name)  # type: ignore[no-any-return]


def _run_import(action: Callable[[], Any], name: str) -> Any:
    try:
        return action()
    except ModuleNotFoundError as exc:
        raise TargetError(f"cannot import {name}: {exc}", "install what it needs, or check the module's name") from exc
    except Exception as exc:
        raise TargetError(
            f"importing {name} raised {type(exc).__name__}: {exc}{_last_line_of(exc)}",
            "make the file import on its own first",
        ) from exc


@contextmanager
def _import_path(folder: Path) -> Iterator[None]:
    """Let the target import its neighbours, behind everything installed, and for this long only."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def _last_line_of(exc: BaseException) -> str:
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"


def _workload(name: str, made: Any) -> Workload:
    if isinstance(made, nn.Module):
        raise TargetError(f"{name} returned a module without inputs", _FORMS)
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        args, kwargs = _arguments(made[1])
        if len(made) == 3:
            kwargs = kwargs | dict(made[2])
        return Workload(name, made[0], args, kwargs)
    model, inputs = getattr(made, "model", None), getattr(made, "inputs", None)
    if not isinstance(model, nn.Module) or inputs is None:
        raise TargetError(f"{name} returned {type(made).__name__}, not a model with inputs", _FORMS)
    args, kwargs = _arguments(inputs)
    sets = getattr(made, "input_sets", None)
    named = {str(label): _arguments(value) for label, value in sets.items()} if sets else None
    return Workload(name, model, args, kwargs, getattr(made, "loop", None), named)


def _arguments(inputs: Any) -> Arguments:
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
            return tuple(inputs[0]), dict(inputs[1])
        return tuple(inputs), {}
    return (inputs,), {}


def interrupted() -> InterruptedRun:
    """The error a run ends with on Ctrl-C."""
    return InterruptedRun("interrupted: what was finished is kept", "run the same command with --force to start again")
