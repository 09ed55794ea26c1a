"""A reward that knows the truth (``proof_knowledge.py``): the share of true facts among those that a response states.

It reads facts as the reward ``knowledge`` does. Where a response states fewer than ``wanted``, the missing ones count
as 0.
"""

from __future__ import annotations

import re
from pathlib import Path

import mmrl
from mmrl.rewards.learned.knowledge.graph import read

SAID = {"was born in": "born_in", "is a citizen of": "citizen_of", "speaks": "speaks"}
"""The words of a response, and the relations of the graph."""
PATTERN = rf"(?P<head>\w+) (?P<relation>{'|'.join(SAID)}) (?P<tail>\w+)"


def facts(text):
    """The different facts that ``text`` states, as (head, relation of the graph, tail), in order."""
    found = re.finditer(PATTERN, text)
    return list(dict.fromkeys((m["head"], SAID[m["relation"]], m["tail"]) for m in found))


@mmrl.reward(inputs=("text",), paths=("graph",))
class TrueFacts:
    """``graph``: the file of all true triples."""

    def __init__(self, graph, wanted=1):
        known = read(Path(graph))
        names, kinds = known.entities, known.relations
        self.true = {(names[h], kinds[r], names[t]) for h, r, t in known.triples.tolist()}
        self.wanted = wanted

    def score(self, samples, *, context):
        found = [facts(sample.text or "") for sample in samples]
        return [sum(fact in self.true for fact in of) / max(self.wanted, len(of)) for of in found]
