"""A frozen diffusion model draws what the policy writes: a turn is a prompt, and its picture is shown or scored.

The pictures of an episode are `sample.episode.pictures`, the last one `sample.image`, which every reward for pictures
reads. One model draws for all episodes of a device, several pictures at once. A picture depends on its prompt, the seed
of its group and its number in the episode alone: batches always have the same size, so that their rows are equal
whatever stands beside them.
"""

from __future__ import annotations

import inspect
import json
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from pydantic import ValidationError
from torch import nn

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.episode import FAILED, Action, Observation
from mmrl.core.errors import NotFiniteError, UserError
from mmrl.core.hub_files import check_files
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.offload import Frozen
from mmrl.core.out_of_memory import OutOfMemoryError
from mmrl.core.packages.places import lacking
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.episodes.tools import schemas_of
from mmrl.models.description import Description

_KEY = "environment.options"
_GATHERED = 0.01
"""Seconds in which the first caller waits for others, whose pictures are then drawn with its own."""
_KEPT = 512
"""Pictures that are kept: samples of a group that write the same prompt have the same picture."""
_TRAINING = ("lora", "freeze", "optim", "algorithm", "train", "trainable")
_OWN = ("sde", "window", "batch_size", "same_initial_noise", "buckets", "frames", "type")
"""Keys of ``sampling`` that say how a model trains, or makes something else than pictures of one size."""


class _Asked(NamedTuple):
    text: str
    seed: int
    number: int


class _Drawer:
    """Final class, a ``mmrl.episodes.environment.Drawer``. It is loaded when the first picture is asked for. Raises
    ``UserError`` for what its configuration files rule out; reads no weight before."""

    def __init__(self, pipeline: str, model: str, dtype: str, batch: int, sampling: JsonObject) -> None:
        if batch < 1:
            raise UserError(f"{_KEY}.batch is {batch}; it is 1 or more")
        self._family, self.batch = _family(pipeline), batch
        self._recipe = _recipe(pipeline, model, dtype, sampling)
        described = _described(self._family, self._recipe)
        weights = [t for of in described.components for t in of.module.parameters()]
        self.bytes = sum(t.nbytes for t in weights if not t.requires_grad)
        how = self._recipe.denoising
        self.what = f"{Path(model).name}, {dtype}, {how.steps} steps at {how.height} x {how.width}"
        self.size = how.width, how.height
        self._device = torch.device("cpu")
        self._pipeline: Any = None
        self._frozen: Frozen | None = None
        self._waiting = deque[tuple[_Asked, Future[Image.Image]]]()
        self._known = OrderedDict[_Asked, Image.Image]()
        self._turn = threading.Lock()

    def at(self, device: str) -> None:
        self._device = torch.device(device)

    def sleep(self) -> None:
        with self._turn:
            if self._frozen is not None:
                self._frozen.sleep(self._device)

    def draw(self, text: str, seed: int, number: int) -> Image.Image:
        """The picture of ``text``, the episode's ``number``-th. Raises ``UserError``."""
        asked, mine = _Asked(text, seed, number), Future[Image.Image]()
        self._waiting.append((asked, mine))
        time.sleep(_GATHERED)
        while not mine.done():
            with self._turn:  # who has it draws for those who wait
                if not mine.done():
                    self._next()
        return mine.result()

    def _next(self) -> None:
        """Draw a batch of what is asked for, the first first."""
        batch: dict[_Asked, list[Future[Image.Image]]] = {}
        while self._waiting and len(batch) < self.batch:
            asked, future = self._waiting.popleft()
            if asked in self._known:
                future.set_result(self._known[asked])
            else:
                batch.setdefault(asked, []).append(future)
        if not batch:
            return
        try:
            pictures = self._drawn(list(batch))
        except Exception as error:
            for future in (future for of in batch.values() for future in of):
                future.set_exception(_failed(error, next(iter(batch)).text))
            return
        for (asked, futures), picture in zip(batch.items(), pictures, strict=True):
            self._known[asked] = picture
            for future in futures:
                future.set_result(picture)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def _drawn(self, asked: Sequence[_Asked]) -> list[Image.Image]:
        if self._frozen is None:
            self._pipeline = self._loaded(self._device)
            self._frozen = Frozen(_modules(self._pipeline), lambda: _modules(self._loaded(torch.device("cpu"))))
        self._frozen.wake(self._device)
        whole = [*asked, *[asked[-1]] * (self.batch - len(asked))]
        slots = [Slot(one.number, one.seed, 0, Prompt("drawn", one.text)) for one in whole]
        ids = [SampleId(one.number, one.seed, 0, 0) for one in whole]
        with torch.no_grad():
            keys = self._pipeline.encode(slots)
            try:
                rows = self._pipeline.sample(slots, ids, [], 0)
                made = self._pipeline.samples(rows, frozenset({"image"}))
            finally:
                self._pipeline.features.release(keys)
        return [sample.image for sample in made[: len(asked)]]

    def _loaded(self, device: torch.device) -> Any:
        made = self._family.build(self._recipe, self._recipe.model.path, device)
        made.policy = made.policy.unload()  # an adapter that is not trained does nothing
        _modules(made).requires_grad_(False)
        return made


def _modules(pipeline: Any) -> nn.ModuleList:
    adapter = pipeline.adapter
    return nn.ModuleList([adapter.model, adapter.vae, *adapter.text_encoders])


def _failed(error: Exception, text: str) -> Exception:
    """Why nothing was drawn, with the edit."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    edit = f"correct {_KEY}.model"
    if isinstance(error, torch.OutOfMemoryError | OutOfMemoryError | MemoryError):
        edit = f"lower {_KEY}.batch, or set placement.sleep to true"
    elif isinstance(error, NotFiniteError):
        edit = f"set {_KEY}.dtype to float32"
    return UserError(f"{text[:80]!r} could not be drawn: {said}; {edit}")


def _family(pipeline: str) -> Any:
    """The module of the pipeline. Raises ``UserError`` for one that makes no pictures of prompts alone."""
    name = pipeline if "/" in pipeline or ".py" in pipeline else f"diffusion/{pipeline}"
    try:
        found = mmrl.load("pipelines", name)
    except UserError as error:
        raise UserError(f"{_KEY}.pipeline: {error}") from error
    adapters = [of for of in vars(found).values() if inspect.isclass(of) and of.__module__ == found.__name__]
    makes = {getattr(of, "makes", None) for of in adapters}
    edits = any(getattr(of, "edits", False) for of in adapters)
    if "image" not in makes or edits:
        what = "makes clips" if "video" in makes else "edits pictures that are given" if edits else "draws no pictures"
        raise UserError(
            f"{_KEY}.pipeline: {pipeline} {what}; take one that draws a picture of a prompt (diffusion/sd3)"
        )
    return found


def _recipe(pipeline: str, model: str, dtype: str, sampling: JsonObject) -> Recipe:
    """The recipe that the model is opened with. Raises ``UserError`` with the option that is wrong."""
    if wrong := next((name for name in _TRAINING if name in sampling), None):
        raise UserError(
            f"{_KEY}.{wrong}: the model that draws is frozen; remove it, train that model with a recipe of its own "
            f"(shapes-full), and name what mmrl export wrote in {_KEY}.model"
        )
    if wrong := next((name for name in _OWN if name in sampling), None):
        raise UserError(f"{_KEY}.{wrong}: pictures are drawn without noise between steps, in one size; remove it")
    if unset := lacking(model):
        raise UserError(f"{_KEY}.model: {unset}")
    name = pipeline if "/" in pipeline or ".py" in pipeline else f"diffusion/{pipeline}"
    values = {
        "name": "draw",
        "pipeline": name,
        "model": {"path": model, "dtype": dtype, "lora": {"rank": 1, "alpha": 1}},  # so that dtype is of all weights
        "data": {"name": "shapes", "overlong": "cut"},
        "sampling": sampling,
        "rewards": [{"name": "jpeg:compressibility"}],
        "algorithm": {"type": "diffusion_nft"},
        "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2, "micro_batch_size": 4},
    }
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(str(part) for part in first["loc"] if part not in ("sampling", "model", "diffusion", "path"))
        said = first["msg"].removeprefix("Value error, ").splitlines()[0]
        raise UserError(f"{_KEY}{'.' * bool(at)}{at}: {_named(said)}; correct it") from error


def _described(family: Any, recipe: Recipe) -> Description:
    """The pipeline on the meta device. Raises ``UserError``."""
    folder = Path(recipe.model.path)
    try:
        check_files(recipe.model.path)
        made: Description = family.describe(recipe, recipe.model.path, None)
    except UserError as error:
        raise UserError(_named(str(error))) from error
    parts = {file.parent for file in folder.glob("*/config.json")} if folder.is_dir() else set[Path]()
    for part in sorted(parts):
        if not any(part.glob("*.safetensors")) and not any(part.glob("*.bin")):
            raise UserError(f"{_KEY}.model: {part} has no weights (*.safetensors); download the model whole")
    return made


def _named(said: str) -> str:
    """``said`` of a recipe's keys, of those that an environment has."""
    for key, own in (("sampling.", ""), ("model.path", "model"), ("model.dtype", "dtype")):
        said = said.replace(key, f"{_KEY}.{own}")
    return said


_DRAWERS: weakref.WeakValueDictionary[str, _Drawer] = weakref.WeakValueDictionary()
_MADE = threading.Lock()


def _drawer(pipeline: str, model: str, dtype: str, batch: int, sampling: JsonObject) -> _Drawer:
    """The one of this process that draws so."""
    key = json.dumps([pipeline, model, dtype, batch, sampling], sort_keys=True)
    with _MADE:
        found = _DRAWERS.get(key)
        if found is None:
            _DRAWERS[key] = found = _Drawer(pipeline, model, dtype, batch, sampling)
        return found


class Environment:
    """``pipeline`` (``diffusion/sd3``) and ``model`` as in a recipe; steps, height, width, guidance_scale and other
    keys of ``sampling`` stand beside them. ``show``: the policy sees its picture and may write another prompt, until it
    writes ``stop``; else the first picture ends the episode, and rewards alone see it. ``call``: it draws by calls of a
    tool ``draw``, until a turn without one; else each turn is a prompt, or what stands behind its last ``after``.
    ``batch``: pictures that are drawn at once; ``dtype``: of the frozen weights. Raises ``UserError``."""

    draws = True
    not_apart = "one model draws for all episodes of a device"

    def __init__(
        self,
        model: str,
        pipeline: str,
        *,
        show: bool = True,
        call: bool = False,
        after: str = "",
        stop: str = "done",
        batch: int = 8,
        dtype: str = "float32",
        **sampling: Json,
    ) -> None:
        self.drawer = _drawer(pipeline, model, dtype, batch, sampling)
        self.pictures = self._show = show
        self.tools = schemas_of([self.draw]) if call else []
        self._after, self._stop = after, stop
        self._seed = self._drawn = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def step(self, action: Action) -> list[Observation] | None:
        if self.tools:
            return self._called(action)
        text = action.text.rpartition("</think>")[2]
        text = (text.rpartition(self._after)[2] if self._after else text).strip()
        if self._drawn and text == self._stop:
            return None
        return [Observation(self.draw(text), hidden=not self._show, done=not self._show)]

    def recall(self, action: Action, told: Sequence[Observation]) -> None:
        """A turn whose pictures are known is not drawn again."""
        self._drawn += sum(len(one.pictures) for one in told)

    def draw(self, prompt: str) -> Image.Image:
        """Draw a picture.

        Args:
            prompt: What it shows.
        """
        picture = self.drawer.draw(prompt, self._seed, self._drawn)
        self._drawn += 1
        return picture

    def _called(self, action: Action) -> list[Observation]:
        told = list[Observation]()
        for call in action.calls:
            prompt = call.arguments.get("prompt")
            wrong = call.error or ("" if call.name == "draw" else f"there is no tool {call.name}; there is draw")
            if not wrong and not (isinstance(prompt, str) and len(call.arguments) == 1):
                wrong = "draw takes one argument, the text prompt"
            if wrong:
                told.append(Observation(json.dumps({"error": wrong}), call_id=call.id, info={FAILED: wrong}))
                continue
            picture = self.draw(str(prompt))
            told.append(Observation(picture if self._show else "It is drawn.", call_id=call.id))
            if not self._show:
                told.append(Observation(picture, hidden=True))
        return told or [Observation(done=True)]
