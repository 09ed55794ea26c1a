"""Shared by the tests of sharded and others."""

import faulthandler
import hashlib
import resource
import signal
import sys
from pathlib import Path

import torch

from mmrl.app.build import build
from mmrl.checkpoint import run_state
from mmrl.checkpoint.writer import Saver
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core import checkpoint_reader as reader
from mmrl.core.clock import Clock
from mmrl.training.loop import train_step
from tests.support.ranks import launched
from tests.support.rows import contents

SMALL = ["train.prompts_per_step=5", "train.group_size=4", "train.micro_batch_size=4", "model.dtype=float32"]
SMALL += ["train.backend=fsdp"]
TEXT = [*SMALL, "train.updates_per_step=2", "algorithm.kl_coef=0.01", "train.micro_batch_tokens=64"]
PICTURES = [*SMALL, "sampling.steps=4", "sampling.window={size: 2}"]
RECIPES = {
    "lora": ("shapes-lora", [*PICTURES, "algorithm.kl_coef=0.01", "optim.ema_decay=0.9"]),
    "full": ("shapes-full", [*PICTURES, "algorithm.kl_coef=0.01", "optim.ema_decay=0.9"]),
    "nft": ("shapes-nft", [*SMALL, "sampling.steps=4"]),
    "text": ("sums", TEXT),
    "lines": ("sums", [*TEXT, "train.packing=true"]),
    "dynamic": ("sums", [*SMALL, "algorithm={type: dapo, dynamic_sampling: true}"]),
    "half": ("shapes-lora", [*PICTURES, "model.dtype=bfloat16"]),
    "critic": ("sums", [*SMALL, "algorithm={type: ppo}", "train.group_size=1", "train.micro_batch_size=1"]),
    "vision": ("scenes", SMALL),
}


def make(name, controller=None, *overrides):
    recipe, changes = RECIPES[name]
    loaded = load_recipe([recipe], [*changes, *overrides])
    return build(loaded.recipe, controller)


def work(run, steps=1):
    """What a rank did: samples of the first step by name, its part of the first gradient and of the last weights and
    copies, metrics, and bytes it holds between steps."""
    sampled, gradient, rows = {}, [], []
    pipeline_sample = run.pipeline.sample

    def sample(slots, ids, *args, **kwargs):
        trajectory = pipeline_sample(slots, ids, *args, **kwargs)
        for i, content in zip(ids, contents(trajectory), strict=True):
            if not rows:
                name = f"{i.slot}/{i.attempt}/{i.sample}"
                sampled[name] = hashlib.sha256(content.contiguous().numpy().tobytes()).hexdigest()
        return trajectory

    def keep(optimizer, *_):
        if not gradient:
            gradient.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained())

    def trained():
        return list(run.policy.trainable.values())

    run.pipeline.sample = sample
    run.policy.optimizer.register_step_pre_hook(keep)
    for step in range(steps):
        row, _ = train_step(run, step, Clock(torch.device("cpu")))
        rows.append(row)
    run.pipeline.close()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(run.policy)}
    copies = {name: list(copy.values()) for name, copy in run.policy.copies.items()}
    return {
        "sampled": sampled,
        "gradient": gradient,
        "weights": [p.detach().clone() for p in trained()],
        "copies": copies,
        "rows": rows,
        "held": sum(held.values()),
    }


def tensors(policy):
    from torch.distributed.tensor import DTensor

    for p in policy.module.parameters():
        yield p.detach().to_local() if isinstance(p, DTensor) else p.detach()
    for state in policy.optimizer.state.values():
        yield from state.values()
    for copy in policy.copies.values():
        yield from copy.values()


def continue_generation(run, folder, ranks):
    """The step after the newest checkpoint: its metrics, the prompts of its slots, and how far Adam and EMA are."""
    found, skipped = reader.load_latest(folder)
    assert found is not None
    assert not skipped
    run_state.restore(run, found)
    row, _ = train_step(run, found.step, Clock(torch.device("cpu")))
    return outcome(run, found.step, row)


def outcome(run, step, row):
    slots = run.controller.slots(step, run.prompts, run.recipe.train.prompts_per_step)
    seen = {str(s.index): s.prompt.id for s in slots}
    counts = sorted({s["step"].item() for s in run.policy.optimizer.state.values()})
    copies = {name: [copy[k] for k in run.policy.trainable] for name, copy in run.policy.copies.items()}
    weights = [p.detach().clone() for p in run.policy.trainable.values()]
    return {"row": row, "seen": seen, "counts": counts, "copies": copies, "weights": weights}


def save(run, folder, ranks):
    """Two steps, a checkpoint of them, and a third step while it is written."""
    sharded = run.recipe.train.backend == "fsdp"
    saver = Saver(folder, 2, ranks if sharded else None, leads=run.controller.leads)
    for step in range(2):
        train_step(run, step, Clock(torch.device("cpu")))
    saver.begin(run_state.of_run(run, 2))
    row, _ = train_step(run, 2, Clock(torch.device("cpu")))
    saver.finish()
    assert (saver.saved, saver.failed) == (2, None)
    return outcome(run, 2, row)


def full_disk(run, folder, ranks):
    """The second rank's disk is full once: both say so, nothing is left of it, and the next save is whole."""
    saver = Saver(folder, 2, ranks, leads=run.controller.leads)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if run.controller.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    saver.begin(run_state.of_run(run, 1))
    saver.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    failed, saved = str(saver.failed), saver.saved
    saver.begin(run_state.of_run(run, 2))
    saver.finish()
    return {"failed": failed, "saved": [saved, saver.saved], "left": sorted(p.name for p in folder.iterdir())}


def serve(name, rank, size, port, out, what, *overrides):
    """A controller in this process: the script's work."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(280, exit=True)  # a rank that waits for another says where
    peers = Group(rank, size, "127.0.0.1", port)
    run = make(name, Controller(0, rank, size, peers), *overrides)
    ranks = peers.again("gloo")
    if what.isdecimal():
        done = work(run, int(what))
    else:
        done = {"save": save, "go_on": continue_generation, "full_disk": full_disk}[what](
            run, Path(out).parent / "checkpoints", ranks
        )
    torch.save({**done, "sent": dict(peers.sent)}, out)
    peers.close()


def together(name, size, folder, what, *overrides):
    """What ``size`` controllers did, each in a process of its own."""
    outs = [folder / f"{name}-{size}-{rank}.pt" for rank in range(size)]
    return launched(__file__, outs, lambda rank, port, out: [name, rank, size, port, out, what, *overrides])


def joined(parts):
    """The whole of what every rank has its rows of."""
    return torch.cat([torch.cat(rows).flatten() for rows in zip(*parts, strict=True)])


def close(parts, whole, tolerance=1e-5):
    whole = torch.cat([t.flatten() for t in whole])
    found = joined(parts)
    assert found.shape == whole.shape
    assert (found - whole).norm() <= tolerance * whole.norm()


def whole(ranks, of, name=None):
    """Weights or a copy, from every rank's part of them; each rank of a replicated run has all."""
    parts = [rank[of] if name is None else rank[of][name] for rank in ranks]
    return joined(parts)


if __name__ == "__main__":
    name, rank, size, port, out, what, *overrides = sys.argv[1:]
    serve(name, int(rank), int(size), int(port), out, what, *overrides)
