"""TRL's ``GRPOTrainer`` as an arm of ``llm_step.py``: its own loop, paused after every step.

It trains in a thread of its own (only one arm runs at a time) and nothing in it is replaced: methods are timed from
outside. What departs from its defaults makes it do what the other arms do, and no more: float32, no checkpointing of
activations, prompts in order, no logs and no files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llm_arms import LR, Size, prompts

from mmrl.core.clock import Clock
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot, TextRows
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find
from mmrl.step.step_context import StepContext

TIMED = {"_tokenize_prompts": "encode", "_generate_single_turn": "sample", "_calculate_rewards": "reward"}
"""Its methods and the phases they are; all else of its step counts as ``train``, advantages and metrics among it."""


def version() -> str | None:
    """The installed TRL's version; None where there is none."""
    return importlib.metadata.version("trl") if importlib.util.find_spec("trl") else None


def length(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward of all arms: characters of the response."""
    return [float(len(message[-1]["content"])) for message in completions]


class Peer:
    """Final class. ``step`` is an arm; ``close`` ends the thread. ``gpu``: it computes there, in bfloat16."""

    def __init__(self, size: Size, model: Path, out: Path, *, gpu: bool = False) -> None:
        self.model: Any = None
        self.inputs: dict[str, Any] = {}
        """Of the last micro-batch: what ``compute_loss`` was called with."""
        self._clock: Clock | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._go, self._done = threading.Event(), threading.Event()
        self.trainer = self._make(size, model, out, gpu)
        self._thread = threading.Thread(target=self._train, name="GRPOTrainer", daemon=True)

    def _make(self, size: Size, path: Path, out: Path, gpu: bool) -> Any:
        sys.modules.setdefault("torchcodec", None)  # type: ignore[arg-type]  # TRL imports it, and it may not load
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

        peer = self

        class Pause(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                peer._pause(control, finished=False)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                peer._pause(control, finished=True)

        config = GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=size.micro_batch,
            gradient_accumulation_steps=size.rows // size.micro_batch,
            num_generations=size.group,
            max_completion_length=size.new_tokens,
            max_steps=1_000_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=1e-4,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="grpo",
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=gpu,
            use_cpu=not gpu,
            dataloader_pin_memory=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        asked = [{"prompt": [{"role": "user", "content": p.text}]} for p in prompts("train")]
        trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=length,
            args=config,
            train_dataset=Dataset.from_list(asked),
            processing_class=tokenizer,
            callbacks=[Pause()],
        )
        trainer.remove_callback(PrinterCallback)
        for name, phase in TIMED.items():
            setattr(trainer, name, self._timed(getattr(trainer, name), phase))
        trainer.compute_loss = self._kept(trainer.compute_loss)
        return trainer

    def step(self, step: int, clock: Clock) -> None:
        """One step of the trainer, the next in its own count."""
        self._clock = clock
        if not self._thread.ident:
            self._thread.start()
        self._done.clear()
        self._go.set()
        self._done.wait()
        if self._error is not None:
            raise RuntimeError("GRPOTrainer failed") from self._error

    def close(self) -> None:
        """End the thread. Harmless when called twice."""
        self._stopping = True
        self._go.set()
        if self._thread.ident:
            self._thread.join()

    def _train(self) -> None:
        torch.set_num_threads(1)  # OpenMP counts by thread
        try:
            self.trainer.train()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def _pause(self, control: Any, *, finished: bool) -> None:
        """Wait until the next step is asked for. The first wait lies before step 1."""
        if finished:
            self._done.set()
        self._go.wait()
        self._go.clear()
        if self._stopping:
            control.should_training_stop = True

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert self._clock is not None
            with self._clock(phase):
                return function(*args, **kwargs)

        return call

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            self.inputs = inputs
            return function(model, inputs, *args, **kwargs)

        return call


def train(context: StepContext, evaluated: Callable[[Any, int], bool], out: Path) -> None:
    """Train with ``GRPOTrainer`` on the run's model, prompts and first reward, until ``evaluated`` says that it ends.

    ``evaluated(model, step)`` is called before the first step and after each. The recipe gives the sizes, the learning
    rate, the range of the clip and Adam's numbers; the loss and all else are TRL's defaults.
    """
    sys.modules.setdefault("torchcodec", None)  # type: ignore[arg-type]  # TRL imports it, and it may not load
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    recipe = context.recipe
    train, optim = recipe.train, recipe.optim
    algorithm: Any = recipe.algorithm
    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=train.prompts_per_step * train.group_size // train.micro_batch_size,
        num_generations=train.group_size,
        max_completion_length=recipe.decoding.max_new_tokens,
        temperature=recipe.decoding.temperature,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        max_steps=train.steps,
        seed=recipe.seed,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        weight_decay=optim.weight_decay,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            evaluated(kwargs["model"], 0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = evaluated(kwargs["model"], state.global_step)

    path = context.recipe.model.path
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=scored(context),
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": p.text}], "number": n} for n, p in enumerate(context.prompts)]
        ),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def scored(context: StepContext) -> Callable[..., list[float]]:
    """The run's first reward as a function of TRL's: ``number`` is the prompt's place in the data."""
    reward = context.recipe.rewards[0]
    caller = Caller(build(find(reward.name), reward.options), 600)

    def call(completions: list[list[dict[str, str]]], number: list[int], **_: Any) -> list[float]:
        samples = [
            Sample(context.prompts[n], SampleId(0, i, 0, 0), text=message[-1]["content"])
            for i, (n, message) in enumerate(zip(number, completions, strict=True))
        ]
        return [float(value) for value in caller.one(samples, Context()).total]

    return call


def parity(peer: Peer, context: StepContext) -> dict[str, float]:
    """Our loss on the last micro-batch that the trainer took, with its weights, against its own.

    Returns the relative difference of the loss's gradients, as a norm over all weights. The run's weights are put back.
    Advantages are given: GRPOTrainer divides by the sample's standard deviation, we by the population's.
    """
    advantages = torch.linspace(-1, 2, len(peer.inputs["advantages"]))
    trainer, inputs = peer.trainer, peer.inputs | {"advantages": advantages}
    theirs = torch.autograd.grad(trainer.compute_loss(peer.model, inputs), list(peer.model.parameters()))
    policy: Any = context.pipeline.policy
    kept = {name: p.detach().clone() for name, p in policy.state_dict().items()}
    policy.load_state_dict(peer.model.state_dict())
    try:
        mine = torch.autograd.grad(our_loss(context, inputs), list(policy.parameters()))
    finally:
        policy.load_state_dict(kept)
    apart = torch.stack([(a - b).norm() for a, b in zip(theirs, mine, strict=True)]).norm()
    return {"gradient": (apart / torch.stack([a.norm() for a in theirs]).norm()).item()}


def our_loss(context: StepContext, inputs: dict[str, Any]) -> torch.Tensor:
    """What the loop would make of the trainer's micro-batch: its share of the step's loss."""
    keys = [f"peer/{n}" for n in range(len(inputs["prompt_ids"]))]
    for key, tokens, mask in zip(keys, inputs["prompt_ids"], inputs["prompt_mask"], strict=True):
        context.pipeline.features.put(key, {"input_ids": tokens[mask.bool()]})
    mask = inputs["completion_mask"].float()
    given = [row[:n] for row, n in zip(inputs["completion_ids"], mask.sum(1).long().tolist(), strict=True)]
    asked = [(key, context.pipeline.features.get(key)["input_ids"]) for key in keys]
    slots = [Slot(0, n, 0, Prompt(key, "")) for n, key in enumerate(keys)]
    ids = [SampleId(0, n, 0, 0) for n in range(len(keys))]
    rows = TextRows.answers(slots, ids, asked, given, mask.sum(1) < 0)
    mask = rows.padded("action_mask").float()
    new = context.pipeline.replay(rows, [0], context.objective.needs, context.policy.using)
    old = {
        "log_probs": new["log_probs"].detach(),
        "advantages": inputs["advantages"],
        "weights": torch.ones(len(keys)),
        "mask": mask,
    }
    train = context.recipe.train
    return context.objective.loss(new, old, train.prompts_per_step * train.group_size).value
