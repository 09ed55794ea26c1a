"""A vision-language model whose language part ranks of Megatron-Core share comes to what one process of Hugging Face
does."""

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
from mmrl.models.megatron.mapping import refusals
from tests import test_megatron as megatron
from tests import tiny

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("torchvision")

vlm = pytest.importorskip("tests.test_vlm", reason="needs torchvision")
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


def test_rows_of_text_of_clips_and_of_both_have_the_log_probs_of_the_whole(tmp_path):
    pytest.importorskip("megatron.core")
    path = tiny_model(tmp_path / "model")
    for gaps in megatron.together(tmp_path, 2, "compare", path, *OPEN, *megatron.TP, script=__file__):
        assert len(gaps) >= 2
        assert max(gaps.values()) < 1e-4, gaps


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (megatron.TP, None),
        (["model.freeze=[]", *megatron.TP], None),
        (
            megatron.PP,
            "train.pipeline_parallel: a model that sees is cut in parts of layers alone; remove it, and",
        ),
        (
            megatron.CP,
            "train.context_parallel: a model that sees is cut in parts of layers alone; remove it, and",
        ),
        (
            ["model.freeze=[layers]", *megatron.TP],
            "model.freeze: megatron trains all weights but those of model.visual, and model.language_model.layers.0.",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(overrides, message):
    loaded = load_recipe(["scenes"], overrides)
    policy = pipeline(loaded, loaded.recipe.model.path).policy
    found = list(refusals(policy, loaded.recipe.train))
    assert len(found) == (message is not None)
    assert not found or found[0].startswith(message)


@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_another_family_that_sees_is_refused(kind, tmp_path):
    if kind == "smolvlm":
        pytest.importorskip("num2words")
    loaded = load_recipe(["scenes"], [*megatron.TP, "model.freeze=[]"])
    policy = pipeline(loaded, str(tiny.vision_model(tmp_path, kind))).policy
    (problem,) = refusals(policy, loaded.recipe.train)
    assert problem.startswith("train.backend: megatron has no place for model.")


def pipeline(loaded, path):
    """On the meta device, as ``mmrl plan`` has it."""
    return mmrl.load("pipelines", "vlm/chat").describe(loaded.recipe, path, None).pipeline


if __name__ == "__main__":
    what, out, rank, size, port, *rest = sys.argv[1:]
    {"serve": serve, "compare": compare}[what](Path(out), int(rank), int(size), int(port), *rest)
