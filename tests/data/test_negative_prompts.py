"""Negative prompts, of the recipe and of records: all that samples or trains moves away from them.

That the pictures are diffusers' own is in test_families.py.
"""

import json
from dataclasses import replace

import pytest
import torch

import mmrl
from mmrl.algorithms.objective import GraphSteps
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, Sample, SampleId, Slot
from mmrl.data.build import _members
from mmrl.data.fields import Columns, read_fields
from mmrl.planner.plan import plan
from mmrl.rewards.wire import decode_request, encode_request
from tests.support.training_loop import SMALL, make

GUIDED = ["sampling.guidance_scale=4.5", "sampling.window=null", "sampling.same_initial_noise=false"]
SAID = "sampling.negative_prompt=a red circle"
ALGORITHM = "algorithm={type: rwr, guidance: 3.0}"


def slots(negative=None, count=2):
    """Rows of two prompts; ``negative`` is of the records."""
    prompts = mmrl.load("datasets", "shapes").prompts("train")
    return [Slot(0, i, 0, replace(prompts[i], negative_prompt=negative)) for i in range(count)]


def all_that_predicts(run, rows):
    """What sampling, evaluation, replay, re-noising and back-propagation make of ``rows``."""
    pipeline, ids = run.pipeline, [SampleId(0, s.index, 0, 0) for s in rows]
    pipeline.encode(rows)
    drawn = pipeline.sample(rows, ids, [0], seed=0)
    same = replace(drawn, clean=torch.ones_like(drawn.clean))  # whatever was sampled
    replayed = pipeline.replay(drawn, [0], frozenset({"log_probs"}), run.policy.using)["log_probs"]
    assert torch.equal(replayed[:, 0].detach(), drawn.log_probs[:, 0])
    return {
        "sample": drawn.clean,
        "evaluate": pipeline.sample(rows, ids, [], seed=1, evaluate=True).clean,
        "renoise": pipeline.renoise(same, 0, 0, frozenset(), run.policy.using)["v"],
        "generate": pipeline.generate(rows, ids, GraphSteps(1, 1), 0, frozenset(), run.policy.using)["latents"],
    }


def test_all_that_predicts_moves_away_from_the_records_before_the_recipes():
    plain, told = (make(*GUIDED, "sampling.steps=2", ALGORITHM, *more) for more in ([], [SAID]))
    none, recipes = all_that_predicts(plain, slots(None, 1)), all_that_predicts(told, slots(None, 1))
    own, wins = all_that_predicts(plain, slots("a red circle", 1)), all_that_predicts(told, slots("a blue star", 1))
    empty = all_that_predicts(told, slots("", 1))
    for name, value in none.items():
        assert torch.equal(recipes[name], own[name]), name
        assert torch.equal(empty[name], value), f"{name}: of SD3 no negative prompt is the empty one"
        assert (recipes[name] - value).abs().max() > 1e-3, name
        assert (wins[name] - recipes[name]).abs().max() > 1e-3, name


def test_rows_of_one_batch_have_negatives_of_their_own():
    run = make(*GUIDED)
    mixed = [slots("a red circle")[0], slots("a blue star")[1]]
    run.pipeline.encode(mixed)
    features = run.pipeline.batch_features(mixed)
    for row, text in enumerate(("a red circle", "a blue star")):
        assert torch.equal(features["embeds"][row], run.pipeline.adapter.encode_negative(text)["embeds"])


def test_features_of_negative_prompts_are_kept_once_held_and_cached(tmp_path):
    cache = f"features.cache={tmp_path}"
    run = make(*GUIDED, SAID, cache)
    features, calls = run.pipeline.features, []
    for encoder in run.pipeline.adapter.text_encoders:
        encoder.register_forward_hook(lambda *_: calls.append(1))
    keys = run.pipeline.encode([*slots(), *slots("a blue star")])
    assert (len(keys), len(features), features.held) == (4, 4, 4), "two prompts and two negative ones"
    assert features.bytes == sum(t.nbytes for key in keys for t in features.get(key).values())
    count = len(calls)
    run.pipeline.encode(slots("a blue star"))
    assert len(calls) == count > 0
    run.pipeline.features.release(keys)
    again = make(*GUIDED, SAID, cache)
    for encoder in again.pipeline.adapter.text_encoders:
        encoder.register_forward_hook(lambda *_: calls.append(1))
    again.pipeline.encode(slots("a blue star"))
    assert len(calls) == count
    assert make(*GUIDED).pipeline.encode(slots())[-1] == "", "without a negative prompt the key is what it was"


def test_a_prompt_and_a_negative_prompt_of_the_same_text_are_apart():
    run = make(*GUIDED)
    text = slots()[0].prompt.text
    assert len(run.pipeline.encode(slots(text, count=1))) == 2


# -- data ------------------------------------------------------------------------------------------------------------


def test_a_record_has_one_or_none():
    def read(record, **columns):
        return read_fields({"prompt": "a cat"} | record, Columns(**columns)).negative_prompt

    assert read({}) is None
    assert read({"negative_prompt": None}) is None
    assert read({"negative_prompt": ""}) == ""
    assert read({"negative_prompt": " blurry\n"}) == "blurry"
    assert read({"avoid": "blurry"}, negative_prompt="avoid") == "blurry"
    system, user = ({"role": role, "content": text} for role, text in (("system", "Describe."), ("user", " blurry ")))
    for messages in ([user], [system, user], json.dumps([system, user])):  # as verl-omni's files have it
        assert read({"negative_prompt": messages}) == "blurry"
    twice = ([user, user], "2 messages of the user")
    for wrong, why in (twice, (3, "is not text"), ("a\0b", "control characters"), ("\ud800", "half of a surrogate")):
        with pytest.raises(ValueError, match=why):
            read({"negative_prompt": wrong})


@pytest.mark.parametrize("name", ["prompts", "jsonl"])
def test_data_sets_read_the_column(tmp_path, name):
    records = [{"prompt": f"a cat {n}", "negative_prompt": f"a dog {n}"} for n in range(3)] + [{"prompt": "a cat 0"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    made = mmrl.load("datasets", name).prompts("train", path=str(tmp_path / "p.jsonl"), heldout=0)
    assert [(p.text, p.negative_prompt) for p in made] == [(r["prompt"], r.get("negative_prompt")) for r in records]


def test_it_goes_into_shards_and_to_rewards_elsewhere():
    prompt = Prompt("p", "a cat", negative_prompt="a dog")
    assert json.loads(_members(prompt, "png")["json"])["negative_prompt"] == "a dog"
    request = decode_request(encode_request([Sample(prompt, SampleId(0, 0, 0, 0), text="x")], [[0]], 0)[0])
    assert request.samples[0].prompt == prompt


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_recipe_without_guidance_is_refused():
    with pytest.raises(UserError, match=r"without guidance no negative prompt is used; set sampling\.guidance_scale"):
        load_recipe(["shapes-lora"], ["sampling.guidance_scale=1", SAID])
    load_recipe(["shapes-nft"], ["sampling.guidance_scale=1", "algorithm.guidance=2.0", SAID])


@pytest.mark.parametrize("guidance", [1, 4.5])
def test_records_without_guidance_are_refused_before_a_model_is_loaded(tmp_path, guidance):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a cat", "negative_prompt": "a dog"}) + "\n")
    data = f"data={{name: jsonl, train: {{path: {tmp_path / 'p.jsonl'}, heldout: 0}}, heldout: {{path: "
    data += f"{tmp_path / 'p.jsonl'}, heldout: 0}}}}"
    changes = [*SMALL, data, "rewards=[{name: 'jpeg:incompressibility'}]", f"sampling.guidance_scale={guidance}"]
    loaded = load_recipe(["shapes-lora"], changes)
    said = "data: the prompt p:1 has a negative_prompt, and sampling.guidance_scale is 1, which samples without"
    assert [p[: len(said)] for p in plan(loaded).problems] == [said][: guidance == 1]
    if guidance == 1:
        run = make(*changes)
        with pytest.raises(UserError, match="take negative_prompt out of the records"):
            run.pipeline.encode([Slot(0, 0, 0, run.prompts[0])])


def test_text_has_none(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1 + 1", "answer": "2", "negative_prompt": "x"}) + "\n")
    file = f"{{path: {tmp_path / 'p.jsonl'}, heldout: 0}}"
    loaded = load_recipe(["sums"], [f"data={{name: jsonl, train: {file}, heldout: {file}}}"])
    assert any("and text has none; take negative_prompt out" in problem for problem in plan(loaded).problems)
