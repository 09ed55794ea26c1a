"""Rewards that hear the sound of clips, and an advantage for each modality."""

import json
from pathlib import Path

import pytest
import torch

import mmrl
from mmrl.algorithms import diffusion_nft
from mmrl.algorithms.advantages import Advantages
from mmrl.algorithms.modality_routing import AUDIO_ADVANTAGES, advantages_by_modality, loss_by_modality, routed, trained
from mmrl.algorithms.objective import Scored
from mmrl.app.build import build
from mmrl.app.sample import draw, prompts_of
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe, Reward
from mmrl.core.errors import UserError
from mmrl.core.randomness import noise
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.logging.metrics import read
from mmrl.planner.plan import plan
from mmrl.runtime.start import train

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401

ROOT = Path(__file__).resolve().parents[2]
LOUD = """
import mmrl
import numpy as np

@mmrl.reward(inputs=("audio",))
def loud(samples, *, context):
    return [float(s.audio.wave.abs().mean()) for s in samples]

@mmrl.reward(inputs=("video",))
def bright(samples, *, context):
    return [float(np.mean([np.asarray(frame) for frame in s.video])) / 255 for s in samples]

@mmrl.reward(inputs=("video", "audio"))
def both(samples, *, context):
    assert all(s.audio.wave.shape[0] == 2 and s.audio.rate > 0 and len(s.video) == 5 for s in samples)
    return [float(s.audio.wave.std()) for s in samples]
"""
NFT = {"type": "diffusion_nft", "advantage_aggregation": "each", "noise_levels": 2}
SEEN = {"name": "frames", "options": {"name": "jpeg:compressibility"}}


def written(folders, tmp_path, rewards, algorithm=NFT, **top):
    (tmp_path / "hears.py").write_text(LOUD)
    made = recipe("ltx2", folders).model_dump(mode="json") | {"algorithm": algorithm, "rewards": rewards}
    made |= {"device": "cpu", "eval": {"every": None}} | top
    made["train"] |= {"prompts_per_step": top.get("controllers", 1), "group_size": 4, "micro_batch_size": 4}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    return load_recipe([tmp_path / "recipe.yaml"], [])


def hears(name, **more):
    return {"name": f"hears.py:{name}", **more}


def problems(loaded):
    with pytest.raises(UserError) as error:
        build(loaded.recipe)
    return str(error.value)


def test_a_loss_of_both_is_the_mean_of_each_with_its_own_advantages():
    """DiffusionNFT's eq. 9 in float64, of the numbers of each modality alone."""
    draw = torch.Generator().manual_seed(0)
    new = {name: torch.randn(3, 10, generator=draw).double() for name in ("v", "v_old", "v_reference", "x_s", "x0")}
    new["sigma"] = torch.rand(3, generator=draw).double()
    own = {"advantages": torch.tensor([1.0, -2.0, 0.5]).double(), "weights": torch.tensor([1.0, 0.0, 1.0]).double()}
    old = {**own, AUDIO_ADVANTAGES: torch.tensor([-1.0, 3.0, 2.0]).double()}
    objective = diffusion_nft.DiffusionNFT(diffusion_nft.DiffusionNFTSettings(kl_coef=0.5))
    split = lambda x: {"video": x[:, :7].unflatten(1, (7, 1)), "audio": x[:, 7:]}  # noqa: E731
    made = loss_by_modality(objective, new, old, 2.0, split)

    def of(part, advantages):
        cut = {name: value if name == "sigma" else value[:, part] for name, value in new.items()}
        r, s = advantages / 5 / 2 + 0.5, cut["sigma"][:, None]
        positive, negative = cut["x_s"] - s * cut["v"], cut["x_s"] - s * (2 * cut["v_old"] - cut["v"])
        pulls = [((x - cut["x0"]) ** 2).mean(1) / (x - cut["x0"]).abs().mean(1) for x in (positive, negative)]
        return 5 * (r * pulls[0] + (1 - r) * pulls[1]), ((cut["v"] - cut["v_reference"]) ** 2).mean(1)

    (video, kl_v), (audio, kl_a) = of(slice(7), own["advantages"]), of(slice(7, 10), old[AUDIO_ADVANTAGES])
    rows = [0, 2]
    expected = ((video + audio) / 2 + 0.5 * (kl_v + kl_a) / 2)[rows].sum() / 2
    torch.testing.assert_close(made.value, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.sums["policy/loss_audio"], audio[rows].sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.sums["policy/loss_video"], video[rows].sum(), rtol=1e-5, atol=1e-6)


def test_each_modality_has_the_advantages_of_its_rewards_and_of_those_of_both():
    rewards = [
        Reward(name="a", modality="video", weight=2.0),
        Reward(name="b", weight=0.0, modality="audio"),  # only watched
        Reward(name="c", modality="audio"),
        Reward(name="d", weight=0.5),
    ]
    values = torch.tensor([[1.0, 3.0], [0.0, 4.0], [2.0, 2.0]]).double()
    parts = list(zip((2.0, 1.0, 0.5), values, strict=True))
    scored = Scored(values.sum(0), torch.zeros(2, dtype=torch.long), parts=parts)

    def centred(one):
        return Advantages((one.rewards - one.rewards.mean()).float(), torch.ones(2, dtype=torch.bool), 1, 0)

    made = advantages_by_modality(centred, scored, "each", rewards)
    a, c, d = (row - row.mean() for row in values)
    torch.testing.assert_close(made.values, torch.stack([2 * a + 0.5 * d, c + 0.5 * d], 1).float())
    assert routed(rewards)
    assert trained(rewards[1:3]) == ["audio"]
    assert not routed(rewards[2:3])
    assert trained(rewards) == ["video", "audio"]


@pytest.mark.parametrize(("modality", "cut"), [("video", slice(2 * 4 * 4 * 4)), ("audio", slice(2 * 4 * 4 * 4, None))])
def test_one_modality_alone_has_the_log_probs_and_the_losses(folders, modality, cut):
    """In float64 from the noise; what is noised anew has the numbers of this modality alone."""
    made = recipe("ltx2", folders, steps=2)
    made = made.model_copy(update={"rewards": [Reward(name="shapes", modality=modality)]})
    case = contract.Case(made)
    rows = case.pipeline.sample(case.slots, case.ids, [0], seed=0)
    c = case.pipeline.coefficients(case.pipeline.adapter.schedule(), [0])
    z = torch.cat([noise(0, [name], "step0", case.pipeline.shape) for name in case.ids]).double()[:, cut]
    std = torch.tensor(c.std[0].item()).double()
    expected = (-(z**2) / 2 - std.log() - torch.tensor(2 * torch.pi).double().log() / 2).mean(1)
    torch.testing.assert_close(rows.log_probs[:, 0].double(), expected, rtol=1e-4, atol=1e-4)
    needs = frozenset({"log_probs", "reference_distance", "old_distance"})
    new = case.pipeline.replay(rows, [0], needs, case.policy.using)
    assert torch.equal(new["log_probs"].detach(), rows.log_probs)
    assert new["old_distance"].abs().max() < 1e-8
    out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
    assert torch.equal(out["x0"].flatten(1), rows.clean[:, cut])
    assert out["v"].shape == out["target"].shape == out["x_s"].shape == out["x0"].shape
    assert out["sigma"].shape == (len(rows),)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["each", "one", "video", "controllers"])
def test_a_run_trains_with_rewards_that_hear(folders, tmp_path, kind):
    if kind == "controllers":
        pytest.importorskip("ray")
    rewards = {
        "each": [{**SEEN, "modality": "video"}, hears("loud", modality="audio"), hears("both")],
        "one": [SEEN, hears("both")],
        "video": [{**SEEN, "modality": "video"}, hears("loud", weight=0.0)],
        "controllers": [{**SEEN, "modality": "video"}, hears("loud", modality="audio")],
    }[kind]
    algorithm = NFT if kind in ("each", "controllers") else {"type": "flow_grpo"}
    many = {"controllers": 2} if kind == "controllers" else {}
    loaded = written(folders, tmp_path, rewards, algorithm, **many)
    train(loaded, tmp_path / "run")
    (row,) = read(tmp_path / "run" / "metrics.jsonl")
    assert row["policy/ratio_max_dev" if algorithm["type"] == "flow_grpo" else "policy/loss"] is not None
    assert ("policy/loss_audio" in row) == (kind in ("each", "controllers"))
    assert row.get("policy/ratio_max_dev", 0) == 0
    if kind == "each":
        out = draw(tmp_path / "run", prompts_of(["a red circle"]), tmp_path / "out", n=2)
        lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        assert len({(out / line["audio"]).read_bytes() for line in lines}) == 2


@pytest.mark.slow
def test_each_modality_learns_what_its_own_reward_pays(folders, tmp_path, capsys):
    """30 steps on random weights: brightness trained by the picture and loudness by the sound both rise on held-out
    prompts; where each trains the other modality, loudness does not rise."""
    found = {}
    for name, (of_picture, of_sound) in {"own": ("video", "audio"), "other's": ("audio", "video")}.items():
        rewards = [hears("bright", modality=of_picture), hears("loud", modality=of_sound)]
        written(folders, tmp_path, rewards, NFT | {"kl_coef": 0.0}, optim={"lr": 0.01})
        changed = ["train.steps=30", "train.prompts_per_step=4", "train.group_size=8", "train.micro_batch_size=32"]
        changed += ["eval.every=30", "eval.samples=32", "eval.grid=4", "checkpoint.every=30"]
        train(load_recipe([tmp_path / "recipe.yaml"], changed), tmp_path / name)
        before, after = read(tmp_path / name / "heldout.jsonl")
        found[name] = {key: after[f"reward/{key}"] - before[f"reward/{key}"] for key in ("bright", "loud")}
    with capsys.disabled():
        print(found)
    assert found["own"]["bright"] > 0.005
    assert found["own"]["loud"] > 1e-4
    assert found["other's"]["loud"] < 5e-5


def test_what_no_reward_hears_is_refused_with_an_edit_that_works(folders, tmp_path):
    one = {"type": "flow_grpo"}
    said = problems(written(folders, tmp_path, [SEEN], one))
    assert "none reads the sound that diffusion/ltx2 makes" in said
    for works in (
        [{**SEEN, "modality": "video"}],
        [SEEN, hears("loud")],
    ):
        build(written(folders, tmp_path, works, one).recipe).pipeline.close()
    assert "none reads the sound" in problems(written(folders, tmp_path, [SEEN, hears("loud", weight=0.0)], one))
    apart = [{**SEEN, "modality": "video"}, hears("loud", modality="audio")]
    for kind in ("flow_grpo", "rwr", "diffusion_dpo", "grpo_guard"):
        said = problems(written(folders, tmp_path, apart, {"type": kind}))
        assert f"{kind} has one advantage for picture and sound" in said
        assert "or set algorithm={type: diffusion_nft, advantage_aggregation: each}" in said
    said = problems(written(folders, tmp_path, apart, {"type": "diffusion_nft"}))
    assert said.startswith("algorithm.advantage_aggregation: ")
    assert said.endswith("set it to each")
    pathwise = [{"name": "colour:target", "options": {"rgb": [1, 0, 0]}, "modality": "video"}]
    assert "draft has no advantages; remove modality" in problems(
        written(folders, tmp_path, pathwise, {"type": "draft", "last_steps": 1})
    )


@pytest.mark.parametrize("module", sorted(path.stem for path in (ROOT / "pipelines" / "diffusion").glob("*.py")))
def test_a_module_says_whether_its_family_has_sound(module):
    found = mmrl.load("pipelines", f"diffusion/{module}")
    if hasattr(getattr(found, "describe", None), "args"):  # a partial of the adapter: a family
        assert getattr(found, "sounds", False) == bool(found.describe.args[0].sounds)


def test_a_model_without_sound_refuses_what_hears_and_routes(folders, tmp_path):
    loaded = written(folders, tmp_path, [SEEN | {"modality": "video"}, hears("loud")])
    silent = recipe("wan", folders).model_dump(mode="json")
    made = loaded.recipe.model_dump(mode="json") | {key: silent[key] for key in ("pipeline", "model", "sampling")}
    said = problems(loaded.__class__(**{**loaded.__dict__, "recipe": Recipe.model_validate(made)}))
    assert "rewards[0].modality: diffusion/wan makes no sound; remove modality" in said
    assert "it reads 'audio', and diffusion/wan makes none; take another reward" in said


@pytest.mark.slow
def test_the_plan_refuses_what_the_run_would(folders, tmp_path):
    planned = plan(written(folders, tmp_path, [SEEN], {"type": "flow_grpo"}))
    assert any("none reads the sound" in problem for problem in planned.problems), planned.problems
    both = [SEEN, hears("loud")]
    planned = plan(written(folders, tmp_path, both, eval={"every": 1, "rewards": [hears("both")]}))
    assert planned.problems == []
