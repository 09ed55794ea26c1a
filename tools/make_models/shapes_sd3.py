"""Make the small Stable Diffusion 3 that mmrl ships: real classes for every component, trained from scratch.

    python -m tools.make_models.shapes_sd3 --out pipelines/diffusion/models/shapes-sd3

Two stages on drawn scenes of the ``shapes`` data set (all compositions, so that RL's held-out ones are unseen by RL
only, not by the base model): the VAE by reconstruction, then transformer and text encoders together by flow matching
(Esser et al. 2024, arXiv 2403.03206, eq. 13 with logit-normal sigmas). ``log.jsonl`` beside the weights is the log of
the run that made them. Training simply stops early: what the model confuses, it confuses for lack of training.
"""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false

# What is private to torch below has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import itertools
import json
import os
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
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

import mmrl
from mmrl.core.trajectory import Prompt

TEXT_LENGTH = 12
"""Tokens per encoder: the longest caption has eight words, and each word is one token."""


def build(captions: list[str], side: int = 8) -> StableDiffusion3Pipeline:
    """A random StableDiffusion3Pipeline of 3.5 M parameters for pictures of up to ``side`` x ``side`` latents of 8.

    The VAE makes one latent of 4 x 4 pixels. Words that are not in ``captions`` are tokenized as characters.
    """
    tokens = clip_tokenizer(captions)
    words = t5_tokenizer(captions)
    clip = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    t5 = T5Config(vocab_size=len(words), d_model=128, d_kv=32, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=4 * side,
    )
    transformer = SD3Transformer2DModel(
        sample_size=side,
        patch_size=1,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        caption_projection_dim=128,
        joint_attention_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=side,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        text_encoder=CLIPTextModelWithProjection(clip).eval(),
        tokenizer=tokens,
        text_encoder_2=CLIPTextModelWithProjection(clip).eval(),
        tokenizer_2=clip_tokenizer(captions),
        text_encoder_3=T5EncoderModel(t5).eval(),
        tokenizer_3=words,
    )


def clip_tokenizer(captions: list[str]) -> CLIPTokenizer:
    """Byte-pair CLIP tokenizer whose merges were learned on the captions; any other text falls back to bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, initial_alphabet=alphabet, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    merges = [tuple(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    pieces = [*alphabet, *(c + "</w>" for c in alphabet), *("".join(m) for m in merges)]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_LENGTH)


def t5_tokenizer(captions: list[str], length: int = TEXT_LENGTH) -> T5Tokenizer:
    """Unigram T5 tokenizer: the captions' words, and the printable ASCII characters for any other text."""
    words = sorted({w for caption in captions for w in caption.split()})
    characters = [chr(c) for c in range(33, 127)]
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -8.0)]
    pieces = [(f"▁{w}", -2.0) for w in words] + [(c, -9.0) for c in characters]
    return T5Tokenizer(vocab=specials + pieces, extra_ids=0, model_max_length=length)


def draw(n: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """``n`` captions, each sort equally often, and their pictures as float32 ``[n, 3, 32, 32]`` in [-1, 1]."""
    shapes = mmrl.load("datasets", "shapes")
    prompts: list[Prompt] = shapes.prompts("all")
    rng = random.Random(seed)
    sorts = [[p for p in prompts if p.meta["task"] == t] for t in ("count", "side", "relation")]
    chosen = [rng.choice(sorts[i % 3]) for i in range(n)]
    return [p.text for p in chosen], pixels([shapes.draw(shapes.scene(p, rng)) for p in chosen])


def pixels(pictures: list[Image.Image]) -> torch.Tensor:
    """Pictures of one size as float32 ``[n, 3, height, width]`` in [-1, 1]."""
    return torch.from_numpy(np.stack([np.asarray(p) for p in pictures])).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(vae: Any, images: torch.Tensor, minutes: float, log: Callable[..., None]) -> None:
    """Reconstruction by L1 + L2 with a light KL; then scaling and shift factors from the latents' statistics."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    started, step, generator = computed(), 0, torch.Generator().manual_seed(1)
    while (spent := computed() - started) < minutes:
        set_lr(optimizer, 2e-3, step, spent / minutes)
        x = images[torch.randint(len(images), (32,), generator=generator)]
        posterior = vae.encode(x).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        y = vae.decode(posterior.mean + posterior.std * noise).sample
        reconstruction = F.l1_loss(y, x) + F.mse_loss(y, x)
        loss = reconstruction + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            log(stage="vae", step=step, minutes=spent, loss=loss.item(), mse=F.mse_loss(y, x).item())
        step += 1
    with torch.no_grad():
        z = vae.encode(images[:2048]).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / z.std().item(), shift_factor=z.mean().item())


def train_flow(
    pipe: StableDiffusion3Pipeline, captions: list[str], latents: torch.Tensor, minutes: float, log: Callable[..., None]
) -> None:
    """Flow matching with 10 % caption dropout; keeps the exponential moving average of the weights."""
    modules = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    parameters = list(itertools.chain.from_iterable(m.parameters() for m in modules))
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started, step, generator = computed(), 0, torch.Generator().manual_seed(2)
    running: list[float] = []
    while (spent := computed() - started) < minutes:
        set_lr(optimizer, 1e-3, step, spent / minutes)
        rows = torch.randint(len(latents), (64,), generator=generator)
        x0, eps = latents[rows], torch.randn(64, *latents.shape[1:], generator=generator)
        dropped = torch.rand(64, generator=generator) < 0.1
        text = ["" if d else captions[i] for d, i in zip(dropped.tolist(), rows.tolist(), strict=True)]
        embeds, _, pooled, _ = pipe.encode_prompt(
            text, None, None, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH
        )
        sigma = torch.sigmoid(torch.randn(64, generator=generator))
        s = sigma.view(-1, 1, 1, 1)
        v = pipe.transformer(
            hidden_states=(1 - s) * x0 + s * eps,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            timestep=sigma * 1000,
        ).sample
        loss = F.mse_loss(v, eps - x0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        decay = min(0.999, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - decay)
        running.append(loss.item())
        if step % 100 == 99:
            log(stage="flow", step=step + 1, minutes=spent, loss=float(np.mean(running)))
            running.clear()
        step += 1
    with torch.no_grad():
        for p, a in zip(parameters, average, strict=True):
            p.copy_(a)


def computed() -> float:
    """Minutes for which each thread of this process has computed: other work on the machine does not count."""
    return time.process_time() / 60 / torch.get_num_threads()


def set_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, done: float) -> None:
    """100 steps of warm-up, then a linear fall to a tenth over the time allowed (``done`` in [0, 1])."""
    optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 100) * (1 - 0.9 * done)


def make(
    command: str,
    about: str | None,
    draw: Callable[[int, int], tuple[list[str], torch.Tensor]],
    vocabulary: list[str],
    side: int,
) -> None:
    """Train a model on what ``draw(n, seed)`` gives, as the command line says; write it and its log."""
    arguments = parse(about)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    earlier = (arguments.continue_from / "log.jsonl").read_text() if arguments.continue_from else ""
    with (arguments.out / "log.jsonl").open("w") as lines:
        lines.write(earlier)

        def log(**row: float | str) -> None:
            print(json.dumps(row), file=lines, flush=True)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

        log(command=shlex.join(["python", "-m", command, *sys.argv[1:]]))
        captions, images = draw(arguments.pictures, len(earlier))
        if arguments.continue_from:
            pipe = StableDiffusion3Pipeline.from_pretrained(arguments.continue_from, dtype=torch.float32)
        else:
            pipe = build(vocabulary, side)
            if arguments.vae_from:
                vae = AutoencoderKL.from_pretrained(arguments.vae_from / "vae", dtype=torch.float32)
                pipe.register_modules(vae=vae)
            else:
                train_vae(pipe.vae, images, arguments.vae_minutes, log)
        with torch.no_grad():
            z = torch.cat([pipe.vae.encode(x).latent_dist.mean for x in images.split(512)])
        config = pipe.vae.config
        latents = (z - config.shift_factor) * config.scaling_factor
        train_flow(pipe, captions, latents, arguments.flow_minutes, log)
    pipe.to(dtype=torch.float16).save_pretrained(arguments.out)


def parse(about: str | None) -> argparse.Namespace:
    """The command line of a maker."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the pipeline to")
    parser.add_argument("--pictures", type=int, default=40_000)
    parser.add_argument("--vae-minutes", type=float, default=4.0, help="computing time of each thread")
    parser.add_argument("--flow-minutes", type=float, default=20.0, help="computing time of each thread")
    parser.add_argument("--vae-from", type=Path, help="take the VAE of this pipeline and train the rest only")
    parser.add_argument("--continue-from", type=Path, help="go on training the rest of this pipeline; its log is kept")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> None:
    vocabulary = [p.text for p in mmrl.load("datasets", "shapes").prompts("all")]
    make("tools.make_models.shapes_sd3", __doc__, draw, vocabulary, side=8)


if __name__ == "__main__":
    main()
