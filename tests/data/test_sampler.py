"""Samplers of prompts: choices, what they learn, resumption, agreement of controllers, and refusals."""

import json
import math
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.data import Sampler
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.controller import Controller
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, SampleId
from mmrl.data.sampler import Chosen, GroupResult, score_of
from mmrl.logging.metrics import read
from mmrl.planner.plan import plan
from mmrl.rollout.curriculum import Curriculum
from mmrl.runtime.start import train
from mmrl.step.step_context import FinishedStep
from mmrl.training.loop import train_step
from tests.support import tiny

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sampler.py"
NAME = f"{EXAMPLE}:EasyToHard"
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [1.0 - s.prompt.meta["level"] / 10 for s in samples]
"""


def chosen(name=NAME, n=30, per_step=4, **options):
    prompts = [Prompt(str(i), f"text {i}", {"level": i % 3}) for i in range(n)]
    return Chosen(prompts, Sampler(name=str(name), options=options), 5, per_step)


def test_a_score_is_the_weighted_sum_of_what_has_all_rewards():
    rewards = {"a": [1.0, 0.0, math.nan], "b": [0.5, 0.5, 0.5], "watched": [math.nan] * 3}
    assert score_of(rewards, {"a": 2.0, "b": 1.0, "watched": 0.0}) == pytest.approx((2.5 + 0.5) / 2)
    assert math.isnan(score_of({"a": [math.nan]}, {"a": 1.0}))
    assert math.isnan(score_of({}, {}))


def test_easy_to_hard_goes_on_when_the_newest_level_is_learned():
    prompts = chosen(decay=0.0)
    levels = {prompts[prompts.place(5, number)].meta["level"] for number in range(40)}
    assert levels == {0}
    assert prompts.sampler.learn(9, [GroupResult(0, {}, 0.6), GroupResult(3, {}, math.nan)]) == {
        "reached": 0,
        "average": 0.6,
    }
    assert prompts.sampler.learn(10, [GroupResult(0, {}, 0.8)]) == {"reached": 1, "average": 0.0}
    assert {prompts[prompts.place(5, number)].meta["level"] for number in range(44, 84)} == {0, 1}
    assert {prompts[prompts.draw(number)].meta["level"] for number in range(60)} == {0, 1}
    prompts.sampler.learn(20, [GroupResult(0, {}, 1.0)])  # of a level that was learned before: says nothing
    again = chosen(decay=0.0)
    again.sampler.load_state_dict(json.loads(json.dumps(prompts.state())))
    assert [again.place(5, n) for n in range(84, 92)] == [prompts.place(5, n) for n in range(84, 92)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampler")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Say {i}.", "level": i % 4} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        f"""
name: tiny
pipeline: llm/chat
model: {{path: model}}
data:
  name: jsonl
  train: {{path: data.jsonl, heldout: 8, meta: [level]}}
  heldout: {{path: data.jsonl, heldout: 8, meta: [level]}}
  sampler: {{name: "{NAME}", options: {{decay: 0.0, success: 0.85}}}}
sampling: {{max_new_tokens: 4}}
rewards: [{{name: reward.py, label: easy}}]
algorithm: {{type: grpo, kl_coef: 0.0}}
train: {{steps: 4, prompts_per_step: 3, group_size: 2, micro_batch_size: 6}}
eval: {{every: null}}
checkpoint: {{every: 1}}
"""
    )
    return folder


def test_a_run_learns_from_its_groups_and_resumes_where_it_was(folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(load_recipe([folder / "recipe.yaml"]), whole)
    rows = read(whole / "metrics.jsonl")
    assert [row["sampler/reached"] for row in rows] == [1, 2, 2, 2]  # 1.0, 0.9 and 0.8 at the levels 0, 1 and 2
    train(load_recipe([folder / "recipe.yaml"], ["train.steps=2"]), cut)
    train(load_recipe([folder / "recipe.yaml"]), cut, resume=True)
    kept = ("reward/", "policy/", "sampler/")
    again = read(cut / "metrics.jsonl")
    assert [{k: v for k, v in row.items() if k.startswith(kept)} for row in again] == [
        {k: v for k, v in row.items() if k.startswith(kept)} for row in rows
    ]


class Together:
    """``gather`` of controllers in threads of one process."""

    def __init__(self, size):
        self.barrier, self.said = Barrier(size, timeout=60), [None] * size

    def gather(self, rank, values):
        self.said[rank] = json.loads(json.dumps(values))
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found


def finished(step, slots, prompts):
    """What a controller knows after a step: a group of two samples for each of its slots."""
    ids = [SampleId(step, s.index, 0, k) for s in slots for k in range(2)]
    rewards = {"easy": torch.tensor([1.0 - s.prompt.meta["level"] / 10 for s in slots for _ in range(2)])}
    return FinishedStep(step, SimpleNamespace(ids=ids, rewards=rewards), slots, 0.0, {})


def taken(size, steps, change=lambda prompts, rank: None):
    """The prompts of each step, by slot, and the metrics of every controller."""
    together, errors = Together(size), []
    slots_of, told = [[] for _ in range(steps)], [[] for _ in range(size)]

    def run(rank):
        prompts = chosen(decay=0.0, success=0.85)
        change(prompts, rank)
        controller = Controller(5, rank, size)
        object.__setattr__(controller, "peers", SimpleNamespace(gather=lambda values: together.gather(rank, values)))
        context = SimpleNamespace(controller=controller, rewards=SimpleNamespace(weights={"easy": 1.0}))
        try:
            for step in range(steps):
                own = controller.slots(step, prompts, 4)
                slots_of[step] += own
                told[rank].append(Curriculum(prompts).end_step(context, finished(step, own, prompts)))
        except UserError as error:
            errors.append(str(error))

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [[s.prompt.id for s in sorted(of, key=lambda s: s.index)] for of in slots_of], told, errors


def test_controllers_agree_and_their_number_changes_nothing():
    alone, told, _ = taken(1, 5)
    for size in (2, 4):
        prompts, each, errors = taken(size, 5)
        assert not errors
        assert prompts == alone
        assert each == told * size


def test_controllers_that_choose_differently_are_told():
    def change(prompts, rank):
        prompts.sampler.seed = rank

    _, _, errors = taken(2, 1, change)
    assert len(errors) == 2
    assert "chose different prompts for step 1" in errors[0]


BAD = """
from mmrl.data.sampler import PromptSampler

class Few(PromptSampler):
    def choose(self, step, n): return [0]

class Beyond(PromptSampler):
    def choose(self, step, n): return [len(self.prompts)] * n

class Raises(PromptSampler):
    def choose(self, step, n): return 1 / 0

class Holds(PromptSampler):
    def state_dict(self): return {"a": {1, 2}}

class Other: pass
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Few", "chose 1 indices for step 1; give 4 from 0 to 29"),
        ("Beyond", "chose 30, which is no index"),
        ("Raises", "raised ZeroDivisionError: .* at .*mine.py:11; mend that line"),
        ("Holds", "is no JSON"),
        ("Other", "is no PromptSampler"),
    ],
)
def test_a_sampler_s_mistakes_are_named(tmp_path, name, says):
    (tmp_path / "mine.py").write_text(BAD)

    def used():
        prompts = chosen(f"{tmp_path / 'mine.py'}:{name}")
        prompts.state()
        prompts.place(0, 0)

    with pytest.raises(UserError, match=says):
        used()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["data.sampler=gone.py:Mine"], "there is no file 'gone.py'"),
        ([f"data.sampler={EXAMPLE}:Gone"], "has no 'Gone'"),
        (["rollout.partial={cut_after: 2, extra: 2}"], "rollout.partial: .*remove rollout.partial or data.sampler"),
        (["devices_per_controller=2", "placement=disaggregated"], "placement: .*remove placement or data.sampler"),
    ],
)
def test_what_cannot_work_is_refused_when_the_recipe_is_read(folder, changes, says):
    with pytest.raises(RecipeError, match=says):
        load_recipe([folder / "recipe.yaml"], changes)


def test_a_plan_names_options_that_the_sampler_does_not_take(folder):
    made = plan(load_recipe([folder / "recipe.yaml"], ["data.sampler.options={colum: level}"]))
    assert any("data.sampler" in problem and "colum" in problem for problem in made.problems)
    made = plan(load_recipe([folder / "recipe.yaml"], ["data.sampler.options={column: size}"]))
    assert any("raised KeyError: 'size'" in problem for problem in made.problems)


def test_a_replaced_prompt_is_learned_from_under_its_own_index(folder):
    recipe = load_recipe([folder / "recipe.yaml"])
    run = build(recipe.recipe)
    heard = []
    run.prompts.sampler.learn = lambda step, groups: heard.extend(groups)
    slots = run.controller.slots(0, run.prompts, 3)
    train_step(run, 0, Clock(torch.device("cpu")))
    assert [run.prompts[g.index].id for g in heard] == [s.prompt.id for s in slots]
    assert all(g.rewards == {"easy": [1.0, 1.0]} and g.score == 1.0 for g in heard)
    other = run.controller.replacement(slots[0], 2, run.prompts)
    assert run.prompts[run.controller.other_index(0, slots[0].index, 2, run.prompts)] == other.prompt
