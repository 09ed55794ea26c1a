"""What a half-precision run multiplies in float32, counted as it runs on a CUDA device that is pretended, and how far
its gradient is from float32's."""

import dataclasses
import json
from functools import cache

import pytest

from tests.support.products import attention_in_half, counter

pytestmark = pytest.mark.pretend_cuda

FAMILIES = ["sd3", "sd", "sdxl", "flux", "qwen_image", "wan", "sana", "z_image", "flux2_klein"]
OWN = {"wan": 2, "sana": 4}
"""Float32 products that diffusers' code asks for in a forward: Wan's time embedder, Sana's linear attention."""
TEXTS = dict.fromkeys(("qwen2", "qwen3", "llama", "gemma2"), "cuda") | {"qwen3_moe": "cpu", "mixtral": "cpu"}
"""Kinds of text models, and where they run: experts count their tokens with a kernel that only CUDA itself has."""


def recipe(family, folder, **model):
    from mmrl.config.schema import Recipe

    length = {"sd3": 12, "flux": 16, "wan": 16}.get(family, 64)
    sampling = {"steps": 3, "height": 32, "width": 32, "max_sequence_length": length}
    return Recipe.model_validate(
        {
            "name": "half",
            "device": "cuda",
            "pipeline": f"diffusion/{family}",
            "model": {"path": str(folder), "lora": {"rank": 4, "alpha": 8}} | model,
            "data": {"name": "shapes"},
            "sampling": sampling | ({"frames": 5} if family == "wan" else {}),
            "rewards": [{"name": "shapes"}],
            "algorithm": {"type": "flow_grpo"},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 8},
        }
    )


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Tiny models whose weights bfloat16 has exactly, as those that are published in it."""
    import shutil

    from safetensors.torch import load_file, save_file

    from tests.support.tiny_diffusion import save, two_blocks

    root = tmp_path_factory.mktemp("half")

    @cache
    def saved(family):
        folder = root / family
        if family == "sd3":
            shutil.copytree(two_blocks(), folder)
        else:
            save(family, folder)
        for file in folder.rglob("*.safetensors"):
            save_file({k: t.bfloat16().to(t.dtype) for k, t in load_file(file).items()}, file, {"format": "pt"})
        return folder

    return saved


def opened(recipe):
    """The pipeline with four samples, and weights that are a little way from where they begin."""
    import torch

    from mmrl.pipelines.diffusion.contract import Case

    case = Case(recipe)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in case.policy.trainable.values():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return case


def gradient(case, features):
    """The gradient that noise of one step has, which is that of a policy gradient where the ratio is 1. The times are
    such as bfloat16 has, for diffusers' models round them to the dtype of the latents."""
    import torch

    total = []
    for n, at in enumerate((500.0, 250.0)):
        shape = (4, *case.pipeline.shape)
        x, noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(n)).bfloat16().float().to("cuda")
        time = torch.full((4,), at, device="cuda")
        given = {name: t.to(case.dtype) if t.is_floating_point() else t for name, t in features.items()}
        total.append((case.pipeline.velocity(x, time, given) * noise).sum())
    case.policy.backward(sum(total))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in case.policy.trainable.values() if p.grad is not None)
    return torch.cat([p.grad.flatten().double() for p in case.policy.trainable.values() if p.grad is not None])


LONG = [pytest.param(f, marks=[pytest.mark.long] * (f not in ("sd3", "sana"))) for f in FAMILIES]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("family", LONG)
def test_pictures_multiply_in_half_precision_and_the_gradient_is_float32s(folder_of, family, lora):
    import torch

    changed = {} if lora else {"lora": None}
    with attention_in_half():
        exact = opened(recipe(family, folder_of(family), **changed))
        features = exact.pipeline.batch_features(exact.slots)
        features = {name: t.bfloat16().to(t.dtype) if t.is_floating_point() else t for name, t in features.items()}
        exact.dtype = torch.float32
        expected = gradient(exact, features)
        half = opened(recipe(family, folder_of(family), dtype="bfloat16", **changed))
        half.dtype = torch.bfloat16
        with counter() as counted:
            found = gradient(half, features)
        if lora:
            time, x = torch.full((4,), 500.0, device="cuda"), torch.randn(4, *half.pipeline.shape).to("cuda")
            for weights in ("current", "reference"):
                with counter() as plain, torch.no_grad(), half.policy.using(weights):
                    half.pipeline.velocity(x, time, half.pipeline.batch_features(half.slots))
                assert plain.products["float32"] == OWN.get(family, 0)
    cosine = torch.nn.functional.cosine_similarity(found, expected, dim=0).item()
    print(f"{family} lora={lora}: cosine {cosine:.5f}, {dict(counted.products)}")
    assert cosine > 0.999
    # two forwards, each with a backward of at most twice as many
    assert counted.products["float32"] <= 6 * OWN.get(family, 0) * lora
    assert counted.products["bfloat16"] > 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("family", ["sd3", "sana"])
def test_the_vae_keeps_its_channels_last_on_the_device_and_the_pictures(folder_of, family, offload):
    import torch

    pipelines = [
        opened(recipe(family, folder_of(family), dtype=d, offload=offload)).pipeline for d in ("float32", "bfloat16")
    ]
    latents = torch.randn(2, *pipelines[0].shape, generator=torch.Generator().manual_seed(0)).to("cuda")
    pictures = []
    for pipeline in pipelines:
        vae = pipeline.adapter.vae
        for _ in range(2):
            with torch.no_grad(), pipeline.offloaded.using(vae):
                pictures.append(pipeline.decoded.shown(latents))
                kernels = [w for w in vae.parameters() if w.ndim == 4 and w.shape[1] > 1 and w.shape[-1] > 1]
                last = {w.is_contiguous(memory_format=torch.channels_last) for w in kernels}
                assert {w.device.type for w in kernels} == {"cuda"}
            assert last == {pipeline is pipelines[1]}
            pipeline.offloaded.rest()
    assert torch.equal(pictures[0], pictures[1])
    assert torch.equal(pictures[2], pictures[3])
    assert (pictures[0] - pictures[2]).abs().max() <= 1e-5


SCORERS = {"clip": 0, "pickscore": 0, "aesthetic": 5, "hpsv2": 0, "imagereward": 5}
"""Rewards, and the float32 products of a call: the layers of the head whose numbers are the scores."""


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    from tests.support.reward_models import checkpoints

    return checkpoints(tmp_path_factory.mktemp("scorers"))


@pytest.mark.parametrize("form", ["score", "pathwise"])
@pytest.mark.parametrize("name", SCORERS)
def test_scorers_of_pictures_multiply_in_half_precision(scorers, name, form):
    import torch

    from mmrl.core.reward_contract import Context
    from mmrl.rewards.loading import build, find
    from tests.support.reward_models import samples

    reward = build(find(f"{name}:{form}"), scorers[name])
    given = samples((32, 32))
    given = [dataclasses.replace(one, tensor=one.tensor.to("cuda").requires_grad_()) for one in given]
    with attention_in_half(), counter() as counted:
        out = reward.call(given, context=Context(device="cuda"))
    assert (out.dtype, out.device.type) == (torch.float32, "cuda")
    assert counted.products["float32"] == SCORERS[name]
    assert counted.products["bfloat16"] > 10
    if form == "pathwise":
        with attention_in_half(), counter() as backward:
            out.sum().backward()
        assert all(one.tensor.grad.dtype == torch.float32 for one in given)
        assert backward.products["float32"] <= SCORERS[name]
        assert backward.products["bfloat16"] > 10


def test_a_reward_model_multiplies_in_half_precision_but_for_its_head(texts):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from mmrl.core.reward_contract import Context
    from mmrl.core.trajectory import Prompt, Sample, SampleId
    from mmrl.rewards.loading import build, find

    made = AutoModelForSequenceClassification.from_pretrained(texts / "qwen3", num_labels=1)
    made.save_pretrained(texts / "scorer")
    AutoTokenizer.from_pretrained(texts / "qwen3").save_pretrained(texts / "scorer")
    reward = build(find("reward_model"), {"path": str(texts / "scorer")})
    given = [Sample(Prompt(str(n), "Say one."), SampleId(0, n, 0, 0), text="one " * n) for n in range(1, 4)]
    with attention_in_half(), counter() as counted:
        out = reward.call(given, context=Context(device="cuda"))
    assert len(set(out)) == 3
    assert counted.products["float32"] == 1
    assert counted.products["bfloat16"] > 10


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A recipe, and models of several kinds beside it."""
    from tests.support import pretended_text as text
    from tests.support import tiny
    from tests.support.small_models import small_model

    folder = tmp_path_factory.mktemp("texts")
    tok = tiny.tokenizer()
    for kind in TEXTS:
        tok.save_pretrained(folder / kind)
        small_model(kind, len(tok), tok.eos_token_id, tok.pad_token_id).save_pretrained(folder / kind)
    rows = [{"id": str(i), "prompt": f"Say {'very ' * (i % 4)}{i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(text.REWARD)
    (folder / "recipe.yaml").write_text(text.RECIPE)
    return folder


def built(folder, *words):
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe

    loaded = load_recipe([folder / "recipe.yaml"], words)
    return build(loaded.recipe)


def counted_step(folder, *words):
    """What a whole step counts."""
    from mmrl.core.clock import Clock
    from mmrl.training.loop import train_step

    run = built(folder, *words)
    with attention_in_half(), counter() as counted:
        train_step(run, 0, Clock(run.compute.device))
    return counted


SHORT = ["algorithm={type: grpo, kl_coef: 0.1}", "sampling.max_new_tokens=3"]
KINDS = [pytest.param(k, marks=[pytest.mark.long] * (k not in ("qwen3", "mixtral"))) for k in TEXTS]


@pytest.mark.parametrize("lora", ["{rank: 2, alpha: 4}", "null"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_text_is_float32s(texts, kind, lora):
    """At equal tokens. The numbers that leave the model, gradients and weights that train are float32."""
    import torch

    from mmrl.core.trajectory import SampleId, Slot

    words = [f"model.path={kind}", f"device={TEXTS[kind]}", f"model.lora={lora}", *SHORT]
    found, drawn = [], None
    for dtype in ("float32", "bfloat16"):
        run = built(texts, *words, f"model.dtype={dtype}")
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in run.policy.trainable.values():
                parameter.add_(0.01 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
        slots = [Slot(0, n // 2, 0, run.prompts[n // 2]) for n in range(4)]
        ids = [SampleId(0, n // 2, 0, n % 2) for n in range(4)]
        run.pipeline.encode(slots)
        drawn = drawn or run.pipeline.sample(slots, ids, [], seed=0)
        made = run.pipeline.replay(drawn, [0], frozenset({"log_probs"}), run.policy.using)["log_probs"]
        assert made.dtype == torch.float32
        advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]], device=made.device)
        run.policy.backward((made * drawn.padded("action_mask") * advantages).sum())
        every = list(run.policy.trainable.values())
        assert all(p.dtype == torch.float32 for p in every)
        found.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in every]).double())
    cosine = torch.nn.functional.cosine_similarity(*found, dim=0).item()
    print(f"{kind} lora={lora}: cosine {cosine:.5f}")
    assert cosine > 0.999


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", ["true", "false"])
def test_no_product_of_a_step_of_text_is_float32(texts, kind, again):
    """Sampling, replay, reference and update."""
    words = [f"model.path={kind}", f"device={TEXTS[kind]}", *SHORT]
    counted = counted_step(texts, *words, "model.lora={rank: 2, alpha: 4}", f"model.gradient_checkpointing={again}")
    assert counted.products["float32"] == 0
    assert counted.products["bfloat16"] > 0


def test_launches_and_bytes_of_a_step_of_text_do_not_grow(texts):
    """Counted on 2026-11-27, as below; with float32 products of the adapter it was 7,050 and 113,886,270."""
    counted = counted_step(texts, "model.path=qwen3", *SHORT, "model.lora={rank: 2, alpha: 4}")
    assert counted.launches <= 1.02 * 7006
    assert counted.bytes <= 1.02 * 87_804_366


@pytest.mark.parametrize(("again", "launches", "nbytes"), [(False, 892, 88_378_756), (True, 1256, 127_610_500)])
def test_launches_and_bytes_of_two_slices_of_pictures_do_not_grow(folder_of, again, launches, nbytes):
    """Without and with gradient checkpointing; with float32 products of the adapter 122,341,252 and 177,626,244
    bytes."""
    import torch

    case = opened(recipe("sd3", folder_of("sd3"), dtype="bfloat16", gradient_checkpointing=again))
    case.dtype = torch.bfloat16
    features = case.pipeline.batch_features(case.slots)
    with attention_in_half(), counter() as counted:
        gradient(case, features)
    assert counted.products["float32"] == 0
    assert counted.launches <= 1.02 * launches
    assert counted.bytes <= 1.02 * nbytes
