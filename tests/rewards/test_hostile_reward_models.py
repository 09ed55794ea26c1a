"""The folders that a reward's options name are looked at before a library reads them."""

import os

import pytest
import torch
from safetensors.torch import save_file

from mmrl.core.errors import UserError
from mmrl.rewards import loading

REWARDS = {
    "clip:score": "path",
    "clip:pathwise": "path",
    "pickscore:score": "path",
    "pickscore:pathwise": "processor",
    "aesthetic:score": "clip",
    "hpsv2:score": "base",
    "imagereward:score": "tokenizer",
    "ocr:score": "path",
    "relevance": "path",
    "vbench:subject": "path",
    "vbench:background": "path",
    "geneval": "path",
    "reward_model:score": "path",
}
"""The option of each reward that names a folder of a stranger."""


def pipe(folder):
    os.mkfifo(folder / "config.json")


def deep(folder):
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")


def outside(folder):
    (folder.parent / "else.json").write_text("{}")
    (folder / "config.json").symlink_to(folder.parent / "else.json")


@pytest.mark.parametrize("spoil", [pipe, deep, outside])
@pytest.mark.parametrize("name", REWARDS)
def test_a_folder_that_must_not_be_read_is_refused_by_name(name, spoil, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    spoil(folder)
    save_file({"0.weight": torch.zeros(1)}, tmp_path / "weights.safetensors")
    options = {"path": str(tmp_path / "weights.safetensors")} if REWARDS[name] in ("clip", "base", "tokenizer") else {}
    options |= {REWARDS[name]: str(folder)}
    found = loading.find(name)
    with pytest.raises(UserError, match=str(folder / "config.json")):
        loading.build(found, options)
