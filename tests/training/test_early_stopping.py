"""Training that ends where a held-out metric has ceased to rise, and the checkpoint where it was best."""

import json
import math

import pytest

from mmrl.app.build import evaluate, restored
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.config.schema import EarlyStopping
from mmrl.core import checkpoint_reader as reader
from mmrl.core.errors import UserError
from mmrl.core.signals import Stop
from mmrl.logging.rundir import RunDir
from mmrl.training.early_stopping import EarlyStop
from tests.support.tiny_diffusion import two_blocks

HALFWAY = "eval.rewards=[{name: 'colour:target', label: halfway, options: {rgb: [150, 150, 170]}}]"
SMALL = [
    *("sampling.steps=4", "train.prompts_per_step=4", "train.micro_batch_size=4", "optim.lr=1e-2"),
    *("train.steps=12", "eval.every=1", "eval.samples=4", "eval.grid=1", "checkpoint.every=3", "checkpoint.keep=1"),
    HALFWAY,
]
STOPPING = "eval.early_stopping={metric: reward/halfway, patience: 3}"


def test_only_what_is_better_by_the_threshold_ends_the_waiting():
    early = EarlyStop(EarlyStopping(metric="reward/x", patience=2, threshold=0.1))
    seen = [early.saw(step, {"reward/x": value}) for step, value in enumerate([0.5, 0.7, 0.75, math.nan])]
    assert seen == [True, True, False, False]
    assert (early.best, early.step, early.stopped) == (0.7, 1, True)
    other = EarlyStop(early.settings)
    other.load_state_dict(json.loads(json.dumps(early.state_dict().numbers)), None)
    assert other.state_dict() == early.state_dict()
    assert other.saw(4, {"reward/x": 0.81})
    assert not other.stopped


def test_a_first_value_that_is_none_is_not_the_best():
    early = EarlyStop(EarlyStopping(metric="reward/x"))
    assert not early.saw(0, {"reward/x": math.nan})
    assert early.saw(1, {"reward/x": -3.0})


def train(out, *overrides, resume=False):
    loaded = load_recipe(["shapes-draft"], [f"model.path={two_blocks()}", *SMALL, *overrides])
    with RunDir.create(out, resume=resume) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        return Trainer(loaded, directory).begin(Stop(), resume=resume)


def rows(out):
    return [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    out = tmp_path_factory.mktemp("early") / "run"
    return out, train(out, STOPPING)


@pytest.mark.slow
def test_a_run_ends_after_its_patience_and_keeps_the_best(stopped, capsys):
    out, outcome = stopped
    found = {row["step"]: row["reward/halfway"] for row in rows(out)}
    best = max(found, key=lambda step: found[step])
    assert 0 < best < max(found) == best + 3 == outcome.done == outcome.saved < 12
    assert outcome.finished
    assert reader.steps(out / "checkpoints") == [best, best + 3], "checkpoint.keep is 1"
    assert evaluate(out, which="best")["reward/halfway"] == pytest.approx(found[best], abs=1e-6)
    assert restored(out, "latest")[2] == best + 3


def test_the_terminal_says_why(tmp_path, capsys):
    train(tmp_path / "run", "eval.early_stopping={metric: reward/halfway, patience: 1, threshold: 9}")
    said = capsys.readouterr().err
    assert "stopping: reward/halfway was best after step 0" in said
    assert "--checkpoint base has those weights" in said
    with pytest.raises(UserError, match="better than the base model; give base"):
        restored(tmp_path / "run", "best")


@pytest.mark.slow
def test_a_resumed_run_stops_where_one_that_went_through_does(stopped, tmp_path):
    out, _ = stopped
    train(tmp_path / "run", STOPPING, "train.steps=2")
    assert train(tmp_path / "run", STOPPING, resume=True).done == rows(out)[-1]["step"]
    assert rows(tmp_path / "run") == rows(out)
    again = train(tmp_path / "run", STOPPING, resume=True)
    assert again.finished
    assert rows(tmp_path / "run") == rows(out), "it has ended"
    more = train(tmp_path / "run", STOPPING.replace("3", "4"), resume=True)
    assert more.done == rows(out)[-1]["step"] + 1


def test_without_it_no_checkpoint_is_the_best(tmp_path):
    train(tmp_path / "run", "train.steps=1")
    with pytest.raises(UserError, match=r"no eval\.early_stopping"):
        restored(tmp_path / "run", "best")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["eval.early_stopping={metric: reward/nothing}"],
            "'reward/nothing' is no reward.*reward/target or",
        ),
        (["eval.early_stopping={metric: target}"], "'target' is no reward"),
        ([STOPPING, "eval.every=null"], r"nothing is evaluated.*set eval\.every"),
        (["eval.tuned_fraction=0.8", "model.lora=null"], r"no base model.*set model\.lora"),
    ],
)
def test_what_cannot_stop_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(["shapes-draft"], [HALFWAY, *overrides])


def test_of_pairs_a_figure_of_theirs_may_be_watched_and_no_unknown_reward():
    load_recipe(["sums-dpo"], ["eval.early_stopping={metric: dpo/accuracy}"])
    with pytest.raises(RecipeError, match=r"'reward/nothing' is no reward.*reward/shapes"):
        load_recipe(["shapes-dpo"], ["eval.early_stopping={metric: reward/nothing}"])


def test_text_has_no_steps_to_leave_to_the_base():
    with pytest.raises(RecipeError, match=r"eval\.tuned_fraction: text has no denoising steps"):
        load_recipe(["sums"], ["eval.tuned_fraction=0.8"])


def test_a_part_that_evaluations_do_not_have_is_named_before_training(tmp_path):
    outcome = train(tmp_path / "run", "eval.early_stopping={metric: reward/halfway/x}")
    assert outcome.error is not None
    assert "have no 'reward/halfway/x'; they have dropped, reward/halfway, " in outcome.error
    assert outcome.done == 0
