"""What is exported is what was trained, for every kind of ``lora.targets``; and every export can be continued."""

import json
import os
import random
import stat

import pytest
import torch

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

import diffusers  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from mmrl.app.build import build  # noqa: E402
from mmrl.app.export import new_directory  # noqa: E402
from mmrl.config.loader import load_recipe  # noqa: E402
from mmrl.core.errors import UserError  # noqa: E402
from mmrl.families.text.engine_sampling import GivenWeights, streamed  # noqa: E402
from mmrl.inference.engine_weights import write_adapter  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.saved_lora import FAMILIES, folders_in, model_of, recipe, velocity  # noqa: E402
from tests.support.saved_peft import by_mmrl, logits, saved  # noqa: E402
from tests.support.sft import RECIPE, answers, write  # noqa: E402

TEXTS = [("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False), ("gpt2", True), ("qwen3_moe", False)]
TARGETS = {
    "default": None,
    "attention": ["q_proj", "v_proj"],
    "head": ["lm_head"],
    "embedding": ["embed_tokens"],
    "embedding and head": ["embed_tokens", "lm_head"],
    "head and layers": ["lm_head", "down_proj"],
    "embedding and layers": ["embed_tokens", "o_proj"],
    "one layer": ["layers.1.self_attn.v_proj"],
    "whole names": ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"],
    "all linear": ["all-linear"],
    "all weights": "all",
}
GPT2 = {"default": ["c_attn"], "attention": ["c_attn", "c_proj"], "embedding": ["wte"], "one layer": ["h.1.mlp.c_fc"]}
GPT2 |= {
    "head": ["lm_head"],
    "all linear": ["all-linear"],
    "embedding and head": ["wte", "lm_head"],
    "all weights": "all",
}


def other_model(folder, kind):
    """Of families that ``tests.support.tiny`` does not have: transposed layers, and experts."""
    import transformers as t

    words = tiny.tokenizer()
    ids = {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = t.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=256, initializer_range=0.1, **ids)
        t.GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        small |= {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        config = t.Qwen3MoeConfig(**small, head_dim=8, initializer_range=0.1, max_position_embeddings=256, **ids)
        t.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("texts"), {}
    for kind, tied in TEXTS:
        made[kind, tied] = folder = root / f"{kind}-{tied}"
        folder.mkdir()
        if kind in ("qwen3", "llama", "qwen2"):
            tiny.language_model(folder / "model", kind, sharp=0.05, tie_word_embeddings=tied)
        else:
            other_model(folder / "model", kind)
        write(folder / "answers.jsonl", answers(20))
        (folder / "recipe.yaml").write_text(RECIPE)
    return made


def trained(folder, targets, *changes):
    """A run whose weights are as after updates: none of the adapter's is zero."""
    rest = "" if targets is None else f", targets: {json.dumps(targets)}"
    lora = "null" if targets == "all" else f"{{rank: 4, alpha: 12{rest}}}"
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.lora={lora}", *changes])
    run = build(loaded.recipe)
    torch.manual_seed(5)
    for p in run.policy.module.parameters():
        if p.requires_grad:
            p.data = torch.randn_like(p) * 0.2 if targets != "all" else p + 0.02 * torch.randn_like(p)
    return run


class Engine:
    """Keeps what an engine is sent, as vLLM gets it: a checkpoint's tensors, or an adapter's folder."""

    def __init__(self, folder):
        self.folder, self.state = folder, None

    def update(self, weights):
        self.state = {name: tensor.clone() for name, tensor in weights}

    def update_lora(self, tensors, rank, alpha, targets):
        write_adapter(self.folder, tensors, rank, alpha, targets)


def by_engine(run, base, folder):
    """Logits of an engine that was sent the policy's weights: a plain LoRA with one scale."""
    engine = Engine(folder)
    GivenWeights().push(engine, run.policy)
    model = AutoModelForCausalLM.from_pretrained(base)
    if engine.state is not None:
        assert not model.load_state_dict(engine.state, strict=False).unexpected_keys
        return logits(model)
    said = json.loads((folder / "adapter_config.json").read_text())
    layers = model.state_dict()
    state = dict(_adapter(folder))
    for name in [n for n in state if "lora_A" in n or "lora_embedding_A" in n]:
        delta = said["lora_alpha"] / said["r"] * state[name.replace("_A", "_B")] @ state[name]
        target = name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight"
        tied = model.config.tie_word_embeddings and target.startswith(("lm_head", "model.embed", "transformer.wte"))
        if tied:  # a module with a weight of its own
            module = model.get_submodule(target.removesuffix(".weight"))
            module.weight = torch.nn.Parameter(module.weight.detach().clone())
            layers = model.state_dict()
        layers[target] += (delta.T if delta.shape != layers[target].shape else delta).reshape(layers[target].shape)
    return logits(model)


def _adapter(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def exported(run, folder, what):
    with new_directory(folder, "the export") as aside:
        run.pipeline.write(aside, what)
    return folder


@pytest.mark.sweep("exports of text models, by lora.targets")
def test_the_export_of_a_text_model_is_the_policy(sweep, texts, tmp_path):
    cases = [(key, name) for key in texts for name in (GPT2 if key[0] == "gpt2" else TARGETS)]
    for n, (key, name) in enumerate(random.Random(0).sample(cases, sweep.size(8, len(cases)))):
        folder, targets = texts[key], (GPT2 if key[0] == "gpt2" else TARGETS)[name]
        try:
            run = trained(folder, targets)
            expected = logits(run.policy.module)
            found = {
                "merged": logits(AutoModelForCausalLM.from_pretrained(exported(run, tmp_path / f"m{n}", "merged")))
            }
            if targets != "all":
                out = exported(run, tmp_path / f"l{n}", "lora")
                base = AutoModelForCausalLM.from_pretrained(folder / "model")
                found["lora"] = logits(PeftModel.from_pretrained(base, str(out)))
                found["continued"] = by_mmrl(folder, out)
            if key[0] not in ("gpt2", "qwen3_moe"):
                found["engine"] = by_engine(run, folder / "model", tmp_path / f"e{n}")
            gaps = {what: (got - expected).abs().max().item() for what, got in found.items()}
            sweep.check(max(gaps.values()) < 1e-4, f"{key} {name}: {gaps}")
        except UserError as error:  # before it trains
            sweep.check("lora.targets" in str(error), f"{key} {name}: {error}")
        except Exception as error:
            sweep.check(False, f"{key} {name}: {type(error).__name__}: {error}")
    sweep.done()


def test_weights_that_stream_to_an_engine_are_all_that_a_checkpoint_has(texts):
    run = trained(texts["qwen3", True], "all")
    names = {name for name, _ in streamed(run.policy)}
    assert names == {*run.policy.module.state_dict()} - {"lm_head.weight"}


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 5}, "target_modules": ["q_proj", "v_proj"]},
        {"use_rslora": True, "lora_dropout": 0.3},
        {"target_modules": r".*\.(q|k)_proj", "r": 3},
        {"layers_to_transform": [1], "target_modules": ["up_proj"]},
    ],
)
def test_a_continued_adapter_is_exported_as_it_is(texts, tmp_path, config):
    folder = texts["qwen3", False]
    saved(folder, tmp_path / "given", lora_alpha=6, **config)
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.lora={{path: {tmp_path / 'given'}}}"])
    run = build(loaded.recipe)
    for p in run.policy.module.parameters():
        p.data += 0.1 * torch.randn_like(p) if p.requires_grad else 0
    expected = logits(run.policy.module)
    out = exported(run, tmp_path / "lora", "lora")
    found = [logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), str(out)))]
    found += [by_mmrl(folder, out), by_engine(run, folder / "model", tmp_path / "engine")]
    found += [logits(AutoModelForCausalLM.from_pretrained(exported(run, tmp_path / "merged", "merged")))]
    for got in found:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    again = load_recipe([folder / "recipe.yaml"], [f"model.lora={{path: {out}}}"]).recipe.model.lora
    assert again == loaded.recipe.model.lora.model_copy(update={"path": str(out), "targets": again.targets})


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_of_new_files(texts, tmp_path, umask, mode):
    run = trained(texts["qwen3", True], ["q_proj"])
    before = os.umask(umask)
    try:
        for what in ("lora", "merged"):
            out = exported(run, tmp_path / what, what)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
            assert set(modes.values()) == {mode}, modes
            assert not (out / ".mode").exists()
    finally:
        os.umask(before)


PICTURES = {
    "default": None,
    "all linear": ["all-linear"],
    "some": ["to_q", "to_out.0"],
    "convolutions": ["conv_in", "conv1", "conv_out", "proj_in"],
    "embeddings": ["linear_1", "linear_2", "proj_out"],
    "all weights": "all",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folders_in(tmp_path_factory.mktemp("families"))


def pipeline_of(family, folder, lora):
    made = recipe(family, folder, lora)
    return mmrl.load("pipelines", made.pipeline).build(made, made.model.path, torch.device("cpu"))


def drawn_lora(family, folder, targets):
    pipeline = pipeline_of(family, folder, None if targets == "all" else {"rank": 4, "alpha": 8, "targets": targets})
    torch.manual_seed(3)
    for p in pipeline.policy.parameters():
        if p.requires_grad:
            p.data = torch.randn_like(p) * 0.1 if targets != "all" else p + 0.02 * torch.randn_like(p)
    return pipeline


@pytest.mark.slow
@pytest.mark.sweep("exports of picture models, by lora.targets")
def test_the_export_of_a_picture_model_is_the_policy(sweep, folders, tmp_path):
    cases = [(f, name) for f in FAMILIES for name in PICTURES]
    for n, (family, name) in enumerate(random.Random(1).sample(cases, sweep.size(5, len(cases)))):
        targets = PICTURES[name]
        try:
            pipeline = drawn_lora(family, folders[family], targets)
        except UserError as error:  # before it trains
            sweep.check("model.lora.targets" in str(error), f"{family} {name}: {error}")
            continue
        expected, gaps = velocity(pipeline.adapter, pipeline.policy), {}
        for what in ["merged"] if targets == "all" else ["merged", "lora", "lora-file"]:
            try:
                (out := tmp_path / f"{n}-{what}").mkdir()
                pipeline.write(out, what)
                pipe = diffusers.DiffusionPipeline.from_pretrained(out if what == "merged" else folders[family])
                if what != "merged":
                    again = pipeline_of(family, folders[family], {"path": str(out)})
                    gaps[f"{what} continued"] = (velocity(again.adapter, again.policy) - expected).abs().max().item()
                    config = again.policy.peft_config["default"]
                    if (config.r, config.lora_alpha) != (4, 8):
                        gaps[f"{what} rank and alpha"] = 1.0
                    pipe.load_lora_weights(out, weight_name="lora.safetensors" if what == "lora-file" else None)
                model_of(pipe).eval()
                gaps[what] = (velocity(pipeline.adapter, model_of(pipe)) - expected).abs().max().item()
            except UserError as error:
                gaps[what] = 0.0 if "--what lora-file" in str(error) else f"{error}"
            except Exception as error:
                gaps[what] = f"{type(error).__name__}: {str(error)[:300]}"
        wrong = {k: g for k, g in gaps.items() if isinstance(g, str) or g > 1e-4 * max(1, expected.abs().max().item())}
        sweep.check(not wrong, f"{family} {name}: {wrong}")
    sweep.done()
