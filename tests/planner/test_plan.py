"""The plan against the run: what it says a step takes is what a step takes."""

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import mmrl
from mmrl.config.loader import load_recipe, shipped_recipes
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import DenoisingRows, Prompt, SampleId, Slot
from mmrl.planner.counts import count
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.planner.fit_check import does_not_fit
from mmrl.planner.plan import _about_dtype, plan
from mmrl.planner.render import render
from mmrl.rollout.collect import SynchronousRollout
from mmrl.step.batch import Batch, rows_of_update
from mmrl.step.micro_batches import split_micro_batches
from mmrl.step.objectives import load_objective
from tests.support import planning
from tests.support.planning import LEFT_OUT, random_weights, resident, run_steps, without_the_step
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

RECIPES = Path(__file__).resolve().parents[2] / "pipelines" / "diffusion" / "recipes"
ARCHITECTURE = RECIPES / "sd35-medium.architecture.json"
SMALL = [
    "device=cpu",
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "sampling.steps=3",
    "sampling.window=null",
    "rewards=[{name: 'jpeg:incompressibility'}]",
]


def planned(*overrides, name="shapes-lora", **more):
    """With ``SMALL``, of two blocks of the shipped model."""
    less = [f"model.path={two_blocks()}"] if SMALL[0] in overrides else []
    return planning.planned(name, *less, *overrides, **more)


def planned_in_short(*overrides, name="shapes-lora"):
    return planning.planned_in_short(name, *overrides)


def rendered(made, short=False, width=100):
    console = Console(file=io.StringIO(), width=width)
    render(made, console, short=short)
    return console.file.getvalue()


# -- what a step takes -----------------------------------------------------------------------------------------------


FULL = ["model.lora=null", "model.dtype=bfloat16", "model.gradient_checkpointing=true", "optim.ema_decay=0.9"]
DRAFT = [
    "algorithm={type: draft, last_steps: 2}",
    "rewards=[{name: 'colour:target', options: {rgb: [255, 0, 0]}}]",
    "train.group_size=1",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["sampling.guidance_scale=4", "algorithm.kl_coef=0.01", "train.updates_per_step=2"], id="guided"),
        pytest.param([*FULL, "sampling.batch_size=8"], id="full", marks=pytest.mark.long),
        pytest.param(
            ["algorithm={type: diffusion_nft}", "sampling.same_initial_noise=false"], id="nft", marks=pytest.mark.slow
        ),
        pytest.param(
            ["algorithm={type: diffusion_nft}", "sampling.same_initial_noise=false", "model.lora=null"],
            id="nft-full",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["algorithm={type: awm, noise_levels: 2}", "sampling.same_initial_noise=false"],
            id="awm",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["algorithm={type: crd, noise_levels: 2}", "sampling.same_initial_noise=false"],
            id="crd",
            marks=pytest.mark.long,
        ),
        pytest.param(["algorithm={type: stepwise_flow_grpo}"], id="stepwise", marks=pytest.mark.long),
        pytest.param(["model.dtype=bfloat16"], id="half", marks=pytest.mark.slow),
        pytest.param(DRAFT, id="draft", marks=pytest.mark.slow),
        pytest.param(["algorithm={type: draft, renoise: 2}", *DRAFT[1:]], id="draft-lv", marks=pytest.mark.long),
    ],
)
def test_a_real_step_takes_what_the_plan_says(changes):
    loaded = load_recipe(["shapes-lora"], [*SMALL, f"model.path={two_blocks()}", *changes])
    made = plan(loaded)
    assert made.problems == []
    real = run_steps(loaded, steps=2)
    said = made.peak.total - made.peak.parts["prompt features"] + real["features"]  # these grow over a whole run
    assert said == pytest.approx(real["held"] + real["peak"], rel=0.05)
    assert sum(made.peak.parts[p] for p in ("policy", "text encoders", "VAE")) == pytest.approx(
        real["held"] - made.peak.parts.get("copies of the trained weights", 0), abs=64
    )


def test_live_bytes_of_a_case_worked_out_by_hand():
    weight, x = torch.zeros(8, 8, requires_grad=True), torch.zeros(4, 8)
    with LiveBytes() as live:
        x.view(32).t()  # a view of what was there takes nothing
        x.add_(1)
        assert (live.now, live.peak) == (0, 0)
        y = torch.empty(100)
        z = y[:10].reshape(2, 5)
        assert live.now == 400
        del y
        assert live.now == 400, "a view keeps its storage"
        del z
        assert (live.now, live.peak) == (0, 400)
        h = x @ weight  # [4, 8]
        out = torch.relu(h)  # [4, 8], kept for the backward
        assert live.now == 2 * 128
        del h
        assert live.now == 128
        out.sum().backward()
        del out
        assert live.now == weight.grad.nbytes == 256


def test_the_roles_of_a_small_recipe_worked_out_by_hand():
    made = planned(*SMALL, "model.lora={rank: 2}", "sampling.steps=4", "optim.ema_decay=0.9")
    roles = {role.name: role for role in made.roles}
    # 2 blocks of width 128: 8 linear layers each, but the last lacks to_add_out; rank 2 has 2 x (in + out) weights.
    lora = (2 * 8 - 1) * 2 * (128 + 128)
    assert roles["policy, trained"].parameters == lora
    assert roles["policy, trained"].bytes == roles["gradients"].bytes == roles["copy: ema"].bytes == 4 * lora
    steps = 4 * 2 * (2 * 8 - 1)  # a counter for each of the 30 matrices
    assert roles["optimizer"].bytes == 8 * lora + steps
    latent = 4 * 8 * 8 * 8  # float32
    recorded = 3
    kept = latent * (1 + (recorded + 1)) + 4 * recorded  # the result, the states and the log-probs
    assert kept <= roles["trajectories"].bytes / 8 <= kept + latent * recorded + 8 * recorded
    tokens = 12 + 12  # of CLIP and of T5, 128 wide, and the pooled 128
    prompts = made.phases[0].parts["prompt features"] / (4 * 128 * (tokens + 1))
    every = mmrl.load("datasets", "shapes").prompts("all")
    assert prompts == len([p for p in every if p.meta["task"] != "relation"]) + 1


# -- exact arithmetic ------------------------------------------------------------------------------------------------


def batch_of(recipe):
    """A batch as ``rollout`` leaves it, without tensors that matter."""
    size = recipe.sampling.batch_size or recipe.train.micro_batch_size
    ids = [SampleId(0, p, 0, k) for p in range(recipe.train.prompts_per_step) for k in range(recipe.train.group_size)]
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    slots = [[Slot(0, i.slot, 0, Prompt(f"{i.slot}", "")) for i in c] for c in chunks]
    rows = [DenoisingRows(s, c, torch.zeros(len(c), 1)) for s, c in zip(slots, chunks, strict=True)]
    places = [(m, i) for m, chunk in enumerate(chunks) for i in range(len(chunk))]
    return Batch(rows, places, torch.zeros(len(ids)), torch.ones(len(ids)), torch.ones(len(ids)))


class Counting:
    """What ``slices`` asks of a run."""

    ahead = None

    class pipeline:
        makes = "image"

        @staticmethod
        def lengths(trajectory):
            return [1] * len(trajectory)

        @staticmethod
        def entries(kind):
            return 3

        @staticmethod
        def recorded(rows, entry):
            return {}

    class compute:
        device = torch.device("cpu")

    recomputes_old_log_probs = False

    def __init__(self, recipe):
        self.recipe, self.objective, self.strategy = recipe, load_objective(recipe), SynchronousRollout()


@cache
def lora_recipe():
    return load_recipe(["shapes-lora"]).recipe


@given(
    prompts=st.integers(1, 7),
    group=st.integers(1, 6),
    updates=st.integers(1, 3),
    micro=st.integers(1, 9),
    batch=st.one_of(st.none(), st.integers(1, 50)),
)
@settings(deadline=None, max_examples=80)
def test_the_counts_are_those_of_the_loop(prompts, group, updates, micro, batch):
    group = max(2, group * updates)
    train = {"prompts_per_step": prompts, "group_size": group, "micro_batch_size": micro, "updates_per_step": updates}
    base = lora_recipe()
    recipe = base.model_copy(
        update={
            "train": base.train.model_copy(update=train),
            "sampling": base.sampling.model_copy(update={"batch_size": batch}),
        }
    )
    made = batch_of(recipe)
    run = Counting(recipe)
    rows = [rows_of_update(made, update, updates) for update in range(updates)]
    micro_batches = [len(micro_batch.rows) for mine in rows for micro_batch in split_micro_batches(run, made, mine)]
    counts = count(recipe, entries=3)
    assert counts.samples == prompts * group
    assert counts.micro_batches == len(made.micro_batches)
    assert counts.batch == max(len(m) for m in made.micro_batches)
    assert (counts.slices, counts.slice_rows) == (len(micro_batches), max(micro_batches))
    assert counts.sampling_forwards == counts.micro_batches * recipe.sampling.steps


# -- real models -----------------------------------------------------------------------------------------------------


def two_layers(folder):
    """A file in ``folder`` with the recorded architecture of Stable Diffusion 3.5 Medium, of each kind of layer two."""
    configs = json.loads(ARCHITECTURE.read_text())["components"]
    configs["transformer"] |= {"num_layers": 2, "dual_attention_layers": [0]}
    for name in ("text_encoder", "text_encoder_2"):
        configs[name]["num_hidden_layers"] = 2
    configs["text_encoder_3"] |= {"num_layers": 2, "num_decoder_layers": 2}
    recorded = folder / ARCHITECTURE.name
    recorded.write_text(json.dumps({"components": configs}))
    return recorded


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """The plan of the real-GPU recipe, from an architecture of two layers of each kind: tests are offline."""
    return planned(f"architecture={two_layers(tmp_path_factory.mktemp('medium'))}", name="sd35-medium")


@pytest.mark.slow
def test_stable_diffusion_35_medium_has_its_published_size():
    medium = planned(name="sd35-medium")
    assert medium.problems == []
    sizes = {(role.name, role.what.partition(",")[0]): role.parameters for role in medium.roles}
    assert sizes["policy, frozen", "SD3Transformer2DModel"] == 2_243_171_520
    assert sizes["text encoders", "T5EncoderModel"] == 4_762_310_656
    assert sizes["VAE", "AutoencoderKL"] == 83_819_683
    # 24 blocks of width 1536 with 8 linear layers that take an adapter, but the last has no to_add_out.
    assert sizes["policy, trained", "LoRA of rank 32"] == (24 * 8 - 1) * 32 * (1536 + 1536) == 18_776_064
    position_table = 384 * 384 * 1536
    bytes_of = {role.name: role.bytes for role in medium.roles}
    assert bytes_of["policy, frozen"] == 2 * (2_243_171_520 + position_table)
    assert bytes_of["VAE"] == 4 * 83_819_683, "the VAE stays float32"
    assert 12 * 2**30 < medium.peak.total < 40 * 2**30
    assert "2,243,171,520" in rendered(medium)


def test_the_real_recipe_counts_its_step_and_offloads_what_is_idle(medium):
    c = medium.counts
    assert (c.samples, c.micro_batches, c.sampling_forwards) == (48 * 24, 144, 1440)
    assert (c.entries, c.slices, c.slice_rows, c.optimizer_steps) == (9, 2 * 72 * 9, 8, 2)
    assert (medium.measured.graph_forwards, medium.measured.forwards) == (
        1,
        1,
    )  # the policy, and its reference for the KL
    phases = {phase.name: phase.parts for phase in medium.phases}
    assert [name for name, parts in phases.items() if "text encoders" in parts] == ["encode"]
    assert [name for name, parts in phases.items() if "VAE" in parts] == ["sample", "decode"]
    assert medium.host == phases["encode"]["text encoders"] + phases["decode"]["VAE"]


def test_the_output_says_where_the_sizes_come_from(medium):
    text = rendered(medium)
    assert "recorded in sd35-medium.architecture.json, because stabilityai/stable-diffusion-3.5-medium cannot" in text
    assert "48 prompts x 24 = 1,152 samples" in text
    assert f"{next(role.parameters for role in medium.roles if role.name == 'policy, frozen'):,}" in text
    assert "cuda is not on this machine" in text or torch.cuda.is_available()
    assert "between controllers: 0 bytes" in text
    for width in (60, 80, 200):
        assert "peak: " in rendered(medium, width=width)


LARGE = (
    "qwen-image",
    "qwen-image-edit",
    "qwen-image-edit-plus",
    "sdxl",
    "flux-dev",
    "sana15-1.6b",
    "z-image",
    "flux2-klein-base-4b-edit",
    "sd15",
    "wan21-1.3b",
    "flux-kontext",
    "wan22-ti2v-5b",
    "wan22-a14b",
    "wan21-i2v-14b",
    "wan21-v2v-14b",
    "wan22-i2v-5b",
    "wan22-i2v-a14b",
    "ltx2",
    "ltx2-i2v",
    "ltx2-v2v",
    "flux2-dev",
    "flux2-dev-edit",
    "hunyuan-video15",
    "hunyuan-video15-i2v",
)
"""Recipes whose step takes half a minute and more to imagine."""
SLOW = ("flux2-klein-base-4b", "qwen25-0.5b-gsm8k", "qwen25-0.5b-long", "qwen25-vl-3b")
ALIKE = ("shapes-draft", "shapes-dpo", "shapes-sft", "shapes-full", "shapes-judge", "sums-capo", "sums-reward")
"""Whose steps other recipes or other tests have as well."""
PUBLISHED = {  # parameters of what trains, of all that encodes text, and of the VAE
    "sd15": (859_520_964, 123_060_480, 83_653_863),
    "sdxl": (2_567_463_684, 123_060_480 + 694_659_840, 83_653_863),
    "flux-dev": (11_901_408_320, 123_060_480 + 4_762_310_656, 83_819_683),
    "flux-kontext": (11_901_408_320, 123_060_480 + 4_762_310_656, 83_819_683),
    "qwen-image": (20_430_401_088, 8_292_166_656, 126_892_531),
    "qwen-image-edit": (20_430_401_088, 8_292_166_656, 126_892_531),
    "qwen-image-edit-plus": (20_430_401_088, 8_292_166_656, 126_892_531),
    "wan21-1.3b": (1_418_996_800, 5_680_910_336, 126_892_531),
    "wan22-ti2v-5b": (4_999_787_712, 5_680_910_336, 704_688_668),
    "z-image": (6_154_908_736, 4_022_468_096, 83_819_683),
    "flux2-klein-base-4b": (3_875_544_576, 4_022_468_096, 84_046_115),
    "sana15-1.6b": (1_604_641_952, 2_614_341_888, 312_250_275),
}


def real(name):
    """What is changed in a recipe before its plan is made."""
    small = ["train.micro_batch_size=2", "sampling.batch_size=2"] if name.startswith("qwen") else []
    return [*small, *(["sampling.max_new_tokens=2048"] if name.endswith("-long") else [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=[pytest.mark.slow] * n.startswith("qwen-image")) for n in LARGE), *SLOW]
)
def test_every_large_recipe_has_its_sizes_and_counts(name):
    """In short, without the step: what is read, built and counted before."""
    if name == "qwen25-vl-3b":
        pytest.importorskip("torchvision")
    with without_the_step() as given:
        made = plan(load_recipe([name], real(name)))
    assert made.problems == [LEFT_OUT]
    assert made.counts.samples == made.recipe.train.prompts_per_step * made.recipe.train.group_size
    description = given[0]
    roles = {component.role for component in description.components}
    assert roles >= ({"policy"} if description.pipeline.makes == "text" else {"policy", "VAE", "text encoders"})
    assert sum(p.numel() for p in description.pipeline.policy.parameters()) > (4e8 if "0.5b" in name else 5e8)
    if name in PUBLISHED:
        sizes = {}
        for component in description.components:
            frozen = sum(p.numel() for p in component.module.parameters() if not p.requires_grad)
            sizes[component.role] = sizes.get(component.role, 0) + frozen
        assert (sizes["policy"], sizes["text encoders"], sizes["VAE"]) == PUBLISHED[name]


def test_every_published_size_is_looked_at():
    assert set(PUBLISHED) <= {*LARGE, *SLOW}


@pytest.mark.slow
def test_the_real_language_recipe_has_its_published_size():
    made = planned(*real("qwen25-0.5b-gsm8k"), name="qwen25-0.5b-gsm8k")
    assert made.problems == []
    roles = {role.name: role for role in made.roles}
    assert roles["policy, trained"].parameters == 494_032_768
    assert made.counts.row_tokens == 512 + 1024, "without the tokenizer, sampling.max_prompt_tokens counts"
    assert "recorded in qwen25-0.5b.architecture.json" in made.source
    logits = 2 * 1025 * 151_936 * 4
    assert logits < made.measured.train < 12 * logits, "of two rows; the vocabulary's logits are most of it"
    cache = 2 * 24 * 2 * 2 * 64 * 1536 * 2  # rows, layers, keys and values, heads, width, tokens, bytes
    assert cache < made.measured.sample


@pytest.mark.slow
def test_the_real_vision_recipe_has_its_published_size():
    pytest.importorskip("torchvision")
    made = planned(*real("qwen25-vl-3b"), name="qwen25-vl-3b")
    assert made.problems == []
    roles = {role.name: role for role in made.roles}
    assert roles["policy, frozen"].parameters == 3_754_622_976
    # 36 layers of width 2048, with 256 for keys and values each, and 11008 between the three others
    pairs = [(2048, 2048), (2048, 256), (2048, 256), (2048, 2048), *[(2048, 11008)] * 3]
    assert roles["policy, trained"].parameters == 36 * 64 * sum(a + b for a, b in pairs)
    assert made.counts.row_tokens == 1024 + 512


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.long] * (n in LARGE) + [pytest.mark.slow] * (n in SLOW or n in ALIKE))
        for n in shipped_recipes()
    ],
)
def test_every_shipped_recipe_resolves(name):
    recipe = load_recipe([name]).recipe
    if recipe.pipeline.startswith("vlm/"):
        pytest.importorskip("torchvision")
    if recipe.environment is not None and recipe.environment.name.startswith("gymnasium:"):
        pytest.importorskip("minigrid")
    if recipe.environment is not None and recipe.environment.name.startswith("textarena:"):
        pytest.importorskip("textarena")
    if recipe.data.name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    made = planned(*real(name), name=name)
    assert [problem for problem in made.problems if "; run: mmrl fetch " not in problem] == []
    assert made.peak is not None
    assert not [note for note in made.notes if "not known" in note]


@pytest.mark.slow
def test_on_an_accelerator_a_pathwise_update_keeps_the_decoder_and_nothing_else_moves_in_without_offload():
    phases = {p.name: p.parts for p in planned(*SMALL, *DRAFT, "device=cuda").phases}
    assert list(phases) == ["encode", "train", "optimizer"]
    assert ["VAE" in parts for parts in phases.values()] == [True, True, True]
    assert ["text encoders" in parts for parts in phases.values()] == [True, False, False]
    made = planned(*SMALL, "device=cuda", "model.offload=false")
    assert all({"VAE", "text encoders"} <= set(phase.parts) for phase in made.phases)
    assert made.host == 0


# -- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_does_not_fit_is_a_problem_with_edits():
    changes = ["model.gradient_checkpointing=false", "train.micro_batch_size=8"]
    whole = planned(*SMALL, *changes)
    assert whole.problems == []
    (problem,) = does_not_fit(replace(whole, device_memory=whole.peak.total - 1))
    assert f"the phase {whole.peak.name} needs " in problem
    assert "cpu has" in problem
    assert does_not_fit(replace(whole, device_memory=whole.peak.total)) == []
    edits = problem.partition("Try: ")[2].split("; ")
    assert edits[:2] == ["model.gradient_checkpointing=true", "train.micro_batch_size=4"]
    assert planned(*SMALL, *changes, *edits[:2]).peak.total < whole.peak.total, "the edits help"


def test_a_plan_of_several_controllers_is_of_the_one_with_most_and_of_all_on_this_machine():
    one = planned_in_short(*SMALL, "train.prompts_per_step=5")
    two = planned(*SMALL, "train.prompts_per_step=5", "controllers=2")
    assert (one.counts.prompts, two.counts.prompts) == (5, 3)
    assert one.counts.optimizer_steps == two.counts.optimizer_steps
    assert "a step of each of 2 controllers: 3 prompts" in rendered(two)
    assert "between controllers: the gradients" in " ".join(rendered(two).split())
    needed = 2 * two.peak.total
    assert does_not_fit(replace(two, device_memory=needed)) == []
    (problem,) = does_not_fit(replace(two, device_memory=needed - 1))
    assert problem.startswith("controllers: 2 need")
    elsewhere = two.recipe.model_copy(update={"ray": "auto"})
    assert does_not_fit(replace(two, recipe=elsewhere, device_memory=needed - 1)) == []


def test_shards_divide_what_stays_and_are_gathered_where_a_controller_computes_alone():
    changes = [*SMALL, "model.lora=null", "train.prompts_per_step=4", "controllers=4"]
    whole, shards = planned(*changes), planned(*changes, "train.backend=fsdp")
    for name in ("policy, trained", "gradients", "optimizer"):
        of = [next(role.bytes for role in made.roles if role.name == name) for made in (whole, shards)]
        assert of[1] == -(-of[0] // 4)
    at = {phase.name: phase.parts for phase in shards.phases}
    policy = next(phase.parts["policy"] for phase in whole.phases)
    assert at["sample"]["weights gathered for the phase"] == policy
    assert "weights gathered for the phase" not in at["optimizer"]
    assert at["optimizer"]["policy"] == -(-policy // 4)
    assert "weights and gradients of every training slice" in " ".join(rendered(shards).split())
    (problem,) = does_not_fit(replace(whole, device_memory=2**20))
    assert "train.backend=fsdp" in problem


@pytest.mark.slow
def test_full_training_that_does_not_fit_is_told_of_lora():
    made = planned(*SMALL, "model.lora=null", device_memory=2**20)  # by way of the whole plan
    assert "model.lora={rank: 32}" in made.problems[0]
    lora = planned(*SMALL, "model.lora={rank: 32}")
    assert lora.peak.total < made.peak.total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["sampling.height=500"], "sampling.height and sampling.width: 500 x 512 is no multiple of 16"),
        (["sampling.width=8192"], "512 x 8192 is more than the 6144 pixels a side"),
        (["model.lora={targets: [nothing]}"], "model.lora.targets: "),
        (["architecture=null"], "record the checkpoint's component configurations in a JSON file"),
        ([*SMALL, "data={name: prompts, train: {path: gone.txt}}"], "put your prompts there"),
        ([*SMALL, "rewards=[{name: 'jpeg:compressibility', options: {qualty: 1}}]"], "qualty"),
        (
            [*SMALL, "algorithm={type: draft}", "sampling.same_initial_noise=false"],
            "the reward's gradient, and jpeg:incompressibility declares none",
        ),
    ],
)
def test_what_cannot_run_is_a_problem(changes, message):
    made = planned_in_short(*changes, name="shapes-lora" if SMALL[0] in changes else "sd35-medium")
    assert any(message in problem for problem in made.problems), made.problems
    assert message in rendered(made, width=500)
    assert message not in rendered(made, short=True, width=500), "who raises the problems prints them"


@pytest.mark.parametrize(
    ("describe", "note"),
    [
        ("", "has no describe(recipe, path, architecture)"),
        (
            "from mmrl.pipelines.diffusion import sd3\n"
            "def describe(*a):\n    d = sd3.describe(*a)\n    del d.pipeline.adapter.vae\n    return d\n",
            "the step cannot be run without data (AttributeError: ",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_measured_may_still_train(tmp_path, describe, note):
    (tmp_path / "mine.py").write_text("def build(recipe, path, device): ...\n" + describe)
    made = planned(*SMALL, f"pipeline={tmp_path / 'mine.py'}")
    assert made.problems == []
    assert any(note in n for n in made.notes)
    assert note in rendered(made, short=True, width=500)


def test_all_that_is_wrong_is_said_at_once():
    changes = ["sampling.height=500", "data.train={path: gone.txt}", "rewards=[{name: pickscore, options: {pth: x}}]"]
    assert len(planned(*changes, name="sd35-medium").problems) == 3


def test_an_architecture_that_is_none_is_said(tmp_path):
    for text in ("no json", "[]", '{"components": {"transformer": {}}}', '{"components": {"transformer": []}}'):
        (tmp_path / "a.json").write_text(text)
        (problem,) = plan(load_recipe(["sd35-medium"], [f"architecture={tmp_path / 'a.json'}"])).problems
        assert "a.json" in problem


@pytest.mark.slow
def test_no_weight_is_read(tmp_path):
    """The configuration files are enough: a checkpoint that is still being downloaded can be planned."""
    shutil.copytree(two_blocks(), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.jsonl"))
    bare, whole = planned(*SMALL, f"model.path={tmp_path / 'm'}"), planned(*SMALL)
    assert bare.problems == []
    assert [p.parts for p in bare.phases] == [p.parts for p in whole.phases]


# -- true width ------------------------------------------------------------------------------------------------------

WIDE = [
    "device=cpu",
    "threads=1",
    "model.path=model",
    "architecture=null",
    "sampling={steps: 2, guidance_scale: 1, height: 128, width: 128, max_sequence_length: 64, batch_size: 8}",
    "rewards=[{name: 'jpeg:incompressibility'}]",
    "train={steps: 1, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}",
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Stable Diffusion 3.5 Medium at true width with two layers of each kind, saved as diffusers saves it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    folder = tmp_path_factory.mktemp("wide")
    recorded = two_layers(folder)
    describe, sd3 = (mmrl.load("pipelines", f"diffusion/{name}") for name in ("describe", "sd3"))
    empty, _ = describe.empty_pipeline(sd3.SD3Adapter, "no/model", recorded, {"default": torch.bfloat16})
    from tools.make_models import shapes_sd3

    small = shapes_sd3.build(["a red circle"])
    tokenizers = {name: getattr(small, name) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")}
    for name in ("tokenizer", "tokenizer_2"):
        tokenizers[name].model_max_length = 77
    parts = {
        name: random_weights(getattr(empty, name)) for name in ("transformer", "vae", "text_encoder", "text_encoder_2")
    }
    StableDiffusion3Pipeline(
        **parts,
        **tokenizers,
        text_encoder_3=random_weights(empty.text_encoder_3),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder / "model")
    shutil.copy(RECIPES / "prompts-example.txt", folder)
    shutil.copy(RECIPES / "sd35-medium.yaml", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.long  # in short: the small models' steps, above
def test_a_real_step_at_true_width_takes_what_the_plan_says_within_20_percent(wide):
    """In a process of its own: tensors counted as they live, and its resident memory beyond that of the imports."""
    loaded = load_recipe([wide / "sd35-medium.yaml"], WIDE)
    made = plan(loaded)
    assert made.problems == []
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that freed memory goes back
    done = subprocess.run(
        [sys.executable, __file__, str(wide / "sd35-medium.yaml"), *WIDE],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.splitlines()[-1])
    fixed = sum(made.peak.parts.get(p, 0) for p in ("policy", "text encoders", "VAE", "copies of the trained weights"))
    print(f"plan {made.peak.total / 2**20:.0f} MiB in {made.peak.name}, weights {fixed / 2**20:.0f}; real: {real}")
    assert fixed == pytest.approx(real["held"], rel=0.001)
    assert made.peak.total == pytest.approx(real["held"] + real["peak"], rel=0.2)
    assert made.peak.total - fixed == pytest.approx(real["peak"], rel=0.2), "without the weights, too"
    assert made.peak.total == pytest.approx(real["rss"] - real["baseline"], rel=0.2)


def step_in_own_process(recipe, *overrides):
    """Print, as JSON, what one real step takes; ``baseline`` is the process with all imports done."""
    import diffusers
    import peft

    assert diffusers.StableDiffusion3Pipeline
    assert peft.get_peft_model
    with torch.no_grad():
        torch.nn.functional.linear(torch.zeros(64, 64), torch.zeros(64, 64))
    baseline = resident()
    print(json.dumps(run_steps(load_recipe([recipe], overrides)) | {"baseline": baseline}))


@pytest.mark.parametrize(
    ("dtype", "flags", "told"),
    [
        ("bfloat16", {}, True),
        ("bfloat16", {"avx512_bf16": True}, False),
        ("bfloat16", {"avx512_bf16": None, "amx_bf16": None, "bf16": True}, False),
        ("float32", {}, False),
    ],
)
def test_a_cpu_without_instructions_for_bfloat16_is_told(dtype, flags, told, monkeypatch):
    has = {"avx512_bf16": False, "amx_bf16": False, **flags}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: has)
    if told:  # once by way of the whole plan
        notes = plan(load_recipe(["shapes-full"], ["device=cpu", f"model.dtype={dtype}"])).notes
    else:
        made = planned(*SMALL)
        model = made.recipe.model.model_copy(update={"dtype": dtype})
        made = replace(made, recipe=made.recipe.model_copy(update={"model": model}))
        notes = list(_about_dtype(made, chosen=False))
    assert any("set model.dtype=float32" in note for note in notes) == told


if __name__ == "__main__":
    step_in_own_process(*sys.argv[1:])
