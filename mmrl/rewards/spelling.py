"""One spelling of a text that can be written with different characters: what is compared is what a reader sees."""

from __future__ import annotations

import unicodedata

_ONE = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u2035\u02b9\u02bc\u02bb\u00b4\u0060\uff40", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u2036\u00ab\u00bb\u02ba\u301d\u301e", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043", "-"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\ufe0e\ufe0f"),
    }
)


def spelled(text: str, *, ignore_case: bool = True) -> str:
    """``text`` in Unicode's form NFKC, with one apostrophe, one quotation mark and one dash, without characters that
    nobody sees; casefolded if asked."""
    text = unicodedata.normalize("NFKC", text.translate(_ONE)).translate(_ONE)
    return unicodedata.normalize("NFKC", text.casefold()) if ignore_case else text
