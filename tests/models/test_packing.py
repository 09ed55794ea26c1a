"""Rows behind one another in lines: the same log-probs, entropies and gradients as padded, and less padding."""

import random
from types import SimpleNamespace

import pytest
import torch

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller.workload_balance import line_tokens, lines, pack, pack_lines, padded
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.models.text.base_model import base_model
from mmrl.models.text.packing import FAMILIES, Packing, way
from tests.support import tiny
from tests.support.text import recipe

chat = mmrl.load("pipelines", "llm/chat")
NEEDS = frozenset({"log_probs", "entropy"})
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
OF_FAMILY = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"logits_scaling": 3.0},
}
QUESTIONS = ["Say a.", "What is 2+3, and what is 4+5?", "Why?", "A much longer question than the ones before it."]


def model(kind, folder):
    """A tiny model of a family, saved with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = tiny.language_model(folder)  # for its tokenizer
    tokens = AutoConfig.from_pretrained(made)
    special = {name: getattr(tokens, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(kind, **SMALL | OF_FAMILY.get(kind, {}) | special, bos_token_id=None)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def drawn(pipeline):
    """Responses of different lengths, one of them empty."""
    slots = [Slot(0, i, 0, Prompt(f"q{i}", text, max_new_tokens=3 + 4 * i)) for i, text in enumerate(QUESTIONS)]
    pairs = [(slot, SampleId(0, slot.index, 0, k)) for slot in slots for k in range(2)]
    pipeline.encode(slots)
    return pipeline.sample([s for s, _ in pairs], [i for _, i in pairs], [], 7)


def replayed(pipeline, rows, packing):
    """What an update reads, where a loss counts it, and the gradient of a sum of it."""
    pipeline.packing = packing
    pipeline.policy.zero_grad()
    out = pipeline.replay(rows, [0], NEEDS, None)
    mask = rows.padded("action_mask")
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(3)) * mask
    sum((value * weights).sum() for value in out.values()).backward()
    gradient = torch.cat([p.grad.flatten() for p in pipeline.policy.parameters() if p.grad is not None])
    return {name: value.detach() * mask for name, value in out.items()} | {"gradient": gradient}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_is_computed_as_if_it_were_alone(kind, attention, tmp_path):
    path = model(kind, tmp_path)
    made = chat.build(recipe(path, performance={"attention": attention}), str(path), torch.device("cpu"))
    rows = drawn(made)
    assert len(set(rows.lengths)) > 3
    whole = replayed(made, rows, None)
    for flat in (False, True):
        found = replayed(made, rows, Packing(flat=flat))
        for name, value in whole.items():
            assert (found[name] - value).norm() <= 2e-5 * value.norm(), (flat, name)
    made.packing = Packing(flat=False)
    other = rows.tokens.clone()
    other[rows.offsets[2] : rows.offsets[3]] = 65  # one row's tokens change no other row
    rows.tokens, before = other, made.replay(rows, [0], NEEDS, None)["log_probs"]
    same = [n for n in range(len(rows)) if n != 2]
    assert torch.allclose((before * rows.padded("action_mask"))[same], whole["log_probs"][same], atol=2e-5)


@pytest.mark.slow
def test_compiled_layers_have_the_same_gradient_of_rows_in_lines(tmp_path):
    """Traced whole, with shapes left open, and without kernels: sums come in another order, by which they may differ.
    No recipe compiles an update of text (docs/gpus.md)."""
    path = model("qwen3", tmp_path)
    made = chat.build(recipe(path), str(path), torch.device("cpu"))
    rows = drawn(made)
    eager = replayed(made, rows, Packing(flat=True))
    torch._dynamo.reset()
    try:
        for layer in base_model(made.policy).model.layers:
            layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        compiled = replayed(made, rows, Packing(flat=True))
    finally:
        torch._dynamo.reset()
    for name, value in eager.items():
        assert (compiled[name] - value).norm() <= 1e-5 * value.norm(), name


def test_whole_rows_fill_lines_and_the_budget_holds():
    draw = random.Random(5)
    for _ in range(200):
        lengths = [draw.randint(1, draw.choice((3, 40, 300))) for _ in range(draw.randint(1, 30))]
        for flat in (False, True):
            width, found = lines(lengths, flat=flat)
            assert sorted(i for line in found for i in line) == [*range(len(lengths))]
            assert max(sum(lengths[i] for i in line) for line in found) == width
            tokens, most = draw.choice((None, 1, 200, 1000)), draw.randint(1, 12)
            parts = pack_lines(lengths, most, tokens, flat=flat)
            assert sorted(i for part in parts for i in part) == [*range(len(lengths))]
            for part in parts:
                assert len(part) <= most
                assert tokens is None or len(part) == 1 or line_tokens([lengths[i] for i in part], flat=flat) <= tokens


def test_lengths_like_those_of_word_problems_leave_two_in_a_hundred_tokens_padded():
    """By the recipe for GSM8K, 40 rows and 8,192 tokens at most, with lengths that are padded by 22 % in 120 slices."""
    draw, sizes = random.Random(0), []
    for _ in range(256):
        prompt = int(min(512, draw.lognormvariate(4.7, 0.35)))
        sizes += [(prompt, min(1024, int(draw.lognormvariate(5.25, 0.45)))) for _ in range(5)]
    lengths = [sum(one) for one in sizes]
    before = [[sizes[i] for i in part] for part in pack(sizes, 40, 8192)]
    assert sum(lengths) < 0.79 * sum(map(padded, before))
    for flat in (False, True):
        after = [[lengths[i] for i in part] for part in pack_lines(lengths, 40, 8192, flat=flat)]
        assert sum(lengths) >= (1.0 if flat else 0.98) * sum(line_tokens(part, flat=flat) for part in after)
        assert len(after) <= len(before) / 2


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("scenes", [], "this model sees pictures"),
        ("sums-reward", [], "reads each in a row of its own"),
        ("shapes-lora", [], "pictures have no rows of tokens; remove it"),
    ],
)
def test_where_rows_cannot_be_packed_it_is_said(name, more, why):
    if name == "scenes":
        pytest.importorskip("torchvision")
    with pytest.raises(UserError, match=why):
        build(load_recipe([name], ["train.packing=true", *more]).recipe)


def test_auto_packs_on_a_gpu_what_was_tested_and_nothing_else(tmp_path):
    path = tiny.language_model(tmp_path, "llama")
    made = chat.build(recipe(path), str(path), torch.device("cpu"))
    gpu = torch.device("cuda")

    def taken(device=gpu, sees=False, kind="llama", **changes):
        made.policy.config.model_type = kind
        return way(recipe(path, **changes), made.policy, device, SimpleNamespace(forbidden=[5] if sees else []))

    assert made.packing is None
    assert taken() == Packing(flat=False)
    assert taken(performance={"attention": "flash_attention_2"}) == Packing(flat=True)
    assert taken(train={"packing": False}) is None
    for other in ({"device": torch.device("cpu")}, {"device": torch.device("meta")}, {"sees": True}, {"kind": "gpt2"}):
        assert taken(**other) is None
    shared = {"context_parallel": 2}
    assert taken(train=shared) is None
    with pytest.raises(UserError, match="divide it themselves; remove it, or set it to false"):
        taken(train=shared | {"packing": True})
    with pytest.raises(UserError, match="type gpt2 are not among those tested"):
        taken(kind="gpt2", train={"packing": True})
