"""Messages between a controller and its devices: tensors arrive equal and are the reader's own, of any size."""

import gc
import os
import threading
from multiprocessing import Pipe

import pytest
import torch

from mmrl.runtime import wire


def over(message):
    """What arrives, and the size that the sender counted."""
    ours, theirs = Pipe()
    sizes = []
    sender = threading.Thread(target=lambda: sizes.append(wire.send(ours, message)))
    sender.start()
    got = wire.receive(theirs)
    sender.join()
    ours.close()
    theirs.close()
    return got, sizes[0]


def tensors(large):
    made = torch.Generator().manual_seed(1)
    return {
        "odd": torch.randint(0, 255, (7,), generator=made, dtype=torch.uint8),
        "weights": torch.randn(large, generator=made),
        "half": torch.randn(3, 5, generator=made).bfloat16(),
        "turned": torch.randn(6, 4, generator=made).t(),
        "none": torch.empty(0, 3),
        "long": torch.arange(11),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("large", [8, wire.SHARED_FROM])
def test_tensors_arrive_and_are_the_readers_own(large):
    sent = tensors(large)
    (got, words), size = over((sent, ["text", {"n": 3}]))
    assert words == ["text", {"n": 3}]
    assert size > sum(tensor.nbytes for tensor in sent.values())
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    again, _ = over(sent)
    got["weights"].zero_()
    assert torch.equal(again["weights"], sent["weights"])
    sent["weights"].fill_(7.0)
    assert not torch.equal(again["weights"], sent["weights"])


def test_a_message_that_is_kept_in_part_keeps_its_memory_and_then_frees_it():
    def mapped():
        return sum("memfd:mmrl" in line for line in open("/proc/self/maps"))

    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    kept = over([torch.full((wire.SHARED_FROM,), float(n)) for n in range(3)])[0][1]
    gc.collect()
    assert torch.equal(kept, torch.ones(wire.SHARED_FROM))
    assert mapped() > before
    del kept
    gc.collect()
    assert mapped() <= before  # what an earlier test left may go, too
    assert len(os.listdir("/proc/self/fd")) <= files


def test_without_shared_memory_tensors_follow_on_the_socket(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    sent = tensors(wire.SHARED_FROM)
    got, _ = over(sent)
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.items())
    got["weights"].zero_()  # it can be written to


def test_a_reader_whose_sender_is_gone_gets_an_error():
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)
