"""gelu: three formulas written out, F.gelu as it is, and a baseline in primitive calls."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators import gelu
from align.operators.gelu import GELU, SIGMOID, WRITTEN_GELU


def erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def erf_reversed(x):
    return (1.0 + torch.erf(x * (1 / math.sqrt(2.0)))) * (x / 2)


def tanh(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def quick(x):
    return x * torch.sigmoid(1.702 * x)


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x * 1.0)


@pytest.mark.parametrize(("function", "approximate"), [(erf, "none"), (erf_reversed, "none"), (tanh, "tanh")])
def test_a_written_out_gelu_is_found_and_torchs_kernel_computes_it(agrees_in_every_form, function, approximate):
    found = agrees_in_every_form(Apply(function), torch.randn(5, 9), operators=gelu.OPERATORS)
    assert [match.binding["approximate"].value for match in found.matches] == [approximate]
    assert found.matches[0].operator is WRITTEN_GELU
    assert found.refusal(found.matches[0], torch.float32) == ""


def test_the_sigmoid_formula_is_found_and_torch_has_no_kernel_for_it(agrees_in_every_form):
    found = agrees_in_every_form(Apply(quick), torch.randn(5, 9), operators=gelu.OPERATORS)
    assert [match.binding["approximate"].value for match in found.matches] == [SIGMOID]
    assert "no kernel" in found.refusal(found.matches[0], torch.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 0.5 * (1.0 + torch.erf(x / 2.0)),
        lambda x: x * 0.4 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: x * torch.sigmoid(1.5 * x),
        lambda x: x * torch.sigmoid(1.702 * x.neg()),
        lambda x: x.neg() * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 2.0)))),
    ],
)
def test_what_only_looks_like_gelu_is_no_site(survey, function):
    assert survey(Apply(function), torch.randn(5, 9), operators=gelu.OPERATORS).matches == ()


def test_f_gelu_is_left_alone_but_on_an_npu(survey):
    found = survey(Apply(F.gelu), torch.randn(3), operators=gelu.OPERATORS)
    assert [match.operator for match in found.matches] == [GELU]
    assert not found.matches[0].is_written_fused
    assert GELU.fused_anyway == {"npu"}
    assert set(GELU.kernels) == {"npu"}


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_unfused_form_is_primitive_and_exact(survey, distance, approximate):
    x = torch.randn(1000)
    assert distance(GELU.unfused(x, approximate), F.gelu(x.double(), approximate=approximate)) < 1e-6
    run = survey(Apply(lambda x: GELU.unfused(x, approximate)), x).run()
    assert not any("gelu" in ident[1] for ident in run.idents)
