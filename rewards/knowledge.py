"""Are the facts that a response states plausible? Triples of an embedded knowledge graph (docs/knowledge.md).

    - name: knowledge
      on_failure: drop          # a response about entities that the graph does not know is not punished
      options:
        path: knowledge/towns   # made by: python -m mmrl.studies.knowledge towns.tsv --out knowledge/towns
        pattern: '(?P<head>\\w+) was born in (?P<tail>\\w+)'
        relation: born_in

The plausibility of a triple is calibrated on triples that the embedding was not trained on: about as many of those with
0.8 are true. Responses are data: they are matched with the recipe's pattern, and never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.reward_contract import Context, Failed, Input, Value
from mmrl.core.trajectory import Sample
from mmrl.rewards.learned.knowledge import folder
from mmrl.rewards.learned.knowledge.folder import read

MOST = 10_000
"""Characters of a response that are read; a pattern may need time that grows with the square of the length."""


def _reads(options: Mapping[str, Any]) -> tuple[Input, ...]:
    """What it reads. Raises ``UserError`` for a folder without knowledge, and for relations that it lacks."""
    given = options.get("relations")
    names = list(given.values()) if isinstance(given, Mapping) else []
    relation = options.get("relation")
    _refuse_unknown(read(Path(str(options.get("path")))), [*names, *((relation,) if relation else ())])
    return ("text",)


def _refuse_unknown(known: folder.Knowledge, names: Sequence[object]) -> None:
    for name in names:
        if name not in known.relations:
            listed = ", ".join(sorted(known.relations)[:8])
            raise UserError(f"options: the graph has no relation {name!r}; it has {listed}")


def _stands(name: str, text: str) -> bool:
    """Whether ``name`` stands in ``text`` as a word or as words of its own."""
    return bool(name) and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


@mmrl.reward(inputs=("text",), paths=("path",), reads=_reads, checks=True)
class Knowledge:
    """The mean plausibility of the different facts that a response states, in [0, 1]; 0 where it states none.

    ``pattern``: a regular expression with the groups ``head``, ``tail`` and, without ``relation``, ``relation``.
    ``relation``: the relation of every match. ``relations``: the graph's name of a relation for a response's words.
    ``wanted``: facts that a response should state; where it states fewer, the missing ones count as 0. ``asked``: only
    facts whose head stands in the prompt count. Raises ``UserError``.
    """

    def __init__(
        self,
        path: str,
        pattern: str,
        relation: str | None = None,
        relations: JsonObject | None = None,
        wanted: int = 1,
        *,
        asked: bool = False,
    ) -> None:
        self.known = read(Path(path))
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise UserError(f"options.pattern is no regular expression: {error}") from error
        lacks = {"head", "tail", *(() if relation else ("relation",))} - set(self.pattern.groupindex)
        if lacks:
            raise UserError(
                f"options.pattern has no group {min(lacks)!r}; write (?P<{min(lacks)}>...) in it"
                + ", or set options.relation" * ("relation" in lacks)
            )
        self.names = {said: str(name) for said, name in (relations or {}).items()}
        _refuse_unknown(self.known, [*self.names.values(), *((relation,) if relation else ())])
        if isinstance(wanted, bool) or wanted < 1:
            raise UserError(f"options.wanted is {wanted}; give a number of facts, 1 or more")
        if asked not in (True, False):
            raise UserError(f"options.asked is {asked!r}; give true or false")
        self.relation, self.wanted, self.asked = relation, wanted, asked

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[Value]]:
        """``score``; ``facts``: the number of different facts that a response states about entities of the graph;
        ``unknown``: of names that the graph lacks. A response with such names alone fails, and the reason names them.
        """
        found = [self._facts(sample.text or "", sample.prompt.text) for sample in samples]
        rows = [fact for facts, _ in found for fact in facts]
        said = self.known.trained.plausibility(torch.tensor(rows)).tolist() if rows else []
        scores: list[Value] = []
        for facts, unknown in found:
            mine, said = said[: len(facts)], said[len(facts) :]
            if not facts and unknown:
                listed = ", ".join(unknown[:4])
                scores.append(Failed(f"the graph does not know {listed}; add triples of it, or set on_failure: drop"))
            else:
                scores.append(sum(mine) / max(self.wanted, len(facts)))
        counts = [(float(len(facts)), float(len(unknown))) for facts, unknown in found]
        return {"score": scores, "facts": [n for n, _ in counts], "unknown": [n for _, n in counts]}

    def _facts(self, text: str, prompt: str) -> tuple[list[tuple[int, int, int]], list[str]]:
        """Numbers of the different triples that ``text`` states, and the names that the graph lacks."""
        facts: dict[tuple[int, int, int], None] = {}
        unknown: dict[str, None] = {}
        for match in self.pattern.finditer(text[:MOST]):
            named = match.groupdict()
            if self.asked and not _stands(named["head"] or "", prompt):
                continue
            relation = self.relation or self.names.get(named["relation"] or "", named["relation"] or "")
            head, kind, tail = (
                self.known.entities.get(named["head"] or ""),
                self.known.relations.get(relation),
                self.known.entities.get(named["tail"] or ""),
            )
            if head is None or kind is None or tail is None:
                lacking = [(head, named["head"]), (kind, relation), (tail, named["tail"])]
                unknown |= dict.fromkeys(f"{name}" for number, name in lacking if number is None)
            else:
                facts[head, kind, tail] = None
        return list(facts), list(unknown)


score = Knowledge
