"""What a library is about to read is looked at first, in folders and in the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files, check_weights
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan

allow_cpu_only()


def snapshot(cache, config, **links):
    """A model as the hub's client keeps it: links to blobs, below a name and a revision."""
    of = cache / "models--ours--tiny"
    for folder in ("blobs", "refs", "snapshots/abc"):
        (of / folder).mkdir(parents=True)
    (of / "refs" / "main").write_text("abc")
    (of / "blobs" / "1").write_text(config)
    (of / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/1")
    for name, target in links.items():
        (of / "snapshots" / "abc" / f"{name}.json").symlink_to(target)


@pytest.mark.parametrize(
    ("config", "links", "refused"),
    [
        ("{}", {}, ""),
        ('{"a": ' * 2000 + "1" + "}" * 2000, {}, "config.json"),
        ("[1]", {}, "holds no mapping"),
        ("{}", {"tokenizer": "/etc/hostname"}, "tokenizer.json cannot be read"),
        ("{}", {"special_tokens_map": "/dev/zero"}, "special_tokens_map.json cannot be read"),
    ],
)
def test_files_in_the_hubs_cache_are_looked_at_too(config, links, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot(tmp_path, config, **links)
    check_files("ours/other")
    check_files("no name of the hub: at all")
    if not refused:
        check_files("ours/tiny")
        return
    with pytest.raises(UserError, match=refused):
        check_files("ours/tiny")


def test_a_folder_without_plain_weights_is_refused_by_the_plan(tmp_path):
    """What transformers would not find; whatever it finds passes."""
    (tmp_path / "config.json").write_text("{}")
    index = json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}})

    def said(**files):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        for name, text in {"config.json": "{}", **files}.items():
            (folder / name).write_text(text)
        try:
            check_weights(str(folder))
        except UserError as error:
            return str(error)

    assert "has no weights" in said()
    assert "has no weights" in said(**{"tf_model.h5": "", "weights.safetensors": "", "adapter_model.safetensors": ""})
    for name in ("model.fp16.safetensors", "pytorch_model.fp16.bin", "model.fp16-00001-of-00002.safetensors"):
        assert "of the variant fp16 alone" in said(**{name: ""})
    assert "lacks model-00001" in said(**{"model.safetensors.index.json": index})
    for broken in ("[1]", "{", '{"weight_map": 3}'):
        assert "is no list of files" in said(**{"model.safetensors.index.json": broken})
    for name in ("model.safetensors", "pytorch_model.bin"):
        assert said(**{name: "", "model.fp16.safetensors": ""}) is None
    assert said(**{"model.safetensors.index.json": index, "model-00001-of-00001.safetensors": ""}) is None
    assert said(**{"config.json": '{"transformers_weights": "mine.safetensors"}', "mine.safetensors": ""}) is None
    shipped = load_recipe(["sums"]).recipe.model.path
    (tmp_path / "model").mkdir()
    for file in Path(shipped).iterdir():
        shutil.copy(file, tmp_path / "model" / file.name.replace("model.safetensors", "model.fp16.safetensors"))
    loaded = load_recipe(["sums"], [f"model.path={tmp_path / 'model'}", "device=cpu"])
    assert any("of the variant fp16 alone" in one for one in plan(loaded).problems)
