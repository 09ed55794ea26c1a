"""The forms that secrets have, whatever they are called: tokens of known services, headers, parameters of addresses.

The forms are those that the services document for their tokens. No package is used for them: lists such as that of
detect-secrets find secrets in files of code, and lack tokens of model hubs, parameters of addresses and cookies, which
are what recipes hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

NAMES = (
    r"(?:api|access|secret|private|auth|account|signing|encryption|license|subscription|functions)[_.-]?key(?:[_.-]?id)?"
    r"|apikey|(?:api|access|auth|bearer|refresh|session|id|hf|bot)[_.-]?token|token|jwt|pat|bearer|oauth|auth|authorization|credentials?|assertion"
    r"|passw(?:or)?d|passphrase|pass|pwd|secret|client[_.-]?secret|sig|signature|hmac|session(?:[_.-]?id)?|sid|csrf"
    r"|x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|code[_.-]?verifier"
)
"""Names of secrets among the parameters of an address."""
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
    rf"(?i)(?<![A-Za-z0-9._-])(?P<name>(?:{NAMES})[\"']?=[\"']?)(?P<of>(?=[^\s\"'&;,]*[0-9])[^\s&;#,\"'<>$]{{6,}})": (
        "=",
    ),
    r"(?i)(?P<name>\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:[a-z]+\s+)?)(?P<of>[^\s,;\"'<>$]{6,})": (
        *("uthorization", "UTHORIZATION"),
    ),
    r"(?i)(?P<name>\bx-(?:api|auth|access|goog-api|functions)-(?:key|token)[\"']?\s*[:=]\s*[\"']?)"
    r"(?P<of>[^\s,;\"'<>$]{4,})": ("-",),
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
