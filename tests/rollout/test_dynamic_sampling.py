"""Dynamic sampling tried ahead: what is sampled for nothing changes, and which group stands in a slot never does."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError
from mmrl.core.trajectory import Prompt, Slot
from mmrl.rewards.scoring import Scores
from mmrl.rollout.collect import collect_batch
from mmrl.rollout.dynamic_sampling import DynamicSampling, resample
from mmrl.rollout.encoding import encode
from mmrl.step.batch import Round
from mmrl.step.step_context import FinishedStep
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import train_step
from tests.support import tiny

PROMPTS = [Prompt(str(n), str(n)) for n in range(40)]
FEW = '''
import mmrl

@mmrl.reward(inputs=("text",))
def few(samples, *, context):
    """All equal for three prompts of four."""
    return [float(int(s.prompt.id.split(":")[1]) % 4 == 0 and s.id.sample == 0) for s in samples]

@mmrl.reward(inputs=("text",))
def length(samples, *, context):
    return [float(len(s.text)) for s in samples]

@mmrl.reward(inputs=("text",))
def short(samples, *, context):
    return [-float(len(s.text)) for s in samples]
'''


class OneByOne(DynamicSampling):
    """Nothing is tried ahead."""

    def ahead(self, rounds, tried):
        return min(1, self.most - tried)


def outcome(attempts, differs, slots, rank=0, size=1):
    """Which (slot, attempt) stand where ``differs`` has the pairs whose rewards do, and the metrics."""

    def sample(asked):
        rewards = [v for s in asked for v in (0.0, float((s.index, s.attempt) in differs))]
        return Round(asked, [], [], Scores(torch.tensor(rewards, dtype=torch.float64), {}))

    recipe = SimpleNamespace(train=SimpleNamespace(group_size=2))
    controller = Controller(0, rank, size)
    run = SimpleNamespace(recipe=recipe, controller=controller, prompts=PROMPTS, rewards=SimpleNamespace(by_batch=[]))
    metrics = StepMetrics()
    rounds = [sample(controller.slots(0, PROMPTS, slots))]
    standing = resample(run, attempts, rounds, sample, metrics)
    chosen = [rounds[r].slots[n] for r, n in standing.chosen]
    asked = [(s.index, s.attempt) for r in rounds for s in r.slots]
    return [(s.index, s.attempt, s.prompt.id) for s in chosen], asked, metrics


pairs = st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=20)


@given(differs=pairs, valid=st.floats(0, 1), most=st.integers(1, 10), slots=st.integers(1, 7))
def test_trying_ahead_changes_no_outcome(differs, valid, most, slots):
    ahead = DynamicSampling(most)
    ahead.valid = valid
    standing, asked, metrics = outcome(ahead, differs, slots)
    plain, needed, _ = outcome(OneByOne(most), differs, slots)
    assert standing == plain
    assert set(needed) <= set(asked)
    assert len(set(asked)) == len(asked)
    assert all(attempt < most for _, attempt in asked)
    row = metrics.means()
    assert row["sampling/groups"] == len(asked)
    assert row["sampling/ahead_unused"] == len(asked) - len(needed)
    assert row["sampling/valid"] == pytest.approx(len(differs & set(asked)) / len(asked))


@given(differs=pairs, valid=st.floats(0, 1), size=st.integers(2, 4))
def test_controllers_try_the_same_groups(differs, valid, size):
    def attempts():
        made = DynamicSampling(10)
        made.valid = valid
        return made

    whole, asked, metrics = outcome(attempts(), differs, 7)
    parts = [outcome(attempts(), differs, 7, rank, size) for rank in range(size)]
    assert sorted(one for part in parts for one in part[0]) == whole
    assert sorted(one for part in parts for one in part[1]) == sorted(asked)
    sums = [json.loads(json.dumps(part[2].sums())) for part in parts]
    assert parts[0][2].means(lambda _: sums) == metrics.means()


def test_as_many_are_tried_as_make_a_good_group_likely():
    attempts = DynamicSampling(10)
    assert [attempts.ahead(rounds, 1) for rounds in (1, 2, 3)] == [1, 2, 4]
    assert attempts.end_step(None, FinishedStep(0, None, [], 0.0, {"sampling/valid": 0.0})) == {
        "sampling/valid_ema": 0.9
    }
    attempts.valid = 0.25
    assert attempts.ahead(1, 1) == 4
    assert attempts.ahead(2, 5) == 5  # eight, of which five are left
    attempts.valid = 0.0
    assert attempts.ahead(1, 1) == 9
    assert attempts.ahead(2, 10) == 0


def test_an_unusable_prompt_does_not_bring_the_same_attempt_twice():
    controller = Controller(5)
    first = Slot(0, 0, 0, PROMPTS[0])
    tried = [controller.replacement(first, n, PROMPTS) for n in (1, 2, 3)]
    bad = tried[0].prompt.id

    def features(slots):
        if any(slot.prompt.id == bad for slot in slots):
            raise BadPromptError(bad, "cannot be used")
        return []

    run = SimpleNamespace(controller=controller, prompts=PROMPTS, pipeline=SimpleNamespace(encode=features))
    slots, _, named = encode(run, tried)
    assert sorted(s.attempt for s in slots)[:2] == [2, 3]
    assert len({s.attempt for s in slots}) == 3
    assert [failure.prompt for failure in named]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resampling")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(FEW)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl}, heldout: {path: data.jsonl}}
sampling: {max_new_tokens: 10}
rewards: [{name: "reward.py:few"}]
algorithm: {type: dapo}
train: {steps: 4, prompts_per_step: 6, group_size: 4, micro_batch_size: 4}
optim: {lr: 1.0e-3}
eval: {every: null, samples: 8}
"""
    )
    return folder


def with_attempts(run, attempts):
    return replace(
        run, rollout=replace(run.rollout, parts={**run.rollout.parts, "attempts": attempts}, strategy=attempts)
    )


def steps(folder, made, *overrides):
    loaded = load_recipe([folder / "recipe.yaml"], overrides)
    run = build(loaded.recipe)
    run = run if made is None else with_attempts(run, made(run.rollout.parts["attempts"].most))
    rows = [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(3)]
    return rows, [p.detach().clone() for p in run.policy.trainable.values()]


@pytest.mark.slow
def test_trying_ahead_trains_the_same_weights_to_the_bit(folder):
    """Where a micro-batch holds samples of one group, so that their shape is the same whatever is beside them."""
    ahead, weights = steps(folder, None)
    plain, same = steps(folder, OneByOne)
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    for row, other in zip(ahead, plain, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith("sampling/")} == {
            k: v for k, v in other.items() if not k.startswith("sampling/")
        }
    assert sum(row["sampling/rounds"] for row in ahead) < sum(row["sampling/rounds"] for row in plain)
    assert sum(row["sampling/ahead_unused"] for row in ahead) > 0
    assert ahead[-1]["sampling/valid_ema"] < 0.9


def test_rewards_are_normalised_by_the_groups_that_stand(folder):
    """Their spread is known when all groups are: of one sample in four that gets 1 it is sqrt(3) / 4."""
    normal = [
        "rewards=[{name: 'reward.py:few', normalize: batch}]",
        "algorithm={type: dr_grpo, dynamic_sampling: true}",
    ]
    loaded = load_recipe([folder / "recipe.yaml"], normal)
    run = build(loaded.recipe)
    slots = run.controller.slots(0, run.prompts, 6)
    batch = collect_batch(run, slots, 0, Clock(torch.device("cpu")), StepMetrics())
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25]) / (3**0.5 / 4 + 1e-4)
    assert any(i.attempt for i in batch.ids)
    torch.testing.assert_close(batch.advantages, expected.repeat(6))


def test_what_rewards_say_is_not_cancelled_before_they_are_scaled(folder):
    """Two rewards whose sum is equal everywhere before the batch scales them: no group is flat."""
    opposed = "rewards=[{name: 'reward.py:length', normalize: batch}, {name: 'reward.py:short', normalize: batch}]"
    loaded = load_recipe([folder / "recipe.yaml"], [opposed])
    run = build(loaded.recipe)
    metrics = StepMetrics()
    collect_batch(run, run.controller.slots(0, run.prompts, 6), 0, Clock(torch.device("cpu")), metrics)
    assert metrics.means()["sampling/valid"] > 0.8
