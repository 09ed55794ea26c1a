"""Several rewards, one advantage: none drowns another, whatever its scale, and controllers agree."""

import threading

import pytest
import torch

from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.multi_reward import aggregated
from mmrl.algorithms.objective import Scored
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.planner.counts import count
from mmrl.step.batch import rows_with_weight
from mmrl.step.micro_batches import chosen
from tests.support.training_loop import FORWARD, SMALL, make, step, update_gradient

GROUPS = torch.tensor([0] * 4 + [1] * 4)
LOUD = torch.tensor([100.0, -100.0, 100.0, -100.0, 50.0, 80.0, -50.0, -80.0], dtype=torch.float64)
QUIET = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.4, 0.1, 0.3, 0.2], dtype=torch.float64)


def of(scored):
    return group_advantages(scored.rewards, scored.groups, "group", scored.all_sum)


def advantages(how, loud=LOUD, quiet=QUIET, weights=(1.0, 1.0), groups=GROUPS, **more):
    parts = [(weights[0], loud), (weights[1], quiet)]
    total = weights[0] * loud + weights[1] * quiet
    parts = [(w, torch.where(total.isnan(), torch.nan, v)) for w, v in parts]
    return aggregated(of, Scored(total, groups, parts=parts, **more), how)


def test_in_a_sum_the_reward_that_varies_most_drowns_the_other_and_each_alone_it_does_not():
    alone = of(Scored(LOUD, GROUPS)).values
    assert torch.allclose(advantages("sum").values, alone, atol=0.01)  # as if the other were not there
    expected = alone + of(Scored(QUIET, GROUPS)).values
    torch.testing.assert_close(advantages("each").values, expected)
    assert (advantages("each").values - alone).abs().max() > 1
    torch.testing.assert_close(advantages("each", loud=LOUD * 1e3).values, expected, rtol=1e-3, atol=1e-3)
    weighted = advantages("each", weights=(0.25, 2.0)).values
    torch.testing.assert_close(weighted, 0.25 * alone + 2 * of(Scored(QUIET, GROUPS)).values)


def test_gdpo_is_the_same_standardised_over_the_batch():
    each, gdpo = advantages("each").values.double(), advantages("gdpo").values.double()
    torch.testing.assert_close(gdpo, (each - each.mean()) / (each.std(correction=0) + 1e-4), rtol=1e-5, atol=1e-6)
    assert gdpo.std(correction=0).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("how", ["each", "gdpo"])
def test_a_group_is_flat_where_every_reward_is(how):
    same = torch.ones(4, dtype=torch.float64)
    a = advantages(how, torch.cat([same, LOUD[4:]]), torch.cat([same, QUIET[4:]]))
    assert (a.groups, a.zero_std_groups) == (2, 1)
    assert a.values[:4].tolist() == [0, 0, 0, 0]
    a = advantages(how, torch.cat([same, LOUD[4:]]))
    assert a.zero_std_groups == 0
    assert a.values[0] < 0 < a.values[3]
    # rewards whose sum is flat still say something each
    a = advantages(how, loud=-QUIET, weights=(1.0, 1.0))
    assert a.zero_std_groups == 0


@pytest.mark.parametrize("how", ["each", "gdpo"])
def test_a_sample_that_one_reward_could_not_score_counts_in_none(how):
    loud = LOUD.clone()
    loud[1] = torch.nan
    a = advantages(how, loud)
    assert a.valid.tolist() == [True, False] + [True] * 6
    kept = [0, 2, 3, 4, 5, 6, 7]
    torch.testing.assert_close(a.values[kept], advantages(how, LOUD[kept], QUIET[kept], groups=GROUPS[kept]).values)


def test_two_controllers_have_the_advantages_of_one():
    barrier, given = threading.Barrier(2), {}

    def work(rank, out):
        def all_sum(values):
            given[rank] = values
            barrier.wait()
            total = given[0] + given[1]
            barrier.wait()
            return total

        mine = slice(4 * rank, 4 * rank + 4)
        group = torch.zeros(4, dtype=torch.long)
        out[rank] = advantages("gdpo", LOUD[mine], 3 * QUIET[mine], groups=group, all_sum=all_sum).values

    out = {}
    threads = [threading.Thread(target=work, args=(rank, out)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    torch.testing.assert_close(torch.cat([out[0], out[1]]), advantages("gdpo", LOUD, 3 * QUIET).values)


REWARDS = 'rewards=[{name: "jpeg:compressibility", weight: 2}, {name: "colour:brightness"}]'


def test_a_run_takes_an_advantage_of_each_reward():
    gradients = {}
    for how in ("sum", "each", "gdpo"):
        run = make(REWARDS, f"algorithm.advantage_aggregation={how}")
        gradients[how], row = update_gradient(run)
        assert row["policy/first_ratio_max_dev"] <= 1e-5
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(gradients["sum"], gradients["each"], dim=0) < 0.999
    assert cosine(gradients["each"], gradients["gdpo"], dim=0) > 0.999, "the same but for their size"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage_aggregation=each"], "set it to sum, or add to rewards"),
        (
            [
                "algorithm.advantage_aggregation=gdpo",
                "rewards=[{name: shapes, normalize: group}, {name: colour:brightness}]",
            ],
            r"rewards\[0\].normalize: .* set it to none",
        ),
        (["algorithm={type: dgpo, noise_levels: 2}", "train.micro_batch_size=6", *FORWARD], "a multiple of 4"),
        (["algorithm={type: diffusion_dpo}", "train.micro_batch_size=3", *FORWARD], "a multiple of 2"),
        (["algorithm={type: diffusion_dpo}", "train.updates_per_step=2", *FORWARD], "updates_per_step: diffusion_dpo"),
        (["algorithm={type: awm}", *FORWARD], "set it to 3 or less"),
        (["algorithm={type: awm, noise_levels: 2}", "sampling.window=null", "sampling.same_initial_noise=true"], "awm"),
        (["algorithm={type: rwr}"], "sampling.window: rwr records no denoising actions"),
        (["algorithm={type: grpo_guard}", "sampling.sde={kind: cps}"], "set it to flow, dance or linear"),
        (["algorithm.trained_steps=3"], "set it to 2 or less"),
        (["algorithm={type: draft, last_steps: 2, renoise: 2}", "sampling.window=null"], "algorithm.renoise"),
        (["algorithm={type: alignprop, last_steps: 5}", "sampling.window=null"], "set it to 4 or less"),
        (["algorithm={type: srpo, lowest: 0.9, highest: 0.8}", "sampling.window=null"], "algorithm.lowest: 0.9 is not"),
        (["algorithm={type: srpo, wanted: []}", "sampling.window=null"], "give both"),
        (["algorithm={type: refl}", "sampling.window=null", "train.updates_per_step=2"], "refl samples inside"),
        (["algorithm={type: dpo}"], "use picture_dpo"),
        (
            ["algorithm={type: flow_dppo}", "devices_per_controller=2", "placement=disaggregated"],
            "flow_dppo needs samples of the current policy",
        ),
        (["algorithm={type: reflx}"], "did you mean 'refl'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_edit(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["shapes-lora"], [*SMALL, *overrides])


@pytest.mark.parametrize(
    "name",
    [
        "grpo_guard",
        "flow_dppo",
        "awm",
        "dgpo",
        "diffusion_dpo",
        "rwr",
        "refl",
        "alignprop",
        "srpo",
        "v_grpo",
        "crd",
        "stepwise_flow_grpo",
    ],
)
def test_a_text_recipe_refuses_what_trains_denoising(name):
    with pytest.raises(UserError, match=f"{name} trains denoising steps, and this recipe samples text .* use grpo"):
        load_recipe(["sums"], [f"algorithm={{type: {name}}}"])


def test_rows_without_weight_are_left_out_of_slices_on_the_forward_process():
    run = make("algorithm={type: diffusion_dpo, noise_levels: 1}", *FORWARD, 'rewards=[{name: "jpeg:compressibility"}]')
    seen = []
    renoise = run.pipeline.renoise
    run.pipeline.renoise = lambda rows, *a: (seen.append(len(rows)), renoise(rows, *a))[1]
    row, _ = step(run)
    assert seen == [4], "two pairs of two groups in one slice, of eight samples"
    assert count(run.recipe, 1).slices == 1
    assert row["policy/pair_margin"] == 0
    assert row["policy/loss"] == pytest.approx(0.6931472, abs=1e-6)

    class Nothing:
        weights = torch.zeros(3)

    assert rows_with_weight(Nothing, [0, 2]) == [0, 2], "a slice must be there for ranks that wait"


def test_a_choice_of_steps_is_drawn_anew_in_every_step_and_alike_for_all_rows():
    run = make("sampling.steps=6", "sampling.window=null", "algorithm.trained_steps=2")

    class Rows:
        def __init__(self, n):
            self.ids = [type("Id", (), {"step": n})]

    drawn = [tuple(chosen(run, Rows(n))) for n in range(60)]
    assert {n for pair in drawn for n in pair} == set(range(5))
    assert all(a < b for a, b in drawn)
    assert len(set(drawn)) == 10
    assert drawn[7] == tuple(chosen(run, Rows(7)))
    seen = []
    replay = run.pipeline.replay
    run.pipeline.replay = lambda rows, entries, *a: (seen.extend(entries), replay(rows, entries, *a))[1]
    step(run, 7)
    assert seen == [*drawn[7]] * 2
