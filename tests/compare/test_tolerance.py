import math

import numpy as np
import pytest

from align.compare.model import Comparison, Coverage, Measures, NodeComparison, Pairing
from align.compare.tolerance import NoiseFloors, Spread, floors_of_runs, noise_floors, nondeterminism, tolerance_factor
from align.dumpers.errors import UsageError
from align.dumpers.model import NodeKey, NodeKind, OpClass

KEY = NodeKey("a", "forward")


@pytest.mark.parametrize(("runs", "exact"), [(8, 4.354), (10, 3.981), (20, 3.295)])
def test_the_tolerance_factor_is_near_the_exact_one(runs, exact):
    """Exact one-sided factors for 99 % coverage at 95 % confidence, from Natrella's table A-7."""
    assert tolerance_factor(runs, 0.99, 0.95) == pytest.approx(exact, rel=0.07)


def spreads_of(rng, nodes, runs, deviation):
    levels = 10.0 ** rng.uniform(-4, -1, nodes)
    errors = levels[:, None] * np.exp(deviation * rng.standard_normal((nodes, runs)))
    keys = [NodeKey(f"n{i}", "forward") for i in range(nodes)]
    return levels, [Spread(key, tuple(row), tuple(10 * row)) for key, row in zip(keys, errors, strict=True)]


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("runs", [4, 8])
def test_rounding_only_candidates_are_hardly_ever_over_the_limit(runs, deviation):
    """200 models of 100 nodes: below 1 false alarm in 10,000 nodes, with limits that are still of use."""
    rng = np.random.default_rng(runs)
    alarms, slack = 0, []
    for _ in range(200):
        levels, spreads = spreads_of(rng, 100, runs, deviation)
        limits = np.array([limit.rel_l2 for limit in noise_floors(spreads).limits])
        alarms += int(np.sum(levels * np.exp(deviation * rng.standard_normal(100)) > limits))
        slack.append(float(np.median(limits / levels)))
    assert alarms <= 2
    assert np.median(slack) < math.exp(deviation * 16)


def nodes_of_random_models(rng, models, noise):
    """Relative L2 at the end of random float64 networks with relative `noise` a layer: 8 runs, a clean, a faulty."""
    for _ in range(models):
        width = int(rng.choice([8, 32]))
        weights = rng.standard_normal((6, width, width)) / math.sqrt(width)
        x = rng.standard_normal((16, width))

        def run(scale, fault=0.0, x=x, weights=weights):
            h = x
            for layer, w in enumerate(weights):
                h = h + np.tanh(h @ w) * (1 + (fault if layer == 2 else 0.0))
                h = h * (1 + scale * rng.uniform(-1, 1, h.shape))
            return h

        exact = run(0.0)
        size = np.linalg.norm(exact)
        errors = [np.linalg.norm(run(noise) - exact) / size for _ in range(8)]
        yield errors, np.linalg.norm(run(noise) - exact) / size, np.linalg.norm(run(noise, fault=0.05) - exact) / size


def test_over_200_random_models_rounding_is_not_flagged_and_a_five_percent_scale_is():
    rng = np.random.default_rng(5)
    spreads, clean, faulty = [], [], []
    for at, (errors, one, wrong) in enumerate(nodes_of_random_models(rng, 200, 2.0**-8)):
        spreads.append(Spread(NodeKey(f"m{at}", "forward"), tuple(errors), tuple(errors)))
        clean.append(one)
        faulty.append(wrong)
    limits = np.array([limit.rel_l2 for limit in noise_floors(spreads).limits])
    assert np.sum(clean > limits) == 0
    assert np.mean(faulty > limits) > 0.95


def test_nondeterminism_is_a_floor_under_the_limit():
    spread = Spread(KEY, (0.01,) * 8, (0.1,) * 8)
    calm = noise_floors([spread]).limits[0]
    shaky = noise_floors([spread], reruns={KEY: 0.02}).limits[0]
    assert calm.rel_l2 == pytest.approx(0.01)
    assert shaky.rel_l2 == pytest.approx(math.hypot(0.01, 0.02))
    assert shaky.nondeterminism == 0.02


def test_a_node_that_rounding_never_moves_has_no_limit():
    assert noise_floors([Spread(KEY, (0.0,) * 8, (0.0,) * 8)]) == NoiseFloors(())


def test_too_few_runs_are_refused():
    with pytest.raises(UsageError, match="3 perturbed runs"):
        noise_floors([Spread(KEY, (0.1, 0.2, 0.3), (0.1, 0.2, 0.3))])


def comparison(rel_l2):
    plain = dict.fromkeys(Measures.__slots__, 0) | {"rel_l2": rel_l2, "max_abs": 10 * rel_l2, "max_abs_index": ()}
    node = NodeComparison(
        KEY, 0, NodeKind.MODULE, OpClass.ORDINARY, "T", "bfloat16", (4,), Pairing.EXACT, Measures(**plain)
    )
    return Comparison((node,), Coverage(1, 1, 0, 0, 8, 8), has_baseline=False)


def test_floors_are_taken_from_comparisons_of_perturbed_runs():
    floors = floors_of_runs([comparison(0.01 * (1 + i / 100)) for i in range(8)], comparison(0.001))
    limit = floors.by_key()[KEY]
    assert 0.0107 < limit.rel_l2 < 0.015
    assert limit.max_abs == pytest.approx(10 * limit.rel_l2)
    assert (limit.runs, limit.nondeterminism) == (8, 0.001)
    assert nondeterminism(comparison(0.0)) == {}
