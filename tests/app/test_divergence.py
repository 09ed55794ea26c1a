"""Numbers that are not finite are named where they first are, and the last finite checkpoint stays."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.app.build import build
from mmrl.app.divergence import Divergence, divergence, settle
from mmrl.checkpoint.writer import Saver
from mmrl.config.loader import load_recipe
from mmrl.core import checkpoint_reader as reader
from mmrl.core.clock import Clock
from mmrl.core.errors import NotFiniteError, UserError
from mmrl.core.nan_check import check_tokens
from mmrl.core.trajectory import SampleId
from mmrl.logging.rundir import RunDir
from mmrl.models.text.token_sampling import Draw, choose
from mmrl.planner.plan import plan
from mmrl.report.html import write_report
from mmrl.runtime import start
from mmrl.training import loop
from tests.support import tiny
from tests.support.checkpoint import make as saved_tensors
from tests.support.divergence import PICTURES
from tests.support.tiny_diffusion import SHAPES

REWARD = """
import mmrl

@mmrl.reward(inputs=())
def large(samples, *, context):
    return [1e40 * s.id.sample for s in samples]

@mmrl.reward(inputs=())
def number(samples, *, context):
    return [float(s.id.sample) for s in samples]
"""
TEXT = """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 4}, heldout: {path: data.jsonl, heldout: 4}}
sampling: {max_new_tokens: 6}
rewards: [{name: reward.py:number}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 6, prompts_per_step: 1, group_size: 4, micro_batch_size: 4}
optim: {lr: 1.0e-3, max_grad_norm: 1.0e+30}
eval: {every: null}
checkpoint: {every: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diverged")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(TEXT)
    return folder


def loaded(folder, kind, *overrides):
    if kind == "text":
        return load_recipe([folder / "recipe.yaml"], list(overrides))
    rewards = f"rewards=[{{name: '{folder}/reward.py:number'}}]"
    return load_recipe(["shapes-lora"], [*PICTURES, rewards, *overrides])


def make(folder, kind, *overrides):
    of = loaded(folder, kind, *overrides)
    return build(of.recipe)


def step(run, number=0):
    return loop.train_step(run, number, Clock(torch.device("cpu")))[0]


def rows(out, name="metrics.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()] if (out / name).exists() else []


@pytest.fixture(scope="module", params=["text", "picture"])
def diverged(request, folder, tmp_path_factory):
    """A run of two good steps that goes on with an absurd learning rate."""
    out = tmp_path_factory.mktemp("run") / "run"
    start.train(loaded(folder, request.param, "train.steps=2"), out)
    settings = json.loads((out / "resolved.json").read_text())
    settings["optim"]["lr"] = 1e30  # only a run that has diverged may change it
    (out / "resolved.json").write_text(json.dumps(settings))
    with pytest.raises(UserError) as error:
        start.train(loaded(folder, request.param, "optim.lr=1e30", "train.steps=6"), out, resume=True)
    return SimpleNamespace(out=out, kind=request.param, said=str(error.value))


@pytest.mark.slow
def test_an_absurd_learning_rate_is_named_and_the_last_finite_checkpoint_stays(diverged):
    said = diverged.said
    what = {"text": "the gradient norm of update 3 is nan", "picture": "the latents after denoising step 1"}[
        diverged.kind
    ]
    assert f"training diverged in step 4 at learning rate 1e+30: {what}" in said
    assert "the last finite checkpoint is of step 2, and is kept" in said
    assert "lower optim.lr or optim.max_grad_norm" in said
    assert "optim.lr=1e+29 --resume" in said
    assert "same batch shapes" not in said
    found, skipped = reader.load_latest(diverged.out / "checkpoints")
    assert found is not None
    assert found.step == 2
    assert all(torch.isfinite(t).all() for of in found.tensors.values() for t in of.values())
    assert len(skipped) == 1
    assert "checkpoint step_000003 is not used, because training diverged after it: step 4" in skipped[0]
    assert [row["step"] for row in rows(diverged.out)] == [1, 2, 3]
    (failure,) = rows(diverged.out, "failures.jsonl")
    assert (failure["kind"], failure["step"], failure["lr"]) == ("diverged", 4, 1e30)
    assert "diverged" in write_report(diverged.out).read_text()


@pytest.mark.slow
def test_it_goes_on_with_a_lower_learning_rate_from_there(diverged, folder, capsys):
    before = rows(diverged.out)
    again = loaded(folder, diverged.kind, "optim.lr=1e-5", "train.steps=4", "optim.max_grad_norm=0.5")
    start.train(again, diverged.out, resume=True)
    said = capsys.readouterr().err
    assert "step_000003 is not used" in said
    assert "resuming after step 2" in said
    after = rows(diverged.out)
    assert [row["step"] for row in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert after[2]["optim/lr"] == 1e-5
    assert all(math.isfinite(row["optim/grad_norm"]) for row in after)
    assert rows(diverged.out, "failures.jsonl") == []
    found, skipped = reader.load_latest(diverged.out / "checkpoints")
    assert found is not None
    assert (found.step, skipped) == (4, [])
    with pytest.raises(
        UserError, match=r"optim\.lr, optim\.max_grad_norm differ"
    ):  # as of any run that has not diverged
        start.train(loaded(folder, diverged.kind, "optim.lr=1e-6", "train.steps=5"), diverged.out, resume=True)


def test_keep_one_and_no_evaluation_keep_the_checkpoint_before_the_newest(tmp_path):
    saver = Saver(tmp_path, keep=1)
    for number, proved, there in ((1, False, [1]), (2, False, [1, 2]), (3, False, [2, 3]), (4, True, [4])):
        saver.begin(saved_tensors(number), proved=proved)
        saver.finish()
        assert reader.steps(tmp_path) == there


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_checkpoint_that_is_not_finite_is_not_written(tmp_path, part):
    saver = Saver(tmp_path, keep=1)
    saver.begin(saved_tensors(1))
    bad = saved_tensors(2)
    bad.tensors[part]["a"] = torch.tensor([1.0, math.inf])
    with pytest.raises(NotFiniteError, match=rf"step 2 is not finite.*{part}/a \(inf\)"):
        saver.begin(bad)
    saver.finish()
    assert (reader.steps(tmp_path), saver.saved) == ([1], 1)


def test_checkpoints_of_an_attempt_that_is_repeated_take_no_place(tmp_path):
    saver = Saver(tmp_path, keep=2)
    for number in (4, 6, 8):
        saver.begin(saved_tensors(number))
        saver.finish()
    (tmp_path / "step_000006" / "weights.safetensors").write_bytes(b"")
    (tmp_path / "step_000008" / "weights.safetensors").write_bytes(b"")
    for number in (5, 7):
        saver.begin(saved_tensors(number))
        saver.finish()
    found, _ = reader.load_latest(tmp_path)
    assert found is not None
    assert found.step == 7
    assert 5 in reader.steps(tmp_path)


def poison(parameters, name="lora_B"):
    found, p = next((k, p) for k, p in parameters.items() if name in k or name == "")
    with torch.no_grad():
        p.view(-1)[0] = math.nan
    return found


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_a_gradient_is_named_by_its_parameter(folder, kind):
    run = make(folder, kind)
    name, parameter = list(run.policy.trainable.items())[-1]
    parameter.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), math.nan))
    before = {k: p.detach().clone() for k, p in run.policy.trainable.items()}
    with pytest.raises(NotFiniteError) as error:
        step(run)
    assert f"the gradient norm of update 0 is nan; the first such gradient is of {name} (nan)" in str(error.value)
    assert all(torch.equal(before[k], p) for k, p in run.policy.trainable.items())


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_weights_are_named_where_an_update_ruins_them(folder, kind):
    run = make(folder, kind)
    optimize = run.policy.optimizer.step

    def ruin():
        optimize()
        ruin.name = poison(run.policy.trainable, "")

    run.policy.optimizer.step = ruin
    with pytest.raises(NotFiniteError) as error:
        step(run)
    assert str(error.value) == f"the weights after update 1 are not finite: {ruin.name} (nan)"


def test_weights_that_were_loaded_so_are_named_before_what_they_made(folder, tmp_path):
    of = loaded(folder, "text")
    poisoned = tmp_path / "model"
    shutil.copytree(folder / "model", poisoned)
    tensors = load_file(poisoned / "model.safetensors")
    name = next(k for k in tensors if "layers.1" in k)
    tensors[name].view(-1)[0] = math.nan
    save_file(tensors, poisoned / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        start.train(load_recipe(of.paths, [f"model.path={poisoned}"]), tmp_path / "run")
    said = str(error.value)
    assert (
        f"in step 1, before the first update: a weight of the model is not finite: {name} (nan); so the logits" in said
    )
    assert "optim.lr" not in said
    assert f"repair the weights in model.path ({poisoned})" in said


BEFORE = {
    "transformer": ("a weight of the model is not finite: .*; so the latents", "repair the weights in model.path"),
    "vae": ("a weight of the VAE is not finite: .*; so the pictures", "repair the weights of the VAE in model.path"),
    "text_encoder": ("a weight of the text encoder 1 is not finite: ", "repair the weights of the text encoder 1 in"),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", BEFORE)
def test_a_picture_checkpoint_that_was_loaded_so_is_named(tmp_path, part):
    model = tmp_path / "model"
    shutil.copytree(SHAPES, model)
    (file,) = (model / part).glob("*.safetensors")
    tensors = load_file(file)
    name = next(k for k in sorted(tensors, reverse=True) if not k.startswith("encoder"))
    tensors[name].fill_(math.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    of = load_recipe(["shapes-lora"], [*PICTURES, f"model.path={model}"])
    with pytest.raises(UserError) as error:
        start.train(of, tmp_path / "run")
    said, (what, edit) = str(error.value), BEFORE[part]
    assert re.search(f"before the first update: {what}", said), said
    assert edit in said
    assert "optim.lr" not in said
    assert "learning rate" not in said


FIRST = {
    "the latents after denoising step 1 of 3": "scheduler/scheduler_config.json",
    "the pictures that the autoencoder decoded": "vae/config.json",
    "the features of the prompt 3": "text encoders",
    "the loss is not finite": "rewards",
    "the gradient norm of update 0": "the loss was finite: look at the checkpoint",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FIRST)
@pytest.mark.parametrize("updates", [0, 1])
def test_before_the_first_update_no_lower_rate_is_advised(folder, tmp_path, what, updates):
    run = make(folder, "picture")
    run.policy.updates = updates
    found = divergence(run, NotFiniteError(f"{what} is nan"), updates, evaluating=False, proved=False)
    with RunDir.create(tmp_path / "run") as directory:
        said = settle(directory, found, run.recipe, "mmrl train shapes-lora")
    assert (FIRST[what] in said, "lower optim.lr" in said) == (updates == 0, updates == 1)


@pytest.mark.parametrize(("recipe", "named"), [("shapes-draft", True), ("shapes-full", False)])
def test_rewards_gradients_are_named_where_an_algorithm_follows_them(tmp_path, recipe, named):
    found = Divergence("the gradient norm of update 0 is nan", 1, False, 1e-4, 0, proved=False, trained=False)
    with RunDir.create(tmp_path / "run") as directory:
        said = settle(directory, found, load_recipe([recipe]).recipe, f"mmrl train {recipe}")
    assert ("and at the rewards' gradients" in said) == named


def test_logits_are_named_by_token_and_sample(folder):
    run = make(folder, "text")
    forward, calls = run.pipeline.policy.forward, []

    def broken(*given, **named):
        out = forward(*given, **named)
        calls.append(0)
        if len(calls) == 3:
            out.logits[2, -1, 5] = math.inf
        return out

    run.pipeline.policy.forward = broken
    with pytest.raises(NotFiniteError) as error:
        step(run)
    assert "token 3 of a response was drawn from are not finite (slot 0, sample 2; 1 of 4 samples" in str(error.value)


@pytest.mark.parametrize("top", [{}, {"top_p": 0.9}, {"top_k": 3}])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_draw_a_token_of_the_vocabulary(top, temperature):
    u = torch.tensor([[0.0], [0.5], [1 - 2**-53]], dtype=torch.float64)
    for bad in (math.nan, math.inf):
        scores = torch.randn(3, 300)
        scores[1, 7] = bad
        draw = Draw(u, temperature, **top)
        token = draw(torch.zeros(3, 1), scores.clone()).argmax(-1)
        assert ((token >= 0) & (token < 300)).all()
        assert draw.log_probs[0].isfinite().tolist() == [True, False, True]
        alone = Draw(u[:1], temperature, **top)
        assert alone(torch.zeros(1, 1), scores[:1].clone()).argmax(-1)[0] == token[0]
    assert choose(torch.full((2, 300), math.nan), u[:2, 0]).max() < 300


def test_latents_are_named_by_denoising_step_and_sample(folder):
    run = make(folder, "picture")
    velocity, calls = run.pipeline.velocity, []

    def broken(*given):
        v = velocity(*given)
        calls.append(0)
        if len(calls) == 2:
            v[1] = math.nan
        return v

    run.pipeline.velocity = broken
    with pytest.raises(NotFiniteError, match=r"latents after denoising step 2 of 3 .*\(slot 0, sample 1; 1 of 4"):
        step(run)


def test_pictures_are_named_where_the_autoencoder_ruins_them(folder):
    run = make(folder, "picture")
    decode = run.pipeline.adapter.decode
    run.pipeline.adapter.decode = lambda x: decode(x) * torch.tensor([1.0, 1.0, 1.0, math.nan]).view(-1, 1, 1, 1)
    with pytest.raises(NotFiniteError, match=r"the pictures that the autoencoder decoded .*sample 3; 1 of 4"):
        step(run)


def test_a_picture_that_a_gradient_goes_through_is_named_too(folder):
    reward = "rewards=[{name: 'colour:target', options: {rgb: [60, 95, 235]}}]"
    run = make(folder, "picture", "algorithm={type: draft}", "sampling.window=null", "train.group_size=1", reward)
    decode = run.pipeline.adapter.decode
    run.pipeline.adapter.decode = lambda x: decode(x) * math.nan
    with pytest.raises(NotFiniteError, match=r"the pictures that the autoencoder decoded .*sample 0; 1 of 1"):
        step(run)


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_a_loss_is_named_before_its_gradient(folder, kind):
    run = make(folder, kind)
    loss = run.objective.loss

    def broken(new, old, total):
        return loss(new, old | {"advantages": old["advantages"] * math.nan}, total)

    run.objective.loss = broken
    with pytest.raises(NotFiniteError, match=r"the loss is not finite: policy/loss is nan"):
        step(run)


@pytest.mark.parametrize("kind", ["text", "picture"])
def test_a_log_prob_of_the_update_is_no_matter_of_batch_shapes(folder, kind):
    run = make(folder, kind)
    replay = run.pipeline.replay

    def broken(*given):
        out = replay(*given)
        return out | {"log_probs": out["log_probs"] * math.nan}

    run.pipeline.replay = broken
    with pytest.raises(NotFiniteError, match="a log-probability that the update computed anew is not finite"):
        step(run)


@pytest.mark.slow
def test_a_diverged_evaluation_is_named_and_nothing_is_saved_after_it(folder, tmp_path):
    out, of = tmp_path / "run", ("eval.every=1", "eval.samples=1", "eval.grid=1")
    with pytest.raises(UserError) as error:
        start.train(loaded(folder, "picture", *of, "optim.lr=1e30"), out)
    said = str(error.value)
    assert "training diverged in the evaluation after step 1 at learning rate 1e+30" in said
    assert "there is no checkpoint yet: --resume starts again at step 0" in said
    assert reader.steps(out / "checkpoints") == []
    start.train(loaded(folder, "picture", *of, "optim.lr=1e-4", "train.steps=1"), out, resume=True)
    assert [row["step"] for row in rows(out)] == [1]


def test_rewards_that_leave_the_range_of_numbers_are_named(folder):
    run = make(folder, "text", "rewards=[{name: 'reward.py:large', normalize: batch}]")
    with pytest.raises(UserError, match=r"returned 1e\+40.*normalize: batch.*keep both below 1e\+30") as error:
        step(run)
    assert not isinstance(error.value, NotFiniteError)


def test_a_critic_is_named(folder):
    run = make(folder, "text", "algorithm={type: ppo, critic_lr: 1.0e-3}")
    assert run.critic is not None
    next(iter(run.critic.trainable.values())).register_hook(lambda grad: grad * math.nan)
    with pytest.raises(NotFiniteError, match="the critic: the gradient norm of update 0 is nan"):
        step(run)


def test_what_is_outside_the_mask_may_be_anything():
    ids = [SampleId(0, 0, 0, k) for k in range(2)]
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    check_tokens(torch.tensor([[0.0, math.nan], [0.0, 0.0]]), mask, ids)
    with pytest.raises(NotFiniteError, match=r"token 2 .*sample 1"):
        check_tokens(torch.tensor([[0.0, math.nan], [0.0, math.nan]]), mask, ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "picture"])
def test_a_plan_still_knows_the_memory(folder, kind):
    """It runs a step on tensors without data, of which nobody can say whether they are finite."""
    planned = plan(loaded(folder, kind))
    assert planned.measured is not None, planned.notes
