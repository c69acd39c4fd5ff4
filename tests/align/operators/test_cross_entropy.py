"""cross_entropy: one call of torch, one kernel on an NPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from align.operators import cross_entropy
from align.operators.cross_entropy import CROSS_ENTROPY, refuses


class Loss(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x, target):
        return F.cross_entropy(x + 0.0, target, **self.options)


TARGET = torch.tensor([1, -100, 0, 3])


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_the_loss_is_a_site_and_every_form_agrees(agrees_in_every_form, options):
    target = TARGET.clamp(min=0) if "ignore_index" in options else TARGET
    found = agrees_in_every_form(Loss(**options), torch.randn(4, 5), target, operators=cross_entropy.OPERATORS)
    assert len(found.named("cross_entropy")) == 1
    assert not found.matches[0].is_written_fused


def test_the_unfused_form_takes_the_mean_over_what_is_not_ignored():
    x = torch.randn(4, 5)
    expected = -(x[0].log_softmax(-1)[1] + x[2].log_softmax(-1)[0] + x[3].log_softmax(-1)[3]) / 3
    torch.testing.assert_close(CROSS_ENTROPY.unfused(x, TARGET), expected)


def test_probabilities_and_images_are_refused(survey):
    x = torch.randn(4, 5)
    for scores, target in ((x, x.softmax(-1)), (torch.randn(2, 5, 3), torch.zeros(2, 3, dtype=torch.int64))):
        found = survey(Loss(), scores, target, operators=cross_entropy.OPERATORS)
        assert "takes [n, c] scores" in refuses(found.matches[0].bound(found.graph, 0), torch.float16)
