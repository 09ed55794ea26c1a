"""Find secrets of a recipe by their names and by their forms, and mask them in everything a run writes or prints.

A secret is what stands under a name such as ``api_key``, ``hf_token``, ``password`` or ``client_secret``, the user and
password in an address, and what has the form of a secret wherever it stands (``secret_forms``): a token of a known
service, a cookie, ``?api_key=`` in an address. ``$NAME``, an environment variable, is none: that is how a recipe should
give one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from mmrl.errors import UserError
from mmrl.json_types import Json, MutableJson, item, set_item
from mmrl.secret_forms import found_in, without

MASK = "<secret>"
"""Plain text in YAML too, in lists and mappings."""
_NAME = re.compile(
    r"(^|[_-])(secret|passw(or)?d|passphrase|pwd|authorization|credentials?|bearer|jwt|cookies?|webhooks?([_-]?url)?)$"
    r"|^(pass|pat|otp|dsn|sas)$|[_-](pat|dsn|sas)$|(db|user|ssh|smtp|login|http|proxy)[_-]?pass$"
    r"|(^|[_-])(connection[_-]?string|private[_-]?key|ssh[_-]?key)$"
    r"|(^|(api|auth|access|hf|hub|bearer|refresh|session|write|read|wandb|github|gitlab|bot|user|id)[_-]?)token$"
    r"|(api|access|secret|private|auth|account|signing|encryption|license|hf|wandb|openai|anthropic)[_-]?key$",
    re.IGNORECASE,
)
_MAYBE = re.compile(r"(token|key|secret|password|auth|oauth|sig|signature|session|sid|code|pin|pass)s?$", re.IGNORECASE)
"""Names that other things have too (``key: answer``): what looks drawn at random is a secret."""
_WORDS = ("pass", "pat", "otp", "sas")
"""Names that a number may have for another reason."""
_RANDOM = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])[^\s<>|{}]{16,}")
_USER = re.compile(r"(?<=://)[^/\s@'\"<>]+(?=@)")
_known: set[str] = set()


def is_secret(name: str, value: object) -> bool:
    """Whether an option ``name`` with this value holds a secret."""
    if not isinstance(value, str | int) or isinstance(value, bool) or str(value).startswith("$") or value in ("", MASK):
        return False
    if name.lower() in _WORDS and not isinstance(value, str):
        return False
    return bool(_NAME.search(name) or (_MAYBE.search(name) and _RANDOM.fullmatch(str(value))))


def masked(value: Json, name: str = "") -> Json:
    """The same settings with ``<secret>`` for each secret."""
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name) for inner in value]
    if is_secret(name, value):
        return MASK
    return _without_forms(value) if isinstance(value, str) else value


def _without_forms(text: str) -> str:
    shown = _USER.sub(MASK, text) if "://" in text else text
    return without(shown, MASK)


def masks(settings: Json) -> list[tuple[str | int, ...]]:
    """Where settings hold a mask in place of a secret: the keys that lead there."""
    return [path for path, _, value in _leaves(settings) if isinstance(value, str) and _masked(value)]


def _masked(value: str) -> bool:
    return MASK in value


def remember(settings: Json) -> None:
    """Hide the secrets of ``settings`` from now on in what this process writes and prints."""
    for _, name, value in _leaves(settings):
        if is_secret(name, value):
            _known.add(str(value))
        elif isinstance(value, str):
            _known.update(value[start:stop] for start, stop in found_in(value))


def hidden(text: str) -> str:
    """``text`` without the secrets that this process knows, and without users and passwords in addresses."""
    for secret in sorted(_known, key=len, reverse=True):
        if len(secret) >= 6:  # a shorter one may be a part of any word
            text = text.replace(secret, MASK)
    return _without_forms(text)


def mask_text(text: str, settings: Json) -> str:
    """The text of a recipe, or of one ``key=value``, with ``<secret>`` for each secret of its ``settings``."""
    for _, name, value in _leaves(settings):
        if is_secret(name, value):
            before = rf"({re.escape(name)}[\"']?\s*[:=]\s*[\"']?){re.escape(str(value))}(?![\w])"
            text = re.sub(before, lambda found: found[1] + MASK, text)
    return hidden(text)


def given_again(settings: dict[str, MutableJson]) -> dict[str, MutableJson]:
    """The settings of a stored run with its secrets, which the environment gives. Raises ``UserError``."""
    lacks = []
    for path in masks(settings):
        variable = "MMRL_" + "_".join(map(str, path)).upper()
        if variable not in os.environ:
            lacks.append(variable)
            continue
        *parents, last = path
        inner: MutableJson = settings
        for part in parents:
            inner = item(inner, part)
        set_item(inner, last, os.environ[variable])
    if lacks:
        raise UserError(
            "the run directory does not hold the secrets of its recipe: set the environment "
            f"variable{'s' if len(lacks) > 1 else ''} {', '.join(lacks)} (with token: $NAME in a recipe none is needed)"
        )
    remember(settings)
    return settings


def _leaves(
    value: Json, path: tuple[str | int, ...] = (), name: str = ""
) -> Iterator[tuple[tuple[str | int, ...], str, Json]]:
    """Each single value with the keys that lead to it and the last of them that is a name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key), str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves(inner, (*path, i), name)
    else:
        yield path, name, value
