"""Drafts of pictures: what is kept is drawn again from the same noise; the bias of keeping some, enumerated."""

import importlib
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.trajectory import SampleId, Slot
from mmrl.planner.plan import plan
from mmrl.rewards.scoring import RewardError
from mmrl.rollout.midway import chosen
from mmrl.rollout.rounds import sample_and_score
from mmrl.training.loop import train_step
from tests.support.midway import BEGUN, SIZE, SMALL, STEPS, run_of

ROOT = Path(__file__).parents[2]
DRAFTS = f"midway={{draft_steps: 2, group_size: {BEGUN}, keep: extremes}}"


@pytest.fixture(scope="module")
def bias():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("selection_bias")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_what_is_kept_is_drawn_again_to_the_bit():
    run = run_of(DRAFTS, recipe="shapes-nft")
    slots = [Slot(0, n, 0, run.prompts[n]) for n in range(2)]
    with run.compute.devices.sampling_phase(run, "old"):
        made = sample_and_score(run, slots, 0, Clock(torch.device("cpu")))
    assert len(made.micro_batches) == 2
    for rows_, slot in zip(made.micro_batches, slots, strict=True):
        every = [SampleId(0, slot.index, 0, k) for k in range(BEGUN)]
        with run.policy.using("old"):
            drafts = run.pipeline.draft([slot] * BEGUN, every, run.recipe.seed, 2)
            again = run.pipeline.sample(rows_.slots, rows_.ids, [], run.recipe.seed)
            schedule = run.pipeline.adapter.schedule(2)
            x, features = run.pipeline.initial(every, 0, schedule), run.pipeline.batch_features([slot] * BEGUN)
            for i in range(2):  # by hand: two steps of Euler
                v = run.pipeline.velocity(x, schedule.timesteps[i].expand(BEGUN), features)
                x = x + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * v
        torch.testing.assert_close(drafts.clean, schedule.end * x, rtol=1e-5, atol=1e-5)
        assert drafts.states is None
        values = run.rewards.score(run.pipeline.samples(drafts, run.rewards.inputs), [range(BEGUN)]).total
        assert [i.sample for i in rows_.ids] == chosen(values, SIZE, "extremes")
        assert torch.equal(again.clean, rows_.clean)
        assert not torch.allclose(drafts.clean[rows_.ids[0].sample], rows_.clean[0], atol=1e-2)


def test_a_step_trains_on_what_was_drawn_again_and_the_plan_counts_both():
    run = run_of(DRAFTS, recipe="shapes-nft")
    row, failures = train_step(run, 0, Clock(torch.device("cpu")))
    assert failures == []
    assert row["midway/dropped"] == 2 * (BEGUN - SIZE)
    assert -1 <= row["midway/rank_correlation"] <= 1
    assert row["optim/grad_norm"] > 0
    found = plan(load_recipe(["shapes-nft"], [*SMALL, DRAFTS]))
    assert not found.problems
    assert found.counts.sample_steps == 2 * (BEGUN * 2 + SIZE * STEPS)


def test_a_reward_that_fails_on_drafts_says_so(tmp_path):
    (tmp_path / "own.py").write_text("def score(samples, *, context):\n    return [None for s in samples]\n")
    run = run_of(DRAFTS, f"rewards=[{{name: {tmp_path / 'own.py'}, on_failure: fail}}]", recipe="shapes-nft")
    slots = [Slot(0, 0, 0, run.prompts[0])]
    with (
        run.compute.devices.sampling_phase(run, "old"),
        pytest.raises(RewardError, match="drafts of 2 denoising steps"),
    ):
        sample_and_score(run, slots, 0, Clock(torch.device("cpu")))


@pytest.mark.parametrize(
    ("recipe", "changes", "edit"),
    [
        ("shapes-lora", [], "cannot be drawn again; set algorithm.type to diffusion_nft"),
        ("shapes-nft", ["sampling.same_initial_noise=true"], "set same_initial_noise to false"),
        ("shapes-nft", ["midway.draft_steps=5"], "set it to 4 or less"),
        ("shapes-nft", ["midway.step=2"], "set midway.step or midway.draft_steps, one of the two"),
        ("shapes-nft", ["midway.branches=2"], "has no branches; set it to 1"),
        ("sums", [], "take midway.step and midway.draft_steps out"),
    ],
)
def test_drafts_that_cannot_be_drawn_again_are_refused_with_the_edit(recipe, changes, edit):
    small = [] if recipe == "sums" else SMALL
    with pytest.raises(RecipeError) as refusal:
        load_recipe([recipe], [*small, DRAFTS, *changes])
    assert edit in str(refusal.value)


def test_the_enumeration_is_that_of_all_groups_in_all_orders(bias):
    predicted = (0.0, 0.5, 0.2)
    p, rewards = (0.5, 0.3, 0.2), (0.0, 0.4, 1.0)
    by_hand = torch.zeros(3, dtype=torch.float64)
    for group in product(range(3), repeat=4):
        kept = [group[i] for i in chosen(torch.tensor([predicted[x] for x in group]).double(), 2, "extremes")]
        mean = sum(rewards[x] for x in kept) / 2
        weight = torch.tensor([p[x] for x in group]).double().prod()
        for x in kept:
            by_hand += weight * (rewards[x] - mean) * (torch.eye(3)[x] - torch.tensor(p)).double() / 2
    torch.testing.assert_close(bias.expected(p, rewards, predicted, 4, 2, "extremes"), by_hand, rtol=1e-6, atol=1e-8)


def test_without_selection_there_is_no_bias_and_the_page_has_what_the_command_prints(bias):
    p, rewards = bias.PROBABILITIES, bias.REWARDS
    true = bias.true_gradient(torch.tensor(p).double(), torch.tensor(rewards).double())
    everything = bias.expected(p, rewards, rewards, 4, 4, "spread")
    assert bias.compared(everything, true, 4) == pytest.approx((1.0, 1.0))
    found = {(name, how): (along, cosine) for name, how, along, cosine in bias.rows()}
    assert found["exact", "extremes"] == pytest.approx(found["reversed", "extremes"])  # the final rewards train
    page = (ROOT / "docs" / "reference" / "drafts.md").read_text()
    for (name, how), (along, cosine) in found.items():
        assert f"| {name} | `{how}` | {along:.2f} | {cosine:.3f} |" in page
