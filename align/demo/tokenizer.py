"""Turn a prompt into byte tokens: three marks, then one id a byte, padded to a fixed length."""

import torch
from torch import Tensor

PAD, BEGIN, END = 0, 1, 2
FIRST_BYTE = 3
VOCABULARY = FIRST_BYTE + 256
LENGTH = 64


def encode(prompt: str, length: int = LENGTH) -> Tensor:
    """Return the int64 ids of a prompt, [1, length]; what does not fit is cut off."""
    letters = [FIRST_BYTE + byte for byte in prompt.encode("utf-8")][: length - 2]
    ids = [BEGIN, *letters, END]
    return torch.tensor([ids + [PAD] * (length - len(ids))])


def decode(tokens: Tensor) -> str:
    """Return the text of ids [1, length], marks and padding left out."""
    letters = bytes(token - FIRST_BYTE for token in tokens.flatten().tolist() if token >= FIRST_BYTE)
    return letters.decode("utf-8", errors="replace")
