"""``model.dtype: auto``: chosen once, for the CPU that begins a run, and kept by everything that goes on with it."""

import json
import pickle

import pytest
import yaml

from mmrl.app.build import evaluate, open_run
from mmrl.cli import runs
from mmrl.commands.arguments import read_recipe
from mmrl.config.dtype import has_bfloat16
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe, shipped_recipes
from mmrl.config.schema import Recipe
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from tests.support import tiny

REWARD = '''
import mmrl

@mmrl.reward(inputs=("text",))
def vowels(samples, *, context):
    """The share of vowels in a response."""
    return [sum(c in "aeiou" for c in s.text) / max(1, len(s.text)) for s in samples]
'''
RECIPE = """
name: tiny
pipeline: llm/chat
model: {path: model, dtype: auto}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 8}
rewards: [{name: "reward.py:vowels"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 4, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
optim: {lr: 1.0e-3}
eval: {every: 4, samples: 4}
checkpoint: {every: 1}
"""
COMPILED = ["performance.compile=true", "algorithm={type: grpo_guard}", "device=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtype")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def cpu(monkeypatch):
    """Make this machine one that has instructions for bfloat16, or none."""

    def become(has):
        monkeypatch.setattr("mmrl.config.dtype.has_bfloat16", lambda device: has)

    return become


def rows_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "plan/", "features/"))} for row in rows
    ]


def stored(run):
    return json.loads((run / "resolved.json").read_text())["model"]["dtype"]


@pytest.mark.parametrize(
    ("has", "limit", "expected"),
    [
        ({"avx512_bf16": True}, "", True),
        ({"amx_bf16": True}, "default", True),
        ({"bf16": True}, "", True),
        ({"avx512_bf16": False, "avx2": True}, "", False),
        ({"avx512_bf16": True}, "AVX2", False),
        ({"avx512_bf16": True}, "avx512_core", False),
        ({"avx512_bf16": True}, "AVX512_CORE_BF16", True),
    ],
)
def test_a_cpu_is_asked_for_its_instructions_and_one_that_is_emulated_too(has, limit, expected, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: has)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert has_bfloat16("cpu") == expected


def test_a_gpu_is_asked_whether_it_computes_in_bfloat16(monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for answer in (True, False):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation, answer=answer: answer)
        assert [has_bfloat16(device) for device in ("auto", "cuda:1", "cpu")] == [answer, answer, False]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert has_bfloat16("cuda"), "a GPU that is elsewhere"


@pytest.mark.parametrize(("has", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_what_is_chosen_is_stored_and_told(has, dtype, folder, cpu):
    cpu(has)
    loaded = load_recipe([folder / "recipe.yaml"], ["device=cpu"])
    assert loaded.recipe.model.dtype == loaded.resolved()["model"]["dtype"] == dtype
    assert loaded.source("model.dtype").endswith("recipe.yaml:4")
    why = "has instructions for it" if has else "has no instructions for bfloat16"
    assert f"model.dtype: auto is {dtype}, because this device {why}" in plan(loaded).notes
    assert Recipe.model_validate(loaded.tree.values).model.dtype == dtype


def test_what_a_recipe_says_is_not_changed(folder, cpu):
    for has in (True, False):
        cpu(has)
        for dtype in ("float32", "bfloat16"):
            assert load_recipe(["shapes-full"], [f"model.dtype={dtype}"]).recipe.model.dtype == dtype
    assert not any(
        "auto" in note for note in plan(load_recipe([folder / "recipe.yaml"], ["model.dtype=float32"])).notes
    )


def test_recipes_of_shipped_models_are_slow_on_no_cpu():
    for file in shipped_recipes().values():
        model = yaml.safe_load(file.read_text())["model"]
        if (file.parent / model["path"]).is_dir():
            assert model.get("dtype", "float32") in ("auto", "float32"), file


def test_a_word_that_is_no_dtype_is_told_of_auto():
    with pytest.raises(RecipeError, match=r"model\.dtype: expected one of auto, float32.*did you mean 'auto'"):
        load_recipe(["shapes-full"], ["model.dtype=outo"])


def test_controllers_elsewhere_compute_in_what_was_chosen_here(cpu):
    cpu(False)
    sent = pickle.dumps(load_recipe(["shapes-full"]))
    cpu(True)
    assert pickle.loads(sent).recipe.model.dtype == "float32"


def test_checks_between_sections_see_the_choice_and_a_resumed_run_its_own(tmp_path, cpu):
    cpu(False)
    loaded = load_recipe(["shapes-full"], COMPILED)
    (tmp_path / "resolved.json").write_text(json.dumps(loaded.resolved()))
    cpu(True)
    with pytest.raises(RecipeError, match=r"performance\.compile: .*model\.dtype to float32"):
        read_recipe("shapes-full", COMPILED)
    assert read_recipe("shapes-full", COMPILED, lambda name: tmp_path).recipe == loaded.recipe


@pytest.mark.slow
def test_a_run_goes_on_in_what_it_began_with_on_another_kind_of_cpu(folder, tmp_path, cpu, capsys):
    recipe, out = str(folder / "recipe.yaml"), tmp_path / "run"
    train(load_recipe([recipe], ["model.dtype=float32"]), tmp_path / "whole")
    cpu(False)
    runs.train(recipe, ["train.steps=2"], out)
    assert stored(out) == "float32"
    cpu(True)
    capsys.readouterr()
    runs.train(recipe, [], out, resume=True)
    assert "model.dtype: auto is float32, as the run began" in " ".join(capsys.readouterr().out.split())
    assert stored(out) == open_run(out)[0].model.dtype == "float32"
    assert rows_of(out) == rows_of(tmp_path / "whole"), "to the bit"
    assert "dtype: auto" in (out / "recipe.yaml").read_text()
    assert evaluate(out) == evaluate(tmp_path / "whole")


def test_a_run_of_an_older_recipe_goes_on_with_one_that_says_auto(folder, tmp_path, cpu):
    recipe, out = folder / "recipe.yaml", tmp_path / "run"
    train(load_recipe([recipe], ["model.dtype=bfloat16", "train.steps=1"]), out)
    cpu(False)
    train(load_recipe([recipe], ["train.steps=2"]), out, resume=True)
    assert stored(out) == "bfloat16"
    assert len(rows_of(out)) == 2
