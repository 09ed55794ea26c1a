"""The rewards core: loading, calling, failure policies, normalisation, gradients, the built-ins and ``mmrl score``."""

import io
import json
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

import mmrl
from mmrl.cli import app
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import column_hint, raised
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards import calling
from mmrl.rewards.bench import measure, pictures, responses, show
from mmrl.rewards.scoring import RewardError, RewardSet, check, normalise
from tests.support import tiny

REPO = Path(__file__).resolve().parents[2]


def samples(n, colours=None, size=8, gradient=False):
    made = []
    for i in range(n):
        image = Image.new("RGB", (size, size), (colours or [(10 * i, 20, 30)] * n)[i])
        tensor = torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)
        made.append(
            Sample(Prompt(f"p{i}", f"prompt {i}"), SampleId(3, i, 0, 0), image, tensor.requires_grad_(gradient))
        )
    return made


@pytest.fixture
def reward_file(tmp_path):
    def write(body, name="mine.py"):
        (tmp_path / name).write_text(body)
        return tmp_path

    return write


def make(root, name="mine.py", **config):
    return RewardSet([Reward(name=f"{root}/{name}", **config)])


def score_folder(name, folder, prompts=None, console=None):
    return show(measure(name, pictures(folder, prompts), bar=console), console)


def score(rewards, made, groups=None, step=7):
    return rewards.score(made, groups or [list(range(len(made)))], step=step)


BAD = {
    "raises": ("    raise ValueError('broken here')", "raised ValueError: broken here at .*mine.py:2"),
    "hangs": ("    import time; time.sleep(300)", "did not return within 0.2 s for a batch of 3"),
    "async hangs": ("ASYNC    import asyncio; await asyncio.sleep(60)", "did not return within 0.2 s"),
    "async raises": ("ASYNC    raise KeyError('k')", "raised KeyError: 'k' at .*mine.py:2"),
    "exits": ("    raise SystemExit(3)", "raised SystemExit: 3"),
    "wrong length": ("    return [1.0, 2.0]", "returned 2 values for 3 samples"),
    "wrong type": ("    return 'good'", "returned a str in place of 3 numbers"),
    "nothing": ("    return None", "returned a NoneType in place of 3 numbers"),
    "strings": ("    return ['1', '2', '3']", "returned a str as value 0"),
    "matrix": ("    import numpy; return numpy.zeros((3, 1))", "returned a list as value 0"),
    "coroutine": ("    async def f(): return [1] * 3\n    return [f() for _ in samples]", "a coroutine as value 0"),
    "parts of other length": ("    return {'score': [1, 2, 3], 'a': [1]}", "returned 1 values for the part 'a'"),
    "no parts": ("    return {}", "returned an empty dict"),
    "NaN": ("    return [1.0, float('nan'), 3.0]", "returned nan"),
    "infinite": ("    return [1.0, 10 ** 400, 3.0]", "returned inf"),
    "None for one": ("    return [1.0, None, 3.0]", "returned None"),
    "Failed for one": (
        "    from mmrl.core.reward_contract import Failed; return [1.0, Failed('too dark'), 3.0]",
        "too dark",
    ),
    "None in a part": ("    return {'a': [1, 2, 3], 'b': [1, None, 3]}", "part 'b' returned None"),
}
ONE_SAMPLE = {"NaN", "infinite", "None for one", "Failed for one", "None in a part"}


def test_a_reward_that_asks_a_sample_for_what_it_lacks_is_told_what_it_has():
    sample = Sample(Prompt("p", "a cat"), SampleId(0, 0, 0, 0))
    with pytest.raises(AttributeError) as caught:
        print(sample.picture)  # type: ignore[attr-defined]
    why, edit = raised(caught.value, __file__, {})
    assert "no attribute 'picture' at" in why
    assert re.search(r"mend \S+test_rewards\.py:\d+ \(a Sample has prompt, .*image", edit)
    with pytest.raises(AttributeError) as other:
        print("text".picture)  # type: ignore[attr-defined]
    assert "has" not in raised(other.value, __file__, {})[1]


def test_a_reward_that_asks_for_a_column_that_is_not_read_says_how_to_get_it():
    hint = column_hint(KeyError("total"), {"answer": "3", "shop": "north"})
    assert "meta has answer, shop" in hint
    assert "set meta: [total] in data.train and heldout" in hint
    assert "meta is empty" in column_hint(KeyError("total"), {})
    assert column_hint(KeyError("answer"), {"answer": "3"}) == ""  # of another mapping
    assert column_hint(KeyError(3), {}) == column_hint(ValueError("total"), {}) == ""


@pytest.mark.parametrize("case", BAD)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_bad_reward_stops_the_run_or_drops_samples_and_never_scores_0(case, reward_file):
    body, reason = BAD[case]
    head = (
        "async def score(samples, *, context):\n" if body.startswith("ASYNC") else "def score(samples, *, context):\n"
    )
    root = reward_file(head + body.removeprefix("ASYNC") + "\n")

    limit = {"timeout": 0.2} if "hangs" in case else {}
    dropped = score(make(root, on_failure="drop", **limit), samples(3))
    failed = [1] if case in ONE_SAMPLE else [0, 1, 2]
    assert [i for i in range(3) if math.isnan(dropped.total[i])] == failed
    assert [f.sample.slot for f in dropped.failures] == failed
    assert all(re.search(reason, f.reason) and f.reward == "mine" for f in dropped.failures)
    if case in ONE_SAMPLE:
        assert dropped.total[[0, 2]].tolist() == [1.0, 3.0]

    with pytest.raises(RewardError, match=reason) as refused:
        score(make(root, **limit), samples(3))
    text = str(refused.value)
    assert "'mine'" in text
    assert "step 7" in text
    assert f"'prompt {failed[0]}' (slot {failed[0]}, sample 0)" in text
    assert "mine.py:" in text
    assert "on_failure: drop" in text


def test_after_a_hang_the_next_batch_is_scored_by_a_fresh_thread(reward_file):
    root = reward_file(
        "import time\ndef score(samples, *, context):\n"
        "    if samples[0].prompt.text == 'prompt 0': time.sleep(300)\n    return [4.0] * len(samples)\n"
    )
    began = time.perf_counter()
    scores = score(make(root, timeout=1.0, batch_size=1, on_failure="drop"), samples(3))
    assert time.perf_counter() - began < 280
    assert torch.isnan(scores.total).tolist() == [True, False, False]


@pytest.mark.slow  # a process that imports torch, and three forks of it
def test_a_process_ends_well_where_a_thread_of_rewards_freed_the_last_of_a_model(reward_file):
    """A thread that frees tensors while the interpreter shuts down aborts the process: close waits for it."""
    root = reward_file(
        "import torch\nclass Judge:\n    def __init__(self):\n"
        "        self.layers = [torch.nn.Linear(64, 64) for _ in range(100)]\n"
        "    def score(self, samples, *, context):\n        return [1.0] * len(samples)\n"
    )
    script = f"""
import os, sys
from PIL import Image
from mmrl.config.schema import Reward
from mmrl.rewards.scoring import RewardSet
from mmrl.core.trajectory import Prompt, Sample, SampleId

def judged():
    rewards = RewardSet([Reward(name={str(root / "mine.py")!r} + ":Judge")])
    sample = Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), Image.new("RGB", (8, 8)))
    assert not rewards.score([sample], [[0]], step=0).failures
    rewards.close()

for _ in range(3):
    child = os.fork()
    if not child:
        judged()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", ["def", "async def"])
def test_a_reward_that_was_given_up_or_closed_leaves_no_thread_and_scoring_tracks_no_gradient(form, reward_file):
    root = reward_file(
        f"import threading, torch\nheld = threading.Event()\n"
        f"{form} score(samples, *, context):\n    assert not torch.is_grad_enabled()\n"
        "    if context.step == 1: held.wait(60)\n    return [1.0]\n"
    )
    before = set(threading.enumerate())
    rewards = make(root, timeout=0.7, on_failure="drop")
    assert not score(rewards, samples(1), step=0).failures
    assert score(rewards, samples(1), step=1).failures
    assert not score(rewards, samples(1), step=2).failures
    mmrl.load("rewards", str((root / "mine.py").resolve())).held.set()
    rewards.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert torch.is_grad_enabled()


def test_an_async_reward_that_blocks_its_loop_is_given_up(reward_file):
    root = reward_file("import time\nasync def score(samples, *, context):\n    time.sleep(300)\n    return [1.0]\n")
    began = time.perf_counter()
    scores = score(make(root, timeout=0.2, on_failure="drop"), samples(1))
    assert time.perf_counter() - began < 280
    assert "did not return" in scores.failures[0].reason


def test_the_process_ends_while_a_reward_hangs(reward_file):
    root = reward_file("import time\ndef score(samples, *, context):\n    time.sleep(600)\n")
    program = (
        "import sys; from mmrl.rewards.calling import Caller; from mmrl.core.reward_contract import Context\n"
        "from mmrl.rewards.loading import build, find\n"
        "from mmrl.core.trajectory import Prompt, Sample, SampleId\n"
        "made = [Sample(Prompt('p', 'p'), SampleId(0, 0, 0, 0))]\n"
        "print(Caller(build(find(sys.argv[1]), {}), 0.1).one(made, Context()).reasons)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(root / "mine.py")], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "did not return" in run.stdout


def test_a_failed_batch_is_retried_with_backoff(reward_file, monkeypatch):
    monkeypatch.setattr(calling, "BACKOFF_S", 0.01)
    root = reward_file(
        "calls = []\ndef score(samples, *, context, good_at):\n    calls.append(1)\n"
        "    if len(calls) < good_at: raise OSError('busy')\n    return [2.0] * len(samples)\n"
    )
    assert score(make(root, retries=2, options={"good_at": 3}), samples(2)).total.tolist() == [2.0, 2.0]
    with pytest.raises(RewardError, match=r"busy.*\(after 3 attempts\)"):
        score(make(root, retries=2, options={"good_at": 99}), samples(2))


def test_batches_are_split_by_size_and_groups_never(reward_file):
    root = reward_file(
        "import mmrl\nseen = []\ndef score(samples, *, context):\n    seen.append(len(samples))\n"
        "    return [s.id.slot for s in samples]\n"
        "@mmrl.reward(per='group')\ndef rank(samples, *, context):\n    seen.append([s.id.slot for s in samples])\n"
        "    return [max(s.id.slot for s in samples)] * len(samples)\n"
    )
    seen = mmrl.load("rewards", str((root / "mine.py").resolve())).seen
    assert score(make(root, batch_size=2), samples(5)).total.tolist() == [0, 1, 2, 3, 4]
    assert seen == [2, 2, 1]
    seen.clear()
    groups = [[0, 3], [1, 2, 4]]
    assert score(make(root, "mine.py:rank", batch_size=1), samples(5), groups).total.tolist() == [3, 4, 4, 3, 4]
    assert seen == [[0, 3], [1, 2, 4]]


def test_batches_of_an_async_reward_run_at_once(reward_file):
    root = reward_file(
        "import asyncio\nnow = most = 0\nasync def score(samples, *, context):\n    global now, most\n"
        "    now += 1; most = max(most, now)\n    while most < 8: await asyncio.sleep(0.01)\n    now -= 1\n"
        "    return [s.id.slot for s in samples]\n"
    )
    scores = score(make(root, batch_size=1, timeout=60), samples(8))
    assert scores.total.tolist() == list(range(8))
    assert mmrl.load("rewards", str((root / "mine.py").resolve())).most == 8


def test_named_parts_average_unless_one_is_the_score(reward_file):
    root = reward_file(
        "import numpy, torch\n"
        "def mean(samples, *, context):\n    return {'a': [1.0, 2.0], 'b': numpy.array([3.0, 6.0])}\n"
        "def total(samples, *, context):\n    return {'score': torch.tensor([5.0, 7.0]), 'note': [1.0, None]}\n"
    )
    mean = score(make(root, "mine.py:mean", label="m"), samples(2))
    assert mean.total.tolist() == [2.0, 4.0]
    assert {k: v.tolist() for k, v in mean.parts.items()} == {"m": [2.0, 4.0], "m/a": [1.0, 2.0], "m/b": [3.0, 6.0]}
    total = score(make(root, "mine.py:total"), samples(2))
    assert total.total.tolist() == [5.0, 7.0]
    assert set(total.parts) == {"total", "total/note"}
    assert math.isnan(total.parts["total/note"][1])  # says nothing of this sample, whose score stands all the same
    assert not total.failures


def test_weights_sum_after_normalisation_and_weight_0_only_watches(reward_file):
    root = reward_file(
        "def a(samples, *, context):\n    return [1.0, 2.0, 3.0, 5.0]\n"
        "def b(samples, *, context):\n    return [10.0, 10.0, 30.0, 20.0]\n"
        "def w(samples, *, context):\n    return [None] * 4\n"
    )
    rewards = RewardSet(
        [
            Reward(name=f"{root}/mine.py:a", weight=2.0, normalize="batch"),
            Reward(name=f"{root}/mine.py:b", weight=-1.0, normalize="group"),
            Reward(name=f"{root}/mine.py:w", weight=0.0, on_failure="drop"),
        ],
    )
    scores = score(rewards, samples(4), [[0, 1], [2, 3]])
    std = np.std([1, 2, 3, 5]) + 1e-4
    expected = [2 * 1 / std, 2 * 2 / std, 2 * 3 / std - 5 / (5 + 1e-4), 2 * 5 / std + 5 / (5 + 1e-4)]
    np.testing.assert_allclose(scores.total.numpy(), expected, rtol=1e-12)
    assert scores.parts["b"].tolist() == [10.0, 10.0, 30.0, 20.0]
    assert scores.total.dtype == torch.float64
    assert len(scores.failures) == 4
    assert set(scores.seconds) == {"a", "b", "w"}


def test_normalisation_ignores_failed_samples_and_sums_over_controllers():
    raw = torch.tensor([1.0, float("nan"), 4.0, 7.0, float("nan")], dtype=torch.float64)
    batch = normalise(raw, [[0, 1, 2, 3, 4]], "batch")
    np.testing.assert_allclose(batch[[0, 2, 3]].numpy(), np.array([1, 4, 7]) / (np.std([1, 4, 7]) + 1e-4), rtol=1e-12)
    group = normalise(raw, [[0, 1, 2], [3, 4]], "group")
    np.testing.assert_allclose(group[[0, 2, 3]].numpy(), [-1.5 / 1.5001, 1.5 / 1.5001, 0.0], rtol=1e-12)
    assert torch.isnan(batch[[1, 4]]).all()
    assert torch.isnan(group[[1, 4]]).all()

    halves = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([4.0, 9.0], dtype=torch.float64)]
    meeting, posted, results = threading.Barrier(2), [None, None], [None, None]

    def controller(rank):
        def all_sum(tensor):
            posted[rank] = tensor
            meeting.wait(60)
            total = posted[0] + posted[1]
            meeting.wait(60)
            return total

        results[rank] = normalise(halves[rank], [[0, 1]], "batch", all_sum)

    threads = [threading.Thread(target=controller, args=(rank,)) for rank in (0, 1)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    torch.testing.assert_close(torch.cat(results), normalise(torch.cat(halves), [[0, 1, 2, 3]], "batch"))


def test_all_mistakes_are_found_before_anything_is_built(reward_file, monkeypatch):
    root = reward_file(
        "built = []\n"
        "class Model:\n    def __init__(self, size): built.append(size)\n"
        "    def score(self, samples, *, context): return [1.0] * len(samples)\n"
        "class Scoreless: pass\n"
        "def bare(samples): return []\n"
        "def options(samples, *, context, threshold=1): return []\n"
        "number = 3\n"
    )
    (root / "broken.py").write_text("x = 1\nimport nowhere_to_be_found\n")
    (root / "syntax.py").write_text("def score(:\n")
    bad = {
        "mine.py:Scoreless": "has no method score",
        "mine.py:bare": r"takes no 'context'; write def score\(samples, \*, context\)",
        "mine.py:options": "options.treshold: .* did you mean 'threshold'",
        "mine.py:number": "is a int; a reward is a function or class",
        "mine.py:none": "has no 'none'; it has: Model, Scoreless, bare, options",
        "mine.py:Model": "options.size: .* needs it",
        "absent.py": "there is no file absent.py",
        "broken.py": "raised ModuleNotFoundError.*broken.py:2",
        "syntax.py": "raised SyntaxError.*syntax.py:1",
        "absent": "there is no reward 'absent'",
    }
    good = Reward(name="mine.py:Model", label="good", options={"size": 1})
    configs = [good, *(Reward(name=n, label=n, options={"treshold": 2} if "options" in n else {}) for n in bad)]
    monkeypatch.chdir(root)
    with pytest.raises(UserError) as refused:
        RewardSet(configs)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(bad)
    for i, (line, (name, why)) in enumerate(zip(lines, bad.items(), strict=True)):
        assert line.startswith(f"rewards[{i + 1}] ({name}): ")
        assert re.search(why, line)
    assert mmrl.load("rewards", str((root / "mine.py").resolve())).built == []
    assert check([good])[0].declaration.inputs == ("image",)


def test_a_class_is_built_once_and_its_own_mistakes_name_the_line(reward_file):
    root = reward_file(
        "class score:\n    built = 0\n    def __init__(self, add=0):\n        assert add >= 0, 'add is negative'\n"
        "        score.built += 1\n        self.add = add\n"
        "    async def score(self, samples, *, context):\n        return [self.add + context.step] * len(samples)\n"
    )
    rewards = make(root, options={"add": 5})
    assert [score(rewards, samples(2), step=s).total.tolist() for s in (1, 2)] == [[6, 6], [7, 7]]
    assert mmrl.load("rewards", str((root / "mine.py").resolve())).score.built == 1
    with pytest.raises(UserError, match=r"AssertionError: add is negative at .*mine.py:4"):
        make(root, options={"add": -1})


def test_inputs_are_the_union_and_a_missing_one_is_named():
    rewards = RewardSet([Reward(name="jpeg:compressibility"), Reward(name="colour:target", options={"rgb": [1, 2, 3]})])
    assert rewards.inputs == {"image", "tensor"}
    assert not rewards.differentiable
    with pytest.raises(RewardError, match="reads 'image', which the samples do not have"):
        score(rewards, [Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), text="words")])
    with pytest.raises(ValueError, match="each of the 2 samples once"):
        rewards.score(samples(2), [[0]], step=0)


def test_scoring_keeps_no_graph_and_gradients_reach_the_picture():
    rewards = RewardSet([Reward(name="colour:target", weight=3.0, batch_size=2, options={"rgb": [255, 0, 0]})])
    assert rewards.differentiable
    made = samples(3, gradient=True)
    assert not score(rewards, made).total.requires_grad
    value = rewards.weighted(rewards.gradient_parts(made, step=0))
    np.testing.assert_allclose(value.detach(), score(rewards, made).total, rtol=1e-6)
    value.sum().backward()
    tensor = made[1].tensor
    red = (10 / 255 - 1) * 2 / 3 / 64 * -3
    np.testing.assert_allclose(tensor.grad[0].numpy(), np.full((8, 8), red), rtol=1e-5)


def test_a_gradient_that_is_none_is_refused(reward_file):
    root = reward_file(
        "import torch, mmrl\nD = mmrl.reward(differentiable=True)\n"
        "@D\ndef cut(samples, *, context): return torch.stack([s.tensor.detach().mean() for s in samples])\n"
        "@D\ndef listed(samples, *, context): return [0.0 for s in samples]\n"
        "@D\ndef shape(samples, *, context): return torch.stack([s.tensor.mean((1, 2)) for s in samples])\n"
        "@D\ndef nan(samples, *, context): return torch.stack([s.tensor.mean().log() * 0 for s in samples]) - 1\n"
        "@D\ndef boom(samples, *, context): raise ValueError('b')\n"
        "def plain(samples, *, context): return [0.0 for s in samples]\n"
    )
    black = samples(2, [(0, 0, 0)] * 2, gradient=True)
    for name, why in {
        "cut": "without a gradient",
        "listed": r"returned list; .* shape \[2\]",
        "shape": r"shape \[2, 3\]",
        "nan": "returned nan for 'prompt 0'",
        "boom": "raised ValueError: b at .*mine.py:12",
    }.items():
        with pytest.raises(RewardError, match=why):
            make(root, f"mine.py:{name}").gradient_parts(black)
    assert not make(root, "mine.py:plain").differentiable  # so no run begins with it


def test_jpeg_and_colour_say_what_their_names_say():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    made = samples(2, [(255, 255, 255), (255, 0, 0)], size=32)
    made.append(Sample(made[0].prompt, SampleId(0, 2, 0, 0), noise))
    buffer = io.BytesIO()
    noise.save(buffer, "JPEG", quality=95)
    kb = len(buffer.getvalue()) / 1000
    values = {
        name: score(RewardSet([Reward(name=name, options=options)]), made).total.tolist()
        for name, options in {
            "jpeg:compressibility": {},
            "jpeg:incompressibility": {},
            "colour:brightness": {},
            "colour:saturation": {},
            "colour:share": {"rgb": [250, 10, 0]},
        }.items()
    }
    assert values["jpeg:incompressibility"][2] == kb
    assert values["jpeg:compressibility"] == [-v for v in values["jpeg:incompressibility"]]
    assert values["jpeg:compressibility"][0] > values["jpeg:compressibility"][2]
    np.testing.assert_allclose(values["colour:brightness"][:2], [1.0, 0.299], rtol=1e-9)
    assert values["colour:saturation"][:2] == [0.0, 1.0]
    assert values["colour:share"][:2] == [0.0, 1.0]


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    return str(tiny.clip(tmp_path_factory.mktemp("clip")))


def clip_samples(size=(60, 48), gradient=False):
    made, rng = [], np.random.default_rng(1)
    for i, text in enumerate(["a red cat", "a dog " * 20, "a red cat", "two birds"]):
        small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        image = small.resize(size, Image.Resampling.BICUBIC)
        tensor = torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)
        made.append(Sample(Prompt(str(i), text), SampleId(0, i, 0, 0), image, tensor.requires_grad_(gradient)))
    return made


def test_clip_and_pickscore_equal_the_library(tiny_clip):
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPProcessor.from_pretrained(tiny_clip)
    made = clip_samples()
    inputs = processor(
        text=[s.prompt.text for s in made],
        images=[s.image for s in made],
        return_tensors="pt",
        padding=True,
        truncation=True,
    )
    with torch.no_grad():
        logits = model(**inputs).logits_per_image.diagonal().double()
    cosine = logits / model.logit_scale.exp().double()
    assert (cosine < 0).any()  # so that the clamp is tried
    assert (cosine > 0).any()
    clip = score(RewardSet([Reward(name="clip:score", options={"path": tiny_clip, "dtype": "float32"})]), made)
    torch.testing.assert_close(clip.total, 2.5 * cosine.clamp(min=0).detach(), rtol=1e-4, atol=1e-6)
    assert list(clip.parts) == ["clip"]
    options = {"path": tiny_clip, "processor": tiny_clip, "dtype": "float32"}
    pick = score(RewardSet([Reward(name="pickscore", options=options)]), made)
    torch.testing.assert_close(pick.total, logits / 26, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("size", "within"), [((32, 32), 1e-5), ((60, 48), 0.02)])
def test_pathwise_clip_is_the_same_cosine_with_a_gradient(size, within, tiny_clip):
    """Exact where nothing is resized; otherwise torch resizes in float and the processor through 8 bits."""
    from transformers import CLIPModel, CLIPProcessor

    model, processor = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPProcessor.from_pretrained(tiny_clip)
    made = clip_samples(size, gradient=True)
    rewards = RewardSet([Reward(name="clip:pathwise", options={"path": tiny_clip, "dtype": "float32"})])
    value = rewards.weighted(rewards.gradient_parts(made))
    inputs = processor(
        text=[s.prompt.text for s in made],
        images=[s.image for s in made],
        return_tensors="pt",
        padding=True,
        truncation=True,
    )
    with torch.no_grad():
        cosine = model(**inputs).logits_per_image.diagonal() / model.logit_scale.exp()
    torch.testing.assert_close(value.detach(), 2.5 * cosine, atol=within, rtol=0)
    value.sum().backward()
    assert all(s.tensor.grad.abs().sum() > 0 for s in made)


def test_a_clip_path_that_holds_no_model_is_a_clear_message(tmp_path):
    with pytest.raises(UserError, match=r"cannot load a CLIP model from .*options.path"):
        RewardSet([Reward(name="clip", options={"path": str(tmp_path)})])


def folder_of_odd_pictures(folder):
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8))
    rgb.save(folder / "a_plain.png")
    rgb.convert("CMYK").save(folder / "b_cmyk.jpg")
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(folder / "c_16bit.png")
    rgb.quantize(4).save(folder / "d_palette.png")
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(folder / "e_alpha.png")
    rgb.save(folder / "f_moves.gif", save_all=True, append_images=[Image.new("RGB", rgb.size)])
    (folder / "g_torn.png").write_bytes((folder / "a_plain.png").read_bytes()[:90])
    (folder / "h_text.jpg").write_text("not a picture")
    Image.fromarray(np.zeros((4, 4), np.float32)).save(folder / "i_float.tiff")
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb.save(folder / "j_turned.jpg", exif=exif)
    (folder / "notes.txt").write_text("no picture by name")


def test_mmrl_score_prints_a_row_per_picture_and_names_what_it_skipped(tmp_path, reward_file):
    folder = tmp_path / "pictures"
    folder.mkdir()
    folder_of_odd_pictures(folder)
    root = reward_file(
        "def score(samples, *, context):\n    s = samples[0]\n    assert s.image.mode == 'RGB'\n"
        "    if 'palette' in s.prompt.id: raise ValueError('no palettes')\n"
        "    r, g, b = s.image.resize((1, 1)).getpixel((0, 0))\n"
        "    return {'score': [r / 255], 'wide': [float(s.image.width)]}\n"
    )
    out = io.StringIO()
    missing = score_folder(str(root / "mine.py"), folder, console=Console(file=out, width=200))
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in out.getvalue().splitlines() if "\t" in line}
    assert missing == 4
    assert rows["file"] == ["score", "wide", "note"]
    assert rows["a_plain.png"][2] == ""
    assert "converted from CMYK" in rows["b_cmyk.jpg"][2]
    assert rows["c_16bit.png"] == [f"{0x80 / 255:.5g}", "4", "converted from 16-bit grey"]
    assert rows["d_palette.png"][:2] == ["-", "-"]
    assert re.match(r"failed: raised ValueError: no palettes at .*mine.py:4", rows["d_palette.png"][2])
    assert rows["e_alpha.png"] == ["1", "4", "RGBA laid on white"]
    assert "first of 2 frames" in rows["f_moves.gif"][2]
    assert rows["j_turned.jpg"][1:] == ["9", "turned as its EXIF says"]
    text = out.getvalue()
    assert "3 skipped: g_torn.png, h_text.jpg, i_float.tiff" in text
    assert "1 failed: d_palette.png" in text
    assert re.search(r"6 scored: mean \S+, min \S+, max 1\b", text)
    assert re.search(r"ms per picture \(median; .*memory up by \d+ MiB", text)


FRAMES = """
import mmrl

@mmrl.reward(inputs=("video",))
def score(samples, *, context):
    return [float(sum((i + 1) * frame.getpixel((0, 0))[0] for i, frame in enumerate(s.video))) for s in samples]
"""


def test_mmrl_score_gives_clips_to_a_reward_that_reads_them(tmp_path):
    (tmp_path / "mine.py").write_text(FRAMES)
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (10, 20, 90)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    frames[2].save(tmp_path / "b.png")
    (tmp_path / "c.webp").write_bytes(b"no clip")
    out = io.StringIO()
    missing = score_folder(str(tmp_path / "mine.py"), tmp_path, console=Console(file=out, width=200))
    lines = {line.split("\t")[0]: line.split("\t") for line in out.getvalue().splitlines()}
    assert missing == 1
    assert (float(lines["a.webp"][1]), float(lines["b.png"][1])) == (320.0, 90.0)
    assert "skipped" in "".join(lines["c.webp"])


LENGTHS = """
import mmrl

@mmrl.reward(inputs=("text",), per="group")
def score(samples, *, context):
    return [len(s.text) + (s.prompt.meta["level"] == "hard") + 10 * len(samples) for s in samples]

@mmrl.reward(inputs=("image",))
def looks(samples, *, context):
    return [1.0 for s in samples]
"""
RECORDS = [
    {"prompt": "a", "response": "four", "level": "hard"},
    {"prompt": "b", "response": "no", "level": "easy"},
    {"prompt": "a", "response": "three", "level": "easy", "rare": 1},
    {"prompt": "b", "response": 5, "level": "easy"},
    {"prompt": 7, "response": "no", "level": "easy"},
]


def test_mmrl_score_gives_responses_with_their_columns(tmp_path, recwarn):
    (tmp_path / "mine.py").write_text(LENGTHS)
    file = tmp_path / "said.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + "{torn\n")
    rows = measure(str(tmp_path / "mine.py"), responses(file), of="response").rows
    assert [row.score for row in rows] == [25, 12, 25, None, None, None]
    assert [row.note.partition(":")[0] for row in rows[3:]] == ["skipped"] * 3
    assert ["rare: not in every record" in str(one.message) for one in recwarn] == [True]
    trl = tmp_path / "trl.jsonl"
    said = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "yes"}]}
    trl.write_text(json.dumps(said | {"level": "hard"}))
    assert [row.score for row in measure(str(tmp_path / "mine.py"), responses(trl), of="response").rows] == [14]


def test_mmrl_score_refuses_what_does_not_fit_the_reward(tmp_path):
    (tmp_path / "mine.py").write_text(LENGTHS)
    file, nothing = tmp_path / "said.jsonl", tmp_path / "none.jsonl"
    file.write_text(json.dumps(RECORDS[0]))
    nothing.write_text('{"prompt": "a"}')
    Image.new("RGB", (4, 4)).save(tmp_path / "one.png")
    with pytest.raises(UserError, match=r"looks reads image, and a response has text; declare .*mine.py:\d+"):
        measure(str(tmp_path / "mine.py:looks"), responses(file), of="response")
    with pytest.raises(UserError, match="reads text, and a picture has none; give --responses"):
        score_folder(str(tmp_path / "mine.py"), tmp_path)
    with pytest.raises(UserError, match="its records have prompt; name the column"):
        responses(nothing)
    with pytest.raises(UserError, match="does not exist; give --responses a"):
        responses(tmp_path / "gone.jsonl")
    run = CliRunner()
    for arguments, said in (
        ([], "give --images a folder of pictures, or --responses"),
        (["--responses", str(file), "--prompts", str(file)], "remove --prompts"),
    ):
        found = run.invoke(app, ["score", "answer:number", *arguments])
        assert found.exit_code == 1
        assert said in str(found.exception)


def test_mmrl_score_shows_a_table_on_a_terminal_and_measures_memory(tmp_path, reward_file):
    Image.new("RGB", (4, 4)).save(tmp_path / "one.png")
    root = reward_file(
        "import time\ndef score(samples, *, context):\n    block = bytearray(64 * 2**20)\n"
        "    for i in range(0, len(block), 4096): block[i] = 1\n    time.sleep(0.3)\n    return [1.0]\n"
    )
    out = io.StringIO()
    assert score_folder(str(root / "mine.py"), tmp_path, console=Console(file=out, width=100, force_terminal=True)) == 0
    assert "│" in out.getvalue()
    assert int(re.search(r"memory up by (\d+) MiB", out.getvalue())[1]) >= 60


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "json"])
def test_mmrl_score_reads_prompts_as_lines_or_records(suffix, tmp_path, reward_file):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a", "b", "c"):
        Image.new("RGB", (4, 4)).save(folder / f"{name}.png")
    root = reward_file(
        "import mmrl\n@mmrl.reward(per='group')\n"
        "def score(samples, *, context):\n    return {'n': [len(samples)] * len(samples),"
        " 'words': [len(s.prompt.text.split()) + s.prompt.meta.get('add', 0) for s in samples]}\n"
    )
    path = tmp_path / f"prompts.{suffix}"
    records = [{"file": "c.png", "prompt": "one two", "meta": {"add": 10}}, {"file": "a.png", "prompt": "one two"}]
    if suffix == "txt":
        path.write_text("one two\nthree\none two\n\n")
    else:
        path.write_text(json.dumps(records) if suffix == "json" else "\n".join(map(json.dumps, records)))
    out = io.StringIO()
    missing = score_folder(str(root / "mine.py"), folder, path, console=Console(file=out, width=200))
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in out.getvalue().splitlines() if "\t" in line}
    assert rows["a.png"][1:3] == ["2", "2"]
    assert rows["c.png"][1:3] == ["2", "2" if suffix == "txt" else "12"]
    assert missing == (0 if suffix == "txt" else 1)
    assert rows["b.png"][1:3] == (["1", "1"] if suffix == "txt" else ["-", "-"])
    path.write_text("one\n" if suffix == "txt" else "[1]")
    with pytest.raises(UserError, match="1 lines for 3 pictures" if suffix == "txt" else "write a list of records"):
        score_folder(str(root / "mine.py"), folder, path, console=Console(file=out))


def test_the_reward_in_the_docs_runs(tmp_path):
    text = (REPO / "docs" / "rewards.md").read_text()
    code = re.search(r"```python\n# warm\.py\n(.*?)```", text, re.S)[1]
    assert len(code.strip().splitlines()) <= 10
    (tmp_path / "warm.py").write_text(code)
    rewards = RewardSet([Reward(name=str(tmp_path / "warm.py"), options={"strength": 2.0})])
    scores = score(rewards, samples(2, [(255, 0, 0), (0, 0, 255)]))
    assert scores.total.tolist() == [2.0, -2.0]
