"""Bone Soup: the formulas against closed forms, and soups of real tiny models through the command line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline  # pyright: ignore[reportPrivateImportUsage]
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmrl.app.build import evaluate
from mmrl.app.export import export
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.studies.soup.evaluation import report
from mmrl.studies.soup.formulas import (
    combination,
    controllability,
    guaranteed_interval,
    hypervolume,
    merging_weights,
    pareto_front,
    sparsity,
)
from mmrl.studies.soup.merging import shares_beyond
from mmrl.studies.soup.page import write_page
from mmrl.studies.soup.record import Soup
from tests.support import tiny
from tests.support.cli import mmrl
from tests.support.tiny_diffusion import two_blocks

REWARDS = """
import os, pathlib, signal
import mmrl

@mmrl.reward(inputs=("text",))
def short(samples, *, context):
    try:
        pathlib.Path(__file__).with_name("stop").unlink()  # one of the two calls of a step, which run side by side
    except FileNotFoundError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
    return [-len(s.text) / 50 for s in samples]

@mmrl.reward(inputs=("text",))
def digits(samples, *, context):
    return [sum(c.isdigit() for c in s.text) / 10 for s in samples]

def red(samples, *, context):
    return [s.image.resize((1, 1)).getpixel((0, 0))[0] / 255 for s in samples]

def blue(samples, *, context):
    return [s.image.resize((1, 1)).getpixel((0, 0))[2] / 255 for s in samples]
"""
TEXT = """
name: tiny
pipeline: llm/chat
model: {path: tinylm, lora: {rank: 4, alpha: 12}}
data: {name: sums, train: {count: 20, operations: 1}, heldout: {count: 8, operations: 1}}
sampling: {max_new_tokens: 6}
rewards: [{name: "two.py:short", weight: 2}, {name: "two.py:digits"}, {name: "two.py:short", label: seen, weight: 0}]
algorithm: {type: grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
optim: {lr: 0.02, ema_decay: 0.5}
eval: {every: null, samples: 8}
"""
PICTURES = """
name: tiny
pipeline: diffusion/sd3
model: {path: MODEL}
data: {name: shapes}
sampling: {steps: 2, height: 32, width: 32, max_sequence_length: 12, guidance_scale: 1.0}
rewards: [{name: "two.py:red"}, {name: "two.py:blue"}]
algorithm: {type: flow_grpo}
train: {steps: 1, prompts_per_step: 1, group_size: 2, micro_batch_size: 2}
optim: {lr: 0.001}
eval: {every: null}
"""


@pytest.mark.parametrize(("n", "beta"), [(2, 0.6), (2, 0.9), (3, 0.7), (5, 0.5)])
def test_merging_weights_are_those_of_the_closed_form(n: int, beta: float) -> None:
    b, gamma = combination(n, beta), (1 - beta) / (n - 1)
    assert torch.equal(b, b.T)
    assert all(row == pytest.approx([beta if i == j else gamma for i in range(n)]) for j, row in enumerate(b.tolist()))
    mu = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    mu = (mu / mu.sum()).tolist()
    found = merging_weights(b, mu)
    assert found == pytest.approx([(m - gamma) / (beta - gamma) for m in mu])
    assert sum(found) == pytest.approx(1)
    assert merging_weights(b, [beta, *[gamma] * (n - 1)]) == [1, *[0] * (n - 1)]  # what a backbone was trained on


def test_extremes_extrapolate_where_that_is_allowed() -> None:
    b = combination(2, 0.7)
    assert merging_weights(b, [1, 0]) == pytest.approx([1.75, -0.75])
    assert merging_weights(b, [1, 0], extrapolate=False) == [1, 0]
    assert merging_weights(combination(3, 0.8), [0.5, 0.5, 0], extrapolate=False) == pytest.approx([0.5, 0.5, 0])
    assert merging_weights(combination(2, 1.0), [0.3, 0.7]) == pytest.approx([0.3, 0.7])  # Rewarded Soup


@pytest.mark.parametrize(("n", "beta"), [(2, 0.6), (2, 0.9), (3, 0.7), (5, 0.5)])
def test_beyond_the_backbones_each_reward_goes_its_own_factor_further_from_the_base(n: int, beta: float) -> None:
    b, rng = combination(n, beta), torch.Generator().manual_seed(n)
    mu = torch.rand(n, generator=rng, dtype=torch.float64)
    mu, shares = mu / mu.sum(), 0.5 * torch.rand(n, generator=rng, dtype=torch.float64)
    k = 1 / (1 - shares)
    expected = torch.zeros(n, dtype=torch.float64)
    for i, alone in enumerate(torch.eye(n, dtype=torch.float64).tolist()):  # as the authors' code adds them up
        expected += mu[i] * k[i] * torch.tensor(merging_weights(b, alone), dtype=torch.float64)
    found = merging_weights(b, mu.tolist(), beyond=shares.tolist())
    assert found == pytest.approx(expected.tolist())
    assert 1 - sum(found) == pytest.approx(((1 - k) * mu).sum().item())  # the base model's, in their code
    assert merging_weights(b, mu.tolist(), beyond=[0.0] * n) == merging_weights(b, mu.tolist())
    inside = merging_weights(b, mu.tolist(), extrapolate=False, beyond=shares.tolist())
    assert min(inside) >= 0
    assert sum(inside) == pytest.approx(sum(found))


def test_shares_beyond_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    soup = Soup(tmp_path, ("a", "b"), (1, 1), 0.7, ("r",), ())
    assert shares_beyond(soup, [0.2]) == [0.2, 0.2]
    assert shares_beyond(soup, []) == []
    with pytest.raises(UserError, match="give 1, or 2, one for each of a, b"):
        shares_beyond(soup, [0.1, 0.2, 0.3])
    with pytest.raises(UserError, match=r"--beyond 1: give numbers from 0 to below 1 .* or auto"):
        shares_beyond(soup, [1.0])


@pytest.mark.parametrize(("n", "beta"), [(2, 0.5), (3, 1 / 3), (2, 1.1), (2, math.nan)])
def test_a_beta_that_mixes_nothing_apart_is_refused(n: int, beta: float) -> None:
    with pytest.raises(UserError, match=r"--beta .* above 0\.\d+ and at most 1"):
        combination(n, beta)


class Quadratics:
    """``r_i = -(theta - a_i)' H_i (theta - a_i)`` with diagonal ``H_i``; the best ``theta`` for a mix is known."""

    def __init__(self, ratio: float) -> None:
        self.a = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]], dtype=torch.float64)
        self.h = torch.tensor([[ratio, 1.0, ratio], [1.0, ratio, ratio**2]], dtype=torch.float64)

    def best(self, mu: Tensor) -> Tensor:
        curved = mu[:, None] * self.h
        return (curved * self.a).sum(0) / curved.sum(0)

    def reward(self, mu: Tensor, theta: Tensor) -> float:
        return -(mu[:, None] * self.h * (theta - self.a) ** 2).sum().item()

    def gain(self, mu: list[float], beta: float) -> float:
        """How much better the bone soup is than Rewarded Soup."""
        wanted, soups = torch.tensor(mu, dtype=torch.float64), []
        for share in (beta, 1.0):
            b = combination(2, share)
            backbones = torch.stack([self.best(row) for row in b])
            merged = torch.tensor(merging_weights(b, mu), dtype=torch.float64) @ backbones
            soups.append(self.reward(wanted, merged))
        return soups[0] - soups[1]


@pytest.mark.parametrize("beta", [0.6, 0.7, 0.8])
def test_inside_the_interval_of_the_theorem_the_bone_soup_is_better(beta: float) -> None:
    low, high = guaranteed_interval(beta)
    assert high - low >= math.sqrt(0.5)
    inside = torch.linspace(low, high, 22)[1:-1].tolist()
    for ratio in (0.1, 0.97, 1.03, 10.0):
        assert min(Quadratics(ratio).gain([m, 1 - m], beta) for m in inside) > 0, ratio
    # Outside nothing is promised: with curvatures that are almost equal Rewarded Soup is better there.
    outside = [share * low for share in (0.0, 0.5, 0.95)]
    assert max(Quadratics(1.001).gain([m, 1 - m], beta) for m in outside) < 0
    assert max(Quadratics(1.001).gain([1 - m, m], beta) for m in outside) < 0
    assert Quadratics(10.0).gain([0.9 * low, 1 - 0.9 * low], beta) > 0  # and with different ones it is not


def test_the_measures_of_a_front() -> None:
    points = [(0.1, 0.9), (0.4, 0.4), (0.5, 0.7), (0.8, 0.3), (0.8, 0.2), (-0.5, 2.0)]
    assert pareto_front(points) == [(-0.5, 2.0), (0.1, 0.9), (0.5, 0.7), (0.8, 0.3)]
    corners = [(i + 0.5) / 20 for i in range(20)]  # the points lie on the grid's lines, so that counting is exact
    covered = sum(any(x < p and y < q for p, q in points) for x, y in product(corners, corners))
    assert hypervolume(points, (0.0, 0.0)) == pytest.approx(covered / 400)
    assert hypervolume([(1.0, 1.0)], (0.0, 1.0)) == 0
    assert sparsity([(0.0, 1.0), (0.5, 0.5), (0.4, 0.4), (1.0, 0.0)]) == pytest.approx((0.5 + 0.5) / 2)
    assert math.isnan(sparsity([(1.0, 1.0), (0.0, 0.0)]))
    assert controllability([(0.0, 1.0), (0.5, 0.5), (0.4, 0.6), (1.0, 0.6)]) == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soup")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "two.py").write_text(REWARDS)
    (folder / "text.yaml").write_text(TEXT)
    (folder / "pictures.yaml").write_text(PICTURES.replace("MODEL", str(two_blocks())))
    return folder


@pytest.fixture(scope="module")
def texts(root: Path) -> Path:
    """A soup of adapters, stopped in its first backbone and then resumed."""
    (root / "stop").touch()
    train = ["soup", "train", str(root / "text.yaml"), "--out", str(root / "texts")]
    assert mmrl(*train) == 0
    assert read(root / "texts" / "soup.json")["finished"] == []
    assert not (root / "texts" / "backbone-2").exists()
    steps = (root / "texts" / "backbone-1" / "metrics.jsonl").read_text()
    assert len(steps.splitlines()) == 1
    assert mmrl(*train, "--resume") == 0
    assert (root / "texts" / "backbone-1" / "metrics.jsonl").read_text().startswith(steps)
    return root / "texts"


@pytest.fixture(scope="module")
def pictures(root: Path) -> Path:
    """A soup of all weights."""
    assert mmrl("soup", "train", str(root / "pictures.yaml"), "--out", str(root / "pictures"), "--beta", "0.6") == 0
    return root / "pictures"


@pytest.fixture(scope="module")
def chosen(root: Path) -> Path:
    """A soup whose beta was chosen after a fifth of six steps, stopped in the first trial and then resumed."""
    train = ["soup", "train", str(root / "text.yaml"), "train.steps=6", "--out", str(root / "chosen"), "--beta", "auto"]
    (root / "stop").touch()
    assert mmrl(*train) == 0
    assert (root / "chosen" / "beta-0.6").exists()
    assert not (root / "chosen" / "soup.json").exists()
    assert mmrl(*train, "--resume") == 0
    return root / "chosen"


def read(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.slow
def test_each_backbone_is_an_ordinary_run_with_its_mix_of_rewards(texts: Path) -> None:
    said = read(texts / "soup.json")
    assert (said["rewards"], said["units"], said["beta"]) == (["short", "digits"], [2, 1], 0.7)
    assert said["finished"] == [1, 2]
    runs = [read(texts / name / "resolved.json") for name in said["backbones"]]
    assert [[r["weight"] for r in run["rewards"]] for run in runs] == [[1.4, 0.3, 0], [0.6, 0.7, 0]]
    for run in runs:
        run["rewards"] = None
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_resume_leaves_finished_backbones_alone(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {f: f.stat().st_mtime_ns for f in texts.rglob("*") if f.is_file() and f.name != "soup.json"}
    assert mmrl("soup", "train", str(texts.parent / "text.yaml"), "--out", str(texts), "--resume") == 0
    assert capsys.readouterr().err.count("is finished") == 2
    assert {f: f.stat().st_mtime_ns for f in before} == before


@pytest.mark.slow
def test_beta_is_the_one_whose_merges_have_the_largest_hypervolume(chosen: Path) -> None:
    said = read(chosen / "soup.json")
    assert [one["beta"] for one in said["trials"]] == [0.6, 0.7, 0.8, 1.0]
    merges = [read(chosen / f"beta-{one['beta']:g}" / "merges.json") for one in said["trials"]]
    fronts = [[(a, b) for a, b in one["rewards"]] for one in merges]
    worst = [min(point[i] for front in fronts for point in front) for i in (0, 1)]
    volumes = [hypervolume(front, (worst[0], worst[1])) for front in fronts]
    assert [one["hypervolume"] for one in said["trials"]] == volumes
    assert len(set(volumes)) > 1, "the trials differ, so that there is something to choose"
    assert said["beta"] == said["trials"][volumes.index(max(volumes))]["beta"]
    assert said["finished"] == [1, 2]
    others = [one["beta"] for one in said["trials"] if one["beta"] != said["beta"]]
    for trial in (chosen / f"beta-{beta:g}" / f"backbone-{j}" for beta in others for j in (1, 2)):
        assert len((trial / "metrics.jsonl").read_text().splitlines()) == 2  # a fifth of 6, rounded up


@pytest.mark.slow
def test_the_trial_of_the_chosen_beta_is_the_beginning_of_its_backbones(chosen: Path, tmp_path: Path) -> None:
    """Equal to the bit to a soup that had this beta from the beginning."""
    recipe, beta = str(chosen.parent / "text.yaml"), read(chosen / "soup.json")["beta"]
    straight = ["soup", "train", recipe, "train.steps=6", "--out", str(tmp_path / "straight"), "--beta", f"{beta:g}"]
    assert mmrl(*straight) == 0
    for j in (1, 2):
        assert not (chosen / f"beta-{beta:g}" / f"backbone-{j}").exists()
        one, two = (
            load_file(export(soup / f"backbone-{j}", tmp_path / name, "lora") / "adapter_model.safetensors")
            for soup, name in ((chosen, f"chosen-{j}"), (tmp_path / "straight", f"straight-{j}"))
        )
        assert all(torch.equal(one[k], two[k]) for k in two)


@pytest.mark.slow
def test_with_a_falling_rate_the_backbones_begin_anew(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate of every step depends on the number of steps, so a trial is no beginning of them."""
    falling = ["optim.schedule=linear", "eval.samples=2", "--out", str(root / "falling"), "--beta", "auto"]
    assert mmrl("soup", "train", str(root / "text.yaml"), *falling) == 0
    beta = read(root / "falling" / "soup.json")["beta"]
    assert f"training goes on with beta {beta:g}" in capsys.readouterr().err
    trial = root / "falling" / f"beta-{beta:g}"
    rows = [len((at / "backbone-1" / "metrics.jsonl").read_text().splitlines()) for at in (trial, trial.parent)]
    assert rows == [1, 2]


@pytest.mark.slow
def test_a_chosen_beta_stands(chosen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {f: f.stat().st_mtime_ns for f in chosen.rglob("*") if f.is_file() and f.name != "soup.json"}
    train = ["soup", "train", str(chosen.parent / "text.yaml"), "train.steps=6", "--out", str(chosen)]
    assert mmrl(*train, "--beta", "auto", "--resume") == 0
    assert capsys.readouterr().err.count("is finished") == 2
    assert {f: f.stat().st_mtime_ns for f in before} == before
    assert len(read(chosen / "soup.json")["trials"]) == 4
    other = next(beta for beta in ("0.6", "0.8") if float(beta) != read(chosen / "soup.json")["beta"])
    assert "--beta auto" in refused(capsys, *train[1:], "--beta", other, "--resume")


def deltas(folder: Path, base: Path) -> dict[str, Tensor]:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    return {name: layer.get_delta_weight("default") for name, layer in layers.items()}  # type: ignore[operator]


@pytest.mark.slow
def test_merged_adapters_are_the_sum_of_their_deltas(texts: Path, tmp_path: Path) -> None:
    base = texts.parent / "tinylm"
    one, two = (deltas(export(texts / f"backbone-{j}", tmp_path / f"{j}", "lora"), base) for j in (1, 2))
    merge = ["soup", "merge", str(texts), "--weights", "0.9,0.1"]
    assert mmrl(*merge, "--what", "lora", "--out", str(tmp_path / "adapter")) == 0
    found = deltas(tmp_path / "adapter", base)
    assert read(tmp_path / "adapter" / "adapter_config.json")["r"] == 8
    assert any((one[name] - two[name]).abs().max() > 1e-3 for name in one)
    for name, delta in found.items():
        torch.testing.assert_close(delta, 1.5 * one[name] - 0.5 * two[name], atol=1e-6, rtol=1e-5)
    assert mmrl(*merge, "--no-extrapolate", "--out", str(tmp_path / "whole")) == 0
    whole, plain = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "whole", base))
    for name, delta in one.items():
        key = f"{name.removeprefix('base_model.model.')}.weight"
        torch.testing.assert_close(whole[key], plain[key] + delta)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "| short | 0.9 | 0.7, 0.3 | 2 | 1 |" in card
    assert "weight 1.8," in card


@pytest.mark.slow
def test_how_far_to_go_beyond_is_chosen_by_each_reward(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merge = ["soup", "merge", str(texts), "--weights", "0.5,0.5", "--what", "lora", "--beyond", "auto"]
    assert mmrl(*merge, "--out", str(tmp_path / "made")) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("beyond", "backbones"))]
    best = []
    for line in lines[:2]:
        scores = {float(a): float(b) for a, b in re.findall(r"(0(?:\.\d)?): (-?[\d.]+)", line)}
        assert list(scores) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
        best.append(max(scores, key=lambda share: scores[share]))
    weights = merging_weights(combination(2, 0.7), (0.5, 0.5), beyond=best)
    assert [float(w) for w in re.findall(r"-?[\d.]+", lines[2])][:2] == pytest.approx(weights, abs=1e-3)
    base = texts.parent / "tinylm"
    one, two = (deltas(export(texts / f"backbone-{j}", tmp_path / f"{j}", "lora"), base) for j in (1, 2))
    for name, delta in deltas(tmp_path / "made", base).items():
        torch.testing.assert_close(delta, weights[0] * one[name] + weights[1] * two[name], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_merged_pictures_are_the_sum_of_all_weights(pictures: Path, tmp_path: Path) -> None:
    assert mmrl("soup", "merge", str(pictures), "--weights", "0.3,0.7", "--out", str(tmp_path / "merged")) == 0
    file = "transformer/diffusion_pytorch_model.safetensors"
    one, two = (load_file(export(pictures / f"backbone-{j}", tmp_path / f"{j}") / file) for j in (1, 2))
    found = load_file(tmp_path / "merged" / file)
    assert any(not torch.equal(one[k], two[k]) for k in one)
    for k, t in found.items():
        torch.testing.assert_close(t, -0.5 * one[k] + 1.5 * two[k])
    merge = ["soup", "merge", str(pictures), "--weights", "0.3,0.7", "--beyond", "0.2"]
    assert mmrl(*merge, "--out", str(tmp_path / "beyond")) == 0
    base, found = load_file(two_blocks() / file), load_file(tmp_path / "beyond" / file)
    for k, t in found.items():
        torch.testing.assert_close(t, 1.25 * (-0.5 * one[k] + 1.5 * two[k]) - 0.25 * base[k], atol=1e-6, rtol=1e-5)
    assert "The base model counts -0.25:" in (tmp_path / "beyond" / "README.md").read_text()
    pipe: Any = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a red circle", num_inference_steps=1, height=32, width=32).images[0].size == (32, 32)


@pytest.mark.slow
def test_the_report_measures_both_ways_to_merge(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mmrl("soup", "report", str(texts), "--points", "3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == read(texts / "soup_report.json")
    bone, direct = said["bone_soup"]["points"], said["direct"]["points"]
    assert [one["lambda"] for one in bone] == [[-0.75, 1.75], [0.5, 0.5], [1.75, -0.75]]
    assert bone[1]["rewards"] == direct[1]["rewards"]
    for j, one in ((1, direct[2]), (2, direct[0])):
        alone = evaluate(texts / f"backbone-{j}")
        assert one["rewards"] == [alone["reward/short"], alone["reward/digits"]]
    units = [[(2 * one["rewards"][0], one["rewards"][1]) for one in soup] for soup in (bone, direct)]
    worst = [min(p[i] for soup in units for p in soup) for i in (0, 1)]
    assert said["reference"] == worst
    for name, points in zip(("bone_soup", "direct"), units, strict=True):
        assert said[name]["hypervolume"] == hypervolume(points, (worst[0], worst[1]))
    assert mmrl("soup", "report", str(texts), "--points", "2", "--samples", "4") == 0
    shown = capsys.readouterr().out
    assert "short and digits: means of 4 held-out samples" in shown
    assert "lambda = mu: hypervolume" in shown
    assert "backbone of digits: " in shown


@pytest.fixture(scope="module")
def rewarded(root: Path) -> Path:
    """A Rewarded Soup of the same recipe."""
    assert mmrl("soup", "train", str(root / "text.yaml"), "--out", str(root / "rewarded"), "--beta", "1") == 0
    return root / "rewarded"


@pytest.mark.slow
def test_the_report_stands_beside_another_soup_and_a_run(
    texts: Path, rewarded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = str(texts.parent / "text.yaml"), tmp_path / "mix"
    assert mmrl("train", recipe, "rewards[0].weight=1", "rewards[1].weight=0.5", "eval.every=2", "--out", str(run)) == 0
    capsys.readouterr()
    report = ["soup", "report", str(texts), "--points", "3", "--json"]
    assert mmrl(*report, "--beside", str(rewarded), "--beside", str(run)) == 0
    said = json.loads(capsys.readouterr().out)
    soup, alone = said["beside"]
    assert (soup["beta"], alone["beta"]) == (1.0, None)
    assert [one["lambda"] for one in soup["points"]] == [[0, 1], [0.5, 0.5], [1, 0]]
    for number, one in ((2, soup["points"][0]), (1, soup["points"][2])):
        measured = evaluate(rewarded / f"backbone-{number}")
        assert one["rewards"] == [measured["reward/short"], measured["reward/digits"]]
    assert alone["rewards"] == [evaluate(run)[f"reward/{label}"] for label in ("short", "digits")]
    backbones = [
        [evaluate(texts / f"backbone-{j}")[f"reward/{label}"] for label in ("short", "digits")] for j in (1, 2)
    ]
    assert [one["rewards"] for one in said["backbones"]] == backbones
    every = [p["rewards"] for name in ("bone_soup", "direct") for p in said[name]["points"]]
    every += [p["rewards"] for p in soup["points"]] + [alone["rewards"]]
    worst = min(2 * p[0] for p in every), min(p[1] for p in every)
    assert said["reference"] == list(worst)
    points = [(2 * p["rewards"][0], p["rewards"][1]) for p in soup["points"]]
    assert soup["hypervolume"] == hypervolume(points, worst)
    assert alone["hypervolume"] == hypervolume([(2 * alone["rewards"][0], alone["rewards"][1])], worst)


@pytest.mark.slow
def test_what_is_measured_on_other_samples_is_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(texts.parent / "text.yaml")
    for changes, why in (
        (["sampling.max_new_tokens=5"], "its settings of sampling differ"),
        (["rewards[1].label=other"], "this run has no reward digits"),
    ):
        run = tmp_path / changes[0].replace("=", "-")
        assert mmrl("train", recipe, *changes, "train.steps=1", "--out", str(run)) == 0
        assert why in refused(capsys, "report", str(texts), "--beside", str(run))


@pytest.mark.slow
def test_the_slider_of_the_page_switches_between_merges(root: Path, tmp_path: Path, browser: Any) -> None:
    far = ["optim.lr=0.1", "--out", str(tmp_path / "far")]  # so that the merges draw different pictures
    assert mmrl("soup", "train", str(root / "pictures.yaml"), *far) == 0
    assert mmrl("soup", "report", str(tmp_path / "far"), "--points", "3", "--samples", "4") == 0
    page = tmp_path / "far" / "soup_report.html"
    assert "://" not in page.read_text(), "nothing is loaded from elsewhere"
    said = read(tmp_path / "far" / "soup_report.json")
    browser.tell("Page.enable")
    browser.tell("Page.navigate", url=page.as_uri())
    visible = "[...one.querySelectorAll('img')].findIndex(image => image.checkVisibility())"
    shown = f"[...document.querySelectorAll('.pair')].map(one => {visible})"
    browser.until("document.readyState", "complete")
    browser.until(f"JSON.stringify({shown})", "[1,1,1,1]")
    sources = "[...document.querySelector('.pair').querySelectorAll('img')].map(one => one.src)"
    assert len(set(browser.value(sources))) == 3, "each merge draws another picture from the same noise"
    assert browser.value("document.querySelector('.pair img').naturalWidth") == 32
    places = set()
    for number, name in enumerate(("0 red, 1 blue", "0.5 red, 0.5 blue", "1 red, 0 blue")):
        move = f"at.value = {number}; at.dispatchEvent(new Event('input')); {shown}"
        assert browser.value(move) == [number] * 4
        assert browser.value("said.textContent") == name
        places.add(browser.value("here.getAttribute('cx')"))
    assert len(places) == len({one["rewards"][0] for one in said["bone_soup"]["points"]})


@pytest.mark.slow
def test_the_page_shows_texts_as_text_only(texts: Path, browser: Any) -> None:
    hostile = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
    assert mmrl("soup", "report", str(texts), "--points", "2", "--samples", "4") == 0
    made = report(texts, 2, 4)
    for one in made.kept:
        one.samples[0] = replace(one.samples[0], prompt=Prompt(hostile, hostile), text=hostile)
    page = write_page(made)
    browser.tell("Page.enable")
    browser.tell("Page.navigate", url=page.as_uri())
    browser.until("document.readyState", "complete")
    assert browser.value("document.title") == "short and digits · mmrl soup"
    first = "document.querySelector('.pair')"
    assert browser.value(f"{first}.querySelector('[data-frame]:not([hidden]) .text').textContent") == hostile
    assert browser.value(f"{first}.querySelectorAll('script, img').length") == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert mmrl("soup", *arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_recipe_that_cannot_be_a_soup_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", str(root / "text.yaml"), "--out", str(tmp_path / "x")]
    assert "at least two rewards" in refused(capsys, *train, "rewards[1].weight=0")
    assert "this one has short" in refused(capsys, *train, "--rewards", "short")
    assert "seen has weight 0" in refused(capsys, *train, "--rewards", "short,seen")
    assert "other is no reward of this recipe; it has short, digits" in refused(capsys, *train, "--rewards", "other")
    assert "named twice" in refused(capsys, *train, "--rewards", "short,short")
    assert "--beta 0.5: with 2 rewards it is above 0.5" in refused(capsys, *train, "--beta", "0.5")
    assert "there is no soup" in refused(capsys, *train, "--resume")
    assert "there is no soup" in refused(capsys, *train, "--resume", "--beta", "auto")
    assert "--beta half: give a number above 1/n and at most 1 (0.7, say), or auto" in refused(
        capsys, *train, "--beta", "half"
    )
    three = refused(capsys, *train, "rewards[2].weight=1", "--beta", "auto")
    assert "compares two rewards, and this soup has 3 (short, digits, seen)" in three
    offline = ["train", "sums-dpo", "--out", str(tmp_path / "x")]
    assert "trains on given data" in refused(capsys, *offline)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_another_soup_is_not_overwritten_or_mixed(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", str(texts.parent / "text.yaml"), "--out", str(texts)]
    assert "already holds a soup; continue it with --resume" in refused(capsys, *train)
    assert "already holds a soup; continue it with --resume" in refused(capsys, *train, "--beta", "auto")
    begun = refused(capsys, *train, "--beta", "auto", "--resume")
    assert "was begun with beta 0.7; continue with:" in begun
    other = refused(capsys, *train, "--resume", "--beta", "0.8")
    assert "beta 0.7 and the rewards short (weight 2), digits (weight 1), not beta 0.8" in other
    here = ["train", str(texts.parent / "text.yaml"), "--out", str(texts.parent)]
    assert "is not empty and has no soup.json" in refused(capsys, *here)


@pytest.mark.slow
def test_a_merge_that_cannot_be_is_refused(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def merge(weights: str, *more: str, soup: Path = texts) -> str:
        return refused(capsys, "merge", str(soup), "--weights", weights, "--out", str(tmp_path / "out"), *more)

    assert "the sum is 0.9, and has to be 1" in merge("0.3,0.6")
    assert "there are 3 numbers; give 2, one for each of short, digits" in merge("0.3,0.3,0.4")
    assert "give numbers from 0 to 1" in merge("-0.5,1.5")
    assert "give numbers with commas" in merge("half,half")
    assert "--checkpoint base" in merge("0.5,0.5", "--checkpoint", "base")
    assert "is no soup" in merge("0.5,0.5", soup=tmp_path)
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / "soup.json").write_text((texts / "soup.json").read_text())
    (lost / "backbone-1").symlink_to(texts / "backbone-1")
    said = merge("0.5,0.5", soup=lost)
    assert "backbone-2 is missing" in said
    assert f"--out {lost} --beta 0.7 --rewards short,digits --resume" in said
    assert not (tmp_path / "out").exists()


def test_a_report_of_three_rewards_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {"rewards": ["a", "b", "c"], "units": [1, 1, 1], "beta": 0.7, "recipe": ["r.yaml"]}
    (tmp_path / "soup.json").write_text(json.dumps({**said, "overrides": [], "finished": []}))
    assert "compares two rewards" in refused(capsys, "report", str(tmp_path))
