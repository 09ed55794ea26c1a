"""The examples: each in at most 60 lines, each keeps its contract, and recipes train with them."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
import transformers

from mmrl.app.conformance import pipelines
from mmrl.cli import app
from mmrl.core.errors import UserError
from mmrl.rewards.loading import build, find
from tests.support import tiny_diffusion

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SUMS = EXAMPLES.parent / "pipelines" / "llm" / "models" / "sums-qwen3"
RUBRIC = "{{ prompt }} {{ response }} Is this right?"
SMALL = [
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.group_size=8",
    "data.train.count=40",
    "data.heldout.count=20",
    "eval.every=null",
    "sampling.max_new_tokens=16",
]


def check(capsys, name, *arguments):
    code = app(["check", str(EXAMPLES / name), *arguments], standalone_mode=False)
    said = capsys.readouterr().out
    assert code == 0, said
    return said.splitlines()


@pytest.fixture(scope="module")
def aura_flow(tmp_path_factory):
    """A small pipeline of the real class with random weights."""
    folder = tmp_path_factory.mktemp("aura")
    tokenizer = transformers.T5Tokenizer.from_pretrained(tiny_diffusion.SHAPES / "tokenizer_3")
    config = transformers.UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    encoder = transformers.UMT5EncoderModel(config).eval()
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    )
    torch.manual_seed(0)
    for parameter in transformer.parameters():
        if parameter.ndim >= 2:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73)
    pipe = diffusers.AuraFlowPipeline(tokenizer, encoder, tiny_diffusion._vae(), transformer, scheduler)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pixart(tmp_path_factory):
    """A small pipeline of the real class with random weights, whose transformer predicts a variance too, and with the
    scheduler of the published checkpoint."""
    folder = tmp_path_factory.mktemp("pixart")
    tokenizer, encoder = tiny_diffusion._t5()
    torch.manual_seed(0)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=16,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        cross_attention_dim=16,
        caption_channels=32,
        in_channels=4,
        out_channels=8,
    )
    for parameter in transformer.parameters():
        if parameter.ndim >= 2:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    scheduler = diffusers.DPMSolverMultistepScheduler(timestep_spacing="linspace")
    pipe = diffusers.PixArtSigmaPipeline(tokenizer, encoder, tiny_diffusion._vae(), transformer, scheduler)
    pipe.save_pretrained(folder)
    return folder


def test_each_example_has_60_lines_at_most():
    files = sorted(EXAMPLES.glob("*.py"))
    kinds = {"algorithm", "engine", "family", "judge", "noise_family", "reward", "sampler"}
    assert {file.stem for file in files} == kinds
    assert [f"{file.name}: {n}" for file in files if (n := len(file.read_text().splitlines())) > 60] == []
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"mmrl check examples/{file.name}" in readme for file in files if file.stem != "sampler")


def test_the_algorithm_and_the_reward_keep_their_contracts(capsys):
    assert check(capsys, "algorithm.py:SAPO", "--options", "tau_negative=2.0")[-1] == "9 passed"
    assert check(capsys, "reward.py:Concise", "--options", "names=[sum, answer]")[-1] == "5 passed"


def test_the_reward_refuses_options_that_mean_nothing():
    with pytest.raises(UserError, match="most is 1 or more"):
        build(find(str(EXAMPLES / "reward.py:Concise")), {"most": 0})


def test_the_judge_keeps_its_contract(capsys):
    said = check(
        capsys, "judge.py:BaseJudge", "--options", f"model={SUMS}", "--options", f'rubric="{RUBRIC}"', "--data", "sums"
    )
    assert said[-1] == "8 passed"


def test_the_family_keeps_its_contract(aura_flow, capsys):
    options = ["--options", "max_sequence_length=16"]
    assert check(capsys, "family.py", "--model", str(aura_flow), *options)[-1] == "5 passed"


def test_the_family_that_predicts_noise_keeps_its_contract(pixart, capsys):
    options = ["--options", "max_sequence_length=16"]
    said = check(capsys, "noise_family.py", "--model", str(pixart), *options)
    assert said[-1] == "5 passed"
    assert any("ok      exported lora draws the same" in line for line in said)


def test_a_lora_that_diffusers_cannot_load_is_written_for_peft(pixart, tmp_path, monkeypatch):
    """The code on its card draws with it: PixArt's class has no ``load_lora_weights``."""
    recipe = pipelines.opened(
        str(EXAMPLES / "noise_family.py"), {"max_sequence_length": 16, "guidance_scale": 2.0}, str(pixart)
    )
    case = pipelines.contract.Case(recipe)
    case.pipeline.write(tmp_path, "lora")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    ((how, code),) = case.pipeline.usage(str(tmp_path), "lora", case.slots[0].prompt).code.items()
    assert how == "With peft"
    assert "timestep_spacing='trailing'" in code
    monkeypatch.chdir(pixart.parent)  # a card names the base model without its folders
    made = {}
    exec(code, made)
    assert made["image"].size == (32, 32)


@pytest.mark.slow
def test_recipes_train_with_the_algorithm_the_reward_the_judge_and_the_engine(tmp_path):
    rewards = [
        {"name": str(EXAMPLES / "reward.py:Concise"), "label": "concise", "options": {"most": 3, "names": ["answer:"]}},
        {
            "name": str(EXAMPLES / "judge.py:BaseJudge"),
            "label": "judge",
            "options": {"model": str(SUMS), "rubric": RUBRIC},
        },
    ]
    engine = f"rollout.engine={EXAMPLES / 'engine.py:OwnCopy'}"
    algorithm = f"algorithm={{type: {EXAMPLES / 'algorithm.py:SAPO'}, tau_negative: 1.1}}"
    arguments = [*SMALL, engine, algorithm, f"rewards={json.dumps(rewards)}", "--out", str(tmp_path / "run")]
    app(["train", "sums", *arguments], standalone_mode=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["reward/judge"] < 1
        assert 0 < row["reward/concise"] <= 1
        assert row["optim/grad_norm"] > 0
        assert abs(row["mismatch/kl"]) < 1e-6
