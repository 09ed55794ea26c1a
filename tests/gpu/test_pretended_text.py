"""Text models on a CUDA device that is pretended: with a critic, on pairs, and in shards over eight ranks of which the
others are pretended too; and a model that sees, with a judge on the same device."""

import json

import pytest

from tests.support.pretended_text import CASES, Pretended, folder, trained, world  # noqa: F401

pytestmark = pytest.mark.pretend_cuda

LORA = "model.lora={rank: 2, alpha: 4}"


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_no_devices_are_mixed(folder, tmp_path, name, lora):
    rows = trained(folder / "recipe.yaml", tmp_path / "run", *CASES[name], *([LORA] if lora else []))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    if name == "ppo":
        assert all(row["value/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("case", ["ppo", "ppo lora", "pictures lora", "pictures"])
def test_weights_in_shards_over_eight_devices(folder, world, case):
    """Shapes, devices and waits are those of eight ranks; the numbers are not, as what others would send is a copy."""
    from torch.distributed.tensor import DTensor

    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.controller import Controller
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step
    from tests.support.tiny_diffusion import two_blocks

    words = ["controllers=8", "train.backend=fsdp", "device=cuda", "train.prompts_per_step=8", "eval.samples=8"]
    lora = [LORA] if "lora" in case else []
    if case.startswith("ppo"):
        loaded = load_recipe([folder / "recipe.yaml"], [*words, "algorithm={type: ppo}", *lora])
    else:
        sizes = ["sampling.steps=3", "train.group_size=2", "train.micro_batch_size=2", "sampling.window={size: 1}"]
        name = "shapes-lora" if lora else "shapes-full"
        loaded = load_recipe([name], [*words, *sizes, f"model.path={two_blocks()}"])
    run = build(loaded.recipe, Controller(0, 0, 8, Pretended(world)))
    assert all(isinstance(p, DTensor) for p in run.policy.module.parameters() if p.requires_grad)
    for n in range(2):
        row, failures = train_step(run, n, Clock(run.compute.device))
        assert not failures
        assert row["optim/grad_norm"] >= 0
    assert run.policy.updates == 2
    assert run.pipeline.features.bytes > 0


def test_a_model_that_sees_with_a_judge_on_the_same_device(tmp_path):
    pytest.importorskip("torchvision")
    small = ["device=cuda", "train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=4"]
    small += ["sampling.batch_size=8", "eval.every=2", "eval.samples=4", "checkpoint.every=2"]
    rows = trained("scenes-judge", tmp_path / "run", *small)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["reward/dropped"] == 0 for row in rows)


def stepped(folder, *words):
    """The rows of two steps, where the model that scores was when they sampled and trained."""
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step
    from tests.support.asleep import modules

    scored = "rewards=[{name: reward_model, options: {path: scorer}}]"
    loaded = load_recipe([folder / "recipe.yaml"], [scored, *words])
    run, seen = build(loaded.recipe), set()
    (model,) = modules(run.rewards._entries[0].loaded.sleeper)

    def noted(name):
        call = getattr(run.pipeline, name)

        def note(*given, **named):
            seen.add((name, *{p.device.type for p in model.parameters()}))
            return call(*given, **named)

        return note

    for name in ("sample", "samples", "replay"):
        setattr(run.pipeline, name, noted(name))
    rows = [train_step(run, n, Clock(run.compute.device))[0] for n in range(2)]
    run.rewards.close()
    return rows, seen


def test_a_model_that_scores_sleeps_while_the_policy_trains_on_its_device(folder):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    made = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    made.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "scorer")
    (expected, always), (rows, seen) = stepped(folder), stepped(folder, "placement={sleep: true}")
    assert always == {(name, "cuda") for name in ("sample", "samples", "replay")}
    assert seen == {("sample", "cuda"), ("samples", "cuda"), ("replay", "cpu")}
    for row, other in zip(rows, expected, strict=True):
        assert row.pop("placement/wake") > 0
        assert row == other


def test_steps_that_cannot_be_recorded_are_computed_and_it_is_said_once(folder, capfd):
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from tests.support.midway_text import asked

    drawn = []
    for way in ("false", "true"):
        run = build(load_recipe([folder / "recipe.yaml"], [f"performance.compile={way}"]).recipe)
        drawn += [[run.pipeline.sample(*asked(run, size=1), [], n).spoken() for n in range(2)]]
    assert drawn[0] == drawn[1]
    assert "".join(capfd.readouterr()).count("are not recorded as CUDA graphs, and take longer") == 1


def test_what_the_plan_chose_for_the_device_is_stored_and_kept(folder, tmp_path, capfd):
    from mmrl.cli import app

    words = [
        "train",
        str(folder / "recipe.yaml"),
        "train.steps=1",
        "train.micro_batch_size=auto",
        "--out",
        str(tmp_path / "run"),
    ]
    app(words, standalone_mode=False)
    assert "the plan chooses train.micro_batch_size" in capfd.readouterr().err
    stored = json.loads((tmp_path / "run" / "resolved.json").read_text())
    chosen = stored["train"]["micro_batch_size"], stored["sampling"]["batch_size"]
    assert chosen == (8, 8), "all samples of a step"
    app([*words, "--resume"], standalone_mode=False)
    assert "the plan chooses" not in capfd.readouterr().err
