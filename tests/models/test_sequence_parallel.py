"""Ranks that share a sample of a denoiser come to the velocity and gradients of one, over real gloo groups."""

import sys
from collections import Counter
from contextlib import closing
from io import BytesIO, StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Media, Prompt, Slot
from mmrl.models.context_parallel import Imagined
from mmrl.models.sequence_parallel import Cut, InSequence, refusals
from mmrl.models.sharded import Sharded
from mmrl.models.weights import Replicated
from mmrl.planner.render import render
from tests.support.families import recipe
from tests.support.planning import planned
from tests.support.ranks import launched
from tests.support.tiny_diffusion import save

allow_cpu_only()  # before transformers imports torchvision

FAMILIES = ["wan", "flux", "flux2_klein", "qwen_image"]
HOW = {"wan": ("lora", "fsdp"), "flux": ("replicated",), "flux2_klein": ("replicated",)}
"""How the weights of a family lie on two ranks; of the others both whole and in shards."""
BRIGHT = """
import mmrl

@mmrl.reward(inputs=("tensor",))
def score(samples, *, context):
    return [10 * float(s.tensor[..., :8].mean()) for s in samples]
"""


def heads(folder, count):
    """Save the denoiser of a pipeline again, with another number of heads and random weights."""
    import diffusers

    name = diffusers.DiffusionPipeline.load_config(folder)["transformer"][1]
    kind = getattr(diffusers, name)
    torch.manual_seed(1)
    made = kind.from_config({**kind.load_config(folder / "transformer"), "num_attention_heads": count})
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.05 * torch.randn_like(p))
    made.save_pretrained(folder / "transformer")


def compared(pipeline, weights_of):
    """The velocity and the gradients of two rows with prompts of different lengths: of all tokens in one process, then
    of ranks with ``weights_of(module)``. Returns the largest differences, relative to the largest value."""
    shown = (picture(),) if pipeline.adapter.edits else ()
    texts = ("a", "a red circle left of it")
    slots = [Slot(0, n, 0, Prompt(str(n), text, media=shown)) for n, text in enumerate(texts)]
    pipeline.encode(slots)
    features = pipeline.batch_features(slots)
    drawn = torch.Generator().manual_seed(3)
    x, by = (torch.randn(2, *pipeline.shape, generator=drawn) for _ in range(2))
    timestep = pipeline.adapter.timestep(torch.tensor([0.3, 0.8]))

    def once():
        with torch.no_grad():
            first = pipeline.velocity(x, timestep, features)
        found = pipeline.velocity(x, timestep, features)
        assert torch.equal(first, found)
        (found * by).mean().backward()
        return found.detach()

    whole = once()
    wanted = {name: p.grad for name, p in pipeline.policy.named_parameters() if p.grad is not None}
    assert len(wanted) > 20
    for p in pipeline.policy.parameters():
        p.grad = None
    weights = weights_of(pipeline.policy)
    found = once()
    weights.gather_gradients()
    grads = {n: weights.whole(n, p.grad) for n, p in weights.mine.items() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    norm = torch.stack([g.norm() for g in wanted.values()]).norm()
    every = torch.stack([(grads[n] - g).norm() for n, g in wanted.items()]).norm() / norm
    # some, as a bias of keys, have no gradient but what rounding leaves of it
    one = max(((grads[n] - g).norm() / (g.norm() + 1e-2 * norm)).item() for n, g in wanted.items())
    return torch.tensor([(found - whole).norm() / whole.norm(), every, one, (weights.norm() / norm - 1).abs()])


def picture():
    pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    Image.fromarray(pixels.numpy()).save(file := BytesIO(), "png")
    return Media("image", data=file.getvalue())


def summed(values):
    dist.all_reduce(values)
    return values


def rank(out, root, rank, size, port, *families):
    """One rank: what each family differs by, with whole weights on each rank and with shards of them."""
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    torch.set_num_threads(1)
    made = {}
    for family in families:
        folders = {family: root / family}
        for how in HOW.get(family, ("replicated", "fsdp")) if size == 2 else ("replicated",):
            length = {"max_sequence_length": 512 if family in ("wan_i2v", "qwen_image_edit") else 64}
            asked = recipe(family, folders, lora=how == "lora", guidance_scale=4.0, **length)
            pipeline = mmrl.load("pipelines", asked.pipeline).build(asked, str(root / family), torch.device("cpu"))

            def laid(module, how=how):
                if how == "fsdp":
                    return InSequence(module, Sharded(module, dist.group.WORLD, Counter()), size)
                return InSequence(module, Replicated(module, summed), size)

            made[f"{family} {how}"] = compared(pipeline, laid)
    torch.save(made, out)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_share_a_sample_have_the_velocity_and_the_gradients_of_one(size, tmp_path):
    for family in FAMILIES:
        heads(save(family, tmp_path / family), 4)
    outs = [tmp_path / f"{n}.pt" for n in range(size)]
    found = launched(__file__, outs, lambda n, port, out: [out, tmp_path, n, size, port, *FAMILIES])
    for of in found:
        assert len(of) == (6 if size == 2 else 4)
        for name, apart in of.items():
            assert apart.max() <= 1e-5, (name, apart)


SMALL = ["train.steps=2", "train.prompts_per_step=3", "train.group_size=3", "train.micro_batch_size=3"]
SMALL += ["eval.every=2", "eval.samples=3", "checkpoint.every=2", "sampling.steps=4"]


@pytest.mark.slow
def test_a_run_of_two_devices_that_share_clips_is_that_of_one(tmp_path):
    pytest.importorskip("ray")
    from tests.support.runs import alike, placed, run

    (reward := tmp_path / "bright.py").write_text(BRIGHT)
    words = [*SMALL, f'rewards=[{{name: "{reward}:score"}}]']
    run("moving-shapes", tmp_path / "one", *words)
    run("moving-shapes", tmp_path / "two", *words, "train.context_parallel=2", "devices_per_controller=2")
    alike(tmp_path / "one", tmp_path / "two")
    of = [line["device"] for line in placed(tmp_path / "two") if line.get("role") == "rollout"]
    assert of.count(0) == of.count(1) > 0
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    apart, whole = (
        torch.stack([t.norm() for t in of]).norm() for of in ([one[n] - two[n] for n in one], [*one.values()])
    )
    assert apart <= 1e-5 * whole


def weights(run):
    """All tensors of a run's last checkpoint but the optimizer's."""
    files = sorted(run.glob("checkpoints/step_000002/*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items() if not name.startswith("optimizer")}


def imagined(module, size):
    return closing(Cut(module, Imagined(size)))


def cut():
    """A tiny denoiser and what it is called with: three frames of two tokens."""
    import diffusers

    config = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
    made = diffusers.WanTransformer3DModel(**config, text_dim=8, freq_dim=8, ffn_dim=8, rope_max_seq_len=32)
    given = {"timestep": torch.tensor([5.0]), "encoder_hidden_states": torch.zeros(1, 3, 8)}
    return made, {"hidden_states": torch.zeros(1, 4, 3, 2, 4), **given}


def test_a_number_of_tokens_that_ranks_do_not_divide_is_refused_with_the_edit():
    import diffusers

    module, given = cut()
    whole = module(**given, return_dict=False)[0]
    with imagined(module, 2) as ranks:
        assert module(**given, return_dict=False)[0].shape == whole.shape
        assert ranks.tokens == 6
    with (
        imagined(module, 4),
        pytest.raises(UserError, match=r"4 devices do not divide 6 tokens .*; set .* to 2$"),
    ):
        module(**given)
    with (
        imagined(module, 5),
        pytest.raises(UserError, match=r"do not divide 6 .*; remove train.context_parallel$"),
    ):
        module(**given)
    assert torch.equal(module(**given, return_dict=False)[0], whole)
    config = {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "axes_dims_rope": (2, 2, 4),
    }
    config |= {"num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    module = diffusers.FluxTransformer2DModel(**config)

    def called(prompt):
        given = {"hidden_states": torch.zeros(1, 4, 4), "img_ids": torch.zeros(4, 3), "timestep": torch.tensor([0.5])}
        text = {"encoder_hidden_states": torch.zeros(1, prompt, 8), "txt_ids": torch.zeros(prompt, 3)}
        return module(**given, **text, pooled_projections=torch.zeros(1, 8))

    with imagined(module, 2):
        with pytest.raises(UserError, match=r"do not divide 5 tokens .*; set sampling.max_sequence_length to 6, or"):
            called(5)
        called(6)


def test_what_ranks_cannot_share_is_refused_by_name(monkeypatch):
    import diffusers

    module, _ = cut()
    assert not list(refusals(module, 2))
    (said,) = refusals(module, 3)
    assert "3 devices do not divide the 2 attention heads of this WanTransformer3DModel" in said
    kinds = {
        "LTX2VideoTransformer3DModel": "diffusers' plan for it cuts positions and text wrongly",
        "LTXVideoTransformer3DModel": "its plan was not compared",
        "SD3Transformer2DModel": "diffusers has no context-parallel plan for it",
    }
    for name, why in kinds.items():
        (said,) = refusals(getattr(diffusers, name).__new__(getattr(diffusers, name)), 2)
        assert f"no samples of a {name} are divided among devices: {why}; remove train.context_parallel" in said
    module.set_attention_backend("_native_math")
    try:
        assert "attention by _native_math was not checked" in next(refusals(module, 2))
    finally:
        module.set_attention_backend("native")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement=greedy"], "placement: devices that share a sample all draw it"),
        (["train.balance=moving", "controllers=2"], "train.balance: devices that share a sample draw it at the same"),
        (["performance.compile=true"], "performance.compile: devices that share a sample exchange tokens"),
        (["performance.attention=_native_math"], "_native_math was not checked on samples that devices share"),
        (["algorithm={type: draft}"], "draft back-propagates through several denoising steps"),
        (["devices_per_controller=3"], "3 train there; set devices_per_controller to a multiple of 2"),
    ],
)
def test_settings_that_do_not_fit_shared_samples_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["moving-shapes"], ["train.context_parallel=2", "devices_per_controller=2", *overrides])


@pytest.mark.slow
def test_the_plan_counts_what_one_of_two_devices_keeps_and_says_when_that_pays():
    words = ["train.micro_batch_size=2", "sampling.steps=4"]
    two = ["train.context_parallel=2", "devices_per_controller=2"]
    one = planned("moving-shapes", *words)
    both = planned("moving-shapes", *words, *two)
    assert not both.problems
    m = both.measured
    assert (m.tokens, m.whole) == (48, one.measured.train)
    assert 0.45 * m.whole < m.train < 0.7 * m.whole  # gradients are whole
    assert m.operations.train == one.measured.operations.train
    assert "so that here it does not pay" in text(both)
    little = next(phase.total for phase in both.phases if phase.name == "train") - m.train + m.whole // 4
    assert "from there on it pays" in text(planned("moving-shapes", *words, *two, device_memory=little))


def text(made):
    render(made, Console(file=(said := StringIO()), width=1000))
    return said.getvalue()


if __name__ == "__main__":
    out, root, *numbers = sys.argv[1:6]
    rank(Path(out), Path(root), *map(int, numbers), *sys.argv[6:])
