"""Diffusion-DPO on given pairs of pictures: the errors it compares, the pairs it takes, and that it learns."""

import json
import math
from io import BytesIO

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.algorithms.picture_dpo import PictureDPO, PictureDPOSettings
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError
from mmrl.core.media import Media
from mmrl.core.randomness import noise
from mmrl.core.signals import Stop
from mmrl.core.trajectory import Prompt, Rows, SampleId, Slot
from mmrl.logging.rundir import RunDir
from mmrl.planner.plan import plan
from mmrl.training.loop import train_step
from tests.support.picture_dpo import SMALL, make


def rows(run, n=3):
    prompts = mmrl.load("datasets", "shape_pairs").prompts("train")
    slots = [Slot(5, i, 0, prompts[i]) for i in range(n)]
    run.pipeline.encode(slots)
    return Rows(slots, [SampleId(5, i, 0, 0) for i in range(n)])


def moved(run):
    torch.manual_seed(3)
    with torch.no_grad():
        for p in run.policy.trainable.values():
            p.add_(0.05 * torch.randn_like(p))
    return run


def test_the_loss_is_the_papers():
    chosen, rejected, chosen_ref, rejected_ref = (torch.rand(5, dtype=torch.float64) for _ in range(4))
    new = {
        **{"chosen_error": chosen, "rejected_error": rejected},
        **{"reference_chosen_error": chosen_ref, "reference_rejected_error": rejected_ref},
    }
    objective = PictureDPO(PictureDPOSettings(beta=7))
    weights = torch.tensor([1.0, 1, 0, 1, 1], dtype=torch.float64)
    loss = objective.loss(new, {"weights": weights}, 4.0)
    terms = [
        math.log(1 + math.exp(3.5 * ((chosen[i] - chosen_ref[i]) - (rejected[i] - rejected_ref[i]))))
        for i in (0, 1, 3, 4)
    ]
    assert loss.value.item() == pytest.approx(sum(terms) / 4, rel=1e-12)
    same = {name: torch.ones(5) for name in new}
    assert objective.loss(same, {"weights": torch.ones(5)}, 5.0).value.item() == pytest.approx(math.log(2))


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_errors_are_of_both_pictures_at_one_noise_and_without_guidance(guidance):
    run = moved(make(f"sampling.guidance_scale={guidance}"))
    pipeline, found = run.pipeline, rows(run)
    got = pipeline.compare(found, run.objective.needs, run.policy.using)
    sigmas, timesteps, *_ = pipeline.adapter.schedule(4)
    eps = noise(run.recipe.seed, found.ids, "pair", pipeline.shape)
    vae = pipeline.adapter.pipe.vae
    for i, slot in enumerate(found.slots):
        features = {k: v.unsqueeze(0) for k, v in pipeline.features.get(slot.prompt.text).items()}
        by_level = []
        for medium in slot.prompt.media:
            pixels = torch.tensor(list(Image.open(BytesIO(medium.data)).tobytes())).view(1, 32, 32, 3)
            z = vae.encode(pixels.permute(0, 3, 1, 2) / 127.5 - 1).latent_dist.mean
            x0 = (z - vae.config.shift_factor) * vae.config.scaling_factor
            errors = []
            for level in range(4):
                s, t = sigmas[level], timesteps[level : level + 1]
                x_s = (1 - s) * x0 + s * eps[i]
                pair = []
                for which in ("current", "reference"):
                    with torch.no_grad(), run.policy.using(which):
                        v = pipeline.adapter.predict(pipeline.policy, x_s, t, features)
                    pair.append((v - (eps[i] - x0)).square().mean().item())
                errors.append(pair)
            by_level.append(errors)
        names = ("chosen_error", "reference_chosen_error"), ("rejected_error", "reference_rejected_error")
        level = min(range(4), key=lambda n: abs(by_level[0][n][0] - got["chosen_error"][i].item()))
        for side, pair in enumerate(names):
            for which, name in enumerate(pair):
                assert got[name][i].item() == pytest.approx(by_level[side][level][which], rel=1e-4), (i, name)
    assert got["chosen_error"].requires_grad
    assert not got["reference_chosen_error"].requires_grad
    assert (got["chosen_error"] - got["reference_chosen_error"]).abs().min() > 1e-6


def test_levels_are_drawn_anew_in_every_step():
    run = make("sampling.steps=10")
    found = rows(run)
    latents = run.pipeline.pairs.latents(found.slots)
    seen = set()
    for step in range(8):
        found.ids = [SampleId(step, i, 0, 0) for i in range(3)]
        timesteps = run.pipeline.pairs.noised(found, latents)[2]
        assert timesteps[:3].tolist() == timesteps[3:].tolist()
        seen |= set(timesteps.tolist())
    assert len(seen) > 5
    assert run.pipeline.pairs.noised(found, latents)[2].tolist() == timesteps.tolist()


def test_any_micro_batch_gives_the_same_gradient():
    found = []
    for size in (4, 1):
        run = moved(make(f"train.micro_batch_size={size}"))
        kept = {}
        apply = run.policy.apply

        def keep(run=run, kept=kept, apply=apply):
            kept.update({k: p.grad.clone() for k, p in run.policy.trainable.items()})
            return apply()

        run.policy.apply = keep
        train_step(run, 0, Clock(torch.device("cpu")))
        found.append(torch.cat([g.flatten() for g in kept.values()]))
    assert (found[1] - found[0]).norm() < 1e-4 * found[0].norm()


def test_the_first_loss_is_log_two_and_the_plan_knows_the_step():
    run = make()
    row, _ = train_step(run, 0, Clock(torch.device("cpu")))
    assert row["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    planned = plan(load_recipe(["shapes-dpo"], SMALL))
    assert planned.problems == []
    assert planned.measured is not None, planned.notes
    assert planned.measured.train > 0


def test_decoding_what_was_encoded_is_the_picture_again():
    pipeline = make().pipeline
    prompt = mmrl.load("datasets", "shape_pairs").prompts("train")[0]
    latents = torch.stack(list(pipeline.pairs.encoded(prompt).values()))
    shown = pipeline.adapter.decode(latents) / 2 + 0.5
    for medium, back in zip(prompt.media, shown, strict=True):
        pixels = torch.tensor(list(Image.open(BytesIO(medium.data)).tobytes())).view(32, 32, 3).permute(2, 0, 1) / 255
        assert (back - pixels).abs().mean() < 0.03


def png(colour, size=(32, 32)):
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ((), "it has 0 media"),
        ((Media("image", data=png("red")),), "it has 1 media"),
        ((Media("image", data=png("red")),) * 2, "two pictures are the same"),
        ((Media("image", data=png("red")), Media("image", data=b"none")), "mend the picture or take the pair out"),
    ],
)
def test_what_is_no_pair_is_named(media, message):
    pipeline = make().pipeline
    with pytest.raises(BadPromptError, match=message):
        pipeline.encode([Slot(0, 0, 0, Prompt("wrong", "a red circle", media=media))])
    assert not pipeline.features.held


def test_a_folder_of_pairs_trains_and_bad_ones_are_told(tmp_path):
    lines = []
    for i in range(12):
        for name, size in (("good", (40, 20)), ("bad", (32, 32))):
            (tmp_path / f"{name}{i}.png").write_bytes(png((20 * i, 40, 60 if name == "good" else 200), size))
        lines.append({"prompt": f"picture {i}", "chosen": f"good{i}.png", "rejected": f"bad{i}.png"})
    lines += [{"prompt": "half a pair", "chosen": "good0.png"}]
    lines += [{"prompt": "the same", "chosen": "good0.png", "rejected": "good0.png"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = f"{{path: {tmp_path / 'pairs.jsonl'}, images: [chosen, rejected], heldout: 0}}"
    overrides = [f"data={{name: jsonl, train: {data}, heldout: {data}, max_bad_fraction: 0.2}}", "eval.rewards=[]"]
    loaded = load_recipe(["shapes-dpo"], [*SMALL, *overrides, "train.steps=2", "eval.every=1", "eval.samples=13"])
    with RunDir.create(tmp_path / "run") as directory:
        outcome = Trainer(loaded, directory).begin(Stop(), resume=False)
    assert outcome.finished, outcome.error
    failures = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    said = [json.dumps(failure) for failure in failures]
    assert any("has nothing under 'rejected'" in line for line in said), said
    assert any("two pictures are the same" in line for line in said), said
    held = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert [row["dropped"] for row in held] == [1] * 3
    assert held[0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("sums", ["algorithm={type: picture_dpo}"], "picture_dpo trains denoising steps"),
        ("shapes-dpo", ["algorithm={type: dpo}"], "of texts; use picture_dpo"),
        ("shapes-dpo", ["rewards=[{name: shapes}]"], "samples nothing that could be rewarded"),
        ("shapes-dpo", ["train.group_size=2"], "set train.group_size to 1"),
        ("shapes-dpo", ["sampling.window={size: 2}"], "picture_dpo records no denoising actions"),
    ],
)
def test_what_does_not_go_together_is_refused(recipe, overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe([recipe], overrides)


@pytest.mark.slow
def test_it_learns_to_tell_held_out_pairs_apart(tmp_path):
    short = ["train.steps=12", "eval.every=12", "eval.samples=64", "eval.rewards=[]", "train.prompts_per_step=24"]
    loaded = load_recipe(["shapes-dpo"], short)
    with RunDir.create(tmp_path / "run") as directory:
        Trainer(loaded, directory).begin(Stop(), resume=False)
    first, last = (json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines())
    assert first["policy/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["dpo/accuracy"] > 0.75
    assert last["policy/loss"] < 0.55
