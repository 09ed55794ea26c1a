"""Ranks that share rows come to what one process does with whole ones, over real gloo process groups."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.context_parallel import Group, attend, columns, refusals
from mmrl.planner.max_length import max_length
from mmrl.planner.plan import plan
from tests.support import megatron as megatron
from tests.support.megatron import SHIPPED, made, rows_of, tiny, updates
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision

TWO = ["train.context_parallel=2", "devices_per_controller=2"]
SHARDS = [*TWO, "train.backend=fsdp"]
FOUR = [
    "train.context_parallel=4",
    "devices_per_controller=4",
    "train.backend=fsdp",
    "model.gradient_checkpointing=true",
]
GROUPS = [*SHARDS, "controllers=2"]


def attention(out, rank, size, port):
    """One rank of attention alone: its part of the outcome, and the gradients of its part."""
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    ranks = Group(size)
    own = columns(given()[0].shape[2], ranks, torch.device("cpu"))
    mine = [t[:, :, own].requires_grad_() for t in given()[:3]]
    found = attend(mine[0], mine[1], mine[2], 0.3, ranks)
    found.backward(given()[3][:, :, own])
    torch.save({"own": own, "found": found.detach(), "gradients": [t.grad for t in mine]}, out)
    dist.destroy_process_group()


def given():
    """Queries, keys, values and a gradient: 4 heads on 2 groups, more tokens than are computed at once."""
    made = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 1200, 8, generator=made) for heads in (4, 2, 2, 4)]


@pytest.mark.parametrize("size", [2, 3])
def test_attention_of_parts_is_that_of_the_whole(size, tmp_path):
    q, k, v = (t.double().requires_grad_() for t in given()[:3])
    whole = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(whole, (q, k, v), given()[3].double())
    outs = [tmp_path / f"{rank}.pt" for rank in range(size)]
    found = launched(__file__, outs, lambda rank, port, out: ["attention", out, rank, size, port])
    assert sorted(torch.cat([rank["own"] for rank in found]).tolist()) == list(range(1200))
    for rank in found:
        torch.testing.assert_close(rank["found"].double(), whole[:, :, rank["own"]], rtol=1e-5, atol=1e-6)
        for one, all_ in zip(rank["gradients"], wanted, strict=True):
            torch.testing.assert_close(one.double(), all_[:, :, rank["own"]], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (None, SHARDS),
        pytest.param(None, [*TWO, "model.lora={rank: 4}"], marks=pytest.mark.long),  # whole weights on each
        pytest.param("Llama", FOUR, marks=pytest.mark.slow),
        pytest.param("Qwen2", GROUPS, marks=pytest.mark.long),  # two groups of two
    ],
)
def test_ranks_that_share_rows_have_the_gradients_and_log_probs_of_one(family, layout, tmp_path):
    path = SHIPPED if family is None else tiny(tmp_path / "model", family)
    alone = [word for word in layout if "lora" in word]
    run = made(path, None, *alone)
    rows = rows_of(run, 0, 1)
    assert len(set(run.pipeline.lengths(rows))) > 1
    whole = updates(run, rows)
    width, shares = (4 if layout is FOUR else 2), (2 if layout is GROUPS else 1)
    found = megatron.together(tmp_path, width * shares, "serve", path, *layout)
    for rank in found:
        for kind, tolerance in (("start/", 0), ("gradient/", 1e-5), ("weights/", 1e-5)):
            one, all_ = (torch.cat([v.flatten() for k, v in of.items() if k.startswith(kind)]) for of in (rank, whole))
            assert one.shape == all_.shape
            assert (one - all_).norm() <= tolerance * all_.norm(), kind
    for name, value in whole.items():
        for n, rank in enumerate(found if "/" not in name else ()):
            of = value[n // width :: shares, : rank[name].shape[1]]  # without the columns that its rows do not fill
            atol = 1e-4 if name == "after" else 1e-5
            torch.testing.assert_close(rank[name], of, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.long  # in short: the gradients of ranks that share rows, above
@pytest.mark.slow
def test_a_run_that_shares_rows_learns_as_one_process_which_goes_on_from_it(tmp_path):
    from tests.support.runs import alike
    from tests.support.sharded_devices import same_beginning, sampled

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = sampled("sums", whole, "train.steps=3")
    same_beginning(one, sampled("sums", cut, "train.steps=2", *SHARDS))
    sampled("sums", cut, "train.steps=3", "--resume")
    alike(whole, cut)


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("sums", ["train.context_parallel=2"], "1 train there; set devices_per_controller to a multiple of 2"),
        ("sums", [*TWO, "devices_per_controller=3"], "3 train there; set devices_per_controller to a multiple of 2"),
        ("sums", [*TWO, "algorithm={type: ppo}"], "ppo trains a value or score head"),
    ],
)
def test_what_has_no_rows_to_cut_is_refused(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe([recipe], overrides)


def planned(size, tokens, memory=None):
    words = [f"sampling.max_new_tokens={tokens}", f"train.context_parallel={size}", f"devices_per_controller={size}"]
    where = [] if "devices_per_controller=1" in words else ["ray=auto"]
    words += ["train.backend=fsdp", "device=cuda", "model.gradient_checkpointing=false", *where]
    return plan(load_recipe(["sums"], words), memory)


@pytest.mark.slow
def test_plan_counts_what_one_of_several_ranks_keeps_and_says_how_long_rows_may_be():
    whole, half, quarter = (planned(size, 120).measured.train for size in (1, 2, 4))
    assert half == pytest.approx(whole / 2, rel=0.1)
    assert quarter == pytest.approx(whole / 4, rel=0.1)
    memory = int(1.2 * planned(2, 120).peak.total)
    tokens, phase = max_length(made := planned(2, 120, memory))
    assert phase == made.peak.name
    prompt = made.counts.row_tokens - 120
    assert not planned(2, int(0.97 * tokens) - prompt, memory).problems
    assert f"the phase {phase} needs" in planned(2, int(1.03 * tokens) - prompt, memory).problems[0]


def test_a_model_that_sees_is_planned_with_rows_in_parts():
    pytest.importorskip("torchvision")
    assert not plan(load_recipe(["scenes"], SHARDS)).problems


def test_a_model_whose_rows_cannot_be_cut_is_refused(tmp_path):
    policy = made(tiny(tmp_path / "model", "Qwen2")).pipeline.policy
    assert not list(refusals(policy, 2))
    policy.config.vision_config = {}  # as of a family that nobody has tried
    assert "that sees; remove train.context_parallel" in next(refusals(policy, 2))
    del policy.config.vision_config
    policy.config.layer_types = ["full_attention", "sliding_attention"]
    assert "with layers of sliding_attention" in next(refusals(policy, 2))


@pytest.mark.slow
def test_a_model_that_nobody_knows_is_refused_and_trains_with_whole_rows(tmp_path, says):
    path = tiny(tmp_path / "model", "Llama")
    for said in megatron.together(tmp_path, 2, "unknown", path, *SHARDS):
        says(said)
        assert "a setting that is not known here; remove train.context_parallel" in said
    whole = [word for word in SHARDS if not word.startswith("train.context_parallel")]
    assert megatron.together(tmp_path, 2, "unknown", path, *whole) == ["", ""]


if __name__ == "__main__":
    what, out, rank, size, port = sys.argv[1:]
    attention(Path(out), int(rank), int(size), int(port))
