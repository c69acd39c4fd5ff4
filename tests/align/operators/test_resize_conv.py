"""Nearest resize and convolution as phase convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators.resize_conv import RESIZE_CONV, phase_weights, phases, unfused


class Grow(nn.Module):
    def __init__(self, resize, **options):
        super().__init__()
        self.conv = nn.Conv2d(6, 4, **({"kernel_size": 3, "padding": 1} | options))
        self.resize = resize

    def forward(self, x):
        return self.conv(self.resize(x))


DOUBLING = {
    "factor": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "size": lambda x: F.interpolate(x, size=(10, 14)),
    "module": nn.Upsample(scale_factor=2),
    "exact": lambda x: F.interpolate(x, scale_factor=(2, 2), mode="nearest-exact"),
}


@pytest.mark.parametrize("name", DOUBLING)
def test_doubling_is_found_and_agrees(name, agrees_in_every_form):
    found = agrees_in_every_form(Grow(DOUBLING[name]), torch.randn(2, 6, 5, 7), operators=[RESIZE_CONV])
    assert len(found.matches) == 1


def test_borders_agree_on_the_smallest_maps(distance):
    weight = torch.randn(3, 2, 3, 3)
    for shape in ((1, 2, 1, 1), (1, 2, 1, 4), (3, 2, 2, 1)):
        x = torch.randn(shape)
        assert distance(phases(x, weight, None), unfused(x, weight, None)) < 1e-5


def test_channels_last_stays_channels_last(distance):
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(4, 6, 3, 3), torch.randn(4)
    out = phases(x, weight, bias)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert distance(out, unfused(x, weight, bias)) < 1e-5


def test_phase_weights_sum_the_taps_that_share_a_pixel():
    small = phase_weights(torch.arange(9.0).view(1, 1, 3, 3)).view(2, 2, 2, 2)
    assert small[0, 0].tolist() == [[0, 1 + 2], [3 + 6, 4 + 5 + 7 + 8]]
    assert small[1, 1].tolist() == [[0 + 1 + 3 + 4, 2 + 5], [6 + 7, 8]]


def test_low_precision_agrees_to_rounding(distance):
    arguments = RESIZE_CONV.example("cpu", torch.bfloat16, 1)
    assert distance(phases(**arguments), unfused(**arguments)) < 2**-6


LOOK_ALIKES = {
    "threefold": (lambda x: F.interpolate(x, scale_factor=3.0), {}),
    "one axis": (lambda x: F.interpolate(x, scale_factor=(2.0, 1.0)), {}),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), {}),
    "stride 2": (DOUBLING["factor"], {"stride": 2}),
    "1x1": (DOUBLING["factor"], {"kernel_size": 1, "padding": 0}),
    "groups": (DOUBLING["factor"], {"groups": 2}),
    "replicate": (DOUBLING["factor"], {"padding_mode": "replicate"}),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_no_site(name, survey):
    resize, options = LOOK_ALIKES[name]
    assert not survey(Grow(resize, **options), torch.randn(2, 6, 5, 7), operators=[RESIZE_CONV]).matches
