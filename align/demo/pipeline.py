"""Put the demo's text-to-image pipeline together: seeded model, prompt and noise in, a picture out in a few steps."""

# torch types the call of a module as Any.
# mypy: disable-error-code="no-any-return"

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from align.demo.decoder import Decoder
from align.demo.denoiser import LATENT_SIZE, Denoiser
from align.demo.text_encoder import TextEncoder
from align.demo.tokenizer import encode
from align.demo.weights import lay_out_waves, seed_weights, smooth_kernels

PROMPT = "a lighthouse on a cliff at dusk, watercolour"
GUIDANCE = 2.0
FRESH_NOISE = 0.3
CONTRAST = 3.0

Loop = Callable[..., Generator[Tensor, None, Tensor]]


class TextToImage(nn.Module):
    """Hold the three networks; `sample` runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = TextEncoder()
        self.denoiser = Denoiser()
        self.decoder = Decoder()


@dataclass(frozen=True, slots=True)
class Demo:
    """A workload: the model, the loop's inputs (token ids [1, 64], noise [1, 4, 24, 24]) and the step loop."""

    model: TextToImage
    inputs: tuple[Tensor, Tensor]
    loop: Loop


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of the schedule: its time in 0..1 and the shares of signal and noise before and after it."""

    time: float
    signal: float
    noise: float
    next_signal: float
    next_noise: float
    fresh_noise: float


def schedule(steps: int) -> Iterator[Moment]:
    """Yield the steps of a cosine schedule from nearly pure noise to none.

    DDIM, arXiv:2010.02502 eq. 12: a share of the noise of every step but the last is drawn anew.
    """
    angles = [0.98 * (1 - step / steps) * math.pi / 2 for step in range(steps + 1)]
    for now, after in pairwise(angles):
        fresh = FRESH_NOISE * math.sin(after)
        kept = math.sqrt(math.sin(after) ** 2 - fresh**2)
        yield Moment(now * 2 / math.pi, math.cos(now), math.sin(now), math.cos(after), kept, fresh)


def advance(latents: Tensor, clean: Tensor, moment: Moment) -> Tensor:
    """Return the latents of the next step, from those of this one and the guess at the clean ones."""
    noise = (latents - moment.signal * clean) / moment.noise
    fresh = torch.randn(latents.shape, device=latents.device, dtype=latents.dtype)
    return moment.next_signal * clean + moment.next_noise * noise + moment.fresh_noise * fresh


def sample(model: TextToImage, tokens: Tensor, noise: Tensor, steps: int = 4) -> Generator[Tensor, None, Tensor]:
    """Denoise in `steps` steps under guidance, yield the latents after each, return the picture [1, 3, 96, 96]."""
    text = model.text_encoder(torch.cat((torch.zeros_like(tokens), tokens)))
    latents = noise
    for moment in schedule(steps):
        guess = model.denoiser(torch.cat((latents, latents)), moment.time, text)
        free, prompted = guess.chunk(2)
        clean = free + GUIDANCE * (prompted - free)
        latents = advance(latents, clean, moment)
        yield latents
    return model.decoder(latents)


@torch.no_grad()
def paint_weights(model: TextToImage) -> None:
    """Fill the model with seeded weights that give a smooth picture of strong colours."""
    seed_weights(model)
    lay_out_waves(model.denoiser.position)
    smooth_kernels(model.decoder, share=0.9)
    smooth_kernels(model.denoiser, share=0.5)
    model.decoder.conv_out.weight.mul_(CONTRAST)


def build(prompt: str = PROMPT, seed: int = 0) -> Demo:
    """Return the demo for a prompt; one seed fixes weights and starting noise, the caller's generator is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TextToImage()
        paint_weights(model)
        noise = torch.randn(1, 4, LATENT_SIZE, LATENT_SIZE)
    model.eval().requires_grad_(False)
    return Demo(model, (encode(prompt), noise), sample)
