"""Which noise levels of a rollout train: DiffusionNFT draws among all, DGPO above t_min, others but the last."""

import pytest
import torch

from mmrl.algorithms.dgpo import DGPOSettings
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.trajectory import DenoisingRows, SampleId
from mmrl.pipelines.diffusion.predictor import Renoising
from mmrl.step.batch import with_group_noise

STEPS = 10


@pytest.fixture(scope="module")
def pipeline():
    loaded = load_recipe(["shapes-nft"])
    return build(loaded.recipe).pipeline


def renoising(pipeline, **algorithm):
    settings = pipeline.recipe.model_dump(mode="json") | {"algorithm": algorithm}
    return Renoising(pipeline.adapter, Recipe.model_validate(settings))


def drawn(of, entries, samples=40):
    """The levels (by their index) of each sample's entries."""
    ids = [SampleId(3, n, 0, 0) for n in range(samples)]
    rows = DenoisingRows([], ids, torch.zeros(samples, 0))
    table = of.adapter.schedule(STEPS).sigmas.tolist()
    columns = [of.sigma(rows, entry, seed=1).tolist() for entry in range(entries)]
    return [[table.index(s) for s in row] for row in zip(*columns, strict=True)]


def test_nft_draws_nine_of_ten_levels_the_last_among_them(pipeline):
    """The authors' code permutes all ten timesteps of a sample and trains the first int(10 x 0.99)."""
    of = renoising(pipeline, type="diffusion_nft")
    assert of.entries == 9
    rows = drawn(of, of.entries)
    assert all(len(set(row)) == 9 for row in rows)
    left_out = [(set(range(10)) - set(row)).pop() for row in rows]
    assert set(left_out) >= {0, 9}, "any one may be left out, the last too"
    assert len(set(left_out)) > 5


@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft", "last_level": False}, {"type": "rwr"}])
def test_the_last_level_may_be_left_out(pipeline, algorithm):
    of = renoising(pipeline, **algorithm)
    assert of.entries == 9
    assert all(sorted(row) == list(range(9)) for row in drawn(of, 9))


def test_dgpo_trains_four_of_the_levels_above_t_min(pipeline):
    """The authors: num_train_timesteps 4 of the first trunc_steps + 1 = 7 of 10, which is t_min = shift(0.3)."""
    of = renoising(pipeline, type="dgpo")
    assert of.levels == list(range(7))
    shifted = [3 * t / (1 + 2 * t) for t in torch.linspace(1, 0.1, 10).double().tolist()]
    assert shifted[6] > 3 * 0.3 / (1 + 2 * 0.3) == pytest.approx(shifted[7])
    assert renoising(pipeline, type="dgpo", t_min=0.5).levels == list(range(5)), "trunc_steps = 4, for GenEval"
    of = renoising(pipeline, type="dgpo")
    assert DGPOSettings().noise_levels == 4
    rows = drawn(of, 4)
    assert all(len(set(row)) == 4 for row in rows)
    assert {level for row in rows for level in row} == set(range(7))
    assert renoising(pipeline, type="dgpo", noise_levels=None).entries == 7
    assert renoising(pipeline, type="dgpo", noise_levels=None, t_min=0.0).entries == 9


def test_v_grpo_draws_a_level_of_each_part_for_a_whole_group(pipeline):
    """The parts are those of ``torch.tensor_split``, as in the authors' code; every level may train."""
    of = renoising(pipeline, type="v_grpo")
    assert of.levels == list(range(STEPS))
    ids = [SampleId(3, n // 2, 0, n % 2) for n in range(80)]
    rows = with_group_noise(DenoisingRows([], ids, torch.zeros(80, 0)))
    table = of.adapter.schedule(STEPS).sigmas.tolist()
    parts = [[table.index(s) for s in of.sigma(rows, part, seed=1).tolist()] for part in range(4)]
    assert [sorted(set(part)) for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert all(part[::2] == part[1::2] for part in parts)
    assert len(set(zip(*parts, strict=True))) > 10, "the parts are drawn apart"
    assert renoising(pipeline, type="v_grpo", noise_levels=None).entries == 9


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("{type: diffusion_nft, noise_levels: 11}", "of 10 sampling steps 10 have a level that trains; set it to 10"),
        ("{type: diffusion_nft, noise_levels: 10, last_level: false}", "9 have a level that trains; set it to 9"),
        ("{type: rwr, noise_levels: 10}", "9 have a level that trains; set it to 9 or less"),
        ("{type: dgpo, noise_levels: 8}", "7 have a level that trains; set it to 7 or less"),
        ("{type: dgpo, t_min: 1}", "0 have a level that trains; lower algorithm.t_min"),
        ("{type: dgpo, t_min: 1, noise_levels: null}", "none of 10 sampling steps has a level that trains; lower it"),
    ],
)
def test_no_more_levels_than_may_train(algorithm, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["shapes-nft"], [f"algorithm={algorithm}", "train.micro_batch_size=48"])
