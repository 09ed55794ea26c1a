"""``model.compile``: one compiled module samples and trains, so the first ratio stays 1."""

import pytest
import torch

from mmrl.config.loader import RecipeError, load_recipe
from mmrl.errors import UserError
from mmrl.loop import train_step
from mmrl.report.clock import Clock
from mmrl.run import build

SMALL = [
    "train.prompts_per_step=2",
    "train.group_size=2",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    'rewards=[{name: "jpeg:compressibility"}]',
]
REFERENCE = "algorithm={type: flow_grpo, clip_range: 1e-3, kl_coef: 0.1}"


def stepped(*overrides, steps=2):
    """The rows of some steps."""
    loaded = load_recipe(["shapes-lora"], [*SMALL, *overrides])
    run = build(loaded.recipe, loaded.root)
    return [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(steps)]


def near(rows, others):
    for row, other in zip(rows, others, strict=True):
        assert row["policy/first_ratio_max_dev"] < 1e-5
        assert row["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-3)
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], rel=1e-3)


@pytest.mark.slow
def test_one_compiled_module_samples_and_trains(monkeypatch):
    """Traced as for any backend, and run as it was traced."""
    plain, graphs, runs = torch.nn.Module.compile, [], []

    def backend(graph, inputs):
        graphs.append(torch.is_grad_enabled())

        def compiled(*given):
            runs.append(torch.is_grad_enabled())
            return graph.forward(*given)

        return compiled

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: plain(self, backend=backend, **how))
    found = stepped("model.compile=true")
    assert set(graphs) == {True, False}
    assert len(graphs) < len(runs), "nothing was traced twice"
    assert (runs.count(True), runs.count(False)) == (2 * 2, 2 * 3)  # 3 steps sampled, of which 2 are replayed
    near(found, stepped())


@pytest.mark.long  # in short: above, without kernels
@pytest.mark.slow
def test_compiled_kernels_keep_the_first_ratio(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    near(stepped("model.compile=true", REFERENCE), stepped(REFERENCE))


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"model.compile: .* needs a C\+\+ compiler.*set model.compile to false"):
        stepped("model.compile=true", steps=0)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("sums", []),
        ("shapes-lora", ["controllers=2", "train.backend=fsdp"]),
        ("shapes-full", ["model.dtype=bfloat16"]),
    ],
)
def test_what_cannot_be_compiled_is_refused(recipe, overrides):
    with pytest.raises(
        RecipeError, match=r"model.compile: .*(remove it|train.backend to replicated|model.dtype to float32)"
    ):
        load_recipe([recipe], ["model.compile=true", *overrides])
