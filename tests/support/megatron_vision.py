"""Shared by the tests of megatron vision and others."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from tests.support import megatron as megatron
from tests.support import tiny

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("torchvision")
vlm = pytest.importorskip("tests.support.vlm", reason="needs torchvision")
OPEN = ["sampling.max_new_tokens=4", "model.freeze=[]"]
FROZEN = ["sampling.max_new_tokens=4", "model.freeze=[visual]"]


def serve(out, rank, size, port, path, *overrides):
    """One rank of a layout: the script's work."""
    megatron.serve(out, rank, size, port, path, *overrides, name="scenes")


def compare(out, rank, size, port, path, *overrides):
    """One rank of a layout: by how much its log-probs part from Hugging Face's, of several sorts of rows."""
    peers = Group(rank, size, "127.0.0.1", port, devices=size)
    run = megatron.made(path, Controller(0, 0, 1, peers), *overrides, name="scenes")
    text, picture = Prompt("text", "What colour is grass?"), Prompt("picture", "<image>?", media=(vlm.picture(),))
    sorts = [[text], [picture, text]]
    if find_spec("av"):
        clip = Prompt("clip", "Which way? <video>", media=(vlm.clip(),))
        sorts += [[clip, picture], [picture, text, clip]]
    gaps = {}
    for some in sorts:
        slots = [Slot(0, n, 0, prompt) for n, prompt in enumerate(some)]
        run.pipeline.encode(slots)

        def found(rows):
            return run.pipeline.replay(rows, [0], frozenset(), run.policy.using)["log_probs"] * rows.padded(
                "action_mask"
            )

        with torch.no_grad():
            with run.policy.unsharded("current"):
                rows = run.pipeline.sample(slots, [SampleId(0, slot.index, 0, 0) for slot in slots], [], 3)
                whole = found(rows)
            gaps[" ".join(p.id for p in some)] = (found(rows) - whole).abs().max()
    torch.save(gaps, out)
    peers.close()


def tiny_model(folder, kind="qwen2_5_vl"):
    """Random, biases and norms too, so that none is right by being 0 or 1."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny.vision_model(folder, kind))
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (OPEN, megatron.TP),
        (OPEN, megatron.FOUR),  # two models of two, which also divide tokens
        (OPEN, megatron.ZERO),  # the tower's moments divided too
        (FROZEN, megatron.TP),
    ],
)
def test_a_shared_language_part_and_a_tower_on_each_rank_have_the_gradients_of_the_whole(model, layout, tmp_path):
    pytest.importorskip("megatron.core")
    path = tiny_model(tmp_path / "model")
    run = megatron.made(path, None, *model, name="scenes")
    whole = megatron.updates(run, megatron.rows_of(run, 0, 1))
    seeing = [name for name in whole if name.startswith("gradient/model.visual.")]
    assert bool(seeing) == (model is OPEN)
    assert all(whole[name].norm() > 0 for name in seeing)
    train = load_recipe(["scenes"], layout).recipe.train
    size = 4 if layout is megatron.FOUR else 2
    ranks = megatron.together(tmp_path, size, "serve", path, *model, *layout, script=__file__)
    megatron.equal(ranks, whole, train.width)


def pipeline(loaded, path):
    """On the meta device, as ``mmrl plan`` has it."""
    return mmrl.load("pipelines", "vlm/chat").describe(loaded.recipe, path, None).pipeline


if __name__ == "__main__":
    what, out, rank, size, port, *rest = sys.argv[1:]
    {"serve": serve, "compare": compare}[what](Path(out), int(rank), int(size), int(port), *rest)
