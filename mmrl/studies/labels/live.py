"""The page on which people vote while a run trains (``mmrl label --train``). Imports no torch.

The server reads what the run asks for (``votes/asks.json``) and appends to the log of votes; the run reads the log
between its steps. Both may be one process or two. The rules of ``mmrl.core.local_page`` hold here too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from mmrl.core.json_types import Json, JsonObject, elements
from mmrl.core.local_page import Page, PageHandler
from mmrl.core.untrusted import inside
from mmrl.rewards.learned.labels import votes
from mmrl.rewards.learned.labels.votes import SAMPLE, Tally, VoteLog

PAGE = Path(__file__).with_name("live.html")
_HELD_S = 30.0
"""Seconds for which what one voter is shown is shown to no other."""
_MOST_VOTERS = 100


class VoteServer(Page):
    """Serves the page of the run in ``folder``, from before it begins. Raises ``UserError`` where it cannot listen."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.log = VoteLog(folder)
        self.ended = ""
        """How the run ended; empty while it goes on."""
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], JsonObject] = {}
        """All that was asked for since the start of the server: an answer may come after the run asks for others."""
        self._held: dict[tuple[str, ...], tuple[str, float]] = {}
        self._skipped: set[tuple[str, tuple[str, ...]]] = set()
        self._given: dict[str, list[tuple[str, ...]]] = {}
        super().__init__(port, _Handler)

    def state(self, voter: str) -> JsonObject:
        """What the page shows: the figures of the run, and what ``voter`` is asked now (None: nothing)."""
        with self._lock:
            asked = votes.asked_in(self.log.folder)
            if not asked:
                return {"ask": None, "waiting": self.ended or "the run draws its first samples", "ended": self.ended}
            tally = self.log.read()
            ask = None if self.ended else self._next(asked, tally, voter)
        shown: JsonObject = {name: asked.get(name) for name in ("run", "votes", "step", "used", "auc", "waiting")}
        state: JsonObject = {"count": len(tally.given), "voters": len({who for who, _ in tally.given})}
        return {**shown, **state, "ask": ask, "paused": tally.paused, "enough": tally.enough, "ended": self.ended}

    def _next(self, asked: JsonObject, tally: Tally, voter: str) -> JsonObject | None:
        """The first that nobody has voted on, that ``voter`` did not skip and no other is shown."""
        now, voted = time.monotonic(), {samples for _, samples in tally.given}
        self._held = {key: held for key, held in self._held.items() if now - held[1] < _HELD_S and held[0] != voter}
        for row in elements(asked.get("asks")):
            key = votes.samples_of(row.get("samples")) if isinstance(row, Mapping) else None
            if key is None:
                continue
            self._known[key] = row
            if key not in voted and key not in self._held and (voter, key) not in self._skipped:
                self._held[key] = (voter, now)
                return row
        return None

    def give(self, said: Json) -> str:
        """Take a vote, an undo, or a word about waiting; returns what is wrong, empty where it is on the disk. Raises
        ``UserError`` where it cannot be written."""
        if not isinstance(said, dict) or (voter := votes.named(said.get("voter"))) is None:
            return "send an object with voter, a name of 1 to 40 characters"
        kind, time_now = said.get("kind"), votes.now()
        with self._lock:
            if not self.log.path.exists():
                return "the run asks for nothing yet"
            tally = self.log.read()
            if said.get("run") != tally.run:
                return "this vote is of another run; open the address that this one printed"
            if self.ended:
                return f"the run has ended ({self.ended}), so nothing is trained by this vote"
            if kind in ("pause", "enough") and isinstance(said.get("value"), bool):
                self.log.write(str(kind), voter=voter, time=time_now, value=said["value"])
                return ""
            if voter not in self._given and len(self._given) >= _MOST_VOTERS:
                return f"there are {_MOST_VOTERS} voters already; vote under the name of one of them"
            return self._vote(kind, said, voter, tally)

    def _vote(self, kind: Json, said: JsonObject, voter: str, tally: Tally) -> str:
        given = self._given.setdefault(voter, [])
        if kind == "undo":
            if not given:
                return "there is no vote of yours to take back"
            self.log.write("undo", voter=voter, time=votes.now(), samples=list(given[-1]))
            given.pop()
            return ""
        samples, value = votes.samples_of(said.get("samples")), said.get("value")
        if samples is None or samples not in self._known:
            return "this run has not asked for a vote on these samples; load the page again"
        if kind == "skip":
            self._skipped.add((voter, samples))
            return ""
        if kind != "vote":
            return "kind is one of vote, undo, skip, pause, enough"
        if wrong := votes.wrong_value(tally.votes, samples, value):
            return wrong
        self.log.write("vote", voter=voter, time=votes.now(), samples=list(samples), value=value)
        given.append(samples)
        return ""


class _Handler(PageHandler):
    server: VoteServer  # type: ignore[assignment]

    def show(self, path: str) -> None:
        kind, _, rest = path.lstrip("/").partition("/")
        if path == "/":
            return self.reply(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        if path == "/state":
            return self.answer(lambda: self.server.state(votes.named(self.given("voter")) or ""))
        if kind == "file" and SAMPLE.fullmatch(rest):
            folder = self.server.log.folder
            place = votes.place_of(folder, rest)
            found = inside(folder, f"{place.parent.name}/{place.name}.png")
            if found is not None:
                return self.reply(200, found.read_bytes(), "image/png")
        return self.refuse(404, "there is nothing here")

    def do_POST(self) -> None:
        self.take("/vote", self.server.give)
