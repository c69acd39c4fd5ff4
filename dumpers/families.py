"""One table of what kind of work a call does: it decides how strictly a node is judged and where time is booked."""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from align.dumpers.dtypes import DTYPES
from align.dumpers.model import OpClass


class Family(StrEnum):
    """Kinds of work a profile tells apart."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    NORMALISATION = "normalisation"
    ACTIVATION = "activation"
    MOVEMENT = "data movement"
    OTHER = "other"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FAMILIES: dict[Family, frozenset[str]] = {
    Family.MATMUL: _words("""
        linear matmul mm bmm baddbmm addmm addbmm einsum bilinear mv dot npu_linear npu_bmmV2 npu_quant_matmul
        npu_weight_quant_batchmatmul npu_grouped_matmul npu_ffn _int_mm _scaled_mm Linear
    """),
    Family.CONVOLUTION: _words("""
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d npu_conv2d npu_conv3d Conv1d
        Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
    """),
    Family.ATTENTION: _words("""
        scaled_dot_product_attention multi_head_attention_forward npu_fusion_attention npu_fusion_attention_v2
        npu_fusion_attention_v3 npu_fused_infer_attention_score npu_fused_infer_attention_score_v2
        npu_prompt_flash_attention npu_incre_flash_attention softmax log_softmax softmin
        npu_scaled_masked_softmax MultiheadAttention Softmax
    """),
    Family.NORMALISATION: _words("""
        layer_norm group_norm batch_norm instance_norm rms_norm normalize local_response_norm npu_rms_norm
        npu_gemma_rms_norm npu_add_rms_norm npu_add_rms_norm_cast npu_add_layer_norm npu_layer_norm_eval
        npu_deep_norm npu_group_norm_silu npu_group_norm_swish native_layer_norm
    """),
    Family.ACTIVATION: _words("""
        relu relu_ relu6 gelu silu mish sigmoid tanh hardswish hardsigmoid leaky_relu elu glu softplus
        npu_swiglu npu_geglu npu_gelu npu_gelu_mul npu_fast_gelu fast_gelu npu_silu dropout
    """),
    Family.MOVEMENT: _words("""
        view reshape transpose permute contiguous to type half float bfloat16 double cat stack chunk split
        unbind expand expand_as repeat repeat_interleave squeeze unsqueeze flatten unflatten getitem
        index_select gather clone detach pad roll flip narrow select movedim swapaxes view_as type_as cpu cuda
        npu T mT H mH t interpolate pixel_shuffle pixel_unshuffle fold unfold upsample copy_ tile hsplit
        tensor_split npu_format_cast npu_confusion_transpose data Identity Flatten Upsample adjoint
        masked_select setitem empty zeros ones empty_like zeros_like ones_like full full_like arange tensor
        as_tensor embedding Embedding atleast_2d ravel
    """),
}  # fmt: skip
# moves data, but with bilinear or bicubic weights it rounds
_RESAMPLING = frozenset({"interpolate", "upsample", "Upsample"})
_BY_NAME = {name: family for family, names in _FAMILIES.items() for name in names}
_SENSITIVE = frozenset({Family.ATTENTION, Family.NORMALISATION})


@cache
def family_of(op: str) -> Family:
    """The kind of work of a function (by short name) or module (by class name)."""
    if op in _BY_NAME:
        return _BY_NAME[op]
    bare = op.rstrip("_")
    if bare in _BY_NAME:
        return _BY_NAME[bare]
    lowered = op.lower()
    if "attention" in lowered or "attn" in lowered:
        return Family.ATTENTION
    if "norm" in lowered and op[:1].isupper():
        return Family.NORMALISATION
    return Family.OTHER


@cache
def op_class_of(op: str, dtype: str) -> OpClass:
    """How strictly a node of that operation and dtype is judged."""
    entry = DTYPES.get(dtype)
    if entry is not None and entry.format is None:
        return OpClass.EXACT
    family = family_of(op)
    if family is Family.MOVEMENT and op not in _RESAMPLING:
        return OpClass.MOVEMENT
    return OpClass.SENSITIVE if family in _SENSITIVE else OpClass.ORDINARY
