"""The calls of torch_npu that models make themselves, so that those models also run unfused, and where there is no NPU.

Calls of operators with a file of their own for the fused sum, feed-forward, grouped product, gating and loss are there.
"""

from __future__ import annotations

from align.operators import _npu_activation, _npu_attention, _npu_conv, _npu_norm, _npu_quant, _npu_rotary
from align.operators.base import Operator

OPERATORS: tuple[Operator, ...] = (
    *_npu_attention.NPU_OPERATORS,
    *_npu_norm.NPU_OPERATORS,
    *_npu_activation.NPU_OPERATORS,
    *_npu_rotary.NPU_OPERATORS,
    *_npu_quant.NPU_OPERATORS,
    *_npu_conv.NPU_OPERATORS,
)
