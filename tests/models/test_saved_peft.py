"""Adapters that peft saved: what is accepted computes what peft computes with it, the rest is refused by name."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402

from mmrl.app.build import build  # noqa: E402
from mmrl.config.adapters import Settings, read_adapter  # noqa: E402
from mmrl.config.loader import RecipeError, load_recipe  # noqa: E402
from mmrl.core.errors import UserError  # noqa: E402
from mmrl.planner.plan import plan  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.saved_peft import IDS, base, by_mmrl, logits, made, saved  # noqa: E402
from tests.support.sft import RECIPE, answers, write  # noqa: E402

KINDS = ["qwen3", "llama", "qwen2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("peft")
    for kind in KINDS:
        (root / kind).mkdir()
        tiny.language_model(root / kind / "model", kind, sharp=0.05, tie_word_embeddings=kind != "llama")
        write(root / kind / "answers.jsonl", answers(20))
        (root / kind / "recipe.yaml").write_text(RECIPE)
    return {kind: root / kind for kind in KINDS}


def by_peft(folder, adapter):
    return logits(PeftModel.from_pretrained(base(folder), str(adapter)))


TARGETS = [
    ["q_proj"],
    ["q_proj", "v_proj", "down_proj"],
    ["layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"],
    ["lm_head"],
    ["embed_tokens"],
    ["embed_tokens", "o_proj"],
    "all-linear",
    r".*\.(q|v)_proj",
    r"model\.layers\.[01]\.mlp\.(up|gate)_proj",
    r"(?:.*?(?:self_attn|mlp).*?(?:k_proj|gate_proj).*?)",
]


def drawn(rng):
    """Settings of peft, some of each kind."""
    config = {"r": rng.choice([1, 4, 6]), "lora_alpha": rng.choice([1, 3, 16]), "target_modules": rng.choice(TARGETS)}
    linear = "embed_tokens" not in config["target_modules"]
    config |= {"use_rslora": rng.random() < 0.3, "lora_dropout": rng.choice([0.0, 0.0, 0.1, 0.9])}
    config |= {"init_lora_weights": rng.choice([True, False, "gaussian"])}
    if linear and config["lora_dropout"] == 0 and config["target_modules"] == ["q_proj"]:
        config["init_lora_weights"] = rng.choice(["gaussian", "eva"])
    if rng.random() < 0.4:
        config["rank_pattern"] = rng.choice([{"q_proj": 2}, {"^model.layers.0.*": 3}, {"layers.1.self_attn.v_proj": 1}])
    if rng.random() < 0.4:
        config["alpha_pattern"] = rng.choice([{"q_proj": 2.5}, {"model.layers.1.mlp.up_proj": 9}, {".*_proj": 7}])
    if linear and rng.random() < 0.3 and config["target_modules"] not in (["lm_head"], ["q_proj"]):
        config["exclude_modules"] = rng.choice(
            [["k_proj"], r".*layers\.0\.self_attn\.q_proj", ["layers.1.mlp.up_proj"]]
        )
    if config["target_modules"] in TARGETS[:2] and rng.random() < 0.5:
        config |= rng.choice([{"layers_to_transform": [1]}, {"layers_to_transform": 0, "layers_pattern": "layers"}])
    return config


@pytest.mark.slow
@pytest.mark.sweep("adapters of peft")
def test_a_folder_means_what_peft_computes_with_it(sweep, folders, tmp_path):
    for n in range(sweep.size(8, 300)):
        rng = random.Random(n)
        kind, config, out = rng.choice(KINDS), drawn(rng), tmp_path / str(n)
        try:
            saved(folders[kind], out, n, **config)
            expected = by_peft(folders[kind], out)
            path = out / rng.choice(["", "", "adapter_model.safetensors", "adapter_config.json"])
            found, plain = by_mmrl(folders[kind], path), logits(base(folders[kind]))
            gap, moved = (found - expected).abs().max().item(), (plain - expected).abs().max().item()
            sweep.check(gap < 1e-5 and moved > 1e-3, f"{kind} {config}: {gap}, it moves {moved}")
        except Exception as error:
            sweep.check(False, f"{n} {kind} {config}: {type(error).__name__}: {error}")
        shutil.rmtree(out, ignore_errors=True)
    sweep.done()


REFUSED = {
    "use_dora": {"use_dora": True},
    "lora_only": {"bias": "lora_only"},
    "bias": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "init_lora_weights=pissa": {"init_lora_weights": "pissa"},
    "init_lora_weights=olora": {"init_lora_weights": "olora"},
}


@pytest.mark.slow
@pytest.mark.parametrize("key", REFUSED)
def test_what_is_no_plain_lora_is_refused_and_the_named_edits_work(folders, tmp_path, key):
    folder = folders["llama"]
    adapter = saved(folder, tmp_path / "adapter", **REFUSED[key])
    with pytest.raises(
        RecipeError, match=rf"has .*{key}.*merge_and_unload.*set model\.path to that, or remove"
    ) as said:
        made(folder, adapter)
    assert len(str(said.value)) < 700
    merged = PeftModel.from_pretrained(base(folder), str(adapter)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    shutil.copytree(folder / "model", tmp_path / "whole")
    shutil.copytree(tmp_path / "merged", tmp_path / "whole", dirs_exist_ok=True)
    expected = logits(merged)
    for lora in ("null", "{rank: 2}"):  # all weights train, or a new adapter
        loaded = load_recipe([folder / "recipe.yaml"], [f"model.path={tmp_path / 'whole'}", f"model.lora={lora}"])
        with torch.no_grad():
            found = build(loaded.recipe).policy.module(IDS).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def config_with(**changes):
    return lambda said: said | changes


BROKEN = {
    "lora_bias, and a plain LoRA goes on; remove": config_with(lora_bias=True),
    "layer_replication": config_with(layer_replication=[[0, 2], [1, 2]]),
    "of type IA3": config_with(peft_type="IA3"),
    "of type None": lambda said: {},
    "of type LOHA": config_with(peft_type="LOHA"),
    "trainable_token_indices": config_with(trainable_token_indices={"embed_tokens": [1]}),
    "alora_invocation_tokens": config_with(alora_invocation_tokens=[1]),
    "use_qalora": config_with(use_qalora=True),
    "megatron_config": config_with(megatron_config={"a": 1}),
    "ensure_weight_tying": config_with(ensure_weight_tying=True),
    "arrow_config": config_with(arrow_config={"top_k": 2}),
    "a_setting_of_tomorrow": config_with(a_setting_of_tomorrow=2),
    "init_lora_weights=loftq": config_with(init_lora_weights="loftq"),
    "init_lora_weights=pissa_niter_4": config_with(init_lora_weights="pissa_niter_4"),
    "init_lora_weights=mica": config_with(init_lora_weights="mica"),
    "init_lora_weights=corda": config_with(init_lora_weights="corda"),
    "rank_pattern with the expression": config_with(rank_pattern={"(.*)*q_proj": 4}),
    "alpha_pattern with the expression": config_with(alpha_pattern={"((a+)+)+$": 4}),
    "r: ": config_with(r="8"),
    "r: Input should be greater than 0": config_with(r=0),
    "lora_alpha: ": config_with(lora_alpha=0),
    "lora_alpha: Input should be a finite": config_with(lora_alpha=float("nan")),
    "lora_alpha: Input should be greater": config_with(lora_alpha=-4),
    "lora_dropout": config_with(lora_dropout=1.5),
    "alpha_pattern": config_with(alpha_pattern={"q_proj": "much"}),
    "target_modules": config_with(target_modules={"a": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("says", BROKEN)
def test_settings_of_strangers_are_refused_by_name(folders, tmp_path, says):
    adapter = saved(folders["llama"], tmp_path / "adapter")
    said = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(BROKEN[says](said)))
    with pytest.raises(RecipeError, match=rf"lora\.?.*path: .*{says}") as error:
        made(folders["llama"], adapter)
    assert "remove lora.path, and a new adapter is trained" in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b"\xff\xfe", "no JSON"),
        (b" " * 5_000_000 + b"{}", "more than|cannot be read"),
    ],
)
def test_broken_settings_are_refused(folders, tmp_path, config, says):
    adapter = saved(folders["llama"], tmp_path / "adapter")
    (adapter / "adapter_config.json").write_bytes(config)
    with pytest.raises(RecipeError, match=says):
        made(folders["llama"], adapter)


def weights_with(change):
    def apply(folder):
        state = load_file(folder / "adapter_model.safetensors")
        save_file(change(state), folder / "adapter_model.safetensors")

    return apply


def _cut(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])


def _pickle(folder):
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


WEIGHTS = {
    "cannot be read": _cut,
    "save the adapter with safe_serialization=True": _pickle,
    ": 1 weights have no counterpart": weights_with(lambda s: dict(list(s.items())[1:])),
    "no weights of a LoRA": weights_with(lambda s: {}),
    "which is no matrix": weights_with(lambda s: {k: v[0].clone() for k, v in s.items()}),
    "which is DoRA": weights_with(lambda s: s | {f"{next(iter(s))[:-13]}lora_magnitude_vector": torch.ones(32)}),
    r"which is biases \(lora_bias\)": weights_with(lambda s: s | {f"{next(iter(s))[:-13]}lora_B.bias": torch.ones(32)}),
    r"changes .*score\.weight": weights_with(lambda s: s | {"base_model.model.score.weight": torch.ones(2, 2)}),
    r"changes .*lm_head\.weight": weights_with(lambda s: s | {"base_model.model.lm_head.weight": torch.ones(272, 32)}),
    "does not fit the model: size mismatch": weights_with(lambda s: {k: v.repeat(1, 2) for k, v in s.items()}),
}


@pytest.mark.parametrize("says", WEIGHTS)
def test_weights_of_strangers_are_refused_by_name(folders, tmp_path, says):
    adapter = saved(folders["llama"], tmp_path / "adapter")
    WEIGHTS[says](adapter)
    with pytest.raises(UserError, match=says) as error:
        made(folders["llama"], adapter)
    assert "lora" in str(error.value)
    assert len(str(error.value)) < 900


def test_a_rank_that_no_weight_has_allocates_nothing(folders, tmp_path):
    adapter = saved(folders["llama"], tmp_path / "adapter", r=4, target_modules=["q_proj", "k_proj"])
    state = load_file(adapter / "adapter_model.safetensors")
    save_file({k: v for k, v in state.items() if "k_proj" not in k}, adapter / "adapter_model.safetensors")
    said = json.loads((adapter / "adapter_config.json").read_text()) | {"r": 10**9, "rank_pattern": {"q_proj": 4}}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    policy = made(folders["llama"], adapter).policy.module
    assert {p.shape[0] for n, p in policy.named_parameters() if "lora_A" in n} == {4}


def test_plan_refuses_what_train_refuses(folders, tmp_path):
    folder = folders["llama"]
    adapter = saved(folder, tmp_path / "adapter")
    weights_with(lambda s: {k.replace("layers.1", "layers.7"): v for k, v in s.items()})(adapter)
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.lora={{path: {adapter}}}"])
    with pytest.raises(UserError, match="does not fit the model: 4 weights have no counterpart"):
        build(loaded.recipe)
    assert any("have no counterpart" in problem for problem in plan(loaded).problems)


def test_peft_without_its_settings_is_told_the_edit(folders, tmp_path):
    adapter = saved(folders["llama"], tmp_path / "adapter", lora_alpha=3)
    expected = by_peft(folders["llama"], adapter)
    (tmp_path / "alone").mkdir()
    shutil.copy(adapter / "adapter_model.safetensors", tmp_path / "alone")
    for path in (tmp_path / "alone", tmp_path / "alone" / "adapter_model.safetensors"):
        with pytest.raises(RecipeError, match=r"adapter_config\.json") as said:
            made(folders["llama"], path)
        assert len(str(said.value)) < 700
    shutil.copy(adapter / "adapter_config.json", tmp_path / "alone")  # as it says
    for path in (tmp_path / "alone", tmp_path / "alone" / "adapter_model.safetensors"):
        torch.testing.assert_close(by_mmrl(folders["llama"], path), expected, atol=1e-5, rtol=0)


def test_every_setting_of_this_peft_is_known():
    """What a new version of peft adds is refused where it is set, and its default is not."""
    said = json.loads(json.dumps(LoraConfig(target_modules=["q_proj"]).to_dict(), default=list))
    assert list(Settings.model_validate(said).refused()) == []


def test_rank_alpha_and_targets_are_shown(folders, tmp_path):
    config = {"r": 4, "lora_alpha": 3, "rank_pattern": {"v_proj": 6}, "target_modules": ["v_proj", "q_proj"]}
    found = read_adapter(str(saved(folders["qwen2"], tmp_path / "adapter", **config)))
    assert (found.rank, found.alpha, found.targets) == (6, 3.0, ["q_proj", "v_proj"])


def scorer(folder, *changes):
    return load_recipe(["sums-reward"], [f"model.path={folder / 'model'}", "device=cpu", *changes])


@torch.no_grad()
def scores(model):
    return model(IDS, attention_mask=torch.ones_like(IDS)).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ours", [False, True])
def test_the_adapter_of_a_reward_model_goes_on_with_its_head(folders, tmp_path, ours, dtype):
    """As peft's SEQ_CLS and ``mmrl export --what lora`` write it: the head is saved whole beside the LoRA."""
    if ours:
        begun = build(scorer(folders["qwen3"], "model.lora={rank: 4}", f"model.dtype={dtype}").recipe)
        for p in begun.policy.module.parameters():
            p.data = torch.randn_like(p) * 0.2 if p.requires_grad else p.data
        begun.pipeline.write(tmp_path / "lora", "lora")
        expected = scores(begun.policy.module)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folders["qwen3"] / "model", num_labels=1)
        policy = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
        for p in policy.parameters():
            p.data = torch.randn_like(p) * 0.2 if p.requires_grad else p.data
        policy.save_pretrained(str(tmp_path / "lora"))
        expected = scores(policy.eval())
    loaded = scorer(folders["qwen3"], f"model.lora={{path: {tmp_path / 'lora'}}}", f"model.dtype={dtype}")
    assert not [said for said in plan(loaded).problems if "lora" in said]
    found = build(loaded.recipe).policy.module
    assert {name.rpartition("score.")[2] for name, p in found.named_parameters() if p.requires_grad and "score" in name}
    assert torch.allclose(scores(found), expected, atol=1e-5 if dtype == "float32" or ours else 0.05)
    writes = load_recipe([folders["qwen3"] / "recipe.yaml"], [f"model.lora={{path: {tmp_path / 'lora'}}}"])
    assert any("changes base_model.model.score.weight" in said for said in plan(writes).problems)
