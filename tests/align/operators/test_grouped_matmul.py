"""grouped_matmul: torch's grouped product takes cumulative ends."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators import grouped_matmul
from align.operators.grouped_matmul import GROUPED_MATMUL


class Experts(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.randn(3, 16, 8)), call

    def forward(self, x, ends):
        return self.call(x + 0.0, self.weight, ends)


def with_name(x, weight, ends):
    return F.grouped_mm(x, weight, offs=ends)


def with_bias(x, weight, ends):
    return F.grouped_mm(x, weight, offs=ends, bias=torch.zeros(3, 8))


ENDS = torch.tensor([4, 4, 9], dtype=torch.int32)


def test_torchs_grouped_product_is_a_site_and_every_form_agrees(agrees_in_every_form):
    found = agrees_in_every_form(Experts(with_name), torch.randn(9, 16), ENDS, operators=grouped_matmul.OPERATORS)
    assert len(found.named("grouped_matmul")) == 1
    assert found.matches[0].is_written_fused


def test_a_product_of_two_matrices_is_no_site(survey):
    found = survey(nn.Linear(4, 4), torch.randn(3, 4), operators=grouped_matmul.OPERATORS)
    assert found.matches == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_unfused_form_multiplies_group_by_group(dtype):
    x, weight = torch.randn(9, 16).to(dtype), torch.randn(3, 16, 8).to(dtype)
    got = GROUPED_MATMUL.unfused(x, weight, ENDS)
    for row in range(9):
        expert = 0 if row < 4 else 2
        torch.testing.assert_close(got[row], x[row] @ weight[expert], atol=1e-2, rtol=1e-2)


def test_rows_behind_the_last_end_are_zero():
    got = GROUPED_MATMUL.unfused(torch.ones(5, 2), torch.ones(2, 2, 3), torch.tensor([1, 3], dtype=torch.int32))
    assert got[3:].abs().max() == 0
    assert got.shape == (5, 3)
