"""Bytes of samples through any one process, and its peak memory, as pictures and controllers grow.

    OMP_NUM_THREADS=1 python benchmarks/controller_bytes.py --json out.json [--pixels 64 256 1024] [--controllers 1 2 8]

Needs the extra ``ray`` and Linux. One step of Flow-GRPO on a small Stable Diffusion 3 with random
weights, the same prompts, noise and group sizes in every arm, two samples of one prompt to a worker:

- ours      controllers that run the loop side by side: samples stay, numbers and gradients cross
- single    one controller: workers return pictures and trajectories through Ray's object store, it scores them,
            computes advantages, and sends the rows to train on back
- metadata  one controller that sees references and rewards alone: pictures go from the object store to a scorer beside
            each worker, trajectories to the worker that trains on them

Sample bytes are those of pictures (uint8) and of a trajectory's tensors; prompts' embeddings, which the other arms
would have to move too, are left out in their favour. Gradients are added over all workers in the same way and stand in
a column of their own. Of ``ours`` also the processor time of a step that is neither model call nor collective.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusion_arms as arms
import stepping
import torch
from stepping import CPU, resident, say

from mmrl.algorithms.objective import Scored, advantages_of, sampler
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.clock import Clock
from mmrl.core.trajectory import DenoisingRows, Rows
from mmrl.logging.environment import environment
from mmrl.models.protocol import of_pictures
from mmrl.step.batch import Batch, chunks, rows_of_update, samples_of
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.objectives import load_objective
from mmrl.step.step_context import StepContext
from mmrl.training.loop import train_step

ARMS = ("ours", "single", "metadata")
STEPS = 2
"""Of each arm; the last is counted."""


def size_of(pixels: int, controllers: int) -> arms.Size:
    """A picture of that many pixels a side, decoded from latents of an eighth of it."""
    transformer = {
        "sample_size": pixels // 8,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "caption_projection_dim": 64,
        "pos_embed_max_size": max(4, pixels // 16),
    }
    return arms.Size(transformer, (8, 16, 16, 16), pixels, 2, 1, prompts=controllers, group=2, micro_batch=2)


# -- a worker ----------------------------------------------------------------------------------------------------------


class Worker:
    """A controller of ours, or one that samples and trains for another; Ray makes it an actor."""

    def __init__(self, pixels: int, rank: int, size: int, model: str, port: int) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        torch.set_num_threads(1)
        self.peers = Group(rank, size, "127.0.0.1", port)
        self.run = arms.make_run(size_of(pixels, size), Path(model), 4, Controller(0, rank, size, self.peers))
        self.moved = 0
        stepping.give_back()
        self.built = resident("VmRSS")

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        self.moved = 0
        self.before = Counter(self.peers.sent)

    def figures(self) -> dict[str, Any]:
        sent = Counter(self.peers.sent) - self.before
        gradients, numbers = sent.pop("gradients", 0), sent.pop("numbers", 0) + sent.pop("statistics", 0)
        peak = resident("VmHWM") - self.built
        return {"samples": self.moved + sent.total(), "gradients": gradients, "numbers": numbers, "peak": peak}

    def step(self, number: int) -> dict[str, float]:
        """A step of our loop; seconds of the main thread by what they were for."""
        with spent(self.run) as of:
            began, wall = time.thread_time(), time.perf_counter()
            train_step(self.run, number, Clock(CPU))
            own = time.thread_time() - began - sum(of.values())
        return {"own": own, "wall": time.perf_counter() - wall, **of}

    def sample(self, number: int) -> tuple[DenoisingRows, list[Any]]:
        """Rows and pictures of this worker's slots, as arrays."""
        import numpy as np

        run = self.run
        slots = run.controller.slots(number, run.prompts, run.recipe.train.prompts_per_step)
        self.keys = run.pipeline.encode(slots)
        rows = samples_of(slots, run.recipe.train.group_size)
        made = []
        with run.policy.using(sampler(run.objective, 0)):
            for chunk in chunks(rows, run.recipe.train.micro_batch_size):
                noisy = of_pictures(run.pipeline).noisy_steps(number)
                made.append(run.pipeline.sample([s for s, _ in chunk], [i for _, i in chunk], noisy, 0))
        pictures = [s.image for t in made for s in run.pipeline.samples(t, frozenset({"image"}))]
        out = Rows.join(made), [np.asarray(p) for p in pictures]
        self.moved += nbytes(out)
        return out

    def put(self, number: int) -> list[Any]:
        """References to this worker's trajectory and pictures, which stay in the object store."""
        import ray

        return [ray.put(part) for part in self.sample(number)]

    def update(self, rows: DenoisingRows, advantages: torch.Tensor) -> None:
        """Train on rows that came through the object store."""
        run, n = self.run, len(advantages)
        self.moved += nbytes((rows, []))
        lengths = torch.full((n,), float(run.objective.entries or len(of_pictures(run.pipeline).noisy_steps(0))))
        places = [(0, i) for i in range(n)]
        batch = Batch([rows], places, advantages.clone(), torch.ones(n), lengths, self.keys)
        total = run.controller.count(run.objective.loss_denominator(batch.weights, batch.lengths))
        for micro_batch in split_micro_batches(run, batch, rows_of_update(batch, 0, 1)):
            new = run.pipeline.replay(micro_batch.rows, micro_batch.entries, run.objective.needs, run.policy.using)
            run.policy.backward(run.objective.loss(new, micro_batch.old, total).value)
        run.policy.apply()
        run.pipeline.features.release(self.keys)


class Scorer:
    """A reward's process of the arm ``metadata``: fetches pictures, returns numbers."""

    def __init__(self) -> None:
        stepping.give_back()
        self.built = resident("VmRSS")
        self.reset()

    def reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.moved = 0

    def figures(self) -> dict[str, Any]:
        return {"samples": self.moved, "gradients": 0, "numbers": 0, "peak": resident("VmHWM") - self.built}

    def score(self, pictures: list[Any]) -> list[float]:
        self.moved += nbytes((None, pictures))
        return scores_of(pictures)


def scores_of(pictures: list[Any]) -> list[float]:
    """The JPEG reward of the recipe: minus the size in kB."""
    import io

    from PIL import Image

    sizes = []
    for picture in pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=95)
        sizes.append(-file.tell() / 1000)
    return sizes


def nbytes(out: tuple[DenoisingRows | None, list[Any]]) -> int:
    tensors = [t for t in (vars(out[0]).values() if out[0] is not None else ()) if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors) + sum(p.nbytes for p in out[1])


class spent:
    """Processor seconds of the main thread in model calls (``models``) and in collectives, while the block runs."""

    def __init__(self, context: StepContext) -> None:
        self.of = {"models": 0.0, "collectives": 0.0}
        models = [*arms.targets(context).values(), (context.policy, "backward"), (context.policy.optimizer, "step")]
        self.watched = [(owner, method, "models") for owner, method in models]
        self.watched += [(context.controller.peers, method, "collectives") for method in ("sum", "gather")]
        self._within = False

    def _timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return function(*args, **kwargs)
            self._within, began = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._within = False
                self.of[kind] += time.thread_time() - began

        return call

    def __enter__(self) -> dict[str, float]:
        for owner, method, kind in self.watched:
            setattr(owner, method, self._timed(getattr(owner, method), kind))
        return self.of

    def __exit__(self, *_: object) -> None:
        for owner, method, _ in self.watched:
            delattr(owner, method)


# -- the arms ----------------------------------------------------------------------------------------------------------


def ours(pixels: int, size: int, model: Path) -> dict[str, Any]:
    """Controllers side by side, each in a process of its own; no Ray."""
    port, script = free_port(), [sys.executable, __file__, "--child"]
    started = [
        subprocess.Popen([*script, f"{pixels} {rank} {size} {port} {model}"], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=3600)[0] for process in started]
        found = [json.loads(words.splitlines()[-1]) for words in said]
    finally:
        for process in started:
            process.kill()
    return {"processes": found, "time": {k: [one["time"][k] for one in found] for k in found[0]["time"]}}


def child(words: str) -> None:
    """One controller of ``ours``."""
    pixels, rank, size, port, model = words.split()
    worker = Worker(int(pixels), int(rank), int(size), model, int(port))
    times = {}
    for number in range(STEPS):
        worker.reset()
        times = worker.step(number)
    print(json.dumps(worker.figures() | {"time": times}))


def with_ray(arm: str, pixels: int, size: int, model: Path) -> dict[str, Any]:
    """One controller, this process, before ``size`` workers in Ray."""
    import ray

    port = free_port()
    made = ray.remote(Worker).options(num_cpus=1)
    workers = [made.remote(pixels, rank, size, str(model), port) for rank in range(size)]
    scorers = [ray.remote(Scorer).options(num_cpus=1).remote() for _ in range(size)] if arm == "metadata" else []
    recipe = arms.make_recipe(size_of(pixels, size), model, 4)
    objective, group = load_objective(recipe), recipe.train.group_size
    ray.get([one.reset.remote() for one in (*workers, *scorers)])
    stepping.give_back()
    built, moved, stored = resident("VmRSS"), 0, 0
    for number in range(STEPS):
        ray.get([one.reset.remote() for one in (*workers, *scorers)])
        Path("/proc/self/clear_refs").write_text("5")
        moved, stored = 0, created()
        if arm == "single":
            parts = ray.get([worker.sample.remote(number) for worker in workers])
            rewards = [score for _, pictures in parts for score in scores_of(pictures)]
            moved += sum(nbytes(part) for part in parts)
            rows = [part[0] for part in parts]
            moved += sum(nbytes((one, [])) for one in rows)
        else:
            refs = ray.get([worker.put.remote(number) for worker in workers])
            asked = [scorer.score.remote(pictures) for scorer, (_, pictures) in zip(scorers, refs, strict=True)]
            rewards = [score for scores in ray.get(asked) for score in scores]
            rows = [ref[0] for ref in refs]
        groups = torch.arange(size).repeat_interleave(group)
        values = advantages_of(objective)(Scored(torch.tensor(rewards, dtype=torch.float64), groups)).values
        mine = values.split(group)
        ray.get([worker.update.remote(*given) for worker, *given in zip(workers, rows, mine, strict=True)])
        stored = created() - stored
        parts = rows = None
    own = {"samples": moved, "gradients": 0, "numbers": 0, "peak": resident("VmHWM") - built}
    found = [own, *ray.get([one.figures.remote() for one in (*workers, *scorers)])]
    for one in (*workers, *scorers):
        ray.kill(one)
    return {"processes": found, "stored": stored}


def created() -> int:
    """Bytes ever put into Ray's object stores, by its own count."""
    import ray
    from ray._private.internal_api import node_stats

    found = [node_stats(n["NodeManagerAddress"], n["NodeManagerPort"], False) for n in ray.nodes() if n["Alive"]]
    return sum(stats.store_stats.cumulative_created_bytes for stats in found)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


# -- results -----------------------------------------------------------------------------------------------------------


def largest(found: dict[str, Any], kind: str) -> float:
    return max(one[kind] for one in found["processes"])


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: a row per picture size, number of controllers and arm; then the goals."""
    lines = [
        "| pixels | controllers | arm | sample bytes through one process | numbers | gradients | peak MiB over built |",
        "|---|---|---|---|---|---|---|",
    ]
    for place, found in results.items():
        for arm, one in found.items():
            samples, numbers, gradients, peak = (
                largest(one, kind) for kind in ("samples", "numbers", "gradients", "peak")
            )
            cells = [f"{samples:,}", f"{numbers:,}", f"{gradients:,}", f"{peak:.1f}"]
            lines.append(f"| {' | '.join([*place.split(' x '), arm, *cells])} |")
    lines.append("")
    for place, found in results.items():
        if {"ours", "single"} <= found.keys():
            few = max(1, largest(found["ours"], "samples") + largest(found["ours"], "numbers"))
            many = largest(found["single"], "samples")
            lines.append(
                f"- {place}: single / ours (numbers counted in) = {many / few:,.0f} (goal at 1024: 100 or more)"
            )
        if "ours" in found:
            times = found["ours"]["time"]
            own, wall = statistics.mean(times["own"]), statistics.mean(times["wall"])
            lines.append(
                f"- {place}: our own processor time {own * 1000:.0f} ms of a step of {wall:.1f} s ({own / wall:.1%}); "
                f"of a step of 10 s {own / 10:.2%} (goal: below 2 %)"
            )
    return lines


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pixels", nargs="+", type=int, default=[64, 256, 1024], help="a side, multiples of 32")
    made.add_argument("--controllers", nargs="+", type=int, default=[1, 2, 8])
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    made.add_argument("--json", "--out", type=Path, help="write every single figure here")
    made.add_argument("--child", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    torch.set_num_threads(1)
    if arguments.child:
        child(arguments.child)
        return
    result: dict[str, Any] = {"command": " ".join(sys.argv), "environment": environment(), "results": {}}
    if set(arguments.arms) - {"ours"}:
        import ray

        cpus = 2 * max(arguments.controllers)
        options: dict[str, Any] = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        ray.init(log_to_driver=False, **options)
    for pixels in arguments.pixels:
        for size in arguments.controllers:
            found = result["results"][f"{pixels} x {size}"] = {}
            with tempfile.TemporaryDirectory() as scratch:
                arms.write_model(size_of(pixels, size), Path(scratch) / "model")
                for arm in arguments.arms:
                    given = pixels, size, Path(scratch) / "model"
                    found[arm] = ours(*given) if arm == "ours" else with_ray(arm, *given)
                    say(f"{pixels} pixels, {size} controllers, {arm}: {largest(found[arm], 'samples'):,} bytes")
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1))
    print("\n".join(table(result["results"])))


if __name__ == "__main__":
    main()
