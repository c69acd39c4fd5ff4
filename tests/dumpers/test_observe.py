import gc
import io
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from align.dumpers.labels import TensorLabels
from align.dumpers.model import NodeKey, NodeKind, NodeRecord, OpClass, Storage
from align.dumpers.observe import Dataflow, Keep, Level, NoDataflow, Observe, Selection
from align.dumpers.placeholder import Placeholder
from align.dumpers.wire import Wire

ALL = Selection()


class ListSink:
    """Keep records, and copies of the tensors at the moment they came."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] = []
        self.values: dict[str, torch.Tensor] = {}

    def submit(self, record: NodeRecord, tensor: torch.Tensor) -> None:
        self.records.append(record)
        self.values[str(record.key)] = tensor.detach().clone()

    def submit_bare(self, record: NodeRecord) -> None:
        self.records.append(record)

    @property
    def keys(self) -> list[str]:
        return [str(record.key) for record in self.records]

    def record(self, key: str) -> NodeRecord:
        return next(record for record in self.records if str(record.key) == key)


def observed(
    model: nn.Module, *args: Any, selection: Selection = ALL, flow: Dataflow | None = None, **kwargs: Any
) -> ListSink:
    sink = ListSink()
    observe = Observe(sink, selection, dataflow=flow or Dataflow())
    with (
        torch.no_grad(),
        Wire({"": model}, [observe], sees_calls=selection.sees_calls, sees_outside=False, step_root=""),
    ):
        model(*args, **kwargs)
    return sink


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.softmax(h, -1) + h)


def test_each_level_records_its_kind_of_node() -> None:
    modules = ["first/forward#0:0", "last/forward#0:0", "/forward#0:0"]
    calls = ["first/linear#0:0", "/softmax#0:0", "/add#0:0", "last/linear#0:0"]
    both = [
        "first/linear#0:0",
        "first/forward#0:0",
        "/softmax#0:0",
        "/add#0:0",
        "last/linear#0:0",
        "last/forward#0:0",
        "/forward#0:0",
    ]
    for level, expected in ((Level.MODULE, modules), (Level.CALL, calls), (Level.BOTH, both)):
        sink = observed(Chain(), torch.ones(1, 4), selection=Selection(level))
        assert sink.keys == expected
        assert [record.order for record in sink.records] == list(range(len(expected)))


def test_producers_are_the_nearest_recorded_nodes_at_every_level() -> None:
    both = observed(Chain(), torch.ones(1, 4))
    assert list(map(str, both.record("/add#0:0").producers)) == ["/softmax#0:0", "first/forward#0:0"]
    assert list(map(str, both.record("/forward#0:0").producers)) == ["last/forward#0:0"]
    calls = observed(Chain(), torch.ones(1, 4), selection=Selection(Level.CALL))
    assert list(map(str, calls.record("/add#0:0").producers)) == ["/softmax#0:0", "first/linear#0:0"]
    narrow = observed(Chain(), torch.ones(1, 4), selection=Selection(Level.CALL, exclude=("*/softmax#*", "*/add#*")))
    assert list(map(str, narrow.record("last/linear#0:0").producers)) == ["first/linear#0:0"]


def test_without_calls_a_module_output_stems_from_what_the_module_was_given() -> None:
    sink = observed(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4), selection=Selection(Level.MODULE))
    assert list(map(str, sink.record("1/forward#0:0").producers)) == ["0/forward#0:0"]


def test_without_dataflow_no_producers_are_told() -> None:
    sink = observed(Chain(), torch.ones(1, 4), flow=NoDataflow())
    assert {record.producers for record in sink.records} == {()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": ("first",)}, ["first/linear#0:0", "first/forward#0:0"]),
        ({"include": ("*/forward#*",)}, ["first/forward#0:0", "last/forward#0:0", "/forward#0:0"]),
        ({"exclude": ("first", "last", "/*")}, []),
        ({"include": ("*",), "exclude": ("*linear*", "/*")}, ["first/forward#0:0", "last/forward#0:0"]),
        ({"operators": ("soft*",)}, ["/softmax#0:0"]),
        ({"operators": ("Linear",)}, ["first/forward#0:0", "last/forward#0:0"]),
        ({"steps": frozenset({1})}, []),
    ],
)
def test_globs_steps_and_operators_choose_what_is_recorded(options: Any, expected: list[str]) -> None:
    assert observed(Chain(), torch.ones(1, 4), selection=Selection(**options)).keys == expected


def test_inputs_are_recorded_before_the_call_by_position_and_by_name() -> None:
    class Named(nn.Module):
        def forward(self, x: list[torch.Tensor], *, mask: torch.Tensor) -> torch.Tensor:
            return x[0].add_(mask)

    x = torch.ones(2)
    sink = observed(Named(), [x], mask=torch.full((2,), 3.0), selection=Selection(Level.MODULE, inputs=True))
    assert sink.keys == ["/forward#0:in.0.0", "/forward#0:in.mask", "/forward#0:0"]
    assert sink.record("/forward#0:in.mask").kind is NodeKind.INPUT
    assert sink.values["/forward#0:in.0.0"].tolist() == [1.0, 1.0]
    assert sink.values["/forward#0:0"].tolist() == [4.0, 4.0]


def test_a_record_tells_class_dtype_shape_and_how_strictly_it_is_judged() -> None:
    sink = observed(Chain().to(torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16))
    softmax = sink.record("/softmax#0:0")
    assert (softmax.dtype, softmax.shape, softmax.op_class, softmax.storage) == (
        "bfloat16",
        (3, 4),
        OpClass.SENSITIVE,
        Storage.TENSOR,
    )
    assert sink.record("first/forward#0:0").type_name == "Linear"
    assert sink.record("/forward#0:0").kind is NodeKind.MODULE


@pytest.mark.parametrize(("keep", "storage"), [(Keep.STATISTICS, Storage.STATISTICS), (Keep.SAMPLE, Storage.SAMPLE)])
def test_what_is_kept_is_told_to_the_sink(keep: Keep, storage: Storage) -> None:
    sink = observed(nn.ReLU(), torch.ones(1), selection=Selection(keep=keep))
    assert {record.storage for record in sink.records} == {storage}


def test_fused_and_meta_tensors_are_recorded_without_data() -> None:
    class Ghost(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.to("meta"), Placeholder(x, x.device, "attention@x")

    sink = observed(Ghost(), torch.ones(2, 3), selection=Selection(Level.MODULE))
    meta, fused = sink.records
    assert (meta.storage, meta.shape, meta.device, meta.note) == (Storage.ABSENT, (2, 3), "meta", "no data")
    assert (fused.storage, fused.site) == (Storage.FUSED, "attention@x")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_a_node_of_each_component(layout: torch.layout) -> None:
    class Ragged(nn.Module):
        def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.nested_tensor(parts, layout=layout)

    sink = observed(Ragged(), [torch.ones(2, 3), torch.zeros(4, 3)], selection=Selection(Level.MODULE))
    assert [(str(record.key), record.shape) for record in sink.records] == [
        ("/forward#0:0.0", (2, 3)),
        ("/forward#0:0.1", (4, 3)),
    ]


def test_results_are_recorded_as_outputs_of_the_workload() -> None:
    sink = ListSink()
    observe = Observe(sink, Selection(), dataflow=Dataflow())
    keys = observe.record_result({"image": torch.ones(2)}, 3)
    assert keys == (NodeKey("", "output", 0, "image", 3),)
    assert sink.keys == ["/output#0:image@3"]


def test_the_rank_is_part_of_every_key() -> None:
    assert observed(nn.ReLU(), torch.ones(1), selection=Selection(rank=2)).keys == ["/relu#0:0%2", "/forward#0:0%2"]


def test_the_last_completed_node_and_the_failing_call_are_known() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    observe = Observe(ListSink(), Selection(Level.MODULE), dataflow=Dataflow())
    with pytest.raises(RuntimeError) as caught, Wire({"": model}, [observe], sees_calls=False):
        model(torch.ones(1, 4))
    assert str(observe.last) == "0/forward#0:0"
    assert observe.failure is not None
    assert (observe.failure.call, observe.failure.type_name, observe.failure.error) == (
        "1/forward#0",
        "Linear",
        caught.value,
    )


def test_no_tensor_is_touched_or_kept_alive() -> None:
    x, kept = torch.ones(1, 4), []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    observe = Observe(ListSink(), Selection(), dataflow=Dataflow())
    with torch.no_grad(), Wire({"": model}, [observe], sees_calls=True):
        y = model(x)
        kept.append(weakref.ref(y))
        assert [vars(tensor) for tensor in (x, y, *model.parameters())] == [{}, {}, {}, {}]
        file = io.BytesIO()
        torch.save(y, file)
        file.seek(0)
        assert torch.load(file, weights_only=True).shape == (1, 4)
        del y
        gc.collect()
        assert kept[0]() is None


def test_labels_of_gone_tensors_are_swept_out_and_a_new_tensor_in_their_place_has_none() -> None:
    labels: TensorLabels[int] = TensorLabels()
    for number in range(20_000):
        tensor = torch.empty(1)
        assert labels.get(tensor) is None
        labels.put(tensor, number)
        assert labels.get(tensor) == number
    assert len(labels) < 10_000


def test_a_tensor_that_lives_keeps_its_label_through_sweeps() -> None:
    labels: TensorLabels[int] = TensorLabels()
    kept = [torch.empty(1) for _ in range(3)]
    for number, tensor in enumerate(kept):
        labels.put(tensor, number)
    for _ in itertools.repeat(None, 10_000):
        labels.put(torch.empty(1), -1)
    assert [labels.get(tensor) for tensor in kept] == [0, 1, 2]
