"""ffn: two layers around an activation, on NPUs only; on a CPU linear_act keeps its site."""

import pytest
import torch
from torch import nn

from align.operators import ffn
from align.operators.ffn import FFN, refuses


class Block(nn.Module):
    def __init__(self, act, dropout=0.0):
        super().__init__()
        self.up, self.down, self.act, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), act, nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


class Shared(Block):
    def forward(self, x):
        hidden = self.act(self.up(x))
        return self.down(hidden) + hidden.sum()


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()])
def test_the_block_is_one_site_even_with_dropout_that_is_off(agrees_in_every_form, act):
    found = agrees_in_every_form(Block(act, dropout=0.1), torch.randn(3, 16), operators=ffn.OPERATORS)
    assert len(found.named("ffn")) == 1
    assert found.ops("ffn")[0].startswith("linear+")


def test_a_hidden_value_that_something_else_reads_is_no_site(survey):
    assert survey(Shared(nn.ReLU()), torch.randn(3, 16), operators=ffn.OPERATORS).matches == ()


def test_on_a_cpu_the_layer_with_its_activation_wins(survey):
    assert [match.operator.name for match in survey(Block(nn.ReLU()), torch.randn(3, 16)).matches] == ["linear_act"]


def test_what_the_kernel_refuses():
    assert "float32" in refuses({"act": "relu"}, torch.float32)
    assert "hardswish" in refuses({"act": "hardswish"}, torch.float16)
    assert refuses({"act": "gelu"}, torch.bfloat16) == ""


def test_on_an_npu_even_the_written_form_is_replaced():
    assert FFN.fused_anyway == {"npu"}
