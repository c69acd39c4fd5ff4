import math

import pytest

from align.compare.dataflow import Dataflow
from align.compare.judge import judge
from align.compare.model import Comparison, Coverage, Measures, NodeComparison, Pairing, Status
from align.compare.origin import LONGEST_LIST, excess_error, find_origins
from align.compare.policy import policy_named
from align.dumpers.model import NodeKey, NodeKind, OpClass


def measured(rel_l2):
    plain = dict.fromkeys(Measures.__slots__, 0) | {
        "count": 10**6,
        "rel_l2": rel_l2,
        "max_abs": 5 * rel_l2,
        "max_abs_index": (0,),
        "mere_normal": rel_l2,
        "max_reference": 5.0,
    }
    return Measures(**plain)


class Graph:
    """Nodes in order of completion, by short names."""

    def __init__(self):
        self.nodes = []

    def add(self, text, error, above=(), *, base=0.01, **fields):
        key = NodeKey.parse(text)
        kind = NodeKind.MODULE if key.op == "forward" else NodeKind.CALL
        standard = {
            "kind": kind,
            "op_class": OpClass.ORDINARY,
            "type_name": "T",
            "dtype": "bfloat16",
            "shape": (1000, 1000),
            "pairing": Pairing.EXACT,
        }
        candidate = None if error is None else measured(error)
        self.nodes.append(
            NodeComparison(
                key,
                len(self.nodes),
                candidate=candidate,
                baseline=measured(base),
                producers=tuple(map(NodeKey.parse, above)),
                **(standard | fields),
            )
        )
        return self

    def origins(self, **options):
        comparison = Comparison(tuple(self.nodes), Coverage(len(self.nodes), 0, 0, 0, 0, 0), has_baseline=True)
        judgement = judge(comparison, policy_named("cann-l1"))
        return judgement.origins, find_origins(comparison, judgement, **options)


def names(origins):
    return [str(origin.key) for origin in origins]


def test_a_fault_that_spreads_has_one_origin_with_its_figures():
    graph = Graph().add("a/mul#0:0", 0.01).add("b/mul#0:0", 0.05, ["a/mul#0:0"])
    for at in range(50):
        graph.add(f"c{at}/mul#0:0", 0.06, [f"c{at - 1}/mul#0:0" if at else "b/mul#0:0"])
    first, origins = graph.origins()
    assert names(origins) == ["b/mul#0:0"]
    assert first == (origins[0].key,)
    assert origins[0].status is Status.DRIFT
    assert origins[0].introduced == pytest.approx(math.sqrt(0.05**2 - 0.01**2))
    assert (origins[0].inherited, origins[0].amplification) == (0.0, math.inf)


def test_two_independent_branches_have_two_origins():
    graph = Graph().add("x/mul#0:0", 0.01).add("l/mul#0:0", 0.05, ["x/mul#0:0"]).add("r/mul#0:0", 0.05, ["x/mul#0:0"])
    graph.add("j/add#0:0", 0.05, ["l/mul#0:0", "r/mul#0:0"])
    assert names(graph.origins()[1]) == ["l/mul#0:0", "r/mul#0:0"]


def test_a_fault_passes_through_fused_away_and_movement_nodes():
    graph = Graph().add("b/mul#0:0", 0.05).add("i/exp#0:0", None, ["b/mul#0:0"], pairing=Pairing.FUSED_AWAY)
    graph.add("v/view#0:0", 0.05, ["i/exp#0:0"], op_class=OpClass.MOVEMENT).add("o/sum#0:0", 0.05, ["v/view#0:0"])
    assert names(graph.origins()[1]) == ["b/mul#0:0"]


def test_a_module_inherits_from_the_calls_inside_it():
    graph = (
        Graph()
        .add("x/mul#0:0", 0.01)
        .add("m.n/exp#0:0", 0.05, ["x/mul#0:0"])
        .add("m.n/forward#0:0", 0.05, ["x/mul#0:0"])
    )
    graph.add("m/forward#0:0", 0.05, ["x/mul#0:0"]).add("/forward#0:0", 0.05, ["x/mul#0:0"])
    assert names(graph.origins()[1]) == ["m.n/exp#0:0"]


def test_the_calls_of_a_modules_earlier_call_are_not_inside_its_later_one():
    graph = (
        Graph()
        .add("m/exp#0:0", 0.05)
        .add("m/forward#0:0", 0.05)
        .add("m/exp#1:0", 0.01)
        .add("m/forward#1:0", 0.01, ["x/none#0:0"])
    )
    flow = Dataflow(graph.nodes)
    assert [str(node.key) for node in flow.ancestors(NodeKey("m", "forward", 1))] == ["m/exp#1:0"]


def test_without_dataflow_the_first_fault_in_order_is_the_origin():
    graph = Graph()
    for at in range(20):
        graph.add(f"n{at}/mul#0:0", 0.01 if at < 5 else 0.04 + at / 1e4)
    assert names(graph.origins()[1]) == ["n5/mul#0:0"]


def test_a_later_step_inherits_from_the_step_before():
    graph = Graph().add("u/mul#0:0", 0.05).add("/forward#0:0", 0.05, ["u/mul#0:0"])
    graph.add("u/mul#0:0@1", 0.06).add("/forward#0:0@1", 0.06, ["u/mul#0:0@1"])
    assert names(graph.origins()[1]) == ["u/mul#0:0"]


def test_a_second_culprit_behind_passing_nodes_is_found():
    graph = (
        Graph().add("a/mul#0:0", 0.05).add("b/mean#0:0", 0.0101, ["a/mul#0:0"]).add("c/mul#0:0", 0.2, ["b/mean#0:0"])
    )
    first, origins = graph.origins()
    assert [str(key) for key in first] == ["a/mul#0:0"]
    assert names(origins) == ["a/mul#0:0", "c/mul#0:0"]


def test_local_errors_find_a_second_culprit_right_behind_the_first_and_replace_the_estimate():
    graph = Graph().add("a/mul#0:0", 0.05).add("b/mul#0:0", 0.2, ["a/mul#0:0"]).add("c/mul#0:0", 0.2, ["b/mul#0:0"])
    assert names(graph.origins()[1]) == ["a/mul#0:0"]
    local = {NodeKey.parse("a/mul#0:0"): 0.048, NodeKey.parse("b/mul#0:0"): 0.19, NodeKey.parse("c/mul#0:0"): 0.002}
    origins = graph.origins(local=local)[1]
    assert names(origins) == ["a/mul#0:0", "b/mul#0:0"]
    assert [origin.introduced for origin in origins] == [0.048, 0.19]
    assert origins[1].amplification == pytest.approx(math.sqrt(0.2**2 - 0.01**2) / math.sqrt(0.05**2 - 0.01**2))


def test_an_amplifier_is_told_from_a_culprit_by_local_errors():
    graph = Graph().add("a/mul#0:0", 0.05).add("b/div#0:0", 0.5, ["a/mul#0:0"])
    assert names(graph.origins(local={NodeKey.parse("b/div#0:0"): 0.001})[1]) == ["a/mul#0:0"]


def test_the_list_stays_short_and_keeps_the_largest():
    graph = Graph()
    graph.add("x/mul#0:0", 0.01)
    for at in range(30):
        graph.add(f"n{at}/mul#0:0", 0.05 + at / 100, ["x/mul#0:0"])
    origins = graph.origins()[1]
    assert names(origins) == [f"n{at}/mul#0:0" for at in range(30 - LONGEST_LIST, 30)]


def test_excess_is_in_squares_and_never_negative():
    graph = Graph().add("a/mul#0:0", 0.05, base=0.03).add("b/mul#0:0", 0.01, base=0.03)
    assert [excess_error(node) for node in graph.nodes] == [pytest.approx(0.04), 0.0]
