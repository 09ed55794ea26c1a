"""flow_grpo's own sampling and log-prob functions as an arm of ``diffusion_step.py``, and parity with ours.

Runs on a checkout of the user's; nothing of it is copied here. Its functions are called as its ``train_sd3_fast.py``
calls them, on our model, prompts, steps and window. Left out, to its advantage: its Accelerator, data loader, trackers,
progress bars and moving average.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusion_arms import micro_batches
from stepping import Arm
from torch import Tensor

from mmrl.algorithms import sde
from mmrl.core.clock import Clock
from mmrl.core.randomness import noise
from mmrl.models.protocol import of_pictures
from mmrl.step.step_context import StepContext

PATCH = "flow_grpo/diffusers_patch"
SCRIPT = "scripts/train_sd3_fast.py"
FILES = (
    f"{PATCH}/sd3_pipeline_with_logprob_fast.py",
    f"{PATCH}/sd3_sde_with_logprob.py",
    f"{PATCH}/train_dreambooth_lora_sd3.py",
    "flow_grpo/rewards.py",
    "flow_grpo/stat_tracking.py",
    SCRIPT,
)
TOLERANCE = 1e-4
"""Largest difference from ours in any figure of ``parity``: float32 in another order of operations."""


@dataclass(frozen=True)
class Peer:
    """The peer's functions, under the names they have there."""

    pipeline_with_logprob: Callable[..., Any]
    sde_step_with_logprob: Callable[..., Any]
    compute_log_prob: Callable[..., Any]
    compute_text_embeddings: Callable[..., Any]
    PerPromptStatTracker: Callable[..., Any]
    jpeg_compressibility: Callable[..., Any]
    pipeline_module: Any
    step_module: Any


def find(path: Path) -> Path:
    """The checkout's root: ``path``, or its folder ``flow_grpo`` where another project carries it.

    Raises ``FileNotFoundError`` naming what neither holds.
    """
    missing = {root: [f for f in FILES if not (root / f).is_file()] for root in (path, path / "flow_grpo")}
    root = min(missing, key=lambda r: len(missing[r]))
    if missing[root]:
        raise FileNotFoundError(
            f"--peer: {root} lacks {', '.join(missing[root])}. Give the root of a checkout of flow_grpo "
            "(github.com/yifan123/flow_grpo) that has its fast scripts: they came after July 2025, and "
            "github.com/radixark/miles_diffusion carries such a copy in its folder flow_grpo"
        )
    return root


def version(root: Path) -> str:
    """What identifies the peer's code: the first digits of a hash over the files used."""
    return hashlib.sha256(b"".join((root / name).read_bytes() for name in FILES)).hexdigest()[:16]


def load(path: Path) -> Peer:
    """Import the peer's modules from a checkout. Its script is not imported (it would need trackers and flags): the two
    functions wanted are compiled from its text. Raises ``FileNotFoundError`` as ``find`` does, and ``LookupError``."""
    root = find(path)
    sys.path.insert(0, str(root.resolve()))
    try:
        pipeline, step, encode, rewards, stats = (
            importlib.import_module(f.removesuffix(".py").replace("/", ".")) for f in FILES if f != SCRIPT
        )
    finally:
        sys.path.pop(0)
    wanted = {"compute_log_prob", "compute_text_embeddings"}
    tree = ast.parse((root / SCRIPT).read_text(), filename=str(root / SCRIPT))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    names: dict[str, Any] = {
        "torch": torch,
        "sde_step_with_logprob": step.sde_step_with_logprob,
        "encode_prompt": encode.encode_prompt,
    }
    exec(compile(tree, str(root / SCRIPT), "exec"), names)
    if lost := wanted - names.keys():
        raise LookupError(f"--peer: {root / SCRIPT} has no function {', '.join(sorted(lost))}; take another checkout")
    return Peer(
        pipeline.pipeline_with_logprob,
        step.sde_step_with_logprob,
        names["compute_log_prob"],
        names["compute_text_embeddings"],
        stats.PerPromptStatTracker,
        rewards.jpeg_compressibility,
        pipeline,
        step,
    )


class Theirs:
    """Final class; the peer on our run's models."""

    def __init__(self, peer: Peer, context: StepContext) -> None:
        self.peer, self.run = peer, context
        pipeline: Any = context.pipeline
        adapter = pipeline.adapter
        self.pipe: Any = type(adapter.pipe)(**adapter.pipe.components)
        self.pipe.transformer = context.pipeline.policy  # with the adapter around it, as the peer has it
        self.pipe.set_progress_bar_config(disable=True)
        self.encoders = adapter.text_encoders
        self.tokenizers = [capped(t) for t in (self.pipe.tokenizer, self.pipe.tokenizer_2, self.pipe.tokenizer_3)]
        settings = context.recipe.denoising
        self.config = SimpleNamespace(
            train=SimpleNamespace(cfg=False),
            sample=SimpleNamespace(guidance_scale=1.0, noise_level=settings.sde.noise_level, sde_type="sde"),
        )
        self.parameters = list(context.policy.trainable.values())
        optim = context.recipe.optim
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        self.reward = peer.jpeg_compressibility()
        self.tracker = peer.PerPromptStatTracker(global_std=True)

    def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        length = self.run.recipe.denoising.max_sequence_length
        return self.peer.compute_text_embeddings(texts, self.encoders, self.tokenizers, length, torch.device("cpu"))

    def sample(self, embeds: Tensor, pooled: Tensor, step: int, latents: Tensor | None = None) -> dict[str, Any]:
        """A micro-batch through the peer's pipeline, as its script keeps it. ``latents``: the initial noise."""
        settings = self.run.recipe.denoising
        actions = of_pictures(self.run.pipeline).noisy_steps(step)
        images, states, log_probs, timesteps = self.peer.pipeline_with_logprob(
            self.pipe,
            prompt_embeds=embeds,
            pooled_prompt_embeds=pooled,
            num_inference_steps=settings.steps,
            guidance_scale=1.0,
            output_type="pt",
            height=settings.height,
            width=settings.width,
            latents=latents,
            noise_level=settings.sde.noise_level,
            sde_window_size=len(actions),
            sde_window_range=(actions[0], actions[-1] + 1),  # its draw has one outcome: our window
            sde_type="sde",
        )
        states = torch.stack(states, dim=1)
        return {
            "images": images,
            "embeds": embeds,
            "pooled": pooled,
            "latents": states[:, :-1],
            "next_latents": states[:, 1:],
            "log_probs": torch.stack(log_probs, dim=1),
            "timesteps": torch.stack(timesteps).unsqueeze(0).repeat(len(embeds), 1),
        }

    def log_prob(self, rows: dict[str, Any], action: int) -> Tensor:
        """Recomputed log-probs ``[B]`` of a recorded action."""
        out = self.peer.compute_log_prob(
            self.pipe.transformer, self.pipe, rows, action, rows["embeds"], rows["pooled"], self.config
        )
        return out[1]

    def iterate(self, step: int, clock: Clock) -> None:
        """One iteration with the phases of ours, but that ``sample`` holds ``decode``: the peer's pipeline decodes."""
        sampled, texts, rewards = [], [], []
        for slots, _ in micro_batches(self.run, step):
            prompts = [slot.prompt.text for slot in slots]
            with clock("encode"):
                embeds, pooled = self.encode(prompts)
            with clock("sample"), timed_decoding(self.pipe.vae, clock):
                rows = self.sample(embeds, pooled, step)
            with clock("reward"):
                rewards.append(torch.as_tensor(self.reward(rows.pop("images"), prompts, None)[0]).float())
            sampled.append(rows)
            texts += prompts
        with clock("reward"):
            advantages = torch.as_tensor(self.tracker.update(texts, torch.cat(rewards).numpy()))
            self.tracker.clear()
        with clock("train"):
            self.update(sampled, advantages)

    def update(self, sampled: list[dict[str, Any]], advantages: Tensor) -> None:
        """The clipped loss of the peer's script over all micro-batches and window steps, and one optimizer step."""
        algorithm: Any = self.run.recipe.algorithm
        start, clip = 0, algorithm.clip_range
        for rows in sampled:
            a = advantages[start : start + len(rows["log_probs"])]
            a = a.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
            start += len(a)
            actions = rows["timesteps"].shape[1]
            for j in range(actions):
                ratio = torch.exp(self.log_prob(rows, j) - rows["log_probs"][:, j])
                loss = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - clip, 1 + clip)).mean()
                (loss / (len(sampled) * actions)).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.run.recipe.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def arm(peer: Peer, context: StepContext) -> Arm:
    """The peer's iteration on the models of ``context``."""
    return Theirs(peer, context).iterate


def capped(tokenizer: Any) -> Callable[..., Any]:
    """The tokenizer with the model's own length for the 77 that the peer's code has written into it."""

    def call(prompt: Any, **options: Any) -> Any:
        options["max_length"] = min(options["max_length"], tokenizer.model_max_length)
        return tokenizer(prompt, **options)

    return call


@contextmanager
def timed_decoding(vae: Any, clock: Clock):
    """Give the VAE's part of a pipeline call its own phase."""
    plain = vae.decode

    def decode(*args: Any, **kwargs: Any) -> Any:
        with clock("decode"):
            return plain(*args, **kwargs)

    vae.decode = decode
    try:
        yield
    finally:
        vae.decode = plain


def parity(peer: Peer, context: StepContext) -> dict[str, float]:
    """Largest differences between the peer's numbers and ours: of the step kernels on random tensors, and of a
    micro-batch sampled and replayed with the same weights, initial noise and step noise.

    Raises ``ValueError`` for one above ``TOLERANCE``.
    """
    return checked(kernels(peer, context) | trajectories(Theirs(peer, context), context))


def checked(found: dict[str, float]) -> dict[str, float]:
    """``found``, where nothing in it is above ``TOLERANCE``; else raises ``ValueError``."""
    wrong = {name: value for name, value in found.items() if not value <= TOLERANCE}
    if wrong:
        raise ValueError(f"the peer and mmrl do not compute the same (tolerance {TOLERANCE:g}): {wrong}")
    return found


def kernels(peer: Peer, context: StepContext) -> dict[str, float]:
    """Log-probs and means of single steps, Flow-SDE and CPS."""
    pipeline: Any = context.pipeline
    scheduler = type(pipeline.adapter.pipe.scheduler).from_config(pipeline.adapter.pipe.scheduler.config)

    def step(kind: str, v: Tensor, t: Tensor, x: Tensor, near: Tensor, level: float) -> tuple[Tensor, Tensor]:
        kind = {"flow": "sde"}.get(kind, kind)
        of = {"noise_level": level, "prev_sample": near, "sde_type": kind}
        _, log_prob, mean, _ = peer.sde_step_with_logprob(scheduler, v, t, x, **of)
        return log_prob, mean

    return compared(context, scheduler, step)


def compared(context: StepContext, scheduler: Any, step: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Differences between our single steps on random tensors and the log-prob and mean of
    ``step(kind, velocity, times, x, following, noise level)``, Flow-SDE (``flow``) and CPS (``cps``)."""
    pipeline: Any = context.pipeline
    steps, level = pipeline.steps, context.recipe.denoising.sde.noise_level
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(0)
    x, v, following = (torch.randn(4, *pipeline.shape, generator=generator) for _ in range(3))
    found = {}
    for mine in ("flow", "cps"):
        c = sde.coefficients(scheduler.sigmas, mine, level, range(steps - 1))  # type: ignore[arg-type]
        log_probs, means = [], []
        for i in sorted({0, 1, steps // 2, steps - 2}):
            mean = sde.step_mean(x, v, c, i)
            near = mean + max(c.std[i].item(), 1e-3) * following
            t = scheduler.timesteps[i].expand(len(x))
            log_prob, peer_mean = step(mine, v, t, x, near, level)
            log_probs.append(difference(log_prob, sde.log_prob(near, mean, c, i)))
            means.append(difference(peer_mean, mean))
        found |= {f"kernel {mine} log-prob": max(log_probs), f"kernel {mine} mean": max(means)}
    return found


def trajectories(theirs: Theirs, context: StepContext) -> dict[str, float]:
    """Embeddings, states, log-probs and pictures of one micro-batch, and its log-probs recomputed."""
    pipeline: Any = context.pipeline
    slots, ids = micro_batches(context, 0)[0]
    pipeline.encode(slots)
    actions = pipeline.noisy_steps(0)
    mine = pipeline.sample(slots, ids, actions, context.recipe.seed)
    embeds, pooled = theirs.encode([slot.prompt.text for slot in slots])
    initial = noise(context.recipe.seed, ids, "initial", pipeline.shape)
    with given_noise(theirs.peer, (noise(context.recipe.seed, ids, f"step{i}", pipeline.shape) for i in range(10**6))):
        rows = theirs.sample(embeds, pooled, 0, initial)
    replayed = torch.stack([theirs.log_prob(rows, j).detach() for j in range(len(actions))], 1)
    ours = torch.cat(
        [
            pipeline.replay(mine, [j], context.objective.needs, context.policy.using)["log_probs"]
            for j in range(len(actions))
        ],
        1,
    )
    features = pipeline.batch_features(mine.slots)
    return {
        "embeddings": difference(embeds, features["embeds"]),
        "states": difference(torch.cat([rows["latents"], rows["next_latents"][:, -1:]], 1), mine.states),
        "log-probs": difference(rows["log_probs"], mine.log_probs),
        "replayed log-probs": difference(replayed, ours.detach()),
        "pictures": difference(rows["images"], pipeline.images(mine)),
    }


@contextmanager
def given_noise(peer: Any, draws):
    """Let the peer's steps take their noise, one draw a step, from ``draws``."""
    plain = peer.step_module.randn_tensor
    peer.step_module.randn_tensor = lambda *args, **kwargs: next(draws)
    try:
        yield
    finally:
        peer.step_module.randn_tensor = plain


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
