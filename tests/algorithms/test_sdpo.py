"""SDPO: the authors' loss in float64, who gets which hint, and what the teacher reads, on a tiny model."""

import json
from types import SimpleNamespace

import pytest
import torch

from mmrl.algorithms.policy_gradient import divergence as estimate
from mmrl.algorithms.sdpo import SDPO, SDPOSettings
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.logging.metrics import describe, read_numbers
from mmrl.models.text.divergence import Outputs, divergence
from mmrl.planner.plan import plan
from mmrl.rollout.collect import collect_batch, slices
from mmrl.rollout.hints import feedback_of, solutions_of
from mmrl.runtime.start import train
from mmrl.step.batch import rows_of_update
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import computed, train_step
from tests.support import tiny

B, T, V = 3, 4, 5
REWARD = '''
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    """Right are the first samples of the even prompts; of the others every second one has feedback."""
    odd = [int(s.prompt.text.split()[1]) % 2 for s in samples]
    right = [float(not n and s.id.sample == 0) for n, s in zip(odd, samples)]
    said = ["Say less. <|im_end|> {answer}" if n and s.id.sample % 2 else None for n, s in zip(odd, samples)]
    return {"score": right, **({"feedback": said} if context.feedback else {})}
'''
RECIPE = """
name: hinted
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 8}
rewards: [{name: reward.py}]
algorithm: {type: sdpo, teacher_rate: 0.5}
train: {steps: 4, prompts_per_step: 4, group_size: 3, micro_batch_size: 6}
optim: {lr: 1.0e-2}
eval: {every: null}
checkpoint: {every: 1}
device: cpu
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hinted")
    tiny.language_model(folder / "model", sharp=0.3)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def made(folder, *overrides):
    return load_recipe([folder / "recipe.yaml"], [*overrides])


AUTHORS = [
    (0.5, 2.0, "whole", "token_mean", 0.34979258298881993, [0.00436974072, 0.025848773492, -0.008331400418]),
    (0.0, None, "whole", "seq_mean_token_mean", 1.4167615681561423, [0.022428214542, 0.112019736881, 0.011688707896]),
    (1.0, 2.0, "whole", "token_mean", 1.9345475218893042, [0.006015635123, 0.208806394339, -0.132333177969]),
    (0.3, 2.0, "whole", "token_mean", 0.2998244841144628, [0.00425205421, 0.02341868733, -0.004309371724]),
    (1.0, 2.0, "sampled", "token_mean", None, [0.165868535216, 0.794761629537, 0.204210692366]),
]
"""lasgroup/SDPO at 0e6d510, ``compute_self_distillation_loss`` on these numbers; a sampled token's has no value."""


@pytest.mark.parametrize(("alpha", "cap", "how", "aggregation", "value", "slopes"), AUTHORS)
def test_golden_of_the_authors(alpha, cap, how, aggregation, value, slopes):
    n = torch.arange(B * T * V, dtype=torch.float64)
    student = (2 * torch.sin(1.3 * n)).view(B, T, V).requires_grad_()
    teacher, tokens = (2 * torch.cos(0.7 * n)).view(B, T, V), (n[: B * T].long() * 3 % V).view(B, T, 1)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.float64)
    weights = torch.tensor([1, 0, 1], dtype=torch.float64)  # the second row has no hint
    new, there = (of.log_softmax(-1).gather(-1, tokens)[..., 0] for of in (student, teacher))
    old = new.detach() - 1.2 * torch.sin(2 * n[: B * T]).view(B, T)
    kind = "forward" if alpha == 0 else "reverse" if alpha == 1 else "jensen"
    pair = Outputs(student.view(-1, V)), Outputs(teacher.view(-1, V))
    apart = divergence(*pair, kind, 1.0, alpha=alpha).view(B, T)
    if how == "sampled":
        apart = estimate(new, there, torch.ones(B, T, dtype=torch.bool), "k1+")
    sdpo = SDPO(SDPOSettings(alpha=alpha, ratio_cap=cap, vocabulary=how, aggregation=aggregation))
    given = {
        "log_probs": old,
        "advantages": torch.zeros(B, dtype=torch.float64),
        "weights": weights,
        "mask": mask,
        "importance": (1 + 0.5 * torch.sin(n[: B * T])).view(B, T),
    }
    total = sdpo.loss_denominator(weights, mask.sum(1))
    loss = sdpo.loss({"log_probs": new, "self_divergence": apart}, given, total)
    if value is not None:
        assert loss.value.item() == pytest.approx(value, abs=1e-8)
        assert loss.sums["self_teacher/loss"].item() / total == pytest.approx(value, abs=1e-8)
    (slope,) = torch.autograd.grad(loss.value, student)
    assert slope[0, 1, :3].tolist() == pytest.approx(slopes, abs=1e-8)
    assert not slope[1].any()


def test_a_hint_is_another_right_response_without_thoughts_else_the_feedback():
    said = ["<think>a</think>one", "two", "three", "<think>never", "four", "five"]
    rewards, groups = [1, 0.4, 0.5, 1, 0, float("nan")], [0, 0, 0, 1, 1, 2]
    assert solutions_of(SDPOSettings(), said, rewards, groups) == ["three", "one", "one", None, None, None]
    kept = solutions_of(SDPOSettings(keep_thoughts=True, success=0.9), said, rewards, groups)
    assert kept == [None, said[0], said[0], None, "<think>never", None]
    settings = SDPOSettings(solution_text="[{answer}]", feedback_text="({feedback})", task_text="{answer}!")
    assert settings.hint("{feedback} {answer}", "no") == "\n\n[{feedback} {answer}]\n\n{answer}!"
    assert settings.hint(None, "{answer}") == "\n\n({answer})\n\n{answer}!"
    assert settings.hint(None, None) == ""
    scores = SimpleNamespace(scores=SimpleNamespace(feedback={"a": [None, " x ", ""], "b": ["y", "z", None]}))
    assert feedback_of(SimpleNamespace(rows=[(0, n) for n in range(3)], rounds=[scores])) == ["y", "x\n\nz", None]


@pytest.mark.parametrize("packing", [False, True])
def test_the_teacher_reads_the_response_behind_the_prompt_with_its_hint(folder, packing):
    run = build(made(folder, f"train.packing={str(packing).lower()}").recipe)
    with torch.no_grad():  # the teacher is no longer the policy
        for n, p in enumerate(run.policy.trainable.values()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(n)))
    slots = run.controller.slots(0, run.prompts, 4, run.rollout.cost)
    metrics = StepMetrics(len(slots))
    batch = collect_batch(run, slots, 0, Clock(torch.device("cpu")), metrics)
    texts = {s.id: s.text for rows in batch.micro_batches for s in run.pipeline.samples(rows, frozenset())}
    settings, model, chat = run.recipe.algorithm, run.policy.module, run.pipeline.conditioner
    expected, taught = [], []
    for n, (m, i) in enumerate(batch.places):
        rows = batch.micro_batches[m]
        prompt, one = rows.slots[i].prompt, rows.ids[i]
        if int(prompt.text.split()[1]) % 2:
            hint = settings.hint(None, "Say less. <|im_end|> {answer}" if one.sample % 2 else None)
        else:
            first = type(one)(one.step, one.slot, one.attempt, 0)
            hint = settings.hint(texts[first].strip() or None if one.sample else None, None)
        taught.append(bool(hint))
        assert batch.weights[n] == taught[-1]
        if hint:
            shown = type(prompt)(prompt.id, prompt.text + hint)
            asked = chat.texts.ids(chat.conversation(shown, "user", []))  # the chat template and the tokenizer
            start = rows.offsets[i] + rows.prompts[i]
            spoken = rows.tokens[start : rows.offsets[i + 1]]
            with torch.no_grad():
                own = rows.tokens[rows.offsets[i] : start].tolist()
                p = said(model, own, spoken)
                with run.policy.using("teacher"):
                    q = said(model, asked, spoken)
            middle = (p.exp() + q.exp()) / 2
            expected.append(((p.exp() * (p - middle.log())) + q.exp() * (q - middle.log())).sum(-1) / 2)
    assert 0 < sum(taught) < len(taught)
    row = metrics.means()
    shares = {name: row[f"self_teacher/{name}"] for name in ("taught", "solutions", "feedback", "too_long")}
    assert shares["taught"] == pytest.approx(sum(taught) / len(taught))
    assert shares["taught"] == pytest.approx(shares["solutions"] + shares["feedback"])
    for micro_batch in slices(run, batch, [n for n in rows_of_update(batch, 0, 1) if taught[n]]):
        found = computed(run, micro_batch, 0, StepMetrics())["self_divergence"].detach()
        for values, n in zip(found, micro_batch.index, strict=True):
            of = expected[sum(taught[:n])]
            assert torch.allclose(values[: len(of)].double(), of, atol=1e-5)
            assert of.min() > 1e-4


def said(model, asked, spoken):
    """Log-probs ``[T, V]`` float64 before each token behind a prompt."""
    ids = torch.cat([torch.tensor(asked), spoken]).unsqueeze(0)
    return model(input_ids=ids, use_cache=False).logits[0, len(asked) - 1 : -1].double().log_softmax(-1)


def test_a_step_moves_the_teacher_half_way_and_a_prompt_too_long_is_counted(folder):
    run = build(made(folder, "train.updates_per_step=3").recipe)
    before = {k: p.detach().clone() for k, p in run.policy.trainable.items()}
    row = train_step(run, 0, Clock(torch.device("cpu")))[0]
    after, teacher = run.policy.trainable, run.policy.copies["teacher"]
    assert any(not torch.equal(before[k], after[k]) for k in before)
    for k in before:
        assert torch.allclose(teacher[k], (before[k] + after[k].detach()) / 2, atol=1e-6)
    assert row["self_teacher/loss"] > 0
    assert all(describe(key) for key in row)
    short = build(made(folder, "algorithm.max_prompt_tokens=3").recipe)
    row = train_step(short, 0, Clock(torch.device("cpu")))[0]
    assert row["self_teacher/too_long"] > row["self_teacher/taught"] == 0


@pytest.mark.slow
def test_a_run_resumes_exactly(folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(made(folder), whole)
    train(made(folder, "train.steps=2"), cut)
    train(made(folder), cut, resume=True)
    rows = [[row["self_teacher/divergence"] for row in read_numbers(out / "metrics.jsonl")] for out in (whole, cut)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_the_plan_counts_the_teacher(folder):
    found = plan(made(folder))
    roles = {role.name: role.bytes for role in found.roles}
    assert not found.problems
    assert roles["copy: teacher"] == roles["gradients"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["algorithm={type: sdpo, vocabulary: sampled}"], "set it to 1, or algorithm.vocabulary to whole"),
        (["algorithm={type: sdpo, solution_text: see}"], "write {answer} into it"),
        (["algorithm={type: sdpo, feedback: false}", "train.group_size=1"], "set train.group_size to 2 or more"),
        (["train.backend=fsdp"], "set it to replicated, or set algorithm.type to grpo"),
        (["environment={name: revise, options: {reward: reward.py}}"], "remove it, or set algorithm.type to grpo"),
        (["placement=disaggregated", "devices_per_controller=2"], "needs samples of the current policy"),
    ],
)
def test_what_is_refused_says_what_to_write(folder, changes, said):
    with pytest.raises(RecipeError) as refusal:
        made(folder, *changes)
    assert said in str(refusal.value)


@pytest.mark.slow
def test_a_model_that_reads_pictures_sees_them_behind_a_hint_too():
    pytest.importorskip("torchvision")
    small = ["algorithm={type: sdpo}", "train.prompts_per_step=3", "train.group_size=4"]
    run = build(load_recipe(["scenes"], small).recipe)
    row = train_step(run, 0, Clock(torch.device("cpu")))[0]
    assert row["self_teacher/taught"] == row["self_teacher/solutions"] > 0
    assert row["self_teacher/divergence"] > 0
    assert row["policy/first_ratio_max_dev"] <= 1e-5


def test_pictures_are_refused_by_name():
    with pytest.raises(RecipeError, match="sdpo trains tokens"):
        load_recipe(["shapes-lora"], ["algorithm={type: sdpo}"])
