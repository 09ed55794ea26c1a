"""What ``time_to_target.py`` trains: the job on pictures and the job on text, by us and by the peers' own code.

Every function ``trained*`` gives a curve to ``Ended``: the CPU-seconds of training, of all threads and without
evaluations, and the held-out success at each evaluation. Evaluations are ours for everybody: the same held-out samples
from the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Job:
    """A recipe, the figure to reach, the overrides that all arms have, and ours by arm."""

    recipe: str
    measure: str
    rates: tuple[float, ...]
    common: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    peers: tuple[str, ...]


SECOND_ORDER = ("sampling.steps=5", "sampling.solver=dpmsolver++")
DGPO = ("algorithm={type: dgpo, noise_levels: 2}", "sampling.window=null", "sampling.same_initial_noise=false")
TEMPFLOW = "algorithm.step_weight=tempflow"
_ENDLESS = ("optim.schedule=constant", "checkpoint.every=400", "train.steps=400", "train.max_cpu_seconds=null")
_EVALUATION = ("eval.grid=4", "eval.steps=8", "eval.solver=euler")  # whatever the arm trains with
JOBS = {
    "pictures": Job(
        "shapes-full",
        "reward/shapes/success",
        (7.5e-5, 1.5e-4, 3e-4, 6e-4),
        (*_ENDLESS, "model.dtype=float32", "optim.ema_decay=0.9", *_EVALUATION),
        {
            "flow_grpo's settings": (),
            "5 steps": ("sampling.steps=5",),
            "5 steps, second order": SECOND_ORDER,
            "6 of 12 kept": ("midway={step: 3, group_size: 12}", "train.group_size=6"),
            "TempFlow weights": (TEMPFLOW,),
            "TempFlow weights, 5 steps, second order": (TEMPFLOW, *SECOND_ORDER),
            "2 updates": ("train.updates_per_step=2",),
            "dgpo": DGPO,
            "dgpo, 5 steps, second order": (*DGPO, *SECOND_ORDER),
        },
        ("flow_grpo", "flow_factory"),
    ),
    "text": Job(
        "sums",
        "reward/number",
        (7.5e-5, 1.5e-4, 3e-4, 6e-4),
        (*_ENDLESS, "model.dtype=float32"),
        {
            "grpo": (),
            "2 updates": ("train.updates_per_step=2",),
            "dynamic sampling": ("algorithm.dynamic_sampling=true",),
            "8 x 32": ("train.prompts_per_step=8", "train.group_size=32"),
            "half the samples": ("train.prompts_per_step=16",),
        },
        ("trl",),
    ),
}
"""Overrides of the recipes. The window of two noisy steps on pictures is Flow-GRPO-Fast's."""


def time_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """CPU-seconds of the first of two evaluations in a row that reach ``target``; None where there are none.

    ``curve``: CPU-seconds and success of each evaluation, in order.
    """
    reached = [value >= target for _, value in curve]
    for (seconds, _), now, after in zip(curve, reached, reached[1:], strict=False):
        if now and after:
            return seconds
    return None


class Ended:
    """Whether a run is at its end: at its target, or with its budget spent. Final class; keeps the curve."""

    def __init__(self, target: float, seconds: float) -> None:
        self.curve: Curve = []
        self._target, self._seconds = target, seconds

    def __call__(self, spent: float, success: float) -> bool:
        self.curve.append((spent, success))
        return time_to(self.curve, self._target) is not None or spent >= self._seconds


def trained(job: Job, overrides: Sequence[str], ended: Ended, root: Path) -> None:
    """One of our arms."""
    import mmrl

    class Watch(mmrl.Callback):
        spent = 0.0

        def on_step(self, training: Any, metrics: Mapping[str, Any]) -> None:
            self.spent = metrics["perf/cpu_seconds"]

        def on_evaluation(self, training: Any, metrics: Mapping[str, Any]) -> None:
            if ended(self.spent, metrics[job.measure]):
                training.stop("the target or the budget is reached")

    mmrl.train(job.recipe, list(overrides), callbacks=[Watch()], out=root / "run")


def opened(job: Job, overrides: Sequence[str], root: Path) -> tuple[Any, Callable[[int], float]]:
    """Our run of the recipe, and its evaluation of so many held-out samples, for a peer, whose weights are evaluated as
    they are: a moving average is the peer's own."""
    import torch

    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.config.schema import Recipe
    from mmrl.data.loading import load_prompts
    from mmrl.training.evaluation import Evaluator

    recipe = Recipe.model_validate(load_recipe([job.recipe], [*overrides, "optim.ema_decay=null"]).resolved())
    context = build(recipe)
    torch.manual_seed(recipe.seed)  # of what a peer draws
    held_out = Evaluator(context, load_prompts(recipe, "heldout"))
    return context, lambda samples: held_out.score(samples)[0][job.measure]


def trained_by_flow_grpo(job: Job, overrides: Sequence[str], ended: Ended, root: Path, path: Path | None) -> None:
    """flow_grpo's functions on the same models, prompts and verifier."""
    import peer_flow_grpo

    assert path is not None
    context, success = opened(job, overrides, root)
    theirs = peer_flow_grpo.Theirs(peer_flow_grpo.load(path), context)
    score = verifier({prompt.text: prompt for prompt in context.prompts})

    def reward(images: Any, texts: Sequence[str], metadata: object) -> tuple[list[float], dict[str, Any]]:
        """As it calls a reward: pictures ``[B, 3, H, W]`` in [0, 1]."""
        from PIL import Image

        pixels = (images.permute(0, 2, 3, 1) * 255).round().clamp(0, 255).byte().cpu().numpy()
        return score([Image.fromarray(one) for one in pixels], texts), {}

    theirs.reward = reward
    _trained_by(theirs.iterate, theirs.parameters, context, success, ended)


def trained_by_flow_factory(job: Job, overrides: Sequence[str], ended: Ended, root: Path, path: Path | None) -> None:
    """Flow-Factory's GRPO trainer on the same models, prompts and verifier."""
    import peer_flow_factory

    assert path is not None
    context, success = opened(job, overrides, root)
    score = verifier({prompt.text: prompt for prompt in context.prompts})
    theirs = peer_flow_factory.Theirs(peer_flow_factory.load(path), context, score)
    _trained_by(theirs.iterate, list(context.policy.trainable.values()), context, success, ended)


def _trained_by(
    iterate: Callable[[int, Any], object],
    parameters: Sequence[Any],
    context: Any,
    success: Callable[[int], float],
    ended: Ended,
) -> None:
    """A peer's steps, with a moving average of the weights as ours."""
    import torch

    from mmrl.core.clock import Clock

    average = [p.detach().clone() for p in parameters]
    spent, step = 0.0, 0

    def swap() -> None:
        for p, a in zip(parameters, average, strict=True):
            kept = p.detach().clone()
            p.data.copy_(a)
            a.copy_(kept)

    while True:
        if step % context.recipe.eval.every == 0:
            swap()
            said = ended(spent, success(context.recipe.eval.samples))
            swap()
            if said:
                return
        began = time.process_time()
        iterate(step, Clock(torch.device("cpu")))
        step += 1
        with torch.no_grad():
            decay = min(0.9, (1 + step) / (10 + step))
            for a, p in zip(average, parameters, strict=True):
                a.lerp_(p, 1 - decay)
        spent += time.process_time() - began


def verifier(prompts: Mapping[str, Any]) -> Callable[[Sequence[Any], Sequence[str]], list[float]]:
    """The verifier as a function of pictures and texts; ``prompts`` by their text."""
    import mmrl

    judge = mmrl.load("rewards", "shapes")

    def score(images: Sequence[Any], texts: Sequence[str]) -> list[float]:
        samples = [
            SimpleNamespace(prompt=prompts[text], image=image) for text, image in zip(texts, images, strict=True)
        ]
        return list(judge.score(samples, context=None)["score"])

    return score


def trained_by_trl(job: Job, overrides: Sequence[str], ended: Ended, root: Path, path: Path | None) -> None:
    """TRL's ``GRPOTrainer`` on the same model, prompts and verifier, with the recipe's numbers and its own defaults."""
    import peer_trl

    context, success = opened(job, overrides, root)
    recipe = context.recipe
    spent, began = 0.0, 0.0

    def evaluated(model: Any, step: int) -> bool:
        """Whether training is at its end. Counts the time since the last call, without the evaluation."""
        nonlocal spent, began
        now = time.process_time()
        spent += now - began if step else 0.0
        over = False
        if step % recipe.eval.every == 0:
            context.pipeline.policy.load_state_dict(model.state_dict())
            over = ended(spent, success(recipe.eval.samples))
        began = time.process_time()
        return over

    peer_trl.train(context, evaluated, root / "trl")


PEERS: Mapping[str, Callable[[Job, Sequence[str], Ended, Path, Path | None], None]] = {
    "flow_grpo": trained_by_flow_grpo,
    "flow_factory": trained_by_flow_factory,
    "trl": trained_by_trl,
}
