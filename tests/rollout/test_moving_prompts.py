"""Prompts move from a slow controller to another (``train.balance: moving``), over a real gloo process group."""

import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.placement.portions import Claims
from mmrl.rollout.moving import portions
from mmrl.step.step_context import StepPart
from tests.support import runs
from tests.support.controllers import make, work
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision

MOVING = ["train.balance=moving", "sampling.batch_size=null"]


class Seen(StepPart):
    """Keeps the rewards and the advantages of a step, by sample."""

    def end_step(self, context, done):
        self.rewards, self.advantages = {}, {}
        for n, one in enumerate(done.batch.ids):
            name = f"{one.slot}/{one.attempt}/{one.sample}"
            self.rewards[name] = {label: values[n].item() for label, values in done.batch.rewards.items()}
            self.advantages[name] = done.batch.advantages[n].flatten()[0].item()
        self.slots = sorted(slot.index for slot in done.slots)
        return {}


def stepped(run):
    """One step of ``run``, as plain values."""
    run.rollout.parts["seen"] = seen = Seen()
    sampled, gradient, row = work(run)
    return {"sampled": sampled, "gradient": gradient, "row": row, **vars(seen)}


def until(path, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def serve(name, rank, size, port, out):
    """Controller ``rank`` in this process. The first one does not sample before no other finds anything to begin."""
    torch.set_num_threads(1)
    peers = Group(rank, size, "127.0.0.1", port)
    run = make(name, Controller(0, rank, size, peers), *MOVING)
    done = [out.with_name(f"done-{other}") for other in range(1, size)]
    if rank:
        following = Claims.other

        def told(self):
            found = following(self)
            if found is None:
                done[rank - 1].touch()
            return found

        Claims.other = told
    else:
        sample = run.pipeline.sample

        def late(*args, **named):
            for path in done:
                until(path)
            return sample(*args, **named)

        run.pipeline.sample = late
    found = stepped(run)
    torch.save({**found, "sent": dict(peers.sent)}, out)
    peers.close()


def check(name, folder, size=2):
    if name == "vision":
        pytest.importorskip("torchvision")
    alone = stepped(make(name, None, *MOVING))
    outs = [folder / f"{rank}.pt" for rank in range(size)]
    found = launched(__file__, outs, lambda rank, port, out: [name, rank, size, port, out])
    assert len(found[0]["slots"]) == 1  # all others of its prompts have moved
    assert sorted(slot for one in found for slot in one["slots"]) == list(range(5))
    for what in ("sampled", "rewards"):
        assert {key: value for one in found for key, value in one[what].items()} == alone[what]  # to the bit
    advantages = {key: value for one in found for key, value in one["advantages"].items()}
    assert advantages == pytest.approx(alone["advantages"], rel=1e-9, abs=1e-12)
    for one in found:
        assert (one["gradient"] - alone["gradient"]).norm() <= 1e-5 * alone["gradient"].norm()
        assert torch.equal(one["gradient"], found[0]["gradient"])
        assert 0 < one["row"]["balance/moved"] <= -(-5 // size) - 1
        assert one["sent"]["claims"] > 0
        for key, value in alone["row"].items():
            if key.startswith(("reward/", "advantage/", "text/", "sampling/groups", "policy/ratio")):
                assert one["row"][key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


@pytest.mark.slow
def test_another_controller_begins_what_a_slow_one_has_not(tmp_path):
    check("text", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("diffusion", 2), ("vision", 2), ("resampled", 2), ("critic", 3), ("normalized", 2)]
)
def test_the_same_for_other_recipes(name, size, tmp_path):
    check(name, tmp_path, size)


def test_portions_are_micro_batches_and_the_short_one_stays():
    assert portions([0, 2, 4, 6, 8], 2, None) == [[8], [0, 2], [4, 6]]
    assert portions([0, 2, 4, 6], 2, None) == [[0, 2], [4, 6]]
    assert portions([0, 2, 4, 6], 1, [1.0, 0.0, 3.0, 0.0, 2.0, 0.0, 5.0]) == [[6], [2], [4], [0]]


LATE = """
import functools
import time

import mmrl
from mmrl.placement import device_tasks


@mmrl.reward(inputs=("text",), device=True)
def score(samples, *, context):
    return [float(len(sample.text or "") % 2) for sample in samples]


if not hasattr(device_tasks.sample, "__wrapped__"):
    sample = device_tasks.sample

    @functools.wraps(sample)
    def late(context, *given):
        time.sleep(1.5 * (context.controller.rank == 1))
        return sample(context, *given)

    device_tasks.sample = late
"""
"""A reward whose file has the devices of controller 1 sleep before each micro-batch."""


def moving(folder):
    """The words of a run whose controller 1 is slow."""
    (folder / "late.py").write_text(LATE)
    return [
        *("train.steps=2", "train.prompts_per_step=16", "train.group_size=4", "train.micro_batch_size=4"),
        *("sampling.batch_size=4", "eval.every=null", "checkpoint.every=1", MOVING[0], "model.dtype=float32"),
        f'rewards=[{{name: "{folder / "late.py"}:score", batch_size: 4}}]',
    ]


def same(out, alone):
    """Whether prompts moved and all else is as in the run ``alone``."""
    assert len(runs.rows(out)) == 2
    for one, row in zip(runs.rows(alone), runs.rows(out), strict=True):
        assert row["balance/moved"] > 0
        for key in ("reward/mean", "reward/std", "text/length", "optim/grad_norm", "policy/loss"):
            assert row[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ["devices_per_controller=2", "placement=greedy"],
        pytest.param(["train.backend=fsdp"], marks=pytest.mark.long),
    ],
    ids=lambda how: how[-1],
)
def test_controllers_of_several_devices_and_of_shards_move_prompts(how, tmp_path):
    words = moving(tmp_path)
    for name, more in (("alone", []), ("several", ["controllers=2", *how])):
        runs.run("sums", tmp_path / name, *words, *more)
    same(tmp_path / "several", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.long
def test_a_controller_that_dies_while_prompts_move_leaves_no_claim(tmp_path):
    pytest.importorskip("ray")
    words = moving(tmp_path)
    code, said = runs.ended(runs.train("sums", tmp_path / "alone", *words), 600)
    assert code == 0, said
    process = runs.train("sums", tmp_path / "killed", *words, "controllers=2")
    deadline = time.monotonic() + 300
    while not runs.rows(tmp_path / "killed"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2.0)  # in the phase of sampling of the second step
    runs.actors(process)[0].kill()
    code, said = runs.ended(process, 600)
    assert code == 0, said
    assert "start" in said
    same(tmp_path / "killed", tmp_path / "alone")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
