"""masked_softmax: found outside attention; each kernel only where hidden rows mean the same to it."""

import math

import pytest
import torch
from torch import nn

from align.operators import masked_softmax
from align.operators.masked_softmax import MASKED_SOFTMAX, refuses_on_cpu, refuses_on_npu


class Masked(nn.Module):
    def __init__(self, fill=-math.inf, scale=None):
        super().__init__()
        self.fill, self.scale = fill, scale

    def forward(self, x, mask):
        x = x + 0.0
        x = x if self.scale is None else x / self.scale
        return torch.softmax(x.masked_fill(mask, self.fill), dim=-1)


def scores():
    mask = torch.rand(2, 1, 32, 64) > 0.5
    mask[..., 0] = False
    return torch.randn(2, 3, 32, 64), mask


@pytest.mark.parametrize("scale", [None, 8.0])
def test_it_is_found_with_and_without_a_scale_and_every_form_agrees(agrees_in_every_form, scale):
    found = agrees_in_every_form(Masked(scale=scale), *scores(), operators=masked_softmax.OPERATORS)
    assert found.ops("masked_softmax") == ["masked_fill+softmax" if scale is None else "div+masked_fill+softmax"]
    assert found.refusal(found.matches[0], torch.float32) == ""


def test_a_fill_that_does_not_hide_is_no_site(survey):
    assert survey(Masked(fill=-1.0), *scores(), operators=masked_softmax.OPERATORS).matches == ()


def test_minus_infinity_is_torchs_and_a_finite_fill_the_npus(survey):
    for fill, is_torch in ((-math.inf, True), (-1e4, False), (torch.finfo(torch.float32).min, False)):
        found = survey(Masked(fill=fill), *scores(), operators=masked_softmax.OPERATORS)
        bound = found.matches[0].bound(found.graph, 0)
        assert (refuses_on_cpu(bound, torch.float32) == "") == is_torch
        assert (refuses_on_npu(bound, torch.float16) == "") == (not is_torch)


def test_a_row_hidden_altogether_is_nan_or_uniform_as_the_model_wrote_it():
    x, mask = torch.randn(1, 1, 2, 4), torch.tensor([[True] * 4, [False] * 4])
    assert MASKED_SOFTMAX.unfused(x, mask)[0, 0, 0].isnan().all()
    assert MASKED_SOFTMAX.kernels["cpu"].run(x, mask)[0, 0, 0].isnan().all()
    assert MASKED_SOFTMAX.unfused(x, mask, 1.0, -1e4)[0, 0, 0].tolist() == [0.25] * 4


def test_the_npu_wants_multiples_of_32(survey):
    x, mask = torch.randn(2, 3, 8, 64), torch.zeros(8, 64, dtype=torch.bool)
    found = survey(Masked(fill=-1e4), x, mask, operators=masked_softmax.OPERATORS)
    assert "multiples of 32" in refuses_on_npu(found.matches[0].bound(found.graph, 0), torch.float16)
