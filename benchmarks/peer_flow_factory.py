"""Flow-Factory's own GRPO trainer as an arm of ``diffusion_step.py``, and parity with ours.

Runs on a checkout of the user's; nothing of it is copied here. An iteration is its trainer's ``sample``,
``prepare_feedback`` and ``optimize`` with its adapter for Stable Diffusion 3, reward buffer and advantages, on our
model, prompts, noise levels, window and JPEG reward. Left out, to its advantage: its data loader (a prompt is encoded
once an iteration, as ours are), trackers, progress bars and moving average. Its autocast is off: all arms compute in
float32.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from diffusion_arms import micro_batches
from peer_flow_grpo import checked, compared, difference, given_noise, timed_decoding
from stepping import Arm
from torch import Tensor

import mmrl
from mmrl.core.clock import Clock
from mmrl.core.randomness import noise
from mmrl.models.protocol import of_pictures
from mmrl.step.step_context import StepContext

PACKAGE = "src/flow_factory"
FILES = tuple(
    f"{PACKAGE}/{name}.py"
    for name in (
        "models/stable_diffusion/sd3_5",
        "trainers/grpo",
        "scheduler/flow_match_euler_discrete",
        "rewards/reward_processor",
        "rewards/abc",
        "advantage/advantage_processor",
        "hparams/training_args",
        "samples/samples",
    )
)


Score: TypeAlias = "Callable[[Sequence[Any], Sequence[str]], list[float]]"


@dataclass(frozen=True)
class Peer:
    """The peer's classes, under the names they have there."""

    SD3_5Adapter: Any
    GRPOTrainer: Any
    FlowMatchEulerDiscreteSDEScheduler: Any
    RewardProcessor: Any
    RewardBuffer: Any
    PointwiseRewardModel: Any
    AdvantageProcessor: Any
    GRPOTrainingArguments: Any
    BaseSample: Any
    step_module: Any


def find(path: Path) -> Path:
    """``path``, where it is the root of a checkout. Raises ``FileNotFoundError`` naming what it lacks."""
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"--peer: {path} lacks {', '.join(missing)}. Give the root of a checkout of Flow-Factory "
            "(github.com/X-GenGroup/Flow-Factory; that of May 2026 was tried)"
        )
    return path


def version(root: Path) -> str:
    """What identifies the peer's code: the first digits of a hash over the files used."""
    return hashlib.sha256(b"".join((root / name).read_bytes() for name in FILES)).hexdigest()[:16]


def load(path: Path) -> Peer:
    """Import the peer's modules from a checkout. Raises ``FileNotFoundError`` as ``find`` does, and
    ``ModuleNotFoundError`` where a package that they import is not installed."""
    root = find(path)
    sys.path.insert(0, str((root / "src").resolve()))
    try:
        names = [name.removeprefix("src/").removesuffix(".py").replace("/", ".") for name in FILES]
        model, trainer, step, processor, reward, advantage, settings, samples = map(importlib.import_module, names)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--peer: Flow-Factory imports {error.name}, which is not installed; pip install einops imageio"
        ) from error
    finally:
        sys.path.pop(0)
    return Peer(
        model.SD3_5Adapter,
        trainer.GRPOTrainer,
        step.FlowMatchEulerDiscreteSDEScheduler,
        processor.RewardProcessor,
        processor.RewardBuffer,
        reward.PointwiseRewardModel,
        advantage.AdvantageProcessor,
        settings.GRPOTrainingArguments,
        samples.BaseSample,
        step,
    )


class Theirs:
    """Final class; the peer on our run's models. ``score``: its reward, a function of pictures and texts; JPEG size if
    there is none."""

    def __init__(self, peer: Peer, context: StepContext, score: Score | None = None) -> None:
        from accelerate import Accelerator

        self.peer, self.run = peer, context
        self._score = score or jpeg()
        recipe, train = context.recipe, context.recipe.train
        self.batches = -(-train.prompts_per_step * train.group_size // train.micro_batch_size)
        window = len(of_pictures(context.pipeline).noisy_steps(0))
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.batches * window)
        algorithm: Any = recipe.algorithm
        settings = recipe.denoising
        self.settings = peer.GRPOTrainingArguments(
            resolution=(settings.height, settings.width),
            per_device_batch_size=train.micro_batch_size,
            group_size=train.group_size,
            unique_sample_num_per_epoch=train.prompts_per_step,
            num_inference_steps=settings.steps,
            guidance_scale=1.0,
            gradient_accumulation_steps=self.batches * window,
            clip_range=algorithm.clip_range,
            adv_clip_range=algorithm.advantage_clip,
            advantage_aggregation="sum",
            max_grad_norm=recipe.optim.max_grad_norm,
            latent_storage_dtype="fp32",
            seed=recipe.seed,
        )
        self.settings.num_batches_per_epoch = self.batches
        self.adapter = self._adapter()
        self.trainer = self._trainer()

    def _adapter(self) -> Any:
        """The peer's adapter around our modules, which it need not load."""
        own: Any = self.run.pipeline
        pipe = type(own.adapter.pipe)(**own.adapter.pipe.components)
        pipe.transformer = own.policy  # with LoRA around it, as the peer has it
        pipe.set_progress_bar_config(disable=True)
        length = self.run.recipe.denoising.max_sequence_length
        pipe.encode_prompt = partial(pipe.encode_prompt, max_sequence_length=length)  # for the 256 of its default
        pipe.scheduler = self.peer.FlowMatchEulerDiscreteSDEScheduler(
            noise_level=self.run.recipe.denoising.sde.noise_level,
            sde_steps=own.noisy_steps(0),
            **{k: v for k, v in pipe.scheduler.config.items() if not k.startswith("_")},
        )
        pipe.scheduler.register_to_config(use_flow_sigmas=True)  # the scheduler's levels, for its own from 1 to 1/steps
        made = self.peer.SD3_5Adapter.__new__(self.peer.SD3_5Adapter)
        made.pipeline, made.accelerator, made.training_args = pipe, self.accelerator, self.settings
        made.model_args = SimpleNamespace(target_components=["transformer"])
        made.target_module_map = {"transformer": ["lora"]}
        made._components = {}
        return made

    def _trainer(self) -> Any:
        """The peer's trainer without what it would load or report."""
        peer, settings, optim = self.peer, self.settings, self.run.recipe.optim
        made = peer.GRPOTrainer.__new__(peer.GRPOTrainer)
        made.accelerator, made.adapter, made.training_args = self.accelerator, self.adapter, settings
        made.log_args = SimpleNamespace(verbose=False)
        made.autocast, made.epoch, made.step = nullcontext, 0, 0
        made.log_data = lambda *args, **kwargs: None
        made.optimizer = torch.optim.AdamW(
            self.adapter.get_trainable_parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
        reward = reward_model(peer, self._score)(
            SimpleNamespace(batch_size=settings.per_device_batch_size, device=torch.device("cpu"), dtype=None),
            self.accelerator,
        )
        processor = peer.RewardProcessor(self.accelerator, {"reward": reward}, verbose=False)
        made.reward_buffer = peer.RewardBuffer(processor, settings.group_size)
        made.advantage_processor = peer.AdvantageProcessor(
            self.accelerator, {"reward": 1.0}, settings.group_size, global_std=True, verbose=False
        )
        return made

    def encode(self, texts: list[str]) -> dict[str, Any]:
        """A micro-batch of its data loader; each different prompt is encoded once."""
        length, different = self.run.recipe.denoising.max_sequence_length, list(dict.fromkeys(texts))
        with torch.no_grad():
            found = self.adapter.encode_prompt(different, guidance_scale=1.0, max_sequence_length=length)
        rows = [different.index(text) for text in texts]
        return {"prompt": texts} | {name: value[rows] for name, value in found.items()}

    def iterate(self, step: int, clock: Clock) -> None:
        """One iteration with the phases of ours, but that ``sample`` holds ``decode``."""
        trainer, scheduler = self.trainer, self.adapter.scheduler
        scheduler._sde_steps = torch.tensor(of_pictures(self.run.pipeline).noisy_steps(step))
        trainer.epoch = step
        batches = [slots for slots, _ in micro_batches(self.run, step)]
        texts = [[slot.prompt.text for slot in slots] for slots in batches]
        with clock("encode"):
            whole = self.encode([text for batch in texts for text in batch])
            ends = torch.tensor([len(batch) for batch in texts]).cumsum(0).tolist()
            parts = [slice(end - len(batch), end) for end, batch in zip(ends, texts, strict=True)]
            trainer.dataloader = [{name: value[part] for name, value in whole.items()} for part in parts]
        with clock("sample"), timed_decoding(self.adapter.vae, clock):
            samples = trainer.sample()
        for sample, slot in zip(samples, chain.from_iterable(batches), strict=True):
            sample._unique_id = slot.index  # its own is of the prompt alone, which two groups may have
        with clock("reward"):
            trainer.prepare_feedback(samples)
        with clock("train"):
            trainer.optimize(samples)

    def log_prob(self, rows: dict[str, Any], step: int) -> Tensor:
        """Recomputed log-probs ``[B]`` of a recorded step, as its ``optimize`` calls for them."""
        place = rows["latent_index_map"]
        out = self.adapter.forward(
            t=rows["timesteps"][:, step],
            t_next=rows["timesteps"][:, step + 1],
            latents=rows["all_latents"][:, place[step]],
            next_latents=rows["all_latents"][:, place[step + 1]],
            prompt_embeds=rows["prompt_embeds"],
            pooled_prompt_embeds=rows["pooled_prompt_embeds"],
            guidance_scale=1.0,
            noise_level=self.adapter.scheduler.noise_level,
            return_kwargs=["log_prob"],
        )
        return out.log_prob


def jpeg() -> Score:
    """Our JPEG reward."""
    kilobytes = mmrl.load("rewards", "jpeg").kilobytes
    return lambda images, _: [-kilobytes(SimpleNamespace(image=one), 95) for one in images]


def reward_model(peer: Peer, score: Score) -> Any:
    """``score`` as a reward model of theirs."""

    class Model(peer.PointwiseRewardModel):
        required_fields = ("image", "prompt")

        def __call__(self, image: list[Any], prompt: list[str]) -> SimpleNamespace:
            return SimpleNamespace(rewards=score(image, prompt))

    return Model


def arm(peer: Peer, context: StepContext) -> Arm:
    """The peer's iteration on the models of ``context``."""
    return Theirs(peer, context).iterate


def parity(peer: Peer, context: StepContext) -> dict[str, float]:
    """Largest differences between the peer's numbers and ours: of the step kernels on random tensors, and of a
    micro-batch sampled and replayed with the same weights, initial noise and step noise.

    Raises ``ValueError`` for one above the tolerance.
    """
    theirs = Theirs(peer, context)
    return checked(kernels(theirs, context) | trajectories(theirs, context))


def kernels(theirs: Theirs, context: StepContext) -> dict[str, float]:
    """Log-probs and means of single steps, Flow-SDE and CPS."""
    scheduler = theirs.adapter.scheduler

    def step(kind: str, v: Tensor, t: Tensor, x: Tensor, near: Tensor, level: float) -> tuple[Tensor, Tensor]:
        kind = {"flow": "Flow-SDE", "cps": "CPS"}[kind]
        out = scheduler.step(v, t, x, next_latents=near, noise_level=level, dynamics_type=kind)
        return out.log_prob, out.next_latents_mean

    return compared(context, scheduler, step)


def trajectories(theirs: Theirs, context: StepContext) -> dict[str, float]:
    """Embeddings, states, log-probs and pictures of one micro-batch, and its log-probs recomputed."""
    pipeline: Any = context.pipeline
    slots, ids = micro_batches(context, 0)[0]
    pipeline.encode(slots)
    actions = pipeline.noisy_steps(0)
    mine = pipeline.sample(slots, ids, actions, context.recipe.seed)
    trainer, pipe = theirs.trainer, theirs.adapter.pipeline
    trainer.dataloader = [theirs.encode([slot.prompt.text for slot in slots])]
    trainer.training_args.num_batches_per_epoch = 1
    initial = noise(context.recipe.seed, ids, "initial", pipeline.shape)
    pipe.prepare_latents = lambda *args, **kwargs: initial
    with given_noise(theirs.peer, (noise(context.recipe.seed, ids, f"step{i}", pipeline.shape) for i in range(10**6))):
        samples = trainer.sample()
    rows = theirs.peer.BaseSample.stack(samples)
    replayed = torch.stack([theirs.log_prob(rows, i).detach() for i in actions], 1)
    ours = torch.cat(
        [
            pipeline.replay(mine, [j], context.objective.needs, context.policy.using)["log_probs"]
            for j in range(len(actions))
        ],
        1,
    )
    features = pipeline.batch_features(mine.slots)
    return {
        "embeddings": difference(rows["prompt_embeds"], features["embeds"]),
        "states": difference(rows["all_latents"], mine.states),
        "log-probs": difference(rows["log_probs"], mine.log_probs),
        "replayed log-probs": difference(replayed, ours.detach()),
        "pictures": difference(torch.stack([sample.image for sample in samples]), pipeline.images(mine)),
    }
