"""What a held-out quality costs: eight algorithms and the peers' own code, with the same search for everybody.

    python benchmarks/cost_to_quality.py --json benchmarks/results/cost_to_quality.json \\
        --peer flow_grpo=PATH --peer flow_factory=PATH --peer trl
    python benchmarks/cost_to_quality.py --json FILE --job pictures --arms DGPO --seeds 11
    python benchmarks/cost_to_quality.py --json FILE --gpu --job pictures --arms DGPO --seeds 11 --search-seconds 30

The job on pictures is that of ``shapes-full``: the same model, prompts, verifier and 144 pictures a step for everybody;
the job on text is that of ``sums``. A run is evaluated on the same held-out samples after every five steps. Its cost
is that of its training steps without evaluations, up to the first of two evaluations in a row that reach the target:
CPU-seconds of all threads, and floating-point operations, which no machine changes. A run that spends its budget first
is censored: it is printed as more than its budget.

Every arm gets the same search: each of three learning rates with one seed for ``--search-seconds``; of more rates than
three, the better half would get twice the time, until one is left. Then it trains the fresh ``--seeds`` with that rate.
``--rate`` leaves the search out. ``--peer`` trains with the peer's own code (``cost_jobs.py``): flow_grpo's sampling,
log-prob and advantage functions, Flow-Factory's GRPO trainer, or TRL's ``GRPOTrainer``, which has to be installed.
Evaluations are ours for everybody, with eight steps of Euler's whatever an arm trains with.

``--json`` gets each run as it ends, and runs that stand there are not done again: a command that was stopped goes on,
and a row is printed as soon as it is complete. ``--print`` trains nothing. ``--gpu`` trains on the GPU and counts
seconds of the clock; its runs have names of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from cost_jobs import JOBS, PEERS, Curve, Ended, Meter, cost_to, trained

from mmrl.logging.environment import environment

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 0.975 quantile of Student's t for the mean of so many values."""
HEAD = (
    "| job, target | arm | rate | {unit} to the target, by seed | median | mean (95 %) | 10^12 FLOP, median "
    "| {unit} a step | 10^12 FLOP a step | at the end |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Spec:
    """Final class; one run: an arm or ``peer:NAME``, and what it is given."""

    arm: str
    rate: float
    seed: int
    budget: float
    target: float
    every: int
    samples: int
    job: str = "pictures"
    unit: str = "CPU-seconds"
    """What is counted: ``CPU-seconds``, ``seconds`` (of a GPU) or ``FLOP``."""

    @property
    def key(self) -> str:
        """The name of the run in the file."""
        asked = f"to {self.target:g} in {self.budget:g} {self.unit}, {self.samples} samples each {self.every} steps"
        return f"{self.job}: {self.arm}, rate {self.rate:g}, seed {self.seed}, {asked}"

    @property
    def overrides(self) -> list[str]:
        """Of the recipe, for ours and for a peer."""
        return [
            *JOBS[self.job].common,
            *JOBS[self.job].arms.get(self.arm, ()),
            *(f"optim.lr={self.rate}", f"seed={self.seed}", f"eval.every={self.every}", f"eval.samples={self.samples}"),
        ]


def quality(curve: Sequence[tuple[float, float]]) -> float:
    """What the search compares: the mean success of the last two evaluations."""
    return mean(value for _, value in curve[-2:])


def run(spec: Spec, peers: Mapping[str, Path | None]) -> Curve:
    """The curve of a run, in this process."""
    if spec.unit != "FLOP":
        return _run(spec, peers, Meter(_device_seconds) if spec.unit == "seconds" else Meter())
    from mmrl.planner.fake_tensors import LiveBytes

    with LiveBytes() as seen:
        return _run(spec, peers, Meter(lambda: float(seen.work.flops)))


def _run(spec: Spec, peers: Mapping[str, Path | None], meter: Meter) -> Curve:
    name, job = spec.arm.removeprefix("peer:"), JOBS[spec.job]
    ended = Ended(spec.target, spec.budget, meter)
    with tempfile.TemporaryDirectory() as folder:
        if name == spec.arm:
            trained(job, spec.overrides, ended, Path(folder))
        else:
            PEERS[name](job, spec.overrides, ended, Path(folder), peers[name])
    return ended.curve


def _device_seconds() -> float:
    """The clock, once the GPU has done what it was given."""
    import time

    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


# -- the table ---------------------------------------------------------------------------------------------------------


class Runs:
    """The runs that are done, in a file; ``of`` does one that is not there, or None where nothing is to be trained."""

    def __init__(self, path: Path, peers: Mapping[str, Path | None], *, train: bool = True) -> None:
        self.path, self.peers, self.train = path, peers, train

    @property
    def rows(self) -> dict[str, Any]:
        """By name. Read anew, for two commands may fill the file."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def of(self, spec: Spec) -> list[tuple[float, float]] | None:
        if spec.key not in self.rows:
            if not self.train:
                return None
            curve = self._trained(spec)
            row = {"spec": asdict(spec), "curve": curve, "machine": environment()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows | {spec.key: row}, indent=1))
            said = f"{curve[-1][0]:.4g} {spec.unit}, success {curve[-1][1]:.3f}"
            print(f"{spec.key}: {said}", file=sys.stderr, flush=True)
        return [(cost, value) for cost, value in self.rows[spec.key]["curve"]]

    def _trained(self, spec: Spec) -> list[list[float]]:
        """The curve of a run in a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "curve.json"
            peers = [f"--peer={name}={path or ''}" for name, path in self.peers.items()]
            command = [sys.executable, __file__, "--one", json.dumps(asdict(spec)), "--json", str(out), *peers]
            with (Path(folder) / "log").open("w+") as log:
                code = subprocess.run(
                    command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
                ).returncode
                if code:
                    log.seek(0)
                    sys.exit(f"{spec.key} failed:\n{log.read()[-2000:]}")
            return json.loads(out.read_text())


def search(base: Spec, runs: Runs, seconds: float, seed: int) -> float | None:
    """The learning rate that is left of the job's by halving, on the search's seed; None where runs are missing."""
    rates = list(JOBS[base.job].rates)
    while len(rates) > 1:
        # A target of 2 is never reached, so that each rate gets its whole time.
        found = {r: runs.of(replace(base, rate=r, seed=seed, budget=seconds, target=2.0)) for r in rates}
        curves = {rate: curve for rate, curve in found.items() if curve}
        if len(curves) < len(rates):
            return None
        rates = sorted(rates, key=lambda rate: -quality(curves[rate]))[: len(rates) // 2]
        seconds *= 2
    return rates[0]


def interval(costs: Sequence[float]) -> str:
    """The geometric mean, with a 95 % interval by Student's t of the logarithms; empty of fewer than two."""
    logs = [math.log(cost) for cost in costs if 0 < cost < math.inf]
    if len(logs) < max(2, len(costs)):
        return ""
    off = STUDENT[len(logs)] * stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean(logs)):.0f} ({math.exp(mean(logs) - off):.0f} to {math.exp(mean(logs) + off):.0f})"


def line(base: Spec, curves: Sequence[Sequence[tuple[float, float]]], flop: float) -> str:
    """A row of the table; a censored run counts as infinite. ``flop``: of a training step."""
    costs = [cost_to(curve, base.target) for curve in curves]
    shown = ", ".join(f"> {base.budget:.0f}" if cost is None else f"{cost:.0f}" for cost in costs)
    infinite = [math.inf if cost is None else cost for cost in costs]
    steps = [
        math.inf if cost is None else base.every * [at for at, _ in curve].index(cost)
        for curve, cost in zip(curves, costs, strict=True)
    ]
    middle, made = median(infinite), median(steps)
    step = median(curve[-1][0] / ((len(curve) - 1) * base.every) for curve in curves)
    cells = [
        *(f"{base.job}, {base.target:g}", base.arm, f"{base.rate:g}", shown),
        *("not reached" if middle == math.inf else f"{middle:.0f}", interval(infinite)),
        *("" if made == math.inf else f"{made * flop / 1e12:.1f}", f"{step:.2f}", f"{flop / 1e12:.2f}"),
        f"{mean(quality(curve) for curve in curves):.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def row(base: Spec, runs: Runs, given: argparse.Namespace) -> str | None:
    """The row of an arm, trained as far as it was not; None where runs are missing."""
    rate = given.rate or search(base, runs, given.search_seconds, given.search_seed)
    if rate is None:
        return None
    base = replace(base, rate=rate)
    curves = [runs.of(replace(base, seed=seed)) for seed in given.seeds]
    counted = runs.of(replace(base, seed=given.search_seed, budget=1.0, target=2.0, every=1, samples=8, unit="FLOP"))
    if counted is None or None in curves:
        return None
    return line(base, [curve for curve in curves if curve], counted[-1][0])


# -- the command line --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--job", choices=list(JOBS), nargs="+", default=list(JOBS))
    made.add_argument("--arms", nargs="*", help="of the jobs; default: all")
    made.add_argument("--seconds", type=float, default=300, help="cost of a run after which it is censored")
    made.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    made.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    made.add_argument("--samples", type=int, default=256, help="held-out samples of an evaluation")
    made.add_argument("--rate", type=float, help="train with this rate, without a search")
    made.add_argument("--search-seconds", type=float, default=80)
    made.add_argument("--search-seed", type=int, default=0)
    made.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="flow_grpo=CHECKOUT, flow_factory=CHECKOUT, or trl",
    )
    made.add_argument("--gpu", action="store_true", help="train on the GPU; seconds are of the clock")
    made.add_argument("--print", action="store_true", help="print what the file has, and train nothing")
    made.add_argument("--json", type=Path, required=True, help="where runs are kept")
    made.add_argument("--one", help=argparse.SUPPRESS)
    return made


def checked(given: argparse.Namespace) -> dict[str, Path | None]:
    """The peers by name. Exits with what is wrong with the command line."""
    known = [arm for job in given.job for arm in JOBS[job].arms]
    given.arms = known if given.arms is None else given.arms
    if other := [arm for arm in given.arms if arm not in known]:
        sys.exit(f"--arms {other[0]!r}: the arms of {' and '.join(given.job)} are {', '.join(map(repr, known))}")
    split = (text.partition("=") for text in given.peer)
    peers = {name: Path(path) if path else None for name, _, path in split}
    here = [peer for job in given.job for peer in JOBS[job].peers]
    if other := sorted(set(peers) - set(here)):
        sys.exit(f"--peer {other[0]}: only {', '.join(here)} can train on {' and '.join(given.job)} here")
    for name in ("flow_grpo", "flow_factory"):
        if peers.get(name, Path()) is None:
            sys.exit(f"--peer {name}: name its checkout: {name}=PATH")
    if given.gpu:
        import torch

        if not torch.cuda.is_available():
            sys.exit("--gpu: torch sees no GPU here; leave it out to count CPU-seconds")
        if peers:
            sys.exit("--gpu: the peers' steps are built for a CPU here; leave --peer out")
    return peers


def main() -> None:
    given = parser().parse_args()
    if given.one:
        one = Spec(**json.loads(given.one))
        given.job = [one.job]
        given.json.write_text(json.dumps(run(one, checked(given))))
        return
    peers = checked(given)
    runs = Runs(given.json, peers, train=not given.print)
    unit = "seconds" if given.gpu else "CPU-seconds"
    print(HEAD.format(unit=unit))
    for name in given.job:
        job = JOBS[name]
        arms = [arm for arm in job.arms if arm in given.arms]
        for arm in [*arms, *(f"peer:{peer}" for peer in job.peers if given.print or peer in peers)]:
            base = Spec(arm, 0.0, 0, given.seconds, job.target, given.every, given.samples, name, unit)
            if (said := row(base, runs, given)) is not None:
                print(said, flush=True)


if __name__ == "__main__":
    main()
