"""A frozen base in 8 or 4 bits under LoRA: the libraries' own numbers, and one arithmetic in sampling and training."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmrl.app.export import export
from mmrl.config.adapters import WEIGHTS
from mmrl.config.checks import impossibilities
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.models import quantized
from mmrl.models.policy import Policy
from mmrl.models.quantized import QuantizedLinear, quantize
from mmrl.models.text.base_model import base_model
from mmrl.runtime.start import train
from tests.support import tiny
from tests.support.rows import distance
from tests.support.text import chat, recipe, sampled
from tests.support.tiny_diffusion import SHAPES

PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
ERRORS = {"int8": (0.002, 0.01), "fp8": (0.01, 0.03), "nf4": (0.05, 0.12)}
"""Relative errors of weights that are normal numbers: at least, and at most."""


@pytest.fixture(params=PACKAGES)
def kind(request):
    pytest.importorskip(PACKAGES[request.param])
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.language_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


def _layer(dtype=torch.float32, inputs=40, outputs=24):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
    nn.init.normal_(layer.weight)
    return layer


def _build(folder, kind, dtype="float32", **changes):
    model = {"lora": {"rank": 4, "alpha": 8}, "quantize": kind, "dtype": dtype}
    return chat.build(recipe(folder, model=model, **changes), str(folder), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [40, 63])
def test_weights_are_rounded_and_the_product_is_with_them(kind, dtype, inputs):
    layer = _layer(dtype, inputs, 63)
    made = QuantizedLinear(layer, kind)
    error = (made.weight - layer.weight).float().norm() / layer.weight.float().norm()
    assert ERRORS[kind][0] < error < ERRORS[kind][1]
    x = torch.randn(2, 3, inputs, dtype=dtype, requires_grad=True)
    y = made(x)
    y.backward(factor := torch.randn_like(y))
    plain = x.detach().clone().requires_grad_()
    expected = nn.functional.linear(plain, made.weight, layer.bias)
    expected.backward(factor)
    assert torch.equal(y, expected)
    torch.testing.assert_close(x.grad, plain.grad)
    with torch.no_grad():
        assert torch.equal(made(x), y), "without a gradient it is another number"


def test_eight_bits_are_what_torchaos_own_layers_compute():
    pytest.importorskip("torchao")
    import torchao.quantization as torchao

    x = torch.randn(5, 40)
    for kind, config in (("int8", torchao.Int8WeightOnlyConfig()), ("fp8", torchao.Float8WeightOnlyConfig())):
        theirs = nn.Sequential(_layer())
        torchao.quantize_(theirs, config)
        torch.testing.assert_close(QuantizedLinear(_layer(), kind)(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_four_bits_are_what_bitsandbytes_own_layers_compute():
    bnb = pytest.importorskip("bitsandbytes")
    layer, x = _layer(), torch.randn(5, 40)
    theirs = bnb.nn.Linear4bit(40, 24, quant_type="nf4", compute_dtype=torch.float32)
    given = {"quant_type": "nf4", "compress_statistics": False, "module": theirs}
    theirs.weight = bnb.nn.Params4bit(layer.weight.data.clone(), **given)
    theirs.bias, theirs.support_avx512bf16_for_cpu = layer.bias, False
    torch.testing.assert_close(QuantizedLinear(layer, "nf4")(x), theirs.to("cpu")(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(32, 32), (8, 96), (37, 32), (5, 7)])
def test_four_bits_have_the_scale_of_their_64_weights_whatever_the_width(shape):
    """bitsandbytes' kernel for a CPU takes wrong scales for some widths that are no multiple of 64."""
    pytest.importorskip("bitsandbytes")
    layer = _layer(outputs=shape[0], inputs=shape[1])
    layer.weight.data.mul_(10.0 ** torch.arange(shape[0]).view(-1, 1).remainder(5))
    flat = layer.weight.detach().flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    gap = (QuantizedLinear(layer, "nf4").weight - layer.weight).abs().flatten()
    most = 0.16 * blocks.abs().amax(1).repeat_interleave(64)[: len(flat)]  # half of nf4's widest gap: 0.152
    assert (gap <= most).all()


def test_the_graph_keeps_no_weights(kind):
    """Tensors of torchao keep each dequantised weight until the backward pass: as much memory as a plain base."""
    made, kept = QuantizedLinear(_layer(), kind), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        made(torch.randn(2, 40, requires_grad=True))
    assert sum(kept) == 0


def test_only_linear_layers_of_the_blocks_are_quantised(folder, kind):
    model = base_model(_build(folder, kind).policy)
    found = {name for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    ends = {name.replace(".base_layer", "").rpartition(".")[2] for name in found}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(".layers." in name for name in found)
    assert type(model.lm_head) is nn.Linear
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_and_training_have_the_same_log_probs_and_every_adapter_learns(folder, kind, dtype):
    made = _build(folder, kind, dtype)
    policy = Policy(made.policy, made.recipe.optim, total_updates=2)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    drawn = sampled(made)
    new = made.replay(drawn, [0], frozenset({"log_probs"}), None)["log_probs"]
    assert distance(new, drawn) < (1e-5 if dtype == "float32" else 0.1)
    with torch.no_grad():
        again = made.replay(drawn, [0], frozenset({"log_probs"}), None)["log_probs"]
    assert torch.equal(new, again), "the first ratio of an update is not 1"
    plain = _build(folder, None, dtype)
    sampled(plain)  # which encodes the prompts
    gap = distance(plain.replay(drawn, [0], frozenset({"log_probs"}), None)["log_probs"], drawn)
    assert gap > 1e-3, "the base is not quantised"
    before = {name: p.detach().clone() for name, p in policy.trainable.items()}
    policy.backward((new * torch.randn_like(new)).sum())
    policy.apply()
    assert not [name for name, p in policy.trainable.items() if torch.equal(p, before[name])]


def test_the_base_is_quantised_to_the_same_bits_each_time(folder, kind):
    first, second = (_build(folder, kind).policy for _ in range(2))
    for (name, a), (_, b) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_without_blocks_there_is_nothing_to_quantise(kind):
    with pytest.raises(UserError, match=r"model\.quantize: Sequential has no linear layers"):
        quantize(nn.Sequential(nn.Linear(2, 2)), kind)
    with pytest.raises(UserError, match="no linear layers"):
        quantize(nn.Sequential(QuantizedLinear(_layer(), kind)), kind)


def test_without_the_package_it_is_refused_with_the_command(monkeypatch, folder, kind):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    (said,) = quantized.refusals(kind, "cpu")
    assert f"{kind} is of {PACKAGES[kind]}, which is not here; pip install" in said
    with pytest.raises(UserError, match="which is not here"):
        _build(folder, kind)
    assert not list(quantized.refusals(None, "cpu"))
    _build(folder, None)


def test_a_device_without_kernels_is_refused(folder):
    def started(kind, device):
        """As a run begins on a device that this machine may not have."""
        if refused := list(quantized.refusals(kind, device)):
            raise UserError("\n".join(refused))

    with pytest.raises(UserError, match=r"fp8 has no kernels for mps; remove model\.quantize"):
        started("fp8", "mps")
    started(None, "mps")
    assert "no kernels" not in "".join(quantized.refusals("fp8", "cuda"))


CANNOT = {
    "all weights train": {"model": {"lora": None}},
    "are not divided over devices": {"train": {"backend": "fsdp"}},
    "would sample from a base that is not in int8": {"rollout": {"engine": "vllm"}},
    "the critic of ppo": {"algorithm": {"type": "ppo"}},
}


@pytest.mark.parametrize("why", CANNOT)
def test_what_cannot_train_on_it_is_refused(folder, why):
    asked = copy.deepcopy(CANNOT[why])
    asked["model"] = {"lora": {"rank": 4}, "quantize": "int8"} | asked.get("model", {})
    assert any(line.startswith("model.quantize: ") and why in line for line in impossibilities(recipe(folder, **asked)))


RUN = """
name: tiny
pipeline: diffusion/sd3
model: {path: SHAPES, lora: {rank: 4, alpha: 12}, quantize: KIND}
data: {name: shapes}
sampling: {steps: 3, height: 32, width: 32, max_sequence_length: 12, guidance_scale: 2.0}
rewards: [{name: shapes}]
algorithm: {type: flow_grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
eval: {every: null}
checkpoint: {every: 1}
"""


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_writes_its_adapter_alone(kind, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RUN.replace("SHAPES", str(SHAPES)).replace("KIND", kind))
    train(load_recipe([file]), tmp_path / "whole")
    train(load_recipe([file], ["train.steps=1"]), tmp_path / "cut")
    train(load_recipe([file]), tmp_path / "cut", resume=True)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy/first_ratio_max_dev"] for row in rows if "policy/first_ratio_max_dev" in row] == [0, 0]
    adapters = [
        load_file(export(tmp_path / run, tmp_path / f"{run}-lora", "lora") / WEIGHTS) for run in ("whole", "cut")
    ]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert not any("packed" in name or "base_layer" in name for name in adapters[0])
    config = json.loads((tmp_path / "whole-lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"]
    with pytest.raises(UserError, match=f"--what merged: the base of this run is in {kind}.*use --what lora"):
        export(tmp_path / "whole", tmp_path / "merged")
    with pytest.raises(UserError, match=r"model\.quantize"):
        train(load_recipe([file], ["train.steps=3", "model.quantize=null"]), tmp_path / "cut", resume=True)
