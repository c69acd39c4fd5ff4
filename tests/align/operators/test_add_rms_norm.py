"""add_rms_norm: found only where nothing else reads the sum; the unfused form rounds the sum first."""

import torch
from torch import nn

from align.dumpers.wire import Wire
from align.operators import add_rms_norm
from align.operators.add_rms_norm import ADD_RMS_NORM, refuses
from align.operators.base import Kernel
from align.operators.registry import site_of
from align.taps.substitute import Form, Substitute, Substitution


class Closed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x, y):
        total = x + y
        wide = total.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(total.dtype)


class Residual(Closed):
    def forward(self, x, y):
        return super().forward(x, y) + (x + y)


class Stream(Closed):
    def forward(self, x, y):
        x = x + y
        wide = x.float()
        return x + self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Builtin(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-5)

    def forward(self, x, y):
        return self.norm(x + y)


def pair():
    return torch.randn(3, 16), torch.randn(3, 16)


def test_a_written_out_norm_behind_a_sum_is_one_site(agrees_in_every_form):
    found = agrees_in_every_form(Closed(), *pair(), operators=add_rms_norm.OPERATORS)
    assert found.ops("add_rms_norm") == ["add+float+pow+mean+add+rsqrt+mul+to+mul"]


def test_a_builtin_norm_behind_a_sum_counts_as_written_fused(agrees_in_every_form):
    found = agrees_in_every_form(Builtin(), *pair(), operators=add_rms_norm.OPERATORS)
    assert found.ops("add_rms_norm") == ["add+rms_norm"]
    assert found.matches[0].is_written_fused


def test_a_sum_that_the_residual_stream_reads_stays_a_call_of_its_own(agrees_in_every_form):
    found = agrees_in_every_form(Stream(), *pair(), operators=add_rms_norm.OPERATORS)
    assert found.ops("add_rms_norm") == ["float+pow+mean+add+rsqrt+mul+to+mul"]
    assert found.matches[0].kept == (("", "add", 0),)


def test_the_kernel_gets_the_summands_of_a_kept_sum(survey, distance):
    found = survey(Stream(), *pair(), operators=add_rms_norm.OPERATORS)
    (match,) = found.matches
    seen = []

    def kernel(x1, x2, **rest):
        seen.append((x1, x2))
        return ADD_RMS_NORM.unfused(x1, x2, **rest)

    site = site_of(match, found.graph, torch.float32)
    tap = Substitute((Substitution(site, match, Form.FUSED, Kernel(kernel, "spy")),))
    with torch.no_grad(), Wire({"": found.model}, [tap], sees_calls=True):
        output = found.model(*found.args)
    assert [item is given for item, given in zip(seen[0], found.args, strict=True)] == [True, True]
    assert distance(output, found.run().output) < 1e-6


def test_on_a_cpu_the_norm_alone_is_preferred_only_if_it_has_a_kernel(survey):
    names = [match.operator.name for match in survey(Residual(), *pair()).matches]
    assert names == ["add_rms_norm"]


def test_the_sum_is_rounded_before_it_is_normalised():
    x, y, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16() * 1e-2, torch.ones(64).bfloat16()
    got = ADD_RMS_NORM.unfused(x, y, weight, 1e-6)
    rounded = (x + y).double()
    expected = rounded / (rounded.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(got, expected.float().bfloat16())


def test_what_the_kernel_refuses():
    weight = torch.ones(4)
    assert "weight" in refuses({"weight": None, "plus_one": False}, torch.float16)
    assert "1 + weight" in refuses({"weight": weight, "plus_one": True}, torch.float16)
    assert "float64" in refuses({"weight": weight, "plus_one": False}, torch.float64)
    assert refuses({"weight": weight, "plus_one": False}, torch.bfloat16) == ""
