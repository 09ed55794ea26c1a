"""A checkpoint that lacks a weight is refused by its name, where the libraries would fill it with random numbers."""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.whole_weights import whole_weights
from mmrl.families.text.scoring import load_scorer
from tests.support import tiny
from tests.support.tiny_diffusion import save

allow_cpu_only()


def without(folder, name, to):
    """A copy of a saved model whose file of weights lacks ``name``."""
    shutil.copytree(folder, to)
    (file,) = to.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    return to


def names(folder):
    (file,) = folder.glob("*.safetensors")
    return sorted(load_file(file))


def refused(kind, recipe, path, name):
    try:
        mmrl.load("pipelines", kind).build(recipe, str(path), torch.device("cpu"))
    except UserError as error:
        return f"{path} lacks the weights" in str(error) and name in str(error) and "save it anew" in str(error)
    return False


@pytest.mark.sweep("checkpoints of language models that lack a weight")
def test_a_language_model_has_all_of_its_weights(tmp_path, sweep):
    whole = tiny.language_model(tmp_path / "whole")
    recipe = load_recipe(["sums"], [f"model.path={whole}"]).recipe
    mmrl.load("pipelines", "llm/chat").build(recipe, str(whole), torch.device("cpu"))
    every = names(whole)
    for number, name in enumerate(every[:: sweep.size(max(1, len(every) // 4), 1)]):
        sweep.check(refused("llm/chat", recipe, without(whole, name, tmp_path / str(number)), name), name)
    sweep.done()


@pytest.mark.sweep("checkpoints of picture models that lack a weight")
def test_every_part_of_a_picture_model_has_all_of_its_weights(tmp_path, sweep):
    save("flux", tmp_path / "whole")
    recipe = load_recipe(["flux-dev"], [f"model.path={tmp_path / 'whole'}", "device=cpu"]).recipe
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        for name in names(tmp_path / "whole" / part)[: sweep.size(1, 5)]:
            cut = tmp_path / f"{part}-{name}"
            shutil.copytree(tmp_path / "whole", cut)
            shutil.rmtree(cut / part)
            without(tmp_path / "whole" / part, name, cut / part)
            sweep.check(refused("diffusion/flux", recipe, cut, name), (part, name))
    sweep.done()


def test_logs_are_afterwards_what_they_were(tmp_path):
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    with whole_weights("here"):
        loggers[0].getChild("modeling").warning("some other warning")
    with pytest.raises(UserError, match=r"here lacks the weights a\.b, c"), whole_weights("here", unused=("pooler.",)):
        loggers[1].getChild("models").warning("... and are newly initialized: ['c', 'a.b', 'pooler.x']\nYou should")
    assert [(logger.level, logger.handlers) for logger in loggers] == before


def test_names_of_several_layers_are_found_and_what_is_not_used_is_said_in_one_line(tmp_path, capsys):
    whole = tiny.language_model(tmp_path / "whole", num_hidden_layers=2)
    recipe = load_recipe(["sums"], [f"model.path={whole}"]).recipe
    (file,) = whole.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "visual.a": torch.ones(1), "position_ids": torch.ones(1)}, file, {"format": "pt"})
    mmrl.load("pipelines", "llm/chat").build(recipe, str(whole), torch.device("cpu"))
    said = capsys.readouterr().err
    assert f"warning: model.path: {whole} holds weights that this model does not have: visual.a\n" in said

    less = {name: value for name, value in tensors.items() if "up_proj" not in name}
    save_file(less, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the weights .*up_proj"):
        mmrl.load("pipelines", "llm/chat").build(recipe, str(whole), torch.device("cpu"))

    other = {name: value[:-1] if "down_proj" in name else value for name, value in tensors.items()}
    save_file({name: value.contiguous() for name, value in other.items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"the weights .*down_proj.* have other shapes than its config\.json says"):
        mmrl.load("pipelines", "llm/chat").build(recipe, str(whole), torch.device("cpu"))


def test_a_writer_that_becomes_a_reward_model_has_all_of_its_weights(tmp_path):
    whole = tiny.language_model(tmp_path / "whole")
    (name,) = [one for one in names(whole) if "layers.0" in one and "up_proj" in one]
    cut = without(whole, name, tmp_path / "cut")
    load_scorer(str(whole), 0, torch.float32, 0)
    with pytest.raises(UserError, match=r"lacks the weights .*up_proj"):
        load_scorer(str(cut), 0, torch.float32, 0)
