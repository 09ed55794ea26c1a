"""Rewards cannot disturb one another: one that changes everything it can reach changes nothing for anybody else."""

import copy
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Reward
from mmrl.core.clock import Clock
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.data.loading import load_prompts
from mmrl.rewards import calling
from mmrl.rewards.scoring import RewardSet
from mmrl.rewards.serve import RewardServer
from mmrl.training import loop
from mmrl.training.evaluation import Evaluator
from tests.support import judging
from tests.support.reward_views import VANDAL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vandal")
    (folder / "vandal.py").write_text(VANDAL)
    return folder


def made(n=6, gradient=False):
    rng = np.random.default_rng(5)
    prompts = [
        Prompt(f"p{g}", f"prompt {g}", {"truth": {"colours": [1, 2, g]}, "pair": ({"a": [g]},)}, (media(g),))
        for g in range(2)
    ]
    return [
        Sample(
            prompts[k % 2],
            SampleId(3, k % 2, 0, k // 2),
            image=Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)),
            tensor=torch.from_numpy(rng.random((3, 8, 8), np.float32)).requires_grad_(gradient),
            text=f"text {k}",
            video=tuple(Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)) for _ in range(3)),
        )
        for k in range(n)
    ]


def media(g):
    return Media("image", data=bytes([g]) * 8, frames=(g,))


def content(samples):
    """All that can be told of them."""
    return [
        (
            *(s.prompt.id, s.prompt.text, copy.deepcopy(dict(s.prompt.meta)), s.prompt.media, s.prompt.system),
            *(s.id, s.text, s.truncated, s.tensor.tolist()),
            [(p.size, p.mode, p.tobytes(), dict(p.info)) for p in (s.image, *s.video)],
        )
        for s in samples
    ]


def rewards(folder, *names, **config):
    return RewardSet(
        [
            Reward(name=f"{folder}/vandal.py:{name}", weight=0.0 if "honest" not in name else 1.0, **config)
            for name in names
        ],
    )


GROUPS = [[0, 2, 4], [1, 3, 5]]


def test_neither_another_reward_nor_the_samples_see_what_a_reward_does(folder):
    honest = ["honest", "honest_of_groups"]
    alone = rewards(folder, *honest).score(made(), GROUPS)
    for _ in range(5):  # rewards run at once: who is first is chance
        samples = made()
        both = rewards(folder, "per_sample", "per_group", *honest, "in_a_loop", batch_size=2)
        scores = both.score(samples, GROUPS)
        both.close()
        assert not scores.failures
        assert torch.equal(scores.total, alone.total)
        assert all(torch.equal(scores.parts[label], alone.parts[label]) for label in honest)
        assert content(samples) == content(made())


def test_each_attempt_sees_the_samples_as_they_were(folder, monkeypatch):
    monkeypatch.setattr(calling, "BACKOFF_S", 0.0)
    calls = mmrl.load("rewards", str((folder / "vandal.py").resolve())).calls
    calls.clear()
    samples = made()
    again = rewards(folder, "at_last", retries=2)
    assert not again.score(samples, GROUPS).failures
    assert len(calls) == 3
    assert calls[0] == calls[1] == calls[2]
    assert content(samples) == content(made())


def test_gradients_pass_through_what_a_differentiable_reward_is_given(folder):
    samples, names = made(gradient=True), ["with_a_graph", "honest_with_a_graph"]
    parts = rewards(folder, *names).gradient_parts(samples)
    assert content(samples) == content(made(gradient=True))
    for name, expected in {
        "with_a_graph": [torch.full_like(s.tensor, -7.0) for s in samples],
        "honest_with_a_graph": [2 * 9 * s.tensor.detach() for s in samples],
    }.items():
        found = torch.autograd.grad(parts[name].sum(), [s.tensor for s in samples])
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["per_sample", "per_group"])
def test_a_served_reward_disturbs_nobody_either(folder, name):
    alone = rewards(folder, "honest").score(made(), GROUPS)
    with RewardServer(f"{folder}/vandal.py:{name}", port=0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        per = "group" if name == "per_group" else "sample"
        options = {"url": server.url, "per": per, "inputs": ["image", "video", "text", "tensor"]}
        both = RewardSet(
            [Reward(name="http:score", weight=0.0, options=options), Reward(name=f"{folder}/vandal.py:honest")]
        )
        samples = made()
        scores = both.score(samples, GROUPS)
        server.shutdown()
        both.close()
    assert not scores.failures
    assert torch.equal(scores.total, alone.total)
    assert content(samples) == content(made())


def test_a_judge_is_asked_about_the_samples_as_they_are(folder, tmp_path):
    """A model of random weights: any other question has another answer."""
    model = judging.text_model(tmp_path, words=["yes", "Yes", "no"])
    options = {"model": model, "rubric": "{{ response }} {{ meta.truth }}", "meta": ["truth"]}
    options["answer"] = {"type": "yes_no", "floor": 0}
    judge = Reward(name="judge", batch_size=1, options=options)
    beside = [Reward(name=f"{folder}/vandal.py:texts", label=label, weight=0.0, batch_size=1) for label in "ab"]

    def judged(*configs):
        prompts = [Prompt(str(k), "p", {"truth": {"of": [k]}}) for k in range(4)]
        samples = [Sample(p, SampleId(0, k, 0, 0), text=f"red {k}") for k, p in enumerate(prompts)]
        found = RewardSet(configs)
        scores = found.score(samples, [[k] for k in range(4)])
        found.close()
        assert not scores.failures
        return scores.parts["judge"].tolist()

    alone = judged(judge)
    assert len(set(alone)) == 4
    assert judged(beside[0], judge, beside[1]) == alone


SMALL = [
    *("train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=4", "sampling.steps=2"),
    "sampling.window={size: 1}",
]


def trained(*overrides, recipe="shapes-lora"):
    """Two steps and an evaluation: metrics without times, weights, and the samples that the grids show."""
    loaded = load_recipe([recipe], overrides)
    run = build(loaded.recipe)
    rows = []
    for n in range(2):
        row, failures = loop.train_step(run, n, Clock(torch.device("cpu")))
        assert not failures
        rows.append({k: v for k, v in row.items() if not k.startswith("reward/per_")})
    heldout = Evaluator(run, load_prompts(loaded.recipe, "heldout"))
    row, shown, failures = heldout.score(4)
    assert not failures
    told = [(s.prompt.text, json.dumps(s.prompt.meta), s.text) for s in shown.samples]
    pictures = [s.image and s.image.tobytes() for s in shown.samples]
    run.rewards.close()
    rows.append({k: v for k, v in row.items() if not k.startswith("reward/per_")})
    return rows, {k: p.detach().clone() for k, p in run.policy.trainable.items()}, (told, pictures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "reward", "overrides"),
    [
        ("shapes-lora", "{name: shapes}", SMALL),
        (
            "sums",
            "{name: 'answer:number', options: {after: 'answer:'}}",
            ["train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=4", "sampling.max_new_tokens=6"],
        ),
    ],
)
def test_training_and_grids_are_those_of_a_run_without_the_reward(tmp_path, recipe, reward, overrides):
    (tmp_path / "vandal.py").write_text(VANDAL.replace('READS = ("image", "video", "tensor", "text")', READS[recipe]))
    ruins = ", ".join(f"{{name: '{tmp_path}/vandal.py:{name}', weight: 0}}" for name in ("per_sample", "per_group"))
    alone = trained(f"rewards=[{reward}]", *overrides, recipe=recipe)
    beside = trained(f"rewards=[{ruins}, {reward}]", *overrides, recipe=recipe)
    assert beside[0] == alone[0]
    assert all(torch.equal(alone[1][k], beside[1][k]) for k in alone[1])
    assert beside[2] == alone[2]


READS = {"shapes-lora": 'READS = ("image", "tensor")', "sums": 'READS = ("text",)'}
