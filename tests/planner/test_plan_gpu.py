"""``mmrl plan --gpu``: operations against closed forms, loading, and what is said of a GPU that is not there."""

import io
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import conv2d, scaled_dot_product_attention

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner import estimate
from mmrl.planner.estimate import policy
from mmrl.planner.fake_tensors import LiveBytes, fake
from mmrl.planner.fit_check import does_not_fit
from mmrl.planner.gpus import GPUS, Gpu, gpu_of
from mmrl.planner.operations import Call, Work, times_expert
from mmrl.planner.plan import plan
from mmrl.planner.plan_data import PhaseMemory
from mmrl.planner.rates import UNCALIBRATED, Assumed, seconds
from mmrl.planner.render import render
from tests.support.planning import without_the_step
from tests.support.tiny import language_model
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

SMALL = [
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    "sampling.window=null",
    "rewards=[{name: 'jpeg:incompressibility'}]",
    "device=cpu",
]
H100 = GPUS["h100-80g"]


@cache
def planned(*overrides, gpu=H100, gpus=None, name="shapes-lora"):
    less = [*SMALL, f"model.path={two_blocks()}"] if name == "shapes-lora" else []
    return plan(load_recipe([name], [*less, *overrides]), gpu=gpu, gpus=gpus)


def rendered(made, width=80):
    console = Console(file=io.StringIO(), width=width)
    render(made, console)
    return console.file.getvalue()


# -- operations ------------------------------------------------------------------------------------------------------


def operations(work):
    with LiveBytes() as live:
        work()
    return live.work.flops


def test_operations_of_products_and_convolutions_worked_out_by_hand():
    x, weight = torch.zeros(4, 8, requires_grad=True), torch.zeros(16, 8, requires_grad=True)
    each = 2 * 4 * 8 * 16
    assert operations(lambda: torch.nn.functional.linear(x, weight)) == each
    assert operations(lambda: torch.nn.functional.linear(x, weight).sum().backward()) == 3 * each
    picture, kernel = torch.zeros(2, 3, 10, 10), torch.zeros(5, 3, 3, 3)
    assert operations(lambda: conv2d(picture, kernel)) == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert operations(lambda: x.exp() + 1) == 0
    assert times_expert(torch.zeros(6, 8), torch.zeros(3, 8, 5)) == 2 * 6 * 8 * 5


def test_operations_of_attention_worked_out_by_hand():
    q, k, v = (torch.zeros(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    product = 2 * 2 * 3 * 5 * 7 * 8  # the scores; the values that they weigh are as many
    assert operations(lambda: scaled_dot_product_attention(q, k, v)) == 2 * product
    assert operations(lambda: scaled_dot_product_attention(q, k, v).sum().backward()) == (2 + 5) * product


def test_operations_of_a_small_language_model_worked_out_by_hand():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width, inner, heads, kv, head, layers, words = 32, 64, 4, 2, 8, 2, 100
    config = Qwen3Config(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        num_hidden_layers=layers,
        vocab_size=words,
    )
    model, rows, tokens = Qwen3ForCausalLM(config).eval(), 3, 10
    weights = layers * (width * head * (2 * heads + 2 * kv) + 3 * width * inner) + width * words
    attention = layers * 4 * rows * heads * tokens * tokens * head
    rotary = 2 * rows * (head // 2) * tokens  # positions times frequencies
    said = operations(lambda: model(input_ids=torch.zeros(rows, tokens, dtype=torch.long)))
    assert said - 2 * rows * tokens * weights - attention in (0, rotary)


@pytest.mark.slow
def test_a_plan_counts_every_denoising_step_though_it_runs_one():
    m = planned().measured
    o = m.operations
    assert o.sample.flops == 3 * o.forward.flops > 0
    assert o.train.flops > 2 * o.forward.flops


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_recipe_is_planned_for_the_gpu_whatever_its_device():
    made = planned()
    assert (made.device, made.recipe.device, made.device_memory) == ("cuda", "cuda", H100.memory)
    assert made.where == "h100-80g"
    assert made.problems == []


def test_a_gpu_with_too_little_memory_is_refused_and_one_with_enough_is_not():
    made = planned()
    (problem,) = does_not_fit(replace(made, device_memory=made.peak.total - 1))
    assert f"the phase {made.peak.name} needs " in problem
    assert "h100-80g has " in problem
    assert does_not_fit(replace(made, device_memory=made.peak.total)) == []


def test_loading_for_shards_puts_on_every_rank_what_it_keeps():
    whole, shards = (
        planned("model.lora=null", "model.offload=true", *more)
        for more in ([], ["controllers=2", "train.backend=fsdp"])
    )
    assert shards.load.parts["policy"] == pytest.approx(whole.load.parts["policy"] / 2, rel=0.01)
    optimizer = next(phase for phase in shards.phases if phase.name == "optimizer")
    assert optimizer.parts["policy"] == pytest.approx(whole.load.parts["policy"] / 2, rel=0.01)
    assert "text encoders" not in whole.load.parts, "they stay in the host's memory"


def test_where_loading_needs_most_it_is_what_is_refused():
    made = planned()
    most = replace(made, load=PhaseMemory("load", {"policy": made.peak.total + 2}))
    assert most.peak.name == "load"
    (problem,) = does_not_fit(replace(most, device_memory=made.peak.total + 1))
    assert "the phase load needs " in problem


def test_a_cpu_has_no_load_phase():
    loaded = load_recipe(["shapes-lora"], [*SMALL, f"model.path={two_blocks()}"])
    made = plan(loaded)
    assert made.load is None


@pytest.mark.slow
def test_gpus_that_are_too_few_or_idle_are_said():
    many = ("train.prompts_per_step=8", "eval.samples=8")
    assert "the recipe uses 2 of 8 GPUs; set controllers=8" in planned("controllers=2", *many, gpus=8).notes
    made = planned("controllers=2", gpus=8)
    assert "the recipe uses 2 of 8 GPUs; set devices_per_controller=4" in made.notes
    assert made.problems == does_not_fit(replace(made, gpus=2)) == []
    assert does_not_fit(replace(made, gpus=1)) == ["--gpus 1: 2 take a GPU each; lower controllers, or write --gpus 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["devices_per_controller=2"], "controllers=2 devices_per_controller=1"),
        (["controllers=2", "devices_per_controller=4"], "controllers=8 devices_per_controller=1"),
        (["controllers=2"], None),
        (["devices_per_controller=2", "placement=disaggregated"], None),
    ],
)
def test_gpus_whose_tensors_pass_through_one_process_are_said(settings, advice):
    said = [note for note in planned(*settings, gpus=8).notes if "passes through one process" in note]
    assert len(said) == (advice is not None)
    if advice:
        assert "raise train.prompts_per_step" in said[0] or advice.startswith("controllers=2 ")
        many = advice.split()[0].partition("=")[2]
        followed = planned(*settings, *advice.split(), f"train.prompts_per_step={many}", "eval.samples=8", gpus=8)
        assert not followed.problems
        assert not [note for note in followed.notes if "passes through one process" in note]
    assert all(f"set {advice}, where each GPU" in note for note in said)


def test_a_cpu_has_no_gpus_whose_tensors_pass_through_one_process():
    made = plan(load_recipe(["shapes-lora"], [*SMALL, f"model.path={two_blocks()}", "devices_per_controller=2"]))
    assert not [note for note in made.notes if "passes through one process" in note]


# -- time ------------------------------------------------------------------------------------------------------------


def test_the_time_of_a_step_is_the_time_of_its_operators():
    made = planned()
    c, o, found = made.counts, made.measured.operations, made.time.seconds
    rates = Assumed(H100)
    assert found["sample"] == pytest.approx(c.micro_batches * seconds(o.sample, rates))
    assert found["decode"] == pytest.approx(c.micro_batches * seconds(o.decode, rates))
    assert found["train"] == pytest.approx(c.slices * seconds(o.train, rates))
    assert found["optimizer"] == pytest.approx(c.optimizer_steps * seconds(o.optimizer, rates))
    assert "judge" not in found
    assert made.time.step == pytest.approx(sum(found.values()))


def test_the_seconds_of_operators_worked_out_by_hand():
    gpu, n = Gpu("even", 64, 2.0, 1.0, 10.0, "the test"), 4096
    rates = Assumed(gpu)
    flops, moved = 2 * n**3, 4 * 3 * n * n
    product = Call("product", "float32", (1, n, n, n), flops, moved, "forward")
    assert seconds(Work({product: 3}), rates) == pytest.approx(3 * flops / (0.78 * 1e12))
    assert seconds(Work({product._replace(dtype="bfloat16"): 1}), rates) == pytest.approx(flops / (0.78 * 2e12))
    added = Call("add", "float32", (), 0, moved, "forward")
    assert seconds(Work({added: 2}), rates) == pytest.approx(2 * moved / (0.85 * 10e9))
    tiny = added._replace(nbytes=12)
    assert seconds(Work({tiny: 5, tiny._replace(kind="view"): 2}), rates) == pytest.approx(5 * 24e-6 + 2 * 1.5e-6), (
        "the host is the bound of tiny tensors"
    )
    assert seconds(Work({product: 1, tiny: 5}), rates) == pytest.approx(flops / (0.78e12) + 5 * 2.5e-6), (
        "else the device, meanwhile the host starts what comes next"
    )


def test_float32_convolutions_use_tensorfloat_32_and_products_only_if_told():
    conv = Call("convolution", "float32", (64, 4096), 10**12, 10, "forward")
    assert Assumed(H100).device(conv) == pytest.approx(Assumed(H100, tf32=True).device(conv))
    assert Assumed(H100, tf32=False).device(conv) > 5 * Assumed(H100).device(conv)
    product = conv._replace(kind="product", sizes=(1, 64, 64, 64))
    assert Assumed(H100).device(product) > 5 * Assumed(H100, tf32=True).device(product)
    v100 = gpu_of("v100-32g")
    assert Assumed(v100).device(conv) == Assumed(v100, tf32=True).device(conv) == Assumed(v100, tf32=False).device(conv)


@pytest.mark.slow
def test_compiled_blocks_start_fewer_operators_and_are_never_planned_slower():
    eager, compiled = (planned("model.dtype=bfloat16", *more) for more in ([], ["performance.compile=true"]))
    assert all(compiled.time.seconds[name] <= seconds for name, seconds in eager.time.seconds.items())
    assert compiled.time.seconds["train"] < eager.time.seconds["train"]


def test_devices_of_a_controller_share_the_work():
    one, two = planned(), planned("devices_per_controller=2")
    for name in ("sample", "train"):
        assert two.time.seconds[name] == pytest.approx(one.time.seconds[name] / 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return language_model(tmp_path_factory.mktemp("text"), "qwen3", max_position_embeddings=512)


def test_a_batch_is_sampled_until_its_longest_response_ends(text):
    overrides = [f"model.path={text}", "sampling.max_new_tokens=8", "model.lora=null", "train.prompts_per_step=2"]
    made = planned(*overrides, "train.group_size=4", "sampling.batch_size=4", name="sums")
    assert made.problems == []
    o, rates = made.measured.operations, Assumed(H100)
    of_batch = seconds(o.sample, rates) + 6 * seconds(o.token, rates) + 8 * rates.token
    assert made.time.seconds["sample"] == pytest.approx(2 * of_batch)
    assert 0 < o.token.flops < o.sample.flops


def test_what_a_token_leaves_in_the_cache_worked_out_by_hand():
    from transformers import Gemma3TextConfig, LlamaConfig, Mamba2Config, Qwen2Config, Qwen3NextConfig

    from mmrl.families.text.meta_model import cached

    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
    assert cached(Qwen2Config(**small, num_key_value_heads=2))(7) == 7 * 2 * 3 * 2 * 8
    assert cached(LlamaConfig(**small, num_key_value_heads=1, head_dim=16))(7) == 7 * 2 * 3 * 1 * 16
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    windows = Gemma3TextConfig(**small, num_key_value_heads=1, head_dim=16, sliding_window=5, layer_types=kinds)
    assert cached(windows)(7) == (5 + 5 + 7) * 2 * 1 * 16
    mixed = Qwen3NextConfig(
        **small, num_key_value_heads=2, head_dim=8, layer_types=["linear_attention"] * 2 + kinds[2:]
    )
    assert cached(mixed)(7) == 7 * 2 * 1 * 2 * 8
    assert cached(Mamba2Config(hidden_size=32, num_hidden_layers=3, num_heads=4, head_dim=16))(7) == 0


def test_devices_that_share_rows_divide_the_operations_of_the_whole(text):
    overrides = [f"model.path={text}", "sampling.max_new_tokens=8", "model.lora=null", "train.prompts_per_step=2"]
    overrides += ["train.group_size=4", "sampling.batch_size=8"]
    one = planned(*overrides, name="sums")
    cut = planned(*overrides, "devices_per_controller=2", "train.context_parallel=2", name="sums")
    for name in ("encode", "sample", "decode", "train", "forward"):
        assert getattr(cut.measured.operations, name).flops == getattr(one.measured.operations, name).flops, name
    half = one.time.seconds["train"] / 2
    assert cut.time.seconds["train"] == pytest.approx(half, rel=0.03)  # the parts have other small operators


def test_a_disaggregated_step_is_as_long_as_its_longer_half():
    both = estimate.Estimate({"sample": 5.0, "judge": 1.0, "train": 4.0, "optimizer": 1.0})
    assert both.step == 11
    assert estimate.Estimate(both.seconds, beside=True).step == 6


def test_the_output_says_that_it_is_an_estimate_and_fits_a_terminal():
    said = rendered(planned("model.offload=true"))
    assert "time of a step on h100-80g: an estimate, not measured" in said
    assert "78% of the operations of products" in said
    assert re.search(r"a step +[0-9.]+ m?s to [0-9.]+ m?s", said)
    assert "loading: " in said
    mine = said[said.index("time of a step") :].split("note:")[0] + said[said.index("loading:") :].split("in host")[0]
    assert max(map(len, mine.splitlines()[:-1])) <= 80


def of_the_h100(dtype):
    """The operators of the slice of SD3.5-M that ``benchmarks/gpu_smoke.py`` timed, four pictures of 512 x 512."""
    from diffusers import SD3Transformer2DModel
    from peft import LoraConfig

    with torch.device("meta"):
        model = SD3Transformer2DModel(
            sample_size=128,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            attention_head_dim=64,
            pos_embed_max_size=384,
            qk_norm="rms_norm",
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            joint_attention_dim=4096,
            pooled_projection_dim=2048,
            dual_attention_layers=tuple(range(13)),
        ).requires_grad_(False)
        model.add_adapter(LoraConfig(r=32, lora_alpha=64, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    model.to(dtype)
    fake([model])
    inputs = [torch.zeros(4, 16, 64, 64), torch.zeros(4, 333, 4096), torch.zeros(4, 2048)]
    with LiveBytes() as live:
        made = model(*(x.to(dtype) for x in inputs), torch.full((4,), 500.0), return_dict=False)[0]
        made.float().square().mean().backward()
    return live.work


@pytest.mark.slow
def test_the_slice_that_an_h100_timed_took_what_is_planned(recwarn):
    """Seconds of benchmarks/results/gpu/smoke_2026-11-26_1103_cuda.txt."""
    single, half = of_the_h100(torch.float32), of_the_h100(torch.bfloat16)
    blocks = policy(half, planned("model.dtype=bfloat16", "performance.compile=true").recipe)
    for work, tf32, took in (
        (single, None, 0.6175),
        (single, True, 0.3225),
        (half, None, 0.2106),
        (half, None, 0.1573),  # with flash attention
        (blocks, None, 0.0966),
    ):
        rates = Assumed(H100, tf32)
        said = seconds(work, rates)
        assert said / UNCALIBRATED < took < said * UNCALIBRATED


# -- names -----------------------------------------------------------------------------------------------------------


def test_an_unknown_gpu_is_refused_and_the_known_ones_named():
    assert gpu_of("H100-80G") is H100
    with pytest.raises(
        UserError, match=r"--gpu h100-80: this GPU is not in the table; write --gpu h100-80g"
    ) as refused:
        gpu_of("h100-80")
    assert all(name in str(refused.value) for name in GPUS)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_the_figures_of_a_gpu_are_plausible(gpu):
    promised = int(gpu.name.rpartition("-")[2].removesuffix("g"))
    assert 0.9 * promised < gpu.gib <= promised, "torch reports a little less than the name"
    assert gpu.half > 1.9 * gpu.single
    assert 70 < gpu.half * 1e3 / gpu.bandwidth < 500, "operations for each byte"
    assert gpu.source.startswith(("NVIDIA", "AMD"))


def test_the_documentation_has_the_table_of_the_code():
    text = (Path(__file__).resolve().parents[2] / "docs" / "gpus.md").read_text()
    for gpu in GPUS.values():
        half = f"{gpu.half:g}" + " (no bfloat16)" * (not gpu.bfloat16)
        row = [gpu.name, f"{gpu.gib:.1f}", half, f"{gpu.single:g}", f"{gpu.bandwidth}", gpu.source]
        assert f"| {' | '.join(row)} |" in text


def test_a_gpu_without_bfloat16_computes_it_as_slowly_as_float32():
    v100 = gpu_of("v100-32g")
    assert v100.rate("float16") == 125e12
    assert v100.rate("bfloat16") == v100.rate("float32") == 15.7e12
    with without_the_step():
        notes = plan(load_recipe(["shapes-lora"], [*SMALL, "model.dtype=bfloat16"]), gpu=v100).notes
    assert any("no instructions for bfloat16" in note for note in notes)


def test_the_command_plans_for_the_gpu_and_refuses_what_it_cannot():
    from typer.testing import CliRunner

    from mmrl.cli import app

    def asked(*words):
        return CliRunner().invoke(app, ["plan", "shapes-lora", *SMALL, f"model.path={two_blocks()}", *words])

    made = asked("--gpu", "v100-32g", "model.dtype=auto")
    assert made.exit_code == 0
    assert "model.dtype: auto is float32, because v100-32g has no instructions for bfloat16" in made.output
    assert isinstance(asked("--gpus", "2").exception, UserError)
    assert "--gpu h1" in str(asked("--gpu", "h1").exception)


@pytest.mark.slow
def test_a_forward_before_the_updates_is_counted_where_compiled_code_rounds_otherwise():
    made = planned("model.dtype=bfloat16", "performance.compile=true", "train.updates_per_step=2")
    forward = seconds(policy(made.measured.operations.forward, made.recipe), Assumed(H100))
    assert made.time.seconds["prepare"] == pytest.approx(made.counts.slices * forward)
    assert "prepare" not in planned("model.dtype=bfloat16", "train.updates_per_step=2").time.seconds
