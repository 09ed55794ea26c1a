"""Checks of a family's adapter that anyone can run on their own.

    python -m mmrl.pipelines.diffusion.contract my-recipe.yaml

The recipe names the adapter (``pipeline: my_family.py``), a small checkpoint and LoRA. Each check returns a sentence
with the figure it found, or raises ``AssertionError`` with what is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.media import Media
from mmrl.core.media.images import png_bytes
from mmrl.core.randomness import noise
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.logging.card import What
from mmrl.models.policy import Policy

from . import export
from .flow import FlowPipeline
from .negative import Negatives

PROMPTS = ("a red circle", "two blue squares beside a green triangle")
CLOSE = 1e-5


NEGATIVE = "a green star"
"""Of the recipe, where a check is of negative prompts; the second of PROMPTS then has one of its own."""
OWN_NEGATIVE = "red"


class Case:
    """A pipeline of a recipe on its device (``auto`` is the CPU), its policy, and four samples of two prompts."""

    def __init__(self, recipe: Recipe) -> None:
        sampling = recipe.denoising.model_copy(update={"same_initial_noise": False})  # each sample its own picture
        self.recipe = recipe = recipe.model_copy(update={"sampling": sampling})
        family = mmrl.load("pipelines", recipe.pipeline)
        self.device = torch.device("cpu" if recipe.device == "auto" else recipe.device)
        self.pipeline: FlowPipeline = family.build(recipe, recipe.model.path, self.device)
        self.policy = Policy(self.pipeline.policy, recipe.optim, total_updates=2)
        media = [tuple(_picture(2 * i + n) for i in range(self.pipeline.adapter.pictures)) for n in range(2)]
        prompts = [Prompt(str(n), text, media=media[n]) for n, text in enumerate(PROMPTS)]
        self.slots = [Slot(0, i // 2, 0, prompts[i // 2]) for i in range(4)]
        self.ids = [SampleId(0, i // 2, 0, i % 2) for i in range(4)]
        self.pipeline.encode(self.slots)
        self.heard: dict[str, Tensor] = {}
        """The sound ``[2, channels, N]`` of what was drawn last, of clips with sound."""

    def drawn(self) -> Tensor:
        """Pictures ``[2, 3, H, W]``, or clips, in [0, 1], one of each prompt, without noise between steps. They are
        drawn one at a time: matrices then have the shapes that the stock pipeline's have, on which their last
        digits hang."""
        rows = [self.pipeline.sample([s], [i], [], seed=5) for s, i in self._of_each_prompt()]
        if self.pipeline.adapter.sounds:
            with torch.no_grad():
                self.heard["ours"] = torch.cat([self.pipeline.adapter.decode_sound(row.clean).cpu() for row in rows])
        return torch.cat([self.pipeline.images(row).cpu() for row in rows])

    def stock(self, pipe: Any) -> Tensor:
        """The same pictures by the stock pipeline's own call."""
        adapter, sampling = self.pipeline.adapter, self.recipe.denoising
        pipe.set_progress_bar_config(disable=True)
        if adapter.condition is not None or adapter.guider is not None:
            exec(adapter.prepare, {"pipe": pipe})  # what a model card shows
        pipe.to(self.device)
        size = {"height": sampling.height, "width": sampling.width} if adapter.sized else {}
        rows = []
        for slot, name in self._of_each_prompt():
            drawn = noise(5, [name], "initial", self.pipeline.shape).to(self.device)
            given = size | adapter.call() | self._given(slot.prompt, pipe)
            latents = adapter.given_noise(drawn)
            given |= latents if adapter.takes_noise else {}
            steps = {"num_inference_steps": sampling.steps, "output_type": "pt"}
            with nullcontext() if adapter.takes_noise else _drawing(pipe, list(latents.values())):
                rows.append(pipe(prompt=slot.prompt.text, **steps, **given))
        if adapter.sounds:
            self.heard["stock"] = torch.cat([row.audio for row in rows]).float().cpu()
        return torch.cat([row.images if adapter.makes == "image" else row.frames for row in rows]).float().cpu()

    def gap(self, ours: Tensor, theirs: Tensor) -> float:
        """The largest difference of pictures, or of the sound that was drawn with them."""
        pictures = (ours - theirs).abs().max().item()
        sound = (self.heard["ours"] - self.heard["stock"]).abs().max().item() if self.heard else 0.0
        return max(pictures, sound)

    def _of_each_prompt(self) -> list[tuple[Slot, SampleId]]:
        return list(zip(self.slots, self.ids, strict=True))[::2]

    def _given(self, prompt: Prompt, pipe: Any) -> dict[str, Any]:
        """What the stock call takes of a prompt beside its text."""
        adapter, negative = self.pipeline.adapter, self.pipeline.negatives.given(prompt)
        code = {} if negative is None else adapter.call_negative(negative)
        given = {name: eval(text, {"pipe": pipe}) for name, text in code.items()}  # what a model card shows
        return given | (adapter.given_sources(adapter.sources(prompt)) if adapter.edits else {})

    def give_negatives(self, common: str, own: str) -> None:
        """Give negative prompts: ``common`` as the recipe does, and ``own`` as the record of the second prompt does."""
        sampling = self.recipe.denoising.model_copy(update={"negative_prompt": common})
        self.pipeline.negatives = Negatives(self.pipeline.adapter, sampling, used=True)
        second = replace(self.slots[2].prompt, negative_prompt=own)
        self.slots[2:] = [replace(slot, prompt=second) for slot in self.slots[2:]]
        self.pipeline.encode(self.slots)

    def push(self) -> None:
        """Move every trainable weight, so that LoRA is not the identity."""
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in self.policy.trainable.values():
                parameter.add_(0.05 * torch.randn_like(parameter))


def _drawing(pipe: Any, drawn: Sequence[Tensor]) -> AbstractContextManager[object]:
    """A stock pipeline that draws those of ``drawn`` where it draws noise, each by its shape."""
    by_shape = {tuple(one.shape): one for one in reversed(drawn)}
    return patch.object(sys.modules[type(pipe).__module__], "randn_tensor", lambda shape, **_: by_shape[tuple(shape)])


def _picture(seed: int) -> Media:
    """Noise, 40 x 32 pixels."""
    pixels = torch.randint(256, (32, 40, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Media("image", data=png_bytes(Image.fromarray(pixels.numpy())))


def sampling_is_the_stock_pipelines(recipe: Recipe) -> str:
    """Without noise, and with the same initial noise, the pictures are those of the stock call."""
    case = Case(recipe)
    ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    gap = case.gap(ours, theirs)
    assert gap < CLOSE, f"pixels differ from the stock pipeline's by {gap:.2g}"
    assert ours.std() > 1e-3, "the pictures are of one colour: random weights that are all but 0 show nothing"
    return f"pixels within {gap:.1g} of the stock pipeline's"


def negative_prompts_are_the_stock_pipelines(recipe: Recipe) -> str:
    """As above with a negative prompt of the recipe and, before it, of a record. A family without guidance by two
    predictions, or a recipe without guidance, has none to compare."""
    case = Case(recipe)
    if not case.pipeline.guided:
        return "no guidance by two predictions, so no negative prompts"
    none = case.drawn()
    case.give_negatives(NEGATIVE, OWN_NEGATIVE)
    ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    gap, moved = case.gap(ours, theirs), (ours - none).abs().flatten(1).amax(1).tolist()
    assert gap < CLOSE, f"pixels with negative prompts differ from the stock pipeline's by {gap:.2g}"
    assert min(moved) > 10 * CLOSE, f"negative prompts change the two pictures by no more than {moved}"
    return f"pixels within {gap:.1g} of the stock pipeline's, moved by {min(moved):.2g} or more"


def first_ratio_is_one(recipe: Recipe) -> str:
    """Replaying a sampled step gives the log-prob that was recorded, to the bit."""
    case = Case(recipe)
    case.push()
    rows = case.pipeline.sample(case.slots, case.ids, case.pipeline.noisy_steps(0), seed=0)
    assert rows.log_probs is not None
    for action in range(rows.log_probs.shape[1]):
        new = case.pipeline.replay(rows, [action], frozenset({"log_probs"}), case.policy.using)["log_probs"]
        gap = (new.detach()[:, 0] - rows.log_probs[:, action]).abs().max().item()
        assert gap == 0, f"log-probs of noisy step {action} differ between sampling and replay by {gap:.2g}"
    return f"{rows.log_probs.shape[1]} noisy steps replayed to the bit"


def two_steps_move_every_parameter(recipe: Recipe, but: Sequence[str] = ()) -> str:
    """Two updates move all that trains; ``but`` are parts of names that the architecture never reads."""
    case = Case(recipe)
    before = {name: p.detach().clone() for name, p in case.policy.trainable.items()}
    torch.manual_seed(0)
    steps = case.pipeline.noisy_steps(0)[: None if case.pipeline.adapter.also_trains else 1]
    for seed in range(2):
        rows = case.pipeline.sample(case.slots, case.ids, steps, seed=seed)
        new = case.pipeline.replay(rows, range(len(steps)), frozenset({"log_probs"}), case.policy.using)
        case.policy.backward((new["log_probs"] * torch.randn(4, len(steps)).to(case.device)).sum())
        case.policy.apply()
    still = [name for name, p in case.policy.trainable.items() if torch.equal(p.detach(), before[name])]
    unexpected = [name for name in still if not any(part in name for part in but)]
    assert not unexpected, f"not moved by two updates: {', '.join(unexpected[:8])} ({len(unexpected)} in all)"
    unused = [part for part in but if not any(part in name for name in still)]
    assert not unused, f"said to be never read, but moved: {', '.join(unused)}"
    return f"{len(before) - len(still)} of {len(before)} tensors moved"


def exported_lora_draws_the_same(recipe: Recipe, what: What = "lora") -> str:
    """A fresh stock pipeline with the exported LoRA draws what the policy draws, and not what the base draws."""
    from peft import PeftModel

    case = Case(recipe)
    base = case.drawn()
    case.push()
    ours = case.drawn()
    adapter = case.pipeline.adapter
    with tempfile.TemporaryDirectory() as folder:
        case.pipeline.write(Path(folder), what)
        kind: type[diffusers.DiffusionPipeline] = getattr(diffusers, adapter.pipeline)
        pipe = kind.from_pretrained(recipe.model.path, dtype=torch.float32, **adapter.options)
        pipe.scheduler = adapter.pipe.scheduler
        if export.loads_lora(adapter):
            exec(export.loading_code(adapter, folder), {"pipe": pipe})  # what a model card shows
        else:
            denoiser = PeftModel.from_pretrained(getattr(pipe, adapter.trains), folder)
            setattr(pipe, adapter.trains, denoiser)
        theirs = case.stock(pipe)
    gap, moved = case.gap(ours, theirs), (ours - base).abs().max().item()
    assert moved > 100 * CLOSE, f"the LoRA changes pixels by no more than {moved:.2g}"
    assert gap < CLOSE, f"pixels of the exported LoRA differ by {gap:.2g}"
    return f"pixels within {gap:.1g} of the exported LoRA's, which moved them by {moved:.2g}"


CHECKS: tuple[Callable[[Recipe], str], ...] = (
    sampling_is_the_stock_pipelines,
    negative_prompts_are_the_stock_pipelines,
    first_ratio_is_one,
    two_steps_move_every_parameter,
    exported_lora_draws_the_same,
)


def main() -> int:
    """Run every check on the recipe that is named; returns how many failed."""
    recipe = load_recipe(sys.argv[1:2], sys.argv[2:]).recipe
    failed = 0
    for check in CHECKS if recipe.model.lora else CHECKS[:-1]:
        try:
            print(f"ok      {check.__name__}: {check(recipe)}")
        except AssertionError as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
