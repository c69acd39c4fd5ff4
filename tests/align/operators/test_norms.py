"""RMS norm, layer norm and group norm with SiLU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators.group_norm_silu import GROUP_NORM_SILU
from align.operators.layer_norm import LAYER_NORM, native
from align.operators.layer_norm import unfused as layer_norm_unfused
from align.operators.rms_norm import RMS_NORM
from align.operators.rms_norm import unfused as rms_norm_unfused

WIDTH = 16


class Norm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = norm

    def forward(self, x):
        return x + self.norm(self, x)


def llama(m, x):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.weight * wide.to(x.dtype)


def t5(m, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return m.weight * (x * torch.rsqrt(variance + 1e-6))


def gemma(m, x):
    def inner(y):
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)

    return (inner(x.float()) * (1.0 + m.weight.float())).type_as(x)


def olmo(m, x):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (m.weight * wide).to(x.dtype)


def divided(m, x):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * m.weight


RMS = {
    "llama": (llama, "to+pow+mean+add+rsqrt+mul+to+mul"),
    "gemma": (gemma, "float+pow+mean+add+rsqrt+mul+float+add+mul+type_as"),
    "olmo": (olmo, "to+pow+mean+add+rsqrt+mul+mul+to"),
    "divided": (divided, "mul+mean+add+sqrt+div+mul"),
    "call": (lambda m, x: F.rms_norm(x, (WIDTH,), m.weight, 1e-6), "rms_norm"),
    "no gain": (lambda m, x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), "square+mean+add+rsqrt+mul"),
}


@pytest.mark.parametrize("name", RMS)
def test_rms_norm_is_found_and_agrees(name, agrees_in_every_form):
    norm, calls = RMS[name]
    found = agrees_in_every_form(Norm(norm), torch.randn(2, 5, WIDTH), operators=[RMS_NORM])
    assert found.ops("rms_norm") == [calls]


def test_rms_norm_that_widens_and_never_narrows_is_no_site(survey):
    def widened(m, x):
        return t5(m, x.float()) if x.dtype != torch.float32 else t5(m, x)

    assert survey(Norm(widened), torch.randn(2, WIDTH), operators=[RMS_NORM]).matches == ()


@pytest.mark.parametrize("norm", [llama, gemma, olmo])
def test_unfused_rms_norm_gives_the_written_bits_in_bfloat16(norm):
    model, x = Norm(norm).to(torch.bfloat16), torch.randn(4, WIDTH).to(torch.bfloat16)
    options = {"plus_one": norm is gemma}
    if norm is olmo:
        return  # rounded once where the unfused form rounds twice
    assert torch.equal(rms_norm_unfused(x, model.weight, 1e-6, **options), norm(model, x))


NOT_RMS = {
    "mean over rows": lambda m, x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
    "cube": lambda m, x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-6),
    "another tensor's mean": lambda m, x: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6),
    "statistic read twice": lambda m, x: x * torch.rsqrt((v := x.pow(2).mean(-1, keepdim=True)) + 1e-6) + v,
}


@pytest.mark.parametrize("name", NOT_RMS)
def test_look_alike_is_no_rms_norm(name, survey):
    assert not survey(Norm(NOT_RMS[name]), torch.randn(3, WIDTH), operators=[RMS_NORM]).matches


def centred(m, x):
    middle = x - x.mean(-1, keepdim=True)
    return middle / torch.sqrt(middle.pow(2).mean(-1, keepdim=True) + 1e-5) * m.weight + m.bias


def by_variance(m, x):
    return (
        m.weight * ((x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()) + m.bias
    )


@pytest.mark.parametrize("norm", [centred, by_variance, lambda m, x: F.layer_norm(x, (WIDTH,), m.weight, m.bias)])
def test_layer_norm_is_found_and_agrees(norm, agrees_in_every_form):
    found = agrees_in_every_form(Norm(norm), torch.randn(2, 5, WIDTH) + 1.0, operators=[LAYER_NORM, RMS_NORM])
    assert len(found.named("layer_norm")) == 1
    assert not found.named("rms_norm")


def test_variance_over_count_minus_one_is_no_layer_norm(survey):
    def unbiased(m, x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()

    assert not survey(Norm(unbiased), torch.randn(3, WIDTH), operators=[LAYER_NORM]).matches


def test_layer_norm_forms_agree_in_low_precision(distance):
    arguments = LAYER_NORM.example("cpu", torch.bfloat16, 0)
    assert distance(native(**arguments), layer_norm_unfused(**arguments)) < 2**-6


class GroupSilu(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)
        self.act = act

    def forward(self, x):
        return self.act(self.norm(x))


@pytest.mark.parametrize("act", [nn.SiLU(), nn.SiLU(inplace=True), lambda h: h * torch.sigmoid(h)])
def test_group_norm_silu_is_found_and_agrees(act, agrees_in_every_form):
    found = agrees_in_every_form(GroupSilu(act), torch.randn(2, 16, 5, 6), operators=[GROUP_NORM_SILU])
    assert len(found.matches) == 1


def test_group_norm_with_another_activation_is_no_site(survey):
    assert not survey(GroupSilu(nn.ReLU()), torch.randn(2, 16, 5, 6), operators=[GROUP_NORM_SILU]).matches
