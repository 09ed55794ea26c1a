"""``performance.compile``: the same compiled blocks sample and train, and first ratios are 1, in half precision too."""

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.training.loop import train_step
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

SMALL = [
    "train.prompts_per_step=2",
    "train.group_size=2",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    'rewards=[{name: "colour:target", options: {rgb: [200, 60, 60]}}]',
]
REFERENCE = "algorithm={type: flow_grpo, clip_range: 1e-3, kl_coef: 0.1}"
HALF = ["performance.compile=true", "model.dtype=bfloat16", "sampling.guidance_scale=3.0", "train.updates_per_step=2"]


def built(*overrides):
    loaded = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *SMALL, *overrides])
    return build(loaded.recipe)


def stepped(run, steps=2):
    """The rows of some steps."""
    return [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(steps)]


@pytest.fixture
def traced(monkeypatch):
    """Compile without kernels: graphs are traced as for any backend, and run as they were traced. Those without a
    gradient round the last bits of bfloat16 otherwise, as fused kernels do. The two lists say of each graph, and of
    each of its runs, whether it was with a gradient."""
    plain, graphs, runs = torch.nn.Module.compile, [], []

    def backend(graph, inputs):
        graphs.append(torch.is_grad_enabled())

        def compiled(*given):
            runs.append(torch.is_grad_enabled())
            out = graph.forward(*given)
            return out if runs[-1] else [t * (1 + 2**-7) if t.dtype == torch.bfloat16 else t for t in out]

        return compiled

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: plain(self, backend=backend, **how))
    torch._dynamo.reset()
    yield graphs, runs
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["train.steps_per_forward=2", REFERENCE], id="adapters, two steps in a forward"),
        pytest.param(["model.lora=null", "train.updates_per_step=1"], id="all weights"),
        pytest.param(["model.lora=null"], id="all weights, twice", marks=pytest.mark.slow),
        pytest.param(["model.quantize=int8"], id="a base in int8"),
        pytest.param(["model.gradient_checkpointing=true"], id="computed again", marks=pytest.mark.slow),
    ],
)
def test_in_half_precision_old_log_probs_are_those_of_the_replay(traced, how):
    if "model.quantize=int8" in how:
        pytest.importorskip("torchao")
    (row,) = stepped(built(*HALF, *how), steps=1)
    assert set(traced[0]) == {True, False}
    assert row["policy/first_ratio_max_dev"] == 0
    assert row["mismatch/log_prob_gap_max"] > 1e-4, "sampling did not round otherwise, so that this shows nothing"


@pytest.mark.slow
def test_the_same_compiled_blocks_sample_and_train(traced):
    graphs, runs = traced
    found = stepped(built("performance.compile=true"))
    assert (graphs.count(True), graphs.count(False)) == (2, 2), "each kind of block once"
    assert (runs.count(True), runs.count(False)) == (2 * 2 * 2, 2 * 3 * 2)  # 3 steps sampled, of which 2 are replayed
    assert [row["policy/first_ratio_max_dev"] for row in found] == [0, 0]
    assert [row["optim/grad_norm"] for row in found] == pytest.approx(
        [row["optim/grad_norm"] for row in stepped(built())], rel=1e-5
    )


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_double(run):
    """Have ``run`` predict in float64, which is what both others are compared with."""
    run.pipeline.policy.double()
    run.policy.copies = {n: {k: t.double() for k, t in copy.items()} for n, copy in run.policy.copies.items()}
    predicted = run.pipeline.predicted

    def exact(x, timestep, features):
        return predicted(x.double(), timestep, {k: v.double() for k, v in features.items()})

    run.pipeline.predicted = exact
    return run


@pytest.mark.long  # inductor takes minutes; in short: above, without kernels
@pytest.mark.slow
def test_compiled_kernels_are_as_near_to_float64(kernels):
    """The reward has no steps: of JPEG's size a byte more, where one value is rounded otherwise, moves the next
    gradient's norm by 0.2 %, eager as compiled."""
    exact, plain = stepped(in_double(built(REFERENCE))), stepped(built(REFERENCE))
    found = stepped(built("performance.compile=true", REFERENCE))
    for rows in (plain, found):
        for row, expected in zip(rows, exact, strict=True):
            assert row["policy/first_ratio_max_dev"] < 1e-5
            assert row["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-4)
            assert row["reward/mean"] == pytest.approx(expected["reward/mean"], rel=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_compiled_kernels_in_half_precision(kernels):
    rows = stepped(built(*HALF, REFERENCE))
    assert [row["policy/first_ratio_max_dev"] for row in rows] == [0, 0]
    assert all(1e-5 < row["mismatch/log_prob_gap_max"] < 1e-2 for row in rows)


def test_names_of_weights_stay(tmp_path):
    plain, compiled = built(), built("performance.compile=true")
    blocks = compiled.pipeline.adapter.model.transformer_blocks
    assert all(block._compiled_call_impl is not None for block in blocks)
    for state in (lambda run: run.policy.state()[0]["weights"], lambda run: run.pipeline.policy.state_dict()):
        assert list(state(compiled)) == list(state(plain))
    for what in ("lora", "merged"):
        compiled.pipeline.write(tmp_path / what, what)
        saved = [name for file in (tmp_path / what).rglob("*.safetensors") for name in load_file(file)]
        assert saved
        assert not [name for name in saved if "_orig_mod" in name]


@pytest.mark.parametrize(
    ("kind", "config", "blocks"),
    [
        ("SD3Transformer2DModel", {"num_layers": 3}, ["JointTransformerBlock"] * 3),
        ("SanaTransformer2DModel", {"num_layers": 2}, ["SanaTransformerBlock"] * 2),
        (
            "FluxTransformer2DModel",
            {"num_layers": 1, "num_single_layers": 2},
            ["FluxTransformerBlock", *["FluxSingleTransformerBlock"] * 2],
        ),
        ("SD3Transformer2DModel", {"num_layers": 1}, ["SD3Transformer2DModel"]),
    ],
)
def test_repeated_blocks_are_found(kind, config, blocks):
    compiling = mmrl.load("pipelines", "diffusion/loading")
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    assert [type(block).__name__ for block in compiling.repeated(model)] == blocks


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"performance.compile: .* needs a C\+\+ compiler.*compile to false"):
        built("performance.compile=true")


@pytest.mark.parametrize(
    ("recipe", "overrides", "edit"),
    [
        ("sums", ["rollout.engine=vllm_server"], "remove it"),
        ("shapes-lora", ["controllers=2", "train.backend=fsdp"], "train.backend to replicated"),
        ("shapes-full", ["model.dtype=bfloat16", "algorithm={type: grpo_guard}"], "algorithm.type to flow_grpo"),
        ("shapes-lora", ["model.dtype=float16", "algorithm={type: flow_dppo}"], "model.dtype to float32"),
    ],
)
def test_what_cannot_be_compiled_is_refused(recipe, overrides, edit):
    with pytest.raises(RecipeError, match=rf"performance.compile: .*{edit}"):
        load_recipe([recipe], ["performance.compile=true", *overrides])


def test_the_key_in_the_wrong_section_is_answered_with_the_right_one():
    with pytest.raises(RecipeError, match=r"model.compile: .*performance.compile"):
        load_recipe(["shapes-lora"], ["model.compile=true"])
