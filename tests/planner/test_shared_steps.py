"""Denoising steps before the window, computed once for a group that starts from one noise."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import NotFiniteError
from mmrl.core.trajectory import AskedSize, Rows, SampleId, Slot
from mmrl.planner.counts import count
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.rollout.rounds import sample_and_score
from tests.support.tiny_diffusion import two_blocks

STEPS, SIZE, FIRST = 5, 4, 2
SMALL = [
    *(f"sampling.steps={STEPS}", "sampling.window={size: 2, first: 2, last: 4}", "algorithm.kl_coef=0"),
    *("train.prompts_per_step=2", f"train.group_size={SIZE}", "train.micro_batch_size=8", "model.dtype=float32"),
]
NOW = (0, "current")


@pytest.fixture(scope="module")
def guided():
    """A run with guidance and two sizes, whose LoRA is not the identity."""
    sizes = ["sampling.guidance_scale=4", "sampling.buckets=[[32, 32], [32, 24]]"]
    loaded = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *SMALL, *sizes])
    run = build(loaded.recipe)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in run.policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return run


@pytest.fixture
def run(guided, request, monkeypatch):
    monkeypatch.setattr(guided.pipeline, "guidance", request.param)
    monkeypatch.setattr(guided.pipeline, "guided", request.param > 1)
    guided.pipeline.prefix.forget()
    return guided


def rows(run, groups=2):
    slots = [Slot(0, n // SIZE, 0, run.prompts[n // SIZE]) for n in range(groups * SIZE)]
    run.pipeline.encode(slots)
    return slots, [SampleId(0, n // SIZE, 0, n % SIZE) for n in range(groups * SIZE)]


def drawn(run, most, version=NOW, actions=(2, 3)):
    """The samples of two groups in micro-batches of ``most``, and how many rows each call of the model had."""
    slots, ids = rows(run)
    calls = []
    hook = run.pipeline.policy.register_forward_pre_hook(
        lambda _, __, given: calls.append(len(given["hidden_states"])), with_kwargs=True
    )
    parts = [
        run.pipeline.sample(slots[n : n + most], ids[n : n + most], actions, seed=0, version=version)
        for n in range(0, len(ids), most)
    ]
    hook.remove()
    return Rows.join(parts), calls


def unshared(run, most, **how):
    run.pipeline.prefix.used = False
    found = drawn(run, most, **how)
    run.pipeline.prefix.used = True
    return found


BOTH = pytest.mark.parametrize("run", [1.0, 4.0], indirect=True, ids=["unguided", "guided"])
GUIDED = pytest.mark.parametrize("run", [4.0], indirect=True)


@pytest.mark.parametrize(
    ("run", "most", "of_prefix"),
    [(1.0, 8, [2, 2]), (4.0, 8, [2, 2]), (4.0, 3, [1, 1, 1, 1]), (4.0, 1, [1, 1, 1, 1])],
    indirect=["run"],
)
def test_the_samples_are_those_that_share_nothing(run, most, of_prefix):
    guided = 2 if run.pipeline.guidance > 1 else 1
    whole, every = unshared(run, most)
    shared, calls = drawn(run, most)
    after = STEPS - FIRST
    assert sum(every) == guided * 2 * SIZE * STEPS
    assert sum(calls) == guided * (sum(of_prefix) + 2 * SIZE * after)
    assert len(calls) == len(of_prefix) + len(every) * after // STEPS
    sampling = run.recipe.sampling.model_copy(update={"batch_size": most})
    recipe = run.recipe.model_copy(update={"sampling": sampling})
    assert count(recipe, entries=2).sampling_forwards == len(every)
    counted = count(recipe, entries=2, shared_steps=FIRST)
    assert (counted.sampling_forwards, counted.saved_steps * guided) == (len(calls), sum(every) - sum(calls))
    before = whole.states[:, 0]
    # Guidance multiplies the rounding of its two predictions.
    close = 0 if most == 1 else 1e-6 * run.pipeline.guidance * before.abs().max().item()
    assert (shared.states[:, 0] - before).abs().max() <= close
    assert torch.allclose(shared.clean, whole.clean, atol=2e-4)
    assert torch.equal(shared.clean, whole.clean) == (most == 1)
    for group in (shared.states[:SIZE, 0], shared.states[SIZE:, 0]):
        assert all(torch.equal(one, group[0]) for one in group)
    assert not torch.equal(shared.states[0, 0], shared.states[SIZE, 0])


@GUIDED
def test_a_divided_group_has_the_same_bits_wherever_it_is_drawn(run):
    found, _ = drawn(run, 3)
    apart, _ = drawn(run, 3, version=None)
    assert torch.equal(found.clean, apart.clean)


@BOTH
def test_the_first_ratio_is_one_to_the_bit(run):
    trajectory, _ = drawn(run, 8)
    for action in range(2):
        new = run.pipeline.replay(trajectory, [action], frozenset({"log_probs"}), run.policy.using)["log_probs"]
        assert torch.equal(new.detach()[:, 0], trajectory.log_probs[:, action])


@GUIDED
def test_nothing_is_kept_over_other_weights_or_an_update(run):
    (slots, ids), pipeline = rows(run, 1), run.pipeline

    def saved(version, row, seed=0, actions=(2, 3)):
        before = pipeline.prefix.saved
        pipeline.sample(slots[row : row + 1], ids[row : row + 1], actions, seed, version=version)
        return pipeline.prefix.saved - before

    assert [saved(NOW, 0), saved(NOW, 1), saved(NOW, 2, seed=1), saved(NOW, 3, seed=1)] == [0, 2, 0, 2]
    assert [saved(NOW, 0, actions=(3,)), saved(NOW, 1, actions=(3,))] == [0, 3]
    assert [saved((1, "current"), 1), saved((1, "old"), 1), saved(None, 2), saved(None, 3)] == [0, 0, 0, 0]
    assert [saved(NOW, 0), saved(NOW, 1)] == [0, 2]
    trajectory = pipeline.sample(slots, ids, [2, 3], 0)
    saved(NOW, 0)
    pipeline.replay(trajectory, [0], frozenset({"log_probs"}), run.policy.using)
    assert saved(NOW, 1) == 0


@pytest.mark.parametrize("run", [1.0], indirect=True)
def test_a_step_depends_neither_on_who_samples_nor_on_the_step_before(run):
    sampling = run.recipe.sampling.model_copy(update={"batch_size": 3})
    run = replace(run, recipe=run.recipe.model_copy(update={"sampling": sampling}))
    sizes = [AskedSize(32, 32), AskedSize(32, 24)]

    def before(step, mine):
        """The latents before the window of these slots, by sample."""
        slots = [Slot(step, n, 0, replace(run.prompts[n], size=sizes[n % 2])) for n in mine]
        with run.compute.devices.sampling_phase(run, "current"):
            parts = sample_and_score(run, slots, step, Clock(torch.device("cpu"))).micro_batches
        return {name: x for part in parts for name, x in zip(part.ids, part.states[:, 0], strict=True)}

    saved = run.pipeline.prefix.saved
    whole = before(0, range(3))
    assert len(whole) == 3 * SIZE
    assert run.pipeline.updates() == {"perf/shared_steps": saved + FIRST * 3 * (SIZE - 1)}
    assert whole[SampleId(0, 1, 0, 0)].shape != whole[SampleId(0, 0, 0, 0)].shape
    of_two_controllers = before(0, [0]) | before(0, [1, 2])
    assert set(of_two_controllers) == set(whole)
    assert all(torch.equal(x, of_two_controllers[name]) for name, x in whole.items())
    later = before(1, [0])
    run.pipeline.prefix.forget()
    resumed = before(1, [0])
    assert all(torch.equal(x, resumed[name]) for name, x in later.items())


@GUIDED
def test_latents_that_are_not_finite_are_named_by_step_and_sample(run, monkeypatch):
    (slots, ids), velocity, calls = rows(run), run.pipeline.velocity, []

    def broken(x, *given):
        calls.append(len(x))
        made = velocity(x, *given)
        if len(calls) == 2:
            made[1] = torch.nan
        return made

    monkeypatch.setattr(run.pipeline, "velocity", broken)
    with pytest.raises(NotFiniteError, match=r"denoising step 2 of 5 .*slot 1, sample 0; 4 of 8 samples"):
        run.pipeline.sample(slots, ids, [2, 3], 0)


def test_the_plan_counts_the_windows_that_the_run_will_have(guided):
    random = ["sampling.window={size: 1}", "train.steps=5"]
    loaded = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *SMALL, *random])
    made = plan(loaded)
    pipeline = guided.pipeline
    before, pipeline.recipe = pipeline.recipe, loaded.recipe
    firsts = [pipeline.noisy_steps(step)[0] for step in range(5)]
    pipeline.recipe = before
    assert len(set(firsts)) > 1
    c = made.counts
    assert c.shared_steps == sum(firsts) / 5
    assert c.saved_steps == round(c.shared_steps * 2 * (SIZE - 1))
    said = io.StringIO()
    render(made, Console(file=said, width=300))
    assert f"{c.saved_steps} of {2 * SIZE * STEPS} denoising steps of samples are not computed" in said.getvalue()
    operations = made.measured.operations
    assert operations.sample.flops == STEPS * operations.forward.flops, (
        "of samples that share nothing: the estimate leaves out what is"
    )
