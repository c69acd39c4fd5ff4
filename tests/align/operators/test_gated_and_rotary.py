"""SwiGLU, GEGLU and rotary embedding: found, unfused form exact, fused form within rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators.geglu import GEGLU
from align.operators.rotary import ROTARY, unfused
from align.operators.swiglu import SWIGLU
from align.taps.substitute import Form


class Gated(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.one, self.two, self.both = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(8, 24)
        self.rule = forward

    def forward(self, x):
        return self.rule(self, x)


def packed(m, x, act, *, gate):
    parts = m.both(x).chunk(2, dim=-1)
    return act(parts[gate]) * parts[1 - gate]


FORMS = {
    "apart": (lambda m, x: F.silu(m.one(x)) * m.two(x), SWIGLU, 2),
    "turned": (lambda m, x: m.two(x) * F.silu(m.one(x)), SWIGLU, 2),
    "packed, gate first": (lambda m, x: packed(m, x, F.silu, gate=0), SWIGLU, 3),
    "packed, gate last": (lambda m, x: packed(m, x, F.silu, gate=1), SWIGLU, 3),
    "gelu, packed": (lambda m, x: packed(m, x, F.gelu, gate=1), GEGLU, 3),
    "gelu tanh, apart": (lambda m, x: F.gelu(m.one(x), approximate="tanh") * m.two(x), GEGLU, 2),
}


@pytest.mark.parametrize("name", FORMS)
def test_gated_activation_is_found_and_its_unfused_form_is_exact(name, agrees_in_every_form):
    rule, operator, size = FORMS[name]
    found = agrees_in_every_form(Gated(rule), torch.randn(3, 8), operators=[operator], limit=1e-6)
    assert [len(match.calls) for match in found.matches] == [size]
    assert torch.equal(found.run(Form.UNFUSED).output, found.run().output)


def test_gate_of_another_shape_is_no_site(survey):
    model = Gated(lambda m, x: F.silu(m.one(x)) * m.two(x)[:, :1])
    assert not survey(model, torch.randn(3, 8), operators=[SWIGLU]).matches


def test_gate_of_itself_is_no_site(survey):
    model = Gated(lambda m, x: F.silu(y := m.one(x)) * 2.0 + y)
    assert not survey(model, torch.randn(3, 8), operators=[SWIGLU]).matches


class Turn(nn.Module):
    def __init__(self, rotate):
        super().__init__()
        self.rotate = rotate

    def forward(self, x, cos, sin):
        x = x.transpose(1, 2)
        return (x * cos) + (self.rotate(x) * sin)


def by_chunk(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def by_slice(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def angles():
    angle = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("rotate", [by_chunk, by_slice])
def test_rotary_is_found_and_its_unfused_form_is_exact(rotate, agrees_in_every_form):
    found = agrees_in_every_form(Turn(rotate), torch.randn(2, 6, 3, 8), *angles(), operators=[ROTARY], limit=1e-6)
    assert len(found.matches) == 1
    assert torch.equal(found.run(Form.UNFUSED).output, found.run().output)


@pytest.mark.parametrize(
    "rotate",
    [
        lambda x: torch.cat((-x[..., :4], x[..., 4:]), dim=-1),
        lambda x: torch.cat((x[..., 4:], x[..., :4]), dim=-1),
        lambda x: torch.cat((-x[..., 4:], x[..., :4] + 0), dim=-1),
    ],
)
def test_other_rearrangements_are_no_rotary(rotate, survey):
    assert not survey(Turn(rotate), torch.randn(2, 6, 3, 8), *angles(), operators=[ROTARY]).matches


def test_rotary_turns_each_pair_by_its_angle():
    cos, sin = angles()
    x = torch.randn(1, 1, 6, 8)
    out = unfused(x, cos, sin)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos[:, :4], sin[:, :4])
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    wide = (cos[:, :4].repeat_interleave(2, -1), sin[:, :4].repeat_interleave(2, -1))
    turned = torch.view_as_real(pairs * torch.complex(cos[:, :4], sin[:, :4])).flatten(-2)
    torch.testing.assert_close(unfused(x, *wide, interleaved=True), turned)
