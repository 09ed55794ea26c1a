"""No product of the policy is float32 where several ranks divide one model with half precision: Megatron-Core's layouts
and context parallelism, over real gloo process groups on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import megatron as megatron
from tests.support.products import counter
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision

HALF = ["model.dtype=bfloat16", "algorithm.kl_coef=0.01"]
SHARDS = ["train.context_parallel=2", "devices_per_controller=2"]
LAYOUTS = {
    "tensor": (2, megatron.TP),
    "stages": (2, megatron.PP),
    "context": (2, megatron.CP),
    "optimizer": (2, megatron.ZERO),
    "all": (4, megatron.LONG),
    "shards in context": (2, [*SHARDS, "train.backend=fsdp"]),
    "lora in context": (2, [*SHARDS, "model.lora={rank: 4}"]),
}


def count(out, rank, size, port, *overrides):
    """One rank: products by dtype while it samples, replays, and updates with the reference in its loss, and the dtypes
    of the numbers that the loss reads."""
    torch.set_num_threads(1)
    devices = load_recipe(["sums"], [*megatron.SMALL, *overrides]).recipe.devices_per_controller
    peers = Group(rank, size, "127.0.0.1", port, devices=devices)
    run = megatron.made(megatron.SHIPPED, Controller(0, rank // devices, size // devices, peers), *overrides)
    width, dtypes = run.policy.weights.width, set()
    with counter() as counted:
        rows = megatron.rows_of(run, rank // width, size // width)

        found = megatron.replayed(run, rows, frozenset({"log_probs"}))
        found |= megatron.replayed(run, rows, frozenset({"reference_log_probs"}))
        dtypes.update(str(t.dtype) for t in found.values())

        def loss_of(rows):
            new = run.pipeline.replay(rows, [0], frozenset({"log_probs"}), run.policy.using)
            dtypes.update(str(t.dtype) for t in new.values())
            return (new["log_probs"] * rows.padded("action_mask")).sum()

        run.policy.accumulate([rows.rows([0]), rows.rows([1])], loss_of)
        run.policy.apply()
    torch.save({"products": dict(counted.products), "dtypes": sorted(dtypes)}, out)
    peers.close()


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("tensor", "context"))) for name in LAYOUTS]
)
def test_no_product_of_ranks_that_divide_a_model_is_float32(layout, tmp_path):
    size, words = LAYOUTS[layout]
    if "train.backend=megatron" in words:
        pytest.importorskip("megatron.core")
    outs = [tmp_path / f"{rank}.pt" for rank in range(size)]
    found = launched(__file__, outs, lambda rank, port, out: [out, rank, size, port, *words, *HALF])
    for rank in found:
        assert rank["products"].get("bfloat16", 0) > 0
        assert rank["products"].get("float32", 0) == 0
        assert rank["dtypes"] in (["torch.float32"], [])  # a stage that is not the last knows of none
    assert any(rank["dtypes"] for rank in found)


if __name__ == "__main__":
    out, rank, size, port, *rest = sys.argv[1:]
    count(Path(out), int(rank), int(size), int(port), *rest)
