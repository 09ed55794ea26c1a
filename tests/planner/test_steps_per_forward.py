"""Several recorded steps of a micro-batch in one forward: the same gradient, the same ratios, fewer calls."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.left_to_plan import with_values
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.counts import count
from mmrl.planner.plan import plan, resolved
from mmrl.planner.steps_per_forward import settle
from mmrl.training.loop import train_step
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

SMALL = [
    "model.offload=false",  # by itself it follows the device's memory, as steps_per_forward does
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "train.updates_per_step=2",
    "sampling.steps=6",
    "sampling.window=null",
    'rewards=[{name: "jpeg:compressibility"}]',
]
CASES = {
    "clipped": ["algorithm={type: flow_grpo, clip_range: 1e-3, kl_coef: 0.0, trained_steps: 3}"],
    "guided, to the reference": [
        "algorithm={type: flow_grpo, clip_range: 1e-3, kl_coef: 0.1}",
        "sampling.guidance_scale=3.0",
    ],
    "from the old mean": ["algorithm={type: flow_dppo}"],
    "steps weighted": ["algorithm={type: grpo_guard}"],
}


@cache
def stepped(*overrides):
    """A step of training: its row, the gradient of the first update, and rows of every forward with a graph."""
    loaded = resolved(load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *SMALL, *overrides]))
    run = build(loaded.recipe)
    gradients, forwards = [], []
    apply = run.policy.apply

    def applying():
        gradients.append(torch.cat([p.grad.flatten() for p in run.policy.trainable.values() if p.grad is not None]))
        return apply()

    run.policy.apply = applying
    run.pipeline.policy.register_forward_pre_hook(
        lambda _, given, named: forwards.append(len(named["hidden_states"])) if torch.is_grad_enabled() else None,
        with_kwargs=True,
    )
    row, _ = train_step(run, 0, Clock(torch.device("cpu")))
    entries = run.objective.entries or run.pipeline.entries(run.objective.kind)
    assert len(forwards) == count(loaded.recipe, entries).slices
    return row, gradients[0], forwards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "setting", "at_once"),
    [*((case, 2, 2) for case in CASES), ("clipped", "auto", 3)],
)
def test_the_gradient_is_that_of_single_steps(case, setting, at_once):
    one, expected, forwards = stepped(*CASES[case])
    more, found, fewer = stepped(*CASES[case], f"train.steps_per_forward={setting}")
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert sum(fewer) == sum(forwards)
    assert max(fewer) == at_once * max(forwards)
    assert more["policy/first_ratio_max_dev"] < 1e-5
    for name in ("policy/loss", "policy/ratio", "policy/approx_kl"):
        assert more[name] == pytest.approx(one[name], rel=1e-2, abs=1e-6), name


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("shapes-lora", ["train.steps_per_forward=3"], "2 steps of a sample train; set it to 2 or less"),
        ("shapes-nft", ["train.steps_per_forward=2"], "diffusion_nft replays no recorded steps; remove it"),
        ("shapes-lora", ["train.steps_per_forward=0"], "expected a whole number from 1 on or 'auto', got 0"),
        ("shapes-lora", ["train.steps_per_forward=aut"], "expected a whole number from 1 on or 'auto', got 'aut'"),
        ("sums", ["train.steps_per_forward=2"], "text has no denoising steps"),
        ("sums", ["train.steps_per_forward=auto"], "text has no denoising steps"),
        ("shapes-nft", ["train.steps_per_forward=auto"], "diffusion_nft replays no recorded steps; remove it"),
    ],
)
def test_what_cannot_be_stacked_is_refused(recipe, overrides, said):
    with pytest.raises(RecipeError, match=f"train.steps_per_forward: {said}"):
        load_recipe([recipe], overrides)


def elsewhere(setting, memory=None):
    """The plan for a device that is not on this machine, whose memory is not known but for ``memory``."""
    changes = [f"model.path={two_blocks()}", *SMALL, "device=cuda:7", f"train.steps_per_forward={setting}"]
    return plan(load_recipe(["shapes-lora"], changes), memory)


@pytest.fixture(scope="module")
def left_open():
    """A plan with one step in a forward (4 rows, 5 steps), and what each further one takes, before it settles."""
    made = elsewhere("auto")
    missing, *notes = made.notes
    assert missing.startswith("training stops here: device: 'cuda:7' is not to be had here")
    assert notes == [
        "train.steps_per_forward: auto is 1, because 3 would take more memory than the other phases do, and the "
        "device's memory is not known"
    ]
    return replace(made, recipe=with_values(made.recipe, {"train.steps_per_forward": "auto"}), notes=[])


def settled_with(made, memory=2**30, **sizes):
    made = replace(made, counts=replace(made.counts, **sizes), device_memory=memory, notes=[], phases=[*made.phases])
    settle(made)
    return made


@pytest.mark.slow
def test_auto_is_planned_as_its_number_is(left_open):
    made = settled_with(left_open)
    explicit = elsewhere(3, 2**30)
    assert made.recipe == explicit.recipe
    assert made.counts == explicit.counts
    assert made.peak.total == pytest.approx(explicit.peak.total, rel=0.01)
    assert made.notes == ["train.steps_per_forward: auto is 3, 12 rows in a forward (4 of each step, 16 at most)"]


@pytest.mark.parametrize(
    ("sizes", "changed", "at_once", "said"),
    [
        ({"slice_rows": 1}, {}, 5, "5 rows in a forward"),
        ({"slice_rows": 9}, {}, 1, "because a forward of one step has 9 rows, and more than 16 gain next to nothing"),
        ({"entries": 1}, {}, 1, "one step of a sample trains"),
        ({}, {"dtype": "bfloat16"}, 1, "rounds differently if the batch is not sampling's (of 4)"),
        ({"batch": 12, "entries": 3}, {"dtype": "bfloat16"}, 3, "12 rows"),
        ({"batch": 12}, {"dtype": "bfloat16"}, 1, "rounds differently"),  # 5 steps: the last forward would have 8 rows
        ({"batch": 20}, {"dtype": "bfloat16"}, 1, "rounds differently"),  # more than pay
    ],
)
def test_auto_takes_what_pays(left_open, sizes, changed, at_once, said):
    model = left_open.recipe.model.model_copy(update=changed)
    made = settled_with(replace(left_open, recipe=left_open.recipe.model_copy(update={"model": model})), **sizes)
    assert made.recipe.train.steps_per_forward == at_once
    assert said in made.notes[0]


def test_auto_takes_what_there_is_room_for(left_open):
    two = left_open.peak.total + left_open.measured.train_step
    for memory, at_once in ((two / 0.8 + 9, 2), (two / 0.8 - 9, 1)):
        made = settled_with(left_open, int(memory))
        assert made.recipe.train.steps_per_forward == at_once
        assert "because 3 would take more memory than 80% of the device's" in made.notes[0]
        assert made.peak.total <= max(0.8 * memory, left_open.peak.total)
