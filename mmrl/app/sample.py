"""Sample a run's checkpoint for prompts of one's own (``mmrl sample``): pictures, clips or texts, to look at.

    out/samples.jsonl         a row per sample: prompt, checkpoint, step, and the file or the text
    out/latest/000_0.png      prompt 0, sample 0 (a clip: .webp)
    out/sheet.png             all of them with their prompts; of texts sheet.md

With ``compare`` both checkpoints draw from the same noise, and the sheet shows them side by side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

import mmrl
from mmrl.app.build import find_checkpoint, open_run, opened
from mmrl.app.export import new_directory, refuse_taken
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.json_types import JsonObject, as_list
from mmrl.core.media import KINDS, BadMediaError, Media, open_clip, open_image
from mmrl.core.media.sound import wav_bytes
from mmrl.core.trajectory import ONLY_SAMPLED, Prompt, Sample, SampleId, Slot
from mmrl.data.fields import clean_text
from mmrl.data.record_media import arranged
from mmrl.data.records import checked
from mmrl.logging.grids import before_after, film_strip, grid, moving
from mmrl.logging.progress import Progress
from mmrl.logging.texts import cell, kept_lines
from mmrl.models.protocol import of_pictures
from mmrl.step.batch import chunks_of_a_size
from mmrl.step.step_context import Chunk, SamplingSpec, StepContext

MOST_SHOWN = 96
"""Samples of a checkpoint on the sheet; of more, the first."""
_COLUMNS = 8


@dataclass(frozen=True)
class Drawn:
    """What one checkpoint made. ``name``: as it was asked for; ``step``: 0 is the base model; the samples of a prompt
    stand one after another."""

    name: str
    step: int
    samples: list[Sample]

    @property
    def title(self) -> str:
        return "base" if self.name == "base" else f"step {self.step}"


def draw(
    run: Path,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    n: int = 4,
    checkpoint: str = "latest",
    compare: str | None = None,
    seed: int = 0,
) -> Path:
    """Write ``n`` samples for each of ``prompts`` into the new directory ``out`` and return it.

    ``checkpoint``, and ``compare`` if given: ``latest``, ``best``, ``base`` or a step. The settings are those of the
    run's evaluation. The same arguments give the same samples. Raises ``UserError`` where ``run`` or a checkpoint of it
    cannot be used, no prompt can, or ``out`` is taken.
    """
    refuse_taken(out)
    if not prompts:
        raise UserError("there is no prompt; give --prompt TEXT, or --prompts FILE")
    if compare == checkpoint:
        raise UserError(f"--compare {compare} is the checkpoint itself; name another one, such as base")
    _, directory = open_run(run)
    names = [name for name in (compare, checkpoint) if name is not None]
    found = {name: find_checkpoint(directory, name) for name in names}  # before a model is loaded
    context, _ = opened(run, scored=False)
    if not context.pipeline.reads_media and any(prompt.media for prompt in prompts):
        raise UserError(
            f"the model of {run} ({context.recipe.pipeline}) reads no pictures in a prompt; leave out --images, or "
            "sample a run of a vision-language model (pipeline: vlm/chat)"
        )
    lengths = getattr(context.pipeline, "lengths_of_prompts", None)  # of pictures
    for note in lengths.said_of(prompts) if lengths is not None else ():
        print(f"note: {note}", file=sys.stderr)
    n = _different(context, n)
    made: dict[str, Drawn] = {}
    with closing(context):
        for name in sorted(names, key=lambda name: found[name] is not None):  # the base is there first
            saved = found[name]
            if saved is not None:
                saved.into("policy", context.policy.load_state_dict)
            made[name] = Drawn(name, 0 if saved is None else saved.step, _sampled(context, prompts, n, seed))
    with new_directory(out, "the samples") as folder:
        _write([made[name] for name in names], folder, n, seed)
    return out


def _different(context: StepContext, n: int) -> int:
    """How many samples of a prompt differ: one, where text is drawn greedily."""
    recipe = context.recipe
    if context.pipeline.makes != "text" or n == 1 or recipe.eval.temperature != 0:
        return n
    print("note: eval.temperature is 0, so that all samples of a prompt are equal; one is drawn", file=sys.stderr)
    return 1


def _sampled(context: StepContext, prompts: Sequence[Prompt], n: int, seed: int) -> list[Sample]:
    """As the recipe's evaluation samples, under its weights. A prompt that cannot be used is left out and named."""
    recipe, pipeline = context.recipe, context.pipeline
    sounds = pipeline.makes != "text" and of_pictures(pipeline).sounds
    seen = {recipe.shows, "audio"} if sounds else {recipe.shows}
    how = SamplingSpec([], context.policy.evaluated, seed, frozenset(seen), evaluate=True)
    slots = [Slot(ONLY_SAMPLED, i, 0, prompt) for i, prompt in enumerate(prompts)]
    slots, bad = _usable(context, slots)
    for line in bad:
        print(f"warning: left out: {line}", file=sys.stderr)
    if not slots:
        raise UserError(f"no prompt can be used: {bad[0]}")
    # An attempt each: samples of one attempt begin with the same noise where the recipe says so.
    places = [replace(slot, attempt=k) for slot in slots for k in range(n)]
    rows = [(slot, SampleId(-1, slot.index, slot.attempt, 0)) for slot in places]
    prompts = [slot.prompt for slot in places]
    order = list(chunks_of_a_size(prompts, recipe.sampling, recipe.sampled_at_once))
    keys: list[list[str]] = []

    def asked() -> Iterator[Chunk]:
        for index in order:
            chunk = [rows[n] for n in index]
            keys.append(pipeline.encode([slot for slot, _ in chunk]))
            yield Chunk([slot for slot, _ in chunk], [name for _, name in chunk])

    made: dict[int, Sample] = {}
    devices, clock = context.compute.devices, Clock(context.compute.device)
    with devices.sampling_phase(context, how.weights), Progress(len(rows), "sample", "samples") as progress:
        for number, _, samples in devices.sample(context, asked(), how, clock):
            made |= zip(order[number], samples, strict=True)
            pipeline.features.release(keys[number])
            progress.advance(len(samples))
    return [made[row] for row in sorted(made)]


def _usable(context: StepContext, slots: list[Slot]) -> tuple[list[Slot], list[str]]:
    """The slots whose prompts the model can read, and a line for each of the others."""
    good, bad = list[Slot](), list[str]()
    for slot in slots:
        try:
            context.pipeline.features.release(context.pipeline.encode([slot]))
            good.append(slot)
        except BadPromptError as error:
            bad.append(f"{slot.prompt.text[:60]!r}: {error.reason}")
    return good, bad


def _write(drawn: Sequence[Drawn], folder: Path, n: int, seed: int) -> None:
    rows: list[JsonObject] = []
    for one in drawn:
        for sample in one.samples:
            of = {"prompt": sample.prompt.text, "id": sample.prompt.id, "sample": sample.id.attempt, "seed": seed}
            of |= {"checkpoint": one.name, "step": one.step}
            name = f"{one.name}/{sample.id.slot:03d}_{sample.id.attempt}"
            if sample.text is None:
                rows.append({**of, **_keep(sample, folder, name)})
            else:
                shown = _pictures(sample.prompt.media, folder, f"prompts/{sample.id.slot:03d}")
                told = _pictures(sample.episode.pictures if sample.episode else (), folder, name)
                shown = {**shown, **{f"episode_{key}": files for key, files in told.items()}}
                if sample.episode is not None:
                    files = dict(enumerate(map(str, as_list(told.get("pictures", [])))))
                    shown["turns"] = [*kept_lines(sample.episode.lines(files))]
                rows.append({**of, "text": sample.transcript, "truncated": sample.truncated, **shown})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "samples.jsonl").write_text(lines, encoding="utf-8")
    shown = [replace(one, samples=one.samples[:MOST_SHOWN]) for one in drawn]
    if drawn[0].samples[0].text is not None:
        (folder / "sheet.md").write_text(_table(shown), encoding="utf-8")
    else:
        _sheet(shown, n).save(folder / "sheet.png")
    if len(drawn[0].samples) > MOST_SHOWN:
        print(f"note: the sheet shows the first {MOST_SHOWN} of {len(drawn[0].samples)} samples", file=sys.stderr)


def _pictures(media: Sequence[Media], folder: Path, name: str) -> JsonObject:
    """Write the pictures of a prompt or an episode, once; their files' names inside ``folder``. Clips are left out."""
    files = []
    for n, medium in enumerate(media):
        if medium.kind != "image":
            continue
        files.append(f"{name}_{n}.png")
        if not (folder / files[-1]).exists():
            (folder / files[-1]).parent.mkdir(exist_ok=True)
            open_image(medium).save(folder / files[-1])
    return {"pictures": files} if files else {}


def _keep(sample: Sample, folder: Path, name: str) -> JsonObject:
    """Write a picture or a clip, and its sound; returns the names of the files inside ``folder``."""
    file = f"{name}.{'png' if sample.image is not None else 'webp'}"
    (folder / file).parent.mkdir(exist_ok=True)
    if sample.image is not None:
        sample.image.save(folder / file)
    else:
        (folder / file).write_bytes(moving(sample.video or ()))
    if sample.audio is None:
        return {"file": file}
    (folder / f"{name}.wav").write_bytes(wav_bytes(*sample.audio))
    return {"file": file, "audio": f"{name}.wav"}


def _sheet(drawn: Sequence[Drawn], n: int) -> Image.Image:
    pictures = [[s.image or film_strip(s.video or ()) for s in one.samples] for one in drawn]
    captions = [" ".join(sample.prompt.text.split()) for sample in drawn[0].samples]
    if len(drawn) == 1:
        return grid(pictures[0], captions, min(n, _COLUMNS))
    notes = [(drawn[0].title, drawn[1].title)] * len(captions)
    return before_after(pictures[0], pictures[1], captions, notes, min(n, _COLUMNS // 2))


def _table(drawn: Sequence[Drawn]) -> str:
    """The texts beside each other, as Markdown."""
    lines = ["| prompt | " + " | ".join(one.title for one in drawn) + " |", "|---" * (1 + len(drawn)) + "|"]
    for samples in zip(*(one.samples for one in drawn), strict=True):
        texts = [samples[0].prompt.text, *(sample.text or "" for sample in samples)]
        lines.append("| " + " | ".join(cell(text, 1000).replace("|", "&#124;") for text in texts) + " |")
    return "\n".join(lines) + "\n"


def prompts_of(texts: Sequence[str], images: Sequence[Path] = (), file: Path | None = None) -> list[Prompt]:
    """The prompts of ``--prompt``, each with all ``images`` (pictures and clips), then those of ``--prompts``.

    ``file``: a text file, a prompt a line, or records as the data set ``jsonl`` reads them. Raises ``UserError``.
    """
    if images and not texts:
        raise UserError("--images are shown with the texts of --prompt; records of --prompts name their own pictures")
    media = [_medium(path) for path in images]
    prompts = []
    for i, text in enumerate(texts):
        try:
            prompts.append(Prompt(f"prompt-{i}", clean_text(text), media=tuple(arranged(text, media))))
        except ValueError as error:
            raise UserError(f"--prompt {text[:60]!r}: {error}") from None
    if file is None:
        return prompts
    if not file.is_file():
        raise UserError(f"--prompts: there is no file {file}; correct the path")
    return [*prompts, *(_lines(file) if file.suffix.lower() in (".txt", "") else _records(file))]


def _lines(file: Path) -> list[Prompt]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        found = [Prompt(f"{file.name}:{i}", clean_text(line)) for i, line in enumerate(lines, 1) if line]
    except (OSError, ValueError) as error:
        raise UserError(f"--prompts: {file} cannot be read: {error}") from error
    if not found:
        raise UserError(f"--prompts: {file} is empty; write a prompt a line")
    return found


def _records(file: Path) -> list[Prompt]:
    found = mmrl.load("datasets", "jsonl:prompts")("train", path=str(file), heldout=0)
    for record in checked(found, 1.0):
        print(f"warning: left out: {record}", file=sys.stderr)
    return list(found)


def _medium(path: Path) -> Media:
    kind = KINDS.get(path.suffix.lower().removeprefix("."))
    if kind is None:
        raise UserError(f"--images {path}: is no picture or clip by its name; write one of {', '.join(KINDS)}")
    medium = Media(kind, str(path))
    try:
        open_image(medium) if kind == "image" else open_clip(medium, count=1)
    except BadMediaError as error:
        raise UserError(f"--images {path}: {error}") from error
    return medium
