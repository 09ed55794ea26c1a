"""What ``cost_to_quality.py`` trains: the job on pictures and the job on text, by us and by the peers' own code.

Every function ``trained*`` gives a curve to ``Ended``: the cost of training without evaluations, as ``Meter`` reads it,
and the held-out success at each evaluation. Evaluations are ours for everybody: the same held-out samples from the same
noise.
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
    """A recipe, the figure to reach and how high, the overrides that all arms have, and ours by arm."""

    recipe: str
    measure: str
    target: float
    rates: tuple[float, ...]
    common: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    peers: tuple[str, ...]


FAST = "sampling.window={size: 2, last: 2}"
FORWARD = (
    "sampling.window=null",
    "sampling.same_initial_noise=false",
    "sampling.steps=5",
    "sampling.solver=dpmsolver++",
)
_ENDLESS = ("optim.schedule=constant", "checkpoint.every=400", "train.steps=400", "train.max_cpu_seconds=null")
_EVALUATION = ("eval.grid=4", "eval.steps=8", "eval.solver=euler")  # whatever the arm trains with
JOBS = {
    "pictures": Job(
        "shapes-full",
        "reward/shapes/success",
        0.6,
        (7.5e-5, 1.5e-4, 3e-4),
        (*_ENDLESS, "model.dtype=float32", "optim.ema_decay=0.9", *_EVALUATION),
        {
            "Flow-GRPO": (FAST,),
            "DiffusionNFT": ("algorithm={type: diffusion_nft, noise_levels: 2, kl_coef: 0.0}", *FORWARD),
            "DGPO": ("algorithm={type: dgpo, noise_levels: 2}", *FORWARD),
            "CRD": ("algorithm={type: crd, noise_levels: 2, kl_coef: 0.0}", *FORWARD),
            "V-GRPO": ("algorithm={type: v_grpo, noise_levels: 2}", *FORWARD),
            "Stepwise-Flow-GRPO": (
                "algorithm={type: stepwise_flow_grpo, clip_range: 1.0e-3, centre: step, kl_coef: 0.0}",
                FAST,
            ),
        },
        ("flow_grpo", "flow_factory"),
    ),
    "text": Job(
        "sums",
        "reward/number",
        0.7,
        (7.5e-5, 1.5e-4, 3e-4),
        (*_ENDLESS, "model.dtype=float32"),
        {"GRPO": (), "DRPO": ("algorithm={type: drpo}",)},
        ("trl",),
    ),
}
"""Overrides of the recipes. The window of two noisy steps on pictures is Flow-GRPO-Fast's; what learns from finished
pictures alone samples with a solver of second order in five steps, which needs no noise. No arm is held to the
reference: the recipes are not either."""


def cost_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The cost at the first of two evaluations in a row that reach ``target``; None where there are none.

    ``curve``: cost and success of each evaluation, in order.
    """
    reached = [value >= target for _, value in curve]
    for (cost, _), now, after in zip(curve, reached, reached[1:], strict=False):
        if now and after:
            return cost
    return None


class Meter:
    """Final class; what training has cost: ``read`` between ``begin`` and ``stop``, in sum.

    ``read``: the processor's time by default. On a GPU it is the clock, once the device is done.
    """

    def __init__(self, read: Callable[[], float] = time.process_time) -> None:
        self.spent = 0.0
        self._read, self._since = read, 0.0

    def begin(self) -> None:
        self._since = self._read()

    def stop(self) -> None:
        self.spent += self._read() - self._since


class Ended:
    """Whether a run is at its end: at its target, or with its budget spent. Final class; keeps the curve."""

    def __init__(self, target: float, budget: float, meter: Meter) -> None:
        self.curve: Curve = []
        self.meter = meter
        self._target, self._budget = target, budget

    def __call__(self, success: float) -> bool:
        """Given an evaluation, between ``meter.stop`` and ``meter.begin``."""
        self.curve.append((self.meter.spent, success))
        return cost_to(self.curve, self._target) is not None or self.meter.spent >= self._budget


def trained(job: Job, overrides: Sequence[str], ended: Ended, root: Path) -> None:
    """One of our arms."""
    import mmrl

    class Watch(mmrl.Callback):
        def on_step(self, training: Any, metrics: Mapping[str, Any]) -> None:
            ended.meter.stop()
            ended.meter.begin()

        def on_evaluation(self, training: Any, metrics: Mapping[str, Any]) -> None:
            if ended(metrics[job.measure]):
                training.stop("the target or the budget is reached")
            ended.meter.begin()

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
    step = 0

    def swap() -> None:
        for p, a in zip(parameters, average, strict=True):
            kept = p.detach().clone()
            p.data.copy_(a)
            a.copy_(kept)

    while True:
        if step % context.recipe.eval.every == 0:
            swap()
            said = ended(success(context.recipe.eval.samples))
            swap()
            if said:
                return
        ended.meter.begin()
        iterate(step, Clock(torch.device("cpu")))
        step += 1
        with torch.no_grad():
            decay = min(0.9, (1 + step) / (10 + step))
            for a, p in zip(average, parameters, strict=True):
                a.lerp_(p, 1 - decay)
        ended.meter.stop()


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

    def evaluated(model: Any, step: int) -> bool:
        """Whether training is at its end. Counts the cost since the last call, without the evaluation."""
        if step:
            ended.meter.stop()
        over = False
        if step % recipe.eval.every == 0:
            context.pipeline.policy.load_state_dict(model.state_dict())
            over = ended(success(recipe.eval.samples))
        ended.meter.begin()
        return over

    peer_trl.train(context, evaluated, root / "trl")


PEERS: Mapping[str, Callable[[Job, Sequence[str], Ended, Path, Path | None], None]] = {
    "flow_grpo": trained_by_flow_grpo,
    "flow_factory": trained_by_flow_factory,
    "trl": trained_by_trl,
}
