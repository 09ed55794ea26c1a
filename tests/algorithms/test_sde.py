"""Golden numbers and properties of the step kernels (float64 references, the peers' published values)."""

import math
from itertools import groupby

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from mmrl.algorithms import sde
from mmrl.algorithms.window import start as window_start
from mmrl.config.sampling import Window


def one_step(kind: str, a: float, s: float = 0.8, s2: float = 0.6):
    """Mean, std and log-prob of the golden case x=1, v=.5, x'=.9 (a third sigma keeps the step from being last)."""
    c = sde.coefficients(torch.tensor([1.0, s, s2, 0.0], dtype=torch.float64), kind, a, [1])
    x, v, following = torch.ones(1, 1), torch.full((1, 1), 0.5), torch.full((1, 1), 0.9)
    mean = sde.step_mean(x, v, c, 1)
    return mean.item(), c.std[1].item(), sde.log_prob(following, mean, c, 1).item()


def held(strategy, steps, size=4, **more):
    """How many training steps the window stays at each start, over one round, walked step by step; and that the next
    round is the same."""
    window = Window(size=size, strategy=strategy, **more)
    starts = [window_start(window, steps, n) for n in range(2000)]
    runs = [(first, len(list(of))) for first, of in groupby(starts)]
    again = runs.index(runs[0], 1)
    assert runs[again : 2 * again] == runs[:again]
    return dict(runs[:again])


def test_windows_move_as_mixgrpo_says():
    """Of 25 steps 24 carry noise, and windows of 4 begin at 0 to 20."""
    assert held("progressive", range(24), every=7) == dict.fromkeys(range(21), 7)
    kept = held("exp_decay", range(24), every=25)
    assert kept == dict.fromkeys(range(14), 25) | {14: 23, 15: 21, 16: 19, 17: 17, 18: 16, 19: 14, 20: 13}
    linear = held("decay", range(24), every=25)
    assert (linear[0], linear[12], linear[20]) == (25, 15, 8)  # int(25 (1 - p) + 6 p), p = s / 23
    assert list(linear.values()) == sorted(linear.values(), reverse=True)
    assert held("exp_decay", range(2, 6), size=2, every=4, decay_from=3, decay_rate=10.0) == {2: 4, 3: 4, 4: 1}
    assert held("decay", range(3), size=2, every=2) == {0: 2, 1: 1}


def test_linear_noise_is_that_of_the_authors_code_for_wan():
    """d = s_last + (s_second - s_last) s, and the mean and the KL of a Gaussian of std d sqrt(-dt), in float64."""
    sigmas = torch.tensor([0.99999, 0.9, 0.6, 0.25, 0.0], dtype=torch.float64)
    c = sde.coefficients(sigmas, "linear", 1.0, range(3))
    for i in range(3):
        s, dt = sigmas[i].item(), (sigmas[i + 1] - sigmas[i]).item()
        d = 0.0 + (0.9 - 0.0) * s
        expected = {"c_x": 1 + d**2 / (2 * s) * dt, "c_v": (1 + d**2 * (1 - s) / (2 * s)) * dt}
        expected |= {"std": d * math.sqrt(-dt), "kl_std": d * math.sqrt(-dt)}
        for name, value in expected.items():
            assert getattr(c, name)[i].item() == pytest.approx(value, rel=1e-6), name
    assert c.std[3] == 0
    assert sde.coefficients(sigmas, "linear", 0.5, range(3)).std[1] == pytest.approx(c.std[1] / 2)


def test_the_kl_of_each_noise_is_its_authors():
    """Flow-GRPO divides by 2 d^2, without the step; FlowCPS and the code for Wan by twice the step's variance, which is
    the KL of two Gaussians. Sigmas of ten steps of SD3, whose dt runs from .04 to .27."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigmas = scheduler.sigmas.double()
    dt, s, s2 = sigmas[1:] - sigmas[:-1], sigmas[:-1], sigmas[1:]
    expected = {
        "flow": 0.7 * (s / (1 - torch.where(s == 1, s2[0], s))).sqrt(),
        "dance": torch.full_like(s, 0.7),
        "cps": s2 * math.sin(0.7 * math.pi / 2),
        "linear": 0.7 * s2[0] * s * (-dt).sqrt(),
    }
    for kind, std in expected.items():
        found = sde.coefficients(sigmas, kind, 0.7, range(9)).kl_std[:9]
        torch.testing.assert_close(found.double(), std[:9], rtol=1e-6, atol=0)
    full = sde.coefficients(sigmas, "flow", 0.7, range(9)).std[:9].double()
    torch.testing.assert_close((expected["flow"][:9] / full).square(), -1 / dt[:9], rtol=1e-5, atol=0)


def test_a_level_next_to_one_has_the_noise_of_one():
    """Solvers begin at .999999, where s / (1 - s) would be a million."""
    near, at = (torch.tensor([s, 0.9, 0.5, 0.0], dtype=torch.float64) for s in (0.999999, 1.0))
    assert sde.coefficients(near, "flow", 0.7, [0]).std[0] == pytest.approx(
        sde.coefficients(at, "flow", 0.7, [0]).std[0].item(), rel=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "a", "mean", "std", "log_prob"),
    [
        ("flow", 0.7, 0.630500, 0.626099, -0.543332),
        ("dance", 0.3, 0.887625, 0.134164, 1.085499),
        ("cps", 0.8, 0.443951, 0.570634, -0.207980),
    ],
)
def test_golden_numbers(kind, a, mean, std, log_prob):
    assert one_step(kind, a) == pytest.approx((mean, std, log_prob), abs=2e-6)


def ddim(x, eps, kept, kept_next, eta, following):
    """A step of ``a x0 + b eps`` (``kept`` is a^2) by way of flow coordinates: mean, std and log-prob."""
    a, b, a2, b2 = (math.sqrt(v) for v in (kept, 1 - kept, kept_next, 1 - kept_next))
    sigmas = torch.tensor([1.0, b / (a + b), b2 / (a2 + b2), 0.0], dtype=torch.float64)
    c = sde.coefficients(sigmas, "ddim", eta, [1])
    v = eps - (x - b * eps) / a
    mean = sde.step_mean(x / (a + b), v, c, 1)
    log_prob = sde.log_prob(following / (a2 + b2), mean, c, 1) - math.log(a2 + b2)
    return (a2 + b2) * mean, (a2 + b2) * c.std[1].item(), log_prob


def test_golden_ddim():
    x, eps, following = torch.ones(1, 1), torch.full((1, 1), 0.3), torch.full((1, 1), 0.9)
    mean, std, log_prob = ddim(x, eps, 0.5, 0.6, 1.0, following)
    assert (std, mean.item(), log_prob.item()) == pytest.approx((0.365148, 1.017985, 0.036311), abs=2e-6)


def test_a_step_of_ddim_that_ends_in_no_noise_would_drown_the_others():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(8)
    c = sde.coefficients(scheduler.sigmas, "ddim", 1.0, range(7))
    moved = (c.c_v / c.std).abs()  # a log-prob's gradient goes with it
    assert sde.noiseless(scheduler.sigmas, "ddim", range(7)) == [6]
    assert moved[6] > 50 * moved[:6].max()
    assert sde.noiseless(scheduler.sigmas, "flow", range(7)) == []


SIGMAS = torch.linspace(1, 0, 11, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["flow", "dance", "linear", "cps", "ddim"])
def test_replay_returns_the_same_log_prob_to_the_bit(kind):
    c = sde.coefficients(SIGMAS, kind, 0.7, range(9))
    torch.manual_seed(0)
    x, v = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    for i in range(9):
        mean = sde.step_mean(x, v, c, i)
        following = mean + c.std[i] * torch.randn_like(x)
        assert torch.equal(
            sde.log_prob(following, mean, c, i), sde.log_prob(following, sde.step_mean(x, v, c, i), c, i)
        )


def test_without_noise_it_is_the_schedulers_euler_step():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    c = sde.coefficients(scheduler.sigmas, "flow", 0.7, [])
    torch.manual_seed(0)
    x = torch.randn(2, 4, 4, 4)
    for i, t in enumerate(scheduler.timesteps):
        v = torch.randn_like(x)
        stock = scheduler.step(v, t, x).prev_sample
        assert torch.allclose(sde.step_mean(x, v, c, i), stock, atol=1e-6)
        x = stock


@pytest.mark.parametrize("eta", [1e-12, 0.5, 1.0])
def test_ddim_is_the_schedulers_step(eta):
    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(10)
    torch.manual_seed(0)
    x, eps, z = torch.randn(3, 2, 4, 4, 4).unbind()
    t = int(scheduler.timesteps[3])
    kept, kept_next = float(scheduler.alphas_cumprod[t]), float(scheduler.alphas_cumprod[t - 100])
    mean, std, _ = ddim(x, eps, kept, kept_next, eta, x)
    stock = scheduler.step(eps, t, x, eta=eta, variance_noise=z).prev_sample
    assert torch.allclose(mean + std * z, stock, atol=1e-5)


def test_dance_is_the_flow_form_with_constant_d():
    """eta taken as the flow's own d at a step gives the same coefficients there."""
    flow = sde.coefficients(SIGMAS, "flow", 0.7, range(1, 9))
    for i in range(1, 9):
        s = SIGMAS[i].item()
        dance = sde.coefficients(SIGMAS, "dance", 0.7 * math.sqrt(s / (1 - s)), [i])
        for name in ("c_x", "c_v", "std"):
            assert getattr(flow, name)[i].item() == pytest.approx(getattr(dance, name)[i].item(), rel=1e-6)


def test_first_step_takes_the_second_sigma_for_the_denominator():
    c = sde.coefficients(SIGMAS, "flow", 0.7, [0])
    d = 0.7 * math.sqrt(1 / (1 - 0.9))
    assert c.std[0].item() == pytest.approx(d * math.sqrt(0.1), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "a", "steps", "expected"),
    [
        ("flow", 1e-9, 10, 0.358),
        ("flow", 0.7, 10, 0.420),
        ("flow", 0.7, 40, 0.479),
        ("flow", 0.7, 1000, 0.499),
        ("dance", 0.3, 10, 0.375),
        ("dance", 0.3, 1000, 0.500),
        ("linear", 1.0, 1000, 0.500),
        ("cps", 0.8, 10, 0.308),
        ("cps", 0.8, 1000, 0.400),
    ],
)
def test_gaussian_toy_reaches_the_marginal_but_for_cps(kind, a, steps, expected):
    """Data N(0, .5^2) has a closed-form velocity; Flow-SDE and Dance reach std .5, CPS contracts by design."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas.double()
    c = sde.coefficients(sigmas, kind, a, range(steps - 1))
    variance = torch.tensor(1.0, dtype=torch.float64)
    for i in range(steps):
        s = sigmas[i]
        # E[eps - x0 | x_s] = x_s (s - (1 - s) .25) / ((1 - s)^2 .25 + s^2)
        slope = (s - (1 - s) * 0.25) / ((1 - s) ** 2 * 0.25 + s**2)
        variance = (c.c_x[i].double() + c.c_v[i].double() * slope) ** 2 * variance + c.std[i].double() ** 2
    assert variance.sqrt().item() == pytest.approx(expected, abs=0.0025)


def test_the_last_step_carries_no_noise():
    with pytest.raises(ValueError, match=r"steps \[9\] of 10 cannot carry noise"):
        sde.coefficients(SIGMAS, "flow", 0.7, [3, 9])


def test_rounding_the_stored_latent_to_bfloat16_shows_in_the_ratio():
    """Guards the guard: with half-precision trajectories the first ratio leaves 1 by more than the clip range."""
    c = sde.coefficients(SIGMAS, "flow", 0.7, range(9))
    torch.manual_seed(0)
    x, v = torch.randn(8, 16, 16, 16), torch.randn(8, 16, 16, 16)
    mean = sde.step_mean(x, v, c, 4)
    following = mean + c.std[4] * torch.randn_like(x)
    rounded = following.bfloat16().float()
    deviation = (sde.log_prob(rounded, mean, c, 4) - sde.log_prob(following, mean, c, 4)).abs().max()
    assert deviation > 1e-5
