"""What the parts of a run hand to one another, at the smallest sizes: gradients, noise, prompts, weights, bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn

from mmrl.app.build import build, weights_of
from mmrl.checkpoint import run_state, writer
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Optim
from mmrl.controller import Controller
from mmrl.core import checkpoint_reader as reader
from mmrl.core.randomness import noise
from mmrl.core.trajectory import Prompt, SampleId
from mmrl.data.loading import load_prompts
from mmrl.families.text.engine_sampling import request
from mmrl.models.merging import merged_weights
from mmrl.models.policy import Policy
from mmrl.models.text.token_sampling import uniforms
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from mmrl.training.evaluation import Evaluator
from tests.support import tiny
from tests.support.partial_rollouts import Room

RECIPE = """
name: wiring
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 4}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.1}
train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
eval: {every: 1, samples: 8}
"""
REWARD = '''
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    """How many different characters there are."""
    return [float(len(set(s.text))) for s in samples]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wiring")
    tiny.language_model(folder / "model")
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def test_controllers_step_on_the_gradient_of_all_rows():
    recipe, rows, room = load_recipe(["sums"], ["controllers=2"]).recipe, torch.randn(4, 3), Room(2)
    modules = [linear() for _ in range(2)]  # not in the threads: they share torch's seed

    def work(rank):
        module = modules[rank]
        weights = weights_of(module, recipe, Controller(0, rank, 2, room.member(rank)))
        module(rows[rank::2]).square().sum().backward()
        weights.gather_gradients()
        return module.weight.grad

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    whole = linear()
    whole(rows).square().sum().backward()
    for gradient in found:
        torch.testing.assert_close(gradient, whole.weight.grad)


DRAWS = {
    "noise of a picture": lambda i: noise(5, [i], "initial", (4,)),
    "choice of tokens": lambda i: uniforms(5, [i], 4),
    "seed of an engine": lambda i: torch.tensor(
        [request(5, i, Prompt("p", "p"), {"input_ids": torch.tensor([1])}, {}, "text", (), ()).seed]
    ),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_part_of_a_samples_name_changes_what_is_drawn(draw):
    ids = [SampleId(1, 2, 3, 4), SampleId(9, 2, 3, 4), SampleId(1, 9, 3, 4), SampleId(1, 2, 9, 4), SampleId(1, 2, 3, 9)]
    assert torch.equal(draw(ids[0]), draw(ids[0]))
    for one, other in combinations(ids, 2):
        assert not torch.equal(draw(one), draw(other)), (one, other)


def test_an_evaluation_is_of_prompts_that_training_never_has(folder, tmp_path):
    loaded = load_recipe([folder / "recipe.yaml"], [])
    train(loaded, tmp_path / "run")
    listing = json.loads((tmp_path / "run" / "samples" / "step_000001.json").read_text())
    shown = {sample["prompt"] for sample in listing["samples"]}
    trained = {prompt.text for prompt in build(loaded.recipe).prompts}
    assert (len(shown), len(trained)) == (8, 32)
    assert not shown & trained


def pushed(policy):
    """Give every trained weight a push."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in policy.trainable.values():
            weight.add_(0.3 * torch.randn_like(weight))


def test_an_evaluation_has_noise_of_its_own_and_takes_the_averaged_weights(folder):
    def shown(seed, ema, push):
        loaded = load_recipe([folder / "recipe.yaml"], [f"seed={seed}", f"optim.ema_decay={ema}"])
        run = build(loaded.recipe)
        if push:
            pushed(run.policy)  # the average stays behind
        heldout = Evaluator(run, load_prompts(loaded.recipe, "heldout"))
        return [sample.text for sample in heldout.score(8)[1].samples]

    assert shown(1, 0.9, False) == shown(2, 0.9, True)
    assert shown(1, "null", False) != shown(1, "null", True)


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_the_reference_of_text_is_the_policy_that_began(folder, lora):
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.lora={json.dumps(lora)}"])
    run = build(loaded.recipe)
    slots = run.controller.slots(0, run.prompts, 2)
    run.pipeline.encode(slots)
    drawn = run.pipeline.sample(slots, [SampleId(0, slot.index, 0, 0) for slot in slots], [], 0)
    pushed(run.policy)
    needs = frozenset({"log_probs", "reference_log_probs"})
    found = {
        k: v * drawn.padded("action_mask") for k, v in run.pipeline.replay(drawn, [0], needs, run.policy.using).items()
    }
    torch.testing.assert_close(found["reference_log_probs"], drawn.padded("log_probs"), atol=1e-5, rtol=0)
    assert (found["log_probs"] - drawn.padded("log_probs")).abs().max() > 0.01


def test_the_reference_of_pictures_is_the_model_without_its_adapter():
    small = ["sampling.steps=3", "sampling.window=null", "algorithm.kl_coef=0.1"]
    loaded = load_recipe(["shapes-lora"], small)
    run = build(loaded.recipe)
    slots = run.controller.slots(0, run.prompts, 1)
    run.pipeline.encode(slots)
    drawn = run.pipeline.sample(slots, [SampleId(0, 0, 0, 0)], [0], 0)

    def distance():
        needs = frozenset({"log_probs", "reference_distance"})
        return run.pipeline.replay(drawn, [0], needs, run.policy.using)["reference_distance"].item()

    assert distance() == 0  # an adapter begins without effect
    pushed(run.policy)
    assert distance() > 0


def test_a_checkpoint_holds_all_that_the_next_update_needs(tmp_path):
    def trained(seed):
        optim = Optim(lr=0.1, ema_decay=0.9, schedule="linear")
        critic = Policy(linear(seed + 1), optim, 10, prefix="critic_")
        both = {"policy": Policy(linear(seed), optim, 10), "critic": critic}
        return SimpleNamespace(**both, trained=both, rollout=SimpleNamespace(parts={}))

    def update(run):
        for policy in (run.policy, run.critic):
            policy.backward(policy.module(torch.ones(1, 3)).square().mean())
            policy.apply()
        return [*run.policy.module.parameters(), *run.critic.module.parameters(), run.policy.copies["ema"]["weight"]]

    run, other = trained(0), trained(7)
    for _ in range(3):
        update(run)
    writer.save(tmp_path, run_state.of_run(run, 3), keep=1)
    run_state.restore(other, reader.load(tmp_path, 3))
    for mine, its in zip(update(other), update(run), strict=True):
        assert torch.equal(mine, its)


def test_merged_weights_compute_what_the_adapter_computes():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    config = peft.LoraConfig(r=2, lora_alpha=7, target_modules=["0", "2"], init_lora_weights=False)
    adapted, x = peft.get_peft_model(plain, config), torch.randn(3, 6)
    expected = adapted(x)
    merged = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    merged.load_state_dict({k.removeprefix("base_model.model."): v for k, v in merged_weights(adapted).items()})
    torch.testing.assert_close(merged(x), expected)
    with adapted.disable_adapter():
        assert (adapted(x) - expected).abs().max() > 0.1


def test_the_optimizers_state_is_there_in_every_phase_of_a_plan(folder):
    made = plan(load_recipe([folder / "recipe.yaml"], ["device=cpu"]))
    kept = {role.name: role.bytes for role in made.roles}["optimizer"]
    assert kept > 0
    assert {phase.parts.get("optimizer state") for phase in made.phases} == {kept}
