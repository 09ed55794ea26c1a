"""A judge against held-out truth: the statistics against closed forms, and ``mmrl judge``."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.lines import rows_of
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.agreement import measure, read_cases
from mmrl.rewards.judging.rubric import Rubric
from mmrl.rewards.judging.statistics import Confusions, auc, auc_interval, concordance, spearman, wilson
from mmrl.rewards.judging.store import TRANSCRIPTS
from tests.support import judging

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (7, 10), (850, 1000), (1, 3)])
def test_the_interval_of_a_proportion_ends_where_the_score_test_does(k, n):
    """Wilson's bounds are the shares from which k / n is 1.96 standard errors away."""
    low, high = wilson(k, n)
    for bound in {low, high} - {0.0, 1.0}:
        assert abs(k / n - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / n), abs=1e-6)
    assert (low == 0.0, high == 1.0) == (k == 0, k == n)
    assert wilson(0, 0) == (0.0, 1.0)


def test_auc_is_the_share_of_ordered_pairs():
    draw = random.Random(0)
    truth = [draw.random() < 0.4 for _ in range(200)]
    scores = [round(draw.random() + 0.3 * t, 1) for t in truth]  # with many ties
    right = [s for s, t in zip(scores, truth, strict=True) if t]
    wrong = [s for s, t in zip(scores, truth, strict=True) if not t]
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in right for b in wrong]
    assert auc(scores, truth) == pytest.approx(np.mean(pairs))
    assert math.isnan(auc([1.0, 2.0], [True, True]))


def test_the_interval_of_an_auc_is_hanley_and_mcneils():
    """Their table: area 0.893 from 51 abnormal and 58 normal has a standard error of 0.032 (Radiology 143, p. 32)."""
    low, high = auc_interval(0.893, 51, 58)
    assert (high - low) / 2 / 1.959964 == pytest.approx(0.032, abs=1e-3)
    assert auc_interval(1.0, 5, 5) == (1.0, 1.0)
    assert auc_interval(math.nan, 5, 0) == (0.0, 1.0)


def test_kappa_and_confusions():
    """Cohen's example as in Fleiss: 20, 5, 10, 15 of 50 agree by 0.70 and have kappa 0.40."""
    said = Confusions(20, 5, 10, 15)
    assert (said.n, said.accuracy) == (50, 0.7)
    assert said.kappa == pytest.approx(0.4)
    assert math.isnan(Confusions(5, 0, 0, 0).kappa)
    assert Confusions.of([True, True, False, False], [True, False, True, False]) == Confusions(1, 1, 1, 1)


def test_spearman_is_the_correlation_of_mean_ranks():
    assert spearman([1.0, 2.0, 2.0, 9.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))
    assert math.isnan(spearman([], []))


def test_order_of_pairs_counts_pairs_of_one_group_whose_truths_differ():
    assert concordance([0.9, 0.1, 0.5, 0.5], [1, 0, 1, 0], ["a", "a", "b", "b"]) == (1.5, 2)
    assert concordance([0.9, 0.1], [1, 1], ["a", "a"]) == (0, 0)


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    """Says yes to "good", no to "bad", yes to "odd"; and names wrong steps."""
    rubric, prompt = Rubric("{{ steps }}", "steps"), Prompt("", "")
    answers = {"1\n\n3": '{"wrong": [2]}', "2": '{"wrong": []}'}
    asked = {rubric.render([Sample(prompt, SampleId(0, 0, 0, 0), text=t)])[0]: a for t, a in answers.items()}
    pairs = [("good", "yes"), ("bad", "no"), ("odd", "yes"), *asked.items()]
    return judging.taught(tmp_path_factory.mktemp("critic"), pairs, 300)


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "mmrl.cli", "judge", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


@pytest.mark.slow
def test_a_judge_is_measured_against_rows_and_what_it_could_not_judge_is_named(critic, tmp_path):
    rows = [{"prompt": "p", "response": r, "truth": t} for r, t in [("good", 1), ("bad", 0), ("odd", 0)] * 2]
    truth = write(tmp_path / "truth.jsonl", [*rows, {"prompt": "long", "response": "x" * 600, "truth": 1}])
    options = {"model": critic, "rubric": "{{ response }}"}
    found = measure(Reward(name="judge", label="j", options=options), truth, folder=tmp_path)
    assert (found.cases, found.judged) == (7, 6)
    assert found.confusions == Confusions(2, 2, 0, 2)
    assert found.unjudged[0][0] == "long"
    assert "the model takes 512" in found.unjudged[0][1]
    graded = [{**row, "truth": 0.75 if row["response"] == "bad" else 0.25} for row in rows]
    found = measure(Reward(name="judge", options=options), write(tmp_path / "graded.jsonl", graded))
    assert found.kind == "number"
    assert found.figures["order of pairs"][0] == 0, "it says yes to the lower ones"
    assert found.confusions is None


@pytest.mark.slow
def test_mmrl_judge_measures_options_against_rows(critic, tmp_path):
    write(tmp_path / "judge.yaml", [f'model: "{critic}"', "rubric: rubric.txt"])
    (tmp_path / "rubric.txt").write_text("{{ response }}")
    rows = [{"prompt": "p", "response": r, "truth": t} for r, t in [("good", 1), ("bad", 0), ("odd", 0)] * 4]
    write(tmp_path / "truth.jsonl", [*rows, "torn"])
    done = command("judge.yaml", "--truth", "truth.jsonl", "--json", "--out", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["cases"], found["judged"]) == ("binary", 12, 12)
    assert found["confusions"] == {"both": 4, "judge_alone": 4, "truth_alone": 0, "neither": 4}
    accuracy = found["figures"]["accuracy"]
    assert accuracy["value"] == pytest.approx(2 / 3)
    assert (accuracy["low"], accuracy["high"]) == pytest.approx(wilson(8, 12))
    assert found["figures"]["kappa"]["value"] == pytest.approx(0.4)
    assert found["figures"]["right ones found"]["value"] == 1.0
    assert found["disagreements"][0]["response"] == "odd"
    assert found["skipped"][0].startswith("line 13: ")
    assert len(list(rows_of(tmp_path / "kept" / TRANSCRIPTS))) == 12

    done = command("judge.yaml", "--truth", "truth.jsonl", "--at-least", "0.85", cwd=tmp_path)
    assert done.returncode == 1
    assert "12 of 12 cases judged" in done.stdout
    assert "accuracy" in done.stdout
    assert "[0.391, 0.862]" in done.stdout
    assert "judge and truth say yes: 4; judge alone: 4; truth alone: 0; neither: 4" in done.stdout
    assert "'odd'" in done.stdout


@pytest.mark.slow
def test_mmrl_judge_measures_a_recipes_judge_of_steps(critic, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: t
pipeline: diffusion/sd3
model: {{path: org/tiny}}
data: {{name: shapes}}
sampling: {{height: 32, width: 32}}
rewards:
  - {{name: shapes}}
  - {{name: judge, options: {{model: "{critic}", rubric: "{{{{ steps }}}}", mode: steps, max_tokens: 20}}}}
algorithm: {{type: flow_grpo}}
train: {{steps: 4, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}}
"""
    )
    rows = [{"id": "a", "response": "1\n\n3", "truth": [2]}, {"id": "b", "response": "2", "truth": [1]}]
    write(tmp_path / "truth.jsonl", rows * 2)
    done = command("recipe.yaml", "--truth", "truth.jsonl", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "steps"
    assert found["confusions"] == {"both": 2, "judge_alone": 0, "truth_alone": 2, "neither": 2}
    assert found["figures"]["whole responses"]["value"] == 0.5
    assert found["figures"]["wrong steps found"]["value"] == 0.5
    named = command("recipe.yaml", "--truth", "truth.jsonl", "--reward", "nothing", cwd=tmp_path)
    assert named.returncode == 2
    assert "name one with --reward (shapes, judge)" in named.stderr


def test_rows_are_read_with_pictures_and_bad_ones_are_named(tmp_path):
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    good = {"prompt": "p", "image": "a.png", "truth": True, "meta": {"k": 1}, "images": ["a.png"], "system": "s"}
    path = write(tmp_path / "t.jsonl", [good] * 12 + [{"prompt": "p", "image": "b.png", "truth": 1}, ""])
    cases, skipped = read_cases(path)
    assert len(cases) == 12
    assert cases[0].sample.image.getpixel((0, 0)) == (255, 0, 0)
    assert cases[0].sample.prompt.media[0].path == str(tmp_path / "a.png")
    assert (cases[0].sample.prompt.system, cases[0].truth) == ("s", True)
    assert skipped[0].startswith("line 13: b.png")
    assert [len(read_cases(path, limit)[0]) for limit in (1, 5)] == [1, 5]
    for rows, why in [
        ([{"prompt": "p"}], "truth is None"),
        (["[1]"], "is no JSON object"),
        ([{"prompt": 3, "truth": 1}], "must be texts"),
        ([{"prompt": "p", "truth": "yes"}], "truth is 'yes'"),
        ([], "it is empty"),
    ]:
        with pytest.raises(UserError, match=why):
            read_cases(write(tmp_path / "bad.jsonl", rows))
    with pytest.raises(UserError, match=r"there is no file nowhere.jsonl, and as a data set"):
        read_cases("nowhere.jsonl")


def test_a_data_set_of_cases_is_read_by_name(tmp_path):
    (tmp_path / "cases.py").write_text(
        "from mmrl.core.trajectory import Prompt\n"
        "def prompts(split, **_):\n    assert split == 'heldout'\n"
        "    return [Prompt(str(i), 'p', {'response': 'r', 'truth': i / 4}) for i in range(5)]\n"
        "def bare(split):\n    return [Prompt('x', 'p', {'answer': 1})]\n"
    )
    cases, skipped = read_cases(f"{tmp_path}/cases.py:prompts", 4)
    assert [case.truth for case in cases] == [False, 0.25, 0.5, 0.75]
    assert not skipped
    with pytest.raises(UserError, match=r"prompt 'x'.*meta.truth is None"):
        read_cases(f"{tmp_path}/cases.py:bare")
