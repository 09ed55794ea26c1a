"""Optimizer state and a reference that live on the host, on a CUDA device that is pretended: they move really, what is
computed stays the same to the bit, and the host waits for nothing."""

import json

import pytest

pytestmark = pytest.mark.pretend_cuda


def policy(group=None, **performance):
    from collections import Counter

    import torch
    from torch import nn

    from mmrl.config.performance import Performance
    from mmrl.config.schema import Optim
    from mmrl.models.policy import Policy
    from mmrl.models.sharded import Sharded

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to("cuda")
    weights = Sharded(module, group, Counter()) if group else None
    made = Policy(module, Optim(lr=0.05), 10, weights, Performance(**performance))
    made.keep("reference")
    return made


def update(made, n):
    """Two slices that ask for the reference, and the optimizer's step."""
    import torch

    from mmrl.core.transfer import to_device

    generator = torch.Generator().manual_seed(n)
    for _ in range(2):
        x = to_device(torch.randn(4, 8, generator=generator), torch.device("cuda"))
        with made.using("reference"), torch.no_grad():
            reference = made.module(x)
        made.backward((made.module(x) - reference - 1).square().mean())
    return made.apply()


def devices(made):
    """Where the moments and the reference are."""
    kept = [s[k] for s in made.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    return {t.device.type for t in kept}, {t.device.type for t in made.copies["reference"].values()}


BOTH = {"offload_optimizer": True, "offload_reference": True}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_offloading_changes_no_bit_and_waits_for_nothing(optimizer):
    import torch

    from tests.support import pretend

    plain, moved = policy(optimizer=optimizer), policy(optimizer=optimizer, **BOTH)
    waited = []
    for n in range(3):
        rows = []
        for made in (plain, moved):
            with pretend.waits() as waits:
                rows.append(update(made, n))
            waited.append(sum(waits.values()))
        assert rows[0] == rows[1]
    assert devices(plain) == ({"cuda"}, {"cuda"})
    assert devices(moved) == ({"cpu"}, {"cpu"})
    assert all(t.is_pinned() for t in moved.copies["reference"].values())
    assert not moved._visiting  # nothing of it is on the device after an update
    for name, p in plain.trainable.items():
        assert torch.equal(p, moved.trainable[name])
    assert waited[::2] == waited[1::2]


@pytest.mark.parametrize(("first", "second"), [({}, BOTH), (BOTH, {}), (BOTH, BOTH)])
def test_a_checkpoint_is_taken_up_whichever_way_the_state_lay(first, second):
    import torch

    through, began = policy(), policy(**first)
    for made in (through, began):
        update(made, 0)
        update(made, 1)
    tensors, numbers = began.state()
    saved = {part: {k: t.detach().cpu().clone() for k, t in of.items()} for part, of in tensors.items()}
    resumed = policy(**second)
    rooms = resumed.rooms(saved)
    for part, of in saved.items():
        for k, t in of.items():
            rooms[part][k].copy_(t)
    resumed.load_state(rooms, numbers)
    where = "cpu" if second else "cuda"
    assert devices(resumed) == ({where}, {where})
    update(through, 2)
    update(resumed, 2)
    for name, p in through.trainable.items():
        assert torch.equal(p, resumed.trainable[name])


def test_shards_of_eight_ranks_move_too():
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        plain, moved = policy(dist.group.WORLD), policy(dist.group.WORLD, **BOTH)
        for made in (plain, moved):
            update(made, 0)
        assert devices(moved) == ({"cpu"}, {"cpu"})
        for name, p in plain.trainable.items():
            assert torch.equal(p, moved.trainable[name])
        tensors, numbers = moved.state()
        spread = {part: {k: moved.checkpoint_view(part, k, t) for k, t in of.items()} for part, of in tensors.items()}
        assert spread["optimizer"]["exp_avg.0.weight"].shape == (16, 8)
        rooms = moved.rooms(spread)
        for part, of in tensors.items():
            for k, t in of.items():
                rooms[part][k].copy_(t)
        moved.load_state(rooms, numbers)
        assert devices(moved) == ({"cpu"}, {"cpu"})
    finally:
        dist.destroy_process_group()


def test_a_run_with_a_checkpoint_in_between(tmp_path):
    """Text with a reference in its loss: three steps and a checkpoint, with everything offloaded and without."""
    from tests.support import pretended_text as text
    from tests.support import tiny

    tiny.language_model(tmp_path / "model", sharp=0.02)
    data = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (tmp_path / "reward.py").write_text(text.REWARD)
    (tmp_path / "recipe.yaml").write_text(text.RECIPE)
    loss = ["algorithm={type: grpo, kl_coef: 0.1}", "sampling.max_new_tokens=3", "model.dtype=float32"]
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    offloaded = ["performance={offload_optimizer: true, offload_reference: true}"]
    one = text.trained(tmp_path / "recipe.yaml", plain, *loss)
    other = text.trained(tmp_path / "recipe.yaml", changed, *loss, *offloaded)
    for a, b in zip(one, other, strict=True):
        assert {k: v for k, v in a.items() if k.startswith(("optim/", "kl", "reward"))} == {
            k: v for k, v in b.items() if k.startswith(("optim/", "kl", "reward"))
        }


def test_memory_is_page_locked_by_threads_and_every_copy_is_equal(monkeypatch):
    """The allocator of a GPU reads the settings; the pretended one keeps them, and moves frozen weights really."""
    import torch
    from torch import nn

    from mmrl.config.performance import Performance
    from mmrl.core.offload import Frozen
    from mmrl.models import performance

    given, setter = [], torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda s: (given.append(s), setter(s)))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    performance.settle(Performance(), torch.device("cpu"))
    assert not given
    performance.settle(Performance(), torch.device("cuda"))
    assert len(given) == 1
    assert given[0].startswith("pinned_use_cuda_host_register:True,pinned_num_register_threads:")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    performance.settle(Performance(), torch.device("cuda"))
    assert len(given) == 1, "the user's settings stay"
    module = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8).bfloat16(), nn.BatchNorm1d(8)).to("cuda")
    before = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    frozen = Frozen(module)
    for _ in range(2):
        frozen.sleep("cuda")
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
        frozen.wake("cuda")
        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in module.state_dict().items())


def test_threads_that_lock_pages_are_a_power_of_two_up_to_eight():
    from mmrl.models.performance import page_locking

    for cores in range(1, 300):
        threads = int(page_locking({}, cores).rpartition(":")[2])
        assert threads <= min(8, cores) < 2 * threads or threads == 8
        assert threads.bit_count() == 1
    assert page_locking({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, 8) == ""
