"""The environment of a recipe, as the pipeline of its model uses it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from PIL import Image

from mmrl.config.environment import Environment
from mmrl.config.schema import Recipe
from mmrl.core.episode import Observation
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.rollout_engine import AnswersAsItGoes, Request, Settings
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.episodes.calls import reader_of
from mmrl.episodes.environment import told_of
from mmrl.episodes.journal import GROUP, Journal
from mmrl.episodes.loading import closed, opened
from mmrl.episodes.play import How, Played, play, reset_seed
from mmrl.episodes.pool import returned_within
from mmrl.episodes.shown import content_of
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.conversation import PLACEHOLDER, unmarked
from mmrl.models.text.retold import Past, Teller
from mmrl.models.text.stop_strings import StopStrings
from mmrl.models.text.template_probe import TemplateFaultError
from mmrl.models.text.told import Contents, Role, Told

_BLANK = Image.new("RGB", (64, 64))
_MOST_KEPT = 10_000
"""Slots whose prompts are remembered with what the environment showed."""


class World:
    """Final class. Raises ``UserError`` where the recipe's environment cannot be made, or the chat template shows
    neither results of tools nor a further message of the user, or earlier turns otherwise (``history: template``)."""

    def __init__(self, recipe: Recipe, conditioner: Conditioner, device: torch.device) -> None:
        assert recipe.environment is not None
        self._recipe, self._section, self._conditioner = recipe, recipe.environment, conditioner
        self._factory = opened(recipe.environment)
        self.drawer = self._factory.drawer
        """The model that draws, which all episodes share; None where the environment has none."""
        if self.drawer is not None:
            self.drawer.at(str(device))
        if self._factory.pictures and conditioner.no_pictures:
            edit = "set environment.options.show to false"
            edit = edit if self.drawer is not None else "take an environment that shows text"
            raise UserError(
                f"environment.name: {self._section.name} shows pictures, and {conditioner.no_pictures}; or {edit}"
            )
        self.role: Role = role_of(conditioner, recipe, calls=bool(self._factory.schemas))
        if self._section.history == "template":
            check_history(conditioner, self.role)
        self.plays = True
        """Whether episodes are played; a plan takes the longest one as one turn, ``texts`` times, and one slot's
        beginning for all."""
        self.texts = self._section.max_turns if reads_anew(self._section) else 1
        """The texts at most that an episode has in an update."""
        self.journal: Journal | None = None
        """Keeps what the environment answers, where a run has one."""
        self._calls = reader_of(recipe.environment.calls, conditioner.saved, self._factory.schemas)
        self._shown: OrderedDict[SampleId, tuple[Prompt, Prompt]] = OrderedDict()
        self._unclosed: dict[SampleId, str] = {}

    def begun(self, slot: Slot) -> Slot:
        """``slot`` with what ``reset`` showed at the end of its prompt. Raises ``BadPromptError``."""
        key = SampleId(slot.step, slot.index, slot.attempt, 0) if self.plays else SampleId(0, 0, 0, 0)
        known = self._shown.get(key)
        if known is None or slot.prompt not in known:
            known = self._shown[key] = slot.prompt, self._with_first(slot.prompt, key)
            if len(self._shown) > _MOST_KEPT:
                self._shown.popitem(last=False)
        return replace(slot, prompt=known[1])

    def _with_first(self, prompt: Prompt, key: SampleId) -> Prompt:
        told, why = self._reset(prompt, replace(key, sample=GROUP))
        if why:
            raise BadPromptError(prompt.id, f"environment: reset{why}")
        try:
            return _shown_first(prompt, told, self._section.max_pictures)
        except ValueError as error:
            raise BadPromptError(prompt.id, f"environment: reset: {error}") from error

    def _reset(self, prompt: Prompt, id: SampleId) -> tuple[Sequence[Observation], str]:
        """What ``reset`` shows to a group, and why it failed."""
        kept = None if self.journal is None else self.journal.answer(id, 0, "")
        if kept is not None and not kept.lost:
            return kept.told, kept.failure
        world = self._factory.make()
        try:
            reset = partial(world.reset, prompt, reset_seed(self._recipe.seed, id))
            returned = returned_within(self._section.timeout, reset)
        finally:
            if why := closed(world, self._section.timeout):
                self._unclosed[replace(id, sample=0)] = why
        told, failure = told_of(returned)
        why = f" failed: {failure}" if failure else ""
        if self.journal is not None:
            self.journal.tells(id, 0, "", told, why)
        return told, why

    def play(
        self,
        answers: AnswersAsItGoes,
        slots: Sequence[Slot],
        asked: Sequence[Prompt],
        ids: Sequence[SampleId],
        requests: Sequence[Request],
        settings: Settings,
        stops: StopStrings,
        room: int | None,
        told: Callable[[Role, Contents], Told],
    ) -> list[Played]:
        """An episode of each sample, in their order; ``slots`` have begun, and their prompts are shown as ``asked``.
        ``told``: as ``Conditioner.told``."""
        renews = self._section.history == "template"
        teller = Teller(self._conditioner, self.role, partial(told, self.role), renews=renews)
        seed = self._recipe.seed
        how = How(self._section, self._factory, teller, stops, settings, seed, room, self._calls, self.journal)
        first = [self._first(slot) for slot in slots]
        played = play(how, answers, ids, list(zip(first, asked, strict=True)), requests)
        for one in played:  # a group's beginning is named with its first sample
            one.unclosed = self._unclosed.pop(one.id, "") or one.unclosed
        return played

    def _first(self, slot: Slot) -> Prompt:
        """The prompt as the data has it, which ``reset`` is given."""
        known = self._shown.get(SampleId(slot.step, slot.index, slot.attempt, 0))
        return slot.prompt if known is None else known[0]


def reads_anew(section: Environment) -> bool:
    """Whether a turn may read another beginning than the turn before it."""
    most = section.history_length or section.max_turns
    return section.history == "template" or most < section.max_turns - 1


def _shown_first(prompt: Prompt, told: Sequence[Observation], most: int) -> Prompt:
    """``prompt`` with what ``reset`` told at its end. Raises ``ValueError`` for more than ``most`` pictures."""
    pictures = [picture for one in told for picture in one.pictures]
    if len(pictures) > most:
        raise ValueError(f"it showed {len(pictures)} pictures, and environment.max_pictures is {most}")
    if not pictures:
        return replace(prompt, text="\n\n".join(text for text in (prompt.text, *(one.text for one in told)) if text))
    first, turns = prompt.text, list(prompt.turns)
    if not prompt.media:  # what looks like a mark is text there
        first = unmarked(first)
        turns = [turn._replace(text=unmarked(turn.text)) if turn.role == "user" else turn for turn in turns]
    elif not any(PLACEHOLDER.search(text) for text in (first, *(t.text for t in turns if t.role == "user"))):
        marks = "".join(f"<{medium.kind}>" for medium in prompt.media)  # before the first message of the user
        at = next((n for n, turn in enumerate(turns) if turn.role == "user"), None)
        if at is None:
            first = marks + first
        else:
            turns[at] = turns[at]._replace(text=marks + turns[at].text)
    shown = ["".join(unmarked(p) if isinstance(p, str) else "<image>" for p in one.parts) for one in told]
    text = "\n\n".join(text for text in (first, *shown) if text)
    return replace(prompt, text=text, turns=tuple(turns), media=(*prompt.media, *pictures))


def role_of(conditioner: Conditioner, recipe: Recipe, *, calls: bool) -> Role:
    """How answers are shown: by themselves those of an environment that is called (``calls``) as results of tools, and
    what others say as messages of the user. Raises ``UserError`` where the chat template shows them in no such way."""
    section = recipe.environment
    roles: tuple[Role, ...] = ("tool", "user") if calls else ("user", "tool")
    if section is not None and section.role != "auto":
        roles = (section.role,)
    why = ""
    probe: Contents = ["x"] if conditioner.no_pictures else [["x", *content_of([_BLANK])]]
    for role in roles:
        try:
            conditioner.told(role, probe)
            return role
        except TemplateFaultError as error:
            why = str(error)
    edit = "set environment.role to auto" if len(roles) == 1 else "set model.chat_template to one that shows them"
    raise UserError(f"environment.role: {why}; {edit}")


def check_history(conditioner: Conditioner, role: Role) -> None:
    """Raise ``UserError`` where what the chat template shows of a conversation does not begin with what it shows of an
    earlier part of it, but for what the policy wrote."""
    told = partial(conditioner.told, role)
    past = Past(conditioner.tokenizer("a", add_special_tokens=False).input_ids, "a", ["x"], told(["x"]))
    try:
        Teller(conditioner, role, told, renews=True).retold(Prompt("p", "q"), [past, past])
    except TemplateFaultError as error:
        raise UserError(f"environment.history: {error}; set environment.history to keep") from error
