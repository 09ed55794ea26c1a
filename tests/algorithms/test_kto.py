"""KTO: TRL's own values, one estimate of the divergence however a step is cut, labels, pairs, a run.

Values marked "TRL" were printed by ``KTOTrainer.kto_loss`` of trl 0.12.0 (loss_type kto, calculate_KL, one process) in
float64 on the tensors below: its source was taken out of the class with ``ast`` and called with those settings. The
same lines are in ``compute_loss`` of trl 1.16.0.
"""

import json
import random

import pytest
import torch

from mmrl.algorithms.kto import KTO, RATIO, KTOSettings
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError
from mmrl.core.trajectory import Prompt
from mmrl.data.loading import load_prompts
from mmrl.logging.metrics import describe
from mmrl.planner.plan import plan
from mmrl.runtime.start import train
from mmrl.training import loop
from mmrl.training.evaluation import Evaluator
from tests.support import tiny
from tests.support.sft import SLICES, flat, gradient_of, lines, write

DATA = "{path: rated.jsonl, heldout: 24}"
RECIPE = f"""
name: tiny-kto
pipeline: llm/chat
model: {{path: model}}
data: {{name: jsonl, train: {DATA}, heldout: {DATA}}}
sampling: {{max_new_tokens: 8}}
algorithm: {{type: kto}}
train: {{steps: 25, prompts_per_step: 16, group_size: 1, micro_batch_size: 16}}
optim: {{lr: 3.0e-3, weight_decay: 0.0, max_grad_norm: 1.0e+9}} # gradients are compared
eval: {{every: 25, samples: 24}}
"""
LORA = "model.lora={rank: 4, alpha: 8}"


def rated(n, seed=0):
    """Good responses end in an even digit."""
    rng = random.Random(seed)
    for i in range(n):
        good = rng.random() < 0.5
        answer = "7" * rng.randint(0, 4) + rng.choice("02468" if good else "13579")
        yield {"prompt": f"Say a number, not {i}", "completion": answer, "label": good}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("kto")
    tiny.language_model(made / "model", sharp=0.05)
    write(made / "rated.jsonl", rated(200))
    pairs = [{"prompt": f"Say {i}", "chosen": "7" * (i % 4) + "2", "rejected": "7" * (i % 3) + "1"} for i in range(20)]
    write(made / "pairs.jsonl", pairs)
    (made / "recipe.yaml").write_text(RECIPE)
    return made


def load(folder, *changes):
    return load_recipe([folder / "recipe.yaml"], list(changes))


def make(folder, *changes):
    loaded = load(folder, *changes)
    return build(loaded.recipe)


# -- what is computed ---


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


GOOD, BAD = [-10.0, -7.5], [-12.0, -4.0, -9.0]
REFERENCE = f64([-11.0, -7.0, -11.0, -6.0, -9.5])
MISMATCHED = f64([-20.0, -18.0, -25.0, -30.0, -22.0]) - f64([-21.0, -19.5, -25.5, -29.0, -24.0])
TRL = {
    0.0: (0.8, 0.5171813052271047, [-0.01993205576750835, -0.019210225416926723],
          [0.011166023353467048, 0.011619446452926938, 0.01197573276739594]),
    -3.0: (0.0, 0.5135376109507979, [-0.01950777327292152, -0.019838200732867937],
           [0.011733998961155803, 0.010981643541919552, 0.011932752320522067]),
}  # fmt: skip


@pytest.mark.parametrize("shift", list(TRL))
def test_loss_and_gradient_are_trls(shift):
    objective = KTO(KTOSettings(beta=0.3, desirable_weight=1.33, undesirable_weight=0.8))
    kl, value, good, bad = TRL[shift]
    weights = torch.ones(5, dtype=torch.float64)
    found = objective.of_batch({RATIO: MISMATCHED + shift}, weights, lambda x: x)
    assert found["kl"].tolist() == pytest.approx([kl] * 5)
    x = f64([*GOOD, *BAD]).requires_grad_()
    old = {"weights": weights, "labels": f64([1, 1, 0, 0, 0]), "kl": f64([kl] * 5)}
    loss = objective.loss({"completion_log_probs": x, "reference_completion_log_probs": REFERENCE}, old, 5.0)
    loss.value.backward()
    assert loss.value.item() == pytest.approx(value, rel=1e-12)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([*good, *bad], rel=1e-10)


def test_the_divergence_is_of_the_rows_that_count_on_all_controllers():
    objective, ratio = KTO(KTOSettings()), f64([1.0, 2.0, 30.0])
    found = objective.of_batch({RATIO: ratio}, f64([1, 1, 0]), lambda x: x + f64([5.0, 2.0]))
    assert found["kl"].tolist() == pytest.approx([(1 + 2 + 5) / 4] * 3)


def test_each_prompt_is_scored_with_the_response_of_the_one_before(folder):
    run = make(folder, "train.prompts_per_step=5", "train.micro_batch_size=2", "algorithm.beta=0.5")
    with torch.no_grad():  # a policy that moved
        for p in run.policy.trainable.values():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    slots = run.controller.slots(0, run.prompts, 5)
    run.pipeline.encode(slots)
    ratios = []
    for before, slot in zip([slots[-1], *slots[:-1]], slots, strict=True):
        swapped = Prompt("x", slot.prompt.text, {"completion": before.prompt.meta["completion"], "label": True})
        (row,) = [type(slot)(0, 0, 0, swapped)]
        run.pipeline.encode([row])
        needs = frozenset({"completion_log_probs", "reference_completion_log_probs"})
        found = run.pipeline.compare(_rows([row]), needs, run.policy.using)
        ratios.append((found["completion_log_probs"] - found["reference_completion_log_probs"]).item())
    _, row = gradient_of(run)
    assert row["kto/kl"] == pytest.approx(max(0.0, sum(ratios) / 5), rel=1e-4, abs=1e-6)
    assert row["kto/kl"] > 0.01, "else nothing was compared"


def _rows(slots):
    from mmrl.core.trajectory import Rows, SampleId

    return Rows(slots, [SampleId(0, s.index, 0, 0) for s in slots])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], [LORA]], ids=["full", "lora"])
def test_any_micro_batch_gives_the_same_gradient(folder, changes):
    def moved(*more):
        run = make(folder, *changes, *more, "algorithm.undesirable_weight=0.1", "optim.lr=1e-2")
        for _ in range(3):  # the responses become likelier than they were to the reference
            loop.train_step(run, 0, Clock(torch.device("cpu")))
        return gradient_of(run)

    whole, row = moved()
    assert row["kto/kl"] > 1e-3
    for other in SLICES:
        parts, again = moved(*other)
        assert (flat(parts) - flat(whole)).norm() <= 1e-3 * flat(whole).norm()  # three steps before it rounded
        assert again["kto/kl"] == pytest.approx(row["kto/kl"], rel=1e-3)
    assert all(describe(key) for key in row), [key for key in row if not describe(key)]


def test_the_policy_that_began_has_no_divergence(folder):
    row, _ = loop.train_step(make(folder), 0, Clock(torch.device("cpu")))
    assert (row["policy/loss"], row["kto/kl"]) == (pytest.approx(0.5, abs=1e-5), pytest.approx(0, abs=1e-5))


# -- data ---


def test_pairs_become_two_records_each(folder):
    paired = "{path: pairs.jsonl, heldout: 0}"
    loaded = load(folder, f"data={{name: jsonl, train: {paired}, heldout: {paired}}}")
    prompts = load_prompts(loaded.recipe, "train")
    assert len(prompts) == 40
    first, second = prompts[6], prompts[7]
    assert (first.text, first.meta) == ("Say 3", {"completion": "7772", "label": True})
    assert (second.text, second.meta) == ("Say 3", {"completion": "1", "label": False})
    assert first.id != second.id
    assert plan(loaded).problems == []
    row, failures = loop.train_step(build(loaded.recipe), 0, Clock(torch.device("cpu")))
    assert not failures
    assert row["policy/loss"] == pytest.approx(0.5, abs=1e-5)


def test_sources_of_a_mixture_have_pairs_or_labels(folder):
    pairs, labelled = "{path: pairs.jsonl, heldout: 0}", "{path: rated.jsonl, heldout: 24}"
    sources = [f"{{name: jsonl, label: {n}, train: {d}, heldout: {d}}}" for n, d in (("p", pairs), ("r", labelled))]
    loaded = load(folder, f"data={{mixture: [{', '.join(sources)}]}}")
    assert len(load_prompts(loaded.recipe, "train")) == 40 + 176
    run = build(loaded.recipe)
    for step in range(2):  # so that the divergence is not 0
        _, failures = loop.train_step(run, step, Clock(torch.device("cpu")))
        assert not failures
    held = Evaluator(run, load_prompts(loaded.recipe, "heldout"))
    whole, _, bad = held.score(24)
    assert not bad
    shares = {name: whole[f"source/{name}/samples"] / 24 for name in ("p", "r")}
    assert sum(shares.values()) == 1
    for figure in ("policy/loss", "kto/margin"):
        of = sum(share * whole[f"source/{name}/{figure}"] for name, share in shares.items())
        assert whole[figure] == pytest.approx(of, rel=1e-5)
    assert whole["source/p/kto/kl"] == pytest.approx(whole["kto/kl"], rel=1e-5)  # one estimate for all
    assert whole["kto/kl"] > 0


@pytest.mark.parametrize("label", [None, "yes", 2])
def test_a_response_without_a_label_is_named(folder, label):
    given = make(folder).pipeline.pairs
    with pytest.raises(BadPromptError, match=r"meta\['label'\] is"):
        given.texts(Prompt("p", "Hi", {"completion": "a", "label": label}))


def test_a_bad_record_is_replaced_and_nobodys_neighbour(folder, tmp_path):
    rows = list(rated(24))
    rows[3]["completion"] = rows[20]["completion"] = "a<|im_end|>b"
    write(tmp_path / "rated.jsonl", rows)
    data = f"{{path: {tmp_path}/rated.jsonl, meta: [completion, label], heldout: 0}}"
    run = make(folder, f"data={{name: jsonl, train: {data}, heldout: {data}}}", "train.prompts_per_step=24")
    _, failures = loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert [f.reward for f in failures] == ["prompt"] * 2
    found = Evaluator(run, run.prompts).score(24)[0]
    assert (found["samples"], found["dropped"]) == (22, 2)
    again = run.recipe.train.model_copy(update={"micro_batch_size": 5})
    object.__setattr__(run, "recipe", run.recipe.model_copy(update={"train": again}))
    assert Evaluator(run, run.prompts).score(24)[0]["kto/kl"] == pytest.approx(found["kto/kl"], rel=1e-4)


def test_a_step_of_one_response_is_refused(folder):
    with pytest.raises(RecipeError, match=r"train\.prompts_per_step: kto pairs each prompt with the response of"):
        load(folder, "train.prompts_per_step=1")


# -- a run ---


@pytest.mark.slow
def test_a_run_learns_which_responses_are_good(folder, tmp_path):
    done = train(load(folder, "train.steps=80", "eval.every=80"), tmp_path / "run")
    before, after = lines(done)
    assert before["policy/loss"] == pytest.approx(0.5, abs=1e-4)
    assert after["kto/accuracy"] > 0.85
    kept = lines(done, "heldout_samples.jsonl")[-1]["values"]["kto/accuracy"]
    assert sum(kept) / len(kept) == pytest.approx(after["kto/accuracy"])
    assert after["policy/loss"] < 0.45
    assert json.loads((done / "resolved.json").read_text())["algorithm"]["desirable_weight"] == 1.0
