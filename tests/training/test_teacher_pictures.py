"""A LoRA teaches a model that makes pictures: the divergence of each step, a run that comes nearer, what is refused."""

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan
from mmrl.rollout.collect import collect_batch, slices
from mmrl.step.batch import rows_of_update
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import computed, train_step
from tests.support.teachers import adapter
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision
EDITS = [
    *("device=cpu", "train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=4", "eval.every=null"),
    *("sampling.steps=4", "sampling.window={size: 2}", "rewards=[]", "optim.lr=3e-3", "optim.schedule=constant"),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel.from_pretrained(two_blocks() / "transformer")
    return adapter(model, tmp_path_factory.mktemp("lora"), rank=4, alpha=3.0, targets=["to_q", "to_v"])


def made(teacher, *overrides):
    edits = [f"model.path={two_blocks()}", f"teacher={{model: {teacher}}}"]
    return load_recipe(["shapes-lora"], [*EDITS, *edits, *overrides])


@pytest.mark.parametrize("kind", ["reverse", "velocity"])
def test_the_divergence_is_that_of_the_means_that_the_teacher_itself_moves_to(teacher, kind):
    run = build(made(teacher, f"teacher.divergence={kind}").recipe)
    slots = run.controller.slots(0, run.prompts, 2, None)
    batch = collect_batch(run, slots, 0, Clock(torch.device("cpu")), StepMetrics(2))
    micro_batch = next(iter(slices(run, batch, rows_of_update(batch, 0, 1))))
    new = computed(run, micro_batch, 0, StepMetrics())
    lora = f"model.lora={{path: {teacher}}}"  # goes on with the teacher: its samples are that one's
    other = build(
        load_recipe(["shapes-lora"], [*EDITS, f"model.path={two_blocks()}", lora, "rewards=[{name: shapes}]"]).recipe
    )
    other.pipeline.encode(slots)
    rows, entries = micro_batch.rows, micro_batch.entries
    c = run.pipeline.coefficients(run.pipeline._schedule(rows), rows.actions.tolist())
    with torch.no_grad():
        mine, theirs = (one.pipeline._means(rows, entries, c) for one in (run, other))
    squared = torch.stack(
        [(a.double() - b.double()).square().flatten(1).mean(1) for a, b in zip(mine, theirs, strict=True)], 1
    )
    std, c_v = micro_batch.old["kl_std"].double(), micro_batch.old["c_v"].double()
    expected = squared / (2 * std**2) if kind == "reverse" else squared / c_v**2
    assert torch.allclose(new["teacher_kl"].double(), expected, rtol=1e-4)
    assert expected.min() > 0


def test_a_student_comes_nearer_without_a_reward(teacher):
    run = build(made(teacher).recipe)
    rows = [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(8)]
    assert rows[-1]["teacher/kl"] < 0.7 * rows[0]["teacher/kl"]
    assert rows[0]["policy/loss"] == 0


def test_what_cannot_teach_pictures_is_refused_with_the_edit(teacher):
    with pytest.raises(RecipeError, match="set it to reverse or velocity"):
        made(teacher, "teacher.divergence=mixed")
    found = plan(made(teacher, f"teacher.model={two_blocks()}")).problems
    assert ["name the folder that mmrl export --what lora wrote" in line for line in found] == [True]
    with pytest.raises(RecipeError, match=r"set algorithm\.type to flow_grpo"):
        made(teacher, "algorithm={type: diffusion_nft}", "sampling.window=null")
    found = plan(made(teacher, "model.lora={rank: 4, targets: [to_q]}")).problems
    assert ["add to_v to model.lora.targets" in line for line in found] == [True]
