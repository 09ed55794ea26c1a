"""Rewards during sampling: groups that are pruned after some denoising steps."""

import io
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from rich.console import Console

from mmrl.app.build import build
from mmrl.cli.simulate import micro_batches
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.trajectory import AskedSize, SampleId, Slot
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.rewards.scoring import RewardError
from mmrl.rollout.collect import collect_batch
from mmrl.rollout.midway import chosen
from mmrl.rollout.rounds import sample_and_score
from mmrl.step.batch import rows_of_update
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import train_step
from tests.support.midway import AFTER, AT, BEFORE, BEGUN, SIZE, SMALL, STEPS, run_of


@pytest.fixture(scope="module")
def run():
    """A run with guidance, whose LoRA is not the identity."""
    made = run_of(AFTER, "sampling.guidance_scale=2")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in made.policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def rounds(run, step=0, slots=None):
    slots = slots or [Slot(step, n, 0, run.prompts[n]) for n in range(2)]
    with run.compute.devices.sampling_phase(run, "current"):
        return sample_and_score(run, slots, step, Clock(torch.device("cpu")))


def pixels(samples):
    return [sample.image.tobytes() for sample in samples]


@pytest.mark.parametrize("seed", range(20))
def test_the_kept_samples_have_the_largest_variance_of_all_choices(seed):
    values = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if seed % 2:
        values = values.round(decimals=0)
    for keep in (2, 3, 5):
        best = max(values[list(some)].var(correction=0) for some in combinations(range(8), keep))
        found = chosen(values, keep, "spread")
        assert found == sorted(set(found))
        assert len(found) == keep
        assert values[found].var(correction=0) == pytest.approx(best.item(), abs=1e-12)


def test_the_extremes_are_the_worst_and_the_best():
    values = torch.tensor([0.1, 0.9, 0.4, 0.5, 0.0, 0.6], dtype=torch.float64)
    assert chosen(values, 4, "extremes") == [0, 1, 4, 5]
    assert chosen(values, 3, "extremes") == [1, 4, 5]
    assert chosen(values, 3, "best") == [1, 3, 5]


def test_samples_without_a_value_come_last():
    nan = float("nan")
    assert chosen(torch.tensor([nan, 0.2, nan, 0.9, 0.4], dtype=torch.float64), 3, "spread") == [1, 3, 4]
    assert chosen(torch.tensor([nan, 0.2, nan, 0.9], dtype=torch.float64), 3, "extremes") == [0, 1, 3]
    assert chosen(torch.zeros(5, dtype=torch.float64), 2, "spread") == [0, 4]  # equal values: any, but the same ones


@pytest.mark.slow
@pytest.mark.parametrize("actions", [[], [3], [1, 2], [0, 1, 2, 3]], ids=str)
def test_two_parts_are_one_whole(run, actions):
    """Equal to the bit in the same batch, within rounding in another, and with as many calls of the model."""
    slots, calls = [Slot(0, n // 3, 0, run.prompts[n // 3]) for n in range(6)], []
    ids = [SampleId(0, n // 3, 0, n % 3) for n in range(6)]
    run.pipeline.encode(slots)
    whole = run.pipeline.sample(slots, ids, actions, 0)
    hook = run.pipeline.policy.register_forward_pre_hook(lambda *_: calls.append(1))
    begun = run.pipeline.begin(slots, ids, actions, 0, AT)
    finished = run.pipeline.finish(begun, actions, 0, AT)
    hook.remove()
    assert len(calls) == STEPS
    part = run.pipeline.finish(begun.rows([1, 4]), actions, 0, AT)
    for name in ("clean", "states", "log_probs", "actions"):
        value = getattr(whole, name)
        if value is None:
            assert getattr(finished, name) is None
            continue
        assert torch.equal(getattr(finished, name), value)
        expected = value if name == "actions" else value[[1, 4]]
        torch.testing.assert_close(getattr(part, name), expected, rtol=1e-4, atol=1e-4)
    assert part.ids == [ids[1], ids[4]]
    assert finished.paused is None


def test_the_prediction_is_where_the_velocity_leads(run):
    slots, ids = [Slot(0, 0, 0, run.prompts[0])] * 2, [SampleId(0, 0, 0, k) for k in range(2)]
    run.pipeline.encode(slots)
    begun = run.pipeline.begin(slots, ids, [], 0, AT)
    schedule = run.pipeline.adapter.schedule(STEPS)
    x = run.pipeline.initial(ids, 0, schedule)
    features = run.pipeline.batch_features(slots)
    with torch.no_grad():
        v = [run.pipeline.velocity(x, schedule.timesteps[0].expand(2), features)]
        for i in range(AT):
            x = x + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * v[-1]
            v.append(run.pipeline.velocity(x, schedule.timesteps[i + 1].expand(2), features))
    torch.testing.assert_close(begun.clean, x - schedule.sigmas[AT] * v[-1], rtol=1e-5, atol=1e-5)


def test_a_round_finishes_the_samples_whose_predictions_spread_most(run):
    made = rounds(run)
    assert made.measured is not None
    for group, slot in enumerate(made.slots):
        slots, ids = [slot] * BEGUN, [SampleId(0, slot.index, 0, k) for k in range(BEGUN)]
        run.pipeline.encode(slots)
        begun = run.pipeline.begin(slots, ids, [3], run.recipe.seed, AT)
        samples = run.pipeline.samples(begun, run.rewards.inputs)
        values = run.rewards.score(samples, [range(BEGUN)]).total
        kept = chosen(values, SIZE, "spread")
        rows = [(m, i) for m, i in made.places(0)[group * SIZE : (group + 1) * SIZE]]
        assert [made.micro_batches[m].ids[i].sample for m, i in rows] == kept
        whole = run.pipeline.sample(slots, ids, [3], run.recipe.seed)
        finished = run.rewards.score(run.pipeline.samples(whole, run.rewards.inputs), [range(BEGUN)]).total[kept]
        total = made.scores.total[group * SIZE : (group + 1) * SIZE]
        torch.testing.assert_close(total, finished, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_a_round_depends_neither_on_who_samples_nor_on_micro_batches(run):
    def of(made):
        return {
            name: (total.item(), x)
            for (m, i), total in zip(made.places(0), made.scores.total, strict=True)
            for name, x in [(made.micro_batches[m].ids[i], made.micro_batches[m].clean[i])]
        }

    slots = [Slot(0, n, 0, run.prompts[n]) for n in range(3)]
    whole = of(rounds(run, slots=slots))
    apart = of(rounds(run, slots=slots[:1])) | of(rounds(run, slots=slots[1:]))
    sampling = run.recipe.sampling.model_copy(update={"batch_size": 5})
    other = replace(run, recipe=run.recipe.model_copy(update={"sampling": sampling}))
    for found in (apart, of(rounds(other, slots=slots))):
        assert set(found) == set(whole)
        for name, (total, x) in whole.items():
            assert found[name][0] == pytest.approx(total, abs=1e-3)
            torch.testing.assert_close(found[name][1], x, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "recipe", "exact"),
    [
        ([AFTER], "shapes-lora", True),
        ([BEFORE], "shapes-lora", False),
        (["sampling.same_initial_noise=true", "sampling.window={size: 1, last: 1}"], "shapes-lora", False),
        (["train.updates_per_step=2", AFTER], "shapes-lora", True),
        (["algorithm.dynamic_sampling=true", "algorithm.max_attempts=2"], "shapes-nft", None),
        (["midway.keep=extremes"], "shapes-nft", None),
    ],
)
def test_a_step_trains_on_the_kept_samples(changes, recipe, exact):
    made = run_of(*changes, recipe=recipe)
    row, failures = train_step(made, 0, Clock(torch.device("cpu")))
    assert failures == []
    assert row["midway/dropped"] >= 2 * (BEGUN - SIZE)
    assert row["midway/kept_std"] >= row["midway/begun_std"] > 0
    assert -1 <= row["midway/rank_correlation"] <= 1
    assert row["optim/grad_norm"] > 0
    if exact is not None:
        assert made.recomputes_old_log_probs == (not exact)
        assert row["policy/first_ratio_max_dev"] <= (0 if exact else 1e-5)


def test_groups_of_two_sizes_are_pruned_each():
    made = run_of("sampling.buckets=[[32, 32], [32, 24]]", recipe="shapes-nft")
    slots = [Slot(0, n, 0, replace(made.prompts[n], size=AskedSize(32, width))) for n, width in enumerate((32, 24))]
    parts = rounds(made, slots=slots).micro_batches
    assert [(len(part), part.clean.shape[-1]) for part in parts] == [(SIZE, 8), (SIZE, 6)]
    assert [{i.slot for i in part.ids} for part in parts] == [{0}, {1}]


def test_clips_are_pruned_too():
    small = ["sampling.steps=4", "train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=2"]
    loaded = load_recipe(["moving-shapes"], [*small, "model.dtype=float32", "midway={step: 2, group_size: 3}"])
    row, _ = train_step(build(loaded.recipe), 0, Clock(torch.device("cpu")))
    assert row["midway/dropped"] == 1


def test_each_update_of_a_step_gets_its_share_of_a_pruned_group():
    made = run_of(AFTER, "train.updates_per_step=2")
    slots = made.controller.slots(0, made.prompts, 2, None)
    batch = collect_batch(made, slots, 0, Clock(torch.device("cpu")), StepMetrics())
    assert [i.sample for i in batch.ids] != [*range(SIZE)] * 2
    halves = [rows_of_update(batch, update, 2) for update in range(2)]
    assert halves == [[0, 2, 4, 6], [1, 3, 5, 7]]


FLAKY = """
import mmrl

seen = []

@mmrl.reward(inputs=("image",))
def score(samples, *, context):
    seen.append(len(samples))
    return [float("nan") if s.id.sample == 0 and FAILS else float(s.id.sample) for s in samples]
"""


@pytest.mark.parametrize("how", ["drop", "fail"])
def test_a_reward_that_fails_midway(how, tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY.replace("FAILS", "True"))
    made = run_of(AFTER, f"rewards=[{{name: {tmp_path / 'flaky.py'}:score, on_failure: {how}}}]")
    if how == "fail":
        with pytest.raises(RewardError, match=r"midway, of results predicted after 2 denoising steps: reward 'flaky'"):
            rounds(made)
        return
    whole = rounds(made)
    assert [i.sample for part in whole.micro_batches for i in part.ids] == [1, 2, 4, 5] * 2
    assert sorted((f.sample.slot, f.sample.sample) for f in whole.scores.failures) == [(0, 0), (1, 0)]


def test_a_reward_of_weight_0_may_decide_alone(tmp_path):
    (tmp_path / "own.py").write_text(FLAKY.replace("FAILS", "False"))
    cheap = f"rewards=[{{name: shapes}}, {{name: {tmp_path / 'own.py'}:score, label: cheap, weight: 0}}]"
    made = run_of(AFTER, cheap, "midway.rewards=[cheap]")
    assert [i.sample for part in rounds(made).micro_batches for i in part.ids] == [0, 1, 4, 5] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["midway.step=5"], "midway.step: the schedule has 5 denoising steps, .* set it to 4 or less"),
        (["midway.group_size=4"], "cannot be pruned to train.group_size, 4; set it to 5 or more"),
        (["midway.rewards=[red]"], "the recipe has no reward 'red'; it has shapes"),
        (["sampling.same_initial_noise=true", AFTER], "equal until the window, which may begin at step 3; set it to 4"),
        (
            ["rewards=[{name: shapes, normalize: batch}, {name: 'colour:saturation'}]"],
            "normalize: batch needs all samples of the step",
        ),
        (
            [
                "rewards=[{name: shapes}, {name: 'colour:saturation', weight: 0}, {name: 'colour:target', weight: 0}]",
                "midway.rewards=[saturation, target]",
            ],
            "all of them have weight 0",
        ),
        (["algorithm={type: draft}", "train.group_size=1"], "midway: draft samples no groups before its update"),
        (["midway.keep=widest"], "midway.keep"),
        (["midway={tokens: 3, group_size: 6}"], "scored after a number of denoising steps, .* set midway.step"),
    ],
)
def test_what_cannot_work_is_refused_with_the_edit(changes, said):
    changes = [*SMALL, *([] if any("window" in c for c in changes) else [AFTER]), *changes]
    if "algorithm={type: draft}" in changes:
        changes = [c for c in changes if not c.startswith(("algorithm.", "sampling.window"))] + ["sampling.window=null"]
    with pytest.raises(RecipeError, match=said):
        load_recipe(["shapes-lora"], changes)


def test_the_simulator_refuses_it():
    loaded = load_recipe(["shapes-lora"], [*SMALL, AFTER])
    with pytest.raises(UserError, match="mmrl simulate does not know steps that prune groups; add midway=null"):
        micro_batches(loaded.recipe, 1)


@pytest.mark.slow
def test_the_plan_counts_what_a_step_computes(run):
    loaded = load_recipe(["shapes-lora"], [*SMALL, AFTER])
    made, rows = run_of(AFTER), []
    hook = made.pipeline.policy.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["hidden_states"])), with_kwargs=True
    )
    rounds(made)
    hook.remove()
    counted = plan(loaded).counts
    assert (counted.begun, counted.samples) == (2 * BEGUN, 2 * SIZE)
    assert (counted.sampling_forwards, counted.sample_steps) == (len(rows), sum(rows))
    said = io.StringIO()
    render(plan(loaded), Console(file=said, width=400))
    assert "midway begins 12 samples, scores them after 2 of 5 denoising steps and finishes 8" in said.getvalue()
