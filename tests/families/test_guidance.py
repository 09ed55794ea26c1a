"""Guidance belongs to sampling; a loss on the forward process has its own, ``algorithm.guidance``."""

import pytest
import torch
from torch.nn.functional import logsigmoid

import mmrl
from mmrl.algorithms.objective import copies_of
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.trajectory import SampleId, Slot
from mmrl.planner.plan import plan
from mmrl.planner.render import _arithmetic
from mmrl.step.batch import with_group_noise
from tests.support.training_loop import SMALL, make

KINDS = {
    "dgpo": "{type: dgpo, noise_levels: 2, beta: 30, clip_range: 0.0001}",
    "diffusion_dpo": "{type: diffusion_dpo, beta: 50}",
    "rwr": "{type: rwr, kl_coef: 0.1}",
    "awm": "{type: awm, noise_levels: 2, weighting: t}",
    "diffusion_nft": "{type: diffusion_nft, beta: 0.5, kl_coef: 0.01}",
    "crd": "{type: crd, beta: 0.5, kl_coef: 0.01, reference_guidance: 3.0}",
}
ROWS = 4
ADVANTAGES = {"diffusion_dpo": [1.0, -1.0, 1.0, -1.0], "rwr": [0.5, 1.5, 1.9, 0.1]}


def made(algorithm, *overrides):
    """A run of one algorithm whose policy, and the copies it keeps, all differ; its samples, guided at 4.5."""
    base = ["sampling.window=null", "sampling.same_initial_noise=false", "sampling.guidance_scale=4.5"]
    run = make(*base, f"algorithm={algorithm}", *overrides)
    torch.manual_seed(3)
    for name in [*sorted(copies_of(run.objective)), None]:
        with torch.no_grad():
            for p in run.policy.trainable.values():
                p.add_(0.03 * torch.randn_like(p))
        if name:
            run.policy.keep(name)
    prompts = mmrl.load("datasets", "shapes").prompts("train")
    slots, ids = (
        [Slot(0, i // 2, 0, prompts[i // 2]) for i in range(ROWS)],
        [SampleId(0, i // 2, 0, i % 2) for i in range(ROWS)],
    )
    run.pipeline.encode(slots)
    return run, run.pipeline.sample(slots, ids, [], seed=0)


def gradients(run, loss):
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in run.policy.trainable.values() if p.grad is not None])
    run.policy.optimizer.zero_grad()
    return found


def known(kind):
    return {
        "advantages": torch.tensor(ADVANTAGES.get(kind, [1.2, -0.4, 0.3, -1.1])),
        "weights": torch.ones(ROWS),
        "groups": torch.tensor([0, 0, 1, 1]),
    }


def ours(run, kind, trajectory):
    rows = with_group_noise(trajectory) if run.objective.shares_noise else trajectory
    new = run.pipeline.renoise(rows, 1, 0, run.objective.needs, run.policy.using)
    return new, gradients(run, run.objective.loss(new, known(kind), float(ROWS)).value)


def by_hand(run, kind, trajectory, new, velocity):
    """The loss of each algorithm, written out over ``velocity`` (row) of each policy."""
    a, rows, policy = known(kind)["advantages"], range(ROWS), run.policy
    guided = velocities(run, trajectory, new, 3.0) if kind == "crd" else velocity

    def under(name):
        with torch.no_grad(), policy.using(name):
            return [(guided if name == "reference" else velocity)(i) for i in rows]

    x0, x_s, s = trajectory.clean, new["x_s"], new["sigma"]
    target = [(x_s[i] - (1 - s[i]) * x0[i]) / s[i] - x0[i] for i in rows]
    v, reference = [velocity(i) for i in rows], under("reference")
    error, error_reference = (
        [(one - t).square().mean() for one, t in zip(of, target, strict=True)] for of in (v, reference)
    )
    to_reference = [(one - r).square().mean() for one, r in zip(v, reference, strict=True)]
    if kind == "rwr":
        return sum(a[i] * error[i] + 0.1 * to_reference[i] for i in rows) / ROWS
    if kind == "diffusion_dpo":
        gain = [error[i] - error_reference[i] for i in rows]
        return -sum(logsigmoid(-25 * (gain[i] - gain[i + 1])) for i in (0, 2)) / ROWS
    if kind == "dgpo":
        average = [(one - t).square().mean() for one, t in zip(under("average"), target, strict=True)]
        loss = 0.0
        for group in ((0, 1), (2, 3)):
            weight = torch.sigmoid(sum(30 * a[i] * (error[i] - error_reference[i]).detach() / 2 for i in group))
            for i in group:
                ratio = (average[i] - error[i].detach()).exp()
                past = ratio > 1.0001 if a[i] > 0 else ratio < 0.9999
                loss = loss + (0.0 if past else weight * a[i] * error[i])
        return loss / ROWS
    old = under("old")
    if kind == "crd":
        return crd_by_hand(a, v, old, reference, target)
    if kind == "awm":
        average, loss = under("average"), 0.0
        for i in rows:
            ratio = (s[i].double() * ((old[i] - target[i]).square().mean() - error[i])).exp()
            surrogate = torch.maximum(-a[i] / 5 * ratio, -a[i] / 5 * ratio.clamp(0, 2))
            loss = loss + surrogate + 0.003 * to_reference[i] + (v[i] - average[i]).square().mean()
        return loss / ROWS
    loss = 0.0
    for i in rows:
        r = a[i] / 5 / 2 + 0.5
        for sign, share in ((1, r), (-1, 1 - r)):
            guess = x_s[i] - s[i] * (old[i] + sign * 0.5 * (v[i] - old[i]))
            weight = (guess - x0[i]).abs().mean().detach().clamp(min=1e-5)
            loss = loss + 5 * share * (guess - x0[i]).square().mean() / weight / 0.5
        loss = loss + 0.01 * to_reference[i]
    return loss / ROWS


def crd_by_hand(a, v, old, reference, target):
    def error(one, t):
        return (one - t).square().mean() / (one - t).abs().mean().detach()

    better = [error(o, t) - error(one, t) for one, o, t in zip(v, old, target, strict=True)]
    share, loss = [a[i] / 10 + 0.5 for i in range(ROWS)], 0.0
    for i in range(ROWS):
        group = (i - i % 2, i - i % 2 + 1)
        mean, mean_share = sum(better[k].detach() for k in group) / 2, sum(share[k] for k in group) / 2
        gap = 0.5 * (better[i] - mean) - (share[i] - mean_share)
        pull = 0.01 * (0.01 + share[i] * 0.99) * (v[i] - reference[i]).square().mean()
        loss = loss + 5 / 0.5 * gap.square() + pull
    return loss / ROWS


def predicted(run, new, i, key):
    """The transformer's own prediction of one row, from the features of one text."""
    features = {name: t.unsqueeze(0) for name, t in run.pipeline.features.get(key).items()}
    return run.pipeline.policy(
        hidden_states=new["x_s"][i : i + 1],
        timestep=1000 * new["sigma"][i : i + 1],
        encoder_hidden_states=features["embeds"],
        pooled_projections=features["pooled"],
        return_dict=False,
    )[0][0]


def velocities(run, trajectory, new, guidance=1.0):
    """The prediction of a row with its prompt alone, or guided away from the negative one's."""

    def velocity(i):
        v = predicted(run, new, i, run.pipeline.key(trajectory.slots[i].prompt))
        if guidance == 1:
            return v
        without = predicted(run, new, i, run.pipeline.adapter.negative)
        return without + guidance * (v - without)

    return velocity


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_losses_train_the_conditional_prediction_of_guided_samples(kind):
    run, trajectory = made(KINDS[kind])
    new, gradient = ours(run, kind, trajectory)
    expected = gradients(run, by_hand(run, kind, trajectory, new, velocities(run, trajectory, new)))
    assert (gradient - expected).norm() < 1e-5 * expected.norm()
    assert expected.norm() > 0


def test_the_guidance_of_sampling_is_taken_where_the_recipe_says_so():
    """Flow-Factory's DiffusionNFT: the guided prediction, and its gradient is another."""
    found = {}
    for guidance in ("sampling", 4.5, 1.0):
        run, trajectory = made(f"{{type: diffusion_nft, beta: 0.5, kl_coef: 0.01, guidance: {guidance}}}")
        new, found[guidance] = ours(run, "diffusion_nft", trajectory)
        if guidance != 1.0:
            guided = velocities(run, trajectory, new, 4.5)
            expected = gradients(run, by_hand(run, "diffusion_nft", trajectory, new, guided))
            assert (found[guidance] - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(found["sampling"], found[4.5])
    cosine = torch.cosine_similarity(found[1.0], found[4.5], 0)
    assert cosine < 0.9


def test_the_loss_may_be_guided_where_sampling_is_not():
    run, trajectory = made("{type: rwr, guidance: 3.0}", "sampling.guidance_scale=1.0")
    assert run.pipeline.adapter.negative in run.pipeline.features
    new, _ = ours(run, "rwr", trajectory)
    assert not run.pipeline.guided
    features = run.pipeline.batch_features(trajectory.slots, guided=True)
    with torch.no_grad():
        negative, positive = run.pipeline.adapter.predict(
            run.pipeline.policy, torch.cat([new["x_s"]] * 2), (1000 * new["sigma"]).repeat(2), features
        ).chunk(2)
    torch.testing.assert_close(new["v"].detach(), negative + 3 * (positive - negative))


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ("flow_grpo", "flow_grpo replays the steps it sampled, and so with sampling.guidance_scale; remove it"),
        ("draft", "draft samples inside the update, and so with sampling.guidance_scale; remove it"),
        ("picture_dpo", "picture_dpo trains the prediction with the prompt alone; remove it"),
    ],
)
def test_other_objectives_have_no_guidance_of_their_own(algorithm, why):
    with pytest.raises(UserError, match=f"algorithm.guidance: {why}"):
        load_recipe(["shapes-lora"], [f"algorithm={{type: {algorithm}, guidance: 1.0}}"])


@pytest.mark.parametrize("value", ["true", "-1", "training"])
def test_what_is_no_guidance_is_refused(value):
    expected = "algorithm.guidance: expected a number of 0 or more or one of sampling"
    with pytest.raises(UserError, match=expected):
        load_recipe(["shapes-nft"], [f"algorithm.guidance={value}"])


def test_a_plan_counts_the_rows_of_a_loss_apart_from_those_of_sampling():
    made = plan(load_recipe(["shapes-nft"], [*SMALL[:4], "sampling.guidance_scale=4.5", "algorithm.noise_levels=2"]))
    assert (made.measured.guided, made.measured.guided_loss) == (True, False)
    _, sampling, training, _ = _arithmetic(made)
    assert "of 4 samples (twice that with guidance)" in sampling
    assert "up to 4 samples, 2 entries" in training
