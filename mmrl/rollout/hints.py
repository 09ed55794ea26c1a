"""Hints for a policy that teaches itself (``mmrl.algorithms.sdpo``): which response gets which, and its prompt with it.

A group is on one controller, and its features, too: nothing crosses to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mmrl.algorithms.sdpo import SDPOSettings
from mmrl.config.schema import Recipe
from mmrl.core.trajectory import TextRows
from mmrl.models.protocol import of_text
from mmrl.models.text.conversation import unmarked
from mmrl.rewards.judging.json_answer import without_thoughts
from mmrl.step.batch import Batch, Groups
from mmrl.step.step_context import StepContext


def asks_for_feedback(recipe: Recipe) -> bool:
    """Whether a hint may have what rewards say of a response."""
    return isinstance(recipe.algorithm, SDPOSettings) and recipe.algorithm.feedback


def with_hints(context: StepContext, groups: Groups, batch: Batch, rewards: torch.Tensor) -> dict[str, float]:
    """Give the rows of ``batch`` their hints, and weight 0 to those without; ``rewards`` ``[B]``. Returns the metrics
    of it; none for algorithms that need no hints."""
    settings, pipeline = context.recipe.algorithm, context.pipeline
    if not isinstance(settings, SDPOSettings):
        return {}
    texts = [[s.text or "" for s in pipeline.samples(rows, frozenset({"text"}))] for rows in batch.micro_batches]
    said = [texts[m][i] for m, i in batch.places]
    solutions = solutions_of(settings, said, rewards.tolist(), groups.of_row.tolist())
    feedback = feedback_of(groups) if settings.feedback else [None] * len(said)
    hints = [list[dict[str, torch.Tensor] | None]([None] * len(rows)) for rows in batch.micro_batches]
    given, long = 0, 0
    for n, (m, i) in enumerate(batch.places):
        prompt = batch.micro_batches[m].slots[i].prompt
        answer, words = solutions[n], feedback[n]
        if prompt.media:  # what they spell is no place of a picture
            answer, words = (None if of is None else unmarked(of) for of in (answer, words))
        hint = settings.hint(answer, words)
        if hint and batch.weights[n] > 0:
            hints[m][i] = of_text(pipeline).hinted(prompt, hint, settings.max_prompt_tokens)
            given, long = given + (hints[m][i] is not None), long + (hints[m][i] is None)
        if hints[m][i] is None:
            batch.weights[n] = 0.0
    pairs = zip(batch.micro_batches, hints, strict=True)
    batch.micro_batches = [replace(rows, hints=of) for rows, of in pairs if isinstance(rows, TextRows)]
    solved = sum(of is not None for of in solutions)
    told = sum(a is None and b is not None for a, b in zip(solutions, feedback, strict=True))
    counts = {"taught": given, "solutions": solved, "feedback": told, "too_long": long}
    return {f"self_teacher/{name}": count / len(said) for name, count in counts.items()}


def solutions_of(
    settings: SDPOSettings, said: Sequence[str], rewards: Sequence[float], groups: Sequence[int]
) -> list[str | None]:
    """For each response the first right one of its group that is another, without its thoughts unless they are kept;
    None where there is none. A thought that never ends is no answer."""
    right: dict[int, list[tuple[int, str]]] = {}
    for n, (text, reward, group) in enumerate(zip(said, rewards, groups, strict=True)):
        shown = _answer(text, settings) if reward >= settings.success else ""
        if shown:
            right.setdefault(group, []).append((n, shown))
    return [next((text for k, text in right.get(group, ()) if k != n), None) for n, group in enumerate(groups)]


def feedback_of(groups: Groups) -> list[str | None]:
    """What the rewards said of each row, those of several in the order of the recipe; None where none said anything."""
    found: list[str | None] = []
    for r, i in groups.rows:
        texts = [(of[i] or "").strip() for of in groups.rounds[r].scores.feedback.values()]
        found.append("\n\n".join(text for text in texts if text) or None)
    return found


def _answer(text: str, settings: SDPOSettings) -> str:
    if settings.keep_thoughts:
        return text.strip()
    try:
        return without_thoughts(text)
    except ValueError:
        return ""
