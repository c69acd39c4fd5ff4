"""Capture a transformers `generate()`: every new token is a step of the trace. Random weights, no download.

python examples/capture_generate.py [generate.h5]
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import align
from align.dumpers.store import Trace


def build() -> LlamaForCausalLM:
    """A decoder of two layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def main(path: str = "generate.h5") -> None:
    """Generate five tokens, with statistics of every module and call, and follow one layer through the steps."""
    model = build()
    prompt = torch.tensor([[1, 5, 9, 17]])
    with align.capture(model, path, level="both", keep="stats", overwrite=True) as running:
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    print("tokens:", tokens[0].tolist())
    with Trace.open(path) as trace:
        print(f"{len(trace.nodes)} nodes in {running.path}")
        for record in trace.nodes:
            if record.key.call_name == "model.layers.0.mlp/forward#0" and record.statistics:
                print(f"{record.key}  {'x'.join(map(str, record.shape))}  absmax {record.statistics.absmax:.4g}")
    for note in running.notes:
        print("note:", note)


if __name__ == "__main__":
    main(*sys.argv[1:])
