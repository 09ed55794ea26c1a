"""Megatron-Core's ranks come to what one process of Hugging Face does, over real gloo process groups."""

import json

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.megatron.mapping import LAYER, parts, places, refusals
from tests.support.megatron import (  # noqa: F401
    CP,
    PP,
    SHIPPED,
    SMALL,
    TP,
    TURNS,
    WIDE,
    given,
    made,
    rows_of,
    test_parts_of_layers_have_the_gradients_and_log_probs_of_the_whole,
    tiny,
    together,
    updates,
    words,
)
from tests.support.planning import LEFT_OUT, planned, planned_in_short

allow_cpu_only()  # before transformers imports torchvision


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_divided_vocabulary_has_the_log_probs_entropy_and_gradients_of_the_whole(size, tmp_path):
    logits, tokens = given()
    logits = logits.double().requires_grad_()
    log_probs = torch.log_softmax(logits / 0.7, -1)
    known = torch.where(log_probs.isfinite(), log_probs, 0.0)
    both = torch.stack([log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * known).sum(-1)])
    (both * given()[0][0, 0, 0].sign() * torch.arange(1, 13).view(2, 2, 3)).sum().backward()
    found = together(tmp_path, size, "words")
    for rank in found:
        torch.testing.assert_close(rank["both"].double(), both.detach(), rtol=1e-5, atol=1e-5)
    gradient = torch.cat([rank["gradient"] for rank in found], -1)
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("multiple", "least"), [(1, 0), (4, 0), (2, 31)])
def test_packed_rows_attend_to_their_own_tokens_alone(multiple, least):
    pytest.importorskip("megatron.core")
    from mmrl.models.megatron.rows import packed

    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 0]])  # before and behind
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, 6, heads, 4, generator=made, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    them = packed(mask, multiple, least)
    assert them.total == max(12 if multiple == 4 else 10, least)
    out = them.unpack(them.attend(*(them.pack(t)[0] for t in (query, key, value)), 0.3))
    weight = torch.randn(out.shape, generator=made, dtype=torch.float64) * mask.unsqueeze(-1)
    gradients = torch.autograd.grad((out * weight).sum(), (query, key, value))

    q, k, v = (t.repeat_interleave(4 // t.shape[2], 2) for t in (query, key, value))
    scores = 0.3 * torch.einsum("bqhd,bkhd->bhqk", q, k)
    seen = torch.ones(6, 6).tril().bool() & mask.bool()[:, None, None, :]
    probabilities = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    by_hand = torch.einsum("bhqk,bkhd->bqhd", probabilities, v).flatten(2) * mask.unsqueeze(-1)
    torch.testing.assert_close(out, by_hand, rtol=1e-12, atol=1e-12)
    theirs = torch.autograd.grad((by_hand * weight).sum(), (query, key, value))
    torch.testing.assert_close(gradients, theirs, rtol=1e-12, atol=1e-12)
    ends = them.ends[mask.bool()]  # of every token its own place
    assert ends.tolist() == list(range(10))
    assert them.ends[2].tolist() == [9] * 6


def test_half_precision_computes_with_rounded_weights_and_learns_in_float32(tmp_path):
    pytest.importorskip("megatron.core")
    half = "model.dtype=bfloat16"
    run = made(SHIPPED, None, half)
    whole = updates(run, rows_of(run, 0, 1))
    found = together(tmp_path, 2, "serve", SHIPPED, *PP, half)
    rank = found[0] | found[1]
    assert rank.keys() == whole.keys()
    torch.testing.assert_close(rank["log_probs"], whole["log_probs"], rtol=0, atol=0.15)  # bfloat16 has eight bits
    names = [name.removeprefix("start/") for name in rank if name.startswith("start/")]
    gradients, moves = (
        [torch.cat([of(values, name).flatten() for name in names]) for values in (rank, whole)]
        for of in (
            lambda values, name: values[f"gradient/{name}"],
            lambda values, name: values[f"weights/{name}"] - values[f"start/{name}"],
        )
    )
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
    small = moves[0].ne(0) & (moves[0].abs() < 2e-3)
    assert small.float().mean() > 0.97, "most weights move by less than bfloat16 can tell"
    assert torch.cosine_similarity(*moves, dim=0) > 0.8


def test_every_tensor_is_seen_once_where_it_lies(tmp_path):
    run = made(tiny(tmp_path / "model", "Qwen2"))
    module = run.pipeline.policy
    theirs = dict(module.named_parameters())
    seen = [name for place in places(module) for name in place.tensors]
    assert sorted(seen) == sorted(theirs)
    heads = next(place for place in LAYER if place.cut == "heads")
    fused = torch.arange(4 * (2 + 2) * 3).view(4 * 4 * 3, 1)  # 4 groups of 2 queries, a key and a value, of 3 each
    q, k, v = parts(heads, fused, 8, 4, 0)
    assert [t.shape for t in (q, k, v)] == [(4, 6, 1), (4, 3, 1), (4, 3, 1)]
    assert k[1].flatten().tolist() == [18, 19, 20]
    q.zero_()
    assert fused.view(4, 12)[:, :6].eq(0).all(), "a view is the parameter's own storage"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.backend=megatron"], "train.tensor_parallel: megatron needs at least 2 devices"),
        (["train.tensor_parallel=2"], "train.tensor_parallel: replicated does not split layers"),
        (["train.sequence_parallel=true"], "train.sequence_parallel: replicated does not split layers"),
        (["train.pipeline_parallel=2"], "train.pipeline_parallel: replicated does not split layers"),
        ([*PP, "train.sequence_parallel=true"], "train.sequence_parallel: it needs train.tensor_parallel"),
        ([*CP, *TURNS, "devices_per_controller=4"], "train.pipeline_chunks: interleaved stages need whole rows"),
        ([*TP, "train.pipeline_chunks=2"], "train.pipeline_chunks: it needs several pipeline stages"),
        ([*TP, "train.pipeline_parallel=2"], "2 train there; set devices_per_controller to a multiple of 4"),
        ([*TP, "devices_per_controller=3"], "3 train there; set devices_per_controller to a multiple of 2"),
        ([*TP, "model.lora={rank: 4}"], "model.lora: megatron trains whole weights"),
        ([*PP, "algorithm={type: ppo}"], "train.pipeline_parallel: log-probs and values are computed in one pass"),
        ([*TP, "model.dtype=float16"], "model.dtype: megatron scales no losses for float16"),
        (
            [*TP, "rollout={engine: vllm_server}", "placement={type: colocate, sleep: true}"],
            r"placement.sleep: vllm_server would wake without weights: weights in parts \(megatron\) can only",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["sums"], overrides)


def test_pictures_are_refused():
    with pytest.raises(UserError, match="megatron trains language models, and this recipe makes pictures"):
        load_recipe(["shapes-full"], TP)


@pytest.mark.slow
def test_plan_names_the_sizes_that_fit_and_halves_what_trains():
    (problem,) = [p for p in planned_in_short("sums", *SMALL, *WIDE).problems if "tensor_parallel" in p]
    assert problem.startswith(
        "train.tensor_parallel: 4 does not divide the model's 2 key-value heads; set it to 1 or 2"
    )
    assert planned_in_short("sums", *SMALL, *PP, "train.pipeline_chunks=3").problems == [
        "train.pipeline_chunks: 2 stages of 3 chunks do not divide the model's 4 layers; set it to 1 or 2",
        LEFT_OUT,
    ]
    whole, half = (planned("sums", *SMALL, *words) for words in ([], TP))
    assert not half.problems
    sizes = [next(role.bytes for role in made.roles if role.name == "gradients") for made in (whole, half)]
    assert sizes[1] == sizes[0] // 2


def test_what_megatron_would_compute_otherwise_is_refused(tmp_path):
    path = tiny(tmp_path / "model", "Llama")
    frozen = made(path, None, "model.freeze=[embed_tokens]").pipeline.policy
    (problem,) = refusals(frozen, load_recipe(["sums"], TP).recipe.train)
    assert problem.startswith("model.freeze: megatron trains all weights, and model.embed_tokens.weight is frozen")
    config = json.loads((path / "config.json").read_text())
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": scaled}))
    assert list(refusals(made(path).pipeline.policy, load_recipe(["sums"], TP).recipe.train)) == [
        "train.backend: megatron trains no LlamaForCausalLM with RoPE of type linear yet; set train.backend to fsdp"
    ]


@pytest.mark.slow
def test_a_model_that_nobody_knows_is_refused_and_trains_in_shards(tmp_path, says):
    pytest.importorskip("megatron.core")
    path = tiny(tmp_path / "model", "Llama")
    for said in together(tmp_path, 2, "unknown", path, *TP):
        says(said)
        assert "a setting that is not known here; set train.backend to fsdp" in said
    assert together(tmp_path, 2, "unknown", path, "train.backend=fsdp", "devices_per_controller=2") == ["", ""]
