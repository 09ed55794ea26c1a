"""The section ``performance``: equal numbers whatever it says, what is refused and with which edit, and the plan."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch

import mmrl
from mmrl.app.resume import same_run
from mmrl.config.loader import load_recipe
from mmrl.config.performance import Performance
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.logging.rundir import RunDir
from mmrl.models import performance
from mmrl.models.optimizers import bytes_in_8_bits
from mmrl.models.performance import Ability
from mmrl.planner.fit_check import edits
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan import plan
from tests.support.performance import policy, updates
from tests.support.tiny import language_model
from tests.support.tiny_diffusion import save, two_blocks

allow_cpu_only()  # before transformers imports torchvision

CPU, AMPERE, VOLTA = Ability("cpu", "cpu", False), Ability("cuda", "cuda", True), Ability("cuda:1", "cuda", False)
SMALL = [
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    "rewards=[{name: 'jpeg:incompressibility'}]",
    "device=cpu",
]


def recipe(*overrides, name="shapes-full"):
    less = [*SMALL, f"model.path={two_blocks()}"] if name.startswith("shapes") else []
    return load_recipe([name], [*less, *overrides])


# -- the optimizer -----------------------------------------------------------------------------------------------------


def gap(one, other):
    """The greatest difference of their weights, relative to how far training has moved one of them."""
    began = policy()
    moved = max((p - began.trainable[k]).abs().max() for k, p in one.trainable.items())
    apart = max((p - other.trainable[k]).abs().max() for k, p in one.trainable.items())
    return (apart / moved).item()


def resumed(made, optimizer):
    """Another policy with what a checkpoint of ``made`` holds."""
    tensors, numbers = made.state()
    saved = {part: {k: t.detach().clone() for k, t in of.items()} for part, of in tensors.items()}
    other = policy(optimizer)
    rooms = other.rooms(saved)
    for part, of in saved.items():
        for k, t in of.items():
            rooms[part][k].copy_(t)
    other.load_state(rooms, numbers)
    return other


def test_the_fused_kernel_computes_the_same_adamw():
    plain, fused = policy(), policy("adamw_fused")
    assert fused.optimizer.param_groups[0]["fused"]
    for made in (plain, fused):
        updates(made, 0, 10)
    assert gap(plain, fused) < 1e-5


@pytest.mark.parametrize(("first", "second"), [("adamw", "adamw_fused"), ("adamw_fused", "adamw")])
def test_a_checkpoint_is_taken_up_by_either(first, second):
    through, began = policy(first), policy(first)
    updates(through, 0, 6)
    updates(began, 0, 3)
    after = resumed(began, second)
    updates(after, 3, 6)
    assert gap(through, after) < 1e-5
    same = resumed(began, first)
    updates(same, 3, 6)
    assert all(torch.equal(p, same.trainable[k]) for k, p in through.trainable.items())


@pytest.mark.parametrize(("first", "second"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_eight_bits(first, second):
    """Of AdamW's path they stay near, and checkpoints go both ways: the same optimizer goes on to the bit."""
    pytest.importorskip("bitsandbytes")
    plain, through, began = policy(), policy(first), policy(first)
    updates(plain, 0, 6)
    updates(through, 0, 6)
    updates(began, 0, 3)
    after = resumed(began, second)
    updates(after, 3, 6)
    assert gap(plain, after) < 0.1
    same = resumed(began, first)
    updates(same, 3, 6)
    assert all(torch.equal(p, same.trainable[k]) for k, p in through.trainable.items())
    eight = through if first == "adamw_8bit" else after
    kept = [t for state in eight.optimizer.state.values() for k, t in state.items() if k[:5] in ("state", "absma")]
    assert sum(t.nbytes for t in kept) == bytes_in_8_bits(eight.trainable.values())
    assert {t.dtype for t in kept} == {torch.uint8, torch.float32}


def test_a_run_may_go_on_with_other_settings(tmp_path):
    began = recipe()
    directory = RunDir(tmp_path)
    directory.write_recipe(began.paths, began.overrides, began.resolved())
    same_run(directory, recipe("performance={optimizer: adamw_fused, tf32: false, offload_optimizer: true}"))
    with pytest.raises(UserError, match=r"optim\.lr"):
        same_run(directory, recipe("performance.optimizer=adamw_fused", "optim.lr=1"))


# -- gathering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["model.dtype=bfloat16"],
            "only weights in shards are gathered, and train.backend is replicated; set it to fsdp",
        ),
        (
            ["train.backend=fsdp", "model.dtype=float32"],
            "the model computes in float32; set model.dtype to bfloat16 too",
        ),
    ],
)
def test_a_dtype_of_gathering_that_has_no_effect_or_is_not_that_of_the_model_is_refused(words, says):
    with pytest.raises(UserError, match=says):
        recipe("performance.gather_dtype=bfloat16", *words)


def test_the_plan_counts_weights_in_the_dtype_that_they_are_gathered_in():
    words = ["controllers=2", "train.backend=fsdp", "model.dtype=bfloat16"]
    plain, half = (plan(load_recipe(["sums"], [*words, *more])) for more in ([], ["performance.gather_dtype=bfloat16"]))
    one, other = ({phase.name: phase.parts for phase in made.phases} for made in (plain, half))
    gathered = "weights gathered for the phase"
    assert other["sample"][gathered] == pytest.approx(one["sample"][gathered] / 2, rel=0.01)
    assert other["sample"]["policy"] == one["sample"]["policy"]
    assert half.load.total == plain.load.total
    assert half.load.parts["policy"] == one["sample"]["policy"]


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    return language_model(tmp_path_factory.mktemp("language"))


def test_text_with_eager_attention(language):
    rows = torch.arange(24).view(2, 12) % 50
    found = {}
    for name in ("eager", "sdpa", None):
        asked = [f"model.path={language}", *([f"performance.attention={name}"] if name else [])]
        made = recipe(*asked, "device=cpu", name="sums").recipe
        pipeline = mmrl.load("pipelines", made.pipeline).build(made, str(language), torch.device("cpu"))
        assert pipeline.policy.config._attn_implementation == (name or "sdpa")
        with torch.no_grad():
            found[name] = pipeline.policy(rows).logits
    assert torch.equal(found["sdpa"], found[None])
    assert not torch.equal(found["eager"], found["sdpa"])  # another kernel
    assert torch.allclose(found["eager"], found["sdpa"], atol=1e-4)


def test_pictures_with_a_back_end_of_diffusers(tmp_path):
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    from mmrl.pipelines.diffusion import contract

    folder = save("flux", tmp_path / "flux")
    before = _AttentionBackendRegistry.get_active_backend()[0]
    changed = ["performance.attention=_native_math", f"model.path={folder}", "device=cpu", "model.dtype=float32"]
    sizes = ["sampling={steps: 3, height: 32, width: 32, max_sequence_length: 16}", "rewards=[{name: shapes}]"]
    made = recipe(
        *changed,
        *sizes,
        "train.group_size=4",
        "train.micro_batch_size=8",
        "algorithm={type: flow_grpo}",
        name="flux-dev",
    ).recipe
    made = made.model_copy(update={"model": made.model.model_copy(update={"gradient_checkpointing": False})})
    pipeline = mmrl.load("pipelines", made.pipeline).build(made, str(folder), torch.device("cpu"))
    held = [m.processor._attention_backend for m in pipeline.adapter.model.modules() if hasattr(m, "processor")]
    assert held
    assert set(held) == {AttentionBackendName._NATIVE_MATH}
    assert _AttentionBackendRegistry.get_active_backend()[0] == before  # of models that ask for none
    contract.first_ratio_is_one(made)


def test_a_family_that_leaves_no_choice_is_refused_in_the_plan():
    found = plan(recipe("performance.attention=native")).problems
    assert found
    assert "performance.attention: SD3Transformer2DModel calls torch's attention itself" in found[0]


# -- what a device lacks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "has", "said"),
    [
        ("performance.tf32=true", CPU, "performance.tf32: cpu has no TensorFloat-32"),
        ("performance.tf32=true", VOLTA, "cuda:1 has no TensorFloat-32"),
        ("performance.tf32=true", AMPERE, ""),
        ("performance.tf32=false", CPU, ""),
        ("performance.attention=_native_efficient", CPU, "remove it"),
        ("performance.attention=_native_efficient", VOLTA, ""),
        ("performance.attention=_native_math", CPU, ""),
        ("performance.optimizer=adamw_fused", CPU, ""),
    ],
)
def test_what_a_device_lacks(asked, has, said):
    found = list(performance.refusals(recipe(asked).recipe, has))
    assert bool(found) == bool(said)
    assert not said or said in found[0]


def test_a_package_that_is_not_installed():
    assert find_spec("flash_attn") is None, "this test is for machines without it"
    asked = recipe("performance.attention=flash_attention_2", "model.dtype=bfloat16", name="sums").recipe
    [found] = performance.refusals(asked, AMPERE)
    assert "install flash-attn, or remove it" in found


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["performance.attention=sdpa"], "diffusers has no 'sdpa' to train with; use native"),
        (["performance.attention=sage"], "diffusers has no 'sage' to train with"),
        (["performance.attention=_native_flash", "model.dtype=float32"], "set model.dtype to bfloat16"),
        (["performance.offload_reference=true", "model.lora={rank: 2}"], "with LoRA the reference is the base model"),
        (["performance.optimizer=adamw_8bit", "train.backend=fsdp"], "set it to adamw, or train.backend to replicated"),
        (["performance.optimizer=sgd"], "performance.optimizer"),
        (["performance.tf23=true"], "performance.tf23"),
    ],
)
def test_what_no_device_can_do(overrides, said):
    with pytest.raises(UserError) as raised:
        recipe(*overrides)
    assert said in str(raised.value)


def test_a_run_is_refused_before_its_model_is_loaded(monkeypatch):
    from mmrl.app import build as run

    monkeypatch.setattr(run.mmrl, "load", None)
    loaded = recipe("performance.tf32=true")
    with pytest.raises(UserError, match=r"performance\.tf32"):
        run.build(loaded.recipe)


def test_tf32_is_set_and_set_back(monkeypatch):
    monkeypatch.setattr(performance, "_torch_chose", [])
    flags, cuda = (torch.backends.cuda.matmul, torch.backends.cudnn), torch.device("cuda")
    before = [f.allow_tf32 for f in flags]
    try:
        for asked, dtype, expected in (
            (True, "float32", [True, True]),
            (False, "bfloat16", [False, False]),
            (None, "float32", before),
            (None, "bfloat16", [True, True]),
            (None, "float32", before),
        ):
            performance.settle(Performance(tf32=asked), cuda, dtype)
            assert [f.allow_tf32 for f in flags] == expected
        performance.settle(Performance(tf32=True), torch.device("cpu"))  # it has none
        assert [f.allow_tf32 for f in flags] == before
    finally:
        for f, value in zip(flags, before, strict=True):
            f.allow_tf32 = value


# -- the plan ----------------------------------------------------------------------------------------------------------


@cache
def planned(*overrides):
    return plan(recipe("algorithm.kl_coef=0.01", *overrides), gpu=GPUS["h100-80g"])


def parts(made, name):
    return {phase.name: phase.parts.get(name, 0) for phase in made.phases}


@pytest.mark.slow
def test_the_plan_counts_what_is_on_the_host():
    before = planned()
    after = planned("performance={offload_optimizer: true, offload_reference: true}")
    state, copies = "optimizer state", "copies of the trained weights"
    adam = parts(before, state)["train"]
    trained = next(role.bytes for role in before.roles if role.name == "copy: reference")
    assert parts(after, state) == dict.fromkeys(parts(before, state), 0) | {"optimizer": adam}
    held = parts(before, copies)["train"]
    assert parts(after, copies) == dict.fromkeys(parts(before, copies), held - trained) | {"train": held}
    assert after.host - before.host == adam + trained
    assert {role.name: role.where for role in after.roles}["optimizer"] == "optimizer, else in host memory"


@pytest.mark.slow
def test_the_plan_counts_8_bits(monkeypatch):
    monkeypatch.setattr(performance, "find_spec", lambda name: name)  # as if bitsandbytes were installed
    before, after = planned(), planned("performance.optimizer=adamw_8bit")
    assert 3.5 < before.measured.adam / after.measured.adam < 4.1  # a few small weights keep float32
    assert parts(after, "optimizer state")["train"] == after.measured.adam
    assert after.time.seconds["optimizer"] < before.time.seconds["optimizer"]
    assert not after.problems


def test_on_a_cpu_nothing_moves():
    made = plan(recipe("performance.offload_optimizer=true"))
    assert set(parts(made, "optimizer state").values()) == {made.measured.adam}
    assert made.host == 0


def test_edits_name_what_would_help():
    made = planned()
    phases = {phase.name: phase for phase in made.phases}
    eight = "performance.optimizer=adamw_8bit (needs bitsandbytes)"
    small = {"optimizer state": 60, "copies of the trained weights": 60, "working memory": 10}
    crowded = {name: replace(phase, parts=small) for name, phase in phases.items()}
    both = ["performance.offload_optimizer=true", "performance.offload_reference=true"]
    assert [edit for edit in edits(made, crowded["sample"]) if edit in both] == both
    assert [edit for edit in edits(made, crowded["train"]) if edit in both] == both[:1]
    assert not [edit for edit in edits(made, crowded["optimizer"]) if edit == both[0]]
    assert eight in edits(made, crowded["optimizer"])
    done = planned("performance={offload_optimizer: true, offload_reference: true}")
    assert not [edit for edit in edits(done, crowded["sample"]) if edit in both]
