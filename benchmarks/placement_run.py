"""Compare real steps with every placement, paired and interleaved, with the simulator's predictions.

    python benchmarks/placement_run.py --repeats 9 --json benchmarks/results/placement_run.json

One controller with two devices, a process of one thread each on a core of its own, runs the recipe ``shapes-judge``: a
small Stable Diffusion 3 and a generative judge that looks at its pictures. All placements go through step ``i`` before
any goes on to the next, so they sample the same prompts with the same noise; ``adaptive`` decides from its own steps.

Loads: ``light`` (judging takes less than sampling), ``heavy`` (few denoising steps and two judges), ``shifting`` (the
second half of the steps is heavy), ``asleep`` (heavy, and a judge that is not judging is read from disk again).

The prediction is the simulator's, of the work that the ``colocate`` steps recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import stepping
from stepping import Arm, Row, quartiles, spread

from mmrl.app.build import build
from mmrl.config.loader import LoadedRecipe, load_recipe
from mmrl.config.placement import Placement
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.clock import Clock
from mmrl.placement.adaptive import Split, starting
from mmrl.placement.multi_device import MultiDevice
from mmrl.planner.simulator.simulate import Cluster, Outcome, adaptive, bound, static
from mmrl.planner.simulator.trace import Trace
from mmrl.planner.simulator.trace_from_run import read_run
from mmrl.runtime.program import watchdog
from mmrl.runtime.worker import RemoteWorker, WorkerListener, connect, serve
from mmrl.step.step_context import StepContext
from mmrl.training.loop import train_step

RECIPE = [
    "devices_per_controller=2",
    "placement=adaptive",
    "train.prompts_per_step=12",
    "train.group_size=8",
    "train.micro_batch_size=8",
    "eval.every=null",
]
JUDGE = (
    '{{name: judge, label: {label}, batch_size: 8, options: {{model: {{path: "{model}", batch: 8}}, cache: false, '
    'rubric: "{{{{ image }}}}Does the picture show {{{{ prompt }}}}?"}}}}'
)
LOADS = {
    "light": ["sampling.steps=8", 1],
    "heavy": ["sampling.steps=3", 2],
    "shifting": ["sampling.steps=3", 2],
    "asleep": ["sampling.steps=3", 2],
}
PLACEMENTS = {
    "colocate": Placement(type="colocate"),
    "partial": Placement(type="partial"),
    "adaptive": Placement(type="adaptive"),
    "adaptive, split alone": Placement(type="adaptive", inside=False),
}
WARM = 2
"""Steps before the timed ones; the adaptive placements settle in them."""


def recipe(load: str) -> LoadedRecipe:
    steps, judges = LOADS[load]
    model = Path(__file__).resolve().parents[1] / "pipelines" / "vlm" / "models" / "shapes-judge"
    rewards = ", ".join(JUDGE.format(label=f"judge{n}", model=model) for n in range(int(judges)))
    return load_recipe(["shapes-judge"], [*RECIPE, str(steps), f"rewards=[{rewards}]"])


def joined(loaded: LoadedRecipe, device: int, port: int) -> Controller:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[device % len(cores)]})
    return Controller(loaded.recipe.seed, 0, 1, Group(device, 2, "127.0.0.1", port, devices=2))


@contextmanager
def opened(load: str) -> Iterator[tuple[StepContext, MultiDevice]]:
    """The run, and its devices: this process and one more."""
    loaded, listener = recipe(load), WorkerListener()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--worker", listener.address, str(port), load]
    worker = subprocess.Popen([sys.executable, __file__, *words])
    cores = os.sched_getaffinity(0)
    try:
        controller = joined(loaded, 0, port)
        peers: Any = controller.peers
        connections = listener.accept(1)
        devices = MultiDevice([RemoteWorker(1, connections[0])], loaded.recipe.placement)
        run = build(loaded.recipe, controller, devices)
        devices.open(run)
        yield run, devices
        devices.close()
        peers.close()
    finally:
        worker.kill()
        os.sched_setaffinity(0, cores)


def work(address: str, port: str, load: str) -> None:
    """The other device, in a process of its own."""
    loaded = recipe(load)
    controller = joined(loaded, 1, int(port))
    connection = connect(1, address)
    serve(build(loaded.recipe, controller), connection, None, watchdog(loaded.recipe))


class Arms:
    """Final class: a step under each placement; what the devices did is kept by placement."""

    def __init__(self, load: str, context: StepContext, devices: MultiDevice, repeats: int) -> None:
        self.run, self.devices, self.load = context, devices, load
        self.judges = context.rewards._entries
        self.half = WARM + repeats // 2
        sleeps = {"sleep": load == "asleep"}
        self.settings = {name: p.model_copy(update=sleeps) for name, p in PLACEMENTS.items()}
        self.states = {name: starting(settings, 2) for name, settings in self.settings.items()}
        self.lines: dict[str, list[dict[str, Any]]] = {name: [] for name in PLACEMENTS}

    def arm(self, name: str) -> Arm:
        def step(repeat: int, clock: Clock) -> None:
            self.devices.settings, self.devices.state = self.settings[name], self.states[name]
            if self.load == "shifting":
                self._weigh(heavy=repeat >= self.half)
            train_step(self.run, repeat, clock)
            self.states[name] = self.devices.state
            self.lines[name] += self.devices.lines()

        return step

    def _weigh(self, heavy: bool) -> None:
        """Both judges, or one of them."""
        self.run.rewards._entries = self.judges if heavy else self.judges[:1]


def predicted(
    folder: Path, rows: Sequence[Row], lines: Sequence[Mapping[str, Any]]
) -> tuple[Trace, dict[str, Outcome]]:
    """What the simulator says of the work that ``lines`` recorded."""
    (folder / "placement.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timed = ({"step": n, "time/step": row["total"]} for n, row in enumerate(rows, 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    trace, cluster = read_run(folder).trace, Cluster(1, 2)
    outcomes = [
        static(trace, cluster, Split(2, 0)),
        static(trace, cluster, Split(1, 1)),
        adaptive(trace, cluster),
        adaptive(trace, cluster, moves=False),
    ]
    return trace, dict(zip(PLACEMENTS, outcomes, strict=True))


def benchmark(load: str, repeats: int) -> dict[str, Any]:
    with opened(load) as (run, devices), tempfile.TemporaryDirectory() as folder:
        arms = Arms(load, run, devices, repeats)
        rows = stepping.measure({name: arms.arm(name) for name in PLACEMENTS}, WARM + repeats)
        trace, outcomes = predicted(Path(folder), rows["colocate"], arms.lines["colocate"])
    least = bound(trace, Cluster(1, 2))[WARM:]
    found: dict[str, Any] = {"bound": statistics.median(least), "arms": {}}
    base = [row["total"] for row in rows["colocate"][WARM:]]
    for name in PLACEMENTS:
        steps = [row["total"] for row in rows[name][WARM:]]
        pairs = list(zip(steps, outcomes[name].steps[WARM:], strict=True))
        work = [line for line in arms.lines[name] if line.get("step", 0) > WARM]
        found["arms"][name] = {
            "seconds": steps,
            "over colocate": quartiles([a / b for a, b in zip(steps, base, strict=True)]),
            "predicted over measured": quartiles([predicted / real for real, predicted in pairs]),
            "over bound": quartiles([a / b for a, b in zip(steps, least, strict=True)]),
            "splits": [(line["rollout"], line["judge"]) for line in work if "decision" in line],
        }
    return found


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "| placement | seconds a step | over colocate | over the bound | predicted over measured |",
        "|---|---|---|---|---|",
    ]
    for name, of in found["arms"].items():
        cells = [f"{of[key]['median']:.3f} [{of[key]['q1']:.3f}, {of[key]['q3']:.3f}]" for key in COLUMNS]
        lines.append(f"| {name} | {spread(of['seconds'], 2)} | {' | '.join(cells)} |")
    return "\n".join(lines)


COLUMNS = ("over colocate", "over bound", "predicted over measured")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of every placement")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.worker:
        work(*arguments.worker)
        return
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two devices need two cores")
    command = shlex.join(["python", "benchmarks/placement_run.py", *(sys.argv[1:] if given is None else given)])
    result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command}
    print(f"{result['date']}, `{command}`", flush=True)
    for load in arguments.loads:
        result[load] = benchmark(load, arguments.repeats)
        print(f"\n## {load} (bound {result[load]['bound']:.2f} s)\n\n{table(result[load])}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
