"""A judge in this process with its layers in 8 or 4 bits, and what the plan says of it."""

import pytest

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.models import quantized
from mmrl.models.quantized import NEEDS, QuantizedLinear
from mmrl.planner.judges import on_devices
from mmrl.rewards.scoring import check
from tests.support import tiny

RUBRIC = "Is {{ response }} right? Answer yes or no."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny.language_model(tmp_path_factory.mktemp("judge"), hidden_size=64, intermediate_size=256))


def judge(model, **how):
    return mmrl.load("rewards", "judge:score")(
        model={"path": model, **how}, answer={"type": "yes_no", "floor": 0}, rubric=RUBRIC, cache=False
    )


@pytest.mark.parametrize("kind", NEEDS)
def test_it_answers_as_a_plain_one_with_the_rounded_weights(model, kind):
    pytest.importorskip(NEEDS[kind][0])
    samples = [Sample(Prompt("p", "add"), SampleId(1, 0, 0, k), text=text) for k, text in enumerate(("7", "1 + 2 = 3"))]
    plain, few = judge(model, dtype="float32"), judge(model, dtype="float32", quantize=kind)
    before, said = (one.score(samples, context=Context())["score"] for one in (plain, few))
    layers = {name: one for name, one in few.local.model.named_modules() if isinstance(one, QuantizedLinear)}
    for name, layer in layers.items():
        plain.local.model.get_submodule(name).weight.data = layer.weight
    rounded = plain.score(samples, context=Context())["score"]
    assert said == pytest.approx(rounded, abs=1e-5)
    assert said != pytest.approx(before, abs=1e-5)  # the control
    assert len(layers) == 14
    assert few.local.identity == f"{plain.local.identity} {kind}"
    few.sleep("cpu")
    assert few.score(samples, context=Context())["score"] == said


def test_what_is_unknown_or_not_here_is_refused(model, monkeypatch):
    with pytest.raises(UserError, match=r"options\.model\.quantize: 'int4'; write int8, fp8, nf4, or remove it"):
        judge(model, quantize="int4")
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"options\.model\.quantize: nf4 is of bitsandbytes, which is not here; pip"):
        judge(model, quantize="nf4")


@pytest.mark.parametrize("kind", NEEDS)
def test_the_plan_counts_the_bits(model, kind):
    pytest.importorskip(NEEDS[kind][0])
    asked = f"rewards=[{{name: judge, options: {{model: {{path: {model}, dtype: float32%s}}, rubric: '{RUBRIC}'}}}}]"

    def planned(bits):
        recipe = load_recipe(["sums"], [asked % bits]).recipe
        (found,), problems, notes = on_devices(recipe, check(recipe.rewards), [])
        assert not problems + notes
        return found

    plain, few = planned(""), planned(f", quantize: {kind}")
    module = judge(model, dtype="float32", quantize=kind).local.model
    tensors = {id(t): t.nbytes for t in [*module.parameters(), *module.buffers()]}
    layer = max(one.in_features * one.out_features * 4 for one in module.modules() if isinstance(one, QuantizedLinear))
    assert few.bytes == pytest.approx(sum(tensors.values()) + layer, rel=0.05)
    assert few.bytes < plain.bytes
    assert few.what == f"{plain.what}, {kind}"


def test_the_plan_refuses_what_is_not_here(model, monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    asked = f"rewards=[{{name: judge, options: {{model: {{path: {model}, quantize: fp8}}, rubric: '{RUBRIC}'}}}}]"
    with pytest.raises(UserError, match=r"options\.model\.quantize: fp8 is of torchao, which is not here; pip install"):
        check(load_recipe(["sums"], [asked]).recipe.rewards)
