"""Public complaints about dumpers, each rebuilt small, with the answer that must come."""

import copy
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from align.compare.measures import measure
from align.dumpers.dtypes import widen
from align.dumpers.model import NodeKey, NodeRecord, RunStatus, Statistics, Storage
from align.dumpers.store import Trace
from align.recording import capture


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


def dump(model: nn.Module, path: Path, *args: Any, **options: Any) -> Any:
    with torch.no_grad(), capture(model, path, **options):
        return model(*args)


def nodes(path: Path) -> dict[str, NodeRecord]:
    with Trace.open(path) as trace:
        return {str(record.key).removesuffix(":0").replace("/forward", ""): record for record in trace.nodes}


def value(path: Path, key: str) -> Any:
    with Trace.open(path) as trace:
        return widen(trace.read(NodeKey.parse(key)))


def notes(path: Path) -> str:
    with Trace.open(path) as trace:
        return trace.document("notes")


def statistics(record: NodeRecord) -> Statistics:
    assert record.statistics is not None
    return record.statistics


class Returns(nn.Module):
    """A module that returns whatever a function makes of its input."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Any) -> Any:
        return self.make(x)


# The run dies midway


class MaskedAttention(nn.Module):
    """Attention with the constant -1e9 in its mask, which float16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        scores = (q @ q.transpose(-1, -2)).masked_fill(~keep, -1e9)
        return self.out(scores.softmax(-1) @ q)


def test_when_low_precision_raises_the_dump_says_where_and_keeps_what_came_before(path: Path) -> None:
    x, keep = torch.ones(1, 4, 16), torch.ones(4, 4, dtype=torch.bool).tril()
    MaskedAttention()(x, keep)
    with pytest.raises(RuntimeError, match="without overflow"):
        dump(MaskedAttention().half(), path, x.half(), keep, level="both")
    with Trace.open(path) as trace:
        assert trace.status is RunStatus.FAILED
        assert [record.key.call_name for record in trace.nodes][:2] == ["q/linear#0", "q/forward#0"]
        found = trace.document("notes")
    assert "stopped by RuntimeError in /masked_fill#0" in found
    assert "last completed node: /invert#0:0" in found


def test_when_the_forward_raises_the_users_error_passes_unchanged_and_nothing_stays_on_the_model(path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(RuntimeError) as bare:
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError) as seen:
        dump(model, path, torch.ones(2, 4))
    assert str(seen.value) == str(bare.value)
    assert list(nodes(path)) == ["0#0", "1#0"]
    assert "stopped by RuntimeError in 2/forward#0 (Linear)" in notes(path)
    assert "last completed node: 1/forward#0:0" in notes(path)
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())


# What was dumped changes afterwards


def test_an_in_place_relu_does_not_reach_back_into_the_dump_of_the_convolution(path: Path) -> None:
    torch.manual_seed(0)
    dump(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)), path, torch.randn(1, 3, 8, 8))
    assert value(path, "0/forward#0:0").min() < 0
    assert statistics(nodes(path)["0#0"]).minimum < 0
    assert value(path, "1/forward#0:0").min() == 0


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_a_view_of_a_cache_holds_what_it_held_when_it_was_returned(path: Path, keep: str) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(8, 4))
            self.count = 0

        def forward(self, row: torch.Tensor) -> torch.Tensor:
            self.rows[self.count] = row
            self.count += 1
            return self.rows[: self.count]

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = Cache()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = sum(self.cache(row).sum() for row in x)
            self.cache.rows.zero_()
            return total

    dump(Decoder(), path, torch.ones(3, 4), keep=keep)
    found = nodes(path)
    assert [found[f"cache#{number}"].shape for number in range(3)] == [(1, 4), (2, 4), (3, 4)]
    assert [statistics(found[f"cache#{number}"]).minimum for number in range(3)] == [1.0, 1.0, 1.0]


# Calls are missed or counted wrongly


def test_a_module_called_many_times_keeps_every_call_in_order(path: Path) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.a, self.b, self.cell = nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.act(self.b(self.act(self.a(x))))
            for _ in range(3):
                h = self.act(self.cell(h))
            return h

    dump(Loop(), path, torch.ones(2, 4))
    assert list(nodes(path)) == [
        "a#0",
        "act#0",
        "b#0",
        "act#1",
        "cell#0",
        "act#2",
        "cell#1",
        "act#3",
        "cell#2",
        "act#4",
        "#0",
    ]


def test_children_whose_forward_is_called_directly_are_dumped(path: Path) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head.forward(self.enc.forward(x))

    dump(Direct(), path, torch.ones(1, 8))
    assert list(nodes(path)) == ["enc.0#0", "enc.1#0", "enc#0", "head#0", "#0"]


def test_containers_are_not_missed_and_an_unused_module_is_named(path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.unused, self.heads = nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 2)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.heads["a"](x)

    dump(Net(), path, torch.ones(1, 4))
    assert list(nodes(path)) == ["blocks.0#0", "blocks.1#0", "heads.a#0", "#0"]
    assert notes(path) == "modules with parameters that were never called: unused"


def test_a_projection_whose_weights_are_used_functionally_is_named(path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.att, self.ff = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ff(self.att(x, x, x, need_weights=False)[0])

    dump(Net().eval(), path, torch.ones(2, 4, 16))
    assert list(nodes(path)) == ["att#0", "ff#0", "#0"]  # att returns (tensor, None)
    assert notes(path) == "modules with parameters that were never called: att.out_proj"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_a_checkpointed_region_is_not_another_call(path: Path, use_reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.t, self.c, self.b = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(lambda z: self.c(self.t(self.a(z))), x, use_reentrant=use_reentrant)).sum()

    model = Net().train()
    with capture(model, path):
        model(torch.ones(2, 8, requires_grad=True)).backward()
    assert list(nodes(path)) == ["a#0", "t#0", "c#0", "b#0", "#0"]


# What modules return


@dataclass
class Output:
    logits: torch.Tensor
    aux: Any = None


Pair = namedtuple("Pair", "h c")


def test_tensors_in_any_container_are_found_and_none_numbers_and_texts_are_no_nodes(path: Path) -> None:
    makers: dict[str, Callable[[Any], Any]] = {
        "dct": lambda x: {"y": x},
        "odct": lambda x: OrderedDict(out=x, aux=x),
        "data": lambda x: Output(x, [x, None]),
        "named": lambda x: Pair(x, x),
        "none": lambda x: None,
        "number": lambda x: 3,
        "nest": lambda x: (x, [x, {"z": (x,)}]),
        "text": lambda x: "ok",
    }

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.ModuleDict({name: Returns(make) for name, make in makers.items()})

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {name: module(x) for name, module in self.m.items()}

    dump(Net(), path, torch.ones(2, 3))
    with Trace.open(path) as trace:
        slots = {name: [r.key.slot for r in trace.nodes if r.key.path == f"m.{name}"] for name in makers}
        root = [record for record in trace.nodes if not record.key.path]
    assert slots == {
        "dct": ["y"],
        "odct": ["out", "aux"],
        "data": ["logits", "aux.0"],
        "named": ["h", "c"],
        "none": [],
        "number": [],
        "nest": ["0", "1.0", "1.1.z.0"],
        "text": [],
    }
    assert len(root) == 10


@pytest.mark.parametrize("argument", [[torch.ones(2)], {"x": torch.ones(2)}, Output(torch.ones(2))])
def test_a_list_dict_or_dataclass_as_the_only_argument_and_keyword_only_forwards(path: Path, argument: Any) -> None:
    class Named(nn.Module):
        def forward(self, *, batch: Any) -> torch.Tensor:
            return torch.ones(2)

    model = Named()
    with capture(model, path, inputs=True):
        model(batch=argument)
    slot = {list: "batch.0", dict: "batch.x", Output: "batch.logits"}[type(argument)]
    assert list(nodes(path)) == [f"#0:in.{slot}", "#0"]


# Odd dtypes, shapes and places


def test_bfloat16_keeps_its_sixteen_bits(path: Path) -> None:
    bits = np.array([0x7FC1, 0x8000, 0x0001, 0x7F80, 0x3F80], np.uint16)  # NaN with payload, -0, smallest, inf, 1
    x = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    dump(nn.Identity(), path, x)
    record = nodes(path)["#0"]
    with Trace.open(path) as trace:
        assert np.array_equal(trace.read(record.key).bits.view(np.uint16), bits)
    assert record.dtype == "bfloat16"
    assert (
        statistics(record).nan,
        statistics(record).posinf,
        statistics(record).zero,
        statistics(record).subnormal,
    ) == (1, 1, 1, 1)


def test_an_activation_beyond_two_to_the_twenty_four_elements_is_described(path: Path) -> None:
    dump(
        Returns(lambda x: x.expand(1, 2**24 + 8).contiguous()),
        path,
        torch.ones(1, 1, dtype=torch.bfloat16),
        keep="stats",
    )
    found = statistics(nodes(path)["#0"])
    assert (found.count, found.mean, found.std) == (2**24 + 8, 1.0, 0.0)


def test_empty_scalar_bool_integer_complex_conjugate_and_expanded_tensors_are_stored_and_described(path: Path) -> None:
    makers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "empty": lambda x: x[:0],
        "scalar": lambda x: x.sum(),
        "boolean": lambda x: x > 0,
        "integer": lambda x: x.argmax(-1),
        "cplx": lambda x: torch.view_as_complex(x.reshape(-1, 2)),
        "conj": lambda x: torch.view_as_complex(x.reshape(-1, 2)).conj(),
        "neg": lambda x: torch.view_as_complex(x.reshape(-1, 2)).conj().imag,
        "expand": lambda x: x[:1].expand(1000, 8),
        "u16": lambda x: x.abs().to(torch.uint16),
    }
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = nn.ModuleDict({name: Returns(make) for name, make in makers.items()})
    with capture(model, path):
        expected = {name: module(x) for name, module in model.items()}
    with Trace.open(path) as trace:
        for name, tensor in expected.items():
            record = trace.record(NodeKey(name, "forward"))
            assert (record.dtype, record.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert np.array_equal(trace.read(record.key).bits, tensor.resolve_conj().resolve_neg().numpy())
            assert statistics(record).count == tensor.numel()


def test_zero_and_tiny_nodes_compare_as_equal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Returns(lambda x: torch.relu(x - 100)), nn.Linear(8, 8), Returns(lambda x: x * 1e-30)
    )
    x = torch.randn(2, 8)
    for name in ("a", "b"):
        dump(model, tmp_path / f"{name}.h5", x)
    with Trace.open(tmp_path / "a.h5") as a, Trace.open(tmp_path / "b.h5") as b:
        for name, is_zero in (("1", True), ("3", False)):
            key = NodeKey(name, "forward")
            mine, other = a.read(key), b.read(key)
            assert bool((mine.bits == 0).all()) is is_zero
            assert measure(mine, other).cosine_distance == 0


def test_parts_on_the_meta_device_are_recorded_as_without_data_and_the_rest_is_kept(path: Path) -> None:
    class Offloaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.ghost, self.head = nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = self.lin(x)
            return self.head(h), self.ghost(h.to("meta"))

    dump(Offloaded(), path, torch.ones(2, 4), level="both")
    found = nodes(path)
    assert (found["ghost#0"].storage, found["ghost#0"].shape, found["ghost#0"].note) == (
        Storage.ABSENT,
        (2, 4),
        "no data",
    )
    assert found["#0:1"].storage is Storage.ABSENT
    assert {found[name].storage for name in ("lin#0", "head#0", "#0")} == {Storage.TENSOR}


def test_a_model_that_cannot_be_copied_is_captured_as_it_is(path: Path) -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.l = nn.utils.weight_norm(nn.Linear(8, 8))
            self.s = nn.Linear(8, 8)
            self.cached = self.s.weight * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.l(x) @ self.cached

    model = Stubborn()
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(model)
    expected = model(torch.ones(1, 8))
    assert torch.equal(dump(model, path, torch.ones(1, 8)), expected)
    assert list(nodes(path)) == ["l#0", "#0"]


# The dump changes the program


def encoder_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()


def test_dumping_modules_does_not_switch_the_fused_encoder_path_off(path: Path) -> None:
    model, x = encoder_layer(), torch.ones(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(dump(model, path, x), expected)
    assert list(nodes(path)) == ["#0"]  # the fused kernel calls no child
    assert "fused encoder path" not in notes(path)


def test_observing_calls_switches_the_fused_encoder_path_off_and_says_so(path: Path) -> None:
    model, x = encoder_layer(), torch.ones(2, 5, 32)
    result = dump(model, path, x, level="both")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert torch.equal(model(x), result)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert "torch's fused encoder path is off while calls are observed: (model), self_attn" in notes(path)
    assert "linear1#0" in nodes(path)


def test_hooks_of_ours_never_run_inside_compiled_code_and_its_rounding_stays_what_it_is(path: Path) -> None:
    torch._dynamo.reset()

    def rounds_once(graph: Any, inputs: Any) -> Any:
        """A stand-in for a fusing compiler: the chain in float32, rounded at its end."""
        del graph
        layer, norm = (torch.Size((8,)), F.layer_norm)
        return lambda *args: (
            norm(F.gelu(norm(next(a for a in args if a.ndim == 2).float(), layer)), layer).bfloat16(),
        )

    torch.manual_seed(0)
    chain = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8)).bfloat16()
    x = torch.randn(64, 8).mul(3).bfloat16()
    compiled = torch.compile(chain, backend=rounds_once)
    with torch.no_grad():
        eager, fused = chain(x), compiled(x)
    assert not torch.equal(eager, fused)
    for level in ("module", "both"):
        assert torch.equal(dump(compiled, path, x, level=level, overwrite=True), fused)
        assert [name for name in nodes(path) if name.endswith("#0") and "/" not in name] == ["#0"]
        assert "compiled modules are seen from outside only: (model)" in notes(path)


def test_a_model_compiled_before_is_never_an_empty_dump_without_a_word(path: Path) -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        with capture(model, path):
            compiled(x)
    found = nodes(path)
    assert list(found) == ["0#0", "1#0", "#0"] or "nothing was recorded" in notes(path)
