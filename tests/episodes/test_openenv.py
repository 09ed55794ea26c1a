"""Worlds behind OpenEnv: a server of OpenEnv itself where there is one, and one that speaks as it was seen to."""

import json
import os
import re
import socket

import httpx
import pytest

from mmrl.app.conformance import environments
from mmrl.app.conformance.running import results
from mmrl.config.environment import Environment as Section
from mmrl.core.episode import FAILED, NO_ACTION, Action, Call
from mmrl.core.errors import UserError
from mmrl.core.media import open_image
from mmrl.core.trajectory import Prompt
from mmrl.episodes.environment import told_of
from mmrl.episodes.loading import closed, opened
from mmrl.episodes.pool import Pool, returned_by
from tests.support import openenv_world as served

pytest.importorskip("websockets")
PROMPT = Prompt("p", "Walk.")
WORDS = {word: {"move": word} for word in ("left", "right", "stay", "hang", "crash", "exit")}
REAL = pytest.param(
    "real",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(served.PYTHON not in os.environ, reason=f"{served.PYTHON} names no Python with openenv"),
    ],
)
KINDS = pytest.mark.parametrize("kind", ["recorded", REAL])


def of_kind(kind):
    return served.of_openenv() if kind == "real" else served.of_words(served.as_openenv)


@pytest.fixture(scope="module")
def server(request):
    with of_kind(request.param) as address:
        yield address


BOTH = pytest.mark.parametrize("server", ["recorded", REAL], indirect=True, scope="module")


def factory(address, **options):
    return opened(Section(name=f"openenv:{address}", options=options))


def called(**arguments):
    return Action("", (Call("c", "act", arguments),))


def texts(told):
    return "".join(part for part in told.content if isinstance(part, str))


@BOTH
def test_an_episode_is_that_of_the_world_itself(server):
    made = factory(server, picture="screen")
    assert made.pictures
    assert made.closes
    world, theirs = made.make(), served.Row()
    shown = world.reset(PROMPT, 2**31 + 3)
    theirs.reset(3)
    for _ in range(5):
        told = told_of(returned_by(lambda shown=shown: shown))[0][0]
        assert texts(told) == f"goal: Walk to 4.\nplace: {theirs.place}\n"
        assert open_image(told.pictures[0]).getpixel((0, 0)) == (50 * theirs.place, 0, 0)
        if told.done:
            break
        (shown,) = world.step(called(move="right"))
        theirs.step("right")
        assert (shown.reward, shown.done, shown.call_id) == (theirs.reward, bool(theirs.reward), "c")
    assert shown.done
    world.close()


@BOTH
def test_the_tool_is_the_schema_of_the_server_and_what_it_refuses_is_told(server):
    made = factory(server, show=["place"])
    (tool,) = made.schemas
    assert tool["function"]["parameters"]["properties"].keys() == {"move"}
    assert tool["function"]["parameters"]["required"] == ["move"]
    world = made.make()
    before = world.reset(PROMPT, 1).content
    for call, why in [
        (Call("c", "act", {"move": "up"}), "refused: move: Input should be 'left', 'right'"),
        (Call("c", "act", {"go": "up"}), "refused: move: Field required"),
        (Call("c", "jump"), "there is no tool 'jump'; there is act"),
        (Call("c", "", error="the call was cut"), "the call was cut"),
    ]:
        (told,) = world.step(Action("", (call,)))
        assert why in json.loads(told.content)["error"]
        assert FAILED in told.info
    assert world.step(Action("no call")).content == "Call act."
    assert world.step(called(move="stay"))[0].content == before
    world.close()


@BOTH
def test_words_and_a_field_are_actions(server):
    world = factory(server, actions=WORDS, show=["place"]).make()
    place = int(world.reset(PROMPT, 5).content[0])
    told = world.step(Action("leftover"))
    assert told.content == "Write one of: left, right, stay, hang, crash, exit."
    assert NO_ACTION in told.info
    assert world.step(Action("not left: RIGHT")).content == [str(place + 1)]
    world.close()
    world = factory(server, actions="move", show=["place"]).make()
    world.reset(PROMPT, 5)
    assert world.step(Action("right")).content == [str(place + 1)]
    assert "Input should be 'left'" in world.step(Action("to the right")).content
    world.close()


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("isolate", [False, True])
def test_it_keeps_the_contract_of_environments(server, isolate):
    case = environments.case_of(f"openenv:{server}", {"picture": "screen"}, isolate=isolate)
    found = list(results(environments.checks(case), None))
    assert [str(one) for one in found if one.outcome == "FAILED"] == []
    assert sum(one.outcome == "ok" for one in found) == 5


@KINDS
def test_a_lost_answer_ends_the_episode(kind):
    with of_kind(kind) as address:
        world = factory(address, actions=WORDS).make()
        world.reset(PROMPT, 0)
        pool = Pool(1, 0.5)
        pool.submit("step", lambda: world.step(Action("hang")))
        ((_, returned),) = pool.ready(wait=True)
        assert "did not return within" in returned.error
        assert closed(world, 60) == ""
        with pytest.raises(ConnectionError, match="its session is over, and no other one has the same state"):
            world.step(Action("stay"))


@KINDS
def test_a_server_that_goes_away_in_a_turn_is_named(kind):
    with of_kind(kind) as address:
        world = factory(address, actions=WORDS).make()
        world.reset(PROMPT, 0)
        with pytest.raises(ConnectionError, match=f"openenv:{address} went away in a turn.*start it again"):
            world.step(Action("exit"))
        with pytest.raises(ConnectionError, match="its session is over"):
            world.step(Action("stay"))


@BOTH
def test_what_the_world_raises_ends_the_episode_and_a_full_server_is_named(server):
    made = factory(server, actions=WORDS)
    worlds = [made.make() for _ in range(served.SESSIONS + 1)]
    for world in worlds[:-1]:
        world.reset(PROMPT, 0)
    with pytest.raises(
        RuntimeError, match=r"CAPACITY_REACHED.*start it for more sessions, or lower train\.prompts_per"
    ):
        worlds[-1].reset(PROMPT, 0)
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the floor is gone; see what it printed"):
        worlds[0].step(Action("crash"))
    for world in worlds:
        world.close()


@pytest.mark.slow
@pytest.mark.skipif(served.PYTHON not in os.environ, reason=f"{served.PYTHON} names no Python with openenv")
def test_what_is_recorded_is_what_openenv_says():
    with served.of_openenv() as theirs, served.of_words(served.as_openenv) as ours:
        told = [httpx.get(f"{address}/schema").json() for address in (theirs, ours)]
        assert told[0]["action"] == told[1]["action"]
        assert told[0]["observation"]["properties"].keys() == told[1]["observation"]["properties"].keys()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"actions": {"up": {"move": "up"}}}, "'up' is .*no action of the server: 'up' is not one of.*its fields are"),
        ({"actions": {"up": {"mov": "left"}}}, "it has no field 'mov'"),
        ({"actions": {"up": {}}}, "'move' is a required property"),
        ({"actions": {"up": 3}}, "expected a mapping"),
        ({"actions": {}}, "name the actions by words, or leave the key out"),
        ({"actions": "mov"}, "actions: the server has no field 'mov'; did you mean 'move'.*; write one of move"),
        ({"picture": "scren"}, "picture: the server has no field 'scren'; did you mean 'screen'"),
        ({"show": ["goals"]}, "show: the server has no field 'goals'; did you mean 'goal'"),
        ({"film": 1}, "unexpected keyword argument 'film'"),
    ],
)
def test_an_option_that_the_server_has_no_field_for_is_named(options, named):
    with served.of_words(served.as_openenv) as address, pytest.raises(UserError, match=named):
        factory(address, **options)


@pytest.mark.parametrize("address", ["here", "ftp://here", "http://", "http://here:port"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match="is no address of a server; write openenv:http://HOST:PORT"):
        factory(address)


@pytest.mark.parametrize("isolate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_is_not_there_is_named(isolate):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"ws://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        UserError, match=f"openenv:{address}: no OpenEnv server answers .*refused.*start it, or correct"
    ):
        opened(Section(name=f"openenv:{address}", isolate=isolate))


@pytest.mark.parametrize(
    ("schema", "status", "why"),
    [
        (b"<html>", 200, "its /schema is none of OpenEnv's"),
        (b'{"action": {}, "observation": {}}', 200, "its /schema is none of OpenEnv's"),
        (b"[" * 100_000, 200, "its /schema is none of OpenEnv's"),
        (b" " * (2 << 20), 200, "more than 1,048,576 bytes"),
        (b"", 404, "answers 404"),
        (b"", 302, "answers 302"),
    ],
)
def test_what_is_no_server_of_openenv_is_named(schema, status, why):
    with (
        served.of_words(served.as_openenv, schema, status) as address,
        pytest.raises(UserError, match=f"no OpenEnv server answers.*{why}"),
    ):
        factory(address)


def test_a_server_that_never_ends_its_schema_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr("mmrl.environments.openenv._PATIENCE", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UserError, match="no OpenEnv server answers"),
    ):
        factory(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_a_schema_that_points_elsewhere_is_not_followed():
    elsewhere = {"$ref": "http://127.0.0.1:9/schema.json"}
    schema = {**served.SCHEMA, "action": {"properties": {"move": elsewhere}}}
    with (
        served.of_words(served.as_openenv, json.dumps(schema).encode()) as address,
        pytest.raises(UserError, match="Unresolvable"),
    ):
        factory(address, actions={"left": {"move": "left"}})


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("{", "is not JSON.*mend the server"),
        ("[" * 100_000, "is not JSON.*mend the server"),
        ("[]", "expected a mapping"),
        ('{"type": "observation", "data": 3}', "expected a mapping"),
        ('{"type": "state", "data": {"observation": {}}}', "no observation of OpenEnv"),
        ('{"type": "observation", "data": {"observation": {}, "reward": "x"}}', "no observation of OpenEnv"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "NaN is no JSON number"),
        (served.observed({"screen": "no picture"}, 0, False), "the field screen .* is no picture in base64"),
        (served.observed({"screen": 3}, 0, False), "it is no text"),
        (served.observed({"goal": "x" * (2 << 20)}, 0, False), "it tells 2,097,.* in options.show"),
        ("x" * 5000, "went away in a turn.*message too big"),
    ],
)
def test_an_answer_of_a_stranger_ends_the_episode_and_nothing_else(monkeypatch, answer, why):
    if len(answer) == 5000:
        monkeypatch.setattr("mmrl.environments.openenv._ANSWER", 1000)
    with served.of_words(lambda world, message: answer) as address:
        world = factory(address, picture="screen").make()
        told, failure = told_of(returned_by(lambda: world.reset(PROMPT, 0)))
        assert not told
        assert re.search(why, failure), failure
        world.close()


def test_a_picture_that_is_none_is_decoded_by_our_own_decoder():
    with served.of_words(lambda *_: served.observed({"screen": "data:image/png;base64,AAAA\n"}, 0, False)) as address:
        case = environments.case_of(f"openenv:{address}", {"picture": "screen"})
        with case.begun() as world, pytest.raises(AssertionError, match="none of PNG, JPEG"):
            case.called("reset", lambda: world.reset(PROMPT, 0))


def test_websockets_that_is_not_installed_is_named_with_the_command(monkeypatch):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "websockets" else found(name))
    with pytest.raises(UserError, match=r"needs websockets, which is not installed: pip install .*openenv"):
        factory("http://127.0.0.1:9")
