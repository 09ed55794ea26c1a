"""The recipe of the run that comes first."""

import pytest
import yaml

from mmrl.config.loader import RecipeError, load_recipe
from mmrl.config.warm_start import first_stage, problems_of_first_stage
from mmrl.core.errors import UserError
from mmrl.planner.plan import plan

SFT = {"algorithm": {"type": "sft"}, "data": {"name": "shape_style"}, "train": {"steps": 3, "group_size": 1}}


def loaded(tmp_path, section, *changes, recipe="shapes-lora"):
    file = tmp_path / "warm.yaml"
    file.write_text(yaml.safe_dump({"warm_start": section}))
    return load_recipe([recipe, file], changes)


def test_its_sections_lie_over_those_of_the_recipe(tmp_path):
    both = loaded(tmp_path, {**SFT, "optim": {"lr": 0.5}}, "train.prompts_per_step=7", "name=mine")
    stage, main = first_stage(both, both.recipe.warm_start).recipe, both.recipe
    assert (stage.name, main.name) == ("mine-warm", "mine")
    assert (stage.algorithm.type, main.algorithm.type) == ("picture_sft", "flow_grpo")
    assert (stage.train.steps, stage.train.group_size, stage.train.prompts_per_step) == (3, 1, 7)
    assert (stage.optim.lr, stage.optim.ema_decay) == (0.5, main.optim.ema_decay)
    assert (stage.data.name, stage.data.train) == ("shape_style", {}), "data of another name starts anew"
    assert stage.warm_start is None
    assert stage.rewards == []
    assert (stage.model, stage.sampling.steps) == (main.model, main.sampling.steps)
    assert main.sampling.window is not None
    assert stage.sampling.window is None, "what SFT cannot have is left out"


def test_files_in_it_are_beside_the_recipe(tmp_path):
    (tmp_path / "own.py").write_text("def score(samples, *, context):\n    return [0.0] * len(samples)\n")
    text = yaml.safe_load(load_recipe(["shapes-lora"]).path.read_text())
    text["model"]["path"] = load_recipe(["shapes-lora"]).recipe.model.path
    text["warm_start"] = {**SFT, "eval": {"rewards": [{"name": "own.py"}]}}
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(text))
    both = load_recipe([file])
    (reward,) = first_stage(both, both.recipe.warm_start).recipe.eval.rewards
    assert reward.name.startswith(str(tmp_path / "own.py"))


def test_what_it_cannot_have_is_refused_by_its_key(tmp_path):
    with pytest.raises(RecipeError, match=r"warm_start\.model: unknown key"):
        loaded(tmp_path, {**SFT, "model": {"path": "other"}})
    with pytest.raises(RecipeError, match=r"warm_start\.algorithm: missing"):
        loaded(tmp_path, {"train": {"steps": 3}})
    wrong = loaded(tmp_path, {**SFT, "train": {"stepps": 3}})
    with pytest.raises(
        RecipeError, match=r"warm\.yaml:\d+  warm_start\.train\.stepps: unknown key; did you mean 'steps'"
    ):
        first_stage(wrong, wrong.recipe.warm_start)
    (problem,) = problems_of_first_stage(wrong)
    assert problem.startswith("warm_start.train.stepps: unknown key")
    assert problems_of_first_stage(load_recipe(["shapes-lora"])) == []


def test_the_plan_says_it_and_finds_its_problems(tmp_path):
    unread = ["model.path=missing-model"]
    made = plan(loaded(tmp_path, {**SFT, "train": {"stepps": 3}}, *unread))
    assert any(problem.startswith("warm_start.train.stepps") for problem in made.problems)
    assert "warm_start: a run of its own comes first, which this plan does not count" in made.notes


def test_a_run_that_is_driven_step_by_step_has_none(tmp_path):
    import mmrl

    file = tmp_path / "warm.yaml"
    file.write_text(yaml.safe_dump({"warm_start": SFT}))
    with pytest.raises(UserError, match=r"mmrl\.start opens one run, and warm_start asks for another"):
        mmrl.start("shapes-lora", [str(file)], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
