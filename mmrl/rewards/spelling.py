"""One spelling of a text that can be written with different characters: what is compared is what a reader sees."""

from __future__ import annotations

import re
import unicodedata

_ONE = str.maketrans(
    {
        **dict.fromkeys(
            "\u2018\u2019\u201a\u201b\u2032\u2035\u02b9\u02bc\u02bb\u00b4\u0060\uff40\u2039\u203a\u275b\u275c", "'"
        ),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u2036\u00ab\u00bb\u02ba\u301d\u301e\u275d\u275e", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043", "-"),
        **dict.fromkeys("\u2044\u2215", "/"),
        "\u301c": "~",
    }
)
_UNSEEN = re.compile(
    r"[\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    r"\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that Unicode calls ignorable (Default_Ignorable_Code_Point): nobody sees them."""


def spelled(text: str, *, ignore_case: bool = True) -> str:
    """``text`` in Unicode's form NFKC, with one apostrophe, quotation mark, dash and slash, without characters that
    nobody sees; casefolded if asked."""
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text).translate(_ONE)).translate(_ONE)
    return unicodedata.normalize("NFKC", text.casefold()) if ignore_case else text
