"""Weights on their way to an engine of its own: gathered once, one by one, in buckets, by ranks that hold parts."""

import faulthandler
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.engine_weights import write_adapter
from mmrl.inference.weight_files import write_weights
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "pipelines/llm/models/sums-qwen3"
BUCKET = 600_000
LAYOUTS = {
    "fsdp": ["train.backend=fsdp", "controllers=2"],
    "lora": ["train.backend=fsdp", "controllers=2", "model.lora={rank: 4}"],
    "megatron": ["train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=2"],
}


class Files:
    """An engine that keeps what it is given, and knows how many of the tensors before are still there."""

    def __init__(self, folder):
        self.folder, self.updates, self.most = folder, 0, 0

    def update(self, weights):
        self.updates += 1
        write_weights(self.folder / f"{self.updates}", self.watched(weights), BUCKET)

    def update_lora(self, tensors, rank, alpha, targets):
        self.updates += 1
        write_adapter(self.folder / f"{self.updates}", tensors, rank, alpha, targets)

    def watched(self, weights):
        before = []
        for name, tensor in weights:
            self.most = max(self.most, sum(ref() is not None for ref in before))
            before.append(weakref.ref(tensor))
            yield name, tensor
            del tensor


def made(layout, controller=None):
    loaded = load_recipe(["sums"], ["model.dtype=float32", *LAYOUTS[layout]])
    return build(loaded.recipe, controller)


def serve(layout, rank, port, out):
    """One rank's work: three updates, of the weights that the run began with, of doubled ones, and of a copy."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(280, exit=True)  # a rank that waits for another says where
    devices = 2 if layout == "megatron" else 1
    peers = Group(rank, 2, "127.0.0.1", port, devices=devices)
    run = made(layout, Controller(0, rank // devices, 2 // devices, peers))
    policy, engine = run.policy, Files(out.with_suffix(""))
    engine.folder.mkdir()
    run.pipeline.engine = engine
    policy.keep("before")
    sent = [peers.sent["weights"]]
    run.pipeline.sync(policy)
    sent.append(peers.sent["weights"])
    run.pipeline.sync(policy)  # it has them
    with torch.no_grad():
        for p in policy.trainable.values():
            p.mul_(2)
    policy.updates += 1
    run.pipeline.sync(policy)
    with policy.using("before"):
        run.pipeline.sync(policy)
    with pytest.raises(UserError, match="weights are sharded"):
        run.pipeline._push()  # alone, as after a loss
    mine = sum(p.nbytes for p in policy.trainable.values())
    found = {"most": engine.most, "sent": sent[1] - sent[0], "mine": mine, **run.pipeline.updates()}
    torch.save(found, out)
    peers.close()


@pytest.mark.parametrize(
    "layout", [pytest.param("fsdp"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("lora", "megatron"))]
)
def test_ranks_with_parts_give_each_tensor_whole_and_once(layout, tmp_path):
    if layout == "megatron":
        pytest.importorskip("megatron.core")
    outs = [tmp_path / f"{n}.pt" for n in range(2)]
    found = launched(__file__, outs, lambda rank, port, out: [layout, rank, port, out])
    one = made("lora") if layout == "lora" else None
    if one is None:
        expected = {k: v.float() for k, v in load_file(SHIPPED / "model.safetensors").items()}
    else:
        expected = {k.replace(".default", ""): p.detach() for k, p in one.policy.trainable.items()}
    for rank, said in enumerate(found):
        for n, factor in ((1, 1.0), (2, 2.0), (3, 1.0)):
            files = sorted((tmp_path / f"{rank}" / f"{n}").glob("*.safetensors"))
            assert len(files) > 1 or one is not None
            read = {}
            for each in map(load_file, files):
                assert one is not None or len(each) == 1 or sum(t.nbytes for t in each.values()) <= BUCKET
                assert not read.keys() & each.keys()
                read |= each
            assert read.keys() == expected.keys()
            assert all(torch.equal(t, factor * expected[name]) for name, t in read.items())
        size = sum(t.nbytes for t in expected.values())
        assert (said["perf/engine_updates"], said["perf/engine_update_bytes"]) == (3, 3 * size)
        assert said["perf/engine_update_seconds"] > 0
        assert said["most"] <= 1  # the one that is being gathered, and the one before it
        if layout != "megatron":  # which counts what goes to other models alone
            assert said["sent"] == said["mine"] > 0  # its part of each, once


if __name__ == "__main__":
    layout, rank, port, out = sys.argv[1:]
    serve(layout, int(rank), int(port), Path(out))
