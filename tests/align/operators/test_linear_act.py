"""Linear layers with an activation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators._activations import ACTIVATIONS
from align.operators.linear_act import _EXAMPLES, LINEAR_ACT, onednn, refuses_on_cpu, unfused


class Layer(nn.Module):
    def __init__(self, act, *, bias=True):
        super().__init__()
        self.linear = nn.Linear(24, 40, bias=bias)
        self.act = act

    def forward(self, x):
        return self.act(self.linear(x))


@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU(inplace=True),
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        nn.SiLU(),
        torch.sigmoid,
        torch.tanh,
        nn.Hardswish(),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_activation_is_found_and_agrees(act, bias, agrees_in_every_form):
    found = agrees_in_every_form(Layer(act, bias=bias), torch.randn(3, 5, 24), operators=[LINEAR_ACT])
    assert len(found.matches) == 1
    assert not found.refusal(found.matches[0], torch.float32)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_kernel_agrees_or_is_refused_by_name(act, dtype, limit, distance):
    reason = refuses_on_cpu({"act": act}, dtype)
    if reason:
        assert str(dtype).removeprefix("torch.") in reason
        return
    arguments = _EXAMPLES[act]("cpu", dtype, 5)
    assert distance(onednn(**arguments), unfused(**arguments)) <= limit


def test_strided_input_agrees(distance):
    arguments = _EXAMPLES["gelu"]("cpu", torch.float32, 0)
    arguments["x"] = torch.randn(32, 9, 2).permute(2, 1, 0)
    assert distance(onednn(**arguments), unfused(**arguments)) < 1e-5


def test_linear_read_by_another_call_is_no_site(survey):
    class Twice(Layer):
        def forward(self, x):
            y = self.linear(x)
            return F.relu(y) + y

    assert not survey(Twice(None), torch.randn(2, 24), operators=[LINEAR_ACT]).matches
