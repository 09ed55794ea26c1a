"""No product of the policy is float32 in a whole step with half precision, whatever the objective and the engine; what
an objective reads of the policy, and the steps of denoising, are float32. On a CUDA device that is pretended."""

import json
from functools import cache

import pytest

from tests.support import pretended_families as families
from tests.support import pretended_text as text
from tests.support.products import attention_in_half, counter

pytestmark = pytest.mark.pretend_cuda

PICTURES = {
    "flow_grpo": families.KINDS["policy_gradient"],
    "diffusion_nft": families.KINDS["forward_process"],
    "draft": families.KINDS["pathwise"],
    "refl": {**families.KINDS["pathwise"], "algorithm": {"type": "refl"}},
    "picture_dpo": families.KINDS["offline"],
    "awm": {"algorithm": {"type": "awm", "noise_levels": 2}, "rewards": families.PICTURES},
}
TEXTS = {name: [f"algorithm={{type: {name}}}", *text.PAIRS] for name in ("dpo", "kto", "orpo")}
TEXTS |= {
    "sft": ["algorithm={type: sft, completion: chosen}", *text.PAIRS],
    "ppo": ["algorithm={type: ppo, kl_coef: 0.1}"],
    "dapo": ["algorithm={type: dapo, max_attempts: 2}", "train.micro_batch_tokens=200"],
    "reward_model": text.CASES["reward_model"],
}
HEADS = ("ppo", "reward_model")
"""Objectives with a head of the model, which is float32."""
LORA = "model.lora={rank: 2, alpha: 4}"
folder, world = text.folder, text.world


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    from tests.support.tiny_diffusion import two_blocks

    return cache(lambda: two_blocks())


def _built(words, controller=None):
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe

    loaded = load_recipe(words[:1], words[1:])
    return build(loaded.recipe, controller)


def _step(run):
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step

    _, failures = train_step(run, 0, Clock(run.compute.device))
    assert not failures
    assert run.policy.updates


def step(words, controller=None):
    """Counts the products of the policy in a step of the recipe that ``words`` name, and the dtypes of the numbers that
    its objective reads."""
    run, counted, dtypes = _built(words, controller), counter(), set()
    for name in ("replay", "renoise", "generate", "compare"):
        _note(run.pipeline, name, dtypes)
    if hasattr(run.pipeline, "adapter"):
        _leave_out(run.pipeline.adapter, counted)
    with attention_in_half(), counted:
        _step(run)
    return counted.products, dtypes


def _note(holder, name, dtypes):
    """Put the dtypes of what a method returns into ``dtypes``."""
    call = getattr(holder, name, None)
    if call is None:
        return

    def noted(*given, **named):
        out = call(*given, **named)
        dtypes.update(t.dtype for t in out.values() if t.is_floating_point())
        return out

    setattr(holder, name, noted)


def _leave_out(adapter, counted):
    """The VAE is no part of the policy: neither its forward is counted nor its backward pass, which begins with the
    gradient of its pictures and ends with that of its latents."""
    for name, call in [(name, getattr(adapter, name)) for name in ("decode", "encode_image")]:

        def apart(given, call=call):
            counted.paused = True
            if given.requires_grad:
                given.register_hook(lambda _: setattr(counted, "paused", False))
            out = call(given)
            if out.requires_grad:
                out.register_hook(lambda _: setattr(counted, "paused", True))
            counted.paused = False
            return out

        setattr(adapter, name, apart)


@pytest.fixture
def of_steps(monkeypatch):
    """The dtypes that the steps of denoising compute with."""
    import torch

    from mmrl.algorithms import sde

    seen = set()
    for name, call in [(name, getattr(sde, name)) for name in ("step_mean", "log_prob", "squared_distance")]:

        def noted(*given, call=call):
            out = call(*given)
            seen.update(t.dtype for t in (*given, out) if isinstance(t, torch.Tensor) and t.is_floating_point())
            return out

        monkeypatch.setattr(sde, name, noted)
    return seen


def long_but(names, lora, kept):
    marks = [] if (names, lora) in kept else [pytest.mark.long]
    return pytest.param(names, lora, marks=marks)


SHORT = {("draft", True), ("diffusion_nft", False), ("dpo", True), ("sft", False), ("kto", True), ("ppo", False)}


@pytest.mark.parametrize(("name", "lora"), [long_but(name, lora, SHORT) for name in TEXTS for lora in (True, False)])
def test_no_product_of_an_objective_of_text_is_float32(folder, name, lora):
    import torch

    products, dtypes = step([folder / "recipe.yaml", *TEXTS[name], *([LORA] if lora else [])])
    assert products["bfloat16"] > 0
    assert (products["float32"] > 0) == (name in HEADS)
    assert dtypes == {torch.float32}


@pytest.mark.parametrize(("name", "lora"), [long_but(name, lora, SHORT) for name in PICTURES for lora in (True, False)])
def test_no_product_of_an_objective_of_pictures_is_float32(family_of, tmp_path, of_steps, name, lora):
    import torch

    kind = next((k for k, of in families.KINDS.items() if of["algorithm"]["type"] == name), "")
    kind = "pathwise" if name == "refl" else kind or "forward_process"
    given = families.settings("sd3", family_of(), kind, lora) | PICTURES[name]
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    products, dtypes = step([tmp_path / "recipe.yaml"])
    assert products["bfloat16"] > 0
    assert products["float32"] == 0
    assert dtypes <= {torch.float32}
    assert of_steps <= {torch.float32}
    assert dtypes | of_steps


GATHERED = ["performance.gather_dtype=bfloat16"]
EIGHT = ["controllers=8", "train.backend=fsdp", "device=cuda", "train.prompts_per_step=8", "eval.samples=8"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param("text", GATHERED, id="text"),
        pytest.param("text", [LORA], id="text lora", marks=pytest.mark.long),
        pytest.param("pictures", [], id="pictures"),
        pytest.param("pictures", GATHERED, id="pictures gathered", marks=pytest.mark.long),
        pytest.param("pictures", [LORA], id="pictures lora", marks=pytest.mark.long),
    ],
)
def test_no_product_of_weights_in_shards_is_float32(folder, family_of, world, case, words):
    """Of the first of eight ranks, whose others have copies of what it has."""
    from mmrl.controller import Controller

    sizes = ["model.dtype=bfloat16", "sampling.steps=3", "train.group_size=2", "train.micro_batch_size=2"]
    recipe = [folder / "recipe.yaml", "algorithm={type: grpo, kl_coef: 0.1}"]
    if case == "pictures":
        recipe = ["shapes-lora" if words == [LORA] else "shapes-full", *sizes, f"model.path={family_of()}"]
    products, _ = step([*recipe, *EIGHT, *words], Controller(0, 0, 8, text.Pretended(world)))
    assert products["bfloat16"] > 0
    assert products["float32"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.long)])
def test_no_product_of_compiled_blocks_is_float32(family_of, tmp_path, monkeypatch, lora):
    """Of the graphs that torch.compile hands on, forward and backward: what writes kernels needs a GPU."""
    pytest.importorskip("triton")
    import torch
    from torch import nn
    from torch._dynamo.backends.common import aot_autograd

    from tests.support.products import is_product

    products, graphs = [], []

    def read(graph, _):
        graphs.append(graph)
        for node in graph.graph.nodes:
            if node.op == "call_function" and is_product(getattr(node.target, "_opname", "")):
                products.append(node.args[0].meta["val"].dtype)
        return graph.forward

    backend, compiled = aot_autograd(fw_compiler=read, bw_compiler=read), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: compiled(self, backend=backend, **given))
    given = families.settings("sd3", family_of(), "policy_gradient", lora) | {"performance": {"compile": True}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    run = _built([tmp_path / "recipe.yaml"])
    with attention_in_half():
        _step(run)
    assert len(graphs) >= 3  # sampling, and forward and backward of the update
    assert {*products} == {torch.bfloat16}
