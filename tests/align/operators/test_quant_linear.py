"""Linear layers with int8 weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.demo.quantized import QuantLinear
from align.operators.quant_linear import QUANT_LINEAR, int8_product, static_example, unfused


class StaticLinear(nn.Module):
    """Quantise and dequantise the activation around a layer with int8 weights."""

    def __init__(self, low=-128):
        super().__init__()
        self.inner = QuantLinear(32, 24)
        self.inner.load_weight(torch.randn(24, 32))
        self.step = 0.03
        self.low = low

    def forward(self, x):
        x = torch.clamp(torch.round(x / self.step), self.low, 127) * self.step
        return self.inner(x)


def test_demo_layer_is_found_in_either_order_of_its_product(survey):
    class Turned(QuantLinear):
        def forward(self, x):
            return F.linear(x, self.scale[:, None] * self.weight_int8.float(), self.bias)

    for kind in (QuantLinear, Turned):
        assert survey(kind(32, 24), torch.randn(5, 32), operators=[QUANT_LINEAR]).ops("quant_linear") != []


def test_static_scale_joins_the_site_and_agrees(agrees_in_every_form):
    found = agrees_in_every_form(StaticLinear(), torch.randn(4, 5, 32), operators=[QUANT_LINEAR])
    (match,) = found.matches
    assert len(match.calls) == 7
    assert match.bound(found.graph, 0)["x_scale"] == 0.03


def test_another_range_is_left_outside_the_site(survey):
    (match,) = survey(StaticLinear(low=-100), torch.randn(5, 32), operators=[QUANT_LINEAR]).matches
    assert len(match.calls) == 3


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_static_form_agrees_to_rounding(dtype, limit, distance):
    arguments = static_example("cpu", dtype, 1)
    assert distance(int8_product(**arguments), unfused(**arguments)) <= limit


def test_dynamic_form_errs_by_half_a_step_of_the_activation():
    arguments = QUANT_LINEAR.example("cpu", torch.float32, 1)
    error = (int8_product(**arguments) - unfused(**arguments)).abs().amax(dim=(0, 1))
    step = arguments["x"].abs().amax() / 127
    bound = 0.5 * step * (arguments["weight"].float() * arguments["weight_scale"]).abs().sum(dim=1)
    assert (error <= bound * 1.001 + 1e-6).all()


def test_outlier_channel_ruins_the_dynamic_form(distance):
    arguments = QUANT_LINEAR.example("cpu", torch.float32, 1)
    ordinary = distance(int8_product(**arguments), unfused(**arguments))
    arguments["x"][..., 3] *= 100.0
    arguments["weight"][:, 3] = 0
    assert distance(int8_product(**arguments), unfused(**arguments)) > 20 * ordinary


def test_zeros_give_the_bias():
    arguments = QUANT_LINEAR.example("cpu", torch.float32, 0)
    arguments["x"].zero_()
    assert torch.equal(int8_product(**arguments), arguments["bias"].expand(3, 8, 48))


def test_float_weight_times_scale_is_no_site(survey):
    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype) * 2.0, self.bias)

    assert not survey(Scaled(8, 8), torch.randn(2, 8), operators=[QUANT_LINEAR]).matches
