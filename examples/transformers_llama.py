"""An unmodified Llama-style decoder with random weights: `align run examples/transformers_llama.py:build`."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build() -> tuple[LlamaForCausalLM, dict[str, torch.Tensor | bool]]:
    """A decoder of four layers with grouped key/value heads, on one batch of token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    return model, {"input_ids": torch.randint(0, 512, (2, 48)), "use_cache": False}
