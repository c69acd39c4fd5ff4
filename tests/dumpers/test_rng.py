from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.dumpers.rng import AlignRandom
from align.dumpers.wire import Wire


def drawn(draw: Any, *, seed: int = 0, rounding: torch.dtype = torch.bfloat16) -> Any:
    tap = AlignRandom(seed, rounding)
    with Wire({}, [tap], sees_calls=True):
        result = draw()
    assert tap.draws > 0
    return result


DRAWS = {
    "rand": lambda dtype: torch.rand(2, 3, dtype=dtype),
    "randn": lambda dtype: torch.randn((2, 3), dtype=dtype, device="cpu", generator=torch.Generator().manual_seed(5)),
    "normal": lambda dtype: torch.normal(torch.zeros(6), torch.ones(6)).to(dtype),
    "rand_like": lambda dtype: torch.rand_like(torch.empty(2, 3, dtype=dtype)),
    "randn_like": lambda dtype: torch.randn_like(torch.empty(2, 3), dtype=dtype),
    "normal_": lambda dtype: torch.empty(2, 3, dtype=dtype).normal_(1.0, 2.0),
    "uniform_": lambda dtype: torch.empty(2, 3, dtype=dtype).uniform_(-1, 1),
    "exponential_": lambda dtype: torch.empty(2, 3, dtype=dtype).exponential_(),
    "init.normal_": lambda dtype: nn.init.normal_(torch.empty(2, 3, dtype=dtype), std=0.02),
    "init.kaiming": lambda dtype: nn.init.kaiming_uniform_(torch.empty(2, 3, dtype=dtype), a=5**0.5),
    "init.trunc": lambda dtype: nn.init.trunc_normal_(torch.empty(2, 3, dtype=dtype)),
    "bernoulli": lambda dtype: torch.bernoulli(torch.full((2, 3), 0.5, dtype=dtype)),
    "dropout": lambda dtype: F.dropout(torch.ones(2, 3, dtype=dtype), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_the_same_in_every_dtype_and_run_and_another_with_another_seed(name: str) -> None:
    draw = DRAWS[name]
    wide, again, low = (
        drawn(lambda dtype=dtype: draw(dtype)) for dtype in (torch.float32, torch.float32, torch.bfloat16)
    )
    assert low.dtype == torch.bfloat16
    assert torch.equal(wide, again)
    if name != "init.trunc":  # computes on in its own dtype after the draw
        assert torch.equal(wide, low.float())
    others = [drawn(lambda: draw(torch.float32), seed=seed) for seed in range(1, 9)]
    assert any(not torch.equal(wide, other) for other in others)


def test_draws_do_not_touch_the_programs_own_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drawn(lambda: (torch.rand(3), torch.randint(0, 10, (3,)), torch.randperm(4)))
    assert torch.equal(torch.get_rng_state(), before)


def test_integers_are_drawn_within_their_bounds() -> None:
    numbers, order, like = drawn(
        lambda: (torch.randint(5, 8, (100,)), torch.randperm(9), torch.randint_like(torch.empty(50), 2, 4))
    )
    assert set(numbers.tolist()) == {5, 6, 7}
    assert sorted(order.tolist()) == list(range(9))
    assert set(like.tolist()) == {2.0, 3.0}


def test_uniform_draws_stay_below_one_after_rounding() -> None:
    assert drawn(lambda: torch.rand(200_000)).max() == 1 - 2**-8  # the largest bfloat16 below 1


def test_random_numbers_have_the_right_moments() -> None:
    sample = drawn(lambda: torch.randn(100_000), rounding=torch.float32)
    assert abs(sample.mean()) < 0.02
    assert abs(sample.std() - 1) < 0.02


def test_an_out_argument_is_filled() -> None:
    out = torch.zeros(3)
    assert drawn(lambda: torch.rand(3, out=out)) is out
    assert (out != 0).any()


def test_dropout_scales_what_it_keeps_by_one_rounding_and_drops_whole_channels_where_asked() -> None:
    x = torch.full((1000,), 3.0, dtype=torch.bfloat16)
    kept = drawn(lambda: F.dropout(x, 0.1))
    assert set(kept.tolist()) == {0.0, torch.tensor(3 / 0.9, dtype=torch.bfloat16).item()}
    channels = drawn(lambda: F.dropout2d(torch.ones(4, 8, 5, 5), 0.5))
    assert set(channels.mean((2, 3)).flatten().tolist()) == {0.0, 2.0}
    in_place = torch.ones(100)
    assert drawn(lambda: F.dropout(in_place, 0.5, inplace=True)) is in_place
    assert set(in_place.tolist()) == {0.0, 2.0}


def test_dropout_in_evaluation_draws_nothing() -> None:
    tap, x = AlignRandom(0, torch.float32), torch.ones(3)
    with Wire({}, [tap], sees_calls=True):
        assert F.dropout(x, 0.5, training=False) is x or torch.equal(F.dropout(x, 0.5, training=False), x)
    assert tap.draws == 0
