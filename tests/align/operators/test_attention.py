"""Attention: conventions of masks, causal and scale; refusals; written-out forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators._multi_head import MULTI_HEAD_ATTENTION
from align.operators.attention import ATTENTION, flash, unfused
from align.operators.base import Kernel

CPU: Kernel = ATTENTION.kernels["cpu"]


def draw(*shape):
    return torch.randn(shape)


class Written(nn.Module):
    """Attention by a function of (query, key, value, mask)."""

    def __init__(self, forward):
        super().__init__()
        self.attend = forward

    def forward(self, *args):
        return self.attend(*args)


def test_forms_agree_for_masks_scales_and_lengths(distance):
    q, k, v = draw(2, 4, 7, 16), draw(2, 4, 11, 16), draw(2, 4, 11, 16)
    closed = torch.rand(2, 1, 7, 11) > 0.4
    for options in (
        {},
        {"mask": draw(7, 11)},
        {"mask": closed},
        {"mask": draw(2, 1, 1, 11)},
        {"is_causal": True},
        {"scale": 0.7},
    ):
        assert distance(flash(q, k, v, **options), unfused(q, k, v, **options)) < 1e-5, options


def test_causal_is_aligned_top_left_when_lengths_differ():
    q, k = draw(1, 1, 3, 8), draw(1, 1, 5, 8)
    v = torch.eye(5).view(1, 1, 5, 5)
    for out in (unfused(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)):
        assert torch.equal(out[0, 0] > 0, torch.ones(3, 5).tril() > 0)


def test_bool_mask_means_attend():
    q, k = draw(1, 1, 2, 8), draw(1, 1, 3, 8)
    v = torch.eye(3).view(1, 1, 3, 3)
    mask = torch.tensor([[True, False, False], [False, True, True]])
    assert torch.equal(unfused(q, k, v, mask)[0, 0] > 0, mask)


def test_scale_defaults_to_inverse_root_of_head_width():
    q, k, v = draw(1, 2, 4, 16), draw(1, 2, 4, 16), draw(1, 2, 4, 16)
    expected = torch.softmax(q @ k.mT / 4.0, -1) @ v
    torch.testing.assert_close(unfused(q, k, v), expected)


def test_row_closed_by_a_bool_mask_gives_zeros():
    q = draw(1, 1, 2, 8)
    mask = torch.tensor([[True, True], [False, False]])
    out = unfused(q, q, q, mask)
    assert out[0, 0, 1].eq(0).all()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, mask))


def test_grouped_heads_share_keys(distance):
    q, k, v = draw(1, 6, 5, 8), draw(1, 2, 5, 8), draw(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
    assert distance(unfused(q, k, v, enable_gqa=True), expected) < 1e-5
    assert distance(flash(q, k, v, enable_gqa=True), expected) < 1e-5


@pytest.mark.parametrize("lead", [(), (6,), (2, 3, 4)])
def test_kernel_takes_any_number_of_leading_axes(lead, distance):
    q, k, v = draw(*lead, 5, 8), draw(*lead, 9, 8), draw(*lead, 9, 8)
    assert distance(flash(q, k, v, draw(5, 9)), unfused(q, k, v, draw(5, 9) * 0)) > 0
    mask = draw(*lead, 5, 9)
    assert distance(flash(q, k, v, mask), unfused(q, k, v, mask)) < 1e-5


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_low_precision_forms_agree_to_rounding(dtype, limit, distance):
    q, k, v = (draw(2, 2, 16, 32).to(dtype) for _ in range(3))
    assert distance(flash(q, k, v), unfused(q, k, v)) < limit


def test_value_width_unlike_key_width_is_refused_with_the_shapes(survey):
    found = survey(
        Written(F.scaled_dot_product_attention),
        draw(1, 2, 4, 16),
        draw(1, 2, 4, 16),
        draw(1, 2, 4, 8),
        operators=[ATTENTION],
    )
    reason = found.refusal(found.matches[0], torch.bfloat16)
    assert "no fused path" in reason
    assert "[1, 2, 4, 8]" in reason


def test_sdpa_call_is_a_native_site(survey):
    model = Written(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3))
    found = survey(model, *(draw(1, 2, 4, 16) for _ in range(3)), operators=[ATTENTION])
    (match,) = found.matches
    assert match.is_written_fused
    assert CPU.is_native
    bound = match.bound(found.graph, 0)
    assert (bound["is_causal"], bound["scale"], bound["mask"]) == (True, 0.3, None)


def test_sdpa_with_dropout_is_no_site(survey):
    model = Written(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1))
    assert not survey(model, draw(1, 2, 4, 16), operators=[ATTENTION]).matches


CHAINS = {
    "scale after": lambda q, k, v, m: F.softmax((q @ k.transpose(-2, -1)) * 0.25, dim=-1) @ v,
    "scale divides": lambda q, k, v, m: torch.matmul(torch.softmax(torch.matmul(q, k.mT) / math.sqrt(16), -1), v),
    "scale on query": lambda q, k, v, m: (q * 0.25 @ k.mT).softmax(-1) @ v,
    "float mask": lambda q, k, v, m: F.softmax(q @ k.mT * 0.25 + m, dim=-1, dtype=torch.float32).to(q.dtype) @ v,
    "mask first": lambda q, k, v, m: F.softmax(m + q @ k.mT * 0.25, dim=-1) @ v,
    "fill": lambda q, k, v, m: (q @ k.mT * 0.25).masked_fill(m > 0.5, -math.inf).softmax(-1) @ v,
    "where": lambda q, k, v, m: torch.where(m > -1, q @ k.mT, torch.finfo(q.dtype).min).softmax(-1) @ v,
    "dropout off": lambda q, k, v, m: F.dropout((q @ k.mT).softmax(-1), 0.1, training=False) @ v,
    "baddbmm": lambda q, k, v, m: torch.bmm(
        torch.baddbmm(torch.empty(2, 6, 9), q[:, 0], k[:, 0].mT, beta=0, alpha=0.25).softmax(-1), v[:, 0]
    ),
    "baddbmm mask": lambda q, k, v, m: torch.bmm(
        torch.baddbmm(m[:, 0].expand(2, 6, 9), q[:, 0], k[:, 0].mT, beta=1, alpha=0.25).softmax(-1), v[:, 0]
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_written_out_chain_is_found_and_agrees(name, agrees_in_every_form):
    args = (draw(2, 3, 6, 16), draw(2, 3, 9, 16), draw(2, 3, 9, 16), draw(2, 1, 6, 9))
    found = agrees_in_every_form(Written(CHAINS[name]), *args, operators=[ATTENTION])
    (match,) = found.matches
    assert not match.is_written_fused
    assert not found.refusal(match, torch.float32)


LOOK_ALIKES = {
    "softmax over another axis": lambda q, k, v, m: F.softmax(q @ k.mT, dim=-2) @ v,
    "dropout on": lambda q, k, v, m: F.dropout((q @ k.mT).softmax(-1), 0.1, training=True) @ v,
    "fill that opens": lambda q, k, v, m: (q @ k.mT).masked_fill(m > 0.5, 0.0).softmax(-1) @ v,
    "weights read twice": lambda q, k, v, m: (w := (q @ k.mT).softmax(-1)) @ v + w.sum(),
    "scale over the mask": lambda q, k, v, m: F.softmax((q @ k.mT + m) * 0.25, dim=-1) @ v,
    "one over scores": lambda q, k, v, m: F.softmax(2.0 / (q @ k.mT), dim=-1) @ v,
    "weights that are a layer": lambda q, k, v, m: F.softmax(q @ torch.ones(16, 9), dim=-1) @ v,
    "mask made of the scores": lambda q, k, v, m: F.softmax((s := q @ k.mT) + s.tanh(), dim=-1) @ v,
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_not_fused(name, survey):
    args = (draw(2, 3, 6, 16), draw(2, 3, 9, 16), draw(2, 3, 9, 16), draw(2, 1, 6, 9))
    assert not survey(Written(LOOK_ALIKES[name]), *args, operators=[ATTENTION]).matches


class SelfAttention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x, mask):
        out, weights = self.inner(
            x, x, x, need_weights=self.need_weights, attn_mask=mask, key_padding_mask=x[:, :, 0] > 1.5
        )
        return out if weights is None else out + weights.sum()


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, torch.ones(6, 6, dtype=torch.bool).triu(1)])
def test_multi_head_attention_agrees_in_every_form(need_weights, mask, agrees_in_every_form):
    x = draw(2, 6, 16)
    x[:, 0, 0] = 0.0
    found = agrees_in_every_form(SelfAttention(need_weights), x, mask, operators=[MULTI_HEAD_ATTENTION])
    (match,) = found.matches
    assert ("need_weights" in found.refusal(match, torch.float32)) is need_weights
