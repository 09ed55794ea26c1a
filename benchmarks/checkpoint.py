"""Time that a step waits for a checkpoint: written at once, or copied and written while the run continues. Paired.

    python benchmarks/checkpoint.py                    # about 500 MB, 7 pairs
    python benchmarks/checkpoint.py --megabytes 50 --repeats 3 --ranks 2

The state is that of a policy of one large matrix under Adam: its weights and two moments. With ``--ranks`` above 1 the
weights lie in shards, and all ranks save together. Waits are of the slowest rank. Each save is through before the
next is timed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from mmrl.checkpoint.writer import Saver
from mmrl.config.schema import Optim
from mmrl.controller.peers import Group
from mmrl.core.checkpoint_reader import Checkpoint
from mmrl.models.policy import Policy
from mmrl.models.sharded import Sharded

WIDTH = 1000
LAYERS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ranks == 1 or chosen.rank is not None:
        measure(chosen)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen.folder = tempfile.mkdtemp(dir=chosen.folder)
    words = [f"--{k}={getattr(chosen, k)}" for k in ("megabytes", "repeats", "ranks", "folder")]
    each = [[sys.executable, __file__, *words, f"--rank={rank}", f"--port={port}"] for rank in range(chosen.ranks)]
    started = [subprocess.Popen(command) for command in each]
    try:
        if any(one.wait() for one in started):
            raise SystemExit("a rank failed")
    finally:
        for one in started:
            one.kill()
        shutil.rmtree(chosen.folder)


def measure(chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank = chosen.rank or 0
    peers = None if chosen.ranks == 1 else Group(rank, chosen.ranks, "127.0.0.1", chosen.port)
    policy = made(chosen.megabytes, peers)
    folder = Path(tempfile.mkdtemp(dir=chosen.folder) if peers is None else chosen.folder)
    ranks = None if peers is None else peers.again("gloo")
    savers = {kind: Saver(folder / kind, 1, ranks, leads=rank == 0) for kind in ("at once", "meanwhile")}
    waits: dict[str, list[float]] = {kind: [] for kind in savers}
    try:
        for step in range(chosen.repeats + 1):
            for kind in sorted(savers, reverse=bool(step % 2)):
                waits[kind].append(longest(save(savers[kind], policy, step, kind == "at once"), peers))
    finally:
        if peers is None:
            shutil.rmtree(folder)
    if rank == 0:
        show(chosen, waits)
    if peers is not None:
        peers.close()


def made(megabytes: int, peers: Group | None) -> Policy:
    """A policy with Adam's moments: ``megabytes`` of weights and moments over all ranks."""
    rows = megabytes * 10**6 // (3 * 4 * WIDTH * LAYERS)
    module = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS)))
    weights = None if peers is None or peers.ranks is None else Sharded(module, peers.ranks, peers.sent)
    policy = Policy(module, Optim(), 1, weights)
    for p in policy.trainable.values():
        p.grad = torch.ones_like(p)
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    return policy


def save(saver: Saver, policy: Policy, step: int, at_once: bool) -> float:
    """Seconds in which the run waits; what is written meanwhile is written before this returns."""
    tensors, numbers = policy.state()
    spread = {part: {k: policy.checkpoint_view(part, k, t) for k, t in of.items()} for part, of in tensors.items()}
    start = time.perf_counter()
    saver.begin(Checkpoint(step, spread, {"policy": numbers}))
    if at_once:
        saver.finish()
    waited = time.perf_counter() - start
    saver.finish()
    if saver.failed:
        raise SystemExit(saver.failed)
    return waited


def longest(seconds: float, peers: Group | None) -> float:
    return seconds if peers is None else max(peers.gather(seconds))


def show(chosen: argparse.Namespace, waits: dict[str, list[float]]) -> None:
    """The first pair warms up: memory for the copy is found there."""
    first = {kind: values[0] for kind, values in waits.items()}
    rest = {kind: values[1:] for kind, values in waits.items()}
    shares = [b / a for a, b in zip(rest["at once"], rest["meanwhile"], strict=True)]
    for kind, values in rest.items():
        print(f"{kind:10} {quartiles(values)} s a save (the first {first[kind]:.3f})")
    print(f"share of the wait that is left: {quartiles(shares)}, over {len(shares)} pairs")
    print(json.dumps({"megabytes": chosen.megabytes, "ranks": chosen.ranks, "waits": waits}))


def quartiles(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
