"""Text models on a CUDA device that is pretended: with a critic, on pairs, and in shards over eight ranks of which the
others are pretended too; and a model that sees, with a judge on the same device."""

import json
from collections import Counter

import pytest

pytestmark = pytest.mark.pretend_cuda

RECIPE = """
name: text
device: cuda
pipeline: llm/chat
model: {path: model, dtype: bfloat16}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 6, top_k: 50, top_p: 0.95}
rewards: [{name: reward.py}]
algorithm: {type: grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
eval: {every: 2, samples: 4}
checkpoint: {every: 2}
"""
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(set(s.text))) for s in samples]
"""
LORA = "model.lora={rank: 2, alpha: 4}"
PAIRS = ["data={name: sum_pairs}", "rewards=[]", "train.group_size=1", "sampling.max_new_tokens=12"]
CASES = {
    "grpo": ["algorithm={type: grpo, kl_coef: 0.1}", "train.updates_per_step=2"],
    "dapo": ["algorithm={type: dapo, max_attempts: 2}", "train.micro_batch_tokens=200"],
    "ppo": ["algorithm={type: ppo, kl_coef: 0.1}"],
    "dpo": ["algorithm={type: dpo}", *PAIRS],
    "reward_model": ["algorithm={type: reward_model}", "pipeline=llm/score", *PAIRS, "sampling={max_new_tokens: 12}"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests import tiny

    folder = tmp_path_factory.mktemp("text")
    tiny.language_model(folder / "model", sharp=0.02)
    rows = [{"id": str(i), "prompt": f"Say {'very ' * (i % 4)}{i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def trained(recipe, out, *overrides):
    """The rows of two steps with an evaluation and a checkpoint, and of a third after that."""
    from mmrl.app.trainer import Session
    from mmrl.config.loader import load_recipe
    from mmrl.core.signals import Stop
    from mmrl.logging.rundir import RunDir

    for steps in (2, 3):
        loaded = load_recipe([recipe], [*overrides, f"train.steps={steps}"])
        with RunDir(out) if steps == 3 else RunDir.create(out) as directory:
            outcome = Session(loaded, directory).begin(Stop(), resume=steps == 3)
            assert not outcome.error, outcome.error
    assert len((out / "heldout.jsonl").read_text().splitlines()) >= 2
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_no_devices_are_mixed(folder, tmp_path, name, lora):
    rows = trained(folder / "recipe.yaml", tmp_path / "run", *CASES[name], *([LORA] if lora else []))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    if name == "ppo":
        assert all(row["value/grad_norm"] > 0 for row in rows)


class Pretended:
    """The first of eight controllers; the others have what it has."""

    def __init__(self, group):
        self.sent, self.waited, self.ranks = Counter(), 0.0, group

    def sum(self, values, kind):
        return values

    def gather(self, values):
        return [values] * 8

    def again(self, backend):
        return self.ranks


@pytest.fixture
def world():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("case", ["ppo", "ppo lora", "pictures lora", "pictures"])
def test_weights_in_shards_over_eight_devices(folder, world, case):
    """Shapes, devices and waits are those of eight ranks; the numbers are not, as what others would send is a copy."""
    from torch.distributed.tensor import DTensor

    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.controller import Controller
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step
    from tests.tiny_diffusion import two_blocks

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
    from tests.asleep import modules

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
    from tests.midway_text import asked

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
