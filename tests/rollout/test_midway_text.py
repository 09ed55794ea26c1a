"""Rewards in the middle of responses: groups that are pruned after some tokens."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.trajectory import Slot
from mmrl.logging.metrics import describe
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.rollout.midway import chosen
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import train_step
from tests.support.midway_text import AT, BEGUN, LONGEST, SIZE, asked, make, responses, rounds, write
from tests.support.partial_rollouts import Sampler


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("midway"))


@pytest.fixture(scope="module")
def run(folder):
    return make(folder)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["sampling.temperature=1.3", "sampling.repetition_penalty=1.2", "sampling.top_p=0.9"],
        ["sampling.min_new_tokens=7"],
        ["sampling.stop=[e, th]"],
    ],
    ids=str,
)
def test_two_parts_are_one_whole(folder, changes):
    made = make(folder, *changes)
    slots, ids = asked(made)
    whole = made.pipeline.sample(slots, ids, [], 5)
    begun = made.pipeline.begin(slots, ids, [], 5, AT)
    finished = made.pipeline.finish(begun, [], 5, AT)
    assert 0 < begun.under_way.sum() < len(ids) or "min_new_tokens" in str(changes)
    assert responses(begun) == [row[:AT] for row in responses(whole)]
    assert begun.under_way.tolist() == [len(row) > AT for row in responses(whole)]
    assert responses(finished) == responses(whole)
    assert finished.truncated.tolist() == whole.truncated.tolist()
    torch.testing.assert_close(finished.padded("log_probs"), whole.padded("log_probs"), rtol=1e-4, atol=1e-5)
    assert finished.under_way is None
    some = made.pipeline.finish(begun.rows([7, 1, 12]), [], 5, AT)
    assert responses(some) == [responses(whole)[n] for n in (7, 1, 12)]
    assert some.ids == [ids[7], ids[1], ids[12]]


def test_a_round_finishes_the_responses_whose_beginnings_spread_most(run):
    made = rounds(run)
    for group, slot in enumerate(made.slots):
        slots, ids = asked(run, slots=[slot])
        begun = run.pipeline.begin(slots, ids, [], run.recipe.seed, AT)
        values = run.rewards.score(run.pipeline.samples(begun, run.rewards.inputs), [range(BEGUN)]).total
        kept = chosen(values, SIZE, "spread")
        places = made.places(0)[group * SIZE : (group + 1) * SIZE]
        assert [made.micro_batches[m].ids[i].sample for m, i in places] == kept
        whole = run.pipeline.sample(slots, ids, [], run.recipe.seed)
        assert [responses(made.micro_batches[m])[i] for m, i in places] == [responses(whole)[k] for k in kept]
        final = run.rewards.score(run.pipeline.samples(whole, run.rewards.inputs), [range(BEGUN)]).total[kept]
        torch.testing.assert_close(made.scores.total[group * SIZE : (group + 1) * SIZE], final)


def test_a_round_depends_neither_on_who_samples_nor_on_micro_batches(run):
    def of(made):
        return {
            made.micro_batches[m].ids[i]: (responses(made.micro_batches[m])[i], total.item())
            for (m, i), total in zip(made.places(0), made.scores.total, strict=True)
        }

    slots = [Slot(0, n, 0, run.prompts[n]) for n in range(3)]
    whole = of(rounds(run, slots))
    sampling = run.recipe.sampling.model_copy(update={"batch_size": 5})
    other = replace(run, recipe=run.recipe.model_copy(update={"sampling": sampling}))
    assert of(rounds(run, slots[:1])) | of(rounds(run, slots[1:])) == whole == of(rounds(other, slots))


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["midway.keep=best"],
        ["train.updates_per_step=3"],
        ["algorithm={type: dapo, dynamic_sampling: true, max_attempts: 2}"],
        ["algorithm.type=gspo"],
    ],
    ids=str,
)
def test_a_step_trains_on_the_kept_responses(folder, changes):
    made = make(folder, *changes)
    row, failures = train_step(made, 0, Clock(torch.device("cpu")))
    assert failures == []
    assert all(describe(key) for key in row), [key for key in row if not describe(key)]
    assert row["midway/dropped"] >= 2 * (BEGUN - SIZE)
    assert row["midway/begun_std"] > 0
    assert 0 < row["midway/tokens_dropped"] < 1
    assert 0 < row["midway/ended"] < 1
    assert row["optim/grad_norm"] > 0
    assert row["policy/first_ratio_max_dev"] <= 1e-5
    assert not made.recomputes_old_log_probs or "dynamic" in str(changes)


def test_the_dropped_tokens_are_counted(run):
    made, metrics = rounds(run), StepMetrics()
    metrics.merge([made.measured])
    row = metrics.means(lambda mine: [mine])
    slots, ids = asked(run, slots=made.slots)
    begun = run.pipeline.begin(slots, ids, [], run.recipe.seed, AT)
    kept = {i for t in made.micro_batches for i in t.ids}
    lengths = dict(zip(ids, begun.responses, strict=True))
    dropped = sum(n for i, n in lengths.items() if i not in kept)
    finished = sum(n for t in made.micro_batches for n in t.responses)
    assert row["midway/tokens_dropped"] == pytest.approx(dropped / (dropped + finished))
    assert row["midway/ended"] == pytest.approx(1 - begun.under_way.float().mean().item())


def test_rewards_of_pieces_count_midway(folder, run):
    """A reward that scores pieces keeps the responses that a reward of the same sums keeps."""
    both = "rewards=[{name: reward.py, label: vowels}, {name: 'reward.py:pieces', label: pieces, weight: 0}]"
    made = make(folder, both, "midway.rewards=[pieces]", "algorithm.type=capo")
    slots = [Slot(0, n, 0, made.prompts[n]) for n in range(2)]
    found = [[i.sample for t in rounds(of, slots).micro_batches for i in t.ids] for of in (made, run)]
    assert found[0] == found[1] != [*range(SIZE)] * 2


def test_an_engine_finishes_the_same_beginnings(folder, monkeypatch):
    monkeypatch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: Sampler)
    made = make(folder, "rollout.engine=vllm")
    whole = rounds(made)
    assert [call[0] for call in made.pipeline.engine.calls] == [AT, LONGEST - AT]
    slots, ids = asked(made, slots=whole.slots)
    begun = made.pipeline.begin(slots, ids, [], made.recipe.seed, AT)
    starts = dict(zip(ids, responses(begun), strict=True))
    for part in whole.micro_batches:
        for name, tokens in zip(part.ids, responses(part), strict=True):
            assert tokens[:AT] == starts[name]
        new = made.pipeline.replay(part, [0], frozenset({"log_probs"}), None)["log_probs"]
        torch.testing.assert_close(new * part.padded("action_mask"), part.padded("log_probs"), rtol=1e-4, atol=1e-4)
    row, _ = train_step(made, 0, Clock(torch.device("cpu")))
    assert row["midway/dropped"] == 2 * (BEGUN - SIZE)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([f"midway.tokens={LONGEST}"], f"midway.tokens: no response has more than {LONGEST} .* set it to 13 or less"),
        (["midway={step: 2, group_size: 6}"], "scored after a number of tokens, .* set midway.tokens"),
        (["midway.group_size=3"], "cannot be pruned to train.group_size, 3; set it to 4 or more"),
        (["midway.rewards=[red]"], "the recipe has no reward 'red'; it has vowels"),
        (["rollout={engine: vllm, partial: {cut_after: 4, extra: 1}}"], "midway: rollout.partial leaves responses"),
        (["algorithm={type: sft}"], "midway: sft samples no groups before its update, .*; remove it, or use grpo"),
        (
            ["rollout.engine=sglang", "sampling.repetition_penalty=1.1"],
            "sglang counts no tokens that a response had before it was cut; remove it or midway",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_edit(folder, changes, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe([folder / "recipe.yaml"], changes)


def test_the_plan_counts_tokens(folder):
    found = plan(load_recipe([folder / "recipe.yaml"], []))
    assert (found.counts.begun, found.counts.samples) == (2 * BEGUN, 2 * SIZE)
    assert found.counts.sample_steps == 2 * (BEGUN * AT + SIZE * (LONGEST - AT))
    assert found.counts.sampling_forwards == 3 * AT + 2 * (LONGEST - AT)
    said = io.StringIO()
    render(found, Console(file=said, width=400))
    assert f"midway begins 12 samples, scores them after 4 of up to {LONGEST} tokens and finishes 6" in said.getvalue()
