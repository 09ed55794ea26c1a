"""Worlds of gymnasium as environments: real worlds, compared with gymnasium itself."""

import numpy as np
import pytest
from PIL import Image

from mmrl.app.conformance import environments
from mmrl.app.conformance.running import results
from mmrl.config.environment import Environment as Section
from mmrl.core.episode import NO_ACTION, Action
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.episodes.loading import opened

gym = pytest.importorskip("gymnasium")
pytest.importorskip("minigrid")

MOVES = {"left": 0, "right": 1, "forward": 2}
MAKE = {"tile_size": 8, "max_steps": 20, "highlight": False}
GRID = {"make": MAKE, "actions": MOVES, "show": "picture"}
ID = "MiniGrid-Empty-Random-5x5-v0"
PROMPT = Prompt("p", "Go.")


def factory(id, **options):
    return opened(Section(name=f"gymnasium:{id}", options=options))


def parts(answer):
    return [np.asarray(p) if isinstance(p, Image.Image) else p for p in answer.content]


def test_an_episode_is_that_of_gymnasium_itself():
    made = factory(ID, **GRID)
    assert made.pictures
    assert made.closes
    assert not made.schemas
    world, theirs = made.make(), gym.make(ID, render_mode="rgb_array", **MAKE)
    seed, rng, ended = 2**62 + 1, np.random.default_rng(0), False
    shown = parts(world.reset(PROMPT, seed))
    theirs.reset(seed=seed)
    assert shown[0].shape == (40, 40, 3)  # 25 tokens of a model that reads 8 x 8 pixels a token
    assert (shown[0] == theirs.render()).all()
    while not ended:
        word = str(rng.choice(list(MOVES)))
        told = world.step(Action(f"I go {word.upper()}."))
        _, reward, terminated, truncated, _ = theirs.step(MOVES[word])
        assert (parts(told)[0] == theirs.render()).all()
        assert (told.reward, told.done, told.truncated) == (reward, terminated, truncated)
        ended = terminated or truncated
    world.close()


def test_the_last_word_is_the_action_and_a_turn_without_one_is_told_the_words():
    one, other = (factory(ID, **GRID).make() for _ in range(2))
    for world in (one, other):
        world.reset(PROMPT, 3)
    told = one.step(Action("leftover, forwards"))
    assert told.content == "Write one of: left, right, forward."
    assert (told.reward, told.done) == (0.0, False)
    assert NO_ACTION in told.info
    spoken = one.step(Action("<think>left? no</think> I turn right"))
    assert (parts(spoken)[0] == parts(other.step(Action("right")))[0]).all()
    assert NO_ACTION not in spoken.info


def test_a_turn_without_a_word_costs_the_penalty():
    world = factory(ID, **GRID, penalty=0.25).make()
    world.reset(PROMPT, 3)
    assert world.step(Action("hm")).reward == -0.25
    assert world.step(Action("left")).reward == 0.0


def test_what_is_shown():
    lake = factory("FrozenLake-v1", make={"is_slippery": False})
    assert not lake.pictures
    world = lake.make()
    assert world.reset(PROMPT, 0).content == ["[S]FFF\nFHFH\nFFFH\nHFFG"]
    assert "S[F]FF" in world.step(Action("2")).content[0]
    cards = factory("Blackjack-v1", actions={"stick": 0, "hit": 1}).make()
    theirs = gym.make("Blackjack-v1")
    assert cards.reset(PROMPT, 5).content == [str(list(theirs.reset(seed=5)[0]))]
    both = {**GRID, "show": "both", "wrappers": [{"FilterObservation": {"filter_keys": ["mission", "direction"]}}]}
    text, picture = parts(factory(ID, **both).make().reset(PROMPT, 0))
    assert text.startswith("mission: get to the green goal square\n")
    assert picture.shape == (40, 40, 3)
    pushed = factory("Pendulum-v1", actions={"push": [1.0]}).make()
    pushed.reset(PROMPT, 0)
    assert pushed.step(Action("push")).reward < 0


@pytest.mark.parametrize(
    ("id", "options", "named"),
    [
        ("MiniGrid-Empty-Randm-5x5-v0", GRID, "did you mean 'MiniGrid-Empty-Random-5x5-v0'.*correct the name"),
        ("Taxi-v99", {}, "no world 'Taxi-v99'.*install the package"),
        (ID, {**GRID, "actions": {"jump": 99}}, "'jump' is 99, and an action is a whole number from 0 to 6"),
        (ID, {**GRID, "actions": {"jump": "up"}}, "'jump' is 'up'"),
        (ID, {**GRID, "actions": {}}, "actions is empty"),
        ("Pendulum-v1", {}, "name the actions, each with a value of Box"),
        (ID, {**GRID, "wrappers": ["system"]}, "no wrapper 'system'"),
        (ID, {**GRID, "wrappers": ["os.system"]}, "no wrapper 'os.system'"),
        (ID, {**GRID, "wrappers": [{"TimeLimit": {"x": 3}}]}, "TimeLimit cannot be made.*correct its arguments"),
        (ID, {**GRID, "wrappers": [{"TimeLimit": 3}]}, "TimeLimit cannot be made.*no keys and values"),
        (ID, {**GRID, "make": {"x": 3}}, "options.make.*cannot be made.*correct the arguments"),
        (ID, {**GRID, "show": "film"}, "show is 'film'; write text, picture or both"),
        (ID, {**GRID, "penalty": -1}, "penalty is -1; it is 0 or more"),
        (ID, {**GRID, "film": 1}, "unexpected keyword argument 'film'"),
    ],
)
def test_what_a_world_has_not_is_named_with_the_edit(id, options, named):
    with pytest.raises(UserError, match=named.replace("(", r"\(")):
        factory(id, **options)


def test_gymnasium_that_is_not_installed_is_named_with_the_command(monkeypatch):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gymnasium" else found(name))
    with pytest.raises(UserError, match=r"needs gymnasium, which is not installed: pip install .*gymnasium"):
        factory("CartPole-v1")


@pytest.mark.parametrize("isolate", [False, True])
def test_it_keeps_the_contract_of_environments(isolate):
    case = environments.case_of(f"gymnasium:{ID}", GRID, isolate=isolate)
    found = list(results(environments.checks(case), None))
    assert [str(one) for one in found if one.outcome == "FAILED"] == []
    assert sum(one.outcome == "ok" for one in found) == 4
