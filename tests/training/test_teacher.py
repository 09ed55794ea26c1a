"""A teacher beside a reward, or alone: its divergence and gradient, a run that learns from it, and what is refused."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from mmrl.app.build import build, restored
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.config.names import refuse_moved
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.logging.metrics import read_numbers
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan import plan
from mmrl.rollout.collect import collect_batch, slices
from mmrl.runtime.start import train
from mmrl.step.batch import rows_of_update
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import backward, computed, train_step
from tests.support import tiny
from tests.support.planning import LEFT_OUT, without_the_step
from tests.support.teachers import adapter, write_letters

allow_cpu_only()  # before transformers imports torchvision
RECIPE = """
name: taught
pipeline: llm/chat
model: {path: model, lora: {rank: 8, alpha: 12, targets: [q_proj, v_proj, down_proj]}}
data:
  mixture:
    - {name: jsonl, label: plain, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
    - {name: jsonl, label: other, train: {path: data.jsonl, heldout: 8}, heldout: null}
sampling: {max_new_tokens: 8}
teacher: {model: first}
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 4, prompts_per_step: 4, group_size: 2, micro_batch_size: 5}
optim: {lr: 3.0e-3}
eval: {every: null}
checkpoint: {every: 1}
device: cpu
"""

ONE_SET = "data={name: jsonl, train: {path: data.jsonl}, heldout: {path: data.jsonl}}"
OWN = """
from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.objective import Loss
from mmrl.config.algorithm_settings import TokenSettings


class Own:
    kind, needs, prepares, entries = "policy_gradient", frozenset({"log_probs"}), frozenset(), None

    def __init__(self, settings: TokenSettings) -> None: ...

    def advantages(self, scored):
        return group_advantages(scored.rewards, scored.groups, "group")

    def loss_denominator(self, weights, lengths):
        return float(weights.sum())

    def loss(self, new, old, total):
        value = (new["log_probs"] * old["mask"] * old["weights"].unsqueeze(1)).sum() / total
        return Loss(value, {}, {})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("taught")
    path = tiny.language_model(folder / "model")
    for n, name in enumerate(("first", "second")):
        adapter(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), folder / name, seed=n)
    adapter(AutoModelForCausalLM.from_pretrained(path), folder / "wide", rank=9)
    adapter(AutoModelForCausalLM.from_pretrained(path), folder / "elsewhere", targets=["k_proj"])
    write_letters(folder)
    (folder / "own.py").write_text(OWN)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def made(folder, *overrides):
    return load_recipe([folder / "recipe.yaml"], [*overrides])


def a_slice(run):
    """The first slice of the first update, and what the objective reads of it."""
    slots = run.controller.slots(0, run.prompts, run.recipe.train.prompts_per_step, run.rollout.cost)
    batch = collect_batch(run, slots, 0, Clock(torch.device("cpu")), StepMetrics(len(slots)))
    micro_batch = next(iter(slices(run, batch, rows_of_update(batch, 0, 1))))
    return micro_batch, computed(run, micro_batch, 0, StepMetrics())


def logits_of(model, rows):
    """By row, float64 logits before each token behind the prompt."""
    found = []
    for i, ids in enumerate(rows.tokens.split(rows.lengths)):
        with torch.no_grad():
            logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].double()
        found.append(logits[rows.prompts[i] - 1 : -1])
    return found


def closed_form(kind, p, q):
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    reverse, forward = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
    return {"reverse": reverse, "forward": forward, "mixed": (reverse + forward) / 2}[kind]


def check(run, micro_batch, new, teachers, kind="reverse"):
    """``teachers``: a model and its rows of the slice each."""
    from transformers import AutoModelForCausalLM

    rows = micro_batch.rows
    base = logits_of(AutoModelForCausalLM.from_pretrained(run.recipe.model.path, dtype=torch.float32), rows)
    expected = [torch.zeros(len(of), dtype=torch.float64) for of in base]
    for model, index in teachers:
        theirs = logits_of(model, rows)
        for i in index:
            expected[i] += closed_form(kind, base[i], theirs[i])  # a new adapter has no effect
    for i, of in enumerate(expected):
        assert torch.allclose(new["teacher_kl"][i, : len(of)].double(), of, atol=2e-5), i
    assert sum(of.sum() for of in expected) > 0.1


@pytest.mark.parametrize("how", ["reverse", "forward", "mixed"])
def test_a_lora_of_another_rank_and_scale_teaches_what_peft_computes_with_it(folder, how):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = build(made(folder, f"teacher.divergence={how}", f"train.packing={str(how == 'mixed').lower()}").recipe)
    micro_batch, new = a_slice(run)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    teacher = PeftModel.from_pretrained(base, folder / "first").eval()
    check(run, micro_batch, new, [(teacher, range(len(micro_batch.rows)))], how)


def test_a_whole_model_teaches(folder):
    from transformers import AutoModelForCausalLM

    run = build(made(folder, "teacher.model=large").recipe)
    micro_batch, new = a_slice(run)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "large", dtype=torch.float32)
    check(run, micro_batch, new, [(teacher, range(len(micro_batch.rows)))])
    seen = []
    run.pipeline._resting = SimpleNamespace(
        rest=lambda: seen.append("rest"), using=lambda *of: seen.append(len(of)) or nullcontext()
    )
    train_step(run, 0, Clock(torch.device("cpu")))
    assert seen[0] == "rest"  # it is away while samples are drawn, and there in the slices of the update
    assert set(seen[seen.index(1) :]) == {1}


def test_each_teacher_has_the_prompts_of_its_source_and_its_weight(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    listed = "teacher=[{model: first, prompts: plain, weight: 2}, {model: second, prompts: other}, {model: large}]"
    run = build(made(folder, listed, "train.prompts_per_step=6", "train.micro_batch_size=12").recipe)
    micro_batch, new = a_slice(run)
    of = [slot.prompt.id.partition("/")[0] for slot in micro_batch.rows.slots]
    mine = {label: [i for i, one in enumerate(of) if one == label] for label in ("plain", "other")}
    assert all(mine.values())
    taught = []
    for name, label in (("first", "plain"), ("second", "other")):
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        taught.append((PeftModel.from_pretrained(base, folder / name).eval(), mine[label]))
    large = AutoModelForCausalLM.from_pretrained(folder / "large", dtype=torch.float32)
    check(run, micro_batch, new, [*taught, (large, range(len(of)))])
    more = (new["teacher_loss"] - new["teacher_kl"]).detach()
    assert more[mine["plain"]].abs().max() > 0
    assert more[mine["other"]].abs().max() == 0


@pytest.mark.parametrize("how", ["reverse", "sampled"])
def test_the_gradient_of_a_step_is_that_of_the_divergence(folder, how):
    """By differences in the direction of the gradient; of the sampled token by hand."""
    run = build(made(folder, f"teacher.divergence={how}", "train.micro_batch_size=8").recipe)
    micro_batch, new = a_slice(run)
    total = float(micro_batch.old["weights"].sum())

    def value():
        new = computed(run, micro_batch, 0, StepMetrics())
        return run.objective.loss(new, micro_batch.old | {"log_probs": new["log_probs"].detach()}, total).value

    if how == "sampled":
        mask, kl = micro_batch.old["mask"], new["teacher_kl"].detach()
        by_hand = ((new["log_probs"] * kl * mask).sum(1) / mask.sum(1)).sum() / total
        expected = torch.autograd.grad(by_hand, list(run.policy.trainable.values()))
    backward(run, [micro_batch], total, 0, first=True)
    found = [p.grad.clone() for p in run.policy.trainable.values()]
    if how == "sampled":
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
        return
    slope, step = sum(g.square().sum() for g in found).item(), 1e-2
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, g in zip(run.policy.trainable.values(), found, strict=True):
                p.add_(sign * step * g)
            ends.append(value().item())
            for p, g in zip(run.policy.trainable.values(), found, strict=True):
                p.sub_(sign * step * g)
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=2e-2)


@pytest.mark.slow
def test_a_run_comes_nearer_to_its_teacher_and_resumes_exactly(folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    edits = ["train.steps=6", "optim.lr=2e-2"]
    train(made(folder, *edits), whole)
    train(made(folder, "train.steps=3", *edits[1:]), cut)
    train(made(folder, *edits), cut, resume=True)
    rows = [[row["teacher/kl"] for row in read_numbers(out / "metrics.jsonl")] for out in (whole, cut)]
    assert rows[0] == rows[1]
    assert rows[0][-1] < 0.7 * rows[0][0]


def test_beside_a_reward_both_are_in_the_loss(folder):
    edits = ["algorithm.aggregation=token_mean", "teacher={model: first, prompts: plain, weight: 0.5}"]
    run = build(made(folder, "rewards=[{name: reward.py}]", *edits).recipe)
    row = train_step(run, 0, Clock(torch.device("cpu")))[0]
    assert row["source/other/teacher/kl"] == 0
    assert row["source/plain/teacher/kl"] > row["teacher/kl"] > 0
    assert row["teacher/loss"] == pytest.approx(0.5 * row["teacher/kl"], rel=1e-6)
    assert row["teacher/kl"] > 0
    assert row["optim/grad_norm"] > 0
    watched = build(made(folder, "rewards=[{name: reward.py, weight: 0}]", "train.group_size=1").recipe)
    row = train_step(watched, 0, Clock(torch.device("cpu")))[0]
    assert row["policy/loss"] == 0
    assert row["teacher/kl"] > 0


def test_the_plan_counts_a_lora_as_an_adapter_and_a_model_once(folder):
    lora = plan(made(folder))
    roles = {role.name: role.bytes for role in lora.roles}
    assert not lora.problems
    assert roles["copy: teacher0"] == roles["gradients"]
    twice = plan(made(folder, "teacher=[{model: large, prompts: plain}, {model: large, prompts: other}]"))
    assert not twice.problems
    large = {role.name: role.bytes for role in twice.roles}["teacher"]
    assert large == pytest.approx((folder / "large" / "model.safetensors").stat().st_size, rel=0.03)
    there = plan(made(folder, "teacher.model=large", "device=auto"), gpu=GPUS["h100-80g"])
    assert [role.where for role in there.roles if role.name == "teacher"] == ["train, else in host memory"]
    assert twice.peak.total > lora.peak.total + 0.9 * large


REFUSED = {
    "no such source": (["teacher.prompts=none"], "'none' is no source of data.mixture", "teacher.prompts=plain"),
    "no mixture": (
        ["teacher.prompts=plain", ONE_SET],
        "it is empty",
        "teacher.prompts=null",
    ),
    "velocity of text": (["teacher.divergence=velocity"], "text has tokens", "teacher.divergence=mixed"),
    "offline": (
        ["algorithm={type: dpo}", "train.group_size=1"],
        "set algorithm.type to grpo",
        "algorithm={type: grpo}",
    ),
    "a loss of its own": (
        ["algorithm={type: own.py:Own}"],
        "derive its class from TokenObjective",
        "algorithm={type: grpo}",
    ),
    "no adapter to swap": (["model.lora=null"], "set model.lora, or name a whole model", "teacher.model=large"),
    "nothing to replace": (
        ["algorithm.drop_zero_std_groups=true"],
        "without a reward no group has an advantage",
        "algorithm.drop_zero_std_groups=false",
    ),
    "sharded": (["train.backend=fsdp", "controllers=2"], "set it to replicated", "train.backend=replicated"),
    "a larger rank": (["teacher.model=wide"], "set model.lora.rank to 9", "model.lora.rank=9"),
    "other modules": (
        ["teacher.model=elsewhere"],
        "add k_proj to model.lora.targets",
        "model.lora.targets=[q_proj, v_proj, down_proj, k_proj]",
    ),
    "another vocabulary": (["teacher.model=foreign"], "has another vocabulary", "teacher.model=large"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_teach_is_refused_by_the_plan_with_an_edit_that_works(folder, what):
    overrides, why, edit = REFUSED[what]

    def problems(*more):
        try:
            with without_the_step():
                return "\n".join(plan(made(folder, *overrides, *more)).problems)
        except (RecipeError, UserError) as error:
            return str(error)

    assert "teacher" in problems() or "algorithm" in problems()
    assert why in problems()
    assert problems(edit) == LEFT_OUT


def test_a_run_begins_only_where_its_teacher_is_and_is_looked_at_without_it(folder, tmp_path):
    with pytest.raises(RecipeError, match="teacher"):
        made(folder, f"teacher.model={tmp_path / 'never'}")
    shutil.copytree(folder / "first", tmp_path / "gone")
    train(made(folder, f"teacher.model={tmp_path / 'gone'}", "train.steps=1"), tmp_path / "run")
    shutil.rmtree(tmp_path / "gone")
    assert restored(tmp_path / "run", "latest")[2] == 1
    with pytest.raises(UserError, match="Put the file or folder back there"):
        refuse_moved(tmp_path / "run")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    pytest.importorskip("torchvision")
    from transformers import AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("seeing")
    path = tiny.vision_model(folder / "model", "qwen3_vl")
    tiny.vision_model(folder / "same", "qwen3_vl", seed=4)
    tiny.vision_model(folder / "other", "qwen2_5_vl")
    adapter(AutoModelForImageTextToText.from_pretrained(path), folder / "lora", targets=["q_proj"])
    Image.effect_noise((40, 40), 90).convert("RGB").save(folder / "picture.png")
    rows = [{"id": str(i), "prompt": f"Say {i}.", "images": ["picture.png"]} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = RECIPE.replace("llm/chat", "vlm/chat").replace("[q_proj, v_proj, down_proj]", "[q_proj]")
    (folder / "recipe.yaml").write_text(text.replace("first", "lora"))
    return folder


@pytest.mark.parametrize("teacher", ["lora", "same"])
def test_a_model_that_sees_is_taught_without_the_tokens_that_nobody_draws(seeing, teacher):
    """The divergence is that of the two distributions that a model that sees draws from."""
    edits = [f"teacher.model={teacher}", ONE_SET, "train.micro_batch_size=4"]
    loaded = load_recipe([seeing / "recipe.yaml"], edits)
    run = build(loaded.recipe)
    micro_batch, new = a_slice(run)
    rows, pipeline = micro_batch.rows, run.pipeline

    def logits(model):
        with torch.no_grad():
            return model(**pipeline._read(rows), use_cache=False).logits[:, -rows.width - 1 : -1].double()

    own = logits(pipeline.policy)
    if teacher == "lora":
        with run.policy.using("teacher0"):
            theirs = logits(pipeline.policy)
    else:
        theirs = logits(pipeline.teachers[loaded.recipe.teacher[0].model])
    drawn = [n for n in range(own.shape[-1]) if n not in pipeline.conditioner.forbidden]
    assert len(drawn) < own.shape[-1]
    expected = closed_form("reverse", own[..., drawn], theirs[..., drawn]) * rows.inside
    assert torch.allclose(new["teacher_kl"].double(), expected, atol=2e-5)
    assert expected.sum() > 0.1


def test_a_teacher_of_another_family_reads_pictures_in_another_way(seeing):
    found = plan(load_recipe([seeing / "recipe.yaml"], ["teacher.model=other", ONE_SET])).problems
    assert len(found) == 1
    assert "name a qwen3_vl, or remove teacher" in found[0]
    assert not plan(load_recipe([seeing / "recipe.yaml"], ["teacher.model=same", ONE_SET])).problems
