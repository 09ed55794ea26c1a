"""Seconds and peak memory of an update with ``fsdp`` over two ranks and with ``megatron`` over two (tensor parallel 2).

    OMP_NUM_THREADS=1 python benchmarks/backend_step.py --json out.json     # two CPU cores
    python benchmarks/backend_step.py --model /models/Qwen2.5-1.5B --rows 32 --new-tokens 512   # two GPUs

The same model, rows (random tokens; of one length, or from ``--shortest`` of it on), micro-batches and loss. With
``fsdp`` each rank takes every second micro-batch, padded; with ``megatron`` both compute all of them together, without
padding. Both arms live in processes of their own and take turns, one step each, so that ratios are taken within a
repeat. A step is

- forward_backward   log-probs of the responses and the backward pass, of all micro-batches
- gradients          bringing the gradient together, and its norm
- optimizer          AdamW
- gather             the whole model on every rank, as for sampling, and letting it go; not counted in the step

each the slower rank's. With ``fsdp`` gradients are summed within the backward pass. Memory is the peak over the steps,
of the rank that needs most: of the GPU where there is one, else resident beyond what the process held before the model
was built. Before anything is timed, loss and norm of the gradient of both arms must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import llm_arms as arms
import torch
from stepping import quartiles, say, spread

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot, TextRows
from mmrl.logging.environment import environment

BACKENDS = {
    "fsdp": ["train.backend=fsdp"],
    "megatron": ["train.backend=megatron", "train.tensor_parallel=2"],
}
PHASES = ("forward_backward", "gradients", "optimizer", "gather")
MARK = "@"
TOLERANCE = 1e-3


# -- a rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """Final class: one rank of a backend, with its rows."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        words = [f"model.path={chosen.model}", f"model.dtype={chosen.dtype}", "devices_per_controller=2"]
        words += [f"sampling.max_new_tokens={chosen.new_tokens}", "optim.schedule=constant"]
        words += [f"train.micro_batch_size={chosen.micro_batch}", *BACKENDS[chosen.backend]]
        self.before = resident()
        self.peers = Group(chosen.rank, 2, "127.0.0.1", chosen.port, devices=2)
        loaded = load_recipe(["sums"], words)
        self.run = build(loaded.recipe, Controller(0, 0, 1, self.peers))
        self.seconds: defaultdict[str, float] = defaultdict(float)
        weights, optimizer = self.run.policy.weights, self.run.policy.optimizer
        for owner, name, phase in (
            (weights, "gather_gradients", "gradients"),
            (weights, "norm", "gradients"),
            (optimizer, "step", "optimizer"),
        ):
            setattr(owner, name, self._timed(phase, getattr(owner, name)))
        self.count = chosen.rows * chosen.new_tokens
        n = chosen.micro_batch
        whole = rows_of(self.run, chosen.rows, chosen.new_tokens, chosen.shortest)
        mine = range(chosen.rank if weights.lockstep else 0, chosen.rows // n, 2 if weights.lockstep else 1)
        self.slices = [whole.rows(list(range(i * n, (i + 1) * n))) for i in mine]

    def step(self) -> dict[str, float]:
        """Seconds by phase, the loss of this rank's rows, the norm of the gradient, and peak MiB."""
        self.seconds.clear()
        policy, loss = self.run.policy, 0.0
        with self._phase("forward_backward"):
            for rows in self.slices:
                new = self.run.pipeline.replay(rows, [0], frozenset({"log_probs"}), policy.using)
                part = -(new["log_probs"] * rows.padded("action_mask")).sum() / self.count
                policy.backward(part)
                loss += part.item()
        norm = policy.apply()["optim/grad_norm"]
        with self._phase("gather"), policy.unsharded("current"):
            pass
        found = {**self.seconds, "loss": loss, "norm": norm, "mib": self._peak()}
        self._forget_peak()
        return found

    def _peak(self) -> float:
        """Since the step before."""
        if self.run.compute.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10 - self.before

    def _forget_peak(self) -> None:
        if self.run.compute.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            with self._phase(phase):
                return call(*given, **named)

        return timed

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[name] += self._now() - start

    def _now(self) -> float:
        if self.run.compute.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def rows_of(run: Any, count: int, new_tokens: int, shortest: float) -> TextRows:
    """The same on every rank: digits as prompts, and random tokens as responses, whose lengths are evenly spread from
    the fraction ``shortest`` of ``new_tokens`` on, in random order."""
    prompts = arms.prompts("train", count=count)
    slots = [Slot(0, n, 0, Prompt(p.id, p.text)) for n, p in enumerate(prompts)]
    keys = run.pipeline.encode(slots)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 100, (count, new_tokens), generator=random).to(run.compute.device)
    ids = [SampleId(0, n, 0, 0) for n in range(count)]
    lengths = torch.linspace(shortest, 1, count).mul(new_tokens).long()[torch.randperm(count, generator=random)]
    asked = [(key, run.pipeline.features.get(key)["input_ids"]) for key in keys]
    rows = [row[:n] for row, n in zip(tokens, lengths.tolist(), strict=True)]
    whole = torch.zeros(count, dtype=torch.bool, device=tokens.device)
    return TextRows.answers(slots, ids, asked, rows, whole, [torch.zeros_like(row).float() for row in rows])


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def serve(chosen: argparse.Namespace) -> None:
    """Make a step for every line that comes in."""
    rank = Rank(chosen)
    for _ in sys.stdin:
        print(MARK + json.dumps(rank.step()), flush=True)
    rank.peers.close()


# -- both arms ---------------------------------------------------------------------------------------------------------


class Backend:
    """Final class: the two ranks of an arm."""

    def __init__(self, name: str, given: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.name, self._ranks = name, list[subprocess.Popen[str]]()
        gpus = torch.cuda.device_count() > 1
        for rank in range(2):
            env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": f"{rank}"} if gpus else {})}
            words = [sys.executable, __file__, *given, f"--backend={name}", f"--rank={rank}", f"--port={port}"]
            self._ranks.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            )

    def step(self) -> dict[str, float]:
        """Of both ranks: the slower one's seconds, the sum of their losses where they had other rows."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print("go", file=rank.stdin, flush=True)
        said = [self._answer(rank) for rank in self._ranks]
        found = {name: max(one[name] for one in said) for name in said[0]}
        if self.name == "fsdp":
            found["loss"] = sum(one["loss"] for one in said)
        found["step"] = sum(found[phase] for phase in PHASES[:3])
        return found

    def _answer(self, rank: subprocess.Popen[str]) -> dict[str, float]:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(MARK):
                return json.loads(line[1:])
        raise SystemExit(f"a rank of {self.name} ended with status {rank.wait()}")

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(20)
            except subprocess.TimeoutExpired:
                rank.kill()


def measure(chosen: argparse.Namespace, given: list[str]) -> dict[str, list[dict[str, float]]]:
    """Every step's figures by arm; raises ``SystemExit`` where the first steps compute other things."""
    with ExitStack() as stack:
        made = {}
        for name in BACKENDS:
            made[name] = Backend(name, given)
            stack.callback(made[name].close)
        first = {name: arm.step() for name, arm in made.items()}
        for what in ("loss", "norm"):
            one, other = (first[name][what] for name in BACKENDS)
            say(f"{what}: {one:.6f} with fsdp, {other:.6f} with megatron")
            if abs(one - other) > TOLERANCE * abs(one):
                raise SystemExit(f"the arms do unequal work: {what} {one} and {other}")
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        for repeat in range(chosen.repeats):
            for name in sorted(made, reverse=bool(repeat % 2)):
                rows[name].append(made[name].step())
            say(f"step {repeat + 1} of {chosen.repeats}")
        return rows


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| phase | fsdp (s) | megatron TP2 (s) | megatron over fsdp |", "|---|---|---|---|"]
    for phase in ("step", *PHASES):
        fsdp, megatron = ([row[phase] for row in rows[name]] for name in BACKENDS)
        ratios = [b / a for a, b in zip(fsdp, megatron, strict=True)]
        lines.append(f"| {phase} | {spread(fsdp)} | {spread(megatron)} | {spread(ratios, 2)} |")
    peaks = {name: max(row["mib"] for row in rows[name]) for name in BACKENDS}
    share = peaks["megatron"] / peaks["fsdp"]
    lines.append(f"| peak MiB of a rank | {peaks['fsdp']:.0f} | {peaks['megatron']:.0f} | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [name for name, size in arms.SIZES.items() if size.kv_heads % 2 == 0]  # a head is not divided
    parser.add_argument("--size", choices=sizes, default="large", help="of a Qwen3 with random weights")
    parser.add_argument("--model", help="a Hugging Face directory in its place")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shortest", type=float, default=1.0, help="length of the shortest response, of the longest")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write every figure there")
    for hidden in ("--backend", "--rank", "--port"):
        parser.add_argument(hidden, type=str if hidden == "--backend" else int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rows % (2 * chosen.micro_batch):
        parser.error("--rows must be a multiple of twice --micro-batch, so that fsdp's ranks have equally many")
    os.environ["HF_HUB_OFFLINE"] = "1"
    allow_cpu_only()  # before transformers imports torchvision
    if chosen.backend:
        serve(chosen)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if chosen.model is None:
            arms.write_model(arms.SIZES[chosen.size], Path(scratch))
        given = [*sys.argv[1:], "--model", chosen.model or scratch]
        rows = measure(chosen, given)
    print(table(rows))
    if chosen.json:
        summary = {n: {p: quartiles([r[p] for r in of]) for p in ("step", *PHASES)} for n, of in rows.items()}
        found = {"command": sys.argv, "environment": environment(), "summary": summary, "rows": rows}
        chosen.json.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
