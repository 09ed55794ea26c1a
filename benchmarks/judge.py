"""Measure how much of a judge's time overlaps sampling: judging during sampling, against judging after it.

    OMP_NUM_THREADS=1 python benchmarks/judge.py --json out.json

The loop's own rollout (``mmrl.rollout.rounds.sample_and_score``) of the recipe ``sums`` with the shipped policy. The
judge is the reward ``judge`` with the shipped critic, whose weights write each verdict, served in a process of its own
(as by ``mmrl serve``). Policy and judge have a core each, and one thread, in both arms. Nothing is trained. Two arms in
turn, on the same samples:

- serial      all micro-batches are sampled, then all are judged: the same calls, held back until sampling has ended
- overlapped  as the loop does it: a micro-batch is judged while the next is sampled

``hidden`` is what overlapping saves, as a share of the shorter role: (serial - overlapped) / min(sampling, judging),
where sampling and judging are their times alone, within the serial arm of the same round. With ``n`` micro-batches it
is at most 1 - 1/n: while the first is sampled there is nothing to judge, or while the last is judged nothing to sample.
What else is not hidden is split into its causes. Verdicts are not cached, so every round asks anew. Linux only.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from stepping import Row, quartiles, say, spread

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller.features import FeatureStore
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Sample
from mmrl.logging.environment import environment
from mmrl.rewards.scoring import RewardSet, Scores, Scoring
from mmrl.rewards.subprocess_server import started_elsewhere
from mmrl.rollout.rounds import sample_and_score
from mmrl.step.batch import Round
from mmrl.step.step_context import StepContext

ARMS = ("serial", "overlapped")
GOAL, FEWEST = 0.85, 16
"""The goal for ``hidden``, and the micro-batches of a round it is for."""
CRITIC = Path(__file__).resolve().parents[1] / "pipelines" / "llm" / "models" / "sums-critic"
JUDGE: dict[str, Any] = {
    "model": {"path": str(CRITIC), "batch": 64},
    "rubric": str(CRITIC / "rubric.txt"),
    "mode": "steps",
}
"""Options of the reward ``judge`` unless others are given: the shipped critic writes which steps are wrong."""
EXPLAINED = {
    "hidden": f"of the shorter role's time (goal: {GOAL:.2f} or more)",
    "alone": "lost where one role had nothing to do: 1/n at the least, the first micro-batch or the last",
    "slowed": "lost where the longer role took longer beside the other than alone",
    "between": "the serial arm's time outside both roles, which counts as hidden",
}
"""``hidden`` = 1 - ``alone`` - ``slowed`` + ``between``, in every round."""


# -- the two arms ------------------------------------------------------------------------------------------------------


class HeldBack:
    """Final class. Stands in the place of a run's ``RewardSet``: scoring begins when all samples are there."""

    def __init__(self, rewards: RewardSet) -> None:
        self._rewards = rewards
        self.inputs = rewards.inputs

    def start(self, step: int, group_size: int, **more: Any) -> HeldBackScoring:
        return HeldBackScoring(self._rewards.start(step, group_size, **more))


class HeldBackScoring:
    """Final class. Makes the calls that a ``Scoring`` would have made, at ``finish``."""

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._waiting: list[tuple[Sequence[Sample], Sequence[int] | int | None]] = []

    def add(self, samples: Sequence[Sample], rows: Sequence[int] | int | None = None) -> None:
        self._waiting.append((samples, rows))

    def finish(self, groups: Sequence[Sequence[int]]) -> Scores:
        for samples, rows in self._waiting:
            self._scoring.add(samples, rows)
        return self._scoring.finish(groups)


def arm(name: str, context: StepContext) -> StepContext:
    """The run as that arm has it."""
    if name == "overlapped":
        return context
    return dataclasses.replace(context, rewards=HeldBack(context.rewards))  # type: ignore[arg-type]


def one_round(context: StepContext, step: int, judge: int) -> tuple[Row, Round]:
    """Sample and judge the prompts of ``step``, which are new to the run. ``judge`` is the judge's process.

    The row: seconds in ``total``, ``sampling`` (with encoding prompts and decoding text), ``judging`` (at least one
    call under way), ``waited`` for the judge at the end, and of the processor, ``policy_cpu`` and ``judge_cpu``.
    """
    context.pipeline.features = FeatureStore()
    slots = context.controller.slots(step, context.prompts, context.recipe.train.prompts_per_step)
    gc.collect()
    clock = Clock(torch.device("cpu"))
    judge_cpu, cpu, started = cpu_of(judge), time.process_time(), time.perf_counter()
    made = sample_and_score(context, slots, step, clock)
    row = {"total": time.perf_counter() - started, "policy_cpu": time.process_time() - cpu}
    seconds = clock.row()
    row["sampling"] = sum(seconds[f"time/{phase}"] for phase in ("encode", "sample", "decode"))
    row |= {"judging": made.scores.seconds["judge"], "waited": made.scores.waited}
    return row | {"judge_cpu": cpu_of(judge) - judge_cpu}, made


def check_same(rounds: Mapping[str, Round]) -> None:
    """Raise ``ValueError`` where the arms did not sample the same tokens or got other scores for them."""
    a, b = rounds.values()
    written: Any = zip(a.micro_batches, b.micro_batches, strict=True)
    if not all(torch.equal(x.tokens, y.tokens) for x, y in written):
        raise ValueError("the arms sampled different tokens, so they did not do the same work")
    if not all(torch.allclose(a.scores.parts[k], b.scores.parts[k], equal_nan=True) for k in a.scores.parts):
        raise ValueError("the judge scored the same samples otherwise in the other arm")


def measure(context: StepContext, judge: int, rounds: int) -> tuple[dict[str, list[Row]], float]:
    """The rows of both arms, one of each in turn after an untimed round, and the share of samples with a verdict.

    Who goes first alternates, so that neither arm always finds the other's warm caches.
    """
    rows: dict[str, list[Row]] = {name: [] for name in ARMS}
    verdicts: list[torch.Tensor] = []
    for step in range(rounds + 1):
        made: dict[str, Round] = {}
        for name in ARMS if step % 2 else ARMS[::-1]:
            row, made[name] = one_round(arm(name, context), step, judge)
            if step:
                rows[name].append(row)
        check_same(made)
        verdicts.append(made["serial"].scores.total.isfinite().double())
        if step:
            pair = [rows[name][-1] for name in ARMS]
            say(f"round {step} of {rounds}: " + "  ".join(f"{k} {v:.3f}" for k, v in compare(*pair).items()))
    return rows, torch.cat(verdicts).mean().item()


def compare(serial: Row, overlapped: Row) -> Row:
    """Times alone and totals of a round, what was hidden, and where the rest went (``EXPLAINED``)."""
    longer, shorter = sorted(("sampling", "judging"), key=lambda role: -serial[role])
    unit = serial[shorter]
    return {
        "sampling": serial["sampling"],
        "judging": serial["judging"],
        "serial": serial["total"],
        "overlapped": overlapped["total"],
        "hidden": (serial["total"] - overlapped["total"]) / unit,
        "alone": (overlapped["total"] - overlapped[longer]) / unit,
        "slowed": (overlapped[longer] - serial[longer]) / unit,
        "between": (serial["total"] - serial["sampling"] - serial["judging"]) / unit,
    }


# -- the two processes -------------------------------------------------------------------------------------------------


def two_cores() -> list[int]:
    """Two cores this process may use, not two threads of one where that can be told. Raises ``ValueError``."""
    usable = sorted(os.sched_getaffinity(0))
    first = usable[0]
    others = [core for core in usable[1:] if core not in siblings(first)]
    if not others:
        raise ValueError(f"two cores are needed, and this process may use {usable} only; see taskset -p {os.getpid()}")
    return [first, others[0]]


def siblings(core: int) -> set[int]:
    """The logical processors that are threads of the same core, where the system says so."""
    file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    if not file.exists():
        return {core}
    ranges = [[int(n) for n in part.split("-")] for part in file.read_text().strip().split(",")]
    return {n for r in ranges for n in range(r[0], r[-1] + 1)}


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep this thread, and what it starts, to one core while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def served(options: Mapping[str, Any], core: int) -> Iterator[tuple[str, int]]:
    """The judge in a process of its own on ``core``: its address and process id. Raises ``UserError``."""
    with ExitStack() as stack:
        with pinned(core):  # what is started now inherits it
            process, line = stack.enter_context(started_elsewhere("judge", port=0, options=options))
        if os.sched_getaffinity(process.pid) != {core}:
            raise RuntimeError(f"the judge's process runs on {os.sched_getaffinity(process.pid)}, not on core {core}")
        yield line.removeprefix("judge at ").partition(" ")[0], process.pid


def cpu_of(process: int) -> float:
    """Seconds of processor time that the threads of ``process`` have used, to a hundredth."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def judge_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the judge is built with; its verdicts are not cached, and what cannot be read is not asked for again."""
    options = dict(JUDGE)
    if arguments.judge:
        import yaml

        options = yaml.safe_load(arguments.judge.read_text())
    if arguments.judge_tokens:
        options["max_tokens"] = arguments.judge_tokens
    if arguments.votes:
        options |= {"votes": arguments.votes, "temperature": options.get("temperature") or 1.0}
    return {"max_tokens": 48, "reasks": 0, **options, "cache": False}


def make_run(arguments: argparse.Namespace, url: str, mode: str) -> StepContext:
    """The recipe ``sums`` with the judge at ``url`` as its reward, and the sizes asked for."""
    rows = arguments.micro_batches * arguments.samples
    per = "group" if mode in ("pairwise", "ranking") else "sample"
    reward = {
        "name": "http:score",
        "label": "judge",
        "timeout": 600.0,
        "on_failure": "drop",  # a verdict that cannot be read is a sample without one
        "options": {"url": url, "inputs": ["text"], "per": per, "spans": mode == "steps", "timeout": 600.0},
    }
    loaded = load_recipe(
        ["sums"],
        [
            "device=cpu",
            "threads=1",
            f"rewards={json.dumps([reward])}",
            f"sampling.batch_size={arguments.samples}",
            f"sampling.max_new_tokens={arguments.new_tokens}",
            f"train.group_size={arguments.group}",
            f"train.prompts_per_step={rows // arguments.group}",
        ],
    )
    return build(loaded.recipe)


# -- results -----------------------------------------------------------------------------------------------------------


def report(result: Mapping[str, Any]) -> str:
    """Markdown: the times, what was hidden, and where the rest went."""
    s, pairs, rows = result["settings"], result["compared"], result["arms"]
    lines = [
        f"### {s['micro_batches']} micro-batches of {s['samples']} samples, {s['questions']} questions to the judge a "
        f"round ({name_of(s['judge']['model'])}, on core {s['judge_core']}; policy on core {s['policy_core']}); "
        f"{result['verdicts']:.0%} of samples got a verdict that could be read",
        "",
        "| seconds a round: median [quartiles] | sampling alone | judging alone | serial | overlapped |",
        "|---|---|---|---|---|",
        f"| {len(pairs)} rounds | "
        + " | ".join(spread([p[k] for p in pairs]) for k in ("sampling", "judging", "serial", "overlapped"))
        + " |",
        "",
    ]
    for key, meaning in EXPLAINED.items():
        found = result["summary"][key]
        middle = f"{found['median']:.3f}"
        middle = f"**{middle}**" if key == "hidden" else middle
        lines.append(f"- {key}: {middle} [{found['q1']:.3f}, {found['q3']:.3f}], {meaning}")
    for role, cpu in (("sampling", "policy_cpu"), ("judging", "judge_cpu")):
        ratio = [[b[k] / a[k] for a, b in zip(rows["serial"], rows["overlapped"], strict=True)] for k in (role, cpu)]
        times, cpus = map(spread, ratio)
        lines.append(f"- {role} beside the other role / alone: {times}, of processor time {cpus}")
    lines.append(f"- waited for the judge at the end: {spread([row['waited'] for row in rows['overlapped']])} s")
    return "\n".join(lines)


def name_of(model: str | Mapping[str, Any]) -> str:
    """What the report calls the judge's model."""
    path = model if isinstance(model, str) else next(model[key] for key in ("path", "vllm", "name") if key in model)
    return Path(path).name


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured."""
    policy, judge = arguments.cores or two_cores()
    options = judge_options(arguments)
    with served(options, judge) as (url, process), pinned(policy):
        run = make_run(arguments, url, options.get("mode", "pointwise"))
        try:
            rows, verdicts = measure(run, process, arguments.rounds)
        finally:
            run.rewards.close()
    compared = [compare(a, b) for a, b in zip(*(rows[name] for name in ARMS), strict=True)]
    settings = {
        "micro_batches": arguments.micro_batches,
        "samples": arguments.samples,
        "group": arguments.group,
        "new_tokens": arguments.new_tokens,
        "questions": arguments.micro_batches * arguments.samples * options.get("votes", 1),
        "judge": options,
        "policy_core": policy,
        "judge_core": judge,
    }
    return {
        "settings": settings,
        "verdicts": verdicts,
        "summary": {key: quartiles([pair[key] for pair in compared]) for key in compared[0]},
        "compared": compared,
        "arms": rows,
    }


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of both arms")
    parser.add_argument("--micro-batches", type=int, default=32, help=f"of a round; the goal is for {FEWEST} or more")
    parser.add_argument("--samples", type=int, default=32, help="in a micro-batch")
    parser.add_argument("--group", type=int, default=16, help="samples of one prompt")
    parser.add_argument("--new-tokens", type=int, default=40, help="of a sample at most")
    parser.add_argument("--judge", type=Path, help="a file with another judge's options; without: the shipped critic")
    parser.add_argument("--judge-tokens", type=int, help="of a verdict at most")
    parser.add_argument("--votes", type=int, help="critiques of a sample, sampled at temperature 1")
    parser.add_argument("--cores", type=int, nargs=2, metavar=("POLICY", "JUDGE"), help="the first two by default")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    arguments = parser.parse_args(given)
    if not hasattr(os, "sched_setaffinity"):
        parser.error("this system cannot give a process a core of its own (os.sched_setaffinity); use Linux")
    if arguments.rounds < 1 or arguments.micro_batches < 2:
        parser.error("--rounds: at least 1, and 7 for figures to quote; --micro-batches: at least 2")
    if arguments.micro_batches * arguments.samples % arguments.group:
        parser.error("--micro-batches times --samples must be whole groups")
    usable, cores = os.sched_getaffinity(0), set(arguments.cores or ())
    if arguments.cores and (len(cores) < 2 or not cores <= usable):
        parser.error(f"--cores: two different ones of {sorted(usable)}")
    if arguments.judge and not arguments.judge.is_file():
        parser.error(f"--judge: there is no file {arguments.judge}")
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # the judge's process has one thread too
    torch.set_num_threads(1)
    words = sys.argv[1:] if given is None else given
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/judge.py", *words]),
        "environment": environment(),
    }
    cpu, versions = result["environment"]["cpu"], result["environment"]["versions"]
    print(f"{result['date']}, `{result['command']}`, {cpu['name']} ({cpu['usable']} usable cores)")
    print(", ".join(f"{package} {version}" for package, version in versions.items()))
    result |= benchmark(arguments)
    print(f"\n{report(result)}", flush=True)
    ratio = result["summary"]["judging"]["median"] / result["summary"]["sampling"]["median"]
    if not 0.5 <= ratio <= 2:
        say(f"judging takes {ratio:.2f} times as long as sampling; balance them: --judge-tokens, --votes, --new-tokens")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
