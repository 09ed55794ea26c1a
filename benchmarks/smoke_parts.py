"""Checks of ``gpu_smoke.py`` for weights in shards on one rank, and for rewards in the middle of sampling."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from smoke_models import decoder
from smoke_place import MissedError, Place
from smoke_recipes import GAP, PICTURES, TEXTS, settings, trained

MIB = 2**20
PLAIN = ["sampling.same_initial_noise=false", "sampling.window=null"]


REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [len(set(sample.text)) / 100 for sample in samples]
"""
"""The answers of a model of random weights differ in it."""


def shards(place: Place) -> dict[str, Any]:
    """A language model of 1.5B width, four layers, with FSDP2 over one rank: its rows of the checkpoint are read, two
    steps are trained, with both dtypes of gathering."""
    import torch

    folder, parameters = decoder(place)
    length = 16 if place.small else 128
    made = [f"model.path={folder}", "model.dtype=bfloat16", f"sampling.max_new_tokens={length}", *TEXTS]
    (place.folder / "reward.py").write_text(REWARD)
    made.append(f'rewards=[{{name: "{place.folder / "reward.py"}:score"}}]')
    figures: dict[str, Any] = {"parameters": parameters}
    gaps = []
    with alone() as controller:
        for dtype in ("float32", "bfloat16"):
            words = [*settings(place.device, 2), *made, "train.backend=fsdp", f"performance.gather_dtype={dtype}"]
            if place.gpu:
                torch.cuda.reset_peak_memory_stats()
            rows = stepped(words, controller)
            gap = max(row.get("mismatch/log_prob_gap", row["policy/first_ratio_max_dev"]) for row in rows)
            gaps.append(gap)
            figures[f"{dtype}: log-prob gap"] = float(f"{gap:.2g}")
            figures[f"{dtype}: grad norm"] = float(f"{rows[-1]['optim/grad_norm']:.3g}")
            if place.gpu:
                figures[f"{dtype}: peak MiB"] = round(torch.cuda.max_memory_allocated() / MIB)
                torch.cuda.empty_cache()
    if max(gaps) > GAP:
        raise MissedError(f"a gap is above {GAP}", figures)
    return figures


@contextmanager
def alone() -> Iterator[Any]:
    """A controller in a process group of one."""
    from mmrl.controller import Controller
    from mmrl.controller.peers import Group

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    peers = Group(0, 1, "127.0.0.1", port)
    try:
        yield Controller(0, 0, 1, peers)
    finally:
        peers.close()


def stepped(words: list[str], controller: Any) -> list[dict[str, float]]:
    """The metrics of two steps of ``sums``."""
    import torch

    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step

    loaded = load_recipe(["sums"], words)
    run = build(loaded.recipe, controller)
    try:
        return [train_step(run, step, Clock(torch.device(run.compute.device)))[0] for step in range(2)]
    finally:
        run.rewards.close()


def midway(place: Place) -> dict[str, Any]:
    """Groups that are pruned in the middle of sampling, and DGPO, two steps each."""
    figures = {}
    for recipe, label, words in (
        ("shapes-lora", "pictures", [*PICTURES, "midway={step: 4, group_size: 8}"]),
        ("shapes-lora", "dgpo", [*PICTURES, "algorithm={type: dgpo, noise_levels: 2}", *PLAIN]),
        ("sums", "text", [*TEXTS, "midway={tokens: 2, group_size: 8}"]),
    ):
        row = trained(place, recipe, *words)[-1]
        figures[f"{label}: grad norm"] = float(f"{row['optim/grad_norm']:.3g}")
    return figures
