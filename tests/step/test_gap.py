"""A model whose forward with a cache disagrees with the one without is not trained on, unless a recipe says so."""

import json

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import train_step
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gap")
    tiny.language_model(folder / "model", sharp=0.3)
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "recipe.yaml").write_text(
        """
name: tiny
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 2}, heldout: {path: data.jsonl, heldout: 2}}
sampling: {max_new_tokens: 6}
rewards: [{name: "answer:exact"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 2, group_size: 2, micro_batch_size: 4}
"""
    )
    return folder


def otherwise_with_a_cache(module, given, named, output):
    """Logits that are twice as large where there are keys and values from before, as a faulty cache changes them."""
    cache = named.get("past_key_values")
    if cache is not None and cache.get_seq_length() > named["input_ids"].shape[1]:
        output.logits = output.logits * 2
    return output


@pytest.mark.parametrize(
    ("edit", "stops"), [((), True), (("rollout.max_gap=null",), False), (("rollout.max_gap=50",), False)]
)
def test_a_run_stops_where_the_cached_forward_disagrees(folder, edit, stops):
    loaded = load_recipe([folder / "recipe.yaml"], [*edit])
    run = build(loaded.recipe)
    run.policy.module.register_forward_hook(otherwise_with_a_cache, with_kwargs=True)
    before = {name: p.detach().clone() for name, p in run.policy.trainable.items()}
    if not stops:
        row, _ = train_step(run, 0, Clock(torch.device("cpu")))
        assert row["mismatch/log_prob_gap_max"] > 0.1
        return
    with pytest.raises(
        UserError, match=r"rollout.max_gap: a token has log-probs .* at most 0.1 .*or set rollout.max_gap to null"
    ):
        train_step(run, 0, Clock(torch.device("cpu")))
    assert all(torch.equal(before[name], p) for name, p in run.policy.trainable.items())


def test_in_half_precision_the_mean_decides():
    metrics = StepMetrics()
    gaps = torch.tensor([0.01, 0.02, 0.5])
    metrics.gather({"mismatch/log_prob_gap": gaps.sum()}, {"mismatch/log_prob_gap_max": gaps.max()}, 3)
    whole = StepMetrics()
    whole.merge([metrics.sums()])
    whole.check_gap(0.2, exact=False)
    with pytest.raises(UserError, match=r"tokens have on average log-probs 0\.177 apart"):
        whole.check_gap(0.1, exact=False)
    with pytest.raises(UserError, match=r"a token has log-probs 0\.5 apart"):
        whole.check_gap(0.2, exact=True)
