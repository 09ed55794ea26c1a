"""CPU-seconds of training until held-out success reaches a target and stays there: ours, our variants, and a peer.

    python benchmarks/time_to_target.py --target 0.55 --json benchmarks/results/time_to_target.json \\
        --peer flow_grpo=PATH --arms "flow_grpo's settings" "5 steps"

The job is that of ``shapes-full``: the same model, prompts, verifier and 144 pictures a step for everybody. A run is
evaluated on the same held-out samples after every five steps. Its time is the CPU time of its training steps, of
all processes and without evaluations, up to the first of two evaluations in a row that reach the target. A run that
spends its budget first is censored: it is printed as more than its budget.

Every arm gets the same search: each learning rate with one seed for ``--search-seconds``, the better half of them with
twice the time, and so on until one is left. Then it trains the fresh ``--seeds`` with that rate. ``--json`` gets each
run as it ends, and runs that stand there are not done again. ``--peer`` trains with the peer's own sampling, log-prob
and advantage functions (``peer_flow_grpo.py``), with a moving average as ours; its evaluations are ours.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

from mmrl.report.environment import environment

RECIPE = "shapes-full"
MEASURE = "reward/shapes/success"
RATES = (7.5e-5, 1.5e-4, 3e-4, 6e-4)
COMMON = [
    *("train.steps=400", "model.dtype=float32", "optim.schedule=constant", "optim.ema_decay=0.9"),
    *("eval.grid=4", "checkpoint.every=400", "train.max_cpu_seconds=null"),
]
ARMS: dict[str, list[str]] = {
    "flow_grpo's settings": [],
    "5 steps": ["sampling.steps=5"],
    "5 steps, second order": ["sampling.steps=5", "sampling.solver=dpmsolver++"],
    "6 of 12 kept": ["midway={step: 3, group_size: 12}", "train.group_size=6"],
    "TempFlow weights": ["algorithm.step_weight=tempflow"],
    "2 updates": ["train.updates_per_step=2"],
    "dgpo": ["algorithm={type: dgpo}", "sampling.window=null", "sampling.same_initial_noise=false"],
}
"""Overrides of the recipe. The window of two noisy steps is Flow-GRPO-Fast's."""
PEERS = ("flow_grpo",)


@dataclass(frozen=True)
class Spec:
    """Final class; one run: an arm or ``peer:NAME``, and what it is given."""

    arm: str
    rate: float
    seed: int
    seconds: float
    target: float
    every: int
    samples: int

    @property
    def key(self) -> str:
        """The name of the run in the file."""
        asked = f"to {self.target:g} in {self.seconds:g} s, {self.samples} samples each {self.every} steps"
        return f"{self.arm}, rate {self.rate:g}, seed {self.seed}, {asked}"

    @property
    def overrides(self) -> list[str]:
        """Of the recipe, for ours and for a peer."""
        return [
            *COMMON,
            *ARMS.get(self.arm, ()),
            *(f"optim.lr={self.rate}", f"seed={self.seed}", f"eval.every={self.every}", f"eval.samples={self.samples}"),
        ]


def time_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """CPU-seconds of the first of two evaluations in a row that reach ``target``; None where there are none.

    ``curve``: CPU-seconds and success of each evaluation, in order.
    """
    reached = [value >= target for _, value in curve]
    for (seconds, _), now, after in zip(curve, reached, reached[1:], strict=False):
        if now and after:
            return seconds
    return None


def quality(curve: Sequence[tuple[float, float]]) -> float:
    """What the search compares: the mean success of the last two evaluations."""
    return mean(value for _, value in curve[-2:])


# -- a run, in a process of its own ------------------------------------------------------------------------------------


def trained(spec: Spec, root: Path) -> list[tuple[float, float]]:
    """The curve of one of our arms."""
    import mmrl

    curve: list[tuple[float, float]] = []

    class Watch(mmrl.Callback):
        spent = 0.0

        def on_step(self, training: Any, metrics: Mapping[str, Any]) -> None:
            self.spent = metrics["perf/cpu_seconds"]

        def on_evaluation(self, training: Any, metrics: Mapping[str, Any]) -> None:
            curve.append((self.spent, metrics[MEASURE]))
            if time_to(curve, spec.target) is not None or self.spent >= spec.seconds:
                training.stop("the target or the budget is reached")

    mmrl.train(RECIPE, spec.overrides, callbacks=[Watch()], out=root / "run")
    return curve


def trained_by_peer(spec: Spec, path: Path, root: Path) -> list[tuple[float, float]]:
    """The curve of flow_grpo's functions on the same models, prompts and verifier."""
    import peer_flow_grpo
    import torch

    from mmrl.config.loader import load_recipe
    from mmrl.config.schema import Recipe
    from mmrl.datasets.loading import load_prompts
    from mmrl.report.clock import Clock
    from mmrl.run import build
    from mmrl.training.evaluation import Evaluator

    recipe = Recipe.model_validate(load_recipe([RECIPE], spec.overrides).resolved())
    context = build(recipe, root)
    theirs = peer_flow_grpo.Theirs(peer_flow_grpo.load(path), context)
    theirs.reward = verifier({prompt.text: prompt for prompt in context.prompts})
    held_out = Evaluator(context, load_prompts(recipe, root, "heldout"), root)
    average = [p.detach().clone() for p in theirs.parameters]
    curve: list[tuple[float, float]] = []
    spent, step = 0.0, 0

    def swap() -> None:
        for p, a in zip(theirs.parameters, average, strict=True):
            kept = p.detach().clone()
            p.data.copy_(a)
            a.copy_(kept)

    while True:
        if step % spec.every == 0:
            swap()
            curve.append((spent, held_out.score(spec.samples)[0][MEASURE]))
            swap()
            if time_to(curve, spec.target) is not None or spent >= spec.seconds:
                return curve
        began = time.process_time()
        theirs.iterate(step, Clock(torch.device("cpu")))
        step += 1
        with torch.no_grad():
            decay = min(0.9, (1 + step) / (10 + step))
            for a, p in zip(average, theirs.parameters, strict=True):
                a.lerp_(p, 1 - decay)
        spent += time.process_time() - began


def verifier(prompts: Mapping[str, Any]) -> Any:
    """The verifier as the peer calls a reward: pictures ``[B, 3, H, W]`` in [0, 1] and texts to scores."""
    import mmrl

    judge = mmrl.load("rewards", "shapes")

    def call(images: Any, texts: Sequence[str], metadata: object) -> tuple[list[float], dict[str, Any]]:
        from PIL import Image

        pixels = (images.permute(0, 2, 3, 1) * 255).round().clamp(0, 255).byte().cpu().numpy()
        samples = [
            SimpleNamespace(prompt=prompts[text], image=Image.fromarray(p))
            for text, p in zip(texts, pixels, strict=True)
        ]
        return list(judge.score(samples, context=None)["score"]), {}

    return call


# -- the table ---------------------------------------------------------------------------------------------------------


class Runs:
    """The runs that are done, in a file; ``of`` does one that is not there."""

    def __init__(self, path: Path, peers: Mapping[str, Path]) -> None:
        self.path, self.peers = path, peers
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, spec: Spec) -> list[tuple[float, float]]:
        if spec.key not in self.rows:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "curve.json"
                peers = [f"--peer={name}={path}" for name, path in self.peers.items()]
                command = [sys.executable, __file__, "--one", json.dumps(asdict(spec)), "--json", str(out), *peers]
                with (Path(folder) / "log").open("w+") as log:
                    code = subprocess.run(
                        command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
                    ).returncode
                    if code:
                        log.seek(0)
                        sys.exit(f"{spec.key} failed:\n{log.read()[-2000:]}")
                curve = json.loads(out.read_text())
            self.rows[spec.key] = {"spec": asdict(spec), "curve": curve, "machine": environment()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows, indent=1))
            print(
                f"{spec.key}: {curve[-1][0]:.0f} CPU-seconds, success {curve[-1][1]:.3f}", file=sys.stderr, flush=True
            )
        return [(seconds, value) for seconds, value in self.rows[spec.key]["curve"]]


def search(arm: str, runs: Runs, given: argparse.Namespace) -> float:
    """The learning rate that is left of ``RATES`` by halving, on the search's seed."""
    rates, seconds = list(RATES), given.search_seconds
    while len(rates) > 1:
        # A target of 2 is never reached, so that each rate gets its whole time.
        found = {rate: quality(runs.of(spec(arm, rate, given.search_seed, seconds, 2.0, given))) for rate in rates}
        rates = sorted(rates, key=lambda rate: -found[rate])[: len(rates) // 2]
        seconds *= 2
    return rates[0]


def spec(arm: str, rate: float, seed: int, seconds: float, target: float, given: argparse.Namespace) -> Spec:
    """A run as the command line asks for it."""
    return Spec(arm, rate, seed, seconds, target, given.every, given.samples)


def line(arm: str, rate: float, curves: Sequence[Sequence[tuple[float, float]]], given: argparse.Namespace) -> str:
    """A row of the table: the time of each seed, and the median with censored runs as infinite."""
    times = [time_to(curve, given.target) for curve in curves]
    shown = ", ".join(f"> {given.seconds:.0f}" if t is None else f"{t:.0f}" for t in times)
    middle = median(math.inf if t is None else t for t in times)
    last = mean(quality(curve) for curve in curves)
    return f"| {arm} | {rate:g} | {shown} | {'not reached' if middle == math.inf else f'{middle:.0f}'} | {last:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--target", type=float, default=0.55, help="held-out success, fixed before the runs")
    parser.add_argument("--seconds", type=float, default=600, help="CPU-seconds of a run after which it is censored")
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    parser.add_argument("--samples", type=int, default=256, help="held-out pictures of an evaluation")
    parser.add_argument("--search-seconds", type=float, default=60)
    parser.add_argument("--search-seed", type=int, default=0)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PATH", help="flow_grpo's checkout")
    parser.add_argument("--json", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--one", help="train this run alone (used by the command itself)")
    given = parser.parse_args()
    peers = {name: Path(path) for name, _, path in (text.partition("=") for text in given.peer)}
    if other := sorted(set(peers) - set(PEERS)):
        sys.exit(
            f"--peer {other[0]}: only {', '.join(PEERS)} can train here; diffusion_step.py times the others' steps"
        )
    if given.one:
        one = Spec(**json.loads(given.one))
        with tempfile.TemporaryDirectory() as folder:
            name = one.arm.removeprefix("peer:")
            own = name == one.arm
            curve = trained(one, Path(folder)) if own else trained_by_peer(one, peers[name], Path(folder))
        given.json.write_text(json.dumps(curve))
        return
    runs = Runs(given.json, peers)
    print("| arm | rate | CPU-seconds to the target, by seed | median | success at the end |\n|---|---|---|---|---|")
    for arm in [*given.arms, *(f"peer:{name}" for name in peers)]:
        rate = search(arm, runs, given)
        curves = [runs.of(spec(arm, rate, seed, given.seconds, given.target, given)) for seed in given.seeds]
        print(line(arm, rate, curves, given), flush=True)


if __name__ == "__main__":
    main()
