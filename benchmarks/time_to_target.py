"""CPU-seconds of training until held-out success reaches a target and stays there: ours, our variants, and a peer.

    python benchmarks/time_to_target.py --target 0.52 --seconds 300 --json benchmarks/results/time_to_target.json \\
        --peer flow_grpo=PATH --arms "flow_grpo's settings" "5 steps"
    python benchmarks/time_to_target.py --job text --target 0.7 --seconds 500 --json FILE --peer trl

The job on pictures is that of ``shapes-full``: the same model, prompts, verifier and 144 pictures a step for everybody;
the job on text is that of ``sums``. A run is evaluated on the same held-out samples after every five steps. Its time
is the CPU time of its training steps, of all processes and without evaluations, up to the first of two evaluations in a
row that reach the target. A run that spends its budget first is censored: it is printed as more than its budget.

Every arm gets the same search: each learning rate with one seed for ``--search-seconds``, the better half of them with
twice the time, and so on until one is left. Then it trains the fresh ``--seeds`` with that rate. ``--rate`` leaves the
search out, for a variant that shall have the rate of another arm. ``--json`` gets each
run as it ends, and runs that stand there are not done again. ``--peer`` trains with the peer's own code
(``time_jobs.py``): flow_grpo's sampling, log-prob and advantage functions, Flow-Factory's GRPO trainer, or TRL's
``GRPOTrainer``, which has to be installed. Evaluations are ours for everybody, with eight steps of Euler's whatever an
arm trains with.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from time_jobs import JOBS, PEERS, Curve, Ended, time_to, trained

from mmrl.logging.environment import environment


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
    job: str = "pictures"

    @property
    def key(self) -> str:
        """The name of the run in the file."""
        job = "" if self.job == "pictures" else f"{self.job}: "
        asked = f"to {self.target:g} in {self.seconds:g} s, {self.samples} samples each {self.every} steps"
        return f"{job}{self.arm}, rate {self.rate:g}, seed {self.seed}, {asked}"

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
    name, job = spec.arm.removeprefix("peer:"), JOBS[spec.job]
    ended = Ended(spec.target, spec.seconds)
    with tempfile.TemporaryDirectory() as folder:
        if name == spec.arm:
            trained(job, spec.overrides, ended, Path(folder))
        else:
            PEERS[name](job, spec.overrides, ended, Path(folder), peers[name])
    return ended.curve


# -- the table ---------------------------------------------------------------------------------------------------------


class Runs:
    """The runs that are done, in a file; ``of`` does one that is not there."""

    def __init__(self, path: Path, peers: Mapping[str, Path | None]) -> None:
        self.path, self.peers = path, peers
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, spec: Spec) -> list[tuple[float, float]]:
        if spec.key not in self.rows:
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
                curve = json.loads(out.read_text())
            self.rows[spec.key] = {"spec": asdict(spec), "curve": curve, "machine": environment()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.rows, indent=1))
            print(
                f"{spec.key}: {curve[-1][0]:.0f} CPU-seconds, success {curve[-1][1]:.3f}", file=sys.stderr, flush=True
            )
        return [(seconds, value) for seconds, value in self.rows[spec.key]["curve"]]


def search(arm: str, runs: Runs, given: argparse.Namespace) -> float:
    """The learning rate that is left of the job's by halving, on the search's seed."""
    rates, seconds = list(JOBS[given.job].rates), given.search_seconds
    while len(rates) > 1:
        # A target of 2 is never reached, so that each rate gets its whole time.
        found = {rate: quality(runs.of(spec(arm, rate, given.search_seed, seconds, 2.0, given))) for rate in rates}
        rates = sorted(rates, key=lambda rate: -found[rate])[: len(rates) // 2]
        seconds *= 2
    return rates[0]


def spec(arm: str, rate: float, seed: int, seconds: float, target: float, given: argparse.Namespace) -> Spec:
    """A run as the command line asks for it."""
    return Spec(arm, rate, seed, seconds, target, given.every, given.samples, given.job)


def line(arm: str, rate: float, curves: Sequence[Sequence[tuple[float, float]]], given: argparse.Namespace) -> str:
    """A row of the table: the time of each seed, and the median with censored runs as infinite."""
    times = [time_to(curve, given.target) for curve in curves]
    shown = ", ".join(f"> {given.seconds:.0f}" if t is None else f"{t:.0f}" for t in times)
    middle = median(math.inf if t is None else t for t in times)
    last = mean(quality(curve) for curve in curves)
    return f"| {arm} | {rate:g} | {shown} | {'not reached' if middle == math.inf else f'{middle:.0f}'} | {last:.3f} |"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--job", choices=list(JOBS), default="pictures")
    made.add_argument("--arms", nargs="*", help="of the job; default: all")
    made.add_argument("--target", type=float, default=0.55, help="held-out success, fixed before the runs")
    made.add_argument("--seconds", type=float, default=600, help="CPU-seconds of a run after which it is censored")
    made.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    made.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    made.add_argument("--samples", type=int, default=256, help="held-out samples of an evaluation")
    made.add_argument("--rate", type=float, help="train with this rate, without a search: that of another arm, say")
    made.add_argument("--search-seconds", type=float, default=60)
    made.add_argument("--search-seed", type=int, default=0)
    made.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="flow_grpo=CHECKOUT, flow_factory=CHECKOUT, or trl",
    )
    made.add_argument("--json", type=Path, required=True, help="where runs are kept")
    made.add_argument("--one", help="train this run alone (used by the command itself)")
    return made


def checked(given: argparse.Namespace) -> dict[str, Path | None]:
    """The peers by name. Exits with what is wrong with the command line."""
    job = JOBS[given.job]
    given.arms = list(job.arms) if given.arms is None else given.arms
    if other := [arm for arm in given.arms if arm not in job.arms]:
        sys.exit(f"--arms {other[0]!r}: the job {given.job} has {', '.join(map(repr, job.arms))}")
    split = (text.partition("=") for text in given.peer)
    peers = {name: Path(path) if path else None for name, _, path in split}
    if other := sorted(set(peers) - set(job.peers)):
        sys.exit(f"--peer {other[0]}: only {', '.join(job.peers)} can train on {given.job} here")
    for name in ("flow_grpo", "flow_factory"):
        if peers.get(name, Path()) is None:
            sys.exit(f"--peer {name}: name its checkout: {name}=PATH")
    return peers


def main() -> None:
    given = parser().parse_args()
    if given.one:
        one = Spec(**json.loads(given.one))
        given.job = one.job
        given.json.write_text(json.dumps(run(one, checked(given))))
        return
    peers = checked(given)
    runs = Runs(given.json, peers)
    print("| arm | rate | CPU-seconds to the target, by seed | median | success at the end |\n|---|---|---|---|---|")
    for arm in [*given.arms, *(f"peer:{name}" for name in peers)]:
        rate = given.rate or search(arm, runs, given)
        curves = [runs.of(spec(arm, rate, seed, given.seconds, given.target, given)) for seed in given.seeds]
        print(line(arm, rate, curves, given), flush=True)


if __name__ == "__main__":
    main()
