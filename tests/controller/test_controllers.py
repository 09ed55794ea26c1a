"""Several controllers do the work of one: the same samples, gradients and metrics, over real gloo process groups."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.step.step_metrics import StepMetrics
from tests.support.controllers import EQUAL_SHAPES, make, work
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision


GIVEN = {"sft", "kto", "pictures"}
"""Of given data: nothing is sampled."""

DRAWN = {"diffusion", "quantized", "pictures", "stepwise", "crd", "v_grpo"}
"""Of pictures, whose rows are alike."""

NEEDS = {"vision": "torchvision", "quantized": "torchao"}
"""Packages of extras."""

LOAD = {"balance/load", "balance/load_predicted"}
"""Metrics that one controller does not have."""


def serve(name, rank, size, port, out):
    """A controller in this process: the script's work."""
    torch.set_num_threads(1)
    peers = Group(rank, size, "127.0.0.1", port)
    sampled, gradient, row = work(make(name, Controller(0, rank, size, peers)))
    torch.save({"sampled": sampled, "gradient": gradient, "row": row, "sent": dict(peers.sent)}, out)
    peers.close()
    deadline = time.monotonic() + 60  # the kernel lists a thread for a moment after it was joined
    while (left := network_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left  # they could abort this exit


def network_threads():
    names = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append(task.joinpath("comm").read_text().strip())
    return [name for name in names if "gloo" in name or "tcpstore" in name]


def together(name, size, folder):
    """What ``size`` controllers did, each in a process of its own."""
    outs = [folder / f"{name}-{size}-{rank}.pt" for rank in range(size)]
    return launched(__file__, outs, lambda rank, port, out: [name, rank, size, port, out])


def check(name, sizes, folder):
    if package := NEEDS.get(name):
        pytest.importorskip(package)
    sampled, gradient, row = work(make(name))
    for size in sizes:
        found = together(name, size, folder)
        theirs = [one["sampled"] for one in found]
        assert name in GIVEN or all(theirs), "a controller sampled nothing"
        assert sum(map(len, theirs)) == len(sampled)
        assert {key: value for one in theirs for key, value in one.items()} == sampled  # to the bit
        for one in found:
            assert (one["gradient"] - gradient).norm() <= 1e-5 * gradient.norm()
            assert torch.equal(one["gradient"], found[0]["gradient"])
            assert set(one["row"]) - set(row) == (set() if name in DRAWN else LOAD)
            for key, value in row.items():
                if key == "balance/padding":
                    assert value >= 0  # micro-batches are of fewer rows
                elif key.startswith(("mismatch/", "policy/ratio", "policy/first")):
                    assert one["row"][key] == pytest.approx(value, abs=1e-4), key  # rounding, seen from near
                else:
                    assert one["row"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
            # What crosses: the gradients, a flag per parameter, and numbers; never a picture, a token or a latent.
            updates = 2 if name == "text" else 1
            ring = 2 * (size - 1) / size
            assert set(one["sent"]) <= {"gradients", "numbers", "statistics"}
            if name != "critic":
                assert one["sent"]["gradients"] <= ring * updates * 4 * (gradient.numel() + 1000)
            assert one["sent"]["numbers"] < 20_000
    return sampled


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("stepwise", "crd", "v_grpo")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["diffusion", "text", "resampled", "sft", "kto", "pictures", "normalized", "taught", "hinted", *LONG]
)
def test_two_controllers_do_what_one_does(name, tmp_path):
    check(name, [2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("diffusion", [4]),
        *(pytest.param(name, [4], marks=pytest.mark.long) for name in ("text", "resampled")),
        ("critic", [2]),
        ("vision", [2]),
        ("quantized", [2]),
    ],
)
def test_any_number_of_controllers_does_what_one_does(name, sizes, tmp_path):
    check(name, sizes, tmp_path)


def test_every_slot_belongs_to_one_controller():
    prompts = [Prompt(str(n), str(n)) for n in range(7)]
    whole = Controller(3).slots(4, prompts, 5)
    for size in (1, 2, 4, 5):
        parts = [Controller(3, rank, size).slots(4, prompts, 5) for rank in range(size)]
        assert sorted((s for part in parts for s in part), key=lambda s: s.index) == whole
        assert all(parts)


def test_shares_follow_one_another_and_lack_nothing():
    for n, size in ((5, 2), (64, 3), (7, 7)):
        shares = [Controller(0, rank, size).share(n) for rank in range(size)]
        assert [i for share in shares for i in share] == list(range(n))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_metrics_of_controllers_are_those_of_the_whole():
    def filled(values, weight, of):
        metrics = StepMetrics(weight)
        metrics.set({"groups": sum(values) / len(values)})
        metrics.extend("reward", torch.tensor(values))
        metrics.gather({"gap": torch.tensor(sum(values))}, {"gap_max": torch.tensor(max(values))}, len(values))
        return metrics

    whole = filled([1.0, 2.0, 3.0, 6.0, 8.0], 5, 1)
    parts = [filled([1.0, 2.0, 3.0], 3, 1), filled([6.0, 8.0], 2, 1)]
    sums = [json.loads(json.dumps(part.sums())) for part in parts]
    assert parts[0].means(lambda _: sums) == pytest.approx(whole.means())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["controllers=6"], "6 controllers share 5 .train.prompts_per_step."),
        (["controllers=2", "eval.samples=1"], "2 controllers share 1 .eval.samples."),
        (["controllers=2", "rollout={engine: vllm}"], "set it to vllm_server, which each starts for itself"),
        (["controllers=2", "rollout={engine: sglang, options: {url: 'http://127.0.0.1:1'}}"], "remove url"),
        (
            ["controllers=2", "rollout={engine: sglang, options: {environment: {CUDA_VISIBLE_DEVICES: '1'}}}"],
            "each uses its controller's",
        ),
        (
            [
                *("train.backend=fsdp", "devices_per_controller=2", "rollout={engine: vllm_server}"),
                "placement={type: colocate, sleep: true}",
            ],
            "placement.sleep: vllm_server would wake without weights",
        ),
        (
            ["controllers=2", "train.backend=fsdp", "algorithm={type: dpo}", "train.group_size=1", "rewards=[]"],
            "set eval.every to null",
        ),
        (
            ["controllers=3", "rollout={engine: vllm_server, partial: {cut_after: 8, extra: 4}}"],
            "pools: 1 do not divide",
        ),
        (["controllers=2", "device=cuda:1"], "set device to auto, cpu or cuda"),
    ],
)
def test_what_several_controllers_cannot_do_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["sums"], [*EQUAL_SHAPES, *overrides])


if __name__ == "__main__":
    name, rank, size, port, out = sys.argv[1:]
    serve(name, int(rank), int(size), int(port), out)
