"""moe_gating: softmax over the experts, then the k best."""

import pytest
import torch
from torch import nn

from align.operators import moe_gating
from align.operators.moe_gating import MOE_GATING, as_topk, refuses


class Gate(nn.Module):
    def __init__(self, *, largest=True, dtype=None):
        super().__init__()
        self.router, self.largest, self.dtype = nn.Linear(8, 6), largest, dtype

    def forward(self, x):
        weights = torch.softmax(self.router(x), dim=-1, dtype=self.dtype)
        weights, experts = torch.topk(weights, 2, dim=-1, largest=self.largest)
        return weights / weights.sum(-1, keepdim=True), experts


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_gate_is_found_and_every_form_agrees(agrees_in_every_form, dtype):
    found = agrees_in_every_form(Gate(dtype=dtype), torch.randn(5, 8), operators=moe_gating.OPERATORS)
    assert found.ops("moe_gating") == ["softmax+topk"]


def test_the_smallest_are_no_gate(survey):
    assert survey(Gate(largest=False), torch.randn(5, 8), operators=moe_gating.OPERATORS).matches == ()


def test_the_result_has_torchs_names():
    values, indices = MOE_GATING.unfused(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    named = as_topk((values, indices))
    assert named.indices.tolist() == [[1, 2]]
    torch.testing.assert_close(named.values.sum(-1), torch.tensor([1.0 - torch.tensor([0.0, 2.0, 1.0]).softmax(-1)[0]]))


def test_many_experts_are_refused():
    assert "1024" in refuses({"logits": torch.empty(1, 2048)}, torch.float16)
    assert refuses({"logits": torch.empty(1, 8)}, torch.float16) == ""
