"""The plan knows the memory of every kind of language model that trains, whatever its layers keep of earlier tokens."""

import json

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan
from tests.support import tiny
from tests.support.plan_text import RECIPE, REWARD, ratio_of
from tests.support.small_models import small_model

allow_cpu_only()

KINDS = {
    "llama": "whole",
    "deepseek_v3": "latent",
    "gpt_oss": "windows and whole",
    "mistral": "windows",
    "gemma4_text": "windows and whole, of different widths",
    "qwen3_5_text": "linear and whole",
    "granitemoehybrid": "Mamba and whole",
    "falcon_h1": "both in each layer",
    "mamba2": "Mamba alone",
    "deepseek_v32": "whole, chosen by an index",
    "jetmoe": "whole, of experts whose tokens are counted",
}
"""A kind of model for each kind of cache."""
MORE = [
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "bamba",
    "jamba",
    "gemma2",
    "gemma3_text",
    "gemma4",
    "ministral3",
    "olmo3",
    "llama4_text",
    "exaone4",
    "cohere2",
    "mamba",
    "nemotron_h",
    "minimax",
    "olmo_hybrid",
    "glm_moe_dsa",
    "recurrent_gemma",
    "diffllama",
    "doge",
    "phi3",
    "qwen3",
    "qwen2",
    "qwen2_moe",
    "qwen3_moe",
    "afmoe",
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "dots1",
    "ernie4_5",
    "exaone_moe",
    "falcon_mamba",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "internlm2",
    "olmo2",
    "olmoe",
    "persimmon",
    "phi",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "deepseek_v2",
    "gpt2",
    "gpt_neox",
    "bloom",
    "opt",
    "mixtral",
    "phimoe",
    "olmo",
    "ernie4_5_moe",
    "minimax_m2",
    "nemotron",
    "granitemoeshared",
    "mimo_v2_flash",
    "solar_open",
    "nanochat",
    "gpt_bigcode",
    "biogpt",
    "mpt",
    "granite_swa",
    "granitemoe_swa",
    "cohere2_moe",
    "jais2",
    "mellum",
    "laguna",
    "hy_v3",
    "hy_v4",
    "deepseek_v4",
    "inkling_text",
    "minimax_m3_vl_text",
    "aria_text",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Say {i + 10} letters"} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def there(kind):
    """Whether the installed transformers has this kind."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def saved(folder, kind):
    """The folder of a model of this kind, with its tokenizer."""
    if not (folder / kind).exists():
        tok = tiny.tokenizer()
        small_model(kind, len(tok), tok.eos_token_id, tok.pad_token_id).save_pretrained(folder / kind)
        tok.save_pretrained(folder / kind)
    return folder / kind


def measured(folder, kind):
    made = plan(load_recipe([folder / "recipe.yaml"], [f"model.path={kind}", "sampling.max_new_tokens=24"]))
    assert made.problems == []
    assert made.measured is not None, made.notes
    return True


@pytest.mark.slow
@pytest.mark.sweep("kinds of language models whose memory the plan knows")
def test_the_plan_knows_the_memory_of_every_kind(folder, sweep):
    kinds = [*KINDS, *MORE][: sweep.size(len(KINDS), 1000)]
    sweep.run([kind for kind in kinds if there(kind)], lambda kind: saved(folder, kind) and measured(folder, kind))
    sweep.done()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text", "mamba2"])
def test_a_real_step_takes_what_the_plan_says(folder, kind):
    """Of windows that are left, of states of a fixed size, and of a model without keys."""
    assert saved(folder, kind)
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.path={kind}", "sampling.max_new_tokens=24"])
    assert 0.9 < ratio_of(loaded) < 1.1


def test_a_kind_that_reads_padding_as_text_is_refused_in_plan_and_before_it_is_loaded(folder):
    kind = "rwkv"
    if not there(kind):
        pytest.skip("transformers has no such model")
    rows = torch.randint(3, 290, (1, 10))
    padded, mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), rows], 1), torch.ones(1, 13, dtype=torch.long)
    mask[:, :3] = 0
    model = small_model(kind, 300, 1, 0)
    with torch.no_grad():
        apart = model(input_ids=padded, attention_mask=mask).logits[:, 3:] - model(input_ids=rows).logits
    assert apart.abs().max() > 0.1
    made = load_recipe([folder / "recipe.yaml"], [f"model.path={saved(folder, kind)}"])
    said = "models of type rwkv read the padding before a prompt as if it were text"
    assert said in plan(made).problems[0]
    with pytest.raises(UserError, match=said):
        build(made.recipe)


def test_a_window_forgets_and_a_state_keeps_its_size():
    """What a cache holds after tokens were put in at once is what it holds after they were read one by one."""
    from transformers import DynamicCache

    from mmrl.families.text.meta_model import _grow

    config = small_model("gpt_oss", 300, 1, 0).config
    one, other = DynamicCache(config=config), DynamicCache(config=config)
    for cache in (one, other):
        for n in range(len(cache.layers)):
            cache.update(torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 8), n)
    _grow(one, 20)
    for _ in range(20):
        for n in range(len(other.layers)):
            other.update(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), n)
    assert [layer.keys.shape for layer in one.layers] == [layer.keys.shape for layer in other.layers]
    assert one.get_seq_length() == other.get_seq_length() == 25
