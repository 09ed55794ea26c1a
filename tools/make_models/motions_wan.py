"""Make the small Wan that mmrl ships: real classes for every component, trained from scratch.

    python -m tools.make_models.motions_wan --out pipelines/diffusion/models/motions-wan

Two stages on drawn clips of the ``motions`` data set (all compositions, so that RL's held-out ones are unseen by RL
only): the VAE by reconstruction, then transformer and text encoder together by flow matching. The captions were written
carelessly: a share of them (``--careless``) names another direction than the clip's, so the model draws what it is told
and often moves it elsewhere. ``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

# What is private to torch below has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before diffusers imports torchvision

# ruff: noqa: E402
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

import mmrl
from mmrl.core.trajectory import Prompt
from tools.make_models.shapes_sd3 import set_lr, t5_tokenizer

TEXT_LENGTH = 8
"""Tokens: the longest caption has five words and an end."""
FRAMES = 5
CHANNELS = 8
BATCH = 24
SHIFT = 3.0
"""Of the noise levels, in training and in sampling: where a shape is and where it goes is decided early."""


def build(captions: list[str]) -> WanPipeline:
    """A random WanPipeline of 0.7 M parameters in the transformer, for 5 frames of 32 px (3 x 8 x 8 latents of 8)."""
    tokenizer = t5_tokenizer(captions, TEXT_LENGTH)
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=128, d_kv=32, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    vae: Any = AutoencoderKLWan(
        base_dim=16,
        z_dim=CHANNELS,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        scale_factor_spatial=4,
        scale_factor_temporal=2,
    )
    torch.nn.init.constant_(vae.quant_conv.bias[CHANNELS:], -6.0)  # so that the noise does not drown what it learns
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=128,
        freq_dim=64,
        ffn_dim=256,
        num_layers=3,
        rope_max_seq_len=32,
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=transformer,
    )


def draw(prompts: list[Prompt], n: int, careless: float, seed: int) -> tuple[Tensor, Tensor]:
    """Which prompt each of ``n`` clips was given, ``[n]``, and the clips, float32 ``[n, 3, 5, 32, 32]`` in [-1, 1].

    A share ``careless`` of the clips moves in one of the other directions.
    """
    motions = mmrl.load("datasets", "motions")
    rng = random.Random(seed)
    others = {p.id: [q for q in prompts if q.id != p.id and _subject(q) == _subject(p)] for p in prompts}
    given = [rng.randrange(len(prompts)) for _ in range(n)]
    clips = torch.empty(n, 3, FRAMES, 32, 32)
    for i, prompt in enumerate(prompts[j] for j in given):
        shown = rng.choice(others[prompt.id]) if rng.random() < careless else prompt
        pixels = np.stack([np.asarray(frame) for frame in motions.frames(shown, rng, FRAMES)])
        clips[i] = torch.from_numpy(pixels).permute(3, 0, 1, 2).float() / 127.5 - 1
    return torch.tensor(given), clips


def _subject(prompt: Prompt) -> tuple[str, str]:
    return prompt.meta["colour"], prompt.meta["kind"]


class Clock:
    """CPU time of this process since it was made, as a share of ``minutes``."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self._started = minutes, time.process_time()

    @property
    def spent(self) -> float:
        return (time.process_time() - self._started) / 60 / self.minutes


def train_vae(vae: Any, clips: Tensor, minutes: float, log: Callable[..., None]) -> None:
    """Reconstruction by L1 + L2 with a light KL; then the latents' means and deviations."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    clock, step, generator = Clock(minutes), 0, torch.Generator().manual_seed(1)
    while (spent := clock.spent) < 1:
        set_lr(optimizer, 2e-3, step, spent)
        x = clips[torch.randint(len(clips), (8,), generator=generator)]
        posterior = vae.encode(x).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        y = vae.decode(posterior.mean + posterior.std * noise).sample
        loss = F.l1_loss(y, x) + F.mse_loss(y, x) + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            log(stage="vae", step=step, minutes=spent * minutes, loss=loss.item(), mse=F.mse_loss(y, x).item())
        step += 1
    z = encoded(vae, clips[:2048])
    mean, std = z.mean((0, 2, 3, 4)), z.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def encoded(vae: Any, clips: Tensor) -> Tensor:
    """Means of the posterior, ``[n, 8, 3, 8, 8]``."""
    return torch.cat([vae.encode(x).latent_dist.mean for x in clips.split(128)])


def train_flow(
    pipe: WanPipeline, captions: list[str], given: Tensor, latents: Tensor, minutes: float, log: Callable[..., None]
) -> None:
    """Flow matching with 10 % caption dropout; keeps the exponential moving average of the weights."""
    tokens: Any = pipe.tokenizer([*captions, ""], padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt")
    parameters = list(itertools.chain(pipe.transformer.parameters(), pipe.text_encoder.parameters()))
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    clock, step, generator = Clock(minutes), 0, torch.Generator().manual_seed(2)
    running: list[float] = []
    while (spent := clock.spent) < 1:
        set_lr(optimizer, 1e-3, step, spent)
        rows = torch.randint(len(latents), (BATCH,), generator=generator)
        x0, eps = latents[rows], torch.randn(BATCH, *latents.shape[1:], generator=generator)
        dropped = torch.rand(BATCH, generator=generator) < 0.1
        text = torch.where(dropped, len(captions), given[rows])
        mask = tokens.attention_mask[text]
        embeds = pipe.text_encoder(tokens.input_ids[text], mask).last_hidden_state * mask[..., None]
        sigma = torch.sigmoid(torch.randn(BATCH, generator=generator))
        sigma = SHIFT * sigma / (1 + (SHIFT - 1) * sigma)
        s = sigma.view(-1, 1, 1, 1, 1)
        v = pipe.transformer((1 - s) * x0 + s * eps, sigma * 1000, embeds, return_dict=False)[0]
        loss = F.mse_loss(v, eps - x0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - min(0.999, (1 + step) / (10 + step)))
        running.append(loss.item())
        if step % 200 == 199:
            log(stage="flow", step=step + 1, minutes=spent * minutes, loss=float(np.mean(running)))
            running.clear()
        step += 1
    with torch.no_grad():
        for p, a in zip(parameters, average, strict=True):
            p.copy_(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the pipeline to")
    parser.add_argument("--clips", type=int, default=6_000)
    parser.add_argument("--careless", type=float, default=0.5, help="share of captions that name another direction")
    parser.add_argument("--vae-minutes", type=float, default=3.5, help="of CPU time")
    parser.add_argument("--flow-minutes", type=float, default=4.5, help="of CPU time")
    parser.add_argument("--vae-from", type=Path, help="take the VAE of this pipeline, and its log")
    parser.add_argument("--continue-from", type=Path, help="go on training all but the VAE of this pipeline")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = arguments.continue_from or arguments.vae_from
    earlier = (started / "log.jsonl").read_text() if started else ""
    with (arguments.out / "log.jsonl").open("w") as lines:
        lines.write(earlier)

        def log(**row: float | str) -> None:
            print(json.dumps(row), file=lines, flush=True)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

        log(command=shlex.join(["python", "-m", "tools.make_models.motions_wan", *sys.argv[1:]]))
        prompts = mmrl.load("datasets", "motions").prompts("all")
        captions = [p.text for p in prompts]
        given, clips = draw(prompts, arguments.clips, arguments.careless, seed=len(earlier))
        pipe = build(captions)
        if arguments.continue_from:
            pipe = WanPipeline.from_pretrained(arguments.continue_from, dtype=torch.float32)
        elif arguments.vae_from:
            pipe.register_modules(vae=AutoencoderKLWan.from_pretrained(arguments.vae_from / "vae", dtype=torch.float32))
        else:
            train_vae(pipe.vae, clips, arguments.vae_minutes, log)
            pipe.vae.save_pretrained(arguments.out / "vae")
        config: Any = pipe.vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        latents = (encoded(pipe.vae, clips) - mean) / std
        train_flow(pipe, captions, given, latents, arguments.flow_minutes, log)
    pipe.to(dtype=torch.float16).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
