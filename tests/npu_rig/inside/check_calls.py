"""The call log tells a fused run from an unfused one."""

from __future__ import annotations

import math
import threading

import torch
from npu_rig.calls import fused_names, rig_calls
from torch.nn import functional as F


def _heads() -> torch.Tensor:
    return torch.randn(1, 2, 4, 8, device="npu", dtype=torch.float16)


def test_aten_attention_and_gelu_count_as_fused() -> None:
    q = _heads()
    with rig_calls() as names:
        F.gelu(F.scaled_dot_product_attention(q, q, q))
    assert fused_names(names) == ["npu::npu_fusion_attention_v3", "aten::gelu.out"]


def test_primitive_calls_count_as_unfused() -> None:
    q = _heads().cpu().npu().half().float()
    with rig_calls() as names:
        weights = ((q @ q.mT) / math.sqrt(8)).softmax(-1) @ q
        0.5 * weights * (1 + torch.erf(weights / math.sqrt(2)))
    assert fused_names(names) == []
    assert names[0] == "aten::matmul"
    assert "aten::erf" in {name.partition(".")[0] for name in names}


def test_recordings_nest_and_end_with_their_block() -> None:
    x = torch.ones(2, device="npu")
    with rig_calls() as outer:
        x.add(1)
        with rig_calls() as inner:
            x.mul(2)
    x.sub(3)
    assert inner == ["aten::mul.Tensor"]
    assert outer == ["aten::add.Tensor", "aten::mul.Tensor"]


def test_every_thread_is_heard() -> None:
    x = torch.ones(2, device="npu")
    with rig_calls() as names:
        thread = threading.Thread(target=x.exp)
        thread.start()
        thread.join()
    assert [name.partition(".")[0] for name in names] == ["aten::exp"]
