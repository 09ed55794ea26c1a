"""What a data set owes the training loop: see ``mmrl.data.records``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import mmrl
from mmrl.app.conformance.running import Check, expect, refused
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.media import BadMediaError, open_image, probe_clip
from mmrl.core.plugins.user_code import describe
from mmrl.core.trajectory import Prompt

LOOKED_AT, MOST = 40, 4000
"""Prompts of a split that are compared, in equal distances; those whose texts and ids are listed."""


@dataclass(frozen=True)
class Case:
    """A data set by the name a recipe calls it, with the options of both splits."""

    name: str
    options: JsonObject

    def made(self, split: str) -> Sequence[Prompt]:
        """Build the prompts of a split again."""
        return prompts_of(self.name, split, self.options)

    @cached_property
    def splits(self) -> dict[str, Sequence[Prompt]]:
        return {split: self.made(split) for split in ("train", "heldout")}

    @cached_property
    def few(self) -> dict[str, list[Prompt]]:
        """Some prompts of each split."""
        return {split: _some(prompts) for split, prompts in self.splits.items()}

    def listed(self, split: str) -> Iterator[Prompt]:
        """The prompts that are looked at one by one: all, or a few of a set that makes each when asked."""
        prompts = self.splits[split]
        yield from prompts[:MOST] if isinstance(prompts, list) else self.few[split]


def _some(prompts: Sequence[Prompt]) -> list[Prompt]:
    n = min(LOOKED_AT, len(prompts))
    return [prompts[i * len(prompts) // n] for i in range(n)]


def opened(name: str, options: JsonObject) -> Case:
    """Raises ``UserError`` where it cannot be found, or made with ``options``."""
    case = Case(name, options)
    _ = case.splits
    return case


def prompts_of(name: str, split: str, options: JsonObject) -> Sequence[Prompt]:
    """The prompts of ``split``. Raises ``UserError``."""
    try:
        made = mmrl.load("datasets", name if ":" in name else f"{name}:prompts")(split, **options)
    except TypeError as error:
        raise UserError(f"{name} cannot be called with {dict(options)}: {error}; see --options") from error
    return made if isinstance(made, Sequence) else list(made)


def both_splits_have_prompts(case: Case) -> str:
    sizes = []
    for split, prompts in case.splits.items():
        expect(len(prompts), f"{split} has no prompts")
        strange = next((type(p).__name__ for p in case.few[split] if Prompt not in type(p).__mro__), None)
        expect(strange is None, f"{split} holds a {strange}; make mmrl.core.trajectory.Prompt(id, text, meta, media)")
        sizes.append(f"{len(prompts):,} in {split}")
    return ", ".join(sizes)


def it_is_the_same_again(case: Case) -> str:
    for split, first in case.few.items():
        expect(
            first == _some(case.made(split)),
            f"{split} differs when it is made again; draw with a generator of a fixed seed",
        )
    return "each split, made twice"


def ids_are_unique(case: Case) -> str:
    for split in case.splits:
        (name, times), *_ = Counter(prompt.id for prompt in case.listed(split)).most_common(1)
        expect(times == 1, f"{times} prompts of {split} have the id {name!r}; messages and reports tell them by it")
    return "in each split"


def held_out_prompts_do_not_train(case: Case) -> str:
    def key(prompt: Prompt) -> tuple[object, ...]:
        return prompt.conversation, prompt.system, prompt.media

    trained = {key(prompt) for prompt in case.listed("train")}
    both = [prompt for prompt in case.listed("heldout") if key(prompt) in trained]
    expect(not both, f"train and held-out overlap in {len(both)} prompts; the first is {both and both[0].id!r}")
    return "train and held-out do not overlap"


def meta_is_json(case: Case) -> str:
    for prompt in [*case.few["train"], *case.few["heldout"]]:
        try:
            again = json.loads(json.dumps(prompt.meta, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"meta of {prompt.id} cannot be written as JSON ({error}); use plain values") from None
        expect(again == prompt.meta, f"meta of {prompt.id} changes in JSON; use lists for tuples, and texts for keys")
    return "it goes to checkpoints and other processes unchanged"


def media_can_be_opened(case: Case) -> str:
    shown = [(prompt, media) for prompt in case.few["train"][:5] for media in prompt.media]
    for prompt, media in shown:
        try:
            probe_clip(media) if media.kind == "video" else open_image(media)
        except BadMediaError as error:
            raise AssertionError(f"{media.kind} of {prompt.id}: {error}") from error
    return f"{len(shown)} of the first five prompts"


def nonsense_is_refused(case: Case) -> str:
    change = "name its options in its signature, without **kwargs"
    refused(lambda: prompts_of(case.name, "train", {**case.options, "no_such_option": 1}), "an unknown option", change)
    try:
        given = case.made("no such split")
    except Exception as error:
        expect(isinstance(error, UserError | ValueError), f"an unknown split raised {describe(error)}; raise UserError")
        return "an unknown option and an unknown split"
    raise AssertionError(
        f"an unknown split must raise mmrl.core.errors.UserError that lists the splits; it gave {len(given)} prompts"
    )


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "both splits have prompts": both_splits_have_prompts,
    "it is the same again": it_is_the_same_again,
    "ids are unique": ids_are_unique,
    "held-out prompts do not train": held_out_prompts_do_not_train,
    "meta is JSON": meta_is_json,
    "pictures and clips open": media_can_be_opened,
    "unknown options and splits are refused": nonsense_is_refused,
}


def checks(case: Case) -> Iterator[Check]:
    """All checks; the check of media only if there are media."""
    media = any(prompt.media for prompt in case.few["train"][:5])
    left_out = set() if media else {"pictures and clips open"}
    yield from (Check(name, partial(check, case)) for name, check in CHECKS.items() if name not in left_out)
