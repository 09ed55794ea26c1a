"""pass@k and maj@k: closed forms, the answers that vote, and an evaluation with several samples of each prompt."""

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.controller import Controller
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.data.loading import load_prompts
from mmrl.planner.plan import plan
from mmrl.report.html import write_report
from mmrl.runtime.start import train
from mmrl.training.evaluation import Evaluator, majority_at, pass_at, sums_at
from tests.support import tiny


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        share = Fraction(sum(any(i < right for i in subset) for subset in subsets), len(subsets))
        assert pass_at(n, right, k) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_of_chen_et_al():
    """The paper's numpy code: ``1 - prod(1 - k / arange(n - c + 1, n + 1))``, of n = 200, c = 13."""
    for k in (1, 10, 100):
        product = math.prod(1.0 - k / i for i in range(200 - 13 + 1, 201))
        assert pass_at(200, 13, k) == pytest.approx(1.0 - product, rel=1e-12)
    assert pass_at(200, 13, 1) == pytest.approx(13 / 200)
    with pytest.raises(ValueError, match="and 5 of them"):
        pass_at(4, 1, 5)


def test_a_majority_is_the_most_frequent_answer():
    answers, right = ["4", "5", "4", None], [1.0, 0.0, 1.0, 0.0]
    assert majority_at(answers, right, 4) == 1.0
    assert majority_at(answers, right, 1) == 0.5  # as the mean of what is right
    assert majority_at(["5", "4"], [0.0, 1.0], 2) == 0.5  # a tie: drawn
    assert majority_at(["4", "5", None, None], right, 2) == pytest.approx((0.5 + 0.0) / 2)
    assert majority_at(["4", "4", "5"], [1.0, 1.0, 0.0], 2) == 1.0  # the third is left over
    with pytest.raises(ValueError, match="4 of 3 samples"):
        majority_at(["4"] * 3, [1.0] * 3, 4)


def test_samples_without_a_score_do_not_count():
    right = [1.0, math.nan, 0.0, 0.0, 0.0, 0.0]
    answers = ["4", "9", "5", "5", "5", "5"]
    found = sums_at([[0, 1, 2], [3, 4, 5]], right, answers, [1, 3], [2])
    assert found == {"pass@1": (0.5, 2), "pass@3": (0.0, 1), "maj@2": (0.5, 2)}
    assert sums_at([[0, 1, 2]], right, None, [2], [2]) == {"pass@2": (1.0, 1)}


def said(text, *, truncated=False):
    return Sample(Prompt("p", "?"), SampleId(-1, 0, 0, 0), text=text, truncated=truncated)


@pytest.mark.parametrize(
    ("name", "options", "texts", "found"),
    [
        ("number", {}, ["it is 0.5", "1/2", "5 cm", "none"], ["1/2", "1/2", "5 cm", None]),
        ("exact", {"after": "answer:"}, ["answer: Yes.", "so answer:  yes", "yes"], ["yes", "yes", None]),
        ("boxed", {}, [r"\boxed{x +1}", r"\boxed{x+1}", r"\boxed{1,000}", "4"], ["x+1", "x+1", "1000", None]),
    ],
)
def test_rewards_say_which_answer_a_response_gives(name, options, texts, found):
    reward = mmrl.load("rewards", f"answer:{name}")(**options)
    assert [reward.answer_of(said(text)) for text in texts] == found
    assert reward.answer_of(said(texts[0], truncated=True)) is None


REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
class Vowel:
    def score(self, samples, *, context):
        return [float(self.answer_of(s) in list("aeiou")) for s in samples]

    def answer_of(self, sample):
        return sample.text[:1] or None

@mmrl.reward(inputs=("text",))
def long(samples, *, context):
    return [float(len(s.text) > 2) for s in samples]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repeated")
    tiny.language_model(folder / "model", sharp=0.3)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Say {i} letters."} for i in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 4}, heldout: {path: data.jsonl, heldout: 4}}
sampling: {max_new_tokens: 6}
rewards: [{name: "reward.py:Vowel", label: vowel}, {name: "reward.py:long", label: long}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
eval: {every: 1, samples: 16, samples_per_prompt: 4, pass_at: [1, 2, 4], maj_at: [4], temperature: 1.0}
"""
    )
    return folder


def test_an_evaluation_has_the_figures_of_its_samples(folder):
    loaded = load_recipe([folder / "recipe.yaml"])
    run = build(loaded.recipe)
    evaluator = Evaluator(run, load_prompts(loaded.recipe, "heldout"))
    row, made, _ = evaluator.score(16)
    texts = [s.text for s in made.samples]
    groups = [range(n, n + 4) for n in range(0, 16, 4)]
    assert [len({made.samples[i].prompt.id for i in group}) for group in groups] == [1] * 4
    assert len({s.prompt.id for s in made.samples}) == 4
    assert len({*texts}) > 4  # each from its own noise
    for label, is_right in (("vowel", lambda t: t[:1] in list("aeiou")), ("long", lambda t: len(t) > 2)):
        right = [float(is_right(text)) for text in texts]
        assert row[f"pass@1/{label}"] == pytest.approx(row[f"reward/{label}"]) == pytest.approx(sum(right) / 16)
        assert row[f"pass@4/{label}"] == pytest.approx(sum(any(right[i] for i in g) for g in groups) / 4)
        assert row[f"pass@2/{label}"] == pytest.approx(
            sum(pass_at(4, int(sum(right[i] for i in g)), 2) for g in groups) / 4
        )
    right = [float(text[:1] in list("aeiou")) for text in texts]
    votes = [majority_at([texts[i][:1] or None for i in g], [right[i] for i in g], 4) for g in groups]
    assert row["maj@4/vowel"] == pytest.approx(sum(votes) / 4)
    assert "maj@4/long" not in row  # says no answers
    with pytest.raises(UserError, match=r"6 samples are not a multiple of eval.samples_per_prompt, 4"):
        evaluator.score(6)


@pytest.mark.parametrize("size", [2, 3])
def test_controllers_divide_prompts_and_not_their_samples(folder, size):
    loaded = load_recipe([folder / "recipe.yaml"])
    run = build(loaded.recipe)
    prompts = load_prompts(loaded.recipe, "heldout")
    parts = [Evaluator(replace(run, controller=Controller(0, rank, size)), prompts)._slots(16) for rank in range(size)]
    assert [slot for part in parts for slot in part] == Evaluator(run, prompts)._slots(16)
    assert all(len(part) % 4 == 0 for part in parts)


def test_figures_are_in_the_report(folder, tmp_path):
    train(load_recipe([folder / "recipe.yaml"]), tmp_path / "run")
    assert all(
        "pass@4/vowel" in json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()
    )
    assert "maj@4/vowel" in write_report(tmp_path / "run").read_text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("eval.samples=18", "18 is not a multiple of eval.samples_per_prompt, 4; set it to 20"),
        ("eval.pass_at=[8]", "8 of 4 samples is impossible; set eval.samples_per_prompt to 8"),
        ("eval.temperature=0", "at temperature 0 the 4 responses to a prompt are the same"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, change, says):
    with pytest.raises(RecipeError, match=says):
        load_recipe([folder / "recipe.yaml"], [change])


def test_a_majority_without_votes_is_refused_in_the_plan(folder):
    loaded = load_recipe([folder / "recipe.yaml"], ["rewards=[{name: 'reward.py:long'}]"])
    assert any("eval.maj_at: no reward says what the answer" in problem for problem in plan(loaded).problems)
    with pytest.raises(UserError, match=r"eval\.maj_at: no reward says"):
        Evaluator(build(loaded.recipe), [])


def test_early_stopping_may_follow_pass_at_k(folder):
    load_recipe([folder / "recipe.yaml"], ["eval.early_stopping={metric: pass@4/vowel}"])
    with pytest.raises(RecipeError, match="is no reward of this recipe"):
        load_recipe([folder / "recipe.yaml"], ["eval.early_stopping={metric: pass@3/vowel}"])
