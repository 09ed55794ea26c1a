"""What a plan says of prompts one by one: those that the model cannot be shown, and what is not there or not read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.config.schema import Recipe
from mmrl.errors import BadPromptError
from mmrl.text.pipeline import LanguagePipeline
from mmrl.text.template_probe import TemplateFaultError, reads_key
from mmrl.trajectory import Prompt

_NAMED = 5
MOST = 500
"""Prompts whose conversations are rendered, at equal distances: a template takes up to a millisecond for each."""
_ANSWERS = "answer:"
_NONE = (None, "", [])


def lacking_truths(recipe: Recipe, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> Iterator[str]:
    """Problems: a reward that compares answers, and prompts whose record has none. One failed sample would stop the
    run, unless the reward's ``on_failure`` is ``drop``."""
    both = [("rewards", reward, [*train, *heldout]) for reward in recipe.rewards]
    for key, reward, prompts in [*both, *(("eval.rewards", reward, [*heldout]) for reward in recipe.eval.rewards)]:
        if not reward.name.startswith(_ANSWERS) or reward.on_failure == "drop":
            continue
        column = str(reward.options.get("key", "answer"))
        without = list(dict.fromkeys(prompt.id for prompt in prompts if prompt.meta.get(column) in _NONE))
        if without:
            yield (
                f"{key}: {reward.name} compares responses with meta[{column!r}], and {len(without)} of {len(prompts)} "
                f"prompts have none ({_listed(without)}); take them out, give them an answer, or set on_failure: drop "
                "for this reward"
            )


def unreadable(pipeline: LanguagePipeline, prompts: Sequence[Prompt]) -> tuple[list[str], list[str]]:
    """Problems and notes: prompts that the chat template does not show, or whose given texts it does not, a problem
    where they are more than ``data.max_bad_fraction``; and reasoning of earlier turns that it never reads."""
    step = max(1, -(-len(prompts) // MOST))
    looked_at, bad, unread = prompts[::step], list[BadPromptError](), dict[str, int]()
    for prompt in looked_at:
        try:
            _render(pipeline, prompt)
            if pipeline.pairs is not None:
                for column in pipeline.pairs.columns.values():
                    pipeline.pairs.behind(prompt, column)
        except BadPromptError as error:
            bad.append(error)
        keys = {key for turn in prompt.turns for key, _ in turn.more}
        for key in keys:
            if not reads_key(pipeline.conditioner.saved, key):
                unread[key] = unread.get(key, 0) + 1
    notes = [
        f"the chat template never reads {key}, which earlier turns of {times} of {len(looked_at)} prompts have: that "
        "reasoning is left out"
        for key, times in unread.items()
    ]
    named = f"{len(bad)} of {len(looked_at)} prompts looked at cannot be used ({_listed([e.prompt for e in bad])})"
    if len(bad) > pipeline.recipe.data.max_bad_fraction * len(looked_at):
        return [
            f"data: {named}; of the first, {bad[0].reason}; or raise data.max_bad_fraction to leave them out"
        ], notes
    if bad:
        notes.append(f"{named}: they are left out and named in failures.jsonl; of the first, {bad[0].reason}")
    return [], notes


def _render(pipeline: LanguagePipeline, prompt: Prompt) -> None:
    """Raises ``BadPromptError`` where the template does not show the prompt. What else is wrong with it, such as its
    media, is found when it is encoded."""
    try:
        pipeline.conditioner.render(prompt)
    except BadPromptError as error:
        if isinstance(error.__cause__, TemplateFaultError):
            raise


def unread_systems(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[str]:
    """A note: system messages of prompts for pictures and clips, whose models read none."""
    times = sum(1 for prompt in prompts if prompt.system)
    if recipe.makes != "text" and times:
        yield f"{times} of {len(prompts)} prompts looked at have a system message, and {recipe.pipeline} reads none"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
