"""With Megatron-Core a rank reads its rows of a checkpoint, and gathers tensor by tensor what it computes with."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core import sharded_loading
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import megatron as megatron
from tests.support.local_rows import experts
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision

EP = ["train.backend=megatron", "train.expert_parallel=2", "devices_per_controller=2"]
PPO = ["algorithm={type: ppo}", "algorithm.kl_coef=0.0"]


def serve(rank, port, out, cases):
    """One of two ranks: its weights in each case, read by rows and read whole."""
    torch.set_num_threads(1)
    peers = Group(rank, 2, "127.0.0.1", port, devices=2)
    lift, read = sharded_loading.Lifted.__init__, []

    def noted(self, module, ranks):
        lift(self, module, ranks)
        read.append([sum(rows.nbytes for rows, _ in self._rows.values()), len(self._rows)])
        read[-1].append(sum(shape.numel() * 4 for _, shape in self._rows.values()))

    sharded_loading.Lifted.__init__ = noted
    reading, answers = sharded_loading.reading, {}
    for name, (recipe, path, words) in json.loads(cases).items():
        read.clear()
        arms = []
        for sharded_loading.reading in (reading, lambda _: nullcontext()):
            run = megatron.made(path, Controller(0, 0, 1, peers), *words, name=recipe)
            policies = [run.policy, *([run.critic] if run.critic else [])]
            arms.append([t.clone() for policy in policies for t in policy.weights.mine.values()])
            arms[-1] += [p.detach().clone() for policy in policies for p in policy.module.parameters()]
        rows, whole = arms
        half = len(read) // 2
        answers[name] = {
            "equal": len(rows) == len(whole) and all(map(torch.equal, rows, whole)),
            "read": read[:half],
            "otherwise": read[half:],
        }
    torch.save(answers, out)
    peers.close()


def compared(folder, **cases):
    outs = [folder / f"{rank}.pt" for rank in range(2)]
    return launched(__file__, outs, lambda rank, port, out: [rank, port, out, json.dumps(cases)])


def check(found, *, models=1):
    for rank in found:
        for name, answer in rank.items():
            assert answer["equal"], name
            assert len(answer["read"]) == models, name
            assert all(0 < mine <= 0.55 * whole for mine, _, whole in answer["read"]), (name, answer["read"])
            assert all(n == 0 for _, n, _ in answer["otherwise"]), "the other arm must load whole"


def test_parts_of_layers_stages_and_experts_are_those_of_a_whole_load(tmp_path):
    pytest.importorskip("megatron.core")
    untied = str(megatron.tiny(tmp_path / "untied", "Qwen2", vocab_size=337))
    mixture = str(experts(tmp_path / "mixture"))
    tied = str(megatron.SHIPPED)
    words = {"tied": megatron.TP, "untied": megatron.TP, "stages": megatron.PP, "mixture": EP}
    paths = {"tied": tied, "untied": untied, "stages": untied, "mixture": mixture}
    check(compared(tmp_path, **{name: ("sums", paths[name], words[name]) for name in words}))


def test_a_critic_is_read_by_rows_too(tmp_path):
    pytest.importorskip("megatron.core")
    check(compared(tmp_path, critic=("sums", str(megatron.SHIPPED), [*megatron.TP, *PPO])), models=2)


def test_a_vision_tower_is_whole_on_each_rank_whether_it_trains_or_not(tmp_path):
    pytest.importorskip("megatron.core")
    from tests.support.megatron_vision import FROZEN, OPEN, tiny_model  # skips where its processor's library is missing

    path = str(tiny_model(tmp_path / "model"))
    words = {"open": [*OPEN, *megatron.TP], "frozen": [*FROZEN, *megatron.TP]}
    check(compared(tmp_path, **{name: ("scenes", path, words[name]) for name in words}))


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
