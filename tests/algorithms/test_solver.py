"""DPM-Solver++ in the steps without noise: diffusers' own steps, its order, and what pauses or shares steps."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from mmrl.algorithms import sde
from mmrl.algorithms.solver import NoiselessSteps, corrections
from mmrl.app.build import build
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.trajectory import SampleId, Slot
from tests.support.tiny_diffusion import two_blocks

STEPS, SIZE = 6, 3
SPREAD = 0.4
"""Of the data ``x0 ~ N(1, SPREAD^2)`` below, whose ODE has a closed form."""


def velocity(x, s):
    """``E[eps - x0 | x_s = x]`` for that data."""
    variance = (1 - s) ** 2 * SPREAD**2 + s**2
    away = (x - (1 - s)) / variance
    return s * away - (1 + (1 - s) * SPREAD**2 * away)


def solution(eps, s):
    """Where the ODE takes pure noise ``eps`` at the noise level ``s``."""
    return (1 - s) + ((1 - s) ** 2 * SPREAD**2 + s**2) ** 0.5 * eps


@pytest.mark.parametrize("steps", [4, 10, 20])
def test_its_steps_are_those_of_diffusers(steps):
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas.float()
    assert sigmas[-1] == 0
    ours = NoiselessSteps(sde.coefficients(sigmas, "flow", 0.7, []), "dpmsolver++")
    x = theirs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for i, t in enumerate(scheduler.timesteps):
        s = sigmas[i].item()
        x, theirs = ours(x, velocity(x, s), i), scheduler.step(velocity(theirs, s), t, theirs).prev_sample
        torch.testing.assert_close(x, theirs, rtol=2e-5, atol=2e-5)


def error(solver, first, last, steps):
    """The largest error at ``last``, from the solution at ``first``."""
    eps, sigmas = torch.linspace(-2, 2, 9), torch.linspace(first, last, steps + 1)
    advance = NoiselessSteps(sde.coefficients(sigmas, "flow", 0.7, []), solver)
    x = solution(eps, first)
    for i, s in enumerate(sigmas[:-1].tolist()):
        x = advance(x, velocity(x, s), i)
    return float((x - solution(eps, last)).abs().max())


def test_the_error_falls_with_the_square_of_the_steps_and_eulers_with_the_steps():
    # Away from both ends: the steps from pure noise and to 0 are Euler's.
    assert error("euler", 0.9, 0.1, 20) / error("euler", 0.9, 0.1, 40) == pytest.approx(2, abs=0.2)
    assert error("dpmsolver++", 0.9, 0.1, 20) / error("dpmsolver++", 0.9, 0.1, 40) == pytest.approx(4, abs=0.6)
    assert error("dpmsolver++", 1, 0, 10) < error("euler", 1, 0, 20)


def test_steps_from_noise_and_to_zero_are_eulers():
    k = corrections(torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0]))
    assert k[[0, 1, 3]].tolist() == [0, 0, 0]
    s = torch.tensor([0.8, 0.5, 0.2], dtype=torch.float64)
    h = (torch.log((1 - s) / s)).diff()
    assert k[2].item() == pytest.approx(float((0.8 - 0.5 * 0.2 / 0.5) * h[1] / (2 * h[0])), rel=1e-6)


@pytest.fixture(scope="module")
def run():
    words = [f"sampling.steps={STEPS}", "sampling.window={size: 1, first: 3, last: 4}", "algorithm.kl_coef=0"]
    words += ["train.prompts_per_step=2", f"train.group_size={SIZE}", "model.dtype=float32", "train.micro_batch_size=6"]
    loaded = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *words, "sampling.solver=dpmsolver++"])
    made = build(loaded.recipe)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in made.policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def rows(run):
    slots = [Slot(0, n // SIZE, 0, run.prompts[n // SIZE]) for n in range(2 * SIZE)]
    run.pipeline.encode(slots)
    return slots, [SampleId(0, n // SIZE, 0, n % SIZE) for n in range(2 * SIZE)]


def test_sampling_is_the_step_by_step_path_with_eulers_step_after_noise(run):
    slots, ids = rows(run)
    made = run.pipeline.sample(slots, ids, [3], seed=0)
    pipeline = run.pipeline
    features, schedule = pipeline.batch_features(slots), pipeline.sizes.adapted(slots).schedule(STEPS)
    c, k = pipeline.coefficients(schedule, [3]), corrections(schedule.sigmas)
    x, before = pipeline.initial(ids, 0, schedule), None
    with torch.no_grad():
        for i in range(STEPS):
            v = pipeline.velocity(x, schedule.timesteps[i].expand(len(x)), features)
            clean, mean = x - schedule.sigmas[i] * v, sde.step_mean(x, v, c, i)
            if i == 3:
                shape = tuple(x.shape[1:])
                x, before = mean + c.std[i] * pipeline.noise(ids, "step3", 0, shape), None
                continue
            x, before = mean + (0 if before is None else k[i].float() * (clean - before)), clean
    torch.testing.assert_close(made.clean, x, rtol=1e-5, atol=1e-5)
    assert k[2] != 0
    assert k[4] != 0  # so that what is forgotten counts


@pytest.mark.parametrize(("until", "kept"), [(4, 2), (5, 3)], ids=["after noise", "later"])
def test_two_parts_are_one_whole(run, until, kept):
    slots, ids = rows(run)
    whole = run.pipeline.sample(slots, ids, [3], seed=0)
    begun = run.pipeline.begin(slots, ids, [3], 0, until)
    assert begun.paused is not None
    assert begun.paused.shape[1] == kept
    ended = run.pipeline.finish(begun, [3], 0, until)
    assert torch.equal(ended.clean, whole.clean)
    assert torch.equal(ended.log_probs, whole.log_probs)


@pytest.mark.parametrize("most", [6, 2, 1])
def test_samples_that_share_steps_are_those_that_share_nothing(run, most):
    slots, ids = rows(run)

    def drawn():
        parts = [(slots[n : n + most], ids[n : n + most]) for n in range(0, len(ids), most)]
        return torch.cat([run.pipeline.sample(*part, [3], seed=0, version=(0, "current")).clean for part in parts])

    run.pipeline.prefix.forget()
    shared = drawn()
    run.pipeline.prefix.used = False
    try:
        torch.testing.assert_close(shared, drawn(), rtol=1e-4, atol=1e-5)
    finally:
        run.pipeline.prefix.used = True


def test_evaluations_may_take_another_solver_than_training(run):
    slots, ids = rows(run)
    whole = run.pipeline.recipe

    def drawn(training, evaluation, *, evaluate):
        sampling = whole.denoising.model_copy(update={"solver": training})
        eval_ = whole.eval.model_copy(update={"solver": evaluation})
        run.pipeline.recipe = whole.model_copy(update={"sampling": sampling, "eval": eval_})
        run.pipeline.prefix.forget()
        return run.pipeline.sample(slots, ids, [], seed=0, evaluate=evaluate).clean

    try:
        euler, second = (drawn(solver, None, evaluate=True) for solver in ("euler", "dpmsolver++"))
        assert not torch.equal(euler, second)
        assert torch.equal(drawn("euler", "dpmsolver++", evaluate=True), second)
        assert torch.equal(drawn("dpmsolver++", "euler", evaluate=True), euler)
        assert torch.equal(drawn("euler", "dpmsolver++", evaluate=False), drawn("euler", None, evaluate=False))
    finally:
        run.pipeline.recipe = whole


def test_text_has_no_solver():
    with pytest.raises(RecipeError, match=r"eval\.solver: text has no denoising steps; remove it"):
        load_recipe(["sums"], ["eval.solver=euler"])


def test_what_follows_eulers_gradients_refuses_it():
    words = ["algorithm={type: draft}", "sampling.solver=dpmsolver++", "sampling.window=null"]
    words += ["train.group_size=1", "rewards=[{name: jpeg:compressibility}]"]
    with pytest.raises(
        RecipeError, match=r"sampling\.solver: draft back-propagates through Euler's steps; set it to euler"
    ):
        load_recipe(["shapes-lora"], words)


def test_another_name_is_refused():
    with pytest.raises(RecipeError, match=r"sampling\.solver"):
        load_recipe(["shapes-lora"], ["sampling.solver=heun"])


@pytest.mark.parametrize(("steps", "first"), [(2, True), (14, True), (15, False), (30, False)])
def test_fewer_than_fifteen_steps_end_at_first_order(steps, first):
    """diffusers' lower_order_final, which shows where the last level is above 0, as Stable Diffusion's is."""
    last = corrections(torch.linspace(0.95, 0.03, steps + 1))[-1].item()
    assert (last == 0) == first
