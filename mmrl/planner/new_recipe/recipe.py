"""The text of a first recipe for someone's own model, data and rewards (``mmrl init``): short, and with comments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mmrl.core.json_types import Json
from mmrl.planner.new_recipe.data import FirstData, in_recipe
from mmrl.planner.new_recipe.model import TEXTS, FirstModel, Modality

_OWN = ("batch_size",)
"""What of a shipped recipe's sampling belongs to its own batches."""


@dataclass(frozen=True)
class Wanted:
    """What the recipe is for. ``home``: the folder that it will lie in. ``rewards``: as the recipe names them; empty
    where ``offline``, an algorithm that samples nothing. ``lora``: adapters, not all weights. ``tools``:
    functions that the model can call."""

    name: str
    home: Path
    model: FirstModel
    data: FirstData
    rewards: list[str]
    algorithm: str
    device: str = "auto"
    lora: bool = True
    offline: bool = False
    tools: Sequence[str] = ()

    @property
    def texts(self) -> bool:
        """Whether its samples are tokens: texts, or pictures that a language model writes."""
        return self.model.modality in TEXTS or self.model.tokens is not None


_SIZES = {
    Modality.text: (8, 8, 4, 32),
    Modality.vision_language: (8, 8, 4, 32),
    Modality.pictures: (4, 8, 4, 16),
    Modality.clips: (2, 4, 2, 8),
}
"""Of a first run the prompts of a step, the samples of a group and of a micro-batch, and those of an evaluation: its
steps are short, and groups are large enough to compare samples."""
_TOKENS = {Modality.text: 256, Modality.vision_language: 128}


def name_of(file: Path) -> str:
    """The name of a recipe in ``file``."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).lstrip("-._") or "mine"


def text_of(wanted: Wanted) -> str:
    """The recipe as YAML."""
    lines = [
        f"# A first recipe for {Path(wanted.model.path).name}, by mmrl init. Its sizes make a first run short;",
        "# comments say what to raise when that run has worked. mmrl plan shows the memory that it needs.",
        f"name: {wanted.name}",
        f"device: {wanted.device}" + (" # a GPU where there is one" if wanted.device == "auto" else ""),
        "threads: null # of the CPU: as many as torch takes; a number bounds them",
        f"pipeline: {wanted.model.pipeline}",
        *_model(wanted),
        *_data(wanted),
        *_sampling(wanted),
        *_environment(wanted),
        *_rewards(wanted),
        *_algorithm(wanted),
        *_training(wanted),
    ]
    return "\n".join(lines) + "\n"


def _model(wanted: Wanted) -> Iterator[str]:
    like, given = wanted.model.like, wanted.model.given
    yield from (
        "model:",
        f"  path: {_yaml(in_recipe(given, wanted.home) if Path(given).exists() else wanted.model.path)}",
        "  dtype: auto # of the frozen weights: bfloat16 where the device computes with it, else float32",
    )
    if wanted.lora:
        shaped: Json = {"rank": 32, "alpha": 64}
        if like and like.same and isinstance(own := like.section("model").get("lora"), Mapping):
            shaped = own
        yield f"  lora: {_yaml(shaped)} # trains small adapters; without this line all weights train"
    yield "  gradient_checkpointing: true # less memory, and a slower update"
    recorded = like.values.get("architecture") if like and like.same else None
    if recorded and not wanted.model.readable:
        yield f"architecture: {recorded} # its sizes for mmrl plan, until the model is downloaded"


def _data(wanted: Wanted) -> Iterator[str]:
    data = wanted.data
    options: dict[str, Json] = dict(data.options)
    if data.renamed:
        options["columns"] = data.renamed
    yield from ("data:", f"  name: {_yaml(data.name)}")
    if options:
        held = " # a tenth of the records is held out, for evaluation" if "heldout" in options else ""
        yield from (f"  train: {_yaml(options)}{held}", f"  heldout: {_yaml(options)}")


def _sampling(wanted: Wanted) -> Iterator[str]:
    model = wanted.model
    like = model.like
    known: dict[str, Json] = dict(like.section("sampling")) if like else {}
    for key in _OWN:
        known.pop(key, None)
    comments: dict[str, str] = {}
    if model.tokens is not None and model.size is not None:
        comments = {"max_new_tokens": "the tokens of a picture of this size", "picture": "less is faster"}
        of: Json = {"height": model.size[0], "width": model.size[1]}
        made: dict[str, Json] = {"max_new_tokens": model.tokens, "picture": of}
        made |= known if like and like.same else {}
    elif wanted.texts:
        most = min(_TOKENS[model.modality], (model.context or 10**9) // 2)
        if isinstance(own := known.get("max_new_tokens"), int):
            most = min(own, most)
        comments = {"max_new_tokens": "longer responses are cut; raise it for long reasoning"}
        made = {"max_new_tokens": most, "temperature": 1.0} | known | {"max_new_tokens": most}
    else:
        same = like is not None and like.same
        made = {"steps": 10, "guidance_scale": 1.0, "height": 512, "width": 512} | known
        comments = {
            "steps": "denoising steps of training; few make it fast",
            "guidance_scale": "1 is without guidance, at half the cost",
        }
        if model.size and not same:
            made |= {"height": model.size[0], "width": model.size[1]}
            comments["height"] = "the size that the checkpoint was made for; less is faster"
        if like:
            kind = "for this model" if same else "for a model of the same family"
            comments["sde"] = f"the noise of training; as in the shipped recipe {like.name}, {kind}"
    yield "sampling:"
    yield from _section(made, comments)


def _environment(wanted: Wanted) -> Iterator[str]:
    if wanted.tools:
        most = min(4 * _TOKENS[wanted.model.modality], (wanted.model.context or 10**9) // 2)
        yield from (
            "environment: # the model can call these functions (docs/environments.md)",
            "  name: tools",
            f"  options: {_yaml({'tools': list(wanted.tools)})}",
            "  max_turns: 4 # a turn without a call is the answer",
            f"  max_tokens: {most} # of all turns and results together",
        )


def _rewards(wanted: Wanted) -> Iterator[str]:
    if not wanted.offline:
        yield "rewards: # their weighted sum counts; mmrl score tries one alone"
        yield from (f"  - name: {_yaml(name)}" for name in wanted.rewards)


def _algorithm(wanted: Wanted) -> Iterator[str]:
    like = wanted.model.like
    made: dict[str, Json] = {"type": wanted.algorithm}
    if like and like.section("algorithm").get("type") == wanted.algorithm:
        made |= like.section("algorithm")
    yield "algorithm:"
    yield from _section(made, {"type": "docs/algorithms.md lists others, with their settings"})


def _training(wanted: Wanted) -> Iterator[str]:
    prompts, group, micro, heldout = _SIZES[wanted.model.modality]
    compared = f"{group} # samples of a prompt, compared with one another"
    if wanted.offline:
        prompts, compared = 2 * prompts, "1 # records of pairs or responses are given"
    at_once = "auto # samples at once: what a GPU's memory holds, by the plan; 8 on a CPU"
    if wanted.device == "cpu":
        at_once = f"{micro} # samples at once: as many as memory holds; fewer change no result"
    rate, why = _rate(wanted)
    yield from (
        "train:",
        "  steps: 20 # a first look; hundreds for a result",
        f"  prompts_per_step: {prompts} # more make steps less noisy and longer",
        f"  group_size: {compared}",
        f"  micro_batch_size: {at_once}",
        "optim:",
        f"  lr: {rate:.1e} # {why}",
        "eval:",
        "  every: 5 # steps; also before the first",
        f"  samples: {heldout} # of held-out prompts; a few hundred for a smooth curve",
    )
    if not wanted.offline and not wanted.texts and wanted.model.like is not None:
        steps = wanted.model.like.section("eval").get("steps")
        if steps:
            yield f"  steps: {_yaml(steps)} # of denoising, as the model is used"


def _rate(wanted: Wanted) -> tuple[float, str]:
    """The learning rate, and why."""
    like = wanted.model.like
    if like and like.same:
        own = like.section("optim").get("lr")
        if isinstance(own, float) and bool(like.section("model").get("lora")) == wanted.lora:
            return own, f"as in the shipped recipe {like.name}"
        if isinstance(own, float) and wanted.lora and wanted.texts:
            return 1e-5, f"of LoRA; the shipped recipe {like.name} trains all weights (mmrl init --full) with {own:.1e}"
    if wanted.texts:
        return (1e-5, "of LoRA; all weights take about 1.0e-06") if wanted.lora else (1e-6, "LoRA takes ten times that")
    return (3e-4, "of LoRA; all weights take about 1.0e-05") if wanted.lora else (1e-5, "LoRA takes thirty times that")


def _section(values: Mapping[str, Json], comments: Mapping[str, str]) -> Iterator[str]:
    for key, value in values.items():
        said = f" # {comments[key]}" if key in comments else ""
        yield f"  {key}: {_yaml(value)}{said}"


def _yaml(value: Json) -> str:
    """``value`` on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
