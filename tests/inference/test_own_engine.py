"""Rollout engines in files of a user's: they train, they sleep, and wrong ones are refused before a model is loaded."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from mmrl.app.build import build
from mmrl.app.conformance import engines
from mmrl.app.conformance.running import CannotRun
from mmrl.cli import app
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.errors import UserError
from mmrl.inference.lazy_engine import LazyEngine
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from tests.support.planning import planned_in_short

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engine.py"
OWN = f"rollout.engine={EXAMPLE}:OwnCopy"
SMALL = [
    "train.steps=1",
    "train.prompts_per_step=2",
    "train.group_size=8",
    "data.train.count=40",
    "data.heldout.count=20",
    "eval.every=null",
]
BROKEN = """
class Broken:
    several = True
    def __init__(self, model, *, max_model_len, top_tokens, threads=2): ...
    def generate(self, requests, settings): ...
    def update(self, weights): ...
    def close(self): ...

class Alone:
    sleeps = False
    def __init__(self, model, *, max_model_len, scale=1.0):
        self.max_model_len = max_model_len
    def generate(self, requests, settings): ...
    def update(self, weights): ...
    def update_lora(self, tensors, rank, alpha, targets): ...
    def sleep(self): ...
    def wake(self): ...
    def close(self): ...

class Raises(Alone):
    def __init__(self, model):
        raise OSError("no port is free")

def function(model): ...
class NoModel(Alone):
    def __init__(self, *, max_model_len): ...
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "broken.py"
    file.write_text(BROKEN)
    return file


def problems(*overrides):
    return "\n".join(planned_in_short("sums", *SMALL, *overrides).problems)


@pytest.mark.slow
def test_a_recipe_trains_with_an_engine_of_its_own(tmp_path):
    """From the recipe's folder, asleep on one device; its weights are the policy's, which the mismatch shows. Its own
    numbers are logged as they are."""
    recipe = tmp_path / "recipe.yaml"
    metrics = "\n    def metrics(self):\n        return {'batch': self.batch}\n"
    (tmp_path / "engine.py").write_text(EXAMPLE.read_text() + metrics)
    recipe.write_text("rollout: {engine: engine.py:OwnCopy, options: {batch: 3}}\nplacement: {sleep: true}\n")
    arguments = ["train", "sums", str(recipe), *SMALL, "train.steps=2", "rollout.engine=engine.py:OwnCopy"]
    with pytest.raises(RecipeError, match=r"there is no file 'engine.py' \(looked in"):
        load_recipe(["sums"], [OWN.replace(str(EXAMPLE), "engine.py")])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        app([*arguments, "--out", str(tmp_path / "run")], standalone_mode=False)
    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["perf/engine_updates"] == 1
    assert second["perf/engine_updates"] == 1
    for row in (first, second):
        assert abs(row["mismatch/kl"]) < 1e-6
        assert row["optim/grad_norm"] > 0
        assert row["engine/batch"] == 3
    resolved = json.loads((tmp_path / "run" / "resolved.json").read_text())
    assert resolved["rollout"]["engine"] == f"{tmp_path / 'engine.py'}:OwnCopy"


def test_an_engines_own_numbers_are_checked(case):
    case.engine.metrics = lambda: {"batch": case.engine.batch}
    try:
        first = next(engines.checks(case))
        assert (first.name, first.run()) == ("metrics() gives numbers", "engine/batch, logged after every step")
        case.engine.metrics = lambda: {"speed": float("nan")}
        with pytest.raises(AssertionError, match="engine/speed: not finite"):
            first.run()
        engine = LazyEngine(lambda: case.engine, to_sleep=False)
        assert engine.metrics() == {}, "it was not started yet"
        engine.ready()
        case.engine.metrics = lambda: {"batch": "three"}
        with pytest.raises(UserError, match=r"of OwnCopy returned {'batch': 'three'}; return a number for each name"):
            engine.metrics()
        case.engine.metrics = lambda: {"speed": 1 / 0}
        with pytest.raises(UserError, match=r"raised ZeroDivisionError: .* at .*test_own_engine\.py:\d+; return"):
            engine.metrics()
    finally:
        del case.engine.metrics


def test_a_sleeping_engines_numbers_are_the_last_ones():
    engine = LazyEngine(Counts, to_sleep=True)
    engine.ready()
    engine.sleep()
    assert engine.metrics() == {"engine/asked": 1}
    engine.wake()
    assert engine.metrics() == {"engine/asked": 2}


class Counts:
    """As much of an engine as sleeps, and may be asked for metrics while it is awake."""

    sleeps, asked, awake = True, 0, True

    def metrics(self):
        assert self.awake
        self.asked += 1
        return {"asked": self.asked}

    def sleep(self):
        self.awake = False

    def wake(self):
        self.awake = True


def test_a_name_that_leads_nowhere_is_refused_when_the_recipe_is_read(broken):
    for written, said in [
        ("nowhere.py:Mine", "there is no file 'nowhere.py'"),
        (f"{broken}:Broke", "has no 'Broke'; did you mean 'Broken'?"),
        ("vlm", r"or a class of your own \(path/to/file.py:Class\), got 'vlm'; did you mean 'vllm'"),
        (str(broken), "a class of your own"),
    ]:
        with pytest.raises(RecipeError, match=said):
            load_recipe(["sums"], [f"rollout.engine={written}"])


def test_a_class_that_is_no_engine_names_what_it_lacks(broken):
    said = problems(f"rollout.engine={broken}:Broken", "rollout.options={thread: 3}")
    assert "broken.py:2: Broken lacks update_lora, sleep, wake, max_model_len, sleeps; an engine has" in said
    assert "rollout.options.thread: Broken has no such option; did you mean 'threads'?" in said
    assert "rollout.options.top_tokens: Broken needs it" in said
    assert "function is no class" in problems(f"rollout.engine={broken}:function")
    assert "NoModel takes no model first" in problems(f"rollout.engine={broken}:NoModel")
    with pytest.raises(UserError, match="Broken lacks update_lora"):
        build(load_recipe(["sums"], [f"rollout.engine={broken}:Broken"]).recipe)


def test_what_a_class_cannot_do_is_refused_in_the_plan(broken):
    alone = f"rollout.engine={broken}:Alone"
    assert "Alone does not say that one of it for each of 2 devices works" in problems(alone, "controllers=2")
    assert "one of it for each of 2 devices" not in problems(OWN, "controllers=2")
    assert "Alone takes no lora_rank, and model.lora trains an adapter" in problems(alone, "model.lora={rank: 4}")
    asleep = planned_in_short("sums", *SMALL, alone, "placement.sleep=true")
    assert any("Alone cannot sleep, so its process ends" in note for note in asleep.notes)
    with pytest.raises(UserError, match=r"raised OSError: no port is free at .*broken.py:\d+; mend that line"):
        engines.opened(f"{broken}:Raises", {}, "unused")


def test_the_plan_shows_the_engine_and_its_settings():
    made = plan(load_recipe(["sums"], [*SMALL, OWN, "rollout.options={batch: 5}"]))
    assert not made.problems
    (role,) = [role for role in made.roles if role.name == "engine"]
    assert role.what == "engine.py:OwnCopy, batch: 5; its memory is not known to mmrl"
    shown = io.StringIO()
    render(made, Console(file=shown, width=200))
    assert (
        "16 samples, up to 40 tokens each, drawn by engine.py:OwnCopy: it chooses its own forwards" in shown.getvalue()
    )
    assert "16 samples, 1 forwards of training, 1 backwards" in shown.getvalue()


EACH = """
import importlib.util
from mmrl.inference.engine_weights import Counted
from mmrl.inference.under_way import OneByOne

spec = importlib.util.spec_from_file_location("example", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

class Each(OneByOne, example.OwnCopy):
    sleeps = False

    def __init__(self, model, *, max_model_len):
        example.OwnCopy.__init__(self, model, max_model_len=max_model_len)
        OneByOne.__init__(self, "Each", max_model_len)

    def _begin(self, request, allowance, settings):
        self.how = settings  # the same of all requests
        return id(request)

    def _work(self, timeout):
        handle, asked = next(iter(self._asked.items()))
        prompt = [*asked.request.prompt_ids, *asked.request.partial]
        ((tokens,), (said,)) = self._draw([prompt], [asked.allowance], self.how)
        self._answer(handle, tokens, said, "length", len(prompt))

    def _end(self, handles):
        self.ended = len(handles)

    def update(self, weights):
        REFUSE
        super().update(weights)
"""


@pytest.mark.parametrize("mends", [True, False])
def test_an_engine_of_ones_own_may_answer_as_it_goes(tmp_path, mends):
    written = EACH.replace("EXAMPLE", repr(str(EXAMPLE))).replace("REFUSE", "self._refuse('update')" if mends else "")
    (tmp_path / "each.py").write_text(written)
    made = engines.opened(f"{tmp_path / 'each.py'}:Each", {}, engines.small_model())
    (check,) = [check for check in engines.checks(made) if check.name == "requests are answered as they come"]
    if mends:
        assert check.run() == "3 of 4, one cancelled, with the tokens of generate()"
    else:
        with pytest.raises(AssertionError, match=r"update\(\) with requests under way"):
            check.run()


@pytest.fixture(scope="module")
def case():
    return engines.opened(f"{EXAMPLE}:OwnCopy", {"batch": 3}, engines.small_model())


@pytest.mark.parametrize("name", engines.CHECKS)
def test_the_example_keeps_the_contract(case, name):
    cannot = {"update_lora() applies an adapter", "sleep() and wake()"}
    if name in cannot:
        with pytest.raises(CannotRun):
            engines.CHECKS[name](case)
    else:
        assert engines.CHECKS[name](case)
