"""Unmodified models of the libraries run on the simulated device in three dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from npu_rig.calls import rig_calls

DTYPES = [(torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)]


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_a_tiny_llama_runs_and_generates(dtype: torch.dtype, limit: float) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 50, (2, 9))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        device_model = copy.deepcopy(model).to("npu", dtype)
        with rig_calls() as calls:
            got = device_model(ids.npu(), attention_mask=mask.npu()).logits
        tokens = device_model.generate(ids.npu(), attention_mask=mask.npu(), max_new_tokens=3, do_sample=False)
    assert _relative_error(got, expected) < limit
    assert calls.count("npu::npu_fusion_attention_v3") == 2
    assert tokens.shape[1] > 9


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_a_tiny_bert_runs_with_padding(dtype: torch.dtype, limit: float) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    ids, mask = torch.randint(1, 50, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).last_hidden_state
        got = copy.deepcopy(model).to("npu", dtype)(ids.npu(), attention_mask=mask.npu()).last_hidden_state
    # aten gelu is the tanh formula on the device: fp32 does not agree to the last bit.
    assert _relative_error(got, expected) < max(limit, 1e-3)


@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
def test_a_tiny_unet_calls_the_fused_geglu_by_itself(
    dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers = pytest.importorskip("diffusers")
    activations: Any = pytest.importorskip("diffusers.models.activations")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    ).eval()  # fmt: skip
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16)
    with torch.no_grad():
        # diffusers calls npu_geglu with CPU tensors as soon as torch_npu can be imported.
        with pytest.raises(NotImplementedError, match="npu_geglu"):
            model(x, 10, text)
        with monkeypatch.context() as patch:
            patch.setattr(activations, "is_torch_npu_available", lambda: False)
            expected = model(x, 10, text).sample
        device_model = copy.deepcopy(model).to("npu").to(dtype)
        with rig_calls() as calls:
            got = device_model(x.to("npu", dtype), 10, text.to("npu", dtype)).sample
    assert _relative_error(got, expected) < max(limit, 2e-3)
    assert "npu::npu_geglu" in calls
    assert "npu::npu_fusion_attention_v3" in calls
