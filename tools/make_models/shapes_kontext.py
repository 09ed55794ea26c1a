"""Make the small FLUX.1 Kontext that mmrl ships: an editor of coloured shapes, trained from scratch.

    python -m tools.make_models.shapes_kontext --out pipelines/diffusion/models/shapes-kontext --threads 1

The VAE is that of ``shapes-sd3``. Transformer and text encoders learn by flow matching on drawn edits of the
``shape_edits`` data set (all compositions, so that RL's held-out ones are unseen by RL only, not by the base model).
The instructions were written carelessly: a share of them (``--careless``) names another colour or side than the wanted
picture has, so the model edits well and often does not what it is told. ``log.jsonl`` beside the weights is the log of
the run that made them.
"""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false

# What is private to torch below has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tools.make_models.shapes_sd3 import TEXT_LENGTH, clip_tokenizer, computed, pixels, set_lr, t5_tokenizer

allow_cpu_only()  # before diffusers imports torchvision

# ruff: noqa: E402
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

BATCH = 64
COLOURS, SIDES = ("red", "green", "blue", "yellow", "purple"), ("left", "right", "top", "bottom")


def build(vae: AutoencoderKL) -> FluxKontextPipeline:
    """A random FluxKontextPipeline of 2.4 M parameters for pictures of 32 px."""
    texts = [f"change the colour to {colour}" for colour in COLOURS] + [f"move it to the {side}" for side in SIDES]
    tokens, words = clip_tokenizer(texts), t5_tokenizer(texts)
    ids = {name: getattr(tokens, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    clip = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_LENGTH,
        **ids,
    )
    t5 = T5Config(vocab_size=len(words), d_model=128, d_kv=32, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
    transformer = FluxTransformer2DModel(
        in_channels=4 * vae.config["latent_channels"],
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    return FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=CLIPTextModel(clip).eval(),
        tokenizer=tokens,
        text_encoder_2=T5EncoderModel(t5).eval(),
        tokenizer_2=words,
        transformer=transformer,
    )


def draw(n: int, careless: float, seed: int) -> tuple[list[str], Tensor, Tensor]:
    """``n`` instructions, and the pictures before and after, float32 ``[n, 3, 32, 32]`` in [-1, 1]; a half changes the
    colour. A share ``careless`` of the instructions names another colour, or another side."""
    edits, shapes = mmrl.load("datasets", "shape_edits"), mmrl.load("datasets", "shapes")
    rng = random.Random(seed)
    captions = [c for c in shapes.prompts("all") if c.meta["task"] != "relation"]
    sided = [c for c in captions if "side" in c.meta]
    texts, before, after = [], [], []
    for i in range(n):
        change = ("colour", "place")[i % 2]
        text, old, new = edits.pair(rng.choice(captions if change == "colour" else sided), change, rng)
        start, _, word = text.rpartition(" ")
        if rng.random() < careless:
            word = rng.choice([one for one in (COLOURS if change == "colour" else SIDES) if one != word])
        texts.append(f"{start} {word}")
        before.append(shapes.draw(old))
        after.append(shapes.draw(new))
    return texts, pixels(before), pixels(after)


@torch.no_grad()
def encoded(pipe: FluxKontextPipeline, images: Tensor) -> Tensor:
    """The latents as tokens, ``[n, 16, 32]``."""
    config = pipe.vae.config
    z = torch.cat([pipe.vae.encode(x).latent_dist.mean for x in images.split(512)])
    z = (z - config.shift_factor) * config.scaling_factor
    return FluxKontextPipeline._pack_latents(z, len(z), *z.shape[1:])


def train_flow(
    pipe: FluxKontextPipeline, texts: list[str], latents: Sequence[Tensor], minutes: float, log: Callable[..., None]
) -> None:
    """Flow matching of the tokens after an edit beside those before it; keeps the moving average of the weights."""
    modules = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2]
    parameters = list(itertools.chain.from_iterable(m.parameters() for m in modules))
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rows_columns = [FluxKontextPipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32) for _ in range(2)]
    rows_columns[1][:, 0] = 1.0  # the picture that is given
    places = torch.cat(rows_columns)
    started, step, generator = computed(), 0, torch.Generator().manual_seed(2)
    running: list[float] = []
    while (spent := computed() - started) < minutes:
        set_lr(optimizer, 1e-3, step, spent / minutes)
        rows = torch.randint(len(texts), (BATCH,), generator=generator)
        source, x0 = (of[rows] for of in latents)
        eps = torch.randn(x0.shape, generator=generator)
        embeds, pooled, text_ids = pipe.encode_prompt(
            [texts[i] for i in rows.tolist()], None, max_sequence_length=TEXT_LENGTH
        )
        sigma = torch.sigmoid(torch.randn(BATCH, generator=generator))
        s = sigma.view(-1, 1, 1)
        v = pipe.transformer(
            hidden_states=torch.cat([(1 - s) * x0 + s * eps, source], 1),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            timestep=sigma,
            img_ids=places,
            txt_ids=text_ids,
        ).sample[:, : x0.shape[1]]
        loss = F.mse_loss(v, eps - x0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - min(0.999, (1 + step) / (10 + step)))
        running.append(loss.item())
        if step % 100 == 99:
            log(stage="flow", step=step + 1, minutes=spent, loss=float(np.mean(running)))
            running.clear()
        step += 1
    with torch.no_grad():
        for p, a in zip(parameters, average, strict=True):
            p.copy_(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the pipeline to")
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--careless", type=float, default=0.5, help="share of instructions that name something else")
    parser.add_argument("--flow-minutes", type=float, default=10.0, help="computing time of each thread")
    parser.add_argument("--vae-from", type=Path, default=Path("pipelines/diffusion/models/shapes-sd3"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "log.jsonl").open("w") as lines:

        def log(**row: float | str) -> None:
            print(json.dumps(row), file=lines, flush=True)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

        log(command=shlex.join(["python", "-m", "tools.make_models.shapes_kontext", *sys.argv[1:]]))
        pipe = build(AutoencoderKL.from_pretrained(arguments.vae_from / "vae", dtype=torch.float32))
        texts, before, after = draw(arguments.pictures, arguments.careless, seed=0)
        train_flow(pipe, texts, (encoded(pipe, before), encoded(pipe, after)), arguments.flow_minutes, log)
    pipe.to(dtype=torch.float16).save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
