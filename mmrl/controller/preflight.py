"""Right after start: whether all ranks of a run reach each other with what sums their gradients, within a time."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

import torch.distributed as dist

from mmrl.core.daemon import in_daemon
from mmrl.core.durations import duration
from mmrl.core.errors import UserError

LONGEST_S = 120.0
_SHORTEST_S = 30.0
_ASK_S = 5.0
"""Seconds in which the store answers, and in which others come after a rank has failed."""


class FirstSum(NamedTuple):
    """The first sum of all ranks, on ``device``, where gradients lie; also of groups of ``sizes`` neighbours. It has
    ``seconds``. ``hosts``: by rank, as far as they are known."""

    device: str = "cpu"
    sizes: Sequence[int] = ()
    seconds: float = LONGEST_S
    hosts: Mapping[int, str] = MappingProxyType({})


class UnreachedError(UserError):
    """Ranks of the run do not reach each other."""


def seconds_of(patience: float) -> float:
    """How long the ranks may take: two minutes, or ``patience`` if it is shorter, and at least half a minute."""
    return min(LONGEST_S, max(_SHORTEST_S, patience))


def reach(store: dist.Store, rank: int, size: int, first: FirstSum, connect: Callable[[], None]) -> None:
    """Run ``connect``, which all ranks call together: it makes the ``first`` sum. Raises ``UnreachedError`` if it
    fails, or takes too long: it names the ranks that answered."""
    board: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # the other one may wait for ever
    board.set_timeout(timedelta(seconds=_ASK_S))
    board.set(f"preflight/came/{rank}", f"{platform.node()}, {first.device}")
    made = in_daemon(connect, "preflight")
    ended = wait([made], first.seconds).done
    error = made.exception() if ended else None
    if ended and error is None:
        return
    why = f"did not end within {duration(first.seconds)}" if error is None else f"failed ({_first_line(error)})"
    raise UnreachedError(
        f"{size} ranks do not reach each other: a first sum over all {why}. {_answers(board, size, first.hosts)}"
    )


def _answers(board: dist.Store, size: int, hosts: Mapping[int, str]) -> str:
    """Who answered and who did not, and what helps."""
    came: dict[int, str] = {}
    until = time.monotonic() + _ASK_S
    try:
        while len(came) < size:
            for rank in range(size):
                if rank not in came and board.check([key := f"preflight/came/{rank}"]):
                    came[rank] = board.get(key).decode()
            if time.monotonic() > until:
                break
            time.sleep(_ASK_S / 50)
    except RuntimeError:
        return f"Where all meet, nobody answers: rank 0{_of(0, hosts)} has ended, or is stopped. {_hints()}"
    missing = [f"{rank}{_of(rank, hosts)}" for rank in range(size) if rank not in came]
    answered = ", ".join(f"{rank} ({came[rank]})" for rank in sorted(came))
    lacks = f"no answer from {', '.join(missing)}" if missing else "all answered, so what connects them fails"
    return f"Answered: {answered}; {lacks}. {_hints()}"


def _of(rank: int, hosts: Mapping[int, str]) -> str:
    return f" ({hosts[rank]})" if rank in hosts else ""


def _hints() -> str:
    gloo, visible = os.environ.get("GLOO_SOCKET_IFNAME", "not set"), os.environ.get("CUDA_VISIBLE_DEVICES")
    said = f"See what those ranks printed; name the network that all hosts share (GLOO_SOCKET_IFNAME is {gloo} here)"
    if visible is None:
        return said
    return (
        f"{said} and NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says which connection fails; under Slurm let every task see "
        f"all GPUs of its host (--gpus-per-node, not --gpus-per-task; CUDA_VISIBLE_DEVICES is {visible} here)"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
