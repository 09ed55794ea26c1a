"""Make the page of cards: ``python tools/cards_page.py > docs/reference/cards.md`` (some minutes on one core).

Each recipe of a published model is planned for a card of 8, 12, 16 and 24 GB with the changes of ``STEPS``, one after
another, until it fits. All settings are written out: to let the plan choose them takes longer. Nothing is
downloaded and no GPU is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from mmrl.commands.arguments import read_recipe
from mmrl.config.sampling import TextSampling
from mmrl.core.durations import duration
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.gpus import Gpu, gpu_of
from mmrl.planner.plan import plan
from mmrl.planner.plan_data import Plan

CARDS = ("rtx3070-8g", "rtx3060-12g", "rtx4060ti-16g", "rtx3090-24g")
RECIPES = (
    "sd15",
    "sdxl",
    "sd35-medium",
    "sana15-1.6b",
    "flux2-klein-base-4b",
    "z-image",
    "flux-dev",
    "qwen-image",
    "wan21-1.3b",
    "wan22-ti2v-5b",
    "qwen25-0.5b-gsm8k",
    "qwen25-vl-3b",
)
ONE = ["train.micro_batch_size=1", "performance.compile=false"]
SMALL = [*ONE, "model.gradient_checkpointing=true", "model.offload=true", "performance.offload_optimizer=true"]
ROWS = "sampling.batch_size=8"
STEPS = {
    "plain": [*ONE, "model.gradient_checkpointing=false", "model.offload=false"],
    "small": SMALL,
    "int8": [*SMALL, "model.quantize=int8"],
    "nf4": [*SMALL, "model.quantize=nf4"],
}
HEAD = """# Cards of 8 to 24 GB

Which recipe trains on one card, by `mmrl plan`; **no card has run them**. `python tools/cards_page.py` makes the page.
A cell has what the recipe needs, its peak of memory and the estimated time of a step, at the size and the numbers of
samples that the recipe has: a step of some hundreds of pictures is long on a small card, and fewer make it shorter
(`train.prompts_per_step`, `train.group_size`).

- *plain*: `mmrl train RECIPE controllers=1 {plain}`
- *small*: `mmrl train RECIPE controllers=1 {small}`
- *int8*, *nf4*: small, and `model.quantize=int8` or `nf4`; a file of these keys is `examples/cards/12gb.yaml`
- *-*: none of these fits

Of text, `{rows}` takes the place of `model.offload`.

Without these words the plan chooses settings for the card, with which a step is often faster:
`mmrl plan RECIPE --gpu {card}`.

| recipe | size | {cards} |
|---|---|{rules}
"""


def fitting(recipe: str, card: Gpu) -> tuple[str, Plan] | None:
    """The first of ``STEPS`` with which ``recipe`` fits ``card``, and the plan; None where none does."""
    of_text = isinstance(read_recipe(recipe, []).recipe.sampling, TextSampling)
    for name, changes in STEPS.items():
        words = ["controllers=1", *changes]
        if of_text:  # there is nothing beside the policy to offload
            words = [ROWS if word.startswith("model.offload") else word for word in words]
        try:
            made = plan(read_recipe(recipe, words, gpu=card), gpu=card)
        except UserError as error:  # all weights train, and those of a quantised base cannot
            print(f"{recipe}, {name}: {error}", file=sys.stderr)
            continue
        if not made.problems:
            return name, made
        print(f"{recipe} on {card.name}, {name}: {made.problems[0][:200]}", file=sys.stderr)
    return None


def cell(found: tuple[str, Plan] | None) -> str:
    """What a card needs for a recipe."""
    if found is None:
        return "-"
    name, made = found
    peak = "" if made.peak is None else f", {made.peak.total / 2**30:.1f} GiB"
    return f"{name}{peak}" + ("" if made.time is None else f", {duration(made.time.step)}")


def size_of(made: Plan) -> str:
    """What a sample is."""
    sampling = made.recipe.sampling
    if isinstance(sampling, TextSampling):
        return f"{sampling.max_new_tokens} tokens"
    return f"{sampling.width} x {sampling.height}" + (f", {sampling.frames} frames" if sampling.frames else "")


def page(recipes: Sequence[str] = RECIPES, cards: Sequence[str] = CARDS) -> Iterator[str]:
    """The page, line by line, as Markdown."""
    allow_cpu_only()
    plain, small = (" ".join(STEPS[name]) for name in ("plain", "small"))
    rules = "---|" * len(cards)
    yield HEAD.format(plain=plain, small=small, rows=ROWS, card=cards[0], cards=" | ".join(cards), rules=rules)
    for recipe in recipes:
        row = [fitting(recipe, gpu_of(card)) for card in cards]
        size = next((size_of(found[1]) for found in row if found is not None), "")
        yield f"| `{recipe}` | {size} | " + " | ".join(cell(found) for found in row) + " |\n"


if __name__ == "__main__":
    for line in page(sys.argv[1:] or RECIPES):
        print(line, end="", flush=True)
