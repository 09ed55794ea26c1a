"""What cannot work is refused in ``plan``, before a model is loaded, with the edit that mends it."""

import json
import shutil
import time

import pytest

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Declaration
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.engine_weights import model_folder, values_of
from mmrl.inference.sglang import SglangServer
from mmrl.planner.plan import plan
from mmrl.rewards.loading import find
from mmrl.rewards.scoring import check
from mmrl.runtime.start import train
from tests.support import tiny

allow_cpu_only()

RECIPE = """
name: tiny
device: cpu
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 4}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 2, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
eval: {every: 1, samples: 4}
"""
REWARDS = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(s.text) % 3) for s in samples]

def plain(samples, *, context):
    return [float(len(s.text)) for s in samples]

@mmrl.reward(inputs=("image", "video"))
def pictures(samples, *, context):
    return [0.0 for s in samples]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    tiny.language_model(folder / "model")
    (folder / "reward.py").write_text(REWARDS)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i + 10}"}) + "\n" for i in range(40)))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def loaded(folder, *changes):
    return load_recipe([folder / "recipe.yaml"], changes)


def refused(folder, *changes, name=None):
    """The one problem that the plan finds."""
    made = plan(load_recipe([name], changes) if name else loaded(folder, *changes))
    assert len(made.problems) == 1, made.problems
    return made.problems[0]


# -- what rewards read -----------------------------------------------------------------------------------------------


def test_a_reward_reads_what_the_pipeline_makes_or_plan_refuses_it(folder):
    assert plan(loaded(folder)).problems == []
    problem = refused(folder, "rewards=[{name: 'reward.py:plain'}]")
    assert "rewards[0] (plain): reads 'image', and this pipeline makes text, whose samples have 'text'" in problem
    assert "declare what it reads at" in problem
    assert "reward.py:8: @mmrl.reward(inputs=('text',))" in problem
    problem = refused(folder, "eval.rewards=[{name: 'reward.py:pictures'}]")
    assert "eval.rewards[0] (pictures): reads 'image', 'video', and this pipeline makes text" in problem


@pytest.mark.parametrize("frames", [None, 5])
def test_rewards_of_pictures_and_of_clips(folder, frames):
    changes = [f"rewards=[{{name: '{folder / 'reward.py'}:{name}'}}]" for name in ("score", "plain", "pictures")]
    clips = [] if frames is None else [f"sampling.frames={frames}", "pipeline=diffusion/wan"]
    named = []
    for change in changes:
        recipe = load_recipe(["shapes-lora"], [change, *clips]).recipe
        try:
            named.append(check(recipe.rewards, recipe.makes) and [])
        except UserError as error:
            named.append(str(error).splitlines())
    if frames is None:
        assert [len(p) for p in named] == [1, 0, 1]
        assert "makes pictures, whose samples have 'image' and 'tensor'" in named[0][0]
    else:
        assert [len(p) for p in named] == [1, 1, 1]
        assert "makes clips, whose samples have 'video' and 'tensor'" in named[1][0]
        assert "name: frames" in named[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{name: http, options: {url: 'http://127.0.0.1:9'}}", "inputs of http"),
        ("{name: http, options: {url: 'http://127.0.0.1:9', inputs: [txt]}}", "'txt': a sample has no such field"),
        ("{name: judge, options: {model: m, rubric: 'Is {{ image }} good?'}}", "reads 'image'"),
        ("{name: judge, options: {model: m, rubric: 'Is {{ picture }} good?'}}", "there is no 'picture'"),
        ("{name: judge, options: {model: m, rubric: 'Is {{ response }} good?', mode: odd}}", "options.mode: 'odd'"),
        ("{name: judge, options: {model: {vllm: m, args: [a]}, rubric: '{{ response }}'}}", "options.model.args"),
        (
            "{name: judge, options: {model: {vllm: m, args: {gpu_memory_utilization: a}}, rubric: '{{ response }}'}}",
            "looking at the options",
        ),
    ],
)
def test_rewards_whose_options_decide_what_they_read(folder, reward, message):
    assert message in refused(folder, f"rewards=[{reward}]")


def test_http_with_the_right_inputs_is_not_asked_in_plan(folder):
    assert (
        plan(loaded(folder, "rewards=[{name: http, options: {url: 'http://127.0.0.1:9', inputs: [text]}}]")).problems
        == []
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("inputs=('txt',)", "'txt': a sample has no such field; did you mean 'text'?"),
        ("inputs='text'", r"is text; write inputs=('text',)"),
        ("per='batch'", "per: 'batch': a reward scores single samples or whole groups (write 'sample', 'group')"),
        ("per='groups'", "did you mean 'group'?"),
        ("inputs=('picture',), differentiable=True", "'picture'"),
    ],
)
def test_what_a_reward_declares_exists(folder, tmp_path, declared, message):
    file = tmp_path / "mine.py"
    file.write_text(f"import mmrl\n\n@mmrl.reward({declared})\ndef score(samples, *, context):\n    return []\n")
    problem = refused(folder, f"rewards=[{{name: '{file}'}}]")
    assert message in problem
    assert "mine.py:3" in problem


def test_an_instance_declares_what_exists_too():
    with pytest.raises(ValueError, match="did you mean 'tensor'"):
        Declaration(inputs=("tensors",))


def test_a_run_is_refused_before_its_model_is_loaded(folder, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from mmrl.core.reward_contract import Declaration\nclass Mine:\n"
        "    def __init__(self): self.__mmrl_reward__ = Declaration(inputs=('video',))\n"
        "    def score(self, samples, *, context): return []\n"
        "import mmrl\nMine = mmrl.reward(inputs=('text',))(Mine)\n"
    )
    made = loaded(folder, f"rewards=[{{name: '{tmp_path / 'mine.py'}:Mine'}}]")
    gone = made.recipe.model_copy(update={"model": made.recipe.model.model_copy(update={"path": "/gone/model"})})
    with pytest.raises(UserError, match="reads 'video', and this pipeline makes text"):
        build(gone)
    assert find(f"{tmp_path / 'mine.py'}:Mine").reads({}) == ("text",)


# -- devices and sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("device=banana", "device: there is no 'banana'; write auto, cpu, cuda"),
        ("device='cuda:'", "device: there is no 'cuda:'"),
        ("device=auto:1", "device: auto has no number; write cuda:1"),
        ("threads=100000", "threads: expected a positive whole number or null, got 100000 (4,096 at most)"),
        ("eval.every=0", "expected a positive whole number or null, got 0 (null evaluates nothing)"),
        ("train.group_size=1e8", "expected a positive whole number, got 100000000.0 (1,000,000 at most)"),
        ("train.group_size=1000000", "2,000,000 samples a step, and at most 1,000,000 can be"),
        ("eval.samples=1e9", "eval.samples: expected a positive whole number, got 1000000000.0 (1,000,000 at most)"),
        ("seed=1" + "0" * 20, "seed: expected a whole number from 0"),
        ("rewards=[" + "{name: reward.py}, " * 65 + "]", "(64 at most)"),
    ],
)
def test_sizes_that_cannot_be(folder, change, message):
    with pytest.raises(UserError) as caught:
        loaded(folder, change)
    assert message in str(caught.value)


@pytest.mark.slow
def test_a_gpu_that_is_not_here_may_be_planned_for_and_is_refused_in_training(folder):
    made = loaded(folder, "device=cuda:77")
    planned = plan(made)
    assert planned.problems == []
    assert (planned.device, planned.device_memory) == ("cuda:77", None)
    with pytest.raises(UserError, match="device: 'cuda:77' is not to be had here"):
        build(made.recipe)
    with pytest.raises(UserError, match="device: 'cuda:77' is not to be had here"):
        train(made, folder / "run-on-a-gpu")
    assert not (folder / "run-on-a-gpu").exists()


HUGE = {
    "keys": "".join(f"key{i}: 1\n" for i in range(50_000)),
    "values": "x: [" + "1," * 9_000 + "]",
    "a value": "x: " + "y" * 20_000_000,
    "a long value": "x: " + "y" * 50_000,
    "levels": "x: " + "[" * 40 + "]" * 40,
    "open brackets": "x: " + "[" * 60_000,
    "unknown keys": "".join(f"key{i}: 1\n" for i in range(4_000)),
    "rewards": "rewards: [" + "{name: nothing}, " * 2_000 + "]",
    "aliases": "a: &a [x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmno", "bcdefghijklmnop", strict=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "text"), HUGE.items(), ids=HUGE)
def test_a_recipe_is_read_within_seconds_or_refused(folder, tmp_path, what, text):
    said = {
        "keys": "a recipe has at most 65,536 characters",
        "values": "a recipe has at most 5,000 values",
        "a value": "a recipe has at most 65,536 characters",
        "a long value": "a value of 50,000 characters; at most 16,384 are read",
        "levels": "nested more than 32 levels deep",
        "open brackets": "nested too deeply",
        "unknown keys": "more problems are not listed",
        "rewards": "(64 at most)",
        "aliases": "a recipe has at most 5,000 values",
    }
    (tmp_path / "recipe.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        load_recipe([folder / "recipe.yaml", tmp_path / "recipe.yaml"])
    assert time.process_time() - began < 10
    assert said[what] in str(caught.value)


def test_overrides_count_with_the_files(folder):
    with pytest.raises(UserError, match="at most 65,536 characters, its files and overrides together"):
        loaded(folder, *(f"data.train.x{i}={'y' * 16_000}" for i in range(5)))


def test_a_slice_of_training_may_have_more_rows_than_a_micro_batch_of_sampling(folder):
    large = plan(loaded(folder, "train.micro_batch_size=4", "sampling.batch_size=1"))
    assert (large.problems, large.notes) == ([], [])
    same = plan(loaded(folder, "train.micro_batch_size=4", "sampling.batch_size=4"))
    assert large.measured.train == same.measured.train
    assert large.measured.sample < same.measured.sample


# -- names of the hub with an engine ---------------------------------------------------------------------------------


@pytest.fixture
def cached(folder, tmp_path, monkeypatch):
    """The tiny model as ``org/tiny`` in a hub cache, as the hub's client lays it out; offline."""
    home = tmp_path / "hub" / "models--org--tiny"
    snapshot = home / "snapshots" / "0123abc"
    shutil.copytree(folder / "model", snapshot)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def test_an_engine_finds_a_name_of_the_hub_in_the_cache(folder, cached):
    found = model_folder("org/tiny", "vLLM")
    assert found == cached
    assert values_of(found) == values_of(folder / "model") > 0
    with pytest.raises(UserError, match="no SGLang server answers"):  # past the model, at its next need
        SglangServer("org/tiny", max_model_len=64, url="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "gone", "message"),
    [
        (
            "org/tiny",
            "model.safetensors",
            "model.safetensors is missing in the hub's cache, and HF_HUB_OFFLINE forbids",
        ),
        ("org/other", None, "it is not in the hub's cache, and HF_HUB_OFFLINE forbids"),
        ("a/b/c", None, "Repo id must be"),
    ],
)
def test_an_engine_says_what_is_not_in_the_cache(cached, name, gone, message):
    if gone:
        (cached / gone).unlink()
    with pytest.raises(UserError, match=message):
        model_folder(name, "vLLM")


def test_a_checkpoint_in_parts_is_whole_when_each_part_is_there(cached):
    (cached / "model.safetensors").rename(cached / "model-00001.safetensors")
    (cached / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}})
    )
    with pytest.raises(UserError, match=r"model-00002\.safetensors is missing"):
        model_folder("org/tiny", "vLLM")
    shutil.copy(cached / "model-00001.safetensors", cached / "model-00002.safetensors")
    assert model_folder("org/tiny", "vLLM") == cached
