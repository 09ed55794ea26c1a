"""What torchrun and Slurm tell a process that they start: which process it is, of how many, and where all meet."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from mmrl.core.errors import UserError
from mmrl.core.notices import note

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20000, 32000)
"""Below the ports that Linux gives to connections."""


@dataclass(frozen=True)
class Launched:
    """Process ``rank`` of ``size``, started by ``launcher``; number ``local`` of its host. All meet at ``host:port``.

    ``agent``: torchrun itself listens there; otherwise process 0 does. ``restarts``: how often the launcher has started
    the job again. ``words``: the launcher's own part of the command line.
    """

    launcher: str
    rank: int
    size: int
    local: int
    host: str
    port: int
    nodes: int = 1
    agent: bool = False
    restarts: int = 0
    words: tuple[str, ...] = ()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def processes(self) -> str:
        """The option of the launcher that sets how many processes it starts."""
        return "torchrun --nproc-per-node" if self.launcher == "torchrun" else "srun --ntasks"

    @property
    def processes_of_a_host(self) -> str:
        """The option of the launcher that sets how many processes it starts on a host."""
        return "torchrun --nproc-per-node" if self.launcher == "torchrun" else "srun --ntasks-per-node"

    def command(self, command: str) -> str:
        """``command`` of ``mmrl``, as this launcher starts it."""
        return f"{shlex.join(self.words)} {command}"


def launched(environ: Mapping[str, str]) -> Launched | None:
    """What the variables of ``environ`` say; None for a process that was started alone.

    Raises ``UserError`` for variables of both launchers, and where some are missing or contradict each other.
    """
    torchrun, slurm = bool(environ.get("RANK")), _is_task(environ)
    if torchrun and slurm:
        raise UserError(
            f"this process has the variables of torchrun (RANK={environ['RANK']}) and those of a task of Slurm "
            f"(SLURM_PROCID={environ['SLURM_PROCID']}), and both say which process it is. Start it with "
            "`srun mmrl train RECIPE` alone, or hide Slurm's: `srun --ntasks-per-node=1 env -u SLURM_PROCID torchrun "
            "...`"
        )
    found = _of_torchrun(environ) if torchrun else _of_slurm(environ) if slurm else None
    if found is None or (found.size == 1 and found.rank == 0):
        return None
    if not 0 <= found.rank < found.size:
        raise UserError(
            f"{found.launcher}: process {found.rank} of {found.size} cannot be: numbers go from 0 to {found.size - 1}; "
            "correct the variables, or let the launcher set them"
        )
    return found


def own_device(found: Launched, visible: str | None) -> str:
    """The GPU of this process for CUDA_VISIBLE_DEVICES: one of those that its host's processes share.

    ``visible``: the present value, None where it is not set. Raises ``UserError`` where there are too few.
    """
    if visible is None:
        return str(found.local)
    listed = [one.strip() for one in visible.split(",") if one.strip()]
    if len(listed) > found.local:
        return listed[found.local]
    if found.launcher == "srun" and len(listed) == 1:  # Slurm has divided them (--gpus-per-task)
        return listed[0]
    raise UserError(
        f"process {found.local} of this host needs 1 GPU of its own, and CUDA_VISIBLE_DEVICES={visible} has too few; "
        "ask the launcher for more GPUs a host, or start fewer processes"
    )


def _is_task(environ: Mapping[str, str]) -> bool:
    """Whether this is one of a step's tasks. A batch script has SLURM_PROCID=0 too, but belongs to no step."""
    script = "SLURM_TASK_PID" in environ and "SLURM_STEP_ID" not in environ
    return bool(environ.get("SLURM_PROCID")) and not script


def _of_torchrun(environ: Mapping[str, str]) -> Launched:
    if missing := [name for name in _TORCHRUN if not environ.get(name)]:
        raise UserError(
            f"RANK is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: a process of "
            "torchrun has them all. Start it with `torchrun --nnodes N --nproc-per-node K -m mmrl train RECIPE`, set "
            "the missing ones, or unset RANK for a run of this process alone"
        )
    local = _number(environ, "LOCAL_WORLD_SIZE", "1")
    nodes = _number(environ, "GROUP_WORLD_SIZE", "1")
    each = ("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(local), "-m")
    return Launched(
        "torchrun",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        _number(environ, "LOCAL_RANK"),
        environ["MASTER_ADDR"],
        _number(environ, "MASTER_PORT"),
        nodes,
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        _number(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
        each,
    )


def _of_slurm(environ: Mapping[str, str]) -> Launched:
    size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodelist = next((environ[name] for name in names if environ.get(name)), "")
    if missing := [name for name in (size, "SLURM_LOCALID", "SLURM_JOB_ID") if not environ.get(name)]:
        raise UserError(
            f"SLURM_PROCID is set, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: a task of "
            "Slurm has them all. Start it with `srun mmrl train RECIPE`, or unset SLURM_PROCID for a run of this "
            "process alone"
        )
    host = environ.get("MASTER_ADDR") or first_host(nodelist)
    if not host:
        raise UserError(
            "SLURM_NODELIST is not set, so it is not known where the processes meet; set MASTER_ADDR to the address of "
            "the node of process 0"
        )
    nodes = "SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    hosts, tasks = _number(environ, nodes, "1"), _number(environ, size)
    job, step = _number(environ, "SLURM_JOB_ID"), environ.get("SLURM_STEP_ID", "0")
    drawn = _PORTS[(16 * job + (int(step) if step.isdecimal() else 0)) % len(_PORTS)]
    return Launched(
        "srun",
        _number(environ, "SLURM_PROCID"),
        tasks,
        _number(environ, "SLURM_LOCALID"),
        host,
        _number(environ, "MASTER_PORT", str(drawn)),
        hosts,
        restarts=_number(environ, "SLURM_RESTART_COUNT", "0"),
        words=_srun(tasks, hosts),
    )


def _srun(tasks: int, hosts: int) -> tuple[str, ...]:
    """Slurm may fill a host before it takes the next one; as many processes are on each host as now."""
    if hosts > 1 and tasks % hosts == 0:
        return "srun", "--ntasks", str(tasks), "--ntasks-per-node", str(tasks // hosts)
    return "srun", "--ntasks", str(tasks)


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    value = environ.get(name) or default
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name}={value} is no number; correct it, or let the launcher set it") from None


def first_host(nodelist: str) -> str:
    """The first host of Slurm's ``node[07-09,12],other``; empty where there is none."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodelist.strip())
    return "" if found is None else "".join(part or "" for part in found.groups())


def use_own_device(found: Launched, device: object) -> None:
    """Set CUDA_VISIBLE_DEVICES before CUDA starts, unless the recipe's ``device`` is a CPU."""
    if device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = own_device(found, visible)
    if found.leads and (said := hidden_from_each_other(found, visible)):
        note(said)


def hidden_from_each_other(found: Launched, visible: str | None) -> str:
    """What to say where Slurm shows each task of a host only its own GPU; empty elsewhere."""
    if found.launcher != "srun" or found.size <= found.nodes or visible is None:
        return ""
    if len([one for one in visible.split(",") if one.strip()]) > 1:
        return ""
    return (
        f"warning: Slurm shows each task only its own GPUs (CUDA_VISIBLE_DEVICES={visible}), so NCCL may not use "
        "NVLink between those of a host, or fail; ask for --gpus-per-node in place of --gpus-per-task, "
        "or add --gpu-bind=none"
    )
