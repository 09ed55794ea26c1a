"""DPO and reward-model losses against closed forms and float64 differences."""

import math

import pytest
import torch

from mmrl.algorithms.dpo import DPO, DPOSettings
from mmrl.algorithms.objective import advantages_of
from mmrl.algorithms.orpo import ORPO, ORPOSettings, log_odds
from mmrl.algorithms.reward_model import RewardModel, RewardModelSettings
from mmrl.config.sampling import TextSampling


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


CHOSEN, REJECTED = f64([-10.0, -20.0, -5.0]), f64([-12.0, -18.0, -5.0])
REFERENCE = {"reference_chosen_log_probs": f64([-11.0, -19.0, -6.0]), "reference_rejected_log_probs": f64([-11.0] * 3)}
ONES = torch.ones(3, dtype=torch.float64)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def dpo_loss(weights=ONES, chosen=CHOSEN, rejected=REJECTED, **settings):
    objective = DPO(DPOSettings(**settings))
    new = {"chosen_log_probs": chosen, "rejected_log_probs": rejected, **REFERENCE}
    return objective.loss(new, {"weights": weights}, objective.loss_denominator(weights, ONES))


def margins(beta=0.1, reference_free=False):
    c, r = REFERENCE["reference_chosen_log_probs"], REFERENCE["reference_rejected_log_probs"]
    reference = 0 if reference_free else c - r
    return (beta * (CHOSEN - REJECTED - reference)).tolist()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reference_free", [False, True])
def test_dpo_is_the_papers_loss(smoothing, reference_free):
    loss = dpo_loss(label_smoothing=smoothing, reference_free=reference_free)
    h = margins(reference_free=reference_free)
    expected = sum(-(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x) for x in h) / 3
    assert loss.value.item() == pytest.approx(expected, rel=1e-12)
    assert loss.sums["dpo/margin"].item() == pytest.approx(sum(h))
    assert loss.sums["dpo/accuracy"].item() == sum(x > 0 for x in h)


def test_a_policy_that_is_its_reference_starts_at_log_two():
    objective = DPO(DPOSettings())
    new = {"chosen_log_probs": CHOSEN, "rejected_log_probs": REJECTED}
    new |= {f"reference_{name}": value for name, value in new.items()}
    assert objective.loss(new, {"weights": ONES}, 3.0).value.item() == pytest.approx(math.log(2))


def test_dpo_gradient_is_beta_times_the_chance_of_being_wrong():
    chosen = CHOSEN.clone().requires_grad_()
    dpo_loss(chosen=chosen).value.backward()
    expected = [-0.1 / (1 + math.exp(x)) / 3 for x in margins()]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx(expected)


def test_smoothed_dpo_is_least_where_the_margin_says_the_labels_reliability():
    """Its minimum is at sigmoid(h) = 1 - e, not at infinity."""
    h = math.log(0.8 / 0.2)
    chosen = f64([h / 0.1]).requires_grad_()
    objective = DPO(DPOSettings(label_smoothing=0.2, reference_free=True))
    new = {"chosen_log_probs": chosen, "rejected_log_probs": f64([0.0])}
    objective.loss(new, {"weights": f64([1.0])}, 1.0).value.backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_dpo_survives_margins_that_exp_cannot_hold():
    loss = dpo_loss(chosen=f64([-1e5, 0.0, 1e5]), beta=1.0)
    assert loss.value.isfinite()


def test_dpo_says_what_it_needs():
    assert DPO(DPOSettings(reference_free=True)).needs == {"chosen_log_probs", "rejected_log_probs"}
    assert DPO(DPOSettings()).needs == {"chosen_log_probs", "rejected_log_probs", *REFERENCE}


@pytest.mark.parametrize("objective", [DPO(DPOSettings()), RewardModel(RewardModelSettings())])
def test_offline_objectives_refuse_rewards(objective):
    assert objective.kind == "offline"
    with pytest.raises(TypeError, match="is offline: it has no advantages"):
        advantages_of(objective)


def scores_loss(chosen, rejected, old=None, **settings):
    objective = RewardModel(RewardModelSettings(**settings))
    weights = torch.ones(len(chosen), dtype=torch.float64)
    return objective.loss(
        {"chosen_scores": chosen, "rejected_scores": rejected}, {"weights": weights, **(old or {})}, len(chosen)
    )


def test_bradley_terry_with_margin_and_centering():
    chosen, rejected, margin = [1.0, 0.5], [0.0, 1.5], [0.3, 0.0]
    loss = scores_loss(f64(chosen), f64(rejected), {"margins": f64(margin)}, center_coef=0.01)
    expected = sum(
        -log_sigmoid(c - r - m) + 0.01 * (c + r) ** 2 for c, r, m in zip(chosen, rejected, margin, strict=True)
    )
    assert loss.value.item() == pytest.approx(expected / 2, rel=1e-12)
    assert loss.sums["reward_model/accuracy"].item() == 1
    plain = scores_loss(f64(chosen), f64(rejected))
    assert plain.value.item() == pytest.approx(sum(-log_sigmoid(x) for x in (1.0, -1.0)) / 2)


def test_the_scores_of_a_bradley_terry_model_are_recovered():
    """Pairs in the very proportions of true scores (0, ln 2): 2 of 3 prefer the second. The minimum has that gap."""
    score = f64([0.0, 0.0]).requires_grad_()
    optimizer = torch.optim.LBFGS([score], max_iter=50)

    def closure():
        optimizer.zero_grad()
        loss = scores_loss(score[[1, 1, 0]], score[[0, 0, 1]], center_coef=0.01).value
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (score[1] - score[0]).item() == pytest.approx(math.log(2), abs=1e-4)
    assert score.sum().item() == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("slices", [[[0], [1], [2]], [[2, 0], [1]]])
def test_any_split_of_the_pairs_has_the_same_gradient_and_dropped_pairs_have_none(slices):
    weights = f64([1.0, 0.0, 1.0])

    def gradient(parts):
        chosen = CHOSEN.clone().requires_grad_()
        objective = DPO(DPOSettings())
        total = objective.loss_denominator(weights, ONES)
        for rows in parts:
            new = {"chosen_log_probs": chosen[rows], "rejected_log_probs": REJECTED[rows]}
            new |= {name: value[rows] for name, value in REFERENCE.items()}
            objective.loss(new, {"weights": weights[rows]}, total).value.backward()
        return chosen.grad

    whole = gradient([[0, 1, 2]])
    assert whole[1] == 0
    assert torch.allclose(gradient(slices), whole, rtol=1e-12)


# Other losses on pairs.

TOKENS = {"chosen_tokens": f64([5.0, 8.0, 2.0]), "rejected_tokens": f64([4.0, 6.0, 10.0])}


def test_hinge_is_the_distance_to_a_margin_of_one():
    loss = dpo_loss(loss_type="hinge", beta=0.5)
    assert loss.value.item() == pytest.approx(sum(max(0.0, 1 - h) for h in margins(0.5)) / 3, rel=1e-12)


@pytest.mark.parametrize("reference_free", [False, True])
def test_ipo_is_a_square_of_means_over_tokens(reference_free):
    objective = DPO(DPOSettings(loss_type="ipo", beta=0.2, reference_free=reference_free))
    assert TOKENS.keys() <= objective.needs
    new = {"chosen_log_probs": CHOSEN, "rejected_log_probs": REJECTED, **REFERENCE, **TOKENS}
    expected = 0.0
    for i in range(3):
        c, r = CHOSEN[i].item(), REJECTED[i].item()
        if not reference_free:
            c -= REFERENCE["reference_chosen_log_probs"][i].item()
            r -= REFERENCE["reference_rejected_log_probs"][i].item()
        delta = c / TOKENS["chosen_tokens"][i].item() - r / TOKENS["rejected_tokens"][i].item()
        expected += (delta - 1 / 0.4) ** 2 / 3
    assert objective.loss(new, {"weights": ONES}, 3.0).value.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss_type", ["hinge", "ipo"])
def test_label_smoothing_belongs_to_the_sigmoid_loss(loss_type):
    settings = DPOSettings(type="dpo", loss_type=loss_type, label_smoothing=0.1)
    assert any(
        line.startswith("algorithm.label_smoothing") for line in settings.conflicts(TextSampling(max_new_tokens=8))
    )
    assert not list(DPOSettings(type="dpo", loss_type=loss_type).conflicts(TextSampling(max_new_tokens=8)))


def test_orpo_is_the_papers_loss():
    objective = ORPO(ORPOSettings(beta=0.3))
    new = {"chosen_log_probs": CHOSEN, "rejected_log_probs": REJECTED, **TOKENS}
    loss = objective.loss(new, {"weights": ONES}, 3.0)
    expected = right = 0.0
    for c, r, n, m in zip(CHOSEN, REJECTED, TOKENS["chosen_tokens"], TOKENS["rejected_tokens"], strict=True):
        p, q = math.exp(c / n), math.exp(r / m)
        ratio = (p / (1 - p)) / (q / (1 - q))
        right += ratio > 1
        expected += -math.log(p) - 0.3 * math.log(ratio / (1 + ratio))
    assert loss.value.item() == pytest.approx(expected / 3, rel=1e-12)
    assert loss.sums["orpo/accuracy"].item() == right


def test_orpo_of_a_certain_response_is_finite():
    certain = f64([0.0, -1e-9, -1e5]).requires_grad_()
    log_odds(certain).sum().backward()
    assert log_odds(certain).isfinite().all()
    assert certain.grad is not None
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize(
    "objective",
    [DPO(DPOSettings(loss_type="hinge")), DPO(DPOSettings(loss_type="ipo")), ORPO(ORPOSettings())],
    ids=["hinge", "ipo", "orpo"],
)
def test_gradients_are_the_finite_differences(objective):
    def value(chosen, rejected):
        new = {"chosen_log_probs": chosen, "rejected_log_probs": rejected, **REFERENCE, **TOKENS}
        return objective.loss(new, {"weights": ONES}, 3.0).value

    pair = [CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()]
    value(*pair).backward()
    for side in (0, 1):
        for i in range(3):
            moved = [[t.detach().clone() for t in pair] for _ in range(2)]
            moved[0][side][i] += 1e-6
            moved[1][side][i] -= 1e-6
            slope = (value(*moved[0]) - value(*moved[1])).item() / 2e-6
            assert pair[side].grad[i].item() == pytest.approx(slope, abs=1e-8)
