"""Ranks that share a row with pictures come to what one process does with the whole row, over real gloo groups."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.context_parallel import Cut, Group, refusals
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("torchvision")

WORLD = """
import random
from PIL import Image
from mmrl.core.episode import Observation

class Album:
    pictures = True

    def reset(self, prompt, seed):
        self.rng, self.turn = random.Random(seed), 0

    def step(self, action):
        self.turn += 1
        if self.turn > 4:
            return Observation("Enough.", done=True)
        sizes = [self.rng.choice([(16, 16), (40, 32), (32, 90)]) for _ in range(4)]
        shown = [Image.frombytes("RGB", size, self.rng.randbytes(size[0] * size[1] * 3)) for size in sizes]
        return Observation(["Four: ", *shown, f" number {self.turn}"])
"""


def shared(out, rank, size, port, path, world):
    """One rank: log-probs of rows and the gradient of all weights, of whole rows and of its part of them."""
    from tests.support.episode_pictures import rows_of

    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    turns = ["I look", "And on", "Once more", "Again", "It is red"]
    keys = {"name": f"{world}:Album", "max_turns": 6, "max_tokens": 980, "max_pictures": 16}
    pipeline, rows = rows_of(path, world, turns, **keys)
    policy, mask = pipeline.policy.requires_grad_(), rows.padded("action_mask")
    assert not list(refusals(policy, size))
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) * mask

    def measured():
        policy.zero_grad()
        found = pipeline.replay(rows, [0], frozenset({"log_probs"}), None)["log_probs"]
        (found * weights).sum().backward()
        return found.detach() * mask, {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}

    (whole, gradient), cut = measured(), Cut(policy, Group(size))
    found, parts = measured()
    for name in parts:
        dist.all_reduce(parts[name])
    cut.turn(on=False)
    again, _ = measured()
    pictures = [len(one.pictures) for one in rows.episodes]
    torch.save([whole, found, again, gradient, parts, pictures, rows.lengths], out)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_an_episode_of_16_pictures_on_two_ranks_is_that_of_one(kind, tmp_path):
    from tests.support import tiny

    if kind == "smolvlm":
        pytest.importorskip("num2words")
    path, world = tiny.vision_model(tmp_path / "model", kind), tmp_path / "world.py"
    world.write_text(WORLD)
    outs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    made = launched(__file__, outs, lambda rank, port, out: [out, rank, 2, port, path, world])
    for whole, found, again, gradient, parts, pictures, lengths in made:
        assert pictures == [16] * 4
        assert kind == "qwen2_5_vl" or len(set(lengths)) > 1, lengths  # some are padded
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)
        assert torch.equal(again, whole)
        assert parts.keys() == gradient.keys()
        both = (torch.cat([of[name].flatten() for name in gradient]) for of in (parts, gradient))
        one, all_ = both
        assert (one - all_).norm() <= 1e-5 * all_.norm()


if __name__ == "__main__":
    out, rank, size, port, path, world = sys.argv[1:]
    shared(Path(out), int(rank), int(size), int(port), Path(path), Path(world))
