"""Several recorded steps of a micro-batch in one forward: the same gradient, the same ratios, fewer calls."""

import pytest
import torch

from mmrl.config.loader import RecipeError, load_recipe
from mmrl.loop import train_step
from mmrl.placement.arithmetic import count
from mmrl.report.clock import Clock
from mmrl.run import build

SMALL = [
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


def stepped(*overrides):
    """A step of training: its row, the gradient of the first update, and rows of every forward with a graph."""
    loaded = load_recipe(["shapes-lora"], [*SMALL, *overrides])
    run = build(loaded.recipe, loaded.root)
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


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_single_steps(case):
    one, expected, forwards = stepped(*CASES[case])
    more, found, fewer = stepped(*CASES[case], "train.steps_per_forward=2")
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert sum(fewer) == sum(forwards)
    assert max(fewer) == 2 * max(forwards)
    assert more["policy/first_ratio_max_dev"] < 1e-5
    for name in ("policy/loss", "policy/ratio", "policy/approx_kl"):
        assert more[name] == pytest.approx(one[name], rel=1e-2, abs=1e-6), name


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        ("shapes-lora", ["train.steps_per_forward=3"], "2 steps of a sample train; set it to 2 or less"),
        ("shapes-nft", ["train.steps_per_forward=2"], "diffusion_nft replays no recorded steps; remove it"),
        ("sums", ["train.steps_per_forward=2"], "text has no denoising steps"),
    ],
)
def test_what_cannot_be_stacked_is_refused(recipe, overrides, said):
    with pytest.raises(RecipeError, match=f"train.steps_per_forward: {said}"):
        load_recipe([recipe], overrides)
