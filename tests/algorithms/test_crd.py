"""CRD: the authors' centred loss, what is left out of a group, its averages, and the guidance of its reference."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.algorithms.crd import CRD, CRDSettings
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.trajectory import SampleId
from mmrl.step.batch import rows_with_weight
from tests.support.training_loop import FORWARD, SMALL, make, step


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def golden_batch():
    new = {
        "v": f64([[0.5, 0.1, 0.8], [0.7, 0.2, -0.1], [-0.2, 0.6, 0.3]]).requires_grad_(),
        "v_old": f64([[0.4, 0.0, 0.7], [0.8, 0.1, -0.2], [-0.1, 0.5, 0.4]]),
        "v_reference": f64([[0.1, 0.0, 0.9], [0.5, 0.3, -0.3], [0.0, 0.4, 0.2]]),
        "target": f64([[0.3, -0.2, 1.1], [0.9, 0.4, -0.6], [-0.5, 0.2, 0.1]]),
    }
    old = {"advantages": f64([1.8, -0.9, -7.0]), "weights": torch.ones(3).double(), "groups": torch.zeros(3).long()}
    return new, old


@pytest.mark.parametrize(
    ("adaptive", "value", "gradient"),
    [
        (
            True,
            0.5647725288,
            [
                [0.505090498, 0.750076637, -0.750076637],
                [-0.110904922, -0.113642189, 0.283649261],
                [-0.834490041, -1.112643018, -0.556321509],
            ],
        ),
        (
            False,
            0.5670002988,
            [
                [0.507932098, 0.750787037, -0.750787037],
                [-0.108285322, -0.114951989, 0.286268861],
                [-0.838930041, -1.108203018, -0.554101509],
            ],
        ),
    ],
)
def test_golden_of_the_authors_code(adaptive, value, gradient):
    """X-GenGroup/Flow-Factory at a0b2bc5, ``CRDTrainer._compute_crd_loss`` (which an author of the paper gave) and the
    lines of ``optimize`` around it, run on these numbers in float64 with beta 0.7 and kl_beta 0.1."""
    new, old = golden_batch()
    loss = CRD(CRDSettings(beta=0.7, adaptive_kl=adaptive)).loss(new, old, 3.0)
    (found,) = torch.autograd.grad(loss.value, new["v"])
    assert loss.value.item() == pytest.approx(value, abs=1e-6)
    assert loss.sums["policy/loss"].item() / 3 == pytest.approx(0.5630002988, abs=1e-6)
    torch.testing.assert_close(found, f64(gradient), rtol=0, atol=1e-6)


def test_a_row_without_weight_and_another_group_move_nothing():
    new, _ = golden_batch()
    objective = CRD(CRDSettings(adaptive_weight=False))
    two = {name: torch.cat([t, t.flip(0) * 1.3]) for name, t in new.items()}
    beside = {
        "advantages": f64([1.8, -0.9, -7, 3, 2, 1]),
        "weights": f64([1, 1, 0, 1, 1, 1]),
        "groups": torch.tensor([0, 0, 0, 1, 1, 1]),
    }
    both = objective.loss(two, beside, 1.0).value
    first = {name: t[:2] for name, t in new.items()}
    second = {name: t[3:] for name, t in two.items()}
    ones = torch.ones(3).double()
    apart = [
        objective.loss(
            first, {"advantages": f64([1.8, -0.9]), "weights": ones[:2], "groups": torch.zeros(2).long()}, 1.0
        ),
        objective.loss(second, {"advantages": f64([3, 2, 1]), "weights": ones, "groups": torch.zeros(3).long()}, 1.0),
    ]
    assert both.item() == pytest.approx(sum(one.value.item() for one in apart), rel=1e-6)


def test_averages_of_the_policy():
    objective = CRD(CRDSettings())
    assert objective.samples_with(1) == "sampling"
    assert [objective.copies["old"](n) for n in (0, 50, 1000)] == pytest.approx([0.25, 0.5, 0.999])
    assert [objective.copies["sampling"](n) for n in (0, 75, 95, 1000)] == pytest.approx([0, 0, 0.15, 0.999])
    assert CRD(CRDSettings(kl_coef=0)).needs == {"v", "v_old", "target"}


def test_rows_of_a_group_stay_together():
    ids = [SampleId(0, n // 2, 0, n % 2) for n in range(6)]
    batch = SimpleNamespace(weights=torch.tensor([1.0, 0, 1, 0, 0, 0]), ids=ids)
    assert rows_with_weight(batch, list(range(6))) == [0, 2]
    assert rows_with_weight(batch, list(range(6)), whole=True) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm={type: crd, noise_levels: 5}", *FORWARD], "4 have a level that trains; set it to 4 or less"),
        (["algorithm={type: crd}", *FORWARD, "train.micro_batch_size=6"], "a multiple of 4"),
        (["algorithm={type: crd}", *FORWARD, "train.updates_per_step=2"], "updates_per_step: crd compares all samples"),
        (
            ["algorithm={type: crd, kl_coef: 0}", *FORWARD, "sampling.negative_prompt=blurry"],
            "no negative prompt is used",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_edit(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["shapes-lora"], [*SMALL, *overrides])


@pytest.mark.slow
def test_a_dropped_sample_is_left_out_of_its_group(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(samples, *, context):\n"
        "    return [float('nan') if s.id.sample == 1 else float(s.id.sample) for s in samples]\n"
    )
    reward = f"rewards=[{{name: '{tmp_path / 'mine.py'}:score', on_failure: drop}}]"
    run = make("algorithm={type: crd, noise_levels: 2}", *FORWARD, reward)
    assert {*run.policy.copies} >= {"old", "sampling"}
    row, failures = step(run)
    assert len(failures) == 2
    assert all(math.isfinite(value) for value in row.values())
    assert row["policy/v_change"] == 0, "the old policy is the policy in the first step"


@pytest.mark.slow
def test_a_model_of_one_prediction_guides_no_reference(monkeypatch):
    monkeypatch.setattr("mmrl.pipelines.diffusion.adapter.Adapter.combines", False)
    with pytest.raises(UserError, match=r"set algorithm\.reference_guidance to loss"):
        make("algorithm={type: crd, noise_levels: 2}", *FORWARD)
    run = make("algorithm={type: crd, noise_levels: 2, reference_guidance: loss}", *FORWARD)
    assert run.pipeline.renoising.reference_guidance == 1
