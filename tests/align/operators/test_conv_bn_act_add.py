"""Folded convolutions: both orders of addition, subsets, look-alikes, and the fold's memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators.conv_bn_act_add import _EXAMPLES, CONV_BN_ACT_ADD, NO_ADD, fold, onednn, refuses_on_cpu, unfused


class Block(nn.Module):
    def __init__(self, tail, *, bias=False, stride=1, groups=1):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, stride=stride, padding=1, bias=bias, groups=groups)
        self.bn = nn.BatchNorm2d(8)
        self.bn.running_mean.normal_()
        self.bn.running_var.uniform_(0.5, 2.0)
        nn.init.normal_(self.bn.weight)
        nn.init.normal_(self.bn.bias)
        self.tail = tail

    def forward(self, x):
        return self.tail(self, x)


def conv_bn(m, x):
    return m.bn(m.conv(x))


VARIANTS = {
    "conv2d+batch_norm": conv_bn,
    "conv2d+relu": lambda m, x: F.relu(m.conv(x)),
    "conv2d+gelu": lambda m, x: F.gelu(m.conv(x)),
    "conv2d+batch_norm+relu": lambda m, x: F.relu(conv_bn(m, x)),
    "conv2d+batch_norm+silu": lambda m, x: F.silu(conv_bn(m, x)),
    "conv2d+batch_norm+add": lambda m, x: conv_bn(m, x) + x,
    "conv2d+batch_norm+add+relu": lambda m, x: torch.relu(x + conv_bn(m, x)),
    "conv2d+batch_norm+relu+add": lambda m, x: x + F.relu(conv_bn(m, x)),
    "conv2d+add+relu": lambda m, x: F.relu(m.conv(x) + x),
    "conv2d+batch_norm+add_+relu": lambda m, x: F.relu(conv_bn(m, x).add_(x), inplace=True),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("bias", [False, True])
def test_variant_is_found_and_agrees(name, bias, agrees_in_every_form):
    found = agrees_in_every_form(Block(VARIANTS[name], bias=bias), torch.randn(2, 8, 9, 7), operators=[CONV_BN_ACT_ADD])
    assert found.ops("conv_bn_act_add") == [name]
    assert not found.refusal(found.matches[0], torch.float32)


@pytest.mark.parametrize("options", [{"stride": 2}, {"groups": 4}])
def test_strides_and_groups_agree(options, agrees_in_every_form):
    found = agrees_in_every_form(
        Block(lambda m, x: F.relu(conv_bn(m, x)), **options), torch.randn(2, 8, 9, 7), operators=[CONV_BN_ACT_ADD]
    )
    assert len(found.matches) == 1


def test_result_keeps_the_memory_layout_of_the_written_form():
    arguments = CONV_BN_ACT_ADD.example("cpu", torch.float32, 0)
    for layout in (torch.contiguous_format, torch.channels_last):
        laid = arguments | {name: arguments[name].contiguous(memory_format=layout) for name in ("x", "residual")}
        assert onednn(**laid).is_contiguous(memory_format=layout)
        torch.testing.assert_close(onednn(**laid), unfused(**arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("order", "act"),
    [
        key
        for key in _EXAMPLES
        if not refuses_on_cpu({"order": key[0], "act": key[1], "residual": torch.zeros(1)}, torch.float32)
    ],
)
def test_every_post_operation_agrees_with_its_primitive(order, act, distance):
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
        if refuses_on_cpu({"order": order, "act": act, "residual": torch.zeros(1)}, dtype):
            continue
        arguments = _EXAMPLES[order, act]("cpu", dtype, 3)
        assert distance(onednn(**arguments), unfused(**arguments)) <= limit


def overwritten(m, x, part=None):
    y = m.conv(x)
    (x if part is None else x[part]).mul_(2.0)
    return F.relu(m.bn(y)) + x.sum()


LOOK_ALIKES = {
    "norm read twice": lambda m, x: F.relu(y := conv_bn(m, x)) + y.sum(),
    "training norm": lambda m, x: F.relu(F.batch_norm(m.conv(x), None, None, training=True)),
    "broadcast addition": lambda m, x: conv_bn(m, x) + x[:, :1],
    "addition of a number": lambda m, x: conv_bn(m, x) + 1.0,
    "input overwritten on the way": lambda m, x: overwritten(m, x.clone()),
    "part of the input overwritten": lambda m, x: overwritten(m, x.clone(), slice(1)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_left_alone_beyond_what_is_safe(name, survey):
    found = survey(Block(LOOK_ALIKES[name]), torch.randn(2, 8, 5, 5), operators=[CONV_BN_ACT_ADD])
    allowed = {
        "norm read twice": ["conv2d+batch_norm"],
        "broadcast addition": ["conv2d+batch_norm"],
        "addition of a number": ["conv2d+batch_norm"],
    }
    assert found.ops("conv_bn_act_add") == allowed.get(name, [])


def test_silu_after_an_addition_is_left_out_of_the_fused_chain(survey):
    found = survey(Block(lambda m, x: F.silu(conv_bn(m, x) + x)), torch.randn(2, 8, 5, 5), operators=[CONV_BN_ACT_ADD])
    assert found.ops("conv_bn_act_add") == ["conv2d+batch_norm+add"]


def test_fold_is_redone_when_a_weight_changes(distance):
    arguments = _EXAMPLES[NO_ADD, ""]("cpu", torch.float32, 0)
    onednn(**arguments)
    arguments["gamma"].mul_(3.0)
    assert distance(onednn(**arguments), unfused(**arguments)) < 1e-5
    arguments["weight"].add_(1.0)
    assert distance(onednn(**arguments), unfused(**arguments)) < 1e-5


def test_fold_rounds_each_weight_once():
    weight, var = torch.full((1, 1, 1, 1), 1.0 + 2.0**-7, dtype=torch.bfloat16), torch.tensor([3.0])
    folded, _ = fold(weight, None, torch.zeros(1), var, None, None, 0.0)
    expected = torch.tensor((1.0 + 2.0**-7) / 3.0**0.5, dtype=torch.float64).to(torch.bfloat16)
    assert folded.item() == expected.item()
