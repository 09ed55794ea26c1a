"""Shared by the tests of controllers and others."""

import hashlib

import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.training.loop import train_step
from tests.support.rows import add_gap, contents

allow_cpu_only()  # before transformers imports torchvision
EQUAL_SHAPES = ["train.prompts_per_step=5", "train.group_size=4", "train.micro_batch_size=4", "model.dtype=float32"]
PICTURES = [*EQUAL_SHAPES, "sampling.steps=4", "sampling.window={size: 2}", "algorithm.kl_coef=0.01"]
CLEAN = [
    *(*EQUAL_SHAPES, "sampling.steps=4", "sampling.window=null", "sampling.same_initial_noise=false"),
    "rewards=[{name: 'jpeg:compressibility'}]",
]
RESAMPLED = [*EQUAL_SHAPES, "algorithm={type: dapo}"]  # at a low temperature many groups are flat
TAUGHT = ["teacher={model: ../models/sums-critic}", "algorithm.kl_coef=0.01"]
RECIPES = {
    "diffusion": ("shapes-lora", PICTURES),
    "stepwise": (
        "shapes-lora",
        [
            *PICTURES,
            "algorithm={type: stepwise_flow_grpo, advantage_std: batch}",
            "rewards=[{name: 'jpeg:compressibility'}]",
        ],
    ),
    **{name: ("shapes-lora", [*CLEAN, f"algorithm={{type: {name}, noise_levels: 2}}"]) for name in ("crd", "v_grpo")},
    "quantized": ("shapes-lora", [*PICTURES, "model.quantize=int8"]),
    "text": ("sums", [*EQUAL_SHAPES, "train.updates_per_step=2"]),
    "taught": ("sums", [*EQUAL_SHAPES, *TAUGHT]),
    "hinted": ("sums", [*EQUAL_SHAPES, "algorithm={type: sdpo, success: 0.05}", "sampling.temperature=0.7"]),
    "critic": ("sums", [*EQUAL_SHAPES, "algorithm={type: ppo}", "train.group_size=1", "train.micro_batch_size=1"]),
    "vision": ("scenes", EQUAL_SHAPES),
    "sft": (
        "sums-dpo",
        ["train.prompts_per_step=5", "algorithm={type: sft, completion: chosen}", "model.dtype=float32"],
    ),
    "pictures": ("shapes-sft", ["train.prompts_per_step=5", "train.micro_batch_size=1", "sampling.steps=4"]),
    "kto": ("sums-dpo", ["train.prompts_per_step=5", "algorithm={type: kto, beta: 0.5}", "model.dtype=float32"]),
    "normalized": ("sums", [*EQUAL_SHAPES, "rollout={importance: token, importance_normalize: batch, max_gap: null}"]),
    "resampled": ("sums", [*RESAMPLED, "rewards[0].normalize=batch", "sampling.temperature=0.3"]),
}


def make(name, controller=None, *overrides):
    recipe, changes = RECIPES[name]
    loaded = load_recipe([recipe], [*changes, *overrides])
    run = build(loaded.recipe, controller)
    if name == "normalized":
        with_gaps(run)
    if "attempts" in run.rollout.parts:
        run.rollout.parts["attempts"].valid = 0.4  # as if steps before had taught that
    return run


def with_gaps(run):
    """Have the engine say other log-probs than the trainer, by sample."""
    sample = run.pipeline.sample

    def off(slots, ids, *args, **named):
        made = sample(slots, ids, *args, **named)
        for row, one in enumerate(ids):
            draw = torch.Generator().manual_seed(100 * one.slot + one.sample)
            add_gap(made, row, 0.5 * torch.rand(made.width, generator=draw) - 0.35)
        return made

    run.pipeline.sample = off


def work(run):
    """One step: what was sampled, by sample; the gradient of its first update; the weights after it; the metrics."""
    sampled, gradient = {}, {}
    pipeline_sample = run.pipeline.sample

    def sample(slots, ids, *args, **kwargs):
        trajectory = pipeline_sample(slots, ids, *args, **kwargs)
        for i, content in zip(ids, contents(trajectory), strict=True):
            sampled[f"{i.slot}/{i.attempt}/{i.sample}"] = hashlib.sha256(
                content.contiguous().numpy().tobytes()
            ).hexdigest()
        return trajectory

    def keep(optimizer, *_):
        if not gradient:
            gradient.update({str(n): p.grad.clone() for n, p in enumerate(run.policy.trainable.values())})

    run.pipeline.sample = sample
    run.policy.optimizer.register_step_pre_hook(keep)
    row, _ = train_step(run, 0, Clock(torch.device("cpu")))
    run.pipeline.close()
    return sampled, torch.cat([g.flatten() for g in gradient.values()]), row
