"""What evaluations show of over-optimisation, beside the base model's samples, and the limits that end a run."""

import json
import math
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Guards
from mmrl.controller import Controller
from mmrl.core.signals import Stop
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot
from mmrl.data.loading import load_prompts
from mmrl.logging.rundir import RunDir
from mmrl.report.html import write_report
from mmrl.training import guards
from mmrl.training.evaluation import Evaluator
from mmrl.training.guards import Limits, Measures
from tests.support.guards import SMALL
from tests.support.tiny_diffusion import two_blocks


def picture(slot, prompt, seed, size=(6, 5)):
    pixels = np.random.default_rng(seed).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
    return Sample(Prompt(prompt, prompt), SampleId(-1, slot, 0, 0), image=Image.fromarray(pixels))


def whole(sample):
    return np.asarray(sample.image, dtype=float) / 255


def text(slot, prompt, said):
    return Sample(Prompt(prompt, prompt), SampleId(-1, slot, 0, 0), text=said)


# -- figures ---------------------------------------------------------------------------------------------------------


def test_diversity_and_distance_are_root_mean_squares_over_pairs():
    samples = [picture(i, "ab"[i % 2], i) for i in range(6)]  # three of each prompt
    base = [picture(i, "ab"[i % 2], 10 + i) for i in range(6)]
    measures = Measures(Controller(0), 2, ["r"])
    measures.keep(base)
    row = measures.of(samples, [{"r": v} for v in (1.0, 2.0, 4.0)], (0.0, 0))
    of = {p: [whole(s) for s in samples if s.prompt.id == p] for p in "ab"}
    apart = [((x - y) ** 2).mean() for group in of.values() for x, y in combinations(group, 2)]
    away = [((whole(x) - whole(y)) ** 2).mean() for x, y in zip(samples, base, strict=True)]
    assert row["guard/diversity"] == pytest.approx(math.sqrt(np.mean(apart)), rel=1e-12)
    assert row["guard/distance"] == pytest.approx(math.sqrt(np.mean(away)), rel=1e-12)
    assert row["guard/std/r"] == pytest.approx(np.std([1.0, 2.0, 4.0]))
    alone = Measures(Controller(0), 6, []).of(samples, [], (0.0, 0))  # a prompt has one sample: all together
    every = [((whole(x) - whole(y)) ** 2).mean() for x, y in combinations(samples, 2)]
    assert alone == {"guard/diversity": pytest.approx(math.sqrt(np.mean(every)), rel=1e-12)}


def test_equal_samples_have_none_and_one_that_is_alone_has_no_figure():
    same = [picture(i, "a", 0) for i in range(3)]
    assert Measures(Controller(0), 1, []).of(same, [], (0.0, 0)) == {"guard/diversity": 0.0}
    assert Measures(Controller(0), 1, []).of(same[:1], [], (0.0, 0)) == {}


def test_a_large_picture_is_seen_on_a_grid():
    large = picture(0, "a", 0, size=(640, 320))
    found = guards.pixels(large).view(64, 64, 3).numpy()
    assert np.array_equal(found, whole(large)[2::5][:, 5::10])
    clip = Sample(large.prompt, large.id, video=tuple(picture(0, "a", n).image for n in range(9)))
    assert len(guards.pixels(clip)) == 4 * 6 * 5 * 3


def test_distinct_2_of_texts_by_prompt():
    samples = [text(0, "a", "x y z"), text(1, "b", "u"), text(2, "a", "x y w"), text(3, "b", "u v")]
    row = Measures(Controller(0), 2, []).of(samples, [], (0.6, 3))
    assert row == {"guard/diversity": pytest.approx((3 / 4 + 1) / 2), "guard/distance": pytest.approx(0.2)}


def test_the_samples_of_a_prompt_are_on_one_controller():
    class OfTwo(Evaluator):
        def __init__(self, rank):
            self.each, self.prompts = 1, [Prompt(str(n), str(n)) for n in range(3)]
            self.run = type("Context", (), {"controller": Controller(0, rank, 2)})

    for samples in (2, 3, 7):
        slots = [OfTwo(rank)._slots(samples) for rank in range(2)]
        assert sorted(s.index for of in slots for s in of) == list(range(samples))
        assert not {s.prompt.id for s in slots[0]} & {s.prompt.id for s in slots[1]}
    assert [s.index for s in OfTwo(0)._slots(7, 3)] == [0, 2]


# -- limits ----------------------------------------------------------------------------------------------------------

ROW = {"guard/diversity_share": 0.4, "guard/distance": 0.3, "guard/change/x": -0.6, "guard/change/y": -9.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ["diversity is 0.40 of the base model's (diversity_min 0.5)", "x, not trained on, fell by 0.60 std"]),
        ({"diversity_min": 0.4, "untrained_drop": 0.6}, []),
        (
            {"diversity_min": None, "untrained_drop": None, "distance_max": 0.29},
            ["distance to the base model is 0.300"],
        ),
    ],
)
def test_what_is_beyond_a_limit(settings, said):
    found = Limits(Guards(**settings), ["x"]).saw(1, ROW)
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True))


def test_only_evaluations_in_a_row_stop_and_only_where_asked():
    limits = Limits(Guards(action="stop", patience=2), ["x"])
    seen = [bool(limits.saw(step, row)) or limits.stopped for step, row in enumerate([ROW, {}, ROW, ROW])]
    assert (seen, limits.within, limits.stopped) == ([True, False, True, True], 1, True)
    warning = Limits(Guards(), ["x"])
    assert warning.saw(1, ROW)
    assert not warning.stopped


# -- a run -----------------------------------------------------------------------------------------------------------


def train(out, *overrides, resume=False):
    loaded = load_recipe(["shapes-draft"], [f"model.path={two_blocks()}", *SMALL, *overrides])
    with RunDir.create(out, resume=resume) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        return Trainer(loaded, directory).begin(Stop(), resume=resume)


def rows(out):
    return [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_stops_beyond_a_limit_and_goes_on_as_if_it_had_not(tmp_path, capsys):
    stop = "eval.guards={distance_max: 1e-6, action: stop}"
    outcome = train(tmp_path / "stopped", stop)
    assert (outcome.done, outcome.saved, outcome.finished) == (1, 1, True)
    said = capsys.readouterr().err
    assert "stopping: distance to the base model is" in said
    assert "after step 0 (--checkpoint base)" in said
    assert train(tmp_path / "stopped", stop, resume=True).done == 1, "it is still beyond the limit"
    assert train(tmp_path / "stopped", resume=True).done == 2
    assert train(tmp_path / "whole").done == 2
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    first, *_, last = rows(tmp_path / "whole")
    assert (first["guard/distance"], first["guard/diversity_share"], first["guard/change/halfway"]) == (0, 1, 0)
    assert last["guard/distance"] > 1e-6
    for label in ("target", "halfway"):
        change = (last[f"reward/{label}"] - first[f"reward/{label}"]) / first[f"guard/std/{label}"]
        assert last[f"guard/change/{label}"] == pytest.approx(change)
    assert "halfway (not trained on)" in capsys.readouterr().err
    page = write_report(tmp_path / "whole").read_text()
    assert all(title in page for title in ("of held-out samples to the base model", "change of rewards"))


def test_the_distance_of_texts_is_their_log_prob_gap():
    loaded = load_recipe(["sums"], ["model.lora={rank: 4}", "train.micro_batch_size=2", "sampling.max_new_tokens=8"])
    run = build(loaded.recipe)
    heldout = Evaluator(run, load_prompts(loaded.recipe, "heldout"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in run.policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    slots = [Slot(0, i, 0, heldout.prompts[i]) for i in range(3)]
    keys = run.pipeline.encode(slots)
    drawn = run.pipeline.sample(slots, [SampleId(0, i, 0, 0) for i in range(3)], [], seed=0)
    total, tokens = heldout._gaps(drawn)
    expected = []
    for row, key in enumerate(keys):
        asked, said = run.pipeline.features.get(key)["input_ids"].view(-1), torch.tensor(drawn.spoken()[row])
        every, gap = torch.cat([asked, said]).unsqueeze(0), []
        for name in ("current", "reference"):
            with torch.no_grad(), run.policy.using(name):
                logits = run.pipeline.policy(input_ids=every).logits[0, len(asked) - 1 : -1]
            logits = logits.double() / loaded.recipe.decoding.temperature
            gap.append(logits.log_softmax(-1).gather(1, said.unsqueeze(1))[:, 0])
        expected.append(gap[0] - gap[1])
    assert tokens == sum(drawn.responses)
    assert total == pytest.approx(torch.cat(expected).sum().item(), rel=1e-4, abs=1e-4)
    assert abs(total) > 1e-3


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("shapes-lora", ["eval.every=null", "eval.guards={action: stop}"], "eval.guards.action: nothing is evaluated"),
        ("sums", ["eval.guards={distance_max: 1}"], "without LoRA and without algorithm.kl_coef no base model is kept"),
        ("shapes-dpo", ["eval.rewards=[]", "eval.guards={distance_max: 1}"], "on given pairs does not sample"),
    ],
)
def test_limits_that_nothing_would_reach_are_refused(name, changes, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe([name], changes)
