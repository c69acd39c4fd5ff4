"""An unmodified diffusers UNet with random weights, two steps: `align run examples/diffusers_unet.py:build`."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel


@dataclass
class Denoising:
    """A workload: the model, its inputs, and the loop that an ordinary pipeline would run."""

    model: UNet2DConditionModel
    inputs: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def loop(
        model: UNet2DConditionModel, noise: torch.Tensor, text: torch.Tensor, steps: int = 2
    ) -> Iterator[torch.Tensor]:
        """Denoise; every `yield` ends a step."""
        scheduler = DDIMScheduler(num_train_timesteps=1000)
        scheduler.set_timesteps(steps)
        latents = noise
        for time in scheduler.timesteps:
            guess = model(latents, time, encoder_hidden_states=text).sample
            latents = scheduler.step(guess, time, latents).prev_sample
            yield latents


def build() -> Denoising:
    """A UNet of Stable Diffusion's structure, made small."""
    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    return Denoising(model, (torch.randn(1, 4, 16, 16), torch.randn(1, 8, 32)))
