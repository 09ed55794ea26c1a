"""Embeddings of prompts on disk beyond a run: no encoder runs for what is there, and nothing wrong is served."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmrl
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.controller.feature_cache import FeatureCache
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, Slot
from tests.support.families import recipe
from tests.support.features import features, same
from tests.support.tiny_diffusion import save

FAMILIES = ["flux", "sdxl", "qwen_image"]
TEXTS = ("a red circle", "two blue squares beside a green triangle", "")


def encoded(model, cache, family, **sampling):
    """What a new pipeline has of ``TEXTS``, and how often it ran a text encoder."""
    made = recipe(family, {family: model}, guidance_scale=3.0, **sampling)
    kept = made.features.model_copy(update={"cache": str(cache)})
    pipeline = mmrl.load("pipelines", made.pipeline).build(
        made.model_copy(update={"features": kept}), str(model), torch.device("cpu")
    )
    calls = []
    for encoder in pipeline.adapter.text_encoders:
        encoder.register_forward_hook(lambda *_: calls.append(1))
    keys = pipeline.encode([Slot(0, i, 0, Prompt(str(i), text)) for i, text in enumerate(TEXTS)])
    return {key: pipeline.features.get(key) for key in keys}, len(calls)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return request.param, save(request.param, root / "model"), root / "cache"


@pytest.mark.slow
def test_a_prompt_is_encoded_once_for_all_runs(case):
    family, model, cache = case
    first, calls = encoded(model, cache, family)
    again, none = encoded(model, cache, family, steps=6)  # how it samples does not change what it encodes
    assert (calls >= len(TEXTS), none) == (True, 0)
    assert all(same(first[key], again[key]) for key in first)
    assert encoded(model, cache, family, max_sequence_length=24)[1] == calls
    assert encoded(model, cache, family, max_sequence_length=24)[1] == 0


def test_another_checkpoint_at_the_same_path_is_not_served_from_it(case):
    family, model, cache = case
    first, _ = encoded(model, cache, family)
    save(family, model, seed=1)
    other, calls = encoded(model, cache, family)
    assert calls >= len(TEXTS)
    assert not any(same(first[key], other[key]) for key in TEXTS[:2])


def damaged(kind, path, other):
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "one bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        shutil.copy(other, path)


@pytest.mark.parametrize("kind", ["truncated", "one bit", "empty", "another prompt's"])
def test_a_damaged_file_is_made_anew_with_one_warning(tmp_path, capsys, kind):
    def cache():
        return FeatureCache(tmp_path, "identity")

    made = {key: features(50, seed) for seed, key in enumerate("abc")}
    for key, tensors in made.items():
        cache().write(key, tensors)
    for key in "ab":
        damaged(kind, cache().path(key), cache().path("c"))
    reader = cache()
    assert [reader.read(key) for key in "ab"] == [None, None]
    assert same(reader.read("c"), made["c"])
    assert capsys.readouterr().err.count("warning: features.cache: ") == 1
    for key in "ab":
        reader.write(key, made[key])
        assert same(cache().read(key), made[key])
    assert capsys.readouterr().err == ""


def test_many_may_write_and_read_at_once(tmp_path):
    made = features(5000)

    def turn(_):
        cache = FeatureCache(tmp_path, "identity")
        cache.write("a", made)
        return same(cache.read("a"), made)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(turn, range(60)))
    assert len(list(tmp_path.rglob("*.safetensors"))) == len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path, capsys):
    cache = FeatureCache(tmp_path, "identity")
    shutil.rmtree(cache.folder)
    for key in "ab":
        cache.write(key, features(5))
        assert cache.read(key) is None
    assert capsys.readouterr().err.count("takes no more prompts") == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"features.cache: .*cannot be created"):
        FeatureCache(tmp_path / "file", "identity")


def test_text_has_no_embeddings_to_keep():
    with pytest.raises(RecipeError, match=r"features.cache: .*remove it"):
        load_recipe(["sums"], ["features.cache=here"])
