"""add_layer_norm: the post-norm residual of BERT."""

import torch
import torch.nn.functional as F
from torch import nn

from align.operators import add_layer_norm
from align.operators.add_layer_norm import ADD_LAYER_NORM, refuses


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16, eps=1e-6)

    def forward(self, x):
        return self.norm(self.layer(x) + x)


class Scaled(PostNorm):
    def forward(self, x):
        return self.norm(torch.add(self.layer(x), x, alpha=2))


class Broadcast(PostNorm):
    def forward(self, x):
        return self.norm(self.layer(x) + x[:1])


def test_post_norm_is_one_site_written_fused(agrees_in_every_form):
    found = agrees_in_every_form(PostNorm(), torch.randn(3, 16), operators=add_layer_norm.OPERATORS)
    assert found.ops("add_layer_norm") == ["add+layer_norm"]
    assert found.matches[0].is_written_fused


def test_scaled_and_broadcast_sums_are_no_sites(survey):
    for model in (Scaled(), Broadcast()):
        assert survey(model, torch.randn(3, 16), operators=add_layer_norm.OPERATORS).matches == ()


def test_on_a_cpu_the_norm_with_its_native_kernel_wins(survey):
    assert [match.operator.name for match in survey(PostNorm(), torch.randn(3, 16)).matches] == ["layer_norm"]


def test_the_unfused_form_is_the_layer_norm_of_the_sum(distance):
    x, y, weight, bias = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16), torch.randn(16)
    expected = F.layer_norm((x + y).double(), (16,), weight.double(), bias.double(), 1e-6)
    assert distance(ADD_LAYER_NORM.unfused(x, y, weight, bias, 1e-6), expected) < 1e-6


def test_the_kernel_wants_weight_and_bias():
    weight = torch.ones(4)
    assert refuses({"weight": weight, "bias": None}, torch.float16)
    assert refuses({"weight": weight, "bias": weight}, torch.float16) == ""
