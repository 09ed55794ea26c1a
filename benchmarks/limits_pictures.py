"""Checks of ``gpu_limits.py`` on Stable Diffusion 3.5 Medium: slices of the recipe's update, flow_grpo's, decoding."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from slices import JPEG, Slices, as_before, closed, sampled
from smoke_models import peak_gib, tf32, timed
from smoke_place import Place, SkippedError
from true_shapes import built

from mmrl.step.step_context import StepContext
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import computed, importance_weights

RECIPE = "sd35-medium"
SLICE = ["train.prompts_per_step=1", "train.group_size=8", "train.updates_per_step=1", "sampling.steps=3", JPEG]
"""One micro-batch of the recipe's size; with guidance a prediction has 16 rows. Fewer steps are sampled: none of them
is timed."""
SMALL = ["sampling.height=64", "sampling.width=64", "sampling.max_sequence_length=8"]
SMALL += ["train.group_size=2", "train.micro_batch_size=2"]


def run(place: Place, *words: str) -> StepContext:
    return built(place, RECIPE, *SLICE, *(SMALL if place.small else ()), *words)


def as_shipped(place: Place) -> dict[str, Any]:
    """The slice with checkpointing, as it was before adapters multiplied in half precision, with TF32 and under
    autocast; as the recipe has it; and without checkpointing, as the plan has it."""
    context = run(place, "model.gradient_checkpointing=true")
    slices, pipeline, figures = sampled(context), context.pipeline, dict[str, Any]()

    def measured(label: str) -> None:
        figures[label] = slices.milliseconds(place)
        place.keep(figures)

    measured("the recipe, ms")
    if place.gpu:
        figures["peak GiB"] = round(peak_gib(), 1)
    with as_before(context):
        measured("float32 adapters, ms")
        with tf32(place):
            measured("the same, TF32, ms")
        pipeline.autocast, shipped = torch.bfloat16, pipeline.autocast  # type: ignore[attr-defined]
        measured("the same under autocast, ms")
        pipeline.autocast = shipped  # type: ignore[attr-defined]
    pipeline.adapter.model.disable_gradient_checkpointing()  # type: ignore[attr-defined]
    measured("the recipe, not checkpointed, ms")
    if place.gpu:
        figures["peak GiB, not checkpointed"] = round(peak_gib(), 1)
    closed(context)
    return figures


def compiled(place: Place) -> dict[str, Any]:
    """The slice without checkpointing: with compiled blocks, then captured in a CUDA graph. Small blocks are traced,
    forward and backward, and no kernels are written."""
    if place.gpu and not find_spec("triton"):
        raise SkippedError("triton is not installed, with which torch.compile writes kernels")
    if place.small:
        with traced():
            return _compiled(place)
    if not place.gpu:
        raise SkippedError("compiled kernels say nothing on a CPU; add --small")
    return _compiled(place)


@contextmanager
def traced() -> Generator[None]:
    """Inside the block a module's compiled graphs run as they were traced."""
    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **how: plain(self, **how | {"backend": "aot_eager"})  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.compile = plain  # type: ignore[method-assign]


def _compiled(place: Place) -> dict[str, Any]:
    context = run(place, "model.gradient_checkpointing=false", "performance.compile=true")
    slices = sampled(context)
    figures: dict[str, Any] = {"compiled, ms": slices.milliseconds(place)}
    place.keep(figures)
    if not place.small:
        replay = captured(lambda: without_metrics(slices))
        figures["graph, ms"] = round(1000 * timed(place, replay, 5), 1)
    closed(context)
    return figures


def without_metrics(slices: Slices) -> None:
    """As ``loop.backward``, but nothing is brought to the host, which a graph cannot hold."""
    context, micro_batch, metrics = slices.context, slices.micro_batches[0], StepMetrics()
    new, old = computed(context, micro_batch, 0, metrics), micro_batch.old
    if "rollout_log_probs" in old:
        old = importance_weights(context, old, new, metrics)
    context.policy.backward(context.objective.loss(new, old, slices.denominator).value)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


# -- flow_grpo ---------------------------------------------------------------------------------------------------------


def flow_grpo(place: Place) -> dict[str, Any]:
    """A slice by flow_grpo's functions on our model, as its script has it: weights in float32, fp16 autocast, TF32, no
    checkpointing; beside ours in the same process."""
    if place.peer is None:
        raise SkippedError("give --peer PATH, a checkout of flow_grpo with its fast scripts")
    import peer_flow_grpo

    peer = peer_flow_grpo.load(place.peer)
    context = run(place)
    figures: dict[str, Any] = {"ours, ms": sampled(context).milliseconds(place)}
    closed(context)
    del context
    context = run(place, "model.dtype=float32", "model.gradient_checkpointing=false")
    slices = sampled(context)
    theirs = their_slice(peer, slices, place)
    gap = (theirs() - slices.micro_batches[0].rows.log_probs[:, 0]).abs().max().item()  # type: ignore[index]
    figures["log-probs, largest difference"] = float(f"{gap:.2g}")
    with tf32(place):
        figures["flow_grpo, ms"] = round(1000 * timed(place, theirs, 1 if place.small else 5), 1)
    figures["ours over flow_grpo"] = round(figures["ours, ms"] / figures["flow_grpo, ms"], 2)
    closed(context)
    return figures


def their_slice(peer: Any, slices: Slices, place: Place) -> Callable[[], torch.Tensor]:
    """Forward, reference and backward of the first recorded step; returns the log-probs."""
    context = slices.context
    rows: Any = slices.micro_batches[0].rows
    pipeline: Any = context.pipeline
    sampling, pipe = context.recipe.denoising, pipeline.adapter.pipe
    pipe.scheduler.set_timesteps(sampling.steps, device=place.device)
    features = pipeline.batch_features(rows.slots)
    assert rows.states is not None
    assert rows.log_probs is not None
    recorded = {
        "latents": rows.states[:, :-1],
        "next_latents": rows.states[:, 1:],
        "timesteps": pipe.scheduler.timesteps[: rows.log_probs.shape[1]].expand(len(rows), -1),
    }
    config = SimpleNamespace(
        train=SimpleNamespace(cfg=True),
        sample=SimpleNamespace(
            guidance_scale=sampling.guidance_scale, noise_level=sampling.sde.noise_level, sde_type="sde"
        ),
    )
    old, advantages = rows.log_probs[:, 0], slices.micro_batches[0].old["advantages"].view(-1)
    clip, beta = context.recipe.algorithm.clip_range, context.recipe.algorithm.kl_coef  # type: ignore[attr-defined]
    half = torch.float16 if place.gpu and not place.small else torch.bfloat16

    def predicted() -> tuple[Any, ...]:
        with torch.autocast(place.device.partition(":")[0], half):
            given = (pipeline.policy, pipe, recorded, 0, features["embeds"], features["pooled"], config)
            return peer.compute_log_prob(*given)

    def one() -> torch.Tensor:
        _, log_prob, mean, std = predicted()
        with torch.no_grad(), pipeline.policy.disable_adapter():
            reference = predicted()[2]
        ratio = torch.exp(log_prob - old)
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
        distance = (mean - reference).square().mean((1, 2, 3), keepdim=True) / (2 * std**2)
        (loss + beta * distance.mean()).backward()
        return log_prob.detach()

    return one


# -- decoding ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def decode(place: Place) -> dict[str, Any]:
    """Eight pictures of 512 x 512 through the run's decoder: in float32 and under autocast with weights as they are
    stored, as the product has it, whose channels lie last, and with bfloat16 weights, which no run has."""
    context = run(place)
    pipeline: Any = context.pipeline
    vae, decoded, figures = pipeline.adapter.vae.to(place.device), pipeline.decoded, {}
    latents = torch.randn(2 if place.small else 8, *pipeline.shape, device=place.device)

    def measured(label: str, work: Callable[[], torch.Tensor]) -> None:
        figures[label] = round(1000 * timed(place, work, 1 if place.small else 5), 1)
        place.keep(figures)

    measured("the product's, ms", lambda: decoded(latents))
    figures["the product's in bfloat16"] = bool(decoded.half)
    vae.to(memory_format=torch.contiguous_format)
    measured("float32, ms", lambda: decoded.shown(latents))
    measured("under autocast, ms", lambda: decoded.shown(latents, half=True))
    vae.to(memory_format=torch.channels_last)
    measured("the same, channels last, ms", lambda: decoded.shown(latents, half=True))
    vae.to(torch.bfloat16)
    half = latents.bfloat16()
    measured("bfloat16 weights, channels last, ms", lambda: decoded.shown(half))
    closed(context)
    return figures
