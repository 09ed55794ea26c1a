"""Build the text pipelines, with weights or on the meta device, from the differences between their families.

A family gives a function that makes its conditioner (and, for those that write, its model); see ``pipelines/llm`` and
``pipelines/vlm``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Lora, Recipe
from mmrl.core import sharded_loading
from mmrl.core.errors import UserError, refuse
from mmrl.core.json_types import JsonObject
from mmrl.core.library_loading import refused
from mmrl.families.text.engine_sampling import open_engine
from mmrl.families.text.meta_model import describe, empty_model, empty_scorer
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.families.text.scoring import open_policy, refuse_others
from mmrl.inference import own_class, sampling_options
from mmrl.models.description import Description
from mmrl.models.text.chat import Conditioner, check_template
from mmrl.models.text.loading import AutoModel, load_model, open_weights
from mmrl.models.text.recorded_config import files_of
from mmrl.models.text.stop_strings import check_strings

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

Load: TypeAlias = "Callable[[type[AutoModel], Recipe, str, tuple[str, ...], str], PreTrainedModel]"
"""``load_model`` or ``empty_model``."""
Parts: TypeAlias = "Callable[[Recipe, str, Load], tuple[Conditioner, PreTrainedModel]]"
"""The conditioner of the model at a path, and the model as the given function loads it."""
OfScorer = Callable[[str, JsonObject, Recipe], Conditioner]
"""The conditioner of the model at a path, with the variables of the chat template."""


def build_writer(parts: Parts, recipe: Recipe, path: str, device: torch.device, *, sees: bool) -> LanguagePipeline:
    """A pipeline whose model writes. Raises ``UserError`` where the model at ``path`` cannot."""
    refuse(own_class.problems(recipe) + sampling_options.problems(recipe))  # before a model is loaded
    check_teachers(recipe, path)
    chat, model = parts(recipe, path, load_model)
    check_template(chat, recipe)
    check_strings(recipe.decoding.stop, chat)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    engine = open_engine(recipe, path, context, device, sees=sees)
    policy = sharded_loading.move(open_weights(model, recipe), device)
    pipeline = LanguagePipeline(chat, policy, recipe, device, engine)
    pipeline.taught_by({of: one.to(device) for of, one in _teachers(parts, recipe, load_model).items()})
    return pipeline


def describe_writer(parts: Parts, recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build_writer`` would make, on the meta device: from the checkpoint's configuration and
    tokenizer, or from the ``architecture`` file where they cannot be read. Raises ``UserError`` as ``build_writer``
    does."""
    with files_of(path, architecture) as files:
        if not files.recorded:
            check_teachers(recipe, path)
        chat, model = parts(recipe, files.path, empty_model)
        if not files.recorded:
            check_template(chat, recipe)
            check_strings(recipe.decoding.stop, chat)
    pipeline = LanguagePipeline(chat, open_weights(model, recipe), recipe, torch.device("cpu"))
    pipeline.taught_by(_teachers(parts, recipe, empty_model))
    return describe(pipeline, files)


def _teachers(parts: Parts, recipe: Recipe, load: Load) -> dict[str, nn.Module]:
    """The whole models that teach, by their paths, frozen and in the recipe's dtype."""
    found: dict[str, nn.Module] = {}
    for teacher in recipe.teacher:
        if teacher.model and not teacher.is_adapter and teacher.model not in found:
            how = recipe.model.model_copy(update={"lora": Lora(), "quantize": None})  # which loads in model.dtype
            model = parts(recipe.model_copy(update={"model": how}), teacher.model, load)[1]
            found[teacher.model] = model.requires_grad_(False).eval()
    return found


def check_teachers(recipe: Recipe, path: str) -> None:
    """Raises ``UserError`` where a whole model that teaches, also as a reward, has another vocabulary than the model at
    ``path``, or reads pictures in another way. Loads tokenizers and configurations alone."""
    named = {label_of(r.name, r.label): (i, r.options.get("path")) for i, r in enumerate(recipe.rewards)}
    whole: dict[str, str] = {}
    for n, teacher in enumerate(recipe.teacher):
        i, there = named.get(teacher.reward or "", (0, None))
        if isinstance(there, str):
            whole.setdefault(there, f"rewards[{i}].options.path")
        elif teacher.model and not teacher.is_adapter:
            whole.setdefault(teacher.model, f"teacher[{n}].model")
    if not whole:
        return
    from transformers import AutoConfig, AutoTokenizer

    with refused(lambda reason: f"model.path: {path}: {reason}"):
        own, kind = AutoTokenizer.from_pretrained(path).get_vocab(), AutoConfig.from_pretrained(path).model_type
    for model, key in whole.items():
        with refused(lambda reason, key=key, model=model: f"{key}: {model} cannot be read: {reason}"):
            other = AutoTokenizer.from_pretrained(model).get_vocab()
            of = AutoConfig.from_pretrained(model).model_type
        if differing := sorted(word for word in own.keys() | other.keys() if own.get(word) != other.get(word)):
            raise UserError(
                f"{key}: {model} has another vocabulary than model.path: {len(differing):,} tokens "
                f"differ, such as {differing[0]!r}; name a model with the tokenizer of the student, or remove teacher"
            )
        if of != kind and recipe.pipeline.startswith("vlm/"):
            raise UserError(
                f"{key}: it is a {of} and the student a {kind}, which read pictures in other ways; name a "
                f"{kind}, or remove teacher"
            )


def build_scorer(of: OfScorer, writer: str, recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """A pipeline whose model scores, to train on pairs; ``writer``: the pipeline of such a model that writes. Raises
    ``UserError`` where the model at ``path`` cannot, and where the recipe trains no scores."""
    refuse_others(recipe, writer)
    chat = of(path, recipe.decoding.chat_template_kwargs, recipe)
    check_template(chat, recipe)
    return LanguagePipeline(chat, open_policy(recipe, path, chat.pad_token, device), recipe, device)


def describe_scorer(of: OfScorer, writer: str, recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build_scorer`` would make, on the meta device. Raises ``UserError`` as it does."""
    refuse_others(recipe, writer)
    with files_of(path, architecture) as files:
        chat = of(files.path, recipe.decoding.chat_template_kwargs, recipe)
        if not files.recorded:
            check_template(chat, recipe)
        policy = empty_scorer(files.path, chat.pad_token, recipe)
    return describe(LanguagePipeline(chat, policy, recipe, torch.device("cpu")), files)
