"""Model checkpoints of strangers: no traceback, no hang, no gigabytes, whatever their small files hold."""

import importlib.util
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.config.schema import Reward
from mmrl.core.library_loading import try_tokenizer
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.scoring import RewardSet
from tests.support import hostile, judging, tiny

allow_cpu_only()  # before transformers imports torchvision

PIPELINES = Path(__file__).parents[2] / "pipelines"
FOLDERS = {"sums": PIPELINES / "llm/models/sums-qwen3", "shapes-lora": PIPELINES / "diffusion/models/shapes-sd3"}
OTHERS = {"moving-shapes": PIPELINES / "diffusion/models/motions-wan"}
if importlib.util.find_spec("torchvision"):
    OTHERS["scenes"] = PIPELINES / "vlm/models/scenes-vl"
SMALL = [
    *("train.steps=1", "train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=2"),
    "eval.every=null",
]
FEW = {"sums": ["data.train.count=8", "data.heldout.count=8"], "scenes": ["data.train.size=8", "data.heldout.size=8"]}
INIT = {
    "scenes": ["--data", "scenes", "--reward", "answer:Exact", "--yes"],
    "moving-shapes": ["--data", "motions", "--reward", "motion", "--yes"],
    "sums": ["--data", "sums", "--reward", "sums", "--yes"],
    "shapes-lora": ["--data", "shapes", "--reward", "shapes", "--yes"],
}
FAILED = (24, 32, 39, 78, 213, 349, 615, 738, 799, 1002, 1494)
OTHERS_FAILED = (28, 77)
"""Seeds whose files were a traceback once; those of ``OTHERS`` where torchvision is installed."""
WHOLE = [*hostile.WHOLE, "outside", "huge"]


def spoiled(rng, folder, scratch):
    """Change one small file of the checkpoint in ``folder``. Returns which, and how."""
    file = rng.choice(sorted(folder.rglob("*.json")))
    how = "value" if rng.random() < 0.4 else rng.choice(WHOLE)
    before = file.read_bytes()
    if how == "value":
        file.write_bytes(hostile.dumped(hostile.changed_value(rng, json.loads(before))).encode("utf-8", "replace"))
    elif how == "outside":
        (scratch / "else.json").write_bytes(before)
        file.unlink()
        file.symlink_to(scratch / "else.json")
    elif how == "huge":
        os.truncate(file, 3 << 30)
    else:
        hostile.spoil(rng, file, how)
    return f"{file.relative_to(folder)}: {how}"


def test_a_trial_leaves_a_tokenizer_as_it_was():
    for words in (tiny.tokenizer(), tiny.tokenizer(["word"], template=None)):
        words("a much longer text", truncation=True, max_length=2, padding="max_length")  # its parser keeps both
        try_tokenizer(words)
        backend = words.backend_tokenizer
        assert (backend.truncation, backend.padding) == (None, None)
        assert len(backend.encode("a much longer text than eight tokens").ids) > 8


def commands(name, folder, scratch):
    """The commands that read a checkpoint."""
    out, app = scratch / "out", hostile.mmrl_command()
    shutil.rmtree(out, ignore_errors=True)
    recipe = [name, f"model.path={folder}", *SMALL, *FEW.get(name, [])]
    return {
        "plan": lambda: app(["plan", *recipe], standalone_mode=False),
        "train": lambda: app(["train", *recipe, "--out", str(out)], standalone_mode=False),
        "init": lambda: app(
            ["init", str(scratch / "a.yaml"), "--model", str(folder), *INIT[name]], standalone_mode=False
        ),
    }


def copied(path, rng, tmp_path):
    """A fresh copy of the folder ``path`` with one file spoiled, a scratch folder, and what was changed."""
    folder, scratch = tmp_path / "model", tmp_path / "scratch"
    for made in (folder, scratch):
        shutil.rmtree(made, ignore_errors=True)
    scratch.mkdir()
    shutil.copytree(path, folder)
    return folder, scratch, spoiled(rng, folder, scratch)


def tried(sweep, seeds, folders, tmp_path):
    """Every command of a checkpoint of ``folders``, for each of ``seeds``."""
    for seed in dict.fromkeys(seeds):
        rng = random.Random(seed)
        name = rng.choice(sorted(folders))
        folder, scratch, change = copied(folders[name], rng, tmp_path)
        for command, call in commands(name, folder, scratch).items():
            wrong = hostile.attempt(call)
            sweep.check(not wrong, f"seed {seed}: {command} of {name} with {change}: {wrong}")
    sweep.done()


@pytest.mark.slow
@pytest.mark.sweep("hostile configuration files of model checkpoints, through plan, train and init")
def test_no_file_of_a_checkpoint_is_a_traceback(tmp_path, sweep):
    tried(sweep, [*range(sweep.size(12, 300)), *FAILED], FOLDERS, tmp_path)


@pytest.mark.slow
@pytest.mark.sweep("hostile configuration files of checkpoints that see and of clips, through plan, train and init")
def test_no_file_of_another_checkpoint_is_a_traceback(tmp_path, sweep):
    tried(sweep, [*range(sweep.size(0, 100)), *OTHERS_FAILED], OTHERS, tmp_path)


PICTURES = ("clip", "vbench:subject", "geneval", "sees")
"""Rewards of a checkpoint that sees; the last one is a judge, which needs torchvision."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of a tiny checkpoint by the reward that reads it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    clip = tiny.clip(folder / "clip")
    made = {"clip": clip, "vbench:subject": tiny.eyes(folder / "eyes"), "geneval": tiny.finder(folder / "finder")}
    made["relevance"] = tiny.encoder(folder / "encoder")
    made["judge"] = Path(judging.text_model(folder / "judge"))
    made["reward_model"] = tiny.rater(folder / "rater")
    if importlib.util.find_spec("torchvision"):
        made["sees"] = PIPELINES / "vlm/models/shapes-judge"
    return made


def asked(name, path, clip):
    """A reward that reads the checkpoint at ``path``."""
    judge = {"model": str(path), "rubric": "{{ response }}", "answer": {"type": "yes_no", "floor": 0}}
    options = {
        "judge": judge,
        "sees": {**judge, "rubric": "{{ image }} Is it {{ prompt }}?"},
        "relevance": {"path": str(path), "key": "subject"},
        "geneval": {"path": str(path), "clip": str(clip)},
    }
    return Reward(name="judge" if name == "sees" else name, options=options.get(name, {"path": str(path)}))


def scored(reward, name):
    """Build the reward and score two samples with it."""
    prompt, samples = Prompt("0", "a cat", {"subject": "a cat", "include": [{"class": "cat", "count": 1}]}), []
    for i, colour in enumerate(("red", "blue")):
        image = Image.new("RGB", (48, 40), colour)
        shown = {"image": image, "tensor": torch.rand(3, 40, 48), "video": (image, image)}
        made = shown if name in PICTURES else {"text": "the cat sees it"}
        samples.append(Sample(prompt, SampleId(0, 0, 0, i), **made))
    rewards = RewardSet([reward])
    try:
        rewards.score(samples, [[0, 1]])
    finally:
        rewards.close()


@pytest.mark.slow
@pytest.mark.sweep("hostile configuration files of the checkpoints of rewards and judges, built and asked")
def test_no_file_of_a_rewards_checkpoint_is_a_traceback(tmp_path, checkpoints, sweep):
    for name, path in checkpoints.items():
        scored(asked(name, path, checkpoints["clip"]), name)  # as it is, it answers
    for seed in range(sweep.size(24, 400)):
        rng = random.Random(seed)
        name = rng.choice(sorted(checkpoints))
        folder, _, change = copied(checkpoints[name], rng, tmp_path)
        wrong = hostile.attempt(lambda name=name, folder=folder: scored(asked(name, folder, checkpoints["clip"]), name))
        sweep.check(not wrong, f"seed {seed}: {name} with {change}: {wrong}")
    sweep.done()
