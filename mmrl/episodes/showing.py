"""How the tools of a recipe's environment are shown to its model."""

from __future__ import annotations

from mmrl.config.schema import Recipe
from mmrl.core.json_types import JsonObject
from mmrl.episodes.calls import described
from mmrl.episodes.loading import opened
from mmrl.models.text.conditioner import Processor, Tokenizer
from mmrl.models.text.template_probe import render


def tools_shown(saved: Tokenizer | Processor, recipe: Recipe) -> tuple[JsonObject, str]:
    """The variables of the chat template, and what the system message says of tools beside them: a template that reads
    ``tools`` shows them in the model's own way, and any other would leave them out without a word."""
    variables: JsonObject = recipe.decoding.chat_template_kwargs
    schemas = [] if recipe.environment is None else opened(recipe.environment).schemas
    if not schemas:
        return variables, ""
    given: JsonObject = {**variables, "tools": schemas}
    hello = [{"role": "user", "content": "Hi"}]
    plain, shown = (render(saved, hello, v, asks=True) for v in (variables, given))
    return (given, "") if plain != shown else (variables, described(schemas))
