"""Find settings that a model which writes pictures as tokens does not have, as ``mmrl.config.checks`` reports them."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.schema import Recipe

WRITERS = ("llm/emu3",)
"""The pipelines whose models write pictures."""
_OF_TEXTS = ("repetition_penalty", "min_new_tokens", "stop", "system", "chat_template_kwargs")
_WITHOUT = {
    **{f"sampling.{key}": "it is for texts, and this model writes pictures; remove it" for key in _OF_TEXTS},
    "environment": "a picture is one turn; remove environment, or sampling.picture",
    "midway": "a part of a picture cannot be decoded; remove it",
    "rollout.partial": "a picture is not cut and gone on with in a later step; remove it",
    "model.quantize": "it was not checked on a model that decodes pictures; remove it",
}
"""Keys that pictures of tokens do not have, and why."""


def of_written_pictures(recipe: Recipe) -> Iterator[str]:
    """All contradictions; each names the key to change."""
    picture = recipe.decoding.picture
    if picture is None:
        if recipe.pipeline in WRITERS:
            yield (
                f"sampling.picture: {recipe.pipeline} writes pictures, and the recipe does not say how large; set it "
                "to {height: 512, width: 512}, or take pipeline: vlm/chat, which writes texts"
            )
        return
    if recipe.pipeline in ("llm/chat", "llm/score", "vlm/chat", "vlm/score"):
        yield (
            f"sampling.picture: {recipe.pipeline} writes texts; remove it, or set pipeline to {' or '.join(WRITERS)} "
            "and take a model that writes pictures"
        )
    guided = picture.guidance_scale != 1
    if guided and picture.negative_prompt is None:
        yield (
            f"sampling.picture.negative_prompt: guidance (sampling.picture.guidance_scale {picture.guidance_scale:g}) "
            "moves away from a negative prompt, and this model has none of its own; write what pictures should not "
            "be, or '' to leave the prompt out"
        )
    if not guided and picture.negative_prompt is not None:
        yield (
            "sampling.picture.negative_prompt: without guidance no negative prompt is used; set "
            "sampling.picture.guidance_scale (3, say), or remove sampling.picture.negative_prompt"
        )
    yield from recipe.in_vain(_WITHOUT)
    yield from _elsewhere(recipe)


def _elsewhere(recipe: Recipe) -> Iterator[str]:
    """What other sections ask for, and pictures of tokens do not have."""
    if not recipe.rollout.in_process:
        yield (
            f"rollout.engine: {recipe.rollout.engine_name} writes texts, and has no frame of picture tokens and no "
            "guidance; remove it, so that the training process samples"
        )
    if recipe.algorithm.trains_on in ("pairs", "responses"):
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains on given {recipe.algorithm.trains_on} of texts, and this "
            "model writes pictures; set it to grpo"
        )
    if divides := recipe.train.divides:
        yield (
            f"{divides[0]}: the model that decodes pictures is whole on every device; set train.backend to replicated, "
            "and train.context_parallel to 1"
        )
