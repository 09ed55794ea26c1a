"""The environment ``draw``: a frozen diffusion model draws what the policy writes."""

import json
import re
import shutil
import threading

import numpy as np
import pytest
import torch

import mmrl
from mmrl.config.environment import Environment as Section
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.episode import Action, Call
from mmrl.core.errors import UserError
from mmrl.core.media import open_image
from mmrl.core.randomness import noise
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.episodes.journal import Journal
from mmrl.episodes.loading import draws, opened
from mmrl.episodes.play import reset_seed
from mmrl.planner.plan import plan
from tests.support import asleep
from tests.support.episode_journal import Stops
from tests.support.episodes import written
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision
draw = mmrl.load("environments", "draw")
SIZE = {"steps": 2, "height": 32, "width": 32, "max_sequence_length": 12}
TEXTS = ["two red circles", "a blue square at the left", "one green cross", "three purple triangles", "x"]


@pytest.fixture(scope="module")
def options():
    return {"model": str(two_blocks()), "pipeline": "sd3", "batch": 4, **SIZE}


@pytest.fixture(scope="module")
def drawer(options):
    return draw.Environment(**options).drawer


def drawn(options, text, seed=1, turns=1):
    """The last of so many pictures of ``text``, of a model that has drawn nothing else."""
    world = draw.Environment(**options)
    world.drawer._known.clear()
    world.reset(Prompt("p", "brief"), seed)
    for _ in range(turns):
        (told,) = world.step(Action(text))
    return np.asarray(told.content)


def section(options, **more):
    return [f"environment.options={json.dumps({**options, 'show': False, **more})}"]


def test_a_picture_is_the_stock_pipelines(options, drawer):
    from diffusers import StableDiffusion3Pipeline

    ours = drawn(options, TEXTS[0])
    pipe = StableDiffusion3Pipeline.from_pretrained(options["model"], dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    begun = noise(0, [SampleId(0, 1, 0, 0)], "initial", drawer._pipeline.shape)
    size = {"height": 32, "width": 32, "max_sequence_length": 12, "guidance_scale": 1.0}
    theirs = pipe(TEXTS[0], num_inference_steps=2, latents=begun, output_type="np", **size).images[0]
    assert np.abs(ours / 255 - theirs).max() < 1 / 255


def test_a_picture_depends_on_prompt_seed_and_turn_alone(options, drawer):
    alone = [drawn(options, text) for text in TEXTS]
    worlds = [draw.Environment(**options) for _ in TEXTS]
    assert {id(world.drawer) for world in worlds} == {id(drawer)}  # one model for all
    drawer._known.clear()
    together = {}

    def play(n):
        worlds[n].reset(Prompt("p", "brief"), 1)
        together[n] = np.asarray(worlds[n].step(Action(TEXTS[n]))[0].content)

    threads = [threading.Thread(target=play, args=(n,)) for n in reversed(range(len(TEXTS)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((together[n] == one).all() for n, one in enumerate(alone))
    assert (alone[0] != drawn(options, TEXTS[0], seed=2)).any()
    assert (alone[0] != drawn(options, TEXTS[0], turns=2)).any()
    assert (alone[0] == drawn(options, f"<think>hm</think> {TEXTS[0]}\n")).all()


def test_those_who_wait_are_drawn_together(options, drawer, monkeypatch):
    drawn(options, "loaded")
    calls, sample = [], type(drawer._pipeline).sample
    monkeypatch.setattr(type(drawer._pipeline), "sample", lambda *a: calls.append(len(a[1])) or sample(*a))
    drawer._known.clear()
    with drawer._turn:  # until all wait
        threads = [threading.Thread(target=drawer.draw, args=(text, 1, 0)) for text in [*TEXTS, *TEXTS]]
        for thread in threads:
            thread.start()
        while len(drawer._waiting) < len(threads):
            pass
    for thread in threads:
        thread.join()
    assert calls == [4, 4]  # five pictures, in batches of one size; an equal one is not drawn twice


def test_it_sleeps_and_draws_the_same(options, drawer, monkeypatch):
    before, modules = drawn(options, TEXTS[0]), drawer._frozen.module
    assert sum(p.nbytes for p in modules.parameters()) == drawer.bytes
    drawer.sleep()
    assert not sum(p.numel() for p in modules.parameters())
    assert (drawn(options, TEXTS[0]) == before).all()
    waited = asleep.apart(monkeypatch)  # a device with memory of its own
    drawer.sleep()
    assert (drawn(options, TEXTS[0]) == before).all()
    assert waited
    assert not any(p.requires_grad for p in modules.parameters())


def test_calls_of_a_tool_draw(options, drawer):
    world = draw.Environment(**options, call=True, show=False)
    (schema,) = opened(Section(name="draw", options={**options, "call": True})).schemas
    assert schema["function"]["parameters"]["required"] == ["prompt"]
    world.reset(Prompt("p", "brief"), 1)
    calls = [Call("0", "draw", {"prompt": TEXTS[0]}), Call("1", "paint", {}), Call("2", "draw", {"text": "x"})]
    told = world.step(Action("", tuple(calls)))
    assert [(one.call_id, one.hidden) for one in told] == [("0", False), ("", True), ("1", False), ("2", False)]
    assert (np.asarray(told[1].content) == drawn(options, TEXTS[0])).all()
    assert "there is no tool paint" in told[2].content
    assert [one.done for one in world.step(Action("That is it."))] == [True]
    world.reset(Prompt("p", "brief"), 1)
    assert [one.done for one in world.step(Action("I draw nothing."))] == [True]


def played(options, folder, texts, at=99, **more):
    """The pipeline, and the rows of two samples whose turns are ``texts``; None where the run ends at turn ``at``."""
    called = load_recipe(["sums-tool"]).recipe.model.path  # its chat template names tools in a few tokens
    changes = [
        *section(options, **more),
        f"model.path={called}",
        "environment.max_turns=3",
        "environment.max_tokens=150",
    ]
    loaded = load_recipe(["draw-shapes"], [*changes, "warm_start=null"])
    pipeline = mmrl.load("pipelines", "llm/chat").build(loaded.recipe, loaded.recipe.model.path, torch.device("cpu"))
    pipeline.engine = Stops([(written(pipeline.conditioner.saved, t), "stop") for t in texts], at)
    pipeline.world.journal = Journal(folder)
    slots, ids = [Slot(3, 0, 0, Prompt("p", "a crimson disc"))] * 2, [SampleId(3, 0, 0, n) for n in range(2)]
    try:
        pipeline.encode(slots)
        return pipeline, pipeline.sample(slots, ids, [], 0)
    except KeyboardInterrupt:
        return pipeline, None


def test_rewards_alone_see_a_hidden_picture(options, drawer, tmp_path):
    pipeline, rows = played(options, tmp_path, TEXTS[:1])
    (one, other), episodes = pipeline.samples(rows, frozenset({"image", "text"})), rows.episodes
    assert [(of.text, one.episode.end) for of in (one, other)] == [(TEXTS[0], "done")] * 2
    assert [segment.kind for segment in rows.segments[0][1:]] == ["written"]  # nothing was told
    seed = pipeline.world._recipe.seed
    wanted = drawn(options, TEXTS[0], reset_seed(seed, rows.ids[0]))
    assert all((np.asarray(of.image) == wanted).all() for of in (one, other))  # a group has one noise
    assert (np.asarray(open_image(episodes[0].pictures[0])) == wanted).all()
    assert pipeline.samples(rows, frozenset({"text"}))[0].image is None


def test_rewards_see_black_where_nothing_was_drawn(options, drawer, tmp_path, monkeypatch):
    def fails(*_):
        raise ValueError("no picture")

    monkeypatch.setattr(type(drawer), "draw", fails)
    pipeline, rows = played(options, tmp_path, TEXTS[:1])
    (one, _) = pipeline.samples(rows, frozenset({"image"}))
    assert (one.episode.end, one.image.size, np.asarray(one.image).max()) == ("failed", (32, 32), 0)


@pytest.mark.parametrize("at", [1, 2])
def test_a_killed_run_draws_nothing_again(options, drawer, tmp_path, monkeypatch, at):
    asked = [f'<tool_call>{{"name": "draw", "arguments": {{"prompt": "{text}"}}}}</tool_call>' for text in "xy"]
    texts = [*asked, "done"]
    _, whole = played(options, tmp_path / "whole", texts, call=True)
    assert [len(one.pictures) for one in whole.episodes] == [2, 2]
    played(options, tmp_path / "run", texts, at, call=True)
    made, own = [], type(drawer).draw
    monkeypatch.setattr(type(drawer), "draw", lambda *a: made.append(a[1]) or own(*a))
    _, again = played(options, tmp_path / "run", texts, call=True)
    assert again.episodes == whole.episodes
    assert made == [text for text in "xy"[at:] for _ in range(2)]
    monkeypatch.setattr(type(drawer), "draw", lambda *a: pytest.fail("it was drawn again"))
    _, again = played(options, tmp_path / "run", texts, call=True)  # as a replay does
    assert again.episodes == whole.episodes
    assert again.tokens.tolist() == whole.tokens.tolist()


def test_a_policy_that_sees_is_shown_its_pictures(options, drawer):
    pytest.importorskip("torchvision")
    changes = ["data={name: shape_briefs, train: {count: 8}, heldout: {count: 8}}", "rewards=[{name: shapes}]"]
    world = {"name": "draw", "options": options, "role": "user", "max_turns": 3, "max_tokens": 200}
    loaded = load_recipe(["scenes-zoom"], [*changes, f"environment={json.dumps(world)}"])
    assert plan(loaded).problems == []
    pipeline = mmrl.load("pipelines", "vlm/chat").build(loaded.recipe, loaded.recipe.model.path, torch.device("cpu"))
    tokenizer = pipeline.conditioner.tokenizer
    pipeline.engine = Stops([(written(tokenizer, text), "stop") for text in [TEXTS[0], TEXTS[1], "done"]], 99)
    slots, ids = [Slot(0, 0, 0, Prompt("p", "a crimson disc"))], [SampleId(0, 0, 0, 0)]
    pipeline.encode(slots)
    (sample,) = pipeline.samples(pipeline.sample(slots, ids, [], 0), frozenset({"image"}))
    assert [len(turn.told) for turn in sample.episode.turns] == [1, 1, 0]
    assert len(pipeline.engine.requests[2].media) == 2  # it has seen both
    first, last = (np.asarray(open_image(one)) for one in sample.episode.pictures)
    assert (np.asarray(sample.image) == last).all()
    assert (first != last).any()


def test_a_picture_that_cannot_be_drawn_is_named(options, drawer, monkeypatch):
    drawn(options, "loaded")

    def fails(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(type(drawer._pipeline), "sample", fails)
    with pytest.raises(UserError, match=r"'x' could not be drawn: .*; lower environment\.options\.batch"):
        drawn(options, "x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline": "sd33"}, r"environment\.options\.pipeline: there is no pipeline 'diffusion/sd33'"),
        ({"pipeline": "wan"}, r"environment\.options\.pipeline: wan makes clips"),
        ({"pipeline": "flux2_klein_edit"}, r"edits pictures that are given"),
        ({"pipeline": "llm/chat"}, r"llm/chat draws no pictures"),
        ({"model": "./nowhere"}, r"environment\.options\.model: there is no '\./nowhere'"),
        ({"steps": 0}, r"environment\.options\.steps: "),
        ({"height": 33}, r"environment\.options\.height and environment\.options\.width: 33 x 32"),
        ({"batch": 0}, r"environment\.options\.batch is 0; it is 1 or more"),
        ({"stepz": 4}, r"environment\.options\.stepz: "),
        ({"lora": {"rank": 4}}, r"environment\.options\.lora: the model that draws is frozen"),
        ({"train": True}, r"environment\.options\.train: the model that draws is frozen"),
        ({"frames": 4}, r"environment\.options\.frames: pictures are drawn"),
        ({"show": True}, r"shows pictures, and the model reads only text; .* set environment\.options\.show to false"),
    ],
)
def test_what_cannot_be_is_refused_in_the_plan(options, change, said):
    given = section(options, **change)
    try:
        problems = plan(load_recipe(["draw-shapes"], given)).problems
    except RecipeError as error:
        problems = [f"{one.key}: {one.message}" for one in error.problems]
    assert len(problems) == 1
    assert re.search(said, problems[0]), problems


def test_a_model_without_weights_is_refused_in_the_plan(options, tmp_path):
    shutil.copytree(options["model"], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (problem,) = plan(load_recipe(["draw-shapes"], section({**options, "model": str(tmp_path / "model")}))).problems
    assert "has no weights (*.safetensors)" in problem


def test_what_one_model_for_all_does_not_allow(options):
    with pytest.raises(RecipeError, match=r"performance\.compile: "):
        load_recipe(["draw-shapes"], [*section(options), "performance.compile=true"])
    (problem,) = plan(load_recipe(["draw-shapes"], [*section(options), "environment.isolate=true"])).problems
    assert problem.endswith("one model draws for all episodes of a device; set environment.isolate to false")
    assert not plan(load_recipe(["draw-shapes"], [*section(options), "environment.isolate=false"])).problems


def test_a_reward_for_pictures_needs_an_environment_that_draws(options):
    assert draws(Section(name="draw", options=options))
    assert not draws(Section(name="guess"))
    problems = plan(load_recipe(["sums"], ["rewards=[{name: shapes}]"])).problems
    assert "reads 'image'" in problems[0]


@pytest.mark.slow
def test_the_plan_counts_the_model_and_puts_it_to_sleep(options, drawer):
    def parts(*changes):
        made = plan(load_recipe(["draw-shapes"], [*section(options), *changes]))
        assert made.problems == []
        return {phase.name: phase.parts.get("model that draws", 0) for phase in made.phases}

    awake, sleeping = parts(), parts("placement.sleep=true")
    assert set(awake.values()) == {drawer.bytes}
    assert sleeping == awake | {"train": 0, "optimizer": 0}
