"""Load the prompts that a recipe names.

Pairs of responses become responses with labels, two records of each (TRL's ``unpair_preference_dataset``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mmrl
from mmrl.config.algorithm_settings import ResponseSettings
from mmrl.config.data import Data, source_label
from mmrl.config.names import is_hub_data
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.data.buckets import with_sizes
from mmrl.data.fields import PAIR
from mmrl.data.mixture import Interleaved, Mixture, Part
from mmrl.data.records import BadRecord, Records, checked
from mmrl.data.sampler import Chosen

_TABLE = "jsonl"
"""What reads a data set on the hub."""
_GIVEN = {"given_pictures": 1, "picture_pairs": 2}
"""How many media a record has, by what an algorithm trains on."""
_LOOKED_AT = 100
"""Records of which one at least must have its media."""


def load_prompts(recipe: Recipe, split: str) -> Sequence[Prompt]:
    """The prompts of ``train`` or ``heldout``, as lazy as the data set makes them.

    Raises ``UserError`` for an empty or unusable data set, and past ``data.max_bad_fraction`` of bad records.
    """
    prompts = load_data(recipe.data, split, recipe)
    looked_at = [prompts[n] for n in range(min(len(prompts), _LOOKED_AT))]
    lacking = [lacks_media(recipe, prompt) for prompt in looked_at]
    if lacking and all(lacking):
        raise UserError(f"data.{split}: none of {len(looked_at)} records looked at can train: {lacking[0]}")
    return prompts


def lacks_media(recipe: Recipe, prompt: Prompt) -> str | None:
    """Why ``prompt`` has not the pictures that the recipe's algorithm trains on; None where it has."""
    wanted = _GIVEN.get(recipe.algorithm.trains_on, 0)
    if not wanted or len(prompt.media) == wanted:
        return None
    edit = "with NAME.txt beside NAME.png (data: {name: folder, train: {path: FOLDER}, heldout: {path: FOLDER}})"
    what = f"give every caption one {'clip' if recipe.makes == 'video' else 'picture'} to learn, {edit}"
    if wanted == 2:
        what = "a pair is the better picture and the worse one (data: images: [chosen, rejected])"
    return f"it has {len(prompt.media)} media; {what}"


def load_data(data: Data, split: str, recipe: Recipe | None = None) -> Sequence[Prompt]:
    """The prompts of a section ``data``, as ``load_prompts`` reads them. ``recipe``: prompts without a system message
    get its own, and pairs are split up where its algorithm trains on responses with labels."""
    if data.mixture:
        return _mixed(data, split, recipe)
    both = {"train": data.train, "heldout": data.heldout}
    prompts = _sized(_made(data.name, split, both, f"data.{split}"), recipe, f"data.{split}")
    return _for_recipe(prompts, recipe, checked(prompts, data.max_bad_fraction))


def in_order(recipe: Recipe, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """``prompts`` as the recipe's sampler takes them in training, where it has one. Raises ``UserError``."""
    if recipe.data.sampler is None:
        return prompts
    return Chosen(prompts, recipe.data.sampler, recipe.seed, recipe.train.prompts_per_step)


def _for_recipe(prompts: Sequence[Prompt], recipe: Recipe | None, bad: Sequence[BadRecord]) -> Sequence[Prompt]:
    """``prompts`` as the recipe trains on them: with its system message, and pairs as responses with labels."""
    if recipe is None:
        return prompts
    algorithm = recipe.algorithm
    prompts = _with_system(prompts, recipe.sampling.system if recipe.sampling.type == "text" else None, bad)
    if not isinstance(algorithm, ResponseSettings) or algorithm.label_column is None:
        return prompts
    if not is_paired(prompts[0], algorithm.completion):
        return prompts
    return unpaired(prompts, algorithm.completion, algorithm.label_column)


def _sized(prompts: Sequence[Prompt], recipe: Recipe | None, where: str) -> Sequence[Prompt]:
    """``prompts`` with a size that the recipe can sample; those of text have none. Raises ``UserError``."""
    if recipe is None or recipe.sampling.type == "text":
        return prompts
    found = with_sizes(prompts, recipe.denoising, where)
    if not found:
        bad = list(map(str, checked(found, 1.0)))
        raise UserError(f"{where}: no record has a size that can be used: {'; '.join(bad[:5])}")
    return found


def _mixed(data: Data, split: str, recipe: Recipe | None) -> Mixture:
    """The prompts of ``split`` of all sources that have it."""
    parts = []
    for i, source in enumerate(data.mixture):
        both = {"train": source.train, "heldout": source.heldout}
        if both[split] is None:
            continue
        label, where = source_label(source), f"data.mixture[{i}].{split}"
        try:
            made = _sized(_made(source.name, split, {k: v or {} for k, v in both.items()}, where), recipe, where)
            made = _for_recipe(made, recipe, checked(made, data.max_bad_fraction))
        except UserError as error:
            said = str(error)
            raise UserError(said if said.startswith(where) else f"{where}: {label}: {said}") from error
        parts.append(Part(label, source.weight, made))
    return Mixture(parts) if split == "train" else Interleaved(parts)


def _made(name: str, split: str, both: Mapping[str, Mapping[str, Any]], where: str) -> Sequence[Prompt]:
    """The prompts of ``split`` of the data set ``name`` with its options in ``both``; ``where`` they are written."""
    options = dict(both[split])
    if is_hub_data(name):
        options = {"path": name, **options}
        name = _TABLE
    name = name if ":" in name else f"{name}:prompts"
    call = mmrl.load("datasets", name)
    if "split" in options and "source_split" in inspect.signature(call).parameters:
        given = [of.get("split", "train") for of in both.values()]
        options = ({} if len({*given}) == 1 else {"heldout": 0}) | options  # parts of the source are the splits
        options["source_split"] = options.pop("split")
    try:
        made = call(split, **options)
        prompts = made if isinstance(made, Sequence) else list(made)
    except (TypeError, ValueError) as error:
        shown = [key for key in ("fps", "max_frames") if key in options]
        edit = (
            f"set data.{shown[0]}, which all prompts share, and remove it from {where}" if shown else f"change {where}"
        )
        raise UserError(f"{where}: {name} cannot be called with {options}: {error}; {edit}") from error
    if not prompts:
        raise UserError(f"{where}: {name} gave no prompts for {options or 'its defaults'}; change {where}")
    return prompts


def _with_system(prompts: Sequence[Prompt], system: str | None, bad: Sequence[BadRecord]) -> Sequence[Prompt]:
    """``prompts``, with the message ``system`` where they have none."""
    if not system:
        return prompts

    def get(i: int) -> Prompt:
        prompt = prompts[i]
        return prompt if prompt.system else replace(prompt, system=system)

    if isinstance(prompts, list):
        return [get(i) for i in range(len(prompts))]
    return Records(len(prompts), get, bad, getattr(prompts, "seen", 0))


def unpaired(pairs: Sequence[Prompt], completion: str, label: str) -> Records:
    """Two prompts for each of ``pairs``: ``2 i`` has the better response of pair ``i`` in the column ``completion`` and
    true in the column ``label``, ``2 i + 1`` the worse one and false. ``bad`` and ``seen`` are those of the pairs."""

    def get(index: int) -> Prompt:
        pair, second = divmod(index, 2)
        prompt, name = pairs[pair], PAIR[second]
        meta = {key: value for key, value in prompt.meta.items() if key not in PAIR}
        meta[label] = not second
        if name in prompt.meta:  # else the record lacks it, and is named when it is read
            meta[completion] = prompt.meta[name]
        return replace(prompt, id=f"{prompt.id}/{name}", meta=meta)

    return Records(2 * len(pairs), get, getattr(pairs, "bad", []), getattr(pairs, "seen", len(pairs)))


def is_paired(prompt: Prompt, completion: str) -> bool:
    """Whether a record has a pair and no response of its own."""
    return completion not in prompt.meta and all(name in prompt.meta for name in PAIR)
