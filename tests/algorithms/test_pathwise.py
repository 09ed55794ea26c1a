"""Gradients through sampling on the shipped model, against the same written out, and what replay knows of sampling."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import mmrl
from mmrl.algorithms.objective import GraphSteps
from mmrl.core.clock import Clock
from mmrl.core.randomness import noise
from mmrl.core.trajectory import SampleId, Slot
from mmrl.step.batch import groups_of, with_group_noise
from mmrl.training.loop import train_step
from tests.support.training_loop import make


def move(policy, scale=0.05):
    """Give every trainable weight a push, so that the adapter is not the identity."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in policy.trainable.values():
            p.add_(scale * torch.randn_like(p))


def rows(n):
    prompts = mmrl.load("datasets", "shapes").prompts("train")
    return [Slot(0, i // 4, 0, prompts[i // 4]) for i in range(n)], [SampleId(0, i // 4, 0, i % 4) for i in range(n)]


@pytest.fixture(scope="module")
def small():
    run = make("sampling.window=null", "sampling.same_initial_noise=false")
    pipeline, policy = run.pipeline, run.policy
    move(policy)
    slots, ids = rows(2)
    pipeline.encode(slots)
    return pipeline, policy, slots, ids


def gradient(policy, loss):
    loss.backward()
    found = {k: p.grad.clone() for k, p in policy.trainable.items() if p.grad is not None}
    policy.optimizer.zero_grad()
    return found


def by_hand(pipeline, slots, ids, last, detached):
    """The picture predicted at step ``last``, where predictions of the steps ``detached`` carry no graph, but latents
    always do: AlignProp's way."""
    features = pipeline.batch_features(slots)
    sigmas, timesteps, *_ = pipeline.adapter.schedule(4)
    x = noise(0, ids, "initial", pipeline.shape).requires_grad_()
    for i in range(last + 1):
        v = pipeline.velocity(x, timesteps[i].expand(2), features)
        following = sigmas[i + 1] if i < last else 0.0
        x = x + (following - sigmas[i]) * (v.detach() if i in detached else v)
    return x, features


def picture(pipeline, x):
    return (pipeline.adapter.decode(x) / 2 + 0.5).clamp(0, 1)


def agree(ours, reference, rtol=1e-3):
    assert reference.keys() <= ours.keys()
    assert max(g.abs().max() for g in reference.values()) > 1e-6
    for k, g in reference.items():
        assert torch.allclose(ours[k], g, rtol=rtol, atol=1e-7), k


def test_refl_is_one_step_and_the_picture_it_predicts(small):
    pipeline, policy, slots, ids = small
    ours = gradient(
        policy, pipeline.generate(slots, ids, GraphSteps(2, 2), 0, frozenset(), nullcontext)["images"].mean()
    )
    agree(ours, gradient(policy, picture(pipeline, by_hand(pipeline, slots, ids, 2, (0, 1))[0]).mean()))


def test_the_distance_to_the_reference_is_of_the_steps_with_a_graph(small):
    pipeline, policy, slots, ids = small
    made = pipeline.generate(slots, ids, GraphSteps(2, 3), 0, frozenset({"reference_distance"}), policy.using)
    ours = gradient(policy, made["reference_distance"].sum())
    features = pipeline.batch_features(slots)
    sigmas, timesteps, *_ = pipeline.adapter.schedule(4)
    x, distances = noise(0, ids, "initial", pipeline.shape), []
    for i in range(4):
        with torch.set_grad_enabled(i >= 2):
            v = pipeline.velocity(x, timesteps[i].expand(2), features)
        if i >= 2:
            with torch.no_grad(), policy.module.disable_adapter():
                reference = pipeline.velocity(x, timesteps[i].expand(2), features)
            distances.append((v - reference).square().flatten(1).mean(1))
        x = x + (sigmas[i + 1] - sigmas[i]) * v
    expected = torch.stack(distances).mean(0)
    assert expected.min() > 1e-4
    torch.testing.assert_close(made["reference_distance"], expected)
    agree(ours, gradient(policy, expected.sum()))


@pytest.mark.parametrize("trained", [1, 2, 4])
def test_alignprop_without_a_graph_is_the_authors_detached_predictions(small, trained):
    pipeline, policy, slots, ids = small
    ours = gradient(
        policy, pipeline.generate(slots, ids, GraphSteps(4 - trained, 3), 0, frozenset(), nullcontext)["images"].mean()
    )
    agree(ours, gradient(policy, picture(pipeline, by_hand(pipeline, slots, ids, 3, range(4 - trained))[0]).mean()))


def test_draft_lv_averages_the_gradients_of_predictions_from_fresh_noise(small):
    pipeline, policy, slots, ids = small
    images = pipeline.generate(slots, ids, GraphSteps(3, 3, renoised=2), 0, frozenset(), nullcontext)["images"]
    assert images.shape[0] == 6
    ours = gradient(policy, images.mean())
    x0, features = by_hand(pipeline, slots, ids, 3, (0, 1, 2))
    found = [gradient(policy, picture(pipeline, x0).mean())]
    s, t = pipeline.adapter.schedule(4)[0][3], pipeline.adapter.schedule(4)[1][3].expand(2)
    for n in range(2):
        x = (1 - s) * x0.detach() + s * noise(0, ids, f"renoise{n}", pipeline.shape)
        found.append(gradient(policy, picture(pipeline, x - s * pipeline.velocity(x, t, features)).mean()))
    agree(ours, {k: sum(one[k] for one in found) / 3 for k in found[0]})
    assert not torch.allclose(images[:2], images[2:4], atol=1e-4), "the noise is fresh"


def test_a_jump_shows_the_picture_and_what_its_one_prediction_got_wrong(small):
    """x0~ = x0 + (b - a) / (1 - b) (v - (eps - x0)): what SRPO's steps come to."""
    pipeline, policy, slots, ids = small
    jumps = (0.9, 0.8), (0.7, 0.8)
    needs = frozenset({"reference_distance"})
    made = pipeline.generate(slots, ids, GraphSteps(4, 3, jumps=jumps), 0, needs, policy.using)
    assert made["from"].tolist() == pytest.approx([0.9, 0.7])
    ours = gradient(policy, made["images"].mean())
    x0, features = by_hand(pipeline, slots, ids, 3, range(4))
    x0, eps, shown, distances = x0.detach(), noise(0, ids, "initial", pipeline.shape), [], []
    for a, b in jumps:
        at = (1 - a) * x0 + a * eps, torch.full((2,), 1000 * a), features
        v = pipeline.velocity(*at)
        shown.append(picture(pipeline, x0 + (b - a) / (1 - b) * (v - (eps - x0))))
        with torch.no_grad(), policy.module.disable_adapter():
            distances.append((v - pipeline.velocity(*at)).square().flatten(1).mean(1))
    torch.testing.assert_close(made["images"], torch.cat(shown), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(made["reference_distance"], torch.stack(distances).mean(0), rtol=1e-3, atol=1e-5)
    agree(ours, gradient(policy, torch.cat(shown).mean()))


WORDS = """
import mmrl, torch

@mmrl.reward(inputs=("tensor",), differentiable=True)
def score(samples, *, context):
    said = ["up. ", "down. "]
    assert all(any(s.prompt.text.startswith(word) for word in said) for s in samples)
    return torch.stack([1e-3 * s.tensor.mean() + 2.0 * s.prompt.text.startswith("up. ") for s in samples])
"""


def test_a_relative_reward_is_asked_of_every_picture_with_both_words(tmp_path):
    (tmp_path / "words.py").write_text(WORDS)
    reward = f'rewards=[{{name: "{tmp_path}/words.py:score", label: words}}]'
    algorithm = "algorithm={type: srpo, wanted: [up], unwanted: [down], threshold: 5.0, jump: 0.5}"
    run = make("sampling.window=null", "sampling.same_initial_noise=false", reward, algorithm)
    row, _ = train_step(run, 0, Clock(torch.device("cpu")))
    assert row["reward/words"] == pytest.approx(1.0, abs=1e-3)
    # b is in the middle: toward the picture (1 + .175) 2 - 0, away from it (1 + .3) 0 - 2
    assert row["policy/loss"] == pytest.approx(((5 - 2.35) + (5 + 2)) / 2, abs=2e-3)


def test_the_mean_that_was_sampled_from_is_known_from_its_noise(small):
    pipeline, policy, slots, ids = small
    needs = frozenset({"log_probs", "old_distance"})
    seed = pipeline.recipe.seed
    trajectory = pipeline.sample(slots, ids, [0, 1, 2], seed)
    for action in range(3):
        new = pipeline.replay(trajectory, [action], needs, policy.using)
        assert new["old_distance"].max() < 1e-12
        kept = pipeline.replay(trajectory, [action], frozenset({"log_probs"}), policy.using)["log_probs"]
        move(policy, 1e-3)
        moved = pipeline.replay(trajectory, [action], needs, policy.using)
        c = pipeline.recorded(trajectory, [action])
        # of Gaussians: log p - log p_old + |dmu|^2 / 2 std^2 = mean(z dmu) / std, and z has unit size
        bias = moved["old_distance"] / (2 * c["std"] ** 2)
        z_dmu = (moved["log_probs"] - kept + bias) * c["std"]
        assert (moved["old_distance"] > 1e-9).all()
        assert (z_dmu.abs() <= 1.5 * moved["old_distance"].sqrt()).all(), "Cauchy and Schwarz"
        trajectory = pipeline.sample(slots, ids, [0, 1, 2], seed)


def test_recorded_constants_are_of_the_window_and_of_all_steps_it_may_take():
    pipeline = make("sampling.steps=6", "sampling.window={size: 2, first: 1, last: 4}").pipeline
    slots, ids = rows(2)
    pipeline.encode(slots)
    seen = set()
    for n in range(12):
        window = pipeline.noisy_steps(n)
        seen |= set(window)
        found = pipeline.recorded(pipeline.sample(slots, ids, window, 0), [0, 1])
        assert all(torch.equal(found[name], found[f"every_{name}"][[s - 1 for s in window]]) for name in ("std", "c_v"))
        assert found["every_std"].shape == (3,)
    assert seen == {1, 2, 3}


def test_samples_of_a_group_are_noised_alike_where_asked(small):
    pipeline, policy, *_ = small
    slots, ids = rows(8)
    pipeline.encode(slots)
    trajectory = pipeline.sample(slots, ids, [], 0)
    assert groups_of(trajectory).tolist() == [0] * 4 + [1] * 4
    new = pipeline.renoise(with_group_noise(trajectory), 1, 0, frozenset({"v", "target"}), policy.using)
    eps = new["target"] + new["x0"]
    torch.testing.assert_close(eps[1], eps[0])
    assert new["sigma"][:4].unique().numel() == 1
    assert not torch.allclose(eps[4], eps[0])
    s = new["sigma"].view(-1, 1, 1, 1)
    torch.testing.assert_close(new["x_s"], (1 - s) * new["x0"] + s * eps)
    other = pipeline.renoise(trajectory, 1, 0, frozenset({"v", "target"}), policy.using)
    assert not torch.allclose(other["target"][1] + other["x0"][1], other["target"][0] + other["x0"][0])
    assert with_group_noise(trajectory.rows([5])).ids == [replace(ids[5], sample=0)]


def test_the_last_steps_of_an_evaluation_may_be_the_base_models():
    run = make("sampling.window=null", "sampling.same_initial_noise=false", "eval.tuned_fraction=0.5")
    pipeline, policy = run.pipeline, run.policy
    move(policy)
    slots, ids = rows(2)
    pipeline.encode(slots)
    features = pipeline.batch_features(slots)
    sigmas, timesteps, *_ = pipeline.adapter.schedule(4)
    drawn = {}
    for tuned in (0, 2, 4):
        x = noise(0, ids, "initial", pipeline.shape)
        for i in range(4):
            with torch.no_grad(), nullcontext() if i < tuned else policy.module.disable_adapter():
                x = x + (sigmas[i + 1] - sigmas[i]) * pipeline.velocity(x, timesteps[i].expand(2), features)
        drawn[tuned] = x
    torch.testing.assert_close(pipeline.sample(slots, ids, [], 0, evaluate=True).clean, drawn[2])
    torch.testing.assert_close(pipeline.sample(slots, ids, [], 0).clean, drawn[4])
    assert min((drawn[2] - drawn[0]).abs().max(), (drawn[2] - drawn[4]).abs().max()) > 1e-2
