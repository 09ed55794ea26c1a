"""Padding and seconds of an update with micro-batches packed by the dynamic programme, or filled by length.

    OMP_NUM_THREADS=1 python benchmarks/workload_balance.py --json out.json

The model and the micro-batch size of the recipe ``sums``. Cases:

- sums       the responses that the recipe's model writes to a step's prompts
- long_tail  the same prompts, with responses of random tokens whose lengths are lognormal (``--median``, ``--sigma``)

Arms, in turn within a repeat, each all forward and backward passes of one update over the same rows:

- filled  rows sorted by length, micro-batches filled up one after another
- packed  ours (``mmrl.controller.workload_balance.pack``)

Before any timing the gradients of both are checked to be equal within 1e-5. ``predicted`` is the ratio of
``mmrl.controller.workload_balance.packing_cost``, which the programme makes least; ``--launch`` changes what a
micro-batch costs in it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import stepping
import torch
from stepping import CPU, Arm, spread

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller.workload_balance import LAUNCH, pack, packing_cost, padded
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Rows, TextRows, text_rows
from mmrl.logging.environment import environment
from mmrl.rollout.collect import collect_batch
from mmrl.step.batch import Batch, chunks
from mmrl.step.micro_batches import micro_batches_of, sizes_of
from mmrl.step.step_context import StepContext
from mmrl.step.step_metrics import StepMetrics

CASES = ("sums", "long_tail")
Sizes = Sequence[Sequence[int]]


def filled_up(sizes: Sizes, most: int, tokens: int | None = None) -> list[list[int]]:
    """Sorted by length, each micro-batch filled up before the next is begun. ``tokens``: no budget here."""
    order = sorted(range(len(sizes)), key=lambda n: sum(sizes[n]))
    return list(chunks(order, most))


def sampled(context: StepContext) -> Batch:
    """A step's batch as the model writes it."""
    slots = context.controller.slots(0, context.prompts, context.recipe.train.prompts_per_step)
    return collect_batch(context, slots, 0, Clock(CPU), StepMetrics())


def long_tailed(context: StepContext, batch: Batch, median: float, sigma: float, longest: int) -> Batch:
    """``batch`` with responses of random tokens, of lognormal length up to ``longest``."""
    rng, whole = random.Random(0), text_rows(Rows.join(batch.micro_batches))
    lengths = [min(longest, max(1, round(rng.lognormvariate(math.log(median), sigma)))) for _ in range(len(whole))]
    asked = [(key, context.pipeline.features.get(key)["input_ids"]) for key in whole.features]
    drawn = torch.randint(0, 60, (sum(lengths),), generator=torch.Generator().manual_seed(0)).split(lengths)
    cut, none = torch.zeros(len(whole), dtype=torch.bool), [torch.zeros(n) for n in lengths]
    rows = TextRows.answers(whole.slots, whole.ids, asked, drawn, cut, none)
    places = [(0, n) for n in range(len(whole))]
    return replace(batch, micro_batches=[rows], places=places, lengths=torch.tensor(lengths).float(), prepared={})


def update(context: StepContext, batch: Batch, way: Any) -> torch.Tensor:
    """All forward and backward passes of an update with micro-batches cut by ``way``; its gradient ``[n]``."""
    own = way(sizes_of(context.pipeline, batch), context.recipe.train.micro_batch_size)
    total = context.objective.loss_denominator(batch.weights, batch.lengths)
    for micro_batch in micro_batches_of(context, batch, own, len(own)):
        new = context.pipeline.replay(
            micro_batch.rows, micro_batch.entries, context.objective.needs, context.policy.using
        )
        own = {"log_probs": new["log_probs"].detach()}
        context.policy.backward(context.objective.loss(new, micro_batch.old | own, total).value)
    found = torch.cat([p.grad.flatten() for p in context.policy.trainable.values() if p.grad is not None])
    for p in context.policy.trainable.values():
        p.grad = None
    return found


def compare(context: StepContext, batch: Batch, repeats: int, launch: float) -> dict[str, Any]:
    """Both arms on one batch. Raises ``ValueError`` where their gradients differ."""
    ways = {"filled": filled_up, "packed": partial(pack, launch=launch)}
    first, second = (update(context, batch, way) for way in ways.values())
    gap = ((first - second).norm() / first.norm()).item()
    if not gap <= 1e-5:
        raise ValueError(f"the gradients of the arms differ by {gap:.3g}")

    def arm(way: Any) -> Arm:
        def one(step: int, clock: Clock) -> None:
            with clock("train"):
                update(context, batch, way)

        return one

    seconds = stepping.measure({name: arm(way) for name, way in ways.items()}, repeats)
    sizes = sizes_of(context.pipeline, batch)
    out: dict[str, Any] = {"rows": len(sizes), "gradient_gap": gap, "arms": {}}
    for name, way in ways.items():
        made = way(sizes, context.recipe.train.micro_batch_size)
        laid = sum(padded([sizes[n] for n in index]) for index in made)
        out["arms"][name] = {
            "micro_batches": len(made),
            "padding": 1 - sum(map(sum, sizes)) / laid,
            "cost": packing_cost(sizes, made, launch=launch),
            "seconds": [row["train"] for row in seconds[name]],
        }
    ours, theirs = out["arms"]["packed"], out["arms"]["filled"]
    out["predicted"] = ours["cost"] / theirs["cost"]
    out["measured"] = [a / b for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
    return out


def table(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"### {name}: {found['rows']} rows"
    yield ""
    yield "| arm | micro-batches | padding | seconds of an update: median [quartiles] |"
    yield "|---|---|---|---|"
    for arm, one in found["arms"].items():
        yield f"| {arm} | {one['micro_batches']} | {one['padding']:.3f} | {spread(one['seconds'])} |"
    yield ""
    yield f"- packed / filled: predicted {found['predicted']:.3f}, measured **{spread(found['measured'])}**"


def main(words: Sequence[str]) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    made.add_argument("--repeats", type=int, default=9)
    made.add_argument("--prompts", type=int, default=32, help="of a step, 16 responses each")
    made.add_argument("--median", type=float, default=40.0, help="long_tail: tokens of a response")
    made.add_argument("--sigma", type=float, default=0.8, help="long_tail: standard deviation of the log-length")
    made.add_argument("--longest", type=int, default=400, help="long_tail: where responses are cut")
    made.add_argument("--launch", type=float, default=LAUNCH, help="tokens that a micro-batch costs beyond its rows")
    made.add_argument("--json", type=Path, help="write every single figure here")
    arguments = made.parse_args(words)
    torch.set_num_threads(1)
    loaded = load_recipe(["sums"], [f"train.prompts_per_step={arguments.prompts}", "train.packing=false"])
    run = build(loaded.recipe)
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/workload_balance.py", *words]),
        "environment": environment(),
        "cases": {},
    }
    print(f"{result['date']}, `{result['command']}`, one thread of {result['environment']['cpu']['name']}")
    batch = sampled(run)
    tail = long_tailed(run, batch, arguments.median, arguments.sigma, arguments.longest)
    for name in arguments.cases:
        found = compare(run, batch if name == "sums" else tail, arguments.repeats, arguments.launch)
        result["cases"][name] = found
        print("\n" + "\n".join(table(name, found)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
