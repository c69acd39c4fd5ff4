"""Capture a diffusers pipeline: its modules by name, its denoising steps as steps. Random weights, no download.

python examples/capture_pipeline.py [pipeline.h5]
"""

from __future__ import annotations

import sys

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

import align
from align.dumpers.store import Trace


def build() -> DDPMPipeline:
    """A denoiser of 16 x 16 pictures."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    pipeline = DDPMPipeline(unet.eval(), DDPMScheduler(num_train_timesteps=100))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def main(path: str = "pipeline.h5") -> None:
    """Denoise for four steps, keep the tensors of the blocks, and show how the picture's spread goes down."""
    pipeline = build()
    generator = torch.Generator("cpu").manual_seed(0)
    with align.capture(
        pipeline, path, include=("unet", "unet.*_blocks.?", "unet.mid_block"), overwrite=True
    ) as running:
        pipeline(num_inference_steps=4, generator=generator, output_type="np")
    with Trace.open(path) as trace:
        print(f"{len(trace.nodes)} nodes in {running.path}")
        for record in trace.nodes:
            if record.key.path == "unet" and record.statistics:
                print(f"{record.key}  {'x'.join(map(str, record.shape))}  std {record.statistics.std:.4g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
