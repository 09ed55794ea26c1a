"""A generated graph to try a reward of knowledge on: invented countries, towns and people.

Some relations follow from others (who was born in a town of a country is a citizen of it and speaks its language), so
that what is kept back can be known from the rest.
"""

from __future__ import annotations

import random

_FIRST = ("ba", "ke", "lo", "mi", "ra", "su", "te", "vo", "zu", "ni", "da", "pe")
_LAST = ("dor", "lin", "mar", "nes", "rath", "sil", "ton", "var", "wen", "zan")
_COUNTRIES, _REGIONS, _LANGUAGES = 12, 4, 8


def _names(count: int, shape: str, taken: set[str], draw: random.Random) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        name = "".join(draw.choice(_FIRST if part == "f" else _LAST) for part in shape).capitalize()
        if name not in taken:
            taken.add(name)
            found.append(name)
    return found


def towns(people: int = 240, seed: int = 0) -> list[tuple[str, str, str]]:
    """Triples (head, relation, tail) of 12 countries with 6 towns each and ``people``."""
    draw, taken = random.Random(seed), set[str]()
    countries = _names(_COUNTRIES, "fl", taken, draw)
    regions, languages = _names(_REGIONS, "ffl", taken, draw), _names(_LANGUAGES, "fll", taken, draw)
    rows: list[tuple[str, str, str]] = []
    spoken, cities = dict[str, str](), list[tuple[str, str]]()
    for n, country in enumerate(countries):
        spoken[country] = languages[n % _LANGUAGES]
        rows += [(country, "lies_in", regions[n % _REGIONS]), (country, "has_language", spoken[country])]
        own = _names(6, "lfl", taken, draw)
        rows += [(country, "has_capital", own[0]), *((town, "town_of", country) for town in own)]
        rows += [(town, "in_region", regions[n % _REGIONS]) for town in own]
        cities += [(town, country) for town in own]
    for person in _names(people, "fflf", taken, draw):
        (born, home), (lives, _) = draw.choice(cities), draw.choice(cities)
        rows += [(person, "born_in", born), (person, "citizen_of", home), (person, "speaks", spoken[home])]
        rows.append((person, "lives_in", lives))
    return rows
