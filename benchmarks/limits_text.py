"""Checks of ``gpu_limits.py`` on text: decoding, slices of the update, TRL's step beside ours."""

from __future__ import annotations

import json
import random
import time
from contextlib import closing
from importlib.util import find_spec
from typing import Any, cast

import torch
from slices import Slices, as_before, batch_of, closed, divided, sampled
from smoke_models import peak_gib, synchronize, timed
from smoke_place import Place, SkippedError
from torch import Tensor
from true_shapes import decoder, run_of_text

from mmrl.models.text.features import key_of
from mmrl.step.batch import samples_of
from mmrl.step.step_context import StepContext

TOKENS = 8192
"""Of a slice whose milliseconds are told; those of a slice with fewer are scaled."""
LORA = "model.lora={rank: 64, alpha: 32, init: default}"

# -- decoding ----------------------------------------------------------------------------------------------------------


def decoding(place: Place) -> dict[str, Any]:
    """Tokens a second with 256 rows: ours, also with steps as CUDA graphs, transformers' static cache with graphs, and
    its generate_batch."""
    rows, length = (8, 8) if place.small else (256, 64)
    folder, figures = decoder(place), dict[str, Any]()

    def told(label: str, work: Any) -> None:
        drawn = [0]

        def once() -> None:
            drawn[0] = work()

        seconds = timed(place, once, 1)
        figures[label] = round(drawn[0] / seconds)
        place.keep(figures)

    inputs: dict[str, Tensor] = {}
    for label, words in (("ours", []), ("ours with graphs", ["performance.compile=true"])):
        context = run_of_text(place, folder, f"sampling.max_new_tokens={length}", *words)
        slots = context.controller.slots(0, context.prompts, rows // 4, context.rollout.cost)
        context.pipeline.encode(slots)
        every = samples_of(slots, 4)
        asked = [slot for slot, _ in every], [name for _, name in every]
        told(f"{label}, tokens/s", lambda c=context, a=asked: sum(c.pipeline.sample(a[0], a[1], (), 0).responses))
        pipeline: Any = context.pipeline
        keys = [key_of(slot.prompt) for slot in asked[0]]
        inputs = pipeline._inputs(keys, [pipeline.features.get(key) for key in keys])
        closed(context)
    inputs.pop("position_ids", None)
    told("static cache and graphs, tokens/s", static(place, folder, inputs, length))
    told("generate_batch, tokens/s", batched(place, folder, inputs, length))
    return figures


def loaded(place: Place, folder: Any, **given: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **given).to(place.device).eval()


def static(place: Place, folder: Any, inputs: dict[str, Tensor], length: int) -> Any:
    """transformers' ``generate`` with a cache of fixed size, whose steps it compiles into a CUDA graph."""
    model = loaded(place, folder)
    given: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "top_k": 0}
    given |= {"cache_implementation": "static", "disable_compile": place.small or not place.gpu}

    def work() -> int:
        model.generate(**inputs, **given)
        return len(inputs["input_ids"]) * length

    work()  # compiled here
    return work


def batched(place: Place, folder: Any, inputs: dict[str, Tensor], length: int) -> Any:
    """transformers' continuous batching over a paged cache."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = loaded(place, folder)
    given = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    prompts = [ids[mask.bool()].tolist() for ids, mask in given]
    room = {"num_blocks": 32, "max_batch_tokens": 256} if place.small else {}  # by itself it takes the whole memory
    how = ContinuousBatchingConfig(**room)
    settings = GenerationConfig(max_new_tokens=length, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)

    def work() -> int:
        made = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=how)
        return sum(len(one.generated_tokens) for one in made.values())

    return work


# -- updates -----------------------------------------------------------------------------------------------------------


def sizes(place: Place) -> list[str]:
    """Of a step whose largest slice has about ``TOKENS`` tokens."""
    if place.small:
        return ["train.prompts_per_step=2", "train.group_size=2", "sampling.max_new_tokens=8"]
    step = ["train.prompts_per_step=8", "train.group_size=8", "train.micro_batch_size=64"]
    return [*step, f"train.micro_batch_tokens={TOKENS}", "sampling.max_new_tokens=128"]


def scaled(slices: Slices, milliseconds: float) -> float:
    return round(milliseconds * TOKENS / slices.tokens, 1)


def update(place: Place) -> dict[str, Any]:
    """All weights of a decoder of 0.5B: the recipe's slice, with checkpointing, and the body with Liger's fused
    loss."""
    context = run_of_text(place, decoder(place), *sizes(place))
    slices, policy = sampled(context), context.policy.module
    figures: dict[str, Any] = {"tokens of the slice": slices.tokens}
    figures["the recipe, ms"] = scaled(slices, slices.milliseconds(place))
    if place.gpu:
        figures["peak GiB"] = round(peak_gib(), 1)
    place.keep(figures)
    policy.gradient_checkpointing_enable()  # type: ignore[operator]
    figures["checkpointed, ms"] = scaled(slices, slices.milliseconds(place))
    place.keep(figures)
    policy.gradient_checkpointing_disable()  # type: ignore[operator]
    if not find_spec("liger_kernel"):
        figures["Liger's loss"] = "liger-kernel is not installed"
    else:
        work = with_liger(context, slices, compiled=place.gpu and not place.small)
        figures["with Liger's loss, ms"] = scaled(slices, round(1000 * timed(place, work, 1 if place.small else 5), 1))
    closed(context)
    return figures


def uneven(place: Place) -> list[str]:
    """Words for a step whose prompts and responses are as uneven as those of GSM8K (shorter at small sizes)."""
    draw, shorter = random.Random(0), 8 if place.small else 1
    prompts, most = 16 if place.small else 64, 1024 // shorter
    data = place.folder / "uneven.jsonl"
    with data.open("w") as file:
        for _ in range(prompts):
            words, tokens = draw.lognormvariate(4.2, 0.35) / shorter, draw.lognormvariate(5.25, 0.45) / shorter
            record = {
                "prompt": "one " * max(1, int(words)),
                "answer": "1",
                "max_new_tokens": min(most, int(tokens) + 1),
            }
            file.write(json.dumps(record) + "\n")
    of = [f"data.{split}={{path: {data}, heldout: 0}}" for split in ("train", "heldout")]
    return [*of, f"train.prompts_per_step={prompts}", "train.group_size=4", f"sampling.max_new_tokens={most}"]


def packing(place: Place) -> dict[str, Any]:
    """An update of uneven responses: all its slices with whole rows in lines, and with rows padded to the longest."""
    shorter = 8 if place.small else 1
    limits = ["train.micro_batch_size=40", f"train.micro_batch_tokens={TOKENS // shorter // (4 if place.small else 1)}"]
    context = run_of_text(place, decoder(place), *uneven(place), *limits, "train.packing=true", "eval.samples=1")
    batch, pipeline = batch_of(context), cast("Any", context.pipeline)
    ways = {"in lines": pipeline.packing, "padded": None}
    figures: dict[str, Any] = {}
    for label, way in ways.items():
        pipeline.packing = way
        slices = divided(context, batch)
        padded = sum(one.padded for one in slices.micro_batches)
        figures[f"{label}, slices"] = len(slices.micro_batches)
        figures[f"{label}, padding"] = round(1 - sum(one.tokens for one in slices.micro_batches) / padded, 3)
        seconds = timed(place, lambda slices=slices: [slices.backward(n) for n in range(len(slices.micro_batches))], 3)
        figures[f"{label}, ms"] = round(1000 * seconds, 1)
        context.policy.optimizer.zero_grad(set_to_none=True)
        place.keep(figures)
    figures["lines over padded"] = round(figures["in lines, ms"] / figures["padded, ms"], 2)
    closed(context)
    return figures


def with_liger(context: StepContext, slices: Slices, compiled: bool) -> Any:
    """Forward and backward of the largest slice without a reference, whose logits Liger computes in chunks."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    pipeline: Any = context.pipeline
    rows: Any = max(slices.micro_batches, key=lambda one: one.padded).rows
    inputs, tokens, mask = pipeline._read(rows), rows.padded("tokens"), rows.inside
    length, model = rows.width, pipeline.policy
    advantages = torch.ones(len(rows), device=tokens.device)
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, compiled=compiled, loss_type="grpo")

    def work() -> None:
        with pipeline._autocast():
            hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, -length - 1 : -1]
            found = loss(hidden.contiguous(), model.lm_head.weight, tokens, mask, advantages)
        found[0].backward()

    return work


def lora(place: Place) -> dict[str, Any]:
    """An adapter of rank 64 on a decoder as wide as Qwen2.5-3B, 12 of its 36 layers: the recipe's slice, and as it was
    before adapters multiplied in half precision."""
    context = run_of_text(place, decoder(place, "qwen25-vl-3b", layers=12), *sizes(place), LORA)
    slices = sampled(context)
    figures: dict[str, Any] = {"tokens of the slice": slices.tokens}
    figures["the recipe, ms"] = scaled(slices, slices.milliseconds(place))
    if place.gpu:
        figures["peak GiB"] = round(peak_gib(), 1)
    place.keep(figures)
    with as_before(context):
        figures["float32 adapters, ms"] = scaled(slices, slices.milliseconds(place))
    figures["float32 over the recipe"] = round(figures["float32 adapters, ms"] / figures["the recipe, ms"], 2)
    closed(context)
    return figures


# -- TRL ---------------------------------------------------------------------------------------------------------------


def trl(place: Place) -> dict[str, Any]:
    """Three steps of ``GRPOTrainer`` and three of ours on the same decoder, prompts, rows and lengths."""
    if not find_spec("trl"):
        raise SkippedError("trl is not installed")
    import llm_arms
    import peer_trl

    from mmrl.core.clock import Clock

    true = llm_arms.Size(24, 896, 14, 2, 4864, 151_936, new_tokens=128, prompts=8, group=8, micro_batch=32)
    size = llm_arms.SIZES["tiny"] if place.small else true
    folder = place.folder / "decoder"
    llm_arms.write_model(size, folder)
    figures: dict[str, Any] = {}

    def steps(label: str, step: Any) -> None:
        clock, found = Clock(torch.device(place.device)), []
        for n in range(3):
            synchronize(place)
            began = time.perf_counter()
            step(n, clock)
            synchronize(place)
            found.append(time.perf_counter() - began)
        figures[label] = round(min(found[1:]), 3)
        place.keep(figures)

    context = llm_arms.make_run(size, folder, place.device, "bfloat16")
    steps("ours, s", llm_arms.ours(context))
    closed(context)
    del context
    with closing(peer_trl.Peer(size, folder, place.folder / "trl", gpu=place.gpu)) as peer:
        steps("TRL, s", peer.step)
    figures["TRL over ours"] = round(figures["TRL, s"] / figures["ours, s"], 2)
    return figures
