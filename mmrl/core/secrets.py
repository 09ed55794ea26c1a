"""Find secrets of a recipe by their names and by their forms, and mask them in everything a run writes or prints.

A secret is what stands under a name such as ``api_key``, ``hf_token``, ``password`` or ``client_secret``, the user and
password in an address, and what has the form of a secret wherever it stands: a token of a known service, a cookie,
``?api_key=`` in an address, ``curl -u``, ``--password`` of a command, a line of a netrc file. ``$NAME``, an environment
variable, is none: that is how a recipe should give one.

The forms are those that the services document for their tokens. No package is used for them: lists such as that of
detect-secrets find secrets in files of code, and lack tokens of model hubs, parameters of addresses and cookies, which
are what recipes hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, MutableJson, item, set_item

MASK = "<secret>"
"""Plain text in YAML too, in lists and mappings."""
_NAME = re.compile(
    r"(passw(or)?d|passphrase)$|^x[_-](token|auth|secret|key)$"
    r"|(^|[_-])(secret|pwd|authorization|credentials?|bearer|jwt|cookies?|webhooks?([_-]?url)?)$"
    r"|^(pass|pat|otp|dsn|sas)$|[_-](pat|dsn|sas)$|(db|user|ssh|smtp|login|http|proxy)[_-]?pass$"
    r"|(^|[_-])(connection[_-]?string|private[_-]?key|ssh[_-]?key)$"
    r"|(^|(api|auth|access|hf|hub|bearer|refresh|session|write|read|wandb|github|gitlab|bot|user|id)[_-]?)token$"
    r"|(api|access|secret|private|auth|account|signing|encryption|license|user|hf|wandb|openai|anthropic)[_-]?key$",
    re.IGNORECASE,
)
_MAYBE = re.compile(r"(token|key|secret|password|auth|oauth|sig|signature|session|sid|code|pin|pass)s?$", re.IGNORECASE)
"""Names that other things have too (``key: answer``): what looks drawn at random is a secret."""
_WORDS = ("pass", "pat", "otp", "sas")
"""Names that a number may have for another reason."""
_SCHEMES = re.compile(
    r"none|null|no|off|basic|bearer|digest|ntlm|kerberos|oauth[12]?|header|token|iam|auto|default", re.I
)
"""What an option ``auth`` names that is no secret."""
_RANDOM = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])[^\s<>|{}]{16,}")
_USER = re.compile(r"(?<=://)[^/\s@'\"<>]+(?=@)")
_known: set[str] = set()
NAMES = (
    r"(?:api|access|secret|private|auth|account|signing|encryption|license|subscription|functions)[_.-]?key(?:[_.-]?id)?"
    r"|apikey|(?:api|access|auth|bearer|refresh|session|id|hf|bot)[_.-]?token|token|jwt|pat|bearer|oauth|auth|authorization|credentials?|assertion"
    r"|passw(?:or)?d|passphrase|pass|pwd|secret|client[_.-]?secret|sig|signature|hmac|session(?:[_.-]?id)?|sid|csrf"
    r"|x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|code[_.-]?verifier"
)
"""Names of secrets among the parameters of an address."""
_SURE = (
    r"[a-z0-9_.-]{0,40}(?:passw(?:or)?d|passphrase|secret"
    r"|(?:api|access|secret|private|auth|signing|encryption|user|hf|wandb|openai|anthropic)[_.-]?key"
    r"|(?:\bx|api|access|auth|bearer|refresh|hf|hub|wandb|github|gitlab|bot)[_.-]?token)"
)
"""Names whose value is a secret in a text, however short it is."""
_GIVEN = r"(?P<of>(?<=\")[^\"$<\\][^\"\\]*|(?<=')[^'$<\\][^'\\]*|[^\s\"'&;,$<>\\][^\s\"'&;,<>\\]*)"
"""A value in quotes, or a word."""
_WORD = r"(?!(?:to|is|as|and|or|in|of|for|with|the|an?|if|that|which|it|gives?|needs?)\b)"
_LONG = r"(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,}"
_PART = r"[^\s\"'<>/]"
_PATH = r"(?=[^\s\"'<>?#]*[0-9])[^\s\"'<>?#]{8,}"
_EDGE = r"(?<![A-Za-z0-9+/_-])"
_TOKENS: dict[str, tuple[str, ...]] = {
    # Amazon, Google, Microsoft, Alibaba
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b": ("AKIA", "ASIA", "ABIA", "ACCA"),
    r"AIza[A-Za-z0-9_-]{30,}": ("AIza",),
    r"ya29\.[A-Za-z0-9_-]{20,}": ("ya29.",),
    r"GOCSPX-[A-Za-z0-9_-]{20,}": ("GOCSPX-",),
    r"LTAI[A-Za-z0-9]{12,}": ("LTAI",),
    r"(?<=AccountKey=)[A-Za-z0-9+/]{20,}={0,2}": ("AccountKey=",),
    # code and packages
    r"gh[pousr]_[A-Za-z0-9]{16,}": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    r"github_pat_[A-Za-z0-9_]{20,}": ("github_pat_",),
    r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat)-[A-Za-z0-9_.-]{16,}": ("glpat-", "gl"),
    r"ATATT3[A-Za-z0-9_=-]{20,}|ATBB[A-Za-z0-9]{20,}": ("ATATT3", "ATBB"),
    r"pypi-[A-Za-z0-9_-]{40,}": ("pypi-",),
    r"npm_[A-Za-z0-9]{30,}": ("npm_",),
    r"dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}": ("dckr_",),
    # models
    rf"sk-(?:[A-Za-z0-9_]+-)*{_LONG}[A-Za-z0-9_-]*": ("sk-",),
    r"(?:hf|api_org)_[A-Za-z0-9]{20,}": ("hf_", "api_org_"),
    r"(?:gsk|r8|fw|tgp_v1|sbp|fc)_[A-Za-z0-9_-]{24,}": ("gsk_", "r8_", "fw_", "tgp_v1_", "sbp_", "fc_"),
    r"(?:xai|pplx|nvapi|jina|csk|lin_api|pcsk)[-_][A-Za-z0-9_-]{24,}": (
        *("xai-", "pplx-", "nvapi-", "jina_", "csk-", "lin_api_", "pcsk_"),
    ),
    r"wandb_v1_[A-Za-z0-9_-]{20,}": ("wandb_v1_",),
    r"dapi[0-9a-f]{32}(?:-[0-9])?\b": ("dapi",),
    # messages
    r"xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[0-9]-[A-Za-z0-9-]{10,}|xwfp-[A-Za-z0-9-]{10,}": ("xox", "xapp-", "xwfp-"),
    r"[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}": (".",),
    r"[0-9]{8,10}:AA[A-Za-z0-9_-]{30,}": (":AA",),
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}": ("SG.",),
    r"key-[0-9a-f]{32}\b": ("key-",),
    r"SK[0-9a-f]{32}\b": ("SK",),
    # shops, hosting, tools
    r"[srp]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/]{20,}": ("k_live_", "k_test_", "whsec_"),
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}": ("shpat_", "shpca_", "shppa_", "shpss_"),
    r"do[opr]_v1_[0-9a-f]{40,}": ("_v1_",),
    r"hv[sbr]\.[A-Za-z0-9_-]{20,}": ("hvs.", "hvb.", "hvr."),
    r"(?:ntn|figd|glsa|glc|sntrys|phc|phx|rubygems|dop)_[A-Za-z0-9_=+/-]{24,}": (
        *("ntn_", "figd_", "glsa_", "glc_", "sntrys_", "phc_", "phx_", "rubygems_", "dop_"),
    ),
    r"PMAK-[0-9a-f]{24}-[0-9a-f]{20,}": ("PMAK-",),
    r"AGE-SECRET-KEY-1[A-Z0-9]{40,}": ("AGE-SECRET-KEY-1",),
    r"eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*": ("eyJ",),
}
"""Tokens by their form, each with texts one of which is in it: most texts hold none of them."""
_PLACES: dict[str, tuple[str, ...]] = {
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\Z)": (
        "PRIVATE KEY",
    ),
    rf"(?i)(?<=[?&;#])(?P<name>(?:{NAMES}|[a-z]+[_-]token|key|code)=)(?P<of>[^\s&;#\"'<>$\\]{{4,}})": ("=",),
    rf"(?i)(?<=[?&;#])(?P<name>{_SURE}=)(?P<of>[^\s&;#\"'<>$\\]+)": ("=",),
    rf"(?<![A-Za-z0-9_])(?P<name>(?=[A-Z][A-Z0-9_]*=)(?i:{_SURE})=[\"']?){_GIVEN}": ("=",),
    rf"(?i)(?<!\S)(?P<name>--(?:{_SURE}|token)(?:=|\s+)[\"']?)(?!-){_WORD}{_GIVEN}": ("--",),
    r"(?i)(?P<name>\bcurl\b[^\n]{0,400}?\s-[a-z]{0,9}u\s*[\"']?|(?<!\S)--(?:proxy-)?user(?:=|\s+)[\"']?)"
    rf"(?=[^\s:]+:){_GIVEN}": ("curl", "--user", "--proxy-user"),
    rf"(?i)(?P<name>\\*[\"'](?:{_SURE})\\*[\"']\s*:\s*\\*[\"']){_GIVEN}": ("':", '":', "' :", '" :'),
    r"(?P<name>(?:\bmachine\s+\S+|\bdefault)\s+login\s+\S+\s+(?:account\s+\S+\s+)?password\s+)(?P<of>[^\s<]\S*)": (
        "password",
    ),
    r"(?P<name>\bmachine\s+\S+\s+password\s+)(?P<of>[^\s<]\S*)(?=\s+login\s)": ("password",),
    rf"(?i)(?<![A-Za-z0-9._-])(?P<name>(?:{NAMES})[\"']?=[\"']?)(?P<of>(?=[^\s\"'&;,]*[0-9])[^\s&;#,\"'<>$]{{6,}})": (
        "=",
    ),
    r"(?i)(?P<name>\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:[a-z]+\s+)?)(?P<of>[^\s,;\"'<>$]{6,})": (
        *("uthorization", "UTHORIZATION"),
    ),
    r"(?i)(?P<name>\bx-(?:(?:api|auth|access|goog-api|functions)-key|(?:[a-z]+-){0,3}(?:token|secret|password))"
    r"[\"']?\s*[:=]\s*[\"']?)(?P<of>[^\s,;\"'<>$]+)": ("-",),
    r"(?i)(?P<name>\bbearer\s+)(?P<of>(?=[^\s]*[0-9])[A-Za-z0-9._~+/=-]{16,})": (*("earer", "EARER"),),
    r"(?i)(?P<name>\b(?:set-)?cookie[\"']?\s*[:=]\s*[\"']?)(?P<of>[\w.-]+=[^\r\n\"'<>]+)": ("ookie", "OOKIE"),
    rf"(?i)(?P<name>https?://{_PART}*(?:web)?hooks?{_PART}*/)(?P<of>{_PATH})": ("hook",),
    rf"(?i)(?P<name>https?://{_PART}*/(?:{_PART}*/)*?(?:web)?hooks?(?:b2)?/)(?P<of>{_PATH})": ("hook",),
    r"(?P<name>https?://api\.telegram\.org/bot)(?P<of>[^\s/\"'<>]+)": ("telegram",),
}
"""What stands in a place where secrets are: after ``name``, or all of it."""
_FORMS = [
    *((needles, re.compile(_EDGE + f"(?:{form})")) for form, needles in _TOKENS.items()),
    *((needles, re.compile(form, re.DOTALL)) for form, needles in _PLACES.items()),
]


def from_environment(name: str, option: str) -> str:
    """The secret that ``option`` gives as ``name``: ``$`` and the name of an environment variable. Raises
    ``UserError``."""
    found = os.environ.get(name[1:])
    if not found:
        raise UserError(f"{option}: the environment variable {name[1:]} is not set; export it first")
    return found


def is_secret(name: str, value: object) -> bool:
    """Whether an option ``name`` with this value holds a secret."""
    if not isinstance(value, str | int) or isinstance(value, bool) or str(value).startswith("$") or value in ("", MASK):
        return False
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    if isinstance(value, str):
        if re.search(r"(^|[_-])auth$", name, re.IGNORECASE) and not _SCHEMES.fullmatch(value):
            return True
        if re.search(r"s$", name, re.IGNORECASE) and _NAME.search(name[:-1]):  # several, or a number of them
            return not re.fullmatch(r"[0-9]+|<.*>|\[.*\]", value)
    elif name.lower() in _WORDS:
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
    return [path for path, _, value in leaves(settings) if isinstance(value, str) and MASK in value]


def remember(settings: Json) -> None:
    """Hide the secrets of ``settings`` from now on in what this process writes and prints."""
    for _, name, value in leaves(settings):
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
    for _, name, value in leaves(settings):
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


def leaves(
    value: Json, path: tuple[str | int, ...] = (), name: str = ""
) -> Iterator[tuple[tuple[str | int, ...], str, Json]]:
    """Each single value with the keys that lead to it and the last of them that is a name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key), str(key))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i), name)
    else:
        yield path, name, value


def found_in(text: str) -> Iterator[tuple[int, int]]:
    """Where ``text`` has something in the form of a secret: from, to."""
    for needles, form in _FORMS:
        if any(needle in text for needle in needles):
            for match in form.finditer(text):
                yield match.span("of" if "of" in form.groupindex else 0)


def without(text: str, mask: str) -> str:
    """``text`` with ``mask`` in place of all that has the form of a secret."""
    end, parts = 0, []
    for start, stop in sorted(found_in(text)):
        if stop <= end or mask in text[start:stop]:
            continue
        parts += [text[end : max(start, end)]] + ([mask] if start >= end else [])
        end = stop
    return "".join([*parts, text[end:]]) if parts else text
