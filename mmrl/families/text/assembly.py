"""Build the text pipelines, with weights or on the meta device, from the differences between their families.

A family gives a function that makes its conditioner (and, for those that write, its model); see ``pipelines/llm`` and
``pipelines/vlm``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from mmrl.config.schema import Model, Recipe
from mmrl.core import sharded_loading
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.families.text.engine_sampling import open_engine
from mmrl.families.text.meta_model import describe, empty_model, empty_scorer
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.families.text.scoring import open_policy
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
OfScorer = Callable[[str, JsonObject, Model], Conditioner]
"""The conditioner of the model at a path, with the variables of the chat template and the recipe's ``model``."""


def build_writer(parts: Parts, recipe: Recipe, path: str, device: torch.device, *, sees: bool) -> LanguagePipeline:
    """A pipeline whose model writes. Raises ``UserError`` where the model at ``path`` cannot."""
    if wrong := own_class.problems(recipe) + sampling_options.problems(recipe):  # before a model is loaded
        raise UserError("\n".join(wrong))
    chat, model = parts(recipe, path, load_model)
    check_template(chat, recipe)
    check_strings(recipe.decoding.stop, chat)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    engine = open_engine(recipe, path, context, device, sees=sees)
    return LanguagePipeline(chat, sharded_loading.move(open_weights(model, recipe), device), recipe, device, engine)


def describe_writer(parts: Parts, recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build_writer`` would make, on the meta device: from the checkpoint's configuration and
    tokenizer, or from the ``architecture`` file where they cannot be read. Raises ``UserError`` as ``build_writer``
    does."""
    with files_of(path, architecture) as files:
        chat, model = parts(recipe, files.path, empty_model)
        if not files.recorded:
            check_template(chat, recipe)
            check_strings(recipe.decoding.stop, chat)
    pipeline = LanguagePipeline(chat, open_weights(model, recipe), recipe, torch.device("cpu"))
    return describe(pipeline, files)


def build_scorer(of: OfScorer, recipe: Recipe, path: str, device: torch.device) -> LanguagePipeline:
    """A pipeline whose model scores, to train on pairs. Raises ``UserError`` where the model at ``path`` cannot."""
    chat = of(path, recipe.decoding.chat_template_kwargs, recipe.model)
    check_template(chat, recipe)
    return LanguagePipeline(chat, open_policy(recipe, path, chat.pad_token, device), recipe, device)


def describe_scorer(of: OfScorer, recipe: Recipe, path: str, architecture: Path | None) -> Description:
    """The pipeline that ``build_scorer`` would make, on the meta device. Raises ``UserError`` as it does."""
    with files_of(path, architecture) as files:
        chat = of(files.path, recipe.decoding.chat_template_kwargs, recipe.model)
        if not files.recorded:
            check_template(chat, recipe)
        policy = empty_scorer(files.path, chat.pad_token, recipe)
    return describe(LanguagePipeline(chat, policy, recipe, torch.device("cpu")), files)
