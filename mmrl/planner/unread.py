"""What records carry and a recipe of pictures does not use: said once, by ``mmrl plan`` and ``mmrl data check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.config.schema import Recipe
from mmrl.core.trajectory import Prompt

FEW = 10
"""Given pictures fewer than this are learned by heart."""


def few(recipe: Recipe, count: int) -> Iterator[str]:
    """A note where the given pictures or clips that train, ``count`` of them, are few."""
    if recipe.algorithm.trains_on == "given_pictures" and count < FEW:
        yield (
            f"data.train: {count} picture{'s' * (count != 1)} to learn from: the model soon has them by heart, and not "
            "their style; give it 20 or more, or train few steps and look at samples of other prompts"
        )


def unread(recipe: Recipe, prompts: Sequence[Prompt], *, reads_media: bool) -> Iterator[str]:
    """Notes on ``prompts``, those looked at; none for recipes of text, whose models read all of them.

    ``reads_media``: whether the pipeline edits a picture that each prompt carries.
    """
    if recipe.makes == "text":
        return
    of = f"of {len(prompts):,} prompts looked at"
    pictures = sum(1 for prompt in prompts if prompt.media)
    if pictures and not reads_media and recipe.algorithm.trains_on not in ("picture_pairs", "given_pictures"):
        yield (
            f"data: {pictures:,} {of} carry pictures, and only their captions are used: {recipe.pipeline} makes "
            f"pictures from text, and {recipe.algorithm.type} learns from rewards, not from given pictures (a reward "
            "may read them as sample.prompt.media; sft learns from pictures, and picture_dpo from pairs of them)"
        )
    if limits := sum(1 for prompt in prompts if prompt.max_new_tokens is not None):
        yield f"data: {limits:,} {of} have max_new_tokens, which a model that makes pictures does not read"
