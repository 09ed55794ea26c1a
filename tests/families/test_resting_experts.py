"""Of two models that predict in turn, one waits in the host's memory."""

import json

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from mmrl.pipelines.diffusion.experts import resting  # noqa: E402
from tests.support import asleep  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401


def made(folders, **changed):
    plain = recipe("wan22_a14b", folders, guidance_scale=3.0, guidance_scale_2=2.0, steps=4).model_dump(mode="json")
    return Recipe.model_validate(plain | changed)


def frozen(model):
    """Bytes of each model that do not train."""
    kept = [[*(p for p in one.parameters() if not p.requires_grad), *one.buffers()] for one in model.models]
    return [sum(t.nbytes for t in of) for of in kept]


def computed(case):
    """Samples, and the gradients of a step of each model and of a slice with rows of both, by name."""
    pipeline, found = case.pipeline, {}
    rows = pipeline.sample(case.slots, case.ids, [0, 2], seed=0)
    for actions in ([0], [1], [0, 1]):
        new = pipeline.replay(rows, actions, frozenset({"log_probs", "reference_distance"}), case.policy.using)
        (new["log_probs"].sum() + new["reference_distance"].sum()).backward()
        found |= {
            f"{actions}/{name}": p.grad.clone() for name, p in case.policy.trainable.items() if p.grad is not None
        }
    return {"clean": rows.clean, "log_probs": rows.log_probs, **found}


def test_it_computes_the_same_and_one_of_them_is_not_there(folders, monkeypatch):
    expected = computed(contract.Case(made(folders)))
    case = contract.Case(made(folders))
    model = case.pipeline.adapter.model
    asleep.apart(monkeypatch)
    before = [asleep.state(one) for one in model.models]
    model.rest(torch.device("cpu"))
    host = [asleep.where(held) for held in model._frozen]
    seen = []
    for n, one in enumerate(model.models):
        one.register_forward_pre_hook(
            lambda *_, n=n: seen.append((n, [asleep.where(f) & h for f, h in zip(model._frozen, host, strict=True)]))
        )
    for name, value in computed(case).items():
        # sums of some kernels depend on where in memory the weights begin
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    alone = [there for n, there in seen if not there[n] and there[1 - n]]
    both = [there for _, there in seen if not there[0] and not there[1]]
    assert {n for n, there in seen if there[1 - n]} == {0, 1}
    assert len(alone) + len(both) == len(seen), "what computes is on the device"
    assert len(both) == 2 * 2, "a slice with rows of both: with the policy, and as the reference"
    with model.using(0, 1):
        assert not any(asleep.where(held) & h for held, h in zip(model._frozen, host, strict=True))
    for one, values in zip(model.models, before, strict=True):
        asleep.assert_same(one, values)


@pytest.mark.parametrize(
    ("changed", "trains"),
    [
        ({}, True),
        ({"train": {"micro_batch_size": 8, "steps_per_forward": 2}}, False),
        ({"algorithm": {"type": "diffusion_nft"}}, False),
        ({"algorithm": {"type": "diffusion_nft"}, "train": {"micro_batch_size": 1}}, True),
        ({"algorithm": {"type": "draft", "last_steps": 3}}, None),
        ({"model": {"lora": None}}, None),
        ({"model": {"offload": False}}, None),
        ({"model": {"quantize": "nf4"}}, None),
    ],
)
def test_what_rests_and_when(folders, changed, trains):
    plain = made(folders)
    for section, values in changed.items():
        own = plain.model_dump(mode="json")
        plain = Recipe.model_validate(own | {section: values if section == "algorithm" else own[section] | values})
    case = contract.Case(made(folders))
    found = resting(plain, case.pipeline.adapter.model)
    if trains is None:
        assert found is None
        return
    sizes = frozen(case.pipeline.adapter.model)
    assert (found.freed, found.kept) == (min(sizes), sum(sizes))
    assert ("train" in found.phases) == trains


@pytest.mark.slow
def test_the_plan_counts_one_on_the_device_and_both_on_the_host(folders, tmp_path):
    clips = {"rewards": [{"name": "frames", "options": {"name": "jpeg:incompressibility"}}]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made(folders, **clips, device="cuda").model_dump(mode="json")))
    found = {}
    for offload in (True, False):
        words = [f"model.offload={str(offload).lower()}", "model.dtype=float32", "train.micro_batch_size=4"]
        found[offload] = plan(load_recipe([tmp_path / "recipe.yaml"], words), device_memory=2**34)
    case = contract.Case(made(folders))
    sizes = frozen(case.pipeline.adapter.model)
    with_it, without = ({p.name: p.parts["policy"] for p in one.phases} for one in (found[True], found[False]))
    assert with_it.keys() >= {"sample", "train", "optimizer"}
    assert {without[name] - with_it[name] for name in with_it} == {min(sizes)}
    assert found[True].host >= sum(sizes)
    (role,) = [role for role in found[True].roles if role.name == "policy, frozen"]
    assert role.where == "one of two, else in host memory"
