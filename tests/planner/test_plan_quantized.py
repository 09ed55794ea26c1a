"""The plan counts the bytes of a quantised base as they are."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

import mmrl
from mmrl.config.schema import Recipe
from mmrl.models.quantized import QuantizedLinear
from mmrl.planner.fit_check import does_not_fit
from mmrl.planner.memory_budget import sizes_of
from tests.support import tiny
from tests.support.families import recipe as of_pictures
from tests.support.planning import planned
from tests.support.text import recipe as of_text
from tests.support.tiny_diffusion import SHAPES

PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
BYTES = {"int8": 1.0, "fp8": 1.0, "nf4": 0.5 + 4 / 64}
"""Of a weight, without the scales of rows."""


def _quantized(recipe, kind):
    model = recipe.model.model_copy(update={"quantize": kind})
    return Recipe.model_validate(recipe.model_copy(update={"model": model}).model_dump(mode="json"))


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tiny.language_model(tmp_path_factory.mktemp("model"))
    text = of_text(folder, model={"lora": {"rank": 4, "alpha": 8}, "dtype": "bfloat16"})
    made = {"text": text, "pictures": of_pictures("sd3", {"sd3": SHAPES})}
    if find_spec("torchvision"):
        sees = tiny.vision_model(tmp_path_factory.mktemp("sees"), "qwen2_5_vl")
        made["vision"] = of_text(sees, model={"lora": {"rank": 4, "alpha": 8}, "dtype": "bfloat16"})
        made["vision"] = made["vision"].model_copy(update={"pipeline": "vlm/chat"})
    return made


def _real_bytes(tensor):
    """Bytes of what a tensor is made of: one that holds others says the bytes that it stands for."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_real_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    state = getattr(tensor, "quant_state", None)
    return tensor.untyped_storage().nbytes() + (0 if state is None else state.absmax.nbytes)


def _real_bytes_of(module):
    tensors = {t.untyped_storage().data_ptr(): t for t in [*module.parameters(), *module.buffers()] if t.numel()}
    return sum(map(_real_bytes, tensors.values()))


@pytest.mark.parametrize("kind", PACKAGES)
@pytest.mark.parametrize("made_of", ["text", "pictures", "vision"])
def test_the_plan_has_the_bytes_of_the_real_tensors(recipes, made_of, kind):
    pytest.importorskip(PACKAGES[kind])
    if made_of == "vision":
        pytest.importorskip("torchvision")
    recipe = _quantized(recipes[made_of], kind)
    family = mmrl.load("pipelines", recipe.pipeline)
    pipeline = family.build(recipe, recipe.model.path, torch.device("cpu"))
    policy, real = pipeline.policy, _real_bytes_of(pipeline.policy)
    description = family.describe(recipe, recipe.model.path, None)
    component = next(one for one in description.components if one.role == "policy")
    every = sizes_of(description, 1, by_block=False)
    planned = every[id(component)]
    assert planned.total == pytest.approx(real, rel=0.05)
    encoders = [one for one in description.components if one.role == "text encoders"]
    assert len(encoders) == (3 if made_of == "pictures" else 0)
    for one, encoder in zip(encoders, pipeline.adapter.text_encoders if encoders else [], strict=True):
        assert every[id(one)].total == pytest.approx(_real_bytes_of(encoder), rel=0.05)
        assert every[id(one)].total < 0.95 * every[id(one)].as_loaded
    plain = family.describe(recipes[made_of], recipe.model.path, None)
    before = sizes_of(plain, 1, by_block=False)
    before = before[id(next(one for one in plain.components if one.role == "policy"))]
    assert planned.parameters == before.parameters
    assert planned.as_loaded == pytest.approx(before.total, rel=0.01)
    assert planned.dtypes == f"{before.dtypes}, {kind}"
    layers = [m for m in policy.modules() if isinstance(m, QuantizedLinear)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    rows = 0 if kind == "nf4" else 4 * sum(layer.out_features for layer in layers)
    width = layers[0].dtype.itemsize
    assert before.total - planned.total == pytest.approx((width - BYTES[kind]) * weights - rows, rel=0.02)


@pytest.mark.slow
def test_a_recipe_that_fits_with_fewer_bits_is_told_of_the_most_that_fit():
    """The plan of the edit has the bytes that the edit was chosen by."""
    words = ["shapes-lora", "model.dtype=bfloat16", "device=cuda", "model.offload=false", "train.micro_batch_size=1"]
    made = {kind: planned(*words, f"model.quantize={kind}", device_memory=2**40) for kind in ("null", "int8")}
    needs = {kind: one.peak.total for kind, one in made.items()}
    assert needs["int8"] < needs["null"]
    layer = 2**18  # at least the largest in bfloat16
    for kind, memory in (("int8", needs["int8"] + layer), ("nf4", needs["int8"] - layer), (None, 2**20)):
        (problem,) = does_not_fit(replace(made["null"], device_memory=memory))
        told = [edit for edit in problem.partition("Try: ")[2].split("; ") if edit.startswith("model.quantize=")]
        assert told == ([] if kind is None else [f"model.quantize={kind} (needs {PACKAGES[kind]}, and fits)"])
    assert not does_not_fit(replace(made["int8"], device_memory=needs["int8"]))
