"""Check the section ``eval`` of a recipe against the others."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.algorithm_settings import TokenSettings
from mmrl.config.schema import Recipe


def label_of(name: str, label: str | None) -> str:
    """A reward's name in metrics: its label, else the attribute it is loaded from, or the file if that is ``score``."""
    return label or name.removesuffix(":score").rpartition(":")[2].rpartition("/")[2].removesuffix(".py")


def _repeated(recipe: Recipe) -> Iterator[str]:
    """Check the settings for several samples per held-out prompt."""
    evaluation, n = recipe.eval, recipe.eval.samples_per_prompt
    if evaluation.samples % n:
        yield (
            f"eval.samples: {evaluation.samples} is not a multiple of eval.samples_per_prompt, {n}; set it to "
            f"{-(-evaluation.samples // n) * n}"
        )
    for key in ("pass_at", "maj_at"):
        for k in getattr(evaluation, key):
            if k > n:
                yield f"eval.{key}: {k} of {n} samples is impossible; set eval.samples_per_prompt to {k} or more"
    if n > 1 and recipe.algorithm.kind == "offline":
        yield "eval.samples_per_prompt: given pairs are compared once each; remove it"
    if recipe.sampling.type != "text":
        return
    temperature = evaluation.temperature if evaluation.temperature is not None else recipe.decoding.temperature
    if n > 1 and temperature == 0:
        yield (
            f"eval.samples_per_prompt: at temperature 0 the {n} responses to a prompt are the same; set "
            "eval.temperature above 0, or remove it"
        )


def _no_distance(recipe: Recipe) -> str | None:
    """Why evaluations do not measure the distance to the base model, with the edit."""
    if recipe.algorithm.kind == "offline" and not recipe.eval.rewards:
        return "an evaluation on given pairs does not sample; name a reward under eval.rewards"
    if recipe.sampling.type != "text":
        return None
    if not recipe.rollout.in_process:
        return f"{recipe.rollout.engine_name} samples and has no base model; set rollout.engine to transformers"
    if recipe.train.divides:
        return "the model is sharded and no base model is kept beside it; set train.backend to replicated"
    if recipe.model.lora is None and not (isinstance(recipe.algorithm, TokenSettings) and recipe.algorithm.kl_coef):
        return "without LoRA and without algorithm.kl_coef no base model is kept; set one of the two"
    return None


def _sequential(recipe: Recipe) -> Iterator[str]:
    """Check that the alarm has something to read."""
    guards, evaluation = recipe.eval.guards, recipe.eval
    if guards.method == "limits":
        why = "only sequential reads it; set method to sequential, or remove samples"
        yield from recipe.in_vain({"eval.guards.samples": why})
        return
    least, n = guards.samples or evaluation.samples, evaluation.samples_per_prompt
    if least < evaluation.samples:
        yield (
            f"eval.guards.samples: {least} is less than eval.samples, {evaluation.samples}, which it begins with; set "
            f"it to {4 * evaluation.samples}, or remove it"
        )
    elif least % n:
        yield (
            f"eval.guards.samples: {least} is not a multiple of eval.samples_per_prompt, {n}; set it to "
            f"{-(-least // n) * n}"
        )
    trained = [(reward.name, reward.options) for reward in recipe.rewards]
    if all((reward.name, reward.options) in trained for reward in recipe.eval.rewards):
        yield (
            "eval.guards.method: sequential reads rewards that are never trained on, and eval.rewards has none; name "
            "one there (such as another judge or a verifier), or set eval.guards.method to limits"
        )
    elif evaluation.every is None:
        yield "eval.guards.method: nothing is evaluated, so nothing is tested; set eval.every, or method to limits"


def of_evaluation(recipe: Recipe) -> Iterator[str]:
    """The impossible settings of the section ``eval``, as ``key: why; the edit``."""
    evaluation, stopping = recipe.eval, recipe.eval.early_stopping
    if evaluation.tuned_fraction < 1 and recipe.model.lora is None and recipe.sampling.type != "text":
        yield (
            "eval.tuned_fraction: without an adapter there is no base model to take the last steps; set model.lora="
            "{rank: 32}, or remove eval.tuned_fraction"
        )
    yield from _repeated(recipe)
    if evaluation.guards.action == "stop" and evaluation.every is None:
        yield "eval.guards.action: nothing is evaluated, so nothing would stop; set eval.every, or action to warn"
    yield from _sequential(recipe)
    if evaluation.guards.distance_max is not None and (why := _no_distance(recipe)):
        yield f"eval.guards.distance_max: {why}, or remove distance_max"
    if stopping is None:
        return
    if evaluation.every is None:
        yield "eval.early_stopping: nothing is evaluated, so nothing would stop; set eval.every, or remove it"
    labels = [label_of(r.name, r.label) for r in [*recipe.rewards, *evaluation.rewards]]
    if stopping.metric == "policy/loss":
        yield (
            "eval.early_stopping.metric: policy/loss falls as the model gets better, and early stopping needs a metric "
            "that rises; set it to reward/ and a reward's label, or to a metric of the data, such as sft/log_prob"
        )
        return
    kind, _, rest = stopping.metric.partition("/")
    repeated = [f"pass@{k}" for k in evaluation.pass_at] + [f"maj@{k}" for k in evaluation.maj_at]
    of_reward = kind in ("reward", *repeated)
    known = rest.partition("/")[0] in labels if of_reward else recipe.algorithm.kind == "offline"
    if not known:
        named = " or ".join(f"reward/{label}" for label in labels) or "a metric of the data, such as dpo/accuracy"
        yield (
            f"eval.early_stopping.metric: {stopping.metric!r} is no reward of this recipe; set it to {named}, or a "
            "part of one (reward/label/part)"
        )
