"""How often the host waits for a CUDA device that is pretended: budgets for a denoising step, a training slice and a
generated token. What a run of twice the length waits more often is what one of them costs, wherever that is."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.pretend_cuda

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from smoke_waits import BUDGETS, LIBRARIES  # noqa: E402
from smoke_waits import waits_of_a_step as counted_in_a_step  # noqa: E402

PICTURES = {
    "name": "pictures",
    "device": "cuda",
    "pipeline": "diffusion/sd3",
    "model": {"lora": {"rank": 2, "alpha": 4}},
    "data": {"name": "shapes"},
    "sampling": {
        "steps": 4,
        "height": 32,
        "width": 32,
        "max_sequence_length": 12,
        "guidance_scale": 2.0,
        "same_initial_noise": False,
        "batch_size": 8,
    },
    "train": {"steps": 2, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
}
JPEG = {"rewards": [{"name": "jpeg:incompressibility"}]}
KINDS = {
    "policy_gradient": JPEG | {"algorithm": {"type": "flow_grpo", "kl_coef": 0.01}},
    "forward_process": JPEG | {"algorithm": {"type": "diffusion_nft", "noise_levels": 1}},
    "pathwise": {
        "algorithm": {"type": "draft", "last_steps": 1},
        "rewards": [{"name": "colour:target", "options": {"rgb": [60, 95, 235]}}],
    },
    "offline": {"algorithm": {"type": "picture_dpo"}, "data": {"name": "shape_pairs"}, "rewards": []},
}
TEXT = """
name: text
device: cuda
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 4, batch_size: 8, top_p: 0.9}
rewards: [{name: reward.py}]
algorithm: {type: ppo}
train: {steps: 1, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
"""
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(set(s.text))) for s in samples]
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    from tests.support.tiny_diffusion import two_blocks

    folder = tmp_path_factory.mktemp("pictures")
    for kind, changed in KINDS.items():
        size = {"group_size": 1} if kind in ("pathwise", "offline") else {}
        made = PICTURES | {"model": PICTURES["model"] | {"path": str(two_blocks())}} | changed
        made["train"] = made["train"] | size | ({"prompts_per_step": 8} if size else {})
        (folder / f"{kind}.yaml").write_text(json.dumps(made))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    from tests.support import tiny

    folder = tmp_path_factory.mktemp("text")
    tiny.language_model(folder / "model", sharp=0.02)  # all tokens are about as likely: no response ends early
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(TEXT)
    return folder


def waits_of_a_step(path, *overrides):
    from tests.support import pretend

    return counted_in_a_step(path, overrides, pretend.waits)


def more(fewer, many, times):
    """What ``many`` waits for more often than ``fewer``, for each of ``times``: ours by place, and the libraries'."""
    ours, theirs = Counter(), Counter()
    for wait, n in (many - fewer).items():
        library = wait.where.partition(":")[0] if wait.of_a_library else ""
        (theirs if library in LIBRARIES else ours)[library if library in LIBRARIES else str(wait)] += n / times
    return ours, theirs


def assert_within(name, ours, theirs):
    budget = BUDGETS[name]
    files = Counter()  # lines of a file come and go
    for place, n in ours.items():
        files[place.partition(": ")[2].partition(":")[0]] += n
    assert all(n <= budget.ours.get(file, 0) for file, n in files.items()), ours
    assert all(n <= budget.libraries.get(file, 0) for file, n in theirs.items()), theirs


@pytest.mark.parametrize("kind", ["policy_gradient", "forward_process", "pathwise"])
def test_no_denoising_step_waits(pictures, kind):
    window = ["sampling.window={size: 2}"] if kind == "policy_gradient" else []
    found = [waits_of_a_step(pictures / f"{kind}.yaml", f"sampling.steps={n}", *window) for n in (4, 8)]
    assert_within("a denoising step", *more(*found, times=4))


def test_no_step_that_a_group_shares_waits(pictures):
    words = ["sampling.same_initial_noise=true", "sampling.window={size: 1, first: 2}", "sampling.steps=4"]
    shared = waits_of_a_step(pictures / "policy_gradient.yaml", *words)
    words[1] = "sampling.window={size: 1, last: 1}"
    each = waits_of_a_step(pictures / "policy_gradient.yaml", *words)
    assert_within("a denoising step", *more(each, shared, times=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_an_update_waits_once_at_most(pictures, kind):
    found = [waits_of_a_step(pictures / f"{kind}.yaml", f"train.micro_batch_size={n}") for n in (8, 2)]
    entries = 3 if kind == "policy_gradient" else 1
    of = "a slice of pictures" + " with a reward's gradient" * (kind == "pathwise")
    assert_within(of, *more(*found, times=3 * entries))  # four slices in place of one, of each step that trains


@pytest.mark.parametrize("kind", ["policy_gradient", "pathwise", "offline"])
def test_what_leaves_the_device_and_comes_back_moves_once_a_phase_and_nobody_waits(pictures, kind, monkeypatch):
    from mmrl.core import offload as frozen_modules

    moved, come = Counter(), frozen_modules.Frozen.wake

    def noted(self, device, *, wait=True):
        moved[type(self.module).__name__] += self._at is None
        return come(self, device, wait=wait)

    monkeypatch.setattr(frozen_modules.Frozen, "wake", noted)
    sizes = ["sampling.batch_size=2", "train.micro_batch_size=2"]
    stays = waits_of_a_step(pictures / f"{kind}.yaml", "model.offload=false", *sizes)
    assert not moved
    leaves = waits_of_a_step(pictures / f"{kind}.yaml", *sizes)
    assert_within("model.offload, a step", *more(stays, leaves, times=1))
    assert moved.pop("AutoencoderKL") == 2  # once in each of two steps
    assert set(moved.values()) <= {2, 4}, moved  # two encoders may be of one class


def test_tokens_at_fixed_places_are_waited_for_together(text):
    """Nobody waits for each of them: the host looks at several, of prompts of any length."""
    from mmrl.inference.slots import UNSEEN

    for data in ("data.jsonl", padded(text)):
        words = [f"data.train.path={text / data}"]
        sizes = (UNSEEN, 3 * UNSEEN)
        found = [waits_of_a_step(text / "recipe.yaml", *words, f"sampling.max_new_tokens={n}") for n in sizes]
        ours, theirs = more(*found, times=2 * UNSEEN)
        assert_within("a generated token", ours, theirs)
        assert not theirs
        assert sum(ours.values()) == pytest.approx(1 / UNSEEN)


def test_a_generated_token_of_batches_waits_once_and_behind_padding_twice(text):
    """Both in transformers. The prompts of the data are of one length, or of two."""
    from tests.support import tiny

    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    tiny.language_model(text / "window", "qwen2", sharp=0.02, **window)
    for data, further in (
        ("data.jsonl", {}),
        (padded(text), {"transformers/masking_utils.py": 2}),
    ):  # two kinds of masks
        words = [f"data.train.path={text / data}", f"model.path={text / 'window'}"]
        found = [waits_of_a_step(text / "recipe.yaml", *words, f"sampling.max_new_tokens={n}") for n in (4, 8)]
        ours, theirs = more(*found, times=4)
        assert_within("a generated token of batches", ours, theirs)
        assert theirs == {"transformers/generation/utils.py": 1} | further


def padded(folder):
    """The name of data whose prompts are of two lengths."""
    rows = [{"id": str(i), "prompt": f"Say {i}" + " more" * (i % 2)} for i in range(40)]
    (folder / "padded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "padded.jsonl"


@pytest.mark.parametrize("algorithm", ["{type: ppo}", "{type: grpo, kl_coef: 0.1}"])
def test_a_slice_of_text_waits_once_at_most(text, algorithm):
    sizes = [(f"train.micro_batch_size={n}", f"algorithm={algorithm}") for n in (8, 2)]
    ours, theirs = more(*(waits_of_a_step(text / "recipe.yaml", *size) for size in sizes), times=3)
    assert_within("a slice of text" + " with a critic" * ("ppo" in algorithm), ours, theirs)


def test_what_mixes_devices_is_refused_and_what_waits_is_counted_where_it_does():
    import torch

    from tests.support import pretend

    here, there = torch.ones(3), torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        here + there
    with pytest.raises(RuntimeError, match="two devices"):
        here[there.long()]
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        there.numpy()
    with pretend.waits() as found:
        total = (there * torch.tensor(2.0)).sum()  # a number of the host goes along with the call
        here.pin_memory().to("cuda", non_blocking=True)
    assert not found
    with pretend.waits() as found:
        assert total.item() == 6
        here.to("cuda")
        there.cpu()
        there[there > 2]
        there[[0, 1]]
        torch.cuda.synchronize()
    named = Counter(wait.what for wait in found.elements())
    assert named == {"item": 1, "to the device": 2, "to the host": 1, "an index that is a mask": 1, "synchronize": 1}
    assert all(wait.ours.startswith("tests/gpu/test_pretended_waits.py") for wait in found)


def test_a_step_is_that_of_the_cpu(pictures):
    """The kernels are the CPU's; only attention is taken apart, as no kernel of CUDA is there."""
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step

    rows = []
    for device in ("cuda", "cpu"):
        loaded = load_recipe([pictures / "policy_gradient.yaml"], [f"device={device}"])
        run = build(loaded.recipe)
        rows.append(train_step(run, 0, Clock(run.compute.device))[0])
    assert rows[0].keys() == rows[1].keys()
    for name in ("optim/grad_norm", "reward/mean", "policy/loss"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3, abs=1e-5), name
