"""Games of TextArena: real games, each with the random numbers that it would draw alone."""

import random
import re

import pytest

from mmrl.app.conformance import environments
from mmrl.app.conformance.running import results
from mmrl.config.environment import Environment as Section
from mmrl.core.episode import NO_ACTION, Action
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.episodes.loading import opened

arena = pytest.importorskip("textarena")
ID = "GuessTheNumber-v0"


def factory(id=ID, **options):
    return opened(Section(name=f"textarena:{id}", options=options))


def begun(factory, seed):
    game = factory.make()
    return game, game.reset(Prompt("p", ""), seed)


def test_a_game_is_that_of_textarena_itself_and_shows_what_is_new():
    theirs = arena.make(f"{ID}-raw")
    state = random.getstate()
    theirs.reset(num_players=1, seed=11)
    secret = theirs.game_number
    random.setstate(state)
    game, shown = begun(factory(), 11)
    assert shown == theirs.get_observation()[1][0][1]
    low = game.step(Action(f"I say [{secret - 1 or secret + 1}]."))
    assert re.fullmatch(r"The target number is (higher|lower)\.", low.content)
    assert (low.reward, low.done) == (0.0, False)
    wrong = game.step(Action("no number"))
    assert "invalid move" in wrong.content
    assert [NO_ACTION in one.info for one in (low, wrong)] == [False, True]
    right = game.step(Action(f"[{secret}]"))
    assert NO_ACTION not in right.info
    assert (right.reward, right.done) == (1.0, True)
    assert random.getstate() == state


def test_a_move_that_the_game_refuses_costs_the_penalty():
    game, _ = begun(factory(penalty=0.5), 11)
    assert (game.step(Action("no number")).reward, game.step(Action("none")).reward) == (-0.5, -0.5)
    game, _ = begun(factory(penalty=0.5), 11)
    assert [game.step(Action(word)).reward for word in ("no number", "[3]")] == [-0.5, 0.0]


def test_games_beside_one_another_draw_nothing_from_each_other():
    made = factory("FrozenLake-v0")

    def alone(seed):
        game, shown = begun(made, seed)
        return [shown, *(game.step(Action(word)).content for word in ("[right]", "[down]"))]

    expected = [alone(1), alone(2)]
    games = [begun(made, 1), begun(made, 2)]
    found = [[shown] for _, shown in games]
    for word in ("[right]", "[down]"):
        for n, (game, _) in enumerate(games):
            random.random()
            found[n].append(game.step(Action(word)).content)
    assert found == expected
    assert expected[0] != expected[1]


def test_it_keeps_the_contract_of_environments():
    found = list(results(environments.checks(environments.case_of(f"textarena:{ID}", {}, isolate=False)), None))
    assert [str(one) for one in found if one.outcome == "FAILED"] == []


@pytest.mark.parametrize(
    ("id", "options", "named"),
    [
        ("GuesTheNumber-v0", {}, r"no game 'GuesTheNumber-v0'.*did you mean 'GuessTheNumber-v0'"),
        ("TicTacToe-v0", {}, r"cannot be played here by one player.*take another game"),
        (ID, {"make": {"most": 3}}, r"cannot be played here.*correct options\.make"),
        (ID, {"penalty": -1}, "penalty is -1; it is 0 or more"),
        (ID, {"most": 3}, "unexpected keyword argument 'most'"),
    ],
)
def test_what_cannot_be_played_is_named_with_the_edit(id, options, named):
    with pytest.raises(UserError, match=named):
        factory(id, **options)
