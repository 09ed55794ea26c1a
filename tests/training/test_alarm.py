"""The sequential alarm: its p-values under the hypothesis, what it says of a run, and a run that it ends."""

import json
from math import comb

import numpy as np
import pytest

from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Guards
from mmrl.core.errors import UserError
from mmrl.core.signals import Stop
from mmrl.data.loading import load_prompts
from mmrl.logging.rundir import RunDir
from mmrl.training.alarm import Alarm, p_value, with_more
from mmrl.training.evaluation import Evaluator
from mmrl.training.guards import EVIDENCE, GOOD, Limits
from tests.support.guards import SMALL
from tests.support.tiny_diffusion import two_blocks


@pytest.mark.parametrize(("ups", "downs"), [(2, 0), (9, 3), (40, 31), (200, 56)])
def test_the_p_value_of_two_values_is_the_exact_sign_test(ups, downs):
    exact = sum(comb(ups + downs, k) for k in range(ups, ups + downs + 1)) / 2 ** (ups + downs)
    assert p_value(np.repeat([1.0, -1.0], [ups, downs])) == pytest.approx(exact, rel=1e-6)


def test_the_p_value_is_the_probability_that_the_weighted_mean_with_the_least_value_is_not_above_zero():
    rng = np.random.default_rng(0)
    x = np.clip(rng.normal(0.2, 0.4, 12), -1, 1)
    drawn = rng.exponential(size=(200_000, 13)) @ np.append(x, -1.0) <= 0
    assert p_value(x) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / len(drawn) ** 0.5)
    assert p_value(np.append(x, np.nan)) == p_value(x)
    assert p_value(x[::-1]) == pytest.approx(p_value(x))
    assert (p_value(np.array([])), p_value(-x)) == (1, 1)


@pytest.mark.parametrize("rare", [0.1, 0.3])
def test_rare_large_losses_that_no_sample_may_show_raise_no_more_alarms(rare):
    rng = np.random.default_rng(0)
    gain = rare / (1 - rare)  # the mean is 0
    found = [p_value(np.where(rng.uniform(size=30) < rare, -1.0, gain)) for _ in range(600)]
    assert np.mean(np.array(found) <= 0.1) <= 0.1 + 3 * (0.09 / 600) ** 0.5
    assert min(found) < 0.4


def scores(trained, judge):
    return {"reward/trained": list(trained), "reward/judge": list(judge), "reward/judge/part": list(judge)}


@pytest.mark.slow
@pytest.mark.parametrize("first", [None, 15])
def test_false_alarms_are_no_more_than_alpha_though_evaluations_share_their_noise(first):
    rng, alarms, runs = np.random.default_rng(0), 0, 300
    for _ in range(runs):
        alarm = Alarm({"trained": 1.0}, ["judge"], alpha=0.2, follow=0.0)
        shared = rng.normal(size=40)  # what a sample's noise does in every evaluation
        base = rng.normal(size=40)
        alarm.saw(0, scores(base, base))
        for step in range(1, 6):
            now = base + 0.6 * shared + 0.3 * rng.normal(size=40)
            looks = first is None or alarm.wants_more(scores(base[:first] + 1, now[:first]))
            row = alarm.saw(step, scores(*((base + 1, now) if looks else (base[:first] + 1, now[:first]))))
        alarms += row[EVIDENCE] >= 1
    assert 0 < alarms <= 0.2 * runs


def test_an_untrained_reward_that_agrees_with_the_trained_one_follows_however_both_come_and_go():
    rng, alarm = np.random.default_rng(4), Alarm({"trained": 1.0}, ["judge"], alpha=0.05, follow=0.75)
    base, again = (rng.uniform(size=1024) < 0.5).astype(float), rng.uniform(size=1024) < 0.3
    now = np.where(again, rng.uniform(size=1024) < 0.6, base).astype(float)
    alarm.saw(0, scores(base, base))
    assert alarm.saw(1, scores(now, now))[GOOD] == 1, "it rises by as much, also where it was the best one and fell"


def test_an_evaluation_goes_on_where_it_has_a_sign_and_no_alarm_is_raised():
    rng, alarm = np.random.default_rng(3), Alarm({"trained": 1.0}, ["judge"], alpha=0.05, follow=0.0)
    base = rng.normal(size=96)
    assert alarm.wants_more({"reward/trained": [0.0]}), "the base model's"
    alarm.saw(0, scores(base, base))
    lower = base - 0.25 + 0.5 * rng.normal(size=96)
    few = scores(base[:24] + 1, lower[:24])
    assert (alarm.wants_more(few), alarm.wants_more(scores(base[:24] + 1, base[:24] + 0.1))) == (True, False)
    more = with_more(few, {"reward/trained": [*(base[24:] + 1)], "reward/judge": [*lower[24:]]})
    alone, both = (Alarm({"trained": 1.0}, ["judge"], alpha=0.05, follow=0.0) for _ in range(2))
    for one in (alone, both):
        one.saw(0, scores(base, base))
    assert alone.saw(1, few)[EVIDENCE] < 1 <= both.saw(1, more)[EVIDENCE]
    assert (alarm.base_samples, both.wants_more(few)) == (96, False), "it has said so"
    assert with_more(few, {"reward/judge": [1.0, 2.0]})["reward/trained"][-2:] == [None, None]


@pytest.mark.parametrize(("follow", "falls", "named"), [(0.5, 0.0, True), (0.0, 0.0, False), (0.0, 0.6, True)])
def test_a_reward_that_falls_or_does_not_follow_is_named_with_the_step_where_it_began(follow, falls, named):
    rng, alarm = np.random.default_rng(1), Alarm({"trained": 2.0}, ["judge"], alpha=0.05, follow=follow)
    base = rng.uniform(size=128)
    rows = [alarm.saw(0, scores(base, base))]
    for step in range(10, 70, 10):
        hacked = max(0, step - 20) / 40  # healthy up to step 20
        healthy = 0.1 * min(step, 20) / 20
        noise = 0.02 * rng.normal(size=128)
        rows.append(alarm.saw(step, scores(base + healthy + hacked, base + healthy - falls * hacked + noise)))
    limits = Limits(Guards(method="sequential", action="stop"), ["judge"])
    said = [limits.saw(10 * n, row) for n, row in enumerate(rows)]
    assert [rows[0], said[1], said[2], bool(said[-1])] == [{}, [], [], named]
    if named:
        assert rows[-1][GOOD] == 20
        assert said[-1][0].startswith("judge, not trained on, does not follow what is trained on since step 20")
        assert "(--checkpoint 20)" in limits.message()


def test_missing_scores_and_constant_ones_are_no_evidence():
    alarm = Alarm({"trained": 1.0}, ["judge", "form", "gone"], alpha=0.05, follow=0.5)
    base = {"reward/trained": [0.0, 1.0, None], "reward/judge": [0.5, None, 0.1], "reward/form": [1.0, 1.0, 1.0]}
    alarm.saw(0, base)
    row = alarm.saw(1, base)
    assert row[EVIDENCE] == pytest.approx(0.05 * 3 / (3 * 4) / 3)  # a p-value of 1 at the first level of three rewards
    assert row[GOOD] == 1
    every = Alarm({"trained": 1.0}, ["form"], alpha=0.05, follow=0.5)
    every.saw(0, {"reward/trained": [0.0] * 64, "reward/form": [1.0] * 64})
    kept = every.saw(1, {"reward/trained": [0.0] * 64, "reward/form": [0.0] * 64})
    assert kept[EVIDENCE] < 1, "the trained reward has not risen"
    assert every.saw(2, {"reward/trained": [1.0] * 64, "reward/form": [0.0] * 64})[EVIDENCE] > 1


def test_rows_that_were_written_rebuild_it():
    rng, whole, later = np.random.default_rng(2), *(Alarm({"trained": 1.0}, ["judge"], 0.05, 0.5) for _ in range(2))
    values = [scores(*rng.uniform(size=(2, 16)).round(6)) for _ in range(4)]
    rows = [whole.saw(step, of) for step, of in enumerate(values)]
    records = [{"step": 0, "prompts": [], "values": {"sft/loss": [1.0]}}]  # of given records
    rest = {name: of[12:] for name, of in values[2].items()}
    cut = [*values[:2], {name: of[:12] for name, of in values[2].items()}]
    kept = [{"step": n, "prompts": [], "values": of} for n, of in enumerate(cut)]
    kept[2]["more"] = {"prompts": [], "values": rest}
    later.saw_before([*records, *kept])
    assert later.saw(3, values[3]) == rows[3]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "sums",
            [],
            "eval.guards.method: sequential reads rewards that are never trained on, and eval.rewards has none",
        ),
        ("shapes-lora", ["eval.rewards=[{name: shapes, label: twin}]"], "and eval.rewards has none; name one there"),
        ("shapes-judge", ["eval.every=null"], "eval.guards.method: nothing is evaluated"),
        ("shapes-judge", ["eval.guards.samples=32"], "eval.guards.samples: 32 is less than eval.samples, 256"),
        (
            "shapes-judge",
            ["eval.guards.samples=513", "eval.samples_per_prompt=2"],
            "is not a multiple of eval.samples_per",
        ),
        (
            "shapes-judge",
            ["eval.guards={method: limits, samples: 128}"],
            "eval.guards.samples: only sequential reads it",
        ),
    ],
)
def test_an_alarm_that_has_nothing_to_read_is_refused(name, changes, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe([name], ["eval.guards={method: sequential}", *changes])


OPPOSITE = "eval.rewards=[{name: 'colour:target', label: opposite, options: {rgb: [195, 160, 20]}}]"


def train(out, *overrides, resume=False):
    few = ["eval.samples=24", "train.steps=5", "checkpoint.keep=1", OPPOSITE]
    loaded = load_recipe(["shapes-draft"], [f"model.path={two_blocks()}", *SMALL, *few, *overrides])
    with RunDir.create(out, resume=resume) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        return Trainer(loaded, directory).begin(Stop(), resume=resume)


@pytest.mark.slow
def test_a_run_is_ended_and_the_checkpoint_before_is_kept(tmp_path, capsys):
    stop = "eval.guards={method: sequential, action: stop, samples: 48}"
    outcome = train(tmp_path / "stopped", stop)
    said = capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "stopped/heldout.jsonl").read_text().splitlines()]
    assert outcome.finished
    assert outcome.done < 5
    assert "stopping: opposite, not trained on, does not follow what is trained on since step" in said
    good = int(rows[-1][GOOD])
    kept = {int(one.name.removeprefix("step_")) for one in (tmp_path / "stopped/checkpoints").iterdir()}
    assert kept == {outcome.done} | ({good} if good else set())
    assert train(tmp_path / "stopped", stop, resume=True).done == outcome.done, "it has still been seen"
    lines = [json.loads(line) for line in (tmp_path / "stopped/heldout_samples.jsonl").read_text().splitlines()]
    assert [len(line["prompts"]) for line in lines] == [24] * len(lines)
    went_on = ["more" in line for line in lines]
    assert (went_on[0], went_on[1], went_on[-1]) == (True, False, True)
    assert len(lines[0]["more"]["prompts"]) == 24
    warned = train(tmp_path / "warned", "eval.guards={method: sequential, samples: 48}")
    assert warned.done == 5
    again = train(tmp_path / "stopped", "eval.guards={method: sequential, samples: 48}", resume=True)
    assert again.done == 5
    assert (tmp_path / "stopped/heldout.jsonl").read_text() == (tmp_path / "warned/heldout.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "key"), [(["eval.samples=512"], "samples"), (["eval.guards.samples=512"], "guards.samples")]
)
def test_copies_of_responses_are_no_independent_samples(changes, key):
    alarm = [
        "eval.guards={method: sequential}",
        "eval.rewards=[{name: 'answer:number', label: other}]",
        "eval.temperature=0",
    ]
    recipe = load_recipe(["sums"], [*alarm, "data.heldout.count=100", *changes]).recipe
    with pytest.raises(UserError, match=f"eval.{key}: at temperature 0 512 responses to 100 .* set it to 100"):
        Evaluator(build(recipe), load_prompts(recipe, "heldout"))
