"""Shared by the tests of megatron critic and others."""

import faulthandler
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from tests.support import megatron as megatron

BASE = [
    "algorithm={type: ppo, critic_lr: 3.0e-5}",
    "model.dtype=float32",
    "model.freeze=[]",
    "optim.schedule=constant",
    "optim.lr=3e-5",
    "sampling.max_new_tokens=8",
]
TOKENS = [*megatron.TP, "train.sequence_parallel=true", "model.gradient_checkpointing=true"]
NEEDS = frozenset({"log_probs", "values"})


def opened(name, path, controller, *overrides):
    """A run of the recipe ``name`` whose critic's head is none that would hide its body."""
    loaded = load_recipe([name], [f"model.path={path}", *BASE, *overrides])
    run = megatron.build(loaded.recipe, controller)
    assert run.critic is not None
    drawn = torch.Generator().manual_seed(0)
    for name in ("head.weight", "head.bias"):
        part = run.critic.trainable[name]
        with torch.no_grad():
            part.copy_(0.3 * torch.randn(part.shape, generator=drawn))
    run.critic.weights.changed()
    return run


def sees(folder):
    from tests.support.megatron_vision import tiny_model  # skips where its processor's library is missing

    return tiny_model(folder)


def updates(run, rows):
    """Values and both gradients of the first update, and values and weights after four."""
    both = {"policy": run, "critic": SimpleNamespace(policy=run.critic, pipeline=run.pipeline)}
    found = megatron.replayed(run, rows, NEEDS)
    kept = {name: {} for name in both}
    for name, of in both.items():
        of.policy.optimizer.register_step_pre_hook(lambda *_, of=of, name=name: megatron.keep(of, kept[name]))

    def loss_of(rows):
        weigh = torch.linspace(-1, 1.5, 8)[[s.index for s in rows.slots]].unsqueeze(1)
        new = run.pipeline.replay(rows, [0], NEEDS, run.policy.using)
        return ((weigh * new["log_probs"] + (new["values"] - weigh) ** 2) * rows.padded("action_mask")).sum() / 100

    halves = [rows.rows(list(range(n, len(rows), 2))) for n in range(2)]
    for _ in range(megatron.UPDATES):
        run.policy.accumulate(halves, loss_of)
        run.policy.apply()
        run.critic.apply()
    found |= {f"after/{name}": value for name, value in megatron.replayed(run, rows, NEEDS).items()}
    for of, gradients in kept.items():
        found |= {f"{of}/{name}": value for name, value in gradients.items()}
    trained = run.critic.trainable.items()
    return found | {f"weights/{k}": megatron.of_all(both["critic"], k, p.detach()) for k, p in trained}


def serve(out, rank, size, port, name, path, *overrides):
    """One rank of a layout: the script's work."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(280, exit=True)
    peers = Group(rank, size, "127.0.0.1", port, devices=size)
    run = opened(name, path, Controller(0, 0, 1, peers), *overrides)
    torch.save(updates(run, megatron.rows_of(run, 0, 1)), out)
    peers.close()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("sums", megatron.TP),
        ("sums", TOKENS),
        ("scenes", megatron.TP),  # with a vision tower of its own
    ],
)
def test_a_shared_body_has_the_values_and_gradients_of_the_whole(name, layout, tmp_path):
    pytest.importorskip("megatron.core")
    path = megatron.tiny(tmp_path / "model", "Qwen2") if name == "sums" else sees(tmp_path / "model")
    run = opened(name, path, None)
    whole = updates(run, megatron.rows_of(run, 0, 1))
    assert whole["values"].abs().max() > 0.1
    for rank in megatron.together(tmp_path, 2, "serve", name, path, *layout, script=__file__):
        assert rank.keys() == whole.keys()
        for kind in ("policy/gradient/", "critic/gradient/body.", "critic/gradient/head.", "weights/"):
            names = [name for name in whole if name.startswith(kind)]
            one, all_ = (torch.cat([of[name].flatten() for name in names]) for of in (rank, whole))
            assert (one - all_).norm() <= 1e-5 * all_.norm(), kind
        for name in ("values", "log_probs", "after/values", "after/log_probs"):
            torch.testing.assert_close(rank[name], whole[name], rtol=0, atol=1e-4)


if __name__ == "__main__":
    what, out, rank, size, port, *rest = sys.argv[1:]
    {"serve": serve}[what](Path(out), int(rank), int(size), int(port), *rest)
