"""An algorithm in a file of a user's: it trains, goes on, is sent to other processes; wrong ones are refused."""

import json
import pickle

import pytest

from mmrl.app.build import open_run, restored
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.runtime.start import train
from mmrl.step.objectives import load_objective
from tests.support import tiny
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision

SAPO = '''
"""SAPO: a soft gate in place of the clip (arXiv 2511.20347)."""

from __future__ import annotations

import torch
from pydantic import PositiveFloat, field_validator

from mmrl.algorithms.advantages import Advantages, group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.algorithms.policy_gradient import Surrogate, TokenObjective
from mmrl.config.algorithm_settings import TokenSettings


class SAPOSettings(TokenSettings):
    """Soft adaptive policy optimisation."""

    tau: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05

    @field_validator("tau")
    @classmethod
    def _not_seven(cls, value: float) -> float:
        if value == 7:
            raise ValueError("seven is not to be had; take another")
        return value


class SAPO(TokenObjective):
    def __init__(self, settings: SAPOSettings) -> None:
        super().__init__(settings, "token_mean")
        self.taus = (settings.tau, settings.tau_negative)

    def advantages(self, scored: Scored) -> Advantages:
        return group_advantages(scored.rewards, scored.groups, "group", scored.all_sum)

    def surrogate(self, log_probs, log_ratio, advantages, mask) -> Surrogate:
        ratio, tau = log_ratio.exp(), torch.where(advantages > 0, *self.taus)
        none = torch.zeros_like(ratio, dtype=torch.bool)
        return Surrogate(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio, none, none)
'''
BROKEN = """
from typing import Literal

from mmrl.algorithms.objective import GraphSteps
from mmrl.algorithms.policy_gradient import TokenObjective
from mmrl.config.algorithm_settings import ForwardSettings, PathwiseSettings, TokenSettings


class Mine(TokenSettings):
    pass


class NoSettings:
    kind = "policy_gradient"


class NoKind:
    def __init__(self, settings: Mine) -> None: ...


class OtherKind:
    kind = "pathwise"

    def __init__(self, settings: Mine) -> None: ...


class Abstract(TokenObjective):
    def __init__(self, settings: Mine) -> None:
        super().__init__(settings)


class Empty:
    kind = "policy_gradient"
    needs = frozenset({"log_probs"})

    def __init__(self, settings: Mine) -> None: ...

    def advantages(self, scored): ...


class Raises(Empty):
    def __init__(self, settings: Mine) -> None:
        raise OSError("no")


number = 3
"""
REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [sum(c in "aeiou" for c in s.text) + 0.1 * s.id.sample for s in samples]
"""
PICTURES = '''
from mmrl.algorithms.objective import GraphSteps
from mmrl.algorithms.pathwise import PathwiseObjective
from mmrl.config.algorithm_settings import PathwiseSettings


class LastSettings(PathwiseSettings):
    scale: float = 2.0


class Last(PathwiseObjective):
    """The reward's own gradient, through the last step."""

    def __init__(self, settings: LastSettings) -> None:
        super().__init__(settings.kl_coef)
        self.scale = settings.scale

    def graph_steps(self, steps, draw):
        return GraphSteps(steps - 1, steps - 1)

    def of_reward(self, rewards):
        return -self.scale * rewards
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "my").mkdir()
    (folder / "my" / "sapo.py").write_text(SAPO)
    (folder / "broken.py").write_text(BROKEN)
    (folder / "pictures.py").write_text(PICTURES)
    (folder / "raises.py").write_text("\nimport not_installed_anywhere\n")
    (folder / "reward.py").write_text(REWARD)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(20)))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 4}, heldout: {path: data.jsonl, heldout: 4}}
sampling: {max_new_tokens: 6}
rewards: [{name: reward.py, label: length}]
algorithm: {type: my/sapo.py:SAPO, tau: 2}
train: {steps: 1, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
optim: {lr: 1.0e-2}
eval: {every: null}
checkpoint: {every: 1}
"""
    )
    return folder


def load(folder, *overrides):
    return load_recipe([folder / "recipe.yaml"], overrides)


def refused(folder, algorithm):
    with pytest.raises(RecipeError) as caught:
        load(folder, f"algorithm={algorithm}")
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.message}"


def test_a_recipe_trains_goes_on_and_is_found_in_its_run(folder, tmp_path):
    name = f"{folder / 'my' / 'sapo.py'}:SAPO"
    train(load(folder), tmp_path / "run")
    train(load(folder, "train.steps=2"), tmp_path / "run", resume=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    assert all(row["policy/ratio_max_dev"] < 1e-5 for row in rows)
    assert json.loads((tmp_path / "run" / "resolved.json").read_text())["algorithm"]["type"] == name
    recipe, _ = open_run(tmp_path / "run")
    assert (recipe.algorithm.type, recipe.algorithm.label) == (name, "SAPO")
    run, _, step = restored(tmp_path / "run", "latest")
    assert (type(run.objective).__name__, run.objective.taus, step) == ("SAPO", (2.0, 1.05), 2)
    with pytest.raises(UserError, match=r"algorithm\.tau differ"):
        train(load(folder, "algorithm.tau=3", "train.steps=3"), tmp_path / "run", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["controllers=2", pytest.param("devices_per_controller=2", marks=pytest.mark.long)])
def test_other_processes_find_it(folder, tmp_path, place):
    """Each imports the file for itself."""
    pytest.importorskip("ray")
    train(load(folder, place, "train.micro_batch_size=4"), tmp_path / "two")
    train(load(folder, "train.micro_batch_size=4"), tmp_path / "one")
    norms = [json.loads((tmp_path / n / "metrics.jsonl").read_text())["optim/grad_norm"] for n in ("one", "two")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_recipe_with_it_can_be_sent(folder):
    loaded = load(folder)
    sent = pickle.dumps(loaded)
    assert b"mmrl_user_" not in sent  # a module that no other process can import
    assert pickle.loads(sent).recipe == loaded.recipe
    assert load(folder, "algorithm={type: my/sapo.py}").recipe.algorithm.label == "sapo"  # its only algorithm


def test_the_plan_shows_its_settings(folder, capsys):
    from rich.console import Console

    made = plan(load(folder))
    assert not made.problems
    render(made, Console(width=200))
    assert "sapo.py:SAPO: kl_coef 0.0, " in (said := " ".join(capsys.readouterr().out.split()))
    assert "tau 2.0, tau_negative 1.05" in said


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("{type: my/sapo.py:SAPA}", "algorithm.type: .*has no 'SAPA'; did you mean 'SAPO'?"),
        (
            "{type: your/sapo.py:SAPO}",
            r"algorithm.type: there is no file 'your/sapo.py' \(looked in .*; correct",
        ),
        ("{type: my/sapo.py:SAPO, tau: -1}", "algorithm.tau: expected a positive number, got -1"),
        ("{type: my/sapo.py:SAPO, tau: 7}", "algorithm.tau: seven is not to be had; take another"),
        ("{type: my/sapo.py:SAPO, tua: 1}", "algorithm.tua: unknown key; did you mean 'tau'"),
        ("{type: my/sapo.py:SAPO, clip_low: 1}", "algorithm.clip_low: belongs to type .*; remove it, or replace"),
        ("{type: my/sapo.py:SAPOSettings}", "SAPOSettings takes no settings. An algorithm is a class with def"),
        ("{type: raises.py:Any}", "algorithm.type: .*raises.py has no 'Any'"),
        ("{type: raises.py}", r"importing .*ModuleNotFoundError: No module named .* at .*raises.py:2; mend that line"),
        ("{type: reward.py}", "reward.py has no algorithm. An algorithm is a class"),
        ("{type: broken.py}", r"broken.py has several \(NoKind, OtherKind, Abstract, Empty, Raises\); name one"),
        ("{type: broken.py:number}", "number takes no settings"),
        ("{type: broken.py:NoSettings}", "NoSettings takes no settings"),
        ("{type: broken.py:NoKind}", "NoKind has no kind, .*write kind = 'policy_gradient' or 'forward_process'"),
        ("{type: broken.py:OtherKind}", "OtherKind is of kind pathwise, and its settings Mine of kind policy_gradient"),
        ("{type: broken.py:Abstract}", "Abstract lacks surrogate, which TokenObjective leaves to it"),
    ],
)
def test_what_is_no_algorithm_is_refused_when_the_recipe_is_read(folder, algorithm, message):
    import re

    assert re.search(message, refused(folder, algorithm))


def test_a_class_of_no_protocol_is_told_what_it_lacks(folder):
    with pytest.raises(UserError, match=r"is of kind policy_gradient and lacks .*loss.*; write what .* PolicyGradient"):
        load_objective(load(folder, "algorithm={type: broken.py:Empty}").recipe)
    with pytest.raises(UserError, match=r"raised OSError: no at .*broken.py:\d+; mend that line"):
        plan(load(folder, "algorithm={type: broken.py:Raises}"))


def test_pictures_train_with_one_too(folder, tmp_path):
    small = ["sampling.steps=2", "train.prompts_per_step=1", "train.group_size=1", "train.micro_batch_size=1"]
    few = [*small, "train.steps=1", "eval.every=null", "eval.samples=2", "eval.grid=1", f"model.path={two_blocks()}"]
    for n, algorithm in enumerate((f"{{type: {folder / 'pictures.py'}:Last, scale: 2}}", "{type: draft}")):
        train(load_recipe(["shapes-draft"], [*few, f"algorithm={algorithm}"]), tmp_path / str(n))
    own, shipped = (json.loads((tmp_path / str(n) / "metrics.jsonl").read_text()) for n in (0, 1))
    assert own["reward/mean"] == shipped["reward/mean"]
    assert own["policy/loss"] == pytest.approx(2 * shipped["policy/loss"])
