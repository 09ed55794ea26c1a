"""Cold start: a run begins with the adapter or the weights that another run exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.app.build import build, restored
from mmrl.app.export import export
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from mmrl.training import loop
from tests.support import tiny
from tests.support.sft import RECIPE, answers, write

GRPO = [
    "algorithm={type: grpo, kl_coef: 0.1}",
    "rewards=[{name: digits.py}]",
    "train={steps: 3, prompts_per_step: 4, group_size: 4, micro_batch_size: 16}",
    "eval.every=3",
    "eval.samples=8",
    "checkpoint.every=3",
    "optim.lr=3e-2",
]
ADAPTER = "model.lora={path: adapter}"


def load(folder, *changes):
    return load_recipe([folder / "recipe.yaml"], list(changes))


def make(folder, *changes):
    loaded = load(folder, *changes)
    return build(loaded.recipe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, and what runs of SFT exported: ``adapter`` and ``whole``."""
    made = tmp_path_factory.mktemp("cold")
    tiny.language_model(made / "model", sharp=0.05)
    write(made / "answers.jsonl", answers(60))
    (made / "recipe.yaml").write_text(RECIPE)
    (made / "digits.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    return [float(sum(map(ord, s.text)) % 3) for s in samples]  # of any texts some differ\n"
    )
    short = ["train.steps=12", "eval.every=12", "eval.samples=8"]
    train(load(made, *short, "optim.lr=1e-2", "model.lora={rank: 4, alpha: 12, targets: [q_proj, v_proj]}"), made / "l")
    train(load(made, *short), made / "f")
    export(made / "l", made / "adapter", "lora")
    export(made / "f", made / "whole")
    return made


def adapter_of(policy):
    return {name: p.detach().clone() for name, p in policy.trainable.items()}


@pytest.mark.slow
def test_the_chain_goes_on_with_what_sft_learned(folder, tmp_path):
    done = train(load(folder, *GRPO, ADAPTER), tmp_path / "grpo")
    metrics = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    sft = [json.loads(line) for line in (folder / "l" / "heldout.jsonl").read_text().splitlines()]
    assert sft[-1]["policy/loss"] < sft[0]["policy/loss"]
    assert metrics[0]["policy/kl"] == pytest.approx(0, abs=1e-6), "the reference is the adapter as it was"
    assert metrics[-1]["policy/kl"] > 1e-4
    assert (metrics[0]["policy/ratio_max_dev"], metrics[0]["mismatch/log_prob_gap_max"]) < (1e-5, 1e-5)
    before, after = restored(done, "base")[0], restored(done, "latest")[0]
    given, kept = restored(folder / "l", "latest")[0], after.policy.copies["reference"]
    for name, weight in adapter_of(given.policy).items():
        assert torch.equal(adapter_of(before.policy)[name], weight)
        assert torch.equal(kept[name], weight)
    assert any(not torch.equal(adapter_of(after.policy)[name], kept[name]) for name in kept)
    again = export(done, tmp_path / "again", "lora")
    assert json.loads((again / "adapter_config.json").read_text())["r"] == 4


def test_the_whole_weights_of_a_run_are_a_model(folder):
    run = make(folder, *GRPO, "model.path=whole")
    given = restored(folder / "f", "latest")[0]
    for name, weight in adapter_of(given.policy).items():
        assert torch.equal(adapter_of(run.policy)[name], weight)
    row, _ = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert row["policy/kl"] == pytest.approx(0, abs=1e-6)


def test_rank_alpha_and_targets_are_the_adapters(folder):
    loaded = load(folder, ADAPTER)
    lora = loaded.recipe.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (4, 12.0, ["q_proj", "v_proj"])
    assert lora.path == str(folder / "adapter")
    load(folder, "model.lora={path: adapter, rank: 4, alpha: 12, targets: [v_proj, q_proj]}")
    (folder / "resolved.json").write_text(json.dumps(loaded.resolved()))
    assert load_recipe([folder / "resolved.json"]).recipe.model.lora == lora


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ("{path: adapter, rank: 8}", "rank: the adapter at .*adapter has 4, not 8; remove the key, or lora.path"),
        ("{path: adapter, alpha: 8}", "alpha: the adapter at .* has 12.0, not 8"),
        ("{path: adapter, targets: [k_proj]}", r"targets: the adapter at .* has \['q_proj', 'v_proj'\]"),
        ("{path: adapter, init: default}", "init: the adapter at .* has weights"),
        ("{path: nowhere}", "model.lora.path: there is no 'nowhere'"),
        ("{path: model}", "has no adapter_config.json and no pytorch_lora_weights.safetensors"),
    ],
)
def test_what_contradicts_the_adapter_is_refused(folder, lora, says):
    with pytest.raises(RecipeError, match=says):
        load(folder, f"model.lora={lora}")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "IA3", "an adapter of type IA3; give a LoRA"),
        ("use_dora", True, "has use_dora, and a plain LoRA goes on; merge it"),
        ("bias", "all", 'has bias="all"'),
        ("modules_to_save", ["lm_head"], "has modules_to_save"),
    ],
)
def test_other_adapters_are_refused(folder, tmp_path, key, value, says):
    shutil.copytree(folder / "adapter", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(RecipeError, match=says):
        load(folder, f"model.lora={{path: {tmp_path / 'other'}}}")


def test_an_adapter_of_another_model_is_refused(folder, tmp_path, capsys):
    other = tiny.language_model(tmp_path / "wider", hidden_size=48)
    with pytest.raises(UserError, match=r"model\.lora\.path: the adapter .* does not fit the model: size mismatch"):
        make(folder, ADAPTER, f"model.path={other}")
    assert "says that it was trained on model, and model.path is" in capsys.readouterr().err
    shutil.copytree(folder / "adapter", tmp_path / "less")
    state = load_file(tmp_path / "less" / "adapter_model.safetensors")
    state.pop(next(iter(state)))
    save_file(state, tmp_path / "less" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="1 weights have no counterpart"):
        make(folder, f"model.lora={{path: {tmp_path / 'less'}}}")


def test_the_plan_counts_the_copy_that_is_the_reference(folder):
    roles = {}
    for name, lora in (("anew", "model.lora={rank: 4, alpha: 12, targets: [q_proj, v_proj]}"), ("saved", ADAPTER)):
        made = plan(load(folder, *GRPO, lora))
        assert made.problems == []
        roles[name] = {role.name: role.bytes for role in made.roles}
    assert roles["anew"]["reference"] == 0
    assert roles["saved"]["copy: reference"] == roles["saved"]["policy, trained"] > 0
