"""The diffusion pipeline against the stock one, on the shipped Stable Diffusion 3."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

import mmrl
from mmrl.algorithms.objective import GraphSteps
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.core.errors import UserError
from mmrl.core.randomness import noise
from mmrl.core.trajectory import SampleId, Slot
from mmrl.models.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "pipelines" / "diffusion" / "models" / "shapes-sd3"
LORA = {"rank": 4, "alpha": 8}


def make(lora=LORA, **sampling):
    """A pipeline and its policy on the shipped model."""
    settings = {"steps": 6, "height": 32, "width": 32, "max_sequence_length": 12, **sampling}
    recipe = Recipe.model_validate(
        {
            "name": "test",
            "pipeline": "diffusion/sd3",
            "model": {"path": str(MODEL), "lora": lora},
            "data": {"name": "shapes"},
            "sampling": settings,
            "rewards": [{"name": "shapes"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )
    pipeline = mmrl.load("pipelines", "diffusion/sd3").build(recipe, str(MODEL), torch.device("cpu"))
    return pipeline, Policy(pipeline.policy, recipe.optim, total_updates=1)


def rows(n=8):
    prompts = mmrl.load("datasets", "shapes").prompts("train")
    slots = [Slot(0, i // 4, 0, prompts[i // 4]) for i in range(n)]
    return slots, [SampleId(0, i // 4, 0, i % 4) for i in range(n)]


def move(policy, scale=0.05):
    """Give every trainable weight a push, so that the adapter is not the identity."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in policy.trainable.values():
            p.add_(scale * torch.randn_like(p))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_without_noise_it_is_the_stock_pipeline(guidance):
    pipeline, _ = make(guidance_scale=guidance)
    slots, ids = rows(4)
    pipeline.encode(slots)
    ours = pipeline.images(pipeline.sample(slots, ids, [], seed=5))
    stock = StableDiffusion3Pipeline.from_pretrained(MODEL, dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    images = stock(
        [s.prompt.text for s in slots],
        num_inference_steps=6,
        guidance_scale=guidance,
        height=32,
        width=32,
        max_sequence_length=12,
        latents=noise(5, ids, "initial", (8, 8, 8)),
        output_type="pt",
    ).images
    assert (ours - images).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["flow", "cps", "dance"])
@pytest.mark.parametrize("guidance", [pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_the_first_ratio_is_one_to_the_bit(kind, guidance):
    pipeline, policy = make(sde={"kind": kind, "noise_level": 0.6}, guidance_scale=guidance)
    move(policy)
    slots, ids = rows()
    pipeline.encode(slots)
    trajectory = pipeline.sample(slots, ids, pipeline.noisy_steps(0), seed=0)
    assert trajectory.log_probs.shape == (8, 5)
    for action in range(5):
        new = pipeline.replay(trajectory, [action], frozenset({"log_probs"}), policy.using)["log_probs"]
        assert torch.equal(new.detach()[:, 0], trajectory.log_probs[:, action])


def test_other_batch_shapes_stay_within_1e_5():
    pipeline, policy = make()
    slots, ids = rows()
    pipeline.encode(slots)
    trajectory = pipeline.sample(slots, ids, [0, 1], seed=0)
    new = pipeline.replay(trajectory.rows([2]), [1], frozenset({"log_probs"}), policy.using)["log_probs"]
    assert (new[0, 0].exp() / trajectory.log_probs[2, 1].exp() - 1).abs() < 1e-5


def test_noise_belongs_to_the_sample_and_not_to_the_batch():
    pipeline, _ = make()
    slots, ids = rows()
    pipeline.encode(slots)
    whole = pipeline.sample(slots, ids, [1], seed=0)
    half = pipeline.sample(slots[4:], ids[4:], [1], seed=0)
    assert torch.allclose(whole.clean[4:], half.clean, atol=1e-4)
    assert not torch.allclose(whole.clean[0], whole.clean[1], atol=0.1)
    other = pipeline.sample(slots, ids, [1], seed=1)
    assert not torch.allclose(whole.clean, other.clean, atol=0.1)


def test_switching_the_adapter_off_gives_the_base_model():
    pipeline, policy = make()
    slots, ids = rows(4)
    pipeline.encode(slots)
    base = pipeline.sample(slots, ids, [], seed=0).clean
    move(policy)
    assert not torch.allclose(pipeline.sample(slots, ids, [], seed=0).clean, base, atol=1e-3)
    with policy.using("reference"):
        assert torch.equal(pipeline.sample(slots, ids, [], seed=0).clean, base)


def test_reference_of_full_fine_tuning_is_a_copy():
    pipeline, policy = make(lora=None)
    policy.keep("reference")
    slots, ids = rows(4)
    pipeline.encode(slots)
    base = pipeline.sample(slots, ids, [], seed=0).clean
    move(policy, 0.01)
    changed = pipeline.sample(slots, ids, [], seed=0).clean
    assert not torch.allclose(changed, base, atol=1e-3)
    with policy.using("reference"):
        assert torch.equal(pipeline.sample(slots, ids, [], seed=0).clean, base)
    assert torch.equal(pipeline.sample(slots, ids, [], seed=0).clean, changed)


def test_every_trainable_weight_of_the_forward_moves_in_two_steps():
    for lora in (LORA, None):
        pipeline, policy = make(lora=lora)
        before = {k: p.detach().clone() for k, p in policy.trainable.items()}
        slots, ids = rows()
        pipeline.encode(slots)
        for seed in range(2):
            trajectory = pipeline.sample(slots, ids, [1], seed=seed)
            new = pipeline.replay(trajectory, [0], frozenset({"log_probs"}), policy.using)
            policy.backward((new["log_probs"] * torch.randn(8, 1)).sum())
            policy.apply()
        still = [k for k, p in policy.trainable.items() if torch.equal(p.detach(), before[k])]
        # The last block drops its text stream, so nothing reads its text queries.
        assert all("transformer_blocks.3.attn.add_q_proj" in k for k in still), still


def test_draft_over_all_steps_is_full_back_propagation():
    """K = N equals the gradient of the whole chain; K = 1 that of the last step alone, from detached latents."""
    pipeline, policy = make(steps=3)
    move(policy)
    slots, ids = rows(2)
    pipeline.encode(slots)

    def gradient(images):
        images.mean().backward()
        found = {k: p.grad.clone() for k, p in policy.trainable.items() if p.grad is not None}
        policy.optimizer.zero_grad()
        return found

    def by_hand(detached):
        features = pipeline.batch_features(slots)
        sigmas, timesteps, *_ = pipeline.adapter.schedule(3)
        x = noise(0, ids, "initial", pipeline.shape)
        for i in range(3):
            x = x.detach() if i in detached else x
            x = x + (sigmas[i + 1] - sigmas[i]) * pipeline.velocity(x, timesteps[i].expand(2), features)
        return (pipeline.adapter.decode(x) / 2 + 0.5).clamp(0, 1)

    for last, detached in ((3, ()), (1, (2,))):
        ours, reference = (
            gradient(pipeline.generate(slots, ids, GraphSteps(3 - last, 2), 0, frozenset(), nullcontext)["images"]),
            gradient(by_hand(detached)),
        )
        for k, g in reference.items():
            assert torch.allclose(ours[k], g, rtol=1e-3, atol=1e-7), k


def test_policy_gradient_matches_finite_differences():
    pipeline, policy = make(steps=4)
    move(policy)
    slots, ids = rows(4)
    pipeline.encode(slots)
    trajectory = pipeline.sample(slots, ids, [1], seed=0)
    # float64 throughout, or the difference quotient drowns in rounding
    pipeline.policy.double()
    for row in (pipeline.features.get(key) for key in {pipeline.key(slot.prompt) for slot in trajectory.slots}):
        row.update({k: v.double() for k, v in row.items()})

    def objective():
        features = pipeline.batch_features(trajectory.slots)
        sigmas, timesteps, *_ = pipeline.adapter.schedule(4)
        v = pipeline.adapter.predict(policy.module, trajectory.states[:, 0], timesteps[1].expand(4), features)
        from mmrl.algorithms import sde

        c = sde.coefficients(sigmas, "flow", 0.7, [1])
        mean = c.c_x[1].double() * trajectory.states[:, 0].double() + c.c_v[1].double() * v
        return (-((trajectory.states[:, 1].double() - mean) ** 2).flatten(1).mean(1) / (2 * c.std[1] ** 2)).sum()

    objective().backward()
    name, p = next((k, p) for k, p in policy.trainable.items() if "lora_B" in k)
    direction = torch.randn_like(p)
    slope = (p.grad * direction).sum().item()
    h = 1e-6
    with torch.no_grad():
        p.add_(h * direction)
        up = objective()
        p.sub_(2 * h * direction)
        down = objective()
    assert ((up - down) / (2 * h)).item() == pytest.approx(slope, rel=1e-4), name


def test_window_stays_inside_and_moves():
    pipeline, _ = make(window={"size": 2, "first": 1, "last": 5})
    windows = {tuple(pipeline.noisy_steps(step)) for step in range(60)}
    assert windows == {(1, 2), (2, 3), (3, 4)}
    assert pipeline.noisy_steps(7) == pipeline.noisy_steps(7)
    pipeline, _ = make(window={"size": 2, "strategy": "progressive", "every": 3})
    assert [pipeline.noisy_steps(s)[0] for s in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_ddim_is_refused_where_a_step_has_no_noise_left():
    ddim = "sampling.sde={kind: ddim, noise_level: 1.0}"
    edit = r"step 8 of 10 ends at sigma 0.001.*set sampling.window to \{size: 8, last: 8\}"
    for window in ("null", "{size: 2}"):
        loaded = load_recipe(["shapes-lora"], [ddim, f"sampling.window={window}"])
        with pytest.raises(UserError, match=edit):
            build(loaded.recipe)
    loaded = load_recipe(["shapes-lora"], [ddim, "sampling.window=null", "sampling.steps=2"])
    with pytest.raises(UserError, match=r"step 0 of 2 .*raise sampling\.steps"):
        build(loaded.recipe)
    loaded = load_recipe(["shapes-lora"], [ddim, "sampling.window={size: 8, last: 8}"])
    assert build(loaded.recipe).pipeline.noisy_steps(0) == list(range(8))


def test_groups_may_start_from_one_noise():
    pipeline, _ = make(same_initial_noise=True)
    _, ids = rows()
    first = pipeline.initial(ids, 0, pipeline.adapter.schedule(6))
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[4])


def test_a_prompt_is_encoded_once():
    pipeline, _ = make()
    slots, _ = rows()
    keys = pipeline.encode(slots)
    kept = pipeline.features.get(keys[0])["embeds"]
    pipeline.encode(slots)
    assert pipeline.features.get(keys[0])["embeds"] is kept
    assert len(pipeline.features) == 2


def test_slots_are_one_global_permutation():
    prompts = mmrl.load("datasets", "shapes").prompts("heldout")
    c = Controller(seed=3)
    seen = [s.prompt.id for step in range(3) for s in c.slots(step, prompts, 23)]
    assert sorted(seen) == sorted(p.id for p in prompts)
    assert seen != [p.id for p in prompts]
    assert [s.prompt.id for s in c.slots(3, prompts, 23)] != seen[:23]


def test_shipped_model_is_small_and_has_its_log():
    weights = sum(p.stat().st_size for p in MODEL.rglob("*.safetensors"))
    assert weights <= 8_000_000
    last = json.loads((MODEL / "log.jsonl").read_text().splitlines()[-1])
    assert last["stage"] == "flow"
