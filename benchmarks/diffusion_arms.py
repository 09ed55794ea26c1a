"""The arms of ``diffusion_step.py``: the models, our iteration, and its bare model calls.

The bare arm replays the very calls (transformer, VAE, text encoders) that one of our iterations made, inputs and all,
so their number and shapes are the same by construction; it adds the backward passes and the optimizer step, and nothing
else: no noise, no step maths, no log-probs, no pictures, no reward, no metrics.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusion_families
import torch
from stepping import Arm, must_be_equal
from torch import Tensor

import mmrl
from mmrl.app.build import build
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.controller.features import FeatureStore
from mmrl.core.clock import Clock
from mmrl.core.trajectory import SampleId, Slot
from mmrl.step.batch import chunks, samples_of
from mmrl.step.step_context import StepContext
from mmrl.training.loop import train_step

PHASES = ("encode", "sample", "decode", "reward", "train")


@dataclass(frozen=True)
class Size:
    """A model and the work of an iteration on it."""

    transformer: dict[str, Any] | None
    """Sizes that replace those of the shapes model's transformer; None keeps them. Of Stable Diffusion 3 alone."""
    vae_channels: tuple[int, ...] | None
    pixels: int
    steps: int
    window: int
    prompts: int
    group: int
    micro_batch: int
    family: str = "sd3"
    """Another has the model of ``diffusion_families.py``."""
    frames: int | None = None
    """Of a clip."""


SIZES = {
    "tiny": Size(None, None, pixels=32, steps=4, window=2, prompts=2, group=2, micro_batch=2),
    "small": Size(None, None, pixels=32, steps=10, window=3, prompts=2, group=8, micro_batch=8),
    "large": Size(
        {
            "sample_size": 32,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 8,
            "num_attention_heads": 4,
            "attention_head_dim": 64,
            "caption_projection_dim": 256,
            "pos_embed_max_size": 16,
        },
        (32, 64, 64, 64),
        pixels=256,
        steps=10,
        window=3,
        prompts=2,
        group=4,
        micro_batch=4,
    ),
    "flux": Size(None, None, pixels=256, steps=10, window=3, prompts=2, group=4, micro_batch=4, family="flux"),
    "unet": Size(None, None, pixels=128, steps=10, window=3, prompts=2, group=4, micro_batch=4, family="sd"),
    "wan": Size(None, None, pixels=128, steps=10, window=3, prompts=2, group=4, micro_batch=4, family="wan", frames=9),
}
"""``tiny`` is for trying the script out; its times mean nothing."""


def write_model(size: Size, out: Path) -> None:
    """Write the model of that size with random weights, as diffusers saves it."""
    from tools.make_models import shapes_sd3  # first: it lets torchvision be imported without CUDA

    if size.family != "sd3":
        diffusion_families.write(size.family, out)
        return
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
    torch.manual_seed(0)
    pipe = shapes_sd3.build([p.text for p in mmrl.load("datasets", "shapes").prompts("all")])
    if size.transformer:
        text: dict[str, Any] = {"joint_attention_dim": 128, "pooled_projection_dim": 128}
        pipe.register_modules(transformer=SD3Transformer2DModel(**text, **size.transformer))
    if size.vae_channels:
        n = len(size.vae_channels)
        blocks: dict[str, Any] = {
            "block_out_channels": size.vae_channels,
            "down_block_types": ("DownEncoderBlock2D",) * n,
            "up_block_types": ("UpDecoderBlock2D",) * n,
        }
        vae = AutoencoderKL(
            latent_channels=16,
            layers_per_block=1,
            norm_num_groups=8,
            use_quant_conv=False,
            use_post_quant_conv=False,
            sample_size=size.pixels,
            **blocks,
        )
        pipe.register_modules(vae=vae)
    pipe.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    pipe.save_pretrained(out)


def make_run(size: Size, model: Path, lora: int, controller: Controller | None = None) -> StepContext:
    """A run of that size on one CPU thread; ``controller``: which of several it is."""
    return build(make_recipe(size, model, lora), controller)


def make_recipe(size: Size, model: Path, lora: int) -> Recipe:
    """Flow-GRPO with the JPEG reward (of a clip, of two of its frames), and LoRA of rank ``lora`` or (0) none."""
    jpeg = "jpeg:compressibility"
    return Recipe.model_validate(
        {
            "name": "benchmark",
            "device": "cpu",
            "threads": 1,
            "pipeline": f"diffusion/{size.family}",
            "model": {"path": str(model.resolve()), "lora": {"rank": lora, "alpha": 2 * lora} if lora else None},
            "data": {"name": "shapes"},
            "sampling": {
                "steps": size.steps,
                "height": size.pixels,
                "width": size.pixels,
                "frames": size.frames,
                "max_sequence_length": 12 if size.family == "sd3" else 32,
                "sde": {"kind": "flow", "noise_level": 0.7},
                "window": {"size": size.window},
            },
            "rewards": [{"name": "frames", "options": {"name": jpeg, "count": 2}} if size.frames else {"name": jpeg}],
            "algorithm": {"type": "flow_grpo", "clip_range": 1e-3, "kl_coef": 0.0},
            "train": {
                "steps": 1,
                "prompts_per_step": size.prompts,
                "group_size": size.group,
                "micro_batch_size": size.micro_batch,
            },
            "optim": {"lr": 1e-5},
        }
    )


def micro_batches(context: StepContext, step: int) -> list[tuple[list[Slot], list[SampleId]]]:
    """Slots and ids of the iteration's samples, a micro-batch at a time, as the loop takes them."""
    train = context.recipe.train
    rows = samples_of(context.controller.slots(step, context.prompts, train.prompts_per_step), train.group_size)
    return [([s for s, _ in chunk], [i for _, i in chunk]) for chunk in chunks(rows, train.micro_batch_size)]


def ours(context: StepContext) -> Arm:
    """An iteration of ``mmrl.training.loop``. Its prompts are new each time, as if the data set never repeated."""

    def iterate(step: int, clock: Clock) -> None:
        context.pipeline.features = FeatureStore()
        train_step(context, step, clock)

    return iterate


def ours_per_sample(context: StepContext) -> Arm:
    """``ours`` without its algorithmic saving: a prompt is encoded for every sample, a micro-batch at a time."""
    pipeline: Any = context.pipeline
    pipe = pipeline.adapter.pipe

    def iterate(step: int, clock: Clock) -> None:
        context.pipeline.features = FeatureStore()
        for slots, _ in micro_batches(context, step):
            texts = [slot.prompt.text for slot in slots]
            with clock("encode"), torch.no_grad():
                embeds, _, pooled, _ = pipe.encode_prompt(
                    texts,
                    None,
                    None,
                    do_classifier_free_guidance=False,
                    max_sequence_length=context.recipe.denoising.max_sequence_length,
                )
                for text, e, p in zip(texts, embeds, pooled, strict=True):
                    context.pipeline.features.put(text, {"embeds": e, "pooled": p})
        train_step(context, step, clock)

    return iterate


@dataclass(frozen=True)
class Call:
    """A call of a model as it was made; ``phase`` is ``train`` where it carried a graph."""

    target: str
    phase: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def shapes(self) -> str:
        """Target, phase and the shapes of the tensors given: equal for calls of equal work."""
        given = dict(enumerate(self.args)) | self.kwargs
        sizes = [f"{k}{list(v.shape)}" for k, v in given.items() if isinstance(v, Tensor)]
        return f"{self.phase} {self.target} {' '.join(sorted(sizes))}"


def targets(context: StepContext) -> dict[str, tuple[Any, str]]:
    """What is called and counted: object and name of its method. First, what predicts."""
    pipeline: Any = context.pipeline
    adapter = pipeline.adapter
    encoders = {f"text_encoder_{i}": (e, "forward") for i, e in enumerate(adapter.text_encoders)}
    return {adapter.trains: (context.pipeline.policy, "forward"), "vae": (adapter.vae, "decode"), **encoders}


@contextmanager
def recording(context: StepContext) -> Iterator[list[Call]]:
    """Keep every call of the models while the block runs."""
    calls: list[Call] = []

    def watched(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            phase = {trains: "train" if torch.is_grad_enabled() else "sample", "vae": "decode"}
            calls.append(Call(target, phase.get(target, "encode"), args, kwargs))
            return function(*args, **kwargs)

        return call

    watching, trains = targets(context), context.pipeline.adapter.trains  # type: ignore[attr-defined]
    for target, (owner, method) in watching.items():
        setattr(owner, method, watched(target, getattr(owner, method)))
    try:
        yield calls
    finally:
        for owner, method in watching.values():
            delattr(owner, method)


def bare(context: StepContext, calls: Sequence[Call]) -> Arm:
    """The calls alone, with a backward pass where there was a graph, and the optimizer step."""
    models = targets(context)
    parameters = list(context.policy.trainable.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-9)
    gradients: dict[torch.Size, Tensor] = {}  # of every shape one, made in the first iteration, which nobody times

    def iterate(step: int, clock: Clock) -> None:
        for phase, group in itertools.groupby(calls, lambda call: call.phase):
            with clock(phase), torch.set_grad_enabled(phase == "train"):
                for call in group:
                    owner, method = models[call.target]
                    function = owner if method == "forward" else getattr(owner, method)
                    out = function(*call.args, **call.kwargs)
                    if phase == "train":
                        if out[0].shape not in gradients:
                            gradients[out[0].shape] = torch.randn(out[0].shape)
                        out[0].backward(gradients[out[0].shape])
        with clock("train"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return iterate


def save_calls(calls: Sequence[Call], path: Path) -> None:
    torch.save([[c.target, c.phase, list(c.args), c.kwargs] for c in calls], path)


def load_calls(path: Path) -> list[Call]:
    return [Call(t, phase, tuple(args), kwargs) for t, phase, args, kwargs in torch.load(path, weights_only=True)]


def same_work(calls: Mapping[str, Sequence[Call]]) -> dict[str, dict[str, dict[str, int]]]:
    """What each arm asks of each model: calls, and rows in all of them. Text encoders may be asked differently.

    Raises ``ValueError`` where transformer or VAE do not get equal work from all arms.
    """
    shapes = {arm: Counter(c.shapes() for c in made if c.phase != "encode") for arm, made in calls.items()}
    must_be_equal(shapes)
    work: dict[str, dict[str, dict[str, int]]] = {arm: {} for arm in calls}
    for arm, made in calls.items():
        for c in made:
            count = work[arm].setdefault(f"{c.phase} {c.target}", {"calls": 0, "rows": 0})
            count["calls"] += 1
            count["rows"] += len(next(v for v in (*c.args, *c.kwargs.values()) if isinstance(v, Tensor)))
    return work
