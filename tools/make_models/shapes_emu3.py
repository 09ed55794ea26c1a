"""Make the small Emu3 that mmrl ships: it writes a picture as tokens, which its VQ model decodes.

    python -m tools.make_models.shapes_emu3 --out pipelines/llm/models/shapes-emu3 --threads 1

Two stages on drawn scenes of the ``shapes`` data set (all compositions, so that RL's held-out ones are unseen by RL
only, not by the base model): the VQ model by reconstruction (van den Oord et al. 2017, arXiv 1711.00937, with the
moving averages of its appendix A.1; a code that nothing uses begins anew at an encoded patch), then the transformer by
the next picture token. A tenth of the captions is left out, for classifier-free guidance. ``log.jsonl`` beside the
weights is the log of the run that made them. Training simply stops early: what the model confuses, it confuses for
lack of training.
"""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tools.make_models.learned_tokenizer import learned
from tools.make_models.shapes_sd3 import computed, draw, set_lr
from tools.make_models.vlm_training import make_optimizer, save, start_log

allow_cpu_only()
from transformers import (  # noqa: E402
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    Emu3VQVAE,
)

CODES, SIDE, FACTOR, CONTEXT = 512, 8, 4, 96
"""Codes of the VQ model; the rows and columns of tokens of a picture of 32 x 32 pixels, 4 x 4 of them each."""
BATCH = 64
NAMED = {
    "image_token": "<image>",
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}
"""What Emu3's processor asks its tokenizer for."""
END_OF_ROW, BEGIN = "<|extra_200|>", "<|extra_203|>"


def build(captions: Sequence[str]) -> tuple[Emu3ForConditionalGeneration, Emu3Processor]:
    """A random model of 1.6 M parameters and its processor; a word that ``captions`` use is one token."""
    codes = [f"<|visual token {n:06d}|>" for n in range(CODES)]
    tokenizer = learned(captions, 512, ("<|endoftext|>", "<|im_end|>", END_OF_ROW, *codes), "", CONTEXT, **NAMED)
    tokenizer.add_special_tokens({"bos_token": BEGIN})
    tokenizer.chat_template = None
    pictures = Emu3ImageProcessor(
        image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=16 * 16, max_pixels=64 * 64, spatial_factor=FACTOR
    )
    ends = {n: getattr(tokenizer, n) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "attention_dropout": 0.0,
        "initializer_range": 0.06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **ends,
    }
    vq = {
        "codebook_size": CODES,
        "embed_dim": 8,
        "latent_channels": 8,
        "temporal_downsample_factor": 1,
        "base_channels": 32,
        "channel_multiplier": [1, 1, 2],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "hidden_size": 64,
    }
    known = {t: tokenizer.convert_tokens_to_ids(t) for t in (*codes, END_OF_ROW, NAMED["image_token"])}
    config = Emu3Config(vq_config=vq, text_config=text, vocabulary_map=known, tie_word_embeddings=True)
    model = Emu3ForConditionalGeneration(config)
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    return model, Emu3Processor(image_processor=pictures, tokenizer=tokenizer)


class Codebook:
    """The codes as moving averages of what is encoded to them; ``counts`` ``[K]`` and ``sums`` ``[K, C]``."""

    def __init__(self, weight: Tensor, encoded: Tensor) -> None:
        self.weight, self.counts = weight, torch.ones(len(weight))
        self.sums = encoded[torch.randperm(len(encoded))[: len(weight)]].clone()
        weight.copy_(self.sums)

    def update(self, encoded: Tensor, index: Tensor) -> None:
        """``encoded`` ``[N, C]`` went to the codes ``index`` ``[N]``."""
        one = F.one_hot(index, len(self.weight)).float()
        self.counts.lerp_(one.sum(0), 0.01)
        self.sums.lerp_(one.T @ encoded, 0.01)
        dead = self.counts < 0.02
        if dead.any():
            self.sums[dead] = encoded[torch.randint(len(encoded), (int(dead.sum()),))]
            self.counts[dead] = 1.0
        self.weight.copy_(self.sums / self.counts.unsqueeze(1))


def train_vq(vq: Emu3VQVAE, images: Tensor, minutes: float, log: Callable[..., None]) -> None:
    """Reconstruction by L1 + L2 with a commitment loss; for a tenth of the time without codes."""
    parameters = [p for name, p in vq.named_parameters() if not name.startswith("quantize")]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    generator, started, step, book = torch.Generator().manual_seed(1), computed(), 0, None
    vq.train()
    while (spent := computed() - started) < minutes:
        set_lr(optimizer, 1e-3, step, spent / minutes)
        x = images[torch.randint(len(images), (16,), generator=generator)]
        with torch.autocast("cpu", torch.bfloat16):
            z = vq.quant_conv(vq.encoder(x.unsqueeze(1)).transpose(1, 2)).transpose(1, 2).float()  # [B, 1, C, h, w]
        q, commitment = z, torch.zeros(())
        if spent > minutes / 10:
            with torch.no_grad():
                flat = z.movedim(2, -1).reshape(-1, z.shape[2])
                book = book or Codebook(vq.quantize.embedding.weight, flat)
                index = vq.quantize(z)
                book.update(flat, index.flatten())
                codes = vq.quantize.embedding(index).movedim(-1, 2)
            commitment = F.mse_loss(z, codes)
            q = z + (codes - z).detach()
        with torch.autocast("cpu", torch.bfloat16):
            y = vq.decoder(vq.post_quant_conv(q.transpose(1, 2)).transpose(1, 2), q).float()
        loss = F.l1_loss(y, x) + F.mse_loss(y, x) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            used = 0 if book is None else int((book.counts > 0.1).sum())
            log(stage="vq", step=step, minutes=spent, loss=loss.item(), mse=F.mse_loss(y, x).item(), codes=used)
        step += 1
    vq.eval()


@torch.no_grad()
def picture_tokens(model: Emu3ForConditionalGeneration, processor: Emu3Processor, images: Tensor) -> Tensor:
    """``[n, 75]``: what the model is to write of each picture, its end included."""
    size = torch.tensor([[SIDE * FACTOR] * 2])
    rows = [model.model.get_image_tokens(x, size.expand(len(x), 2)).view(len(x), -1) for x in images.split(256)]
    number = processor.tokenizer.convert_tokens_to_ids
    end = torch.tensor(
        [number(t) for t in (NAMED["eof_token"], NAMED["eoi_token"])] + [processor.tokenizer.eos_token_id]
    )
    written = torch.cat(rows)
    return torch.cat([written, end.expand(len(written), 3)], 1)


def prompts(processor: Emu3Processor, captions: Sequence[str]) -> list[list[int]]:
    """The tokens before a picture, as Emu3's processor has them."""
    texts = [f"{BEGIN}{c}<|image start|>{SIDE}*{SIDE}<|image token|>" for c in captions]
    return processor.tokenizer(texts, add_special_tokens=False).input_ids


def train_transformer(
    model: Emu3ForConditionalGeneration,
    asked: Sequence[Sequence[int]],
    empty: Sequence[int],
    written: Tensor,
    minutes: float,
    log: Callable[..., None],
) -> None:
    """Next-token prediction of the pictures ``written`` ``[n, T]`` behind their captions ``asked``."""
    optimizer = make_optimizer([model.model.text_model], 2e-3)
    generator, started, step, running = torch.Generator().manual_seed(2), computed(), 0, list[float]()
    model.train()
    while (spent := computed() - started) < minutes:
        set_lr(optimizer, 2e-3, step, spent / minutes)
        rows = torch.randint(len(written), (BATCH,), generator=generator)
        dropped = torch.rand(BATCH, generator=generator) < 0.1
        said = [empty if d else asked[i] for d, i in zip(dropped.tolist(), rows.tolist(), strict=True)]
        longest = max(map(len, said))
        before = torch.tensor([[0] * (longest - len(s)) + list(s) for s in said])
        mask = torch.tensor([[0] * (longest - len(s)) + [1] * len(s) for s in said])
        ids = torch.cat([before, written[rows]], 1)
        mask = torch.cat([mask, torch.ones_like(written[rows])], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        keep = torch.arange(longest - 1, ids.shape[1] - 1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=places, logits_to_keep=keep).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), written[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running.append(loss.item())
        if step % 100 == 99:
            log(stage="transformer", step=step + 1, minutes=spent, loss=sum(running) / len(running))
            running.clear()
        step += 1
    model.eval()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--pictures", type=int, default=40_000)
    parser.add_argument("--vq-minutes", type=float, default=8.0, help="computing time of each thread")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the transformer, as above")
    parser.add_argument("--vq-from", type=Path, help="take the VQ model of this directory and train the rest only")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    earlier = (arguments.vq_from / "log.jsonl").read_text() if arguments.vq_from else ""
    log = start_log(arguments.out, "shapes_emu3")
    captions, images = draw(arguments.pictures, 0)
    model, processor = build([p.text for p in mmrl.load("datasets", "shapes").prompts("all")])
    if arguments.vq_from:
        made = Emu3ForConditionalGeneration.from_pretrained(arguments.vq_from, dtype=torch.float32)
        model.model.vqmodel.load_state_dict(made.model.vqmodel.state_dict())
    else:
        train_vq(model.model.vqmodel, images, arguments.vq_minutes, log)
    model.requires_grad_(False).eval()
    written = picture_tokens(model, processor, images)
    model.model.text_model.requires_grad_(True)
    train_transformer(model, prompts(processor, captions), prompts(processor, [""])[0], written, arguments.minutes, log)
    save(model, processor, arguments.out)
    if earlier:
        kept = (arguments.out / "log.jsonl").read_text()
        (arguments.out / "log.jsonl").write_text(earlier + kept)


if __name__ == "__main__":
    main()
