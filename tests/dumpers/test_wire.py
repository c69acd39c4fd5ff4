import copy
import inspect
import io
import pickle
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from align.dumpers.wire import PASS, Call, Tap, Wire


class Log(Tap):
    """Write down the name of every call, in order of completion; function calls with what they are."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: list[str] = []
        self.outputs: dict[str, Any] = {}

    def enter(self, call: Call) -> None:
        pass

    def leave(self, call: Call, output: Any) -> Any:
        return self.finish(call, output)

    def finish(self, call: Call, output: Any) -> Any:
        name = f"{call}@{call.step}" if call.step else str(call)
        self.done.append(name)
        self.outputs[name] = output
        return output

    def fail(self, call: Call, error: BaseException) -> None:
        self.failed.append(str(call))


class Ops(TorchDispatchMode):
    """Write down the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def modules_only(model: nn.Module, log: Log) -> Wire:
    return Wire({"": model}, [log], sees_calls=False)


def with_calls(model: nn.Module, log: Log) -> Wire:
    return Wire({"": model}, [log], sees_calls=True, sees_outside=False)


def traces_of_us(model: nn.Module) -> list[Any]:
    return [
        {name: value for name, value in vars(module).items() if not name.startswith("_")} for module in model.modules()
    ]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize(
    "build", [encoder, lambda: encoder().layers[0], lambda: nn.MultiheadAttention(32, 4, batch_first=True).eval()]
)
def test_seeing_modules_does_not_change_the_operators_that_run_nor_a_bit_of_the_result(build: Any) -> None:
    model, x = build(), torch.randn(2, 5, 32)
    args = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    bare, seen = Ops(), Ops()
    with torch.no_grad():
        with bare:
            expected = model(*args)
        with modules_only(model, Log()), seen:
            result = model(*args)
    assert seen.names == bare.names
    assert any(
        "_transformer_encoder_layer_fwd" in name or "_native_multi_head_attention" in name for name in bare.names
    )
    assert torch.equal(
        result[0] if isinstance(result, tuple) else result, expected[0] if isinstance(expected, tuple) else expected
    )


def test_modules_whose_fused_path_is_off_while_calls_are_seen_are_named() -> None:
    model = encoder()
    with Wire({"": model}, [], sees_calls=True) as wire:
        assert wire.unfused == ("layers.0", "layers.0.self_attn", "layers.1", "layers.1.self_attn")
    with Wire({"": model}, [], sees_calls=False) as wire:
        assert wire.unfused == ()
    with Wire({"": model.train()}, [], sees_calls=True) as wire:
        assert wire.unfused == ()


def test_nothing_is_left_on_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_hook(lambda *_: None)
    before = [dict(vars(module)) for module in model.modules()]
    with with_calls(model, Log()):
        model(torch.ones(1, 4))
    assert [dict(vars(module)) for module in model.modules()] == before


def test_nothing_is_left_after_an_exception_and_the_failing_calls_are_told_innermost_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 2))
    before, log = traces_of_us(model), Log()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), with_calls(model, log) as wire:
        model(torch.ones(1, 4))
    assert traces_of_us(model) == before
    assert log.failed == ["1/linear#0", "1/forward#0", "/forward#0"]
    assert log.done == ["0/linear#0", "0/forward#0"]
    assert wire.depth == 0


def test_the_place_in_the_model_is_right_again_after_an_exception_that_the_model_handles() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.risky(x)
            except RuntimeError:
                return x.neg()

    log, model = Log(), Careful()
    with with_calls(model, log):
        model(torch.ones(1, 4))
    assert log.done == ["/neg#0", "/forward#0"]


def test_a_forward_called_directly_is_seen() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x)

    log, model = Log(), Direct()
    with modules_only(model, log):
        model.forward(torch.ones(1, 4))
    assert log.done == ["inner/forward#0", "/forward#0"]


def test_a_shared_module_has_one_name_and_counts_on() -> None:
    shared, log = nn.Linear(4, 4), Log()
    model = nn.ModuleDict({"a": shared, "b": shared})
    with Wire({"x": model, "y": shared}, [log], sees_calls=False):
        model["a"](torch.ones(1, 4))
        model["b"](torch.ones(1, 4))
    assert log.done == ["x.a/forward#0", "x.a/forward#1"]


def test_what_a_modules_own_hook_returns_is_what_is_seen() -> None:
    model, log = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Log()
    model[0].register_forward_hook(lambda module, args, output: output * 0 + 7)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with modules_only(model, log):
        model(torch.ones(1, 4))
        model[0].forward(torch.ones(1, 4))
    assert log.done == ["0/forward#0", "1/forward#0", "/forward#0", "0/forward#1"]
    assert log.outputs["0/forward#0"].tolist() == [[7.0] * 4]
    assert log.outputs["1/forward#0"].tolist() == [[8.0] * 4]
    assert log.outputs["0/forward#1"].tolist() != [[7.0] * 4]


def test_an_exception_in_a_modules_own_hook_fails_its_call() -> None:
    def broken(*_: Any) -> None:
        raise ValueError("hook")

    model, log = nn.Sequential(nn.Linear(4, 4)), Log()
    handle = model[0].register_forward_hook(broken)
    with modules_only(model, log):
        with pytest.raises(ValueError, match="hook"):
            model(torch.ones(1, 4))
        handle.remove()
        model(torch.ones(1, 4))
    assert log.failed == ["0/forward#0", "/forward#0"]
    assert log.done == ["0/forward#1", "/forward#1"]


def test_a_forward_that_the_user_sets_meanwhile_stays_and_an_older_one_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def before(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    model[0].forward = before
    with modules_only(model, Log()):
        inner = model[1].forward
        model[1].forward = lambda x: inner(x) + 1  # as accelerate's hooks do
        assert model(torch.ones(1, 4)).tolist() == [[3.0] * 4]
    assert vars(model[0])["forward"] is before
    assert model(torch.ones(1, 4)).tolist() == [[3.0] * 4]


def test_a_copy_or_pickle_made_meanwhile_is_free_of_us_and_computes_with_its_own_weights() -> None:
    model, log, x = nn.Linear(4, 4), Log(), torch.ones(1, 4)
    with modules_only(model, log):
        twin = copy.deepcopy(model)
        nn.init.zeros_(twin.weight)
        nn.init.zeros_(twin.bias)
        assert twin(x).tolist() == [[0.0] * 4]
        loaded = pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        assert log.done == []
    assert torch.equal(loaded(x), model(x))


def test_the_signature_and_attributes_of_forward_are_still_the_models() -> None:
    class Named(nn.Module):
        def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
            return hidden

    model = Named()
    before = inspect.signature(model.forward)
    with modules_only(model, Log()):
        assert inspect.signature(model.forward) == before
        assert model.forward.__name__ == "forward"


@pytest.mark.parametrize("is_nested_right", [True, False])
def test_two_wires_on_one_model_both_see_it_and_leave_nothing(is_nested_right: bool) -> None:
    model, first, second = nn.Sequential(nn.Linear(4, 4)), Log(), Log()
    before = traces_of_us(model)
    one, two = (modules_only(model, log) for log in (first, second))
    one.__enter__()
    two.__enter__()
    model(torch.ones(1, 4))
    for wire in (two, one) if is_nested_right else (one, two):
        wire.__exit__(None, None, None)
    assert first.done == second.done == ["0/forward#0", "/forward#0"]
    assert traces_of_us(model) == before


def test_nested_wires_that_see_calls_do_not_see_each_others_work() -> None:
    model, first, second = nn.Linear(4, 4), Log(), Log()
    with with_calls(model, first), with_calls(model, second):
        model(torch.ones(1, 4))
    assert first.done == second.done == ["/linear#0", "/forward#0"]


def test_what_a_tap_asks_of_torch_is_not_a_call() -> None:
    class Busy(Log):
        def enter(self, call: Call) -> None:
            torch.ones(3).neg()

        def leave(self, call: Call, output: Any) -> Any:
            return super().leave(call, output.add(1).sub(1))

        def finish(self, call: Call, output: Any) -> Any:
            return super().finish(call, output.neg().neg() if isinstance(output, torch.Tensor) else output)

    model, log = nn.Linear(4, 4), Busy()
    with with_calls(model, log):
        model(torch.ones(1, 4))
    assert log.done == ["/linear#0", "/forward#0"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_in_backward_is_not_another_call(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(lambda z: self.a(z).tanh(), x, use_reentrant=use_reentrant)).sum()

    model, log = Checkpointed(), Log()
    with with_calls(model, log):
        model(torch.ones(1, 4, requires_grad=True)).backward()
    assert [name for name in log.done if "forward" in name] == ["a/forward#0", "b/forward#0", "/forward#0"]
    assert [name for name in log.done if "linear" in name or "tanh" in name] == ["a/linear#0", "/tanh#0", "b/linear#0"]


def test_a_forward_that_is_a_generator_makes_a_call_of_every_value_it_yields() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            for _ in range(2):
                x = self.inner(x)
                scale = yield x
                x = x * (scale or 1)

    model, log = Steps(), Log()
    with with_calls(model, log):
        made = model(torch.ones(1, 4))
        first = next(made)
        assert made.send(3).shape == (1, 4)
        with pytest.raises(StopIteration):
            next(made)
    assert [name for name in log.done if "linear" not in name] == [
        "/forward#0",
        "inner/forward#0",
        "/yield#0",
        "/mul#0",
        "inner/forward#1",
        "/yield#1",
        "/mul#1",
    ]
    assert log.outputs["/yield#0"] is first


def test_a_generator_that_outlives_the_wire_goes_on_unseen() -> None:
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x
            try:
                yield x + 1
            finally:
                self.is_closed = True

    model, log = Steps(), Log()
    with modules_only(model, log):
        made = model(torch.ones(1))
        next(made)
    assert next(made).item() == 2
    made.close()
    assert model.is_closed
    assert log.done == ["/forward#0", "/yield#0"]


def test_calls_in_a_thread_of_the_users_are_seen_too() -> None:
    model, log = nn.Sequential(nn.Linear(4, 4)), Log()
    with with_calls(model, log) as wire:
        thread = threading.Thread(target=lambda: model(torch.ones(1, 4)))
        thread.start()
        thread.join()
        assert wire.depth == 0
    assert log.done == ["0/linear#0", "0/forward#0", "/forward#0"]


def test_the_place_in_the_model_is_each_threads_own() -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entered, self.go = threading.Event(), threading.Event()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.entered.set()
            self.go.wait(10)
            return x.neg()

    slow, quick, log = Waits(), nn.ReLU(), Log()
    with Wire({"slow": slow, "quick": quick}, [log], sees_calls=True, sees_outside=False):
        thread = threading.Thread(target=lambda: slow(torch.ones(1)))
        thread.start()
        slow.entered.wait(10)
        quick(torch.ones(1))
        slow.go.set()
        thread.join()
    assert log.done == ["quick/relu#0", "quick/forward#0", "slow/neg#0", "slow/forward#0"]


@pytest.mark.parametrize("wrapper", ["DataParallel", "compiled", "bare"])
def test_keys_are_the_same_with_and_without_wrappers(wrapper: str) -> None:
    model, log = nn.Sequential(nn.Linear(4, 4)), Log()
    outer: Any = nn.DataParallel(model) if wrapper == "DataParallel" else model
    outer = torch.compile(outer, backend="eager") if wrapper == "compiled" else outer
    with modules_only(outer, log):
        outer(torch.ones(1, 4))
    assert log.done[-1] == "/forward#0"
    assert log.done == (["/forward#0"] if wrapper == "compiled" else ["0/forward#0", "/forward#0"])


def test_a_users_own_module_called_module_keeps_its_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x) + 1

    model, log = Own(), Log()
    with modules_only(model, log):
        model(torch.ones(1, 4))
    assert log.done == ["module/forward#0", "/forward#0"]


class Mixed(nn.Module):
    """A model with one sealed part."""

    def __init__(self, sealed: nn.Module) -> None:
        super().__init__()
        self.first, self.sealed, self.last = nn.Linear(4, 4), sealed, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.sealed(self.first(x)))


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module.compile(backend="eager")
    return module


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class Decorated(nn.Module):
    """A module whose forward is compiled where it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


SEALED = [
    lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager"),
    compiled_in_place,
    scripted,
    Decorated,
]


@pytest.mark.parametrize("sees_calls", [False, True])
@pytest.mark.parametrize("build", SEALED)
def test_of_a_compiled_or_scripted_module_the_output_is_seen_and_nothing_inside(build: Any, sees_calls: bool) -> None:
    torch._dynamo.reset()
    model, log, x = Mixed(build()), Log(), torch.ones(1, 4)
    with torch.no_grad():
        expected = model(x)
        before = [dict(vars(module)) for module in (model, model.first, model.sealed)]
        with Wire({"": model}, [log], sees_calls=sees_calls) as wire:
            result = model(x)
        assert [dict(vars(module)) for module in (model, model.first, model.sealed)] == before
    assert wire.opaque == ("sealed",)
    assert torch.equal(result, expected)
    assert [name for name in log.done if "forward" in name] == [
        "first/forward#0",
        "sealed/forward#0",
        "last/forward#0",
        "/forward#0",
    ]
    assert [name for name in log.done if "linear" in name] == (
        ["first/linear#0", "last/linear#0"] if sees_calls else []
    )


@pytest.mark.parametrize("sees_calls", [False, True])
def test_a_function_compiled_around_the_model_compiles_and_runs_as_if_we_were_not_there(sees_calls: bool) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, log, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Log(), torch.ones(1, 4)
    compiled = torch.compile(lambda z: model(z) + 1, backend=backend, fullgraph=True)
    with torch.no_grad(), Wire({"": model}, [log], sees_calls=sees_calls):
        result = compiled(x)
    assert torch.equal(result, model(x) + 1)
    assert len(graphs) == 1
    assert [name for name in log.done if "forward" in name] == []


def test_containers_without_a_forward_are_not_silent_but_unused_modules_are() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(1))])
            self.unused = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x) * self.scales[0]

    model = Net()
    with modules_only(model, Log()) as wire:
        model(torch.ones(1, 4))
    assert wire.silent == ("unused",)


def test_a_second_call_of_the_step_root_begins_the_next_step() -> None:
    model, log = nn.Sequential(nn.ReLU()), Log()
    with Wire({"": model}, [log], sees_calls=False, step_root="") as wire:
        for _ in range(2):
            model(torch.ones(1))
        wire.next_step()
        model(torch.ones(1))
    assert log.done == ["0/forward#0", "/forward#0", "0/forward#0@1", "/forward#0@1", "0/forward#0@2", "/forward#0@2"]


def test_calls_outside_the_model_count_only_if_asked_for() -> None:
    for sees_outside, expected in ((True, ["/add#0"]), (False, [])):
        log = Log()
        x = torch.ones(1)
        with Wire({"": nn.ReLU()}, [log], sees_calls=True, sees_outside=sees_outside):
            torch.add(x, 1)
        assert log.done == expected


def test_taps_replace_inputs_calls_and_outputs() -> None:
    class Steer(Tap):
        def prepare(self, call: Call) -> None:
            if call.op == "mul":
                call.args = (call.args[0], 10)

        def execute(self, call: Call) -> Any:
            return torch.full((1,), 5.0) if call.op == "neg" else PASS

        def finish(self, call: Call, output: Any) -> Any:
            return output + 0.5 if call.op == "abs" else output

    x = torch.ones(1)
    with Wire({}, [Steer()], sees_calls=True):
        results = [torch.mul(x, 2).item(), torch.neg(x).item(), torch.abs(x).item()]
    assert results == [10.0, 5.0, 1.5]


def test_the_models_own_function_modes_still_act() -> None:
    model = nn.Linear(2, 2)
    guard: AbstractContextManager[Any] = torch.device("meta")
    with Wire({"": model}, [], sees_calls=True), guard:
        assert torch.ones(1).is_meta
