"""Mixtures of data sets: shares, order, epochs, controllers, resumption, refusals and figures of each source."""

import json
from collections import Counter

import pytest
import torch

from mmrl.app.build import build, open_run
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.controller import Controller
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.data.loading import load_prompts
from mmrl.data.mixture import BLOCK, Interleaved, Mixture, Part, by_source, shares
from mmrl.logging.metrics import describe, read
from mmrl.report.html import write_report
from mmrl.runtime.start import train
from mmrl.training.evaluation import Evaluator, means_of_pairs
from mmrl.training.loop import train_step
from tests.support import tiny


def prompts(name, n):
    return [Prompt(f"{name}{i}", f"text {i}") for i in range(n)]


def mixture(kind=Mixture, **sizes):
    return kind([Part(label, weight, prompts(label, n)) for label, (weight, n) in sizes.items()])


@pytest.mark.parametrize(
    ("weights", "found"),
    [((1, 1), (5, 5)), ((2, 1), (7, 3)), ((1, 1, 1), (4, 3, 3)), ((1000, 1), (9, 1)), ((1, 1000, 1), (1, 8, 1))],
)
def test_shares_are_by_largest_remainders_and_nobody_has_none(weights, found):
    assert shares(weights, 10) == found


def test_every_thousand_places_have_exactly_the_shares_and_each_source_its_epochs():
    mixed = mixture(a=(3, 40), b=(1, 7))
    taken = [mixed[mixed.place(5, n)] for n in range(3 * BLOCK)]
    for block in range(3):
        assert Counter(p.id[0] for p in taken[block * BLOCK : (block + 1) * BLOCK]) == {"a": 750, "b": 250}
    for label, n in (("a", 40), ("b", 7)):
        own = [p.id for p in taken if p.id.startswith(f"{label}/")]
        epochs = [own[i : i + n] for i in range(0, len(own) - n + 1, n)]
        assert all(len({*epoch}) == n for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert taken[:50] != [mixed[mixed.place(6, n)] for n in range(50)]
    assert Counter(p.id[0] for p in taken[:100])["b"] in range(10, 45)  # not one source behind the other


def test_a_prompt_says_where_it_comes_from():
    mixed = mixture(a=(1, 2), b=(1, 3))
    assert [p.id for p in mixed] == ["a/a0", "a/a1", "b/b0", "b/b1", "b/b2"]
    assert mixed[-1].meta == {"data_source": "b"}
    assert mixed[1:3] == [mixed[1], mixed[2]]
    with pytest.raises(IndexError):
        mixed[5]
    own = Mixture([Part("a", 1, [Prompt("x", "t", {"data_source": "mine"})])])
    assert own[0].meta == {"data_source": "mine"}
    assert by_source([*mixed], ["a", "b"]) == {"a": [0, 1], "b": [2, 3, 4]}
    assert by_source([*mixed], []) == {}


def test_replacements_are_drawn_by_weight():
    mixed = mixture(a=(1, 3), b=(4, 50))
    found = Counter(mixed.draw(n) for n in range(0, 150 * BLOCK, 30))
    assert sum(n for place, n in found.items() if place < 3) == pytest.approx(5000 / 5, rel=0.1)
    assert len(found) == 53


def test_held_out_prompts_alternate_and_each_comes_once():
    mixed = mixture(Interleaved, a=(1, 3), b=(2, 100))
    first = [p.id[0] for p in mixed[:9]]
    assert Counter(first) == {"a": 3, "b": 6}
    assert len({p.id for p in mixed}) == 103


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_controllers_takes_the_same_prompts(size):
    mixed = mixture(a=(3, 40), b=(1, 7))
    alone = [s.prompt.id for step in range(4) for s in Controller(3).slots(step, mixed, 6)]
    slots = [s for step in range(4) for rank in range(size) for s in Controller(3, rank, size).slots(step, mixed, 6)]
    assert [s.prompt.id for s in sorted(slots, key=lambda s: (s.step, s.index))] == alone


REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float("7" in s.prompt.text) + (s.prompt.meta["data_source"] == "big") for s in samples]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(REWARD)
    for name, n in (("big", 40), ("small", 6), ("none", 0)):
        rows = [{"prompt": f"{name} {i}"} for i in range(n)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data:
  mixture:
    - {name: jsonl, label: big, weight: 2, train: {path: big.jsonl}, heldout: {path: big.jsonl}}
    - {name: jsonl, label: small, train: {path: small.jsonl, heldout: 2}, heldout: {path: small.jsonl, heldout: 2}}
sampling: {max_new_tokens: 4}
rewards: [{name: reward.py, label: seven}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 3, prompts_per_step: 6, group_size: 2, micro_batch_size: 12}
eval: {every: 3, samples: 6}
checkpoint: {every: 1}
"""
    )
    return folder


def loaded(folder, *overrides):
    return load_recipe([folder / "recipe.yaml"], [*overrides])


def test_figures_of_each_source_are_beside_those_of_all(folder):
    recipe = loaded(folder)
    run = build(recipe.recipe)
    slots = run.controller.slots(0, run.prompts, 6)
    row, _ = train_step(run, 0, Clock(torch.device("cpu")))
    for label in ("big", "small"):
        own = [s.prompt for s in slots if s.prompt.id.startswith(f"{label}/")]
        assert row[f"source/{label}/samples"] == 2 * len(own)
        told = sum(("7" in p.text) + (label == "big") for p in own) / len(own)
        assert row[f"source/{label}/reward/seven"] == row[f"source/{label}/reward/mean"] == pytest.approx(told)
    assert row["source/big/samples"] + row["source/small/samples"] == 12
    assert all(describe(name) for name in row if name.startswith("source/"))
    held, _, _ = Evaluator(run, load_prompts(recipe.recipe, "heldout")).score(6)
    assert (held["source/big/samples"], held["source/small/samples"]) == (4, 2)
    assert held["source/big/reward/seven"] >= 1 > held["source/small/reward/seven"]


def test_a_resumed_run_goes_on_with_the_next_prompts(folder, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(loaded(folder), whole)
    train(loaded(folder, "train.steps=2"), cut)
    train(loaded(folder), cut, resume=True)
    names = [name for name in read(whole / "metrics.jsonl")[2] if name.startswith(("source/", "reward/", "policy/"))]
    one, other = (read(path / "metrics.jsonl")[2] for path in (whole, cut))
    assert [one[name] for name in names] == [other[name] for name in names]
    assert "big: seven" in write_report(whole).read_text()
    monkeypatch.chdir(tmp_path)
    recipe, _ = open_run(whole)  # from any folder
    assert len(load_prompts(recipe, "train")) == 36 + 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.mixture[1].train.path=gone.jsonl", r"data\.mixture\[1\]\.train: small: path: .*cannot be read"),
        (
            "data.mixture[1]={name: jsonl, train: {path: none.jsonl}}",
            r"data\.mixture\[1\]\.train: jsonl: .*it is empty",
        ),
    ],
)
def test_a_source_that_is_missing_or_empty_is_refused_by_name(folder, change, says):
    recipe = loaded(folder, change)
    with pytest.raises(UserError, match=says):
        load_prompts(recipe.recipe, "train")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.mixture[0].label=small", "two sources are called 'small'"),
        ("data.mixture[0].label=a/b", "cannot be part of a metric's name"),
        ("data.mixture[0].weight=10000", "less than a prompt in 1000"),
        ("data.mixture[0].weight=0", "weight"),
        ("data.mixture[0].name=nothing", "there is no data set 'nothing'"),
        ("data={}", "name"),
        ("data={name: ''}", "it is empty"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_when_they_are_read(folder, change, says):
    with pytest.raises(RecipeError, match=says):
        loaded(folder, change)


def test_a_source_may_be_for_training_or_evaluation_alone(folder):
    recipe = loaded(folder, "data.mixture[1].heldout=null")
    assert {p.id.partition("/")[0] for p in load_prompts(recipe.recipe, "heldout")} == {"big"}
    both = ["data.mixture[0].heldout=null", "data.mixture[1].heldout=null"]
    with pytest.raises(RecipeError, match="every source has heldout: null"):
        loaded(folder, *both)


def test_means_of_pairs_are_over_a_source_s_own():
    sums = {"dpo/accuracy": 3.0, "source/a/dpo/accuracy": 2.0, "source/a/samples": 2.0, "source/b/samples": 0.0}
    found = means_of_pairs(sums | {"source/b/dpo/accuracy": 0.0}, 4)
    assert (found["dpo/accuracy"], found["source/a/dpo/accuracy"], found["source/a/samples"]) == (0.75, 1.0, 2.0)
    assert found["source/b/dpo/accuracy"] != found["source/b/dpo/accuracy"]
