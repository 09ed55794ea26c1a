"""The first sum of a run has a limit, and says who answered."""

import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from mmrl.controller import preflight
from mmrl.controller.preflight import FirstSum, UnreachedError, seconds_of
from tests.support.ranks import free_port, launched


def serve(rank, port, out, silent, sizes):
    import torch.distributed as dist

    from mmrl.controller.peers import Group

    if rank in silent and rank > 0:  # it never comes; it ends once the others have said so
        others = [Path(out).with_name(f"{r}.pt") for r in range(4) if r not in silent]
        while not all(path.exists() for path in others):
            time.sleep(0.1)
        torch.save("silent", out)
        os._exit(0)
    try:
        first = FirstSum(sizes=sizes, seconds=3 if silent else 120, hosts={1: "node7"})
        group = Group(rank, 4, "127.0.0.1", port, first=first)
    except UnreachedError as error:
        said = str(error)
        torch.save(said, Path(out).with_suffix(".part"))
        os.rename(Path(out).with_suffix(".part"), out)
        if rank == 0:  # who keeps the store goes last
            while not all(Path(out).with_name(f"{r}.pt").exists() for r in range(4)):
                time.sleep(0.1)
        os._exit(0)
    found = [dist.get_world_size(g) for n in sizes for g in group.divided(n)]
    again = [g is h for n in sizes for g, h in zip(group.divided(n), group.divided(n), strict=True)]
    torch.save((found, all(again)), out)
    group.close()


def in_four(tmp_path, silent, sizes=()):
    outs = [tmp_path / f"{rank}.pt" for rank in range(4)]
    return launched(__file__, outs, lambda rank, port, out: [rank, port, out, ",".join(map(str, silent)), *sizes])


def test_the_groups_that_divide_weights_are_tried_and_kept(tmp_path):
    assert in_four(tmp_path, (), (2,)) == [([2, 2], True)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("silent", [(1,), (1, 3), (3, 2, 1)])
def test_who_answered_and_who_did_not_is_named(tmp_path, silent):
    found = in_four(tmp_path, silent)
    for rank in {0, 1, 2, 3} - set(silent):
        said = found[rank]
        assert said.startswith("4 ranks do not reach each other: a first sum over all did not end within 3.0 s. ")
        answered, _, missing = said.partition("Answered: ")[2].partition("no answer from ")
        assert [f"{r} (" in answered for r in range(4)] == [r not in silent for r in range(4)], said
        assert ", cpu)" in answered
        assert [str(r) in missing.partition(". ")[0].replace("node7", "") for r in range(4)] == [
            r in silent for r in range(4)
        ]
        assert "1 (node7)" in missing
        assert "GLOO_SOCKET_IFNAME" in said


def test_an_interface_that_is_not_there_is_said(monkeypatch):
    import torch.distributed as dist

    from mmrl.controller.peers import Group

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(
        UnreachedError, match=r"1 ranks? .*failed \(.*nosuch0.*all answered.*GLOO_SOCKET_IFNAME is nosuch0"
    ):
        Group(0, 1, "127.0.0.1", free_port())
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_first_sum_that_fails_as_its_time_ends_is_no_success(monkeypatch):
    import torch.distributed as dist

    class Late(Future):
        def done(self):
            if not (was := super().done()):
                self.set_exception(RuntimeError("too late"))
            return was

    monkeypatch.setattr(preflight, "in_daemon", lambda call, name: Late())
    board = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True, wait_for_workers=False)
    with pytest.raises(UnreachedError, match="do not reach each other"):
        preflight.reach(board, 0, 1, FirstSum(seconds=0.0), lambda: None)


def test_the_limit_follows_the_patience():
    assert [seconds_of(n) for n in (3, 60, 120, 3600)] == [30, 60, 120, 120]


if __name__ == "__main__":
    rank, port, out, silent, *sizes = sys.argv[1:]
    serve(int(rank), int(port), out, [int(r) for r in silent.split(",") if r], [int(n) for n in sizes])


class StartsCuda(Exception):  # no error: it ends the test there
    pass


@pytest.mark.parametrize(
    ("words", "own", "expected"),
    [
        (["train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=2"], None, "1"),
        (["train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=2"], "8", "8"),
        (["train.backend=fsdp", "devices_per_controller=2"], None, None),
        (["devices_per_controller=2"], None, None),
    ],
)
def test_what_cuda_reads_once_is_set_before_a_process_first_asks_for_its_device(
    monkeypatch, tmp_path, words, own, expected
):
    """Megatron-Core wants one queue, so that kernels run in the order of their launch; the user's own value stays."""
    from mmrl.config.loader import load_recipe
    from mmrl.logging.rundir import RunDir
    from mmrl.runtime import process
    from mmrl.runtime.heartbeat import Processes, whereabouts
    from mmrl.runtime.launchers import Launched
    from mmrl.runtime.rendezvous import meet

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", own or "")  # so that it is as before after the test
    if own is None:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    seen = []

    def first_asks(name):
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        raise StartsCuda

    monkeypatch.setattr(process, "choose_device", first_asks)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: first_asks(""))
    loaded, found = load_recipe(["sums"], words), Launched("torchrun", 0, 2, 0, "127.0.0.1", free_port())
    where = Processes({n: whereabouts() for n in range(2)}, 2, range(2))
    first = process.RunProcess(loaded, RunDir(tmp_path), found, meet(found, 60.0), where, lambda outcome: None)
    with pytest.raises(StartsCuda):
        first._join(0)
    assert seen == [expected]
