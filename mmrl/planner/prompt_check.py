"""What a plan says of prompts one by one: those that the model cannot be shown, and what is not there or not read."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError, first_of
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.user_code import describe
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.models.text.template_probe import TemplateFaultError, reads_key
from mmrl.planner.judge_work import sample_like
from mmrl.rewards import loading

_NAMED = 5
MOST = 500
"""Prompts whose conversations are rendered, at equal distances: a template takes up to a millisecond for each."""
_ANSWERS = "answer:"
_PIXELS = 1 << 24
"""Of a picture or clip at most that a reward is shown in a plan."""
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
                f"prompts have none ({first_of(without, _NAMED)}); take them out, give them an answer, or "
                "set on_failure: drop for this reward"
            )


def unscored(recipe: Recipe, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> Iterator[str]:
    """Problems: a function that declares ``checks``, called with an empty sample of the recipe's size for the first
    prompt of each split, raises or fails it: its options, that size or the prompts are not what it needs."""
    if recipe.sampling.type != "text":
        made = recipe.denoising
        if made.height * made.width * (made.frames or 1) > _PIXELS:
            return
    of_heldout = [("eval.rewards", n, reward, heldout[:1]) for n, reward in enumerate(recipe.eval.rewards)]
    both = [("rewards", n, reward, [*train[:1], *heldout[:1]]) for n, reward in enumerate(recipe.rewards)]
    for key, n, reward, prompts in [*both, *of_heldout]:
        if reward.on_failure == "drop":
            continue
        said = [why for prompt in prompts if (why := _fails(reward.name, reward.options, sample_like(recipe, prompt)))]
        yield from (f"{key}[{n}]: {reward.name} cannot score what this recipe makes: {why}" for why in said[:1])


def _fails(name: str, options: JsonObject, sample: Sample) -> str:
    """Why the reward, a function that declares ``checks``, does not score ``sample``; empty where it does."""
    try:
        found = loading.find(name)
        if inspect.isclass(found.target) or not found.declaration.checks or loading.problems(found, options):
            return ""
        returned = found.target([sample], context=Context(), **options)
    except UserError:
        return ""  # said by the check of its name and options
    except Exception as error:
        return describe(error)
    first = (returned["score"] if isinstance(returned, Mapping) else returned)[0]
    return first.reason if isinstance(first, Failed) else ""


def unreadable(pipeline: LanguagePipeline, prompts: Sequence[Prompt]) -> tuple[list[str], list[str]]:
    """Problems and notes: prompts that the chat template does not show, or whose given texts it does not, a problem
    where they are more than ``data.max_bad_fraction``; and reasoning of earlier turns that it never reads."""
    step = max(1, -(-len(prompts) // MOST))
    looked_at, bad, unread = prompts[::step], list[BadPromptError](), Counter[str]()
    for prompt in looked_at:
        try:
            _render(pipeline, prompt)
            if pipeline.pairs is not None:
                for column in pipeline.pairs.columns.values():
                    pipeline.pairs.behind(prompt, column)
        except BadPromptError as error:
            bad.append(error)
        keys = {key for turn in prompt.turns for key, _ in turn.more}
        unread.update(key for key in keys if not reads_key(pipeline.conditioner.saved, key))
    notes = [
        f"the chat template never reads {key}, which earlier turns of {times} of {len(looked_at)} prompts have: that "
        "reasoning is left out"
        for key, times in unread.items()
    ]
    named = (
        f"{len(bad)} of {len(looked_at)} prompts looked at cannot be used ({first_of([e.prompt for e in bad], _NAMED)})"
    )
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


def unread_messages(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Notes: system messages and earlier turns of prompts for pictures and clips, whose models read one text."""
    if recipe.makes == "text":
        return
    found = {"a system message": [p for p in prompts if p.system], "earlier turns": [p for p in prompts if p.turns]}
    for what, those in found.items():
        if those:
            yield f"{len(those)} of {len(prompts)} prompts looked at have {what}, and {recipe.pipeline} reads none"
