"""``rollout.importance_normalize: batch`` in the loop: one mean for all slices and updates, and what is refused."""

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.logging.metrics import describe
from mmrl.training import loop
from tests.support import tiny
from tests.support.rows import add_gap
from tests.support.sft import answers, flat, gradient_of, write

RECIPE = """
name: tiny-normalized
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: prompts.jsonl, heldout: 8}, heldout: {path: prompts.jsonl, heldout: 8}}
sampling: {max_new_tokens: 6}
rewards: [{name: "even.py"}]
algorithm: {type: grpo, aggregation: token_mean}
rollout: {importance: token, max_gap: null}
train: {steps: 2, prompts_per_step: 4, group_size: 4, micro_batch_size: 16}
optim: {lr: 1.0e-3, max_grad_norm: 1.0e+9} # gradients are compared
"""
BATCH = "rollout.importance_normalize=batch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("normalize")
    tiny.language_model(made / "model", sharp=0.2)
    write(made / "prompts.jsonl", ({"prompt": row["prompt"]} for row in answers(40)))
    (made / "recipe.yaml").write_text(RECIPE)
    (made / "even.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    return [float(len(s.text) % 3) for s in samples]\n"
    )
    return made


def make(folder, *changes):
    """A run whose engine says other log-probs than the trainer, off by up to 0.5 and more often too low."""
    loaded = load_recipe([folder / "recipe.yaml"], list(changes))
    run = build(loaded.recipe)
    sample = run.pipeline.sample

    def off(slots, ids, *args, **named):
        made = sample(slots, ids, *args, **named)
        for row, name in enumerate(ids):
            draw = torch.Generator().manual_seed(100 * name.slot + name.sample)
            add_gap(made, row, 0.5 * torch.rand(made.width, generator=draw) - 0.35)
        return made

    run.pipeline.sample = off
    return run


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_all_slices_are_divided_by_the_mean_of_the_batch(folder, level):
    how = [f"rollout.importance={level}", "rollout.importance_cap=1.3"]
    plain, before = gradient_of(make(folder, *how))
    whole, row = gradient_of(make(folder, *how, BATCH))
    mean = row["mismatch/normalizer"]
    assert abs(mean - 1) > 0.02, "else nothing is divided"
    torch.testing.assert_close(flat(whole) * mean, flat(plain), rtol=1e-4, atol=1e-7)
    if level == "token":
        assert mean == pytest.approx(before["mismatch/weight_mean"], rel=1e-5)
        assert row["mismatch/weight_mean"] == pytest.approx(1.0, rel=1e-5)
    parts, again = gradient_of(make(folder, *how, BATCH, "train.micro_batch_size=3"))
    assert (flat(parts) - flat(whole)).norm() <= 1e-4 * flat(whole).norm()
    assert again["mismatch/normalizer"] == pytest.approx(mean, rel=1e-5)
    assert row["policy/first_ratio_max_dev"] <= 1e-5
    assert all(describe(key) for key in row), [key for key in row if not describe(key)]


def test_rows_that_do_not_count_are_not_in_the_mean(folder):
    def with_a_flat_group(*changes):
        run = make(folder, *changes, BATCH, "rollout.importance_cap=1.3")
        answer = run.rewards.start

        def start(*args, **named):
            scoring = answer(*args, **named)
            finish = scoring.finish

            def flattened(groups):
                scores = finish(groups)
                scores.total[:4] = 0.0
                for part in scores.parts.values():
                    part[:4] = 0.0
                return scores

            scoring.finish = flattened
            return scoring

        run.rewards.start = start
        return loop.train_step(run, 0, Clock(torch.device("cpu")))[0]["mismatch/normalizer"]

    assert with_a_flat_group() != with_a_flat_group("algorithm.drop_zero_std_groups=true")


def test_several_updates_share_the_mean(folder):
    row, _ = loop.train_step(make(folder, BATCH, "train.updates_per_step=2"), 0, Clock(torch.device("cpu")))
    one, _ = loop.train_step(make(folder, BATCH), 0, Clock(torch.device("cpu")))
    assert row["mismatch/normalizer"] == pytest.approx(one["mismatch/normalizer"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["rollout.importance=none"], "importance_normalize: importance is none"),
        (["rollout.importance=auto"], "rollout.importance_normalize: the trained weights also sample"),
    ],
)
def test_nothing_to_normalize_is_refused(folder, changes, says):
    with pytest.raises(RecipeError, match=says):
        load_recipe([folder / "recipe.yaml"], [BATCH, *changes])


def test_pictures_have_no_such_weights():
    with pytest.raises(RecipeError, match=r"rollout\.importance_normalize: only sampled text has such weights"):
        load_recipe(["shapes-lora"], [BATCH])
