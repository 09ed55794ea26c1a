"""A vision-language model whose language part ranks of Megatron-Core share comes to what one process of Hugging Face
does."""

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.megatron.mapping import refusals
from tests.support import megatron, megatron_vision, tiny
from tests.support.megatron_vision import (  # noqa: F401
    OPEN,
    pipeline,
    test_a_shared_language_part_and_a_tower_on_each_rank_have_the_gradients_of_the_whole,
    tiny_model,
)

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("torchvision")


def test_rows_of_text_of_clips_and_of_both_have_the_log_probs_of_the_whole(tmp_path):
    pytest.importorskip("megatron.core")
    path = tiny_model(tmp_path / "model")
    for gaps in megatron.together(tmp_path, 2, "compare", path, *OPEN, *megatron.TP, script=megatron_vision.__file__):
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
