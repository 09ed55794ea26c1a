"""Weights through a group of real processes: equal to the bit, in buckets, and what happens when a side fails."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.errors import UserError
from mmrl.inference import vllm_server
from mmrl.inference.server_process import Timeouts
from mmrl.inference.weight_files import Sending
from mmrl.inference.weight_groups import WeightGroup, buckets
from tests.support import ranks

CPU = torch.device("cpu")


class Files:
    """Memory named by a file, in place of a GPU's handle."""

    def __init__(self, folder):
        self.folder, self.shared = folder, []

    def handle(self, bucket):
        path = self.folder / f"bucket-{len(self.shared)}"
        torch.save(bucket, path)
        self.shared.append(path)
        return {"path": str(path)}

    def opened(self, handle):
        return torch.load(handle["path"], weights_only=True)


def weights():
    made = torch.Generator().manual_seed(5)
    named = {
        "embed": torch.randn(33, 7, generator=made),
        "half": torch.randn(5, 3, generator=made).bfloat16(),
        "one": torch.randn(1, generator=made),
        "scalar": torch.tensor(3.5),
        "turned": torch.randn(4, 9, generator=made).t(),
        "large": torch.randn(64, 64, generator=made),
        "bits": torch.randint(0, 255, (13,), generator=made, dtype=torch.uint8),
    }
    named["not finite"] = torch.tensor([float("nan"), float("inf"), -0.0])
    return named


def main(rank, size, meeting, backend, out):
    sharing = Files(Path(meeting).parent) if backend == "ipc" else None
    group = WeightGroup(Path(meeting), rank, size, backend, CPU, patience=60, sharing=sharing)
    group.prove()
    dtypes = {"large": torch.bfloat16}
    got = {}
    for _ in range(2):  # the group serves update after update
        if rank:
            got = dict(group.received())
        else:
            group.send(weights().items(), 4096, dtypes)
            got = {name: tensor.to(dtypes.get(name, tensor.dtype)).contiguous() for name, tensor in weights().items()}
    torch.save({name: tensor.clone() for name, tensor in got.items()}, out)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("gloo", 3), ("ipc", 3)])
def test_each_process_receives_every_bit(tmp_path, backend, size):
    outs = [tmp_path / f"{rank}.pt" for rank in range(size)]
    meeting = tmp_path / "meeting"
    sent, *received = ranks.launched(__file__, outs, lambda rank, port, out: (rank, size, meeting, backend, out))
    for got in received:
        assert list(got) == list(sent)
        assert all(same_bits(got[name], sent[name]) for name in sent)


def test_buckets_hold_at_most_what_they_may_and_a_larger_tensor_is_alone():
    made = list(buckets(weights().items(), 1000, CPU, {}))
    assert [[name for name, _, _ in header] for header, _ in made] == [
        ["embed", "half", "one", "scalar"],
        ["turned"],
        ["large"],
        ["bits", "not finite"],
    ]
    assert all(bucket.nbytes <= 1000 for header, bucket in made if header[0][0] != "large")
    assert json.loads(json.dumps(made[1][0])) == [["turned", "float32", [9, 4]]]


def two_sides(folder, send, receive):
    """The results of both, or their errors."""

    def one(rank, work):
        try:
            return work(WeightGroup(folder / "meeting", rank, 2, "gloo", CPU, patience=60))
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.submit(one, 0, send), pool.submit(one, 1, receive)
        return sender.result(120), receiver.result(120)


class Lost(Files):
    """Memory that cannot be named, or not be opened, or is another's."""

    def __init__(self, folder, how):
        super().__init__(folder)
        self.how = how

    def handle(self, bucket):
        if self.how == "unnamed":
            raise RuntimeError("no handle")
        return super().handle(bucket)

    def opened(self, handle):
        if self.how == "unopened":
            raise RuntimeError("invalid device context")
        return super().opened(handle) + 1


@pytest.mark.parametrize(
    ("how", "said"), [("unnamed", "no handle"), ("unopened", "invalid device context"), ("others", "other bytes")]
)
def test_memory_that_cannot_be_shared_is_found_before_any_weight_is_sent(tmp_path, how, said):
    def one(rank):
        group = WeightGroup(tmp_path / "meeting", rank, 2, "ipc", CPU, patience=60, sharing=Lost(tmp_path, how))
        try:
            group.prove()
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(one, range(2))
    assert "memory of the trainer could not be opened" in sender
    assert said in receiver


def test_receivers_hear_of_a_sender_that_fails(tmp_path):
    def some():
        yield from list(weights().items())[:2]
        raise MemoryError("no room")

    sent, received = two_sides(tmp_path, lambda group: group.send(some(), 64), lambda group: dict(group.received()))
    assert isinstance(sent, MemoryError)
    assert isinstance(received, UserError)
    assert "could not send its weights" in str(received)


def test_a_sender_stops_before_the_next_bucket_where_nobody_receives(tmp_path):
    calls = []

    def going():
        calls.append(1)
        if len(calls) == 3:
            raise UserError("the server refused")

    sent, received = two_sides(
        tmp_path,
        lambda group: group.send(weights().items(), 64, going=going),
        lambda group: dict(group.received()),
    )
    assert "the server refused" in str(sent)
    assert "could not send" in str(received)


def test_a_receiver_that_is_gone_is_an_error_of_the_sender(tmp_path):
    def begun(group):
        next(group.received())
        group.close()

    large = [(f"w{n}", torch.zeros(2**20)) for n in range(8)]
    sent, _ = two_sides(tmp_path, lambda group: group.send(large, 2**20), begun)
    assert isinstance(sent, RuntimeError)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ("{weight_transport: gloo}", r"rollout\.weight_transport: gloo needs an engine in vLLM's server; set"),
        ("{reproducible: false}", r"rollout\.reproducible: false is for vLLM and SGLang; remove it, or set"),
        ("{engine: sglang, weight_transport: ipc}", "ipc needs an engine in vLLM's server"),
        ("{engine: vllm_server, weight_transport: nccl}", "on the same GPU, .* set weight_transport to ipc"),
        (
            "{engine: vllm_server, weight_transport: ipc, options: {environment: {CUDA_VISIBLE_DEVICES: '1'}}}",
            "which the engine does not see; set weight_transport to nccl",
        ),
        (
            "{engine: vllm_server, weight_transport: gloo, options: {data_parallel_size: 2}}",
            "counts the processes of one model; remove data_parallel_size",
        ),
        ("{engine: vllm_server, weight_transport: rdma}", "weight_transport"),
    ],
)
def test_a_transport_that_one_end_lacks_is_refused(rollout, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(["sums"], [f"rollout={rollout}"])
    load_recipe(["sums"], ["rollout={engine: vllm_server, weight_transport: gloo}"])


if __name__ == "__main__":
    rank_, size_, *others = sys.argv[1:]
    main(int(rank_), int(size_), *others)


def trial(monkeypatch, folder, join):
    """What a server takes after the trial of a group that ``auto`` chose: ``join`` is the meeting."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(vllm_server, "_OPTIONAL_S", 0.05)
    monkeypatch.setattr(vllm_server, "_GRACE_S", 0.05)
    monkeypatch.setattr(vllm_server.GroupSender, "_joined", lambda *_: join())
    server = SimpleNamespace(
        _sending=Sending(transport="nccl", optional=True),
        _client=None,
        _private=folder,
        _dtypes={},
        _process=SimpleNamespace(ended=lambda: False),
    )
    return vllm_server.VllmServer._joined(server, 1, Timeouts(60, 60)), server._sending.transport


def test_a_trial_that_fails_takes_files_and_one_that_hangs_ends_with_the_edit(tmp_path, monkeypatch, capsys):
    free = Event()

    def fails():
        raise UserError("no peer access")

    group = object()
    assert trial(monkeypatch, tmp_path, lambda: group)[0]._group is group
    assert "auto takes nccl" in capsys.readouterr().err
    assert trial(monkeypatch, tmp_path, fails) == (None, "auto")
    assert "auto takes files, because nccl does not work here: no peer access" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"neither worked nor failed .* set rollout\.weight_transport=shm"):
        trial(monkeypatch, tmp_path, lambda: free.wait(60))
    free.set()
