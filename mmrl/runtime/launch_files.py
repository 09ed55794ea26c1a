"""The file or the commands that start a recipe on a cluster: ``mmrl launch --print``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError, one_line

TO_FILL_IN = "# TO FILL IN:"
"""Marks what no recipe can know."""
_PER_NODE = 8
"""Devices of a host, if nobody says how many there are."""
_PER_GPU = 8
"""CPU cores of a process on a GPU, if nobody says how many: rewards, readers of media and engines run beside it."""
_EPISODES = 8
"""Cores at most for episodes in processes of their own, which mostly wait for the model."""


@dataclass(frozen=True)
class Job:
    """A recipe on a cluster. ``command``: the words of ``mmrl train`` for it; ``per_node``: devices of a host;
    ``cpus``: cores of a device."""

    recipe: Recipe
    command: tuple[str, ...]
    out: Path
    folder: Path
    per_node: int | None = None
    cpus: int | None = None

    @property
    def gpus(self) -> bool:
        return self.recipe.device != "cpu"

    @property
    def cores(self) -> int:
        """CPU cores of a device: the recipe's threads, and one for each process that computes beside them; on a GPU at
        least 8."""
        least = _PER_GPU if self.gpus else 1
        return self.cpus or max(least, sum(self.cores_of().values()))

    def cores_of(self) -> dict[str, int]:
        """The cores of a device by what needs them, as the recipe says it."""
        recipe = self.recipe
        apart = sum(reward.process for reward in (*recipe.rewards, *recipe.eval.rewards))
        environment = recipe.environment
        episodes = environment.workers if environment is not None and environment.isolate else 0
        found = {
            "threads": recipe.threads or 1,
            "rewards.process": apart,
            "environment.isolate": min(episodes, _EPISODES),
        }
        return {key: n for key, n in found.items() if n}

    @property
    def shown(self) -> str:
        """The directory of the run, for comments."""
        return one_line(str(self.out))

    def nodes(self) -> tuple[int, int]:
        """The number of hosts, and of controllers on each. Raises ``UserError`` where they do not divide."""
        n, devices = self.recipe.controllers, self.recipe.devices_per_controller
        room = (self.per_node or max(_PER_NODE, devices)) // devices
        if room < 1:
            raise UserError(
                f"devices_per_controller: a controller has {devices} devices of one host, and a host has "
                f"{self.per_node}; lower it, or raise --per-node"
            )
        each = min(n, room)
        if n % each:
            fits = next(size for size in range(each, 0, -1) if n % size == 0)
            raise UserError(
                f"controllers: {n} do not divide among hosts with {each} each; set controllers={-(-n // each) * each}, "
                f"or --per-node {fits * devices}"
            )
        return n // each, each


def slurm(job: Job) -> str:
    """A batch script for ``sbatch``. Raises ``UserError``."""
    _several(job.recipe)
    nodes, each = job.nodes()
    tasks = each * job.recipe.devices_per_controller
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.recipe.name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks-per-node={tasks}",
        f"#SBATCH --cpus-per-task={job.cores}{_why(job)}",
        *([f"#SBATCH --gpus-per-node={tasks}"] if job.gpus else []),
        f"#SBATCH --output={job.recipe.name}-%j.log",
        "#SBATCH --signal=TERM@120  # two minutes before the end of its time the run saves and stops",
        "#SBATCH --requeue  # a job that starts again continues from its last checkpoint",
        "#SBATCH --open-mode=append",
        f"{TO_FILL_IN} remove a # where your cluster asks for the line",
        "##SBATCH --partition=PARTITION",
        "##SBATCH --account=ACCOUNT",
        "##SBATCH --time=HH:MM:SS",
        *([] if job.gpus else ["# device=cpu: no GPUs are asked for"]),
        "",
        f"cd {shlex.quote(str(job.folder))} || exit 1  # all nodes must see it, and {job.shown}",
        f"{TO_FILL_IN} what makes `mmrl` a command there, such as: source .venv/bin/activate",
        # srun does not take over what sbatch was asked for, and its tasks may be bound to a core each.
        f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=300 {shlex.join(job.command)}',
        "code=$?",
        "case $code in  # a process was lost, or killed: the job starts again, at most three times",
        '4 | 137) [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _why(job: Job) -> str:
    """What needs the cores, as a comment; nothing where they are given or are those that a GPU has at least."""
    found = job.cores_of()
    if job.cpus or len(found) == 1 or job.cores > sum(found.values()):
        return ""
    return "  # " + ", ".join(f"{key}: {n}" for key, n in found.items())


def torchrun(job: Job) -> str:
    """The commands of torchrun. Raises ``UserError``."""
    _several(job.recipe)
    nodes, each = job.nodes()
    command = shlex.join(job.command)
    lines = [f"cd {shlex.quote(str(job.folder))} || exit 1"]
    start = f"torchrun --nnodes {nodes} --nproc-per-node {each * job.recipe.devices_per_controller}"
    if nodes > 1:
        lines.insert(0, f"# on each of {nodes} hosts, all of which see this folder and {job.shown}")
        lines.append(f"{TO_FILL_IN} the address of one of the hosts, and a port that is free on it")
        lines.append('HEAD=${HEAD:?"set HEAD=ADDRESS:PORT"}')
        start += f' --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id {shlex.quote(job.recipe.name)}'
    return "\n".join([*lines, f"{start} -m {command}"]) + "\n"


def ray(job: Job) -> str:
    """The commands that start a Ray cluster and a job on it. Raises ``UserError``."""
    _several(job.recipe)
    nodes, each = job.nodes()
    kind = "gpus" if job.gpus else "cpus"
    devices = each * job.recipe.devices_per_controller
    lines = [
        f"# {nodes} host{'s' * (nodes > 1)} with {devices} {kind.upper()} each, and all see {job.shown}",
        f"{TO_FILL_IN} the address of the first host, which all others reach",
        'HEAD=${HEAD:?"set HEAD=ADDRESS"}',
        f'ray start --head --node-ip-address="$HEAD" --port=6379 --dashboard-host=127.0.0.1 --num-{kind}={devices}  '
        "# on the first host",
    ]
    if nodes > 1:
        lines.append(f'ray start --address="$HEAD":6379 --num-{kind}={devices}  # on each of the {nodes - 1} others')
    words = f"cd {shlex.quote(str(job.folder))} && {shlex.join(job.command)}"
    lines += [
        "# on the first host, once all have started; the job goes on if this terminal closes",
        f"ray job submit --address http://127.0.0.1:8265 -- sh -c {shlex.quote(words)}",
    ]
    return "\n".join(lines) + "\n"


def _several(recipe: Recipe) -> None:
    if recipe.controllers * recipe.devices_per_controller == 1:
        raise UserError("controllers: the recipe has one, which `mmrl train` starts; set controllers=8, say")
