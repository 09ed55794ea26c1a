"""Answers that are revised: real rewards score each, and the model is told what they say."""

import pytest

from mmrl.app.conformance import environments
from mmrl.app.conformance.running import results
from mmrl.config.environment import Environment as Section
from mmrl.config.loader import load_recipe
from mmrl.core.episode import Action
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.episodes.loading import opened
from tests.support.episodes import SMALL, played

NUMBER = {"reward": "answer:number", "options": {"after": "answer:"}}
PROMPT = Prompt("p", "Compute 1+2", meta={"answer": 3})
OWN = '''
import mmrl
from mmrl.core.reward_contract import Failed

@mmrl.reward(inputs=("text",))
async def short(samples, *, context, most=4):
    """The share of a text that is not too long."""
    left = [most / max(most, len(s.text)) for s in samples]
    return {"score": left, "feedback": [f"{len(s.text)} characters." if len(s.text) > most else None for s in samples]}

@mmrl.reward(inputs=("text",))
def lost(samples, *, context):
    return [Failed("no scale")] * len(samples)

@mmrl.reward(inputs=("text",), device=True)
def large(samples, *, context):
    return [1.0] * len(samples)

@mmrl.reward(inputs=("text",), per="group")
def best(samples, *, context):
    return [1.0] * len(samples)

@mmrl.reward(inputs=("text",))
def odd(samples, *, context):
    return {"score": [0.0] * len(samples), "feedback": "one for all"}
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return str(file)


def factory(options, **section):
    return opened(Section(name="revise", options=options, **section))


def answered(made, *texts):
    world = made.make()
    world.reset(PROMPT, 0)
    return [world.step(Action(text)) for text in texts]


def test_an_answer_is_scored_and_asked_again_until_it_is_right():
    made = factory({**NUMBER, "tries": 3})
    wrong, right = answered(made, "answer: 4", "answer: 3")
    assert (wrong.content, wrong.reward, wrong.done) == ("That scores 0. Try again.", 0.0, False)
    assert (right.content, right.reward, right.done) == ("", 1.0, True)
    told = answered(made, *["answer: 4"] * 3)
    assert [(one.reward, one.done) for one in told] == [(0.0, False), (0.0, False), (0.0, True)]


def test_the_reward_of_an_episode_is_the_last_score_and_the_rewards_own_text_is_told(own):
    made = factory({"reward": f"{own}:short", "options": {"most": 2}, "told": "{feedback} {{{score}}} {prompt}"})
    told = answered(made, "abcd", "abcdefgh")
    assert told[0].content == "4 characters. {0.5} Compute 1+2"
    assert [one.reward for one in told] == [0.5, -0.25]
    assert sum(one.reward for one in told) == 2 / 8
    assert [one.done for one in told] == [False, True]
    enough = answered(factory({"reward": f"{own}:short", "enough": 0.5}), "abcdefgh")
    assert (enough[0].reward, enough[0].done) == (0.5, True)


@pytest.mark.parametrize(("name", "why"), [("lost", "gave no score: no scale"), ("odd", "no list of 1 texts")])
def test_an_answer_without_a_score_ends_the_episode(own, name, why):
    with pytest.raises(RuntimeError, match=why):
        answered(factory({"reward": f"{own}:{name}"}), "a")


def test_the_last_answer_is_what_rewards_see_and_what_was_told_is_not_trained(own):
    section = f"environment={{name: revise, options: {{reward: '{own}:short', options: {{most: 1}}}}, max_tokens: 90}}"
    loaded = load_recipe(["sums"], [*SMALL, section, "rewards=[{name: environment}]"])
    pipeline, script, rows = played(loaded, [("44", True, "stop"), ("1555", True, "stop")])
    (sample,) = pipeline.samples(rows, frozenset({"text"}))
    assert (sample.text, sample.episode.reward, len(sample.episode.turns)) == ("1555", 0.25, 2)
    assert "2 characters. That scores 0.5. Try again." in pipeline.conditioner.saved.decode(
        script.requests[1].prompt_ids
    )
    kinds = [segment.kind for segment in rows.segments[0]]
    assert kinds == ["prompt", "written", "told", "written"]


def test_files_and_options_are_looked_up_from_the_folder_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("environment: {name: revise, options: {reward: mine.py:short}}\nrewards: [{name: environment}]\n")
    loaded = load_recipe(["sums", str(recipe)])
    assert loaded.recipe.environment.options["reward"] == f"{tmp_path}/mine.py:short"
    with pytest.raises(UserError, match=r"environment\.options\.reward: .*there is no file"):
        load_recipe(["sums", str(recipe)], ["environment.options.reward=other.py:short"])


@pytest.mark.parametrize("isolate", [False, True])
def test_it_keeps_the_contract_of_environments(isolate):
    found = list(results(environments.checks(environments.case_of("revise", NUMBER, isolate=isolate)), None))
    assert [str(one) for one in found if one.outcome == "FAILED"] == []


def test_a_reward_with_a_model_has_no_processes_of_its_own(own):
    assert answered(factory({"reward": f"{own}:large"}), "a")[0].done
    with pytest.raises(UserError, match=r"environment\.isolate: .*computes with a model.*set environment\.isolate"):
        factory({"reward": f"{own}:large"}, isolate=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "reward"),
        ({"reward": "answr:number"}, r"options\.reward.*answer"),
        ({"reward": "answer:numbr"}, r"options\.reward: answer:numbr: answer has no 'numbr'"),
        ({**NUMBER, "options": {"behind": "x"}}, r"options\.reward: answer:number: .*behind"),
        ({"reward": "shapes"}, r"options\.reward: shapes: reads 'image'"),
        ({"reward": "environment"}, "is what this environment gives"),
        ({**NUMBER, "tries": 0}, "tries is 0; it is 1 or more"),
        ({**NUMBER, "told": "{mark}"}, r"told: '\{mark\}' is no text"),
    ],
)
def test_what_cannot_be_served_is_named_with_the_edit(options, named):
    with pytest.raises(UserError, match=named):
        factory(options)


def test_a_reward_of_groups_is_refused(own):
    with pytest.raises(UserError, match="take a reward that scores single samples"):
        factory({"reward": f"{own}:best"})
