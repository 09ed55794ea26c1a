"""Make a folder with a checkpoint's configuration files, its own or those stored with a recipe.

An ``architecture`` file of a text recipe is a JSON object: ``files`` are the checkpoint's configuration files by name
(``config.json``, of a model that sees ``preprocessor_config.json`` too), ``tokens`` the ids of control tokens by text,
``media`` what stands for a picture and a clip in a prompt (``{"image": "<|image_pad|>"}``).
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mmrl.core.errors import UserError
from mmrl.core.hub_files import json_of, unreadable
from mmrl.core.stored import read_object
from mmrl.core.torchvision_on_cpu import allow_cpu_only

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

CHARACTERS = 3
"""Characters per token where the tokenizer is missing. Tokenizers with a large vocabulary have longer tokens."""


@dataclass(frozen=True)
class Files:
    """Where to load the configuration and tokenizer from (``path``); ``recorded``: this tokenizer only estimates the
    number of tokens."""

    path: str
    source: str
    recorded: bool = False


@contextmanager
def files_of(path: str, architecture: Path | None) -> Generator[Files]:
    """The checkpoint ``path`` where its ``config.json`` can be read, else a folder made from the ``architecture`` file.

    Raises ``UserError`` if neither can be read.
    """
    try:
        json_of(path, "config.json")
    except (OSError, ValueError) as error:
        if architecture is None:
            raise unreadable(path, "config.json", "configuration files", error) from error
    else:
        yield Files(path, f"the configuration files of {path}")
        return
    source = f"the architecture recorded in {architecture.name}, because {path} cannot be read here"
    with TemporaryDirectory(prefix="mmrl-plan-") as folder:
        _write(architecture, Path(folder))
        yield Files(folder, source, recorded=True)


def _write(architecture: Path, folder: Path) -> None:
    try:
        recorded = read_object(architecture)
        files, tokens, media = recorded["files"], recorded["tokens"], recorded.get("media", {})
        if "config.json" not in files:
            raise ValueError("no config.json under files")
        for name, content in files.items():
            (folder / Path(name).name).write_text(json.dumps(content), encoding="utf-8")
        _tokenizer(tokens, media).save_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"architecture: {architecture} cannot be read as configuration files ({type(error).__name__}: {error}); "
            'it is a JSON object {"files": {"config.json": {...}}, "tokens": {"<|im_end|>": 151645}}'
        ) from error


def _tokenizer(tokens: Mapping[str, int], media: Mapping[str, str]) -> PreTrainedTokenizerBase:
    """A tokenizer that makes a token of every ``CHARACTERS`` characters and has the control ``tokens``, the first of
    which ends a response."""
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    unknown = "<unknown>"
    free = min({*range(1, len(tokens) + 2)} - {*tokens.values()})
    words = {unknown: 0, "word": free, **tokens}  # a tokenizer of special tokens alone counts as one without its files
    made = Tokenizer(WordLevel(words, unk_token=unknown))
    made.pre_tokenizer = Split(Regex(rf"[\s\S]{{1,{CHARACTERS}}}"), "isolated")  # type: ignore[attr-defined]
    made.add_special_tokens(list(tokens))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unknown, eos_token=next(iter(tokens)))
    shown = "".join(f"{{% elif part.type == '{kind}' %}}{text}" for kind, text in media.items())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thinking }}"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
        + shown
        + "{% endif %}{% endfor %}{% endif %}"
        + next(iter(tokens))
        + "{% endfor %}"
    )
    return tokenizer
