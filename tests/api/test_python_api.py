"""``mmrl.train``, ``start``, ``plan``, ``score``, ``load_run``: the Python interface, on a tiny Stable Diffusion 3."""

import json
import subprocess
import sys
import threading

import numpy
import pytest
from PIL import Image

import mmrl
from mmrl.api.data import Data
from mmrl.config.loader import load_recipe
from tests.support.tiny_diffusion import two_blocks

SMALL = {
    "train": {"steps": 2, "prompts_per_step": 2, "group_size": 2, "micro_batch_size": 2, "max_cpu_seconds": None},
    "eval": {"every": 2, "samples": 2, "grid": 1},
    "sampling.steps": 3,
    "sampling.window": None,
    "sampling.batch_size": 4,
    "optim.schedule": "constant",
    "checkpoint.every": 1,
}


PROMPTS = ["a red circle", {"prompt": "two blue squares"}, mmrl.Prompt("x", "a green triangle"), "three red squares"]


def red(samples, *, context):
    return [float(numpy.asarray(s.image, dtype=float)[..., 0].mean()) / 255 for s in samples]


class Bright:
    """A reward that is built by the user, in no file's top level."""

    def __init__(self, scale):
        self.scale = scale

    def score(self, samples, *, context):
        return [self.scale * float(numpy.asarray(s.image).mean()) / 255 for s in samples]


@pytest.fixture(scope="module")
def small():
    return {**SMALL, "model.path": str(two_blocks())}


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """A run with objects of every kind, and what its callbacks were told."""
    told = []

    class Watch(mmrl.Callback):
        def on_step(self, training, metrics):
            training.log(doubled=2 * metrics["reward/mean"])
            told.append(("step", training.step))

        def on_evaluation(self, training, metrics):
            told.append(("evaluation", training.step))

        def on_checkpoint(self, training, checkpoint):
            assert (checkpoint / "manifest.json").is_file()
            told.append(("checkpoint", checkpoint.name))

        def on_end(self, training):
            told.append(("end", training.step))

    rewards = [red, {"name": Bright(2.0), "weight": 0.5, "label": "bright"}]
    out = tmp_path_factory.mktemp("api") / "run"
    run = mmrl.train(
        "shapes-lora",
        small,
        rewards=rewards,
        eval_rewards=[lambda samples, *, context: [1.0 for _ in samples]],
        data=PROMPTS,
        heldout=["a blue circle"],
        callbacks=[Watch()],
        out=out,
    )
    return run, told


def test_a_run_takes_rewards_data_and_callbacks_from_python(trained):
    run, told = trained
    assert run.finished
    assert run.steps == 2
    doubled = [2 * value for value in run.metrics["reward/mean"]]
    assert run.metrics["callback/doubled"] == pytest.approx(doubled)
    weighted = [a + 0.5 * b for a, b in zip(run.metrics["reward/red"], run.metrics["reward/bright"], strict=True)]
    assert run.metrics["reward/mean"] == pytest.approx(weighted, abs=1e-6)
    assert run.heldout["step"] == [0, 2]
    assert run.heldout["reward/function"] == [1.0, 1.0]
    order = ["evaluation", "step", "step", "evaluation"]
    assert [what for what, _ in told if what in order] == order
    assert [name for what, name in told if what == "checkpoint"] == ["step_000001", "step_000002"]
    assert told[-1] == ("end", 2)


def test_samples_are_pictures_with_prompts_and_scores(trained):
    sample = trained[0].samples()[0]
    assert sample.prompt == "a blue circle"
    assert sample.image.size == (32, 32)
    assert mmrl.score(red, [sample.image]) == pytest.approx([sample.scores["red"]])
    assert mmrl.score(Bright(1.0), [sample.image, sample.image])[0] == pytest.approx(sample.scores["bright"] / 2)
    with pytest.raises(mmrl.UserError, match="step 1; give one of 0, 2"):
        trained[0].samples(1)


def test_a_run_is_read_again_and_its_objects_are_found(trained):
    run = mmrl.load_run(trained[0].path)
    assert run.metrics == trained[0].metrics
    assert run.evaluate(2)["reward/red"] == pytest.approx(run.heldout["reward/red"][-1], abs=1e-6)
    with pytest.raises(mmrl.UserError, match="not open for training"):
        run.step()


def test_steps_of_ones_own_equal_those_of_train_and_resume_and_say_nothing_if_quiet(trained, small, tmp_path, capsys):
    arguments = {
        "rewards": [red, {"name": Bright(2.0), "weight": 0.5, "label": "bright"}],
        "eval_rewards": [lambda samples, *, context: [1.0 for _ in samples]],
        "data": [
            "a red circle",
            {"prompt": "two blue squares"},
            mmrl.Prompt("x", "a green triangle"),
            "three red squares",
        ],
        "heldout": ["a blue circle"],
        "out": tmp_path / "run",
    }
    with mmrl.start("shapes-lora", small, **arguments, quiet=True) as run:
        first = run.step()
        assert not run.finished
    assert capsys.readouterr() == (
        "",
        "stopped after step 1; continue with: the same call of mmrl.train with resume=True\n",
    )
    with mmrl.start("shapes-lora", small, **arguments, resume=True, quiet=True) as run:
        second = run.step()
        assert run.finished
        with pytest.raises(mmrl.UserError, match="has ended after step 2"):
            run.step()
    wanted = trained[0].metrics["reward/mean"]
    assert [first["reward/mean"], second["reward/mean"]] == wanted
    assert (tmp_path / "run" / "report.html").is_file()
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_callback_that_raises_is_named_and_the_run_continues(small, tmp_path):
    def after_step(training, metrics):
        raise KeyError("oops")

    with pytest.raises(mmrl.UserError, match=r"(?s)after_step \(on_step\) raised KeyError.*resume=True") as raised:
        mmrl.train("shapes-lora", small, rewards=[red], callbacks=[after_step], out=tmp_path / "run")
    assert "test_python_api.py" in str(raised.value)
    assert mmrl.load_run(tmp_path / "run").steps == 1, "the step's row is kept"
    run = mmrl.train("shapes-lora", small, rewards=[red], out=tmp_path / "run", resume=True)
    assert run.finished


@pytest.mark.slow
def test_a_callback_stops_the_run_and_it_resumes(small, tmp_path, capsys):
    def stop(training, metrics):
        training.stop("enough")

    run = mmrl.train("shapes-lora", small, rewards=[red], callbacks=[stop], out=tmp_path / "run")
    assert run.steps == 1
    assert not run.finished
    assert "stopped after step 1 (enough); continue with: the same call" in capsys.readouterr().err
    assert run.status == "stopped at step 1: enough"
    assert "stopped at step 1: enough" in repr(run)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "stopped at step 1: enough" in page
    assert "is short" not in page
    assert mmrl.continue_run(run, rewards=[red], quiet=True).status == "finished"
    assert capsys.readouterr() == ("", "")


def test_a_run_in_another_thread_leaves_the_signals_alone(small, tmp_path):
    found = []
    worker = threading.Thread(
        target=lambda: found.append(mmrl.train("shapes-lora", small, rewards=[red], out=tmp_path / "run"))
    )
    worker.start()
    worker.join()
    assert found[0].finished


def test_a_recipe_is_a_mapping_or_an_object(small):
    whole = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}"])
    for recipe in (json.loads(json.dumps(whole.resolved())), mmrl.Recipe.model_validate(whole.resolved())):
        planned = mmrl.plan(recipe, {"optim.lr": 1e-5})
        assert planned.problems == []
        assert planned.plan.recipe.optim.lr == 1e-5
        assert planned.plan.recipe.train == whole.recipe.train
    assert "samples" in str(mmrl.plan("shapes-lora", ["train.steps=3"], rewards=[red]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": red}, r"rewards: give a list"),
        ({"rewards": [3]}, r"rewards\[0\]: a int is no reward"),
        ({"rewards": [{"weight": 2}]}, r"rewards\[0\]: the mapping has no name"),
        ({"rewards": [lambda images: 1]}, r"takes no 'context'"),
        ({"heldout": ["a"]}, r"heldout: give data too"),
        ({"data": "a red circle"}, r"data: str is no list of records"),
        ({"data": [3, None]}, r"no record can be used: data\[0\]: is a int"),
        ({"algorithm": 3}, r"algorithm: 3 is no class and no name"),
        ({"changes": {"optim.lr": {1, 2}}}, r"optim.lr: a set cannot stand in a recipe"),
        ({"changes": {"train.stepz": 3}}, r"train.stepz"),
        ({"rewards": [Bright(1.0)], "changes": {"controllers": 2}}, r"this process only, and controllers"),
    ],
)
def test_what_cannot_be_is_named(arguments, message):
    changes = {key: value for key, value in arguments.items() if key == "changes"}
    objects = {key: value for key, value in arguments.items() if key != "changes"}
    with pytest.raises(mmrl.UserError, match=message):
        planned_or_refused("shapes-lora", objects, **changes)


def planned_or_refused(recipe, objects, changes=None):
    raise mmrl.UserError("\n".join(mmrl.plan(recipe, changes, **objects).problems))


@pytest.mark.parametrize("call", [mmrl.train, mmrl.start])
def test_a_process_of_a_launcher_is_refused(call, tmp_path, monkeypatch):
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"} | address).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(mmrl.UserError, match=r"torchrun has started 2 processes.* -m mmrl train RECIPE"):
        call("sums", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_class_in_place_of_a_callback_is_refused(tmp_path):
    with pytest.raises(mmrl.UserError, match=r"give an object of it: Callback\(\)"):
        mmrl.train("shapes-lora", rewards=[red], callbacks=[mmrl.Callback], out=tmp_path / "run")


def test_a_score_that_is_missing_is_an_error():
    def odd(samples, *, context):
        return [None if i else 1.0 for i in range(len(samples))]

    pictures = [Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8))]
    with pytest.raises(mmrl.UserError, match="no score for sample 1"):
        mmrl.score(odd, pictures)
    with pytest.raises(mmrl.UserError, match="3 for 2 samples"):
        mmrl.score(red, pictures, ["a", "b", "c"])
    assert mmrl.score(red, []) == []


def test_data_without_held_out_ones_are_divided_by_content():
    texts = [f"a circle {i}" for i in range(30)]
    data = Data(texts)
    train, heldout = ([p.text for p in data.prompts(split)] for split in ("train", "heldout"))
    assert len(heldout) == 3
    assert sorted(train + heldout) == sorted(texts)
    again = Data([*texts, texts[0]])
    assert {p.text for p in again.prompts("heldout")} == set(heldout)


def test_a_hugging_face_data_set_with_pictures_gives_prompts():
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["what is it?"] * 2, "answer": ["a", "b"]})
    pictures = [Image.new("RGB", (4, 4), c) for c in ("red", "blue")]
    prompts = Data([{**row, "image": picture} for row, picture in zip(table, pictures, strict=True)], [])
    assert [p.meta["answer"] for p in Data(table, table).prompts("train")] == ["a", "b"]
    assert len(prompts.prompts("train")[0].media) == 1


def test_import_is_fast_and_lazy():
    code = "import mmrl, sys; print('torch' in sys.modules, sorted({'train', 'load'} - set(dir(mmrl))))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False []"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mmrl.trian
