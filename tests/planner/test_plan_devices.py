"""The plan of several devices to a controller: who does what, what judges take, what cannot work and who would idle."""

import io
import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Declaration
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.counts import count
from mmrl.planner.device_roles import calls, idle, inside, refusals, rows, split_of
from mmrl.planner.fit_check import does_not_fit
from mmrl.planner.judges import Asked, on_devices
from mmrl.planner.plan_data import Plan
from mmrl.planner.render import render
from mmrl.rewards.async_scoring import Entry, batches
from mmrl.rewards.judging.server import CACHE
from mmrl.rewards.scoring import check
from mmrl.step.batch import chunks
from mmrl.step.objectives import load_objective
from tests.support import planning

allow_cpu_only()  # before transformers imports torchvision

JUDGE = Path(__file__).resolve().parents[2] / "pipelines" / "vlm" / "models" / "shapes-judge"
SMALL = ["device=cpu", "train.prompts_per_step=6", "train.group_size=8", "train.micro_batch_size=8", "sampling.steps=3"]
JUDGED = [*SMALL, "sampling.window=null", "rewards.0.batch_size=8", "eval.rewards=[]"]
URL = "rewards=[{name: judge, options: {model: {url: 'http://127.0.0.1:9/v1', name: a}, rubric: '{{ image }}'}}]"


def planned(*changes, **more):
    return planning.planned("shapes-judge", *JUDGED, *changes, **more)


def planned_in_short(*changes, **more):
    return planning.planned_in_short("shapes-judge", *JUDGED, *changes, **more)


def rendered(made, width=140):
    console = Console(file=io.StringIO(), width=width)
    render(made, console)
    return " ".join(console.file.getvalue().split())


def asked_of(*changes):
    loaded = load_recipe(["shapes-judge"], [*JUDGED, *changes])
    recipe = loaded.recipe
    return on_devices(recipe, check(recipe.rewards), check(recipe.eval.rewards))


def counted(recipe, asked, entries=2):
    """A plan with its counts alone."""
    return Plan(recipe, "cpu", None, counts=count(recipe, entries), asked=list(asked))


@pytest.fixture(scope="module")
def adaptive():
    return planned("controllers=2", "devices_per_controller=2", "placement={type: adaptive, judges: 1, sleep: true}")


@pytest.fixture(scope="module")
def partial():
    return planned("devices_per_controller=2", "placement=partial")


# -- the models that judge -------------------------------------------------------------------------------------------


def test_a_judge_counts_with_the_bytes_that_it_has_when_it_is_loaded(tmp_path):
    pytest.importorskip("torchvision")
    from mmrl.rewards.judging.local import LocalModel

    model = LocalModel(str(JUDGE)).model.half()  # as it is stored
    parameters = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "sharded", max_shard_size="1MB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    for path, dtype in ((JUDGE, "auto"), (JUDGE, "float32"), (tmp_path / "sharded", "auto")):
        (one,), problems, notes = asked_of(f"rewards.0.options.model={{path: {path}, dtype: {dtype}}}")
        real = sum(p.nbytes for p in model.to(torch.float32 if dtype == "float32" else torch.float16).parameters())
        assert (one.parameters, one.bytes, problems, notes) == (parameters, real, [], [])
        assert one.what == f"{path.name}, {'float32' if dtype == 'float32' else 'float16'}"


def test_what_cannot_be_counted_is_said_and_what_is_not_there_is_refused(tmp_path):
    (one,), problems, notes = asked_of("rewards.0.options.model=nobody/has-this-judge")
    assert (one.bytes, problems) == (0, [])
    assert notes == [
        "rewards (judge): nobody/has-this-judge is not counted, its weights cannot be read here "
        "(it is not in the hub's cache, and HF_HUB_OFFLINE forbids to download it)"
    ]
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 9)
    assert "model.safetensors: " in asked_of(f"rewards.0.options.model={tmp_path}")[2][0]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert "(gone.safetensors is missing)" in asked_of(f"rewards.0.options.model={tmp_path}")[2][0]
    for text in ("[]", "{", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert len(asked_of(f"rewards.0.options.model={tmp_path}")[2]) == 1
    assert asked_of("rewards.0.options.model=/not/there")[1] == [
        "rewards (judge): there is no model /not/there; correct its options"
    ]
    with pytest.raises(UserError, match="write a path"):
        asked_of("rewards.0.options.model=3")


PICTURES = """
import mmrl
from mmrl.core.reward_contract import Weights

@mmrl.reward(device=True, models=lambda options: [Weights(options["path"], "float32")])
def own(samples, *, context, path):
    return [0.0] * len(samples)
"""


def test_a_pipeline_that_a_reward_reads_with_counts_with_all_its_models(tmp_path):
    file, model = tmp_path / "own.py", tmp_path / "model"
    file.write_text(PICTURES)
    shutil.copytree(JUDGE.parents[2] / "diffusion" / "models" / "shapes-sd3", model)
    own = f"rewards=[{{name: '{file}:own', options: {{path: '{model}'}}}}]"
    asked, problems, notes = asked_of(own)
    pipe = StableDiffusion3Pipeline.from_pretrained(model)
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert len(parts) == 5
    stored = {t.data_ptr(): t.numel() for part in parts for t in part.state_dict().values()}  # tied ones once
    numbers = sum(stored.values())
    assert (asked[0].parameters, asked[0].bytes, problems, notes) == (numbers, 4 * numbers, [], [])
    (model / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    asked, _, notes = asked_of(own)
    assert asked[0].bytes == 0
    assert "no vae/diffusion_pytorch_model.safetensors" in notes[0]
    (model / "model_index.json").write_text("{}")
    assert "names no model that is there" in asked_of(own)[2][0]


def test_a_reward_of_ones_own_that_names_no_model_and_one_that_is_asked_elsewhere(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import mmrl\n@mmrl.reward(device=True)\ndef score(samples, *, context):\n    return [0.0]\n")
    asked, problems, notes = asked_of(f"rewards=[{{name: {own}}}]", "eval.rewards=[{name: clip}]")
    assert [(one.label, one.trained_on) for one in asked] == [("own", True), ("clip", False)]
    assert problems == []
    assert "own): it does not declare its model" in notes[0]
    assert asked_of(URL) == ([], [], [])


def test_a_model_that_judges_is_there_always_or_only_while_it_judges():
    judge = asked_of()[0][0].bytes
    awake = planned("devices_per_controller=2", "placement=partial", "device=cuda")
    asleep = planned("devices_per_controller=2", "placement={type: partial, sleep: true}", "device=cuda")
    assert {p.name: p.parts.get("rewards' models") for p in awake.phases} == dict.fromkeys(
        ("encode", "sample", "decode", "train", "optimizer"), judge
    )
    assert {p.name: p.parts["rewards' models"] for p in asleep.phases if "rewards' models" in p.parts} == {
        "judge": judge
    }
    assert [p.name for p in asleep.phases] == ["encode", "sample", "decode", "judge", "train", "optimizer"]
    assert asleep.host - awake.host == judge
    assert awake.peak.total - asleep.peak.total == judge
    where = {role.name: role.where for role in asleep.roles}
    assert where["reward judge"] == "judge, else in host memory"


@pytest.mark.slow
def test_a_judge_in_a_server_counts_with_what_the_server_takes():
    judged = "rewards.0.options.model={{vllm: {model}, args: {{gpu_memory_utilization: 0.3, dtype: float32}}}}"
    weights = 2 * asked_of()[0][0].bytes
    two = ["devices_per_controller=2", "placement={type: partial, sleep: true}", judged.format(model=JUDGE)]
    made = planned(*two)
    (one,) = [a for a in made.asked if a.label == "judge"]
    assert (one.bytes, one.weights, one.what) == (
        weights + CACHE,
        weights,
        "shapes-judge, float32, in a separate server",
    )
    assert made.problems == []
    assert rows(made) == [("0", "sample; judge asleep", "train; judge asleep"), ("1", "judge", "train; judge asleep")]
    made = planned(*two, "device=cuda", device_memory=2**33)
    assert {p.name: p.parts["rewards' models"] for p in made.phases if "rewards' models" in p.parts} == {
        "judge": int(0.3 * 2**33)
    }
    assert made.host == planned("device=cuda").host + weights
    assert "its server takes 30% of the device's memory, which is not known" in " ".join(
        planned_in_short(*two, "device=cuda").notes
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_a_judge_over_several_devices_is_refused_beside_others_and_taken_alone(devices):
    served = f"rewards.0.options.model={{vllm: {JUDGE}, args: {{tensor_parallel_size: 2}}}}"
    problems = " ".join(planned_in_short(served, f"controllers={devices}").problems)
    assert ("rewards (judge): its server needs 2 devices, and each of this run's 2 devices" in problems) == (
        devices == 2
    )
    assert ("remove tensor_parallel_size" in problems) == (devices == 2)


def test_a_judge_that_has_no_room_in_its_share_is_refused():
    weights = asked_of()[0][0].weights

    def problems(**args):
        model = json.dumps({"vllm": str(JUDGE), "args": args})
        made = planned_in_short(f"rewards.0.options.model={model}", "device=cuda", device_memory=10 * weights)
        return " ".join(made.problems)

    refused = problems(gpu_memory_utilization=0.05)
    assert "its server may use 5% of" in refused
    assert "raise options.model.args.gpu_memory_utilization" in refused
    assert "its server may use" not in problems(gpu_memory_utilization=0.2)
    assert "its server may use" not in problems(gpu_memory_utilization=0.06, tensor_parallel_size=2)


def test_an_engine_that_sleeps_is_there_while_it_samples():
    two = ["devices_per_controller=2", "rollout.engine=vllm_server"]
    recipe = [*two, "train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4"]
    awake, asleep = (planning.planned("sums", *recipe, f"placement={{sleep: {sleep}}}") for sleep in ("false", "true"))
    assert {p.name for p in awake.phases if "engine" in p.parts} == {p.name for p in awake.phases}
    assert {p.name for p in asleep.phases if "engine" in p.parts} == {"sample", "decode"}
    assert rows(asleep) == [("0 to 1", "sample", "train; engine asleep")]
    assert {r.name: r.where for r in asleep.roles}["engine"] == "sample and decode, else freed"


# -- who does what ---------------------------------------------------------------------------------------------------


def test_the_drawing_of_an_adaptive_placement(adaptive):
    assert adaptive.problems == []
    assert rows(adaptive) == [
        ("0", "sample, at first; judge asleep", "train; judge asleep"),
        ("1", "judge, at first", "train; judge asleep"),
    ]
    text = rendered(adaptive)
    assert "shapes-judge on cpu, one controller, the first of 2 devices" in text
    assert "placement: adaptive, 2 controllers x 2 devices" in text
    assert "of a controller: 3 sampling micro-batches on 1; 3 calls of judge on 1; 6 slices of an update on 2" in text
    assert "between controllers: the gradients" in text
    assert "between a controller and its other devices, on their host, per step: up to about features" in text
    assert "else freed" in text


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        (["placement=colocate"], [("0 to 3", "sample, then judge", "train")]),
        (["placement=adaptive"], [("0 to 3", "sample, then judge, at first", "train")]),
        (["placement=partial"], [("0 to 1", "sample", "train"), ("2 to 3", "judge", "train")]),
        (
            ["placement={type: partial, judges: 1}", "rewards.0.label=taste"],
            [("0 to 2", "sample", "train"), ("3", "judge (taste)", "train")],
        ),
    ],
)
def test_devices_that_do_the_same_stand_together(changes, drawn):
    recipe = load_recipe(["shapes-judge"], [*JUDGED, "devices_per_controller=4", *changes]).recipe
    label = recipe.rewards[0].label or "judge"
    assert rows(counted(recipe, [Asked(label, True, 8)])) == drawn
    assert rows(counted(recipe, [Asked(label, False, 8)]))[0] == ("0 to 3", "sample", "train")


def test_what_crosses_inside_a_controller(partial):
    m, picture = partial.measured, 3 * 32 * 32
    assert partial.inside == {
        "features": m.features * 6,
        "samples": 48 * (m.trajectory + picture),
        "pictures to judge": 48 * picture,
        "slices": 48 * m.trajectory,
    }
    assert partial.phases[-1].parts["gradients being summed"] == partial.phases[-1].parts["gradients"]
    alone = partial.recipe.model_copy(update={"devices_per_controller": 1, "placement": Placement()})
    made = replace(partial, recipe=alone)
    assert inside(made, load_objective(alone), picture) == {}
    assert "placement:" not in rendered(made)


def test_devices_that_keep_their_role_are_drawn_with_what_they_do():
    def opened(devices, more=""):
        settings = f"placement={{type: disaggregated, staleness: 2{more}}}"
        return load_recipe(["shapes-judge"], [*JUDGED, f"devices_per_controller={devices}", settings]).recipe

    recipe, judge = opened(4, ", judges: 1"), Asked("judge", True, 8)
    training, ahead = ("0 to 1", "wait for samples", "train"), "sample 2 steps ahead"
    assert rows(counted(recipe, [judge])) == [training, ("2", ahead, ahead), ("3", "judge", "judge")]
    assert rows(counted(opened(4), [])) == [training, ("2 to 3", ahead, ahead)]
    objective = load_objective(recipe)
    assert list(refusals(Plan(recipe, "cpu", None, asked=[judge]), objective)) == []
    (none_left,) = refusals(Plan(opened(2), "cpu", None, asked=[judge]), objective)
    assert "set devices_per_controller to 3 or more" in none_left
    (idle_judge,) = refusals(Plan(recipe, "cpu", None, asked=[]), objective)
    assert "placement.judges" in idle_judge
    made = planning.planned("shapes-judge", *SMALL, "devices_per_controller=3", "placement=disaggregated")
    gradients = made.roles[1].bytes  # as large as what is given to the one that samples
    assert made.inside["weights"] == pytest.approx(gradients, rel=1e-4)
    lent = "placement={type: disaggregated, trainers: 2, judges: 1, lend: true}"
    lends = planning.planned("shapes-judge", *SMALL, "devices_per_controller=4", lent)
    assert lends.inside["weights"] == pytest.approx(2 * gradients, rel=1e-4)  # the second trainer gets them too
    assert rows(lends)[0] == ("0 to 1", "sample or judge while it waits", "train")
    (sampling,), (before,) = ([p for p in one.phases if p.name == "sample"] for one in (lends, made))
    assert sampling.parts["borrowed weights"] == pytest.approx(gradients, rel=1e-4)
    assert "borrowed weights" not in before.parts
    moving, both = opened(4, ", split: adaptive"), "sample 2 steps ahead or judge; sample at first"
    assert rows(counted(moving, [judge])) == [training, ("2 to 3", both, both)]
    assert list(refusals(Plan(opened(2, ", split: greedy"), "cpu", None, asked=[judge]), objective)) == []
    (nothing,) = refusals(Plan(moving, "cpu", None, asked=[]), objective)
    assert "placement.split: no reward of this recipe runs on a device" in nothing


# -- what is wrong, and who idles ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["rewards=[{name: shapes}]"], "no reward of this recipe runs on a device"),
        (["rewards=[{name: shapes}]", "eval.rewards=[{name: clip}]"], "no reward of this recipe runs on a device"),
        ([URL], "no reward of this recipe runs on a device"),
        (
            [
                "algorithm={type: draft, last_steps: 2}",
                "rewards=[{name: 'colour:target', options: {rgb: [255, 0, 0]}}]",
                "train.group_size=1",
            ],
            "draft does not sample before its updates",
        ),
    ],
)
def test_a_placement_with_nothing_to_place_is_refused(changes, why):
    def refused(kind):
        several = ["devices_per_controller=2", f"placement={kind}"]
        recipe = load_recipe(["shapes-judge"], [*JUDGED, *several, *changes]).recipe
        asked, problems, _ = asked_of(*changes)
        assert problems == []
        return list(refusals(Plan(recipe, "cpu", None, asked=asked), load_objective(recipe)))

    for kind in ("partial", "adaptive"):
        (problem,) = refused(kind)
        assert problem.startswith(f"placement: {kind} has some devices judge")
        assert why in problem
        assert problem.endswith("; set placement=colocate")
    assert refused("colocate") == []


def test_a_plan_says_all_of_it_at_once():
    changes = ["rewards.0.options.model=/not/there", "train.micro_batch_size=48", "rewards.0.batch_size=48"]
    made = planned("devices_per_controller=4", "placement=partial", *changes)
    assert made.problems == ["rewards (judge): there is no model /not/there; correct its options"]
    assert [note for note in made.notes if "bfloat16" not in note] == [  # not what depends on this machine's CPU
        "a controller's 1 sampling micro-batch cannot keep 2 devices busy; set sampling.batch_size=24 or less",
        "an update's 2 slices of a controller cannot keep 4 devices busy; set train.micro_batch_size=24 or less",
    ]
    own = planned_in_short("devices_per_controller=2", "placement=adaptive", "rewards=[{name: 'jpeg:compressibility'}]")
    assert "no reward of this recipe runs on a device" in own.problems[0]


def test_devices_of_one_machine_need_room_together(partial):
    peak, recipe = partial.peak, partial.recipe.model_copy(update={"controllers": 2})
    needed = 4 * peak.total - 2 * peak.parts["trajectories"]
    assert does_not_fit(replace(partial, recipe=recipe, device_memory=needed)) == []
    (problem,) = does_not_fit(replace(partial, recipe=recipe, device_memory=needed - 1))
    assert problem.startswith("devices_per_controller: 4 devices (2 controllers x 2) need ")
    assert "lower controllers or devices_per_controller, or name a cluster" in problem
    assert (
        does_not_fit(replace(partial, recipe=recipe.model_copy(update={"ray": "auto"}), device_memory=needed - 1)) == []
    )
    (problem,) = does_not_fit(replace(partial, device_memory=peak.total - 1))
    assert f"the phase {peak.name} needs" in problem
    assert "a smaller model for judge" not in problem, "it is a small part"
    if torch.cuda.device_count() < 4:
        (problem,) = does_not_fit(replace(partial, recipe=recipe, device="cuda", device_memory=2**34))
        assert "4 devices (2 controllers x 2) take a GPU each, and this machine has" in problem


def test_a_judge_that_fills_the_device_is_told_to_sleep_or_to_be_smaller(partial):
    judge = replace(partial.asked[0], bytes=2**30)
    phases = [replace(p, parts={**p.parts, "rewards' models": 2**30}) for p in partial.phases]
    (problem,) = does_not_fit(replace(partial, asked=[judge], phases=phases, device_memory=2**30))
    edits = problem.partition("Try: ")[2].split("; ")
    assert "placement={type: partial, sleep: true}" in edits[:2]
    assert "a smaller model for judge, or one on a separate server (a judge's model: {url: ..., name: ...})" in edits
    asleep = partial.recipe.model_copy(update={"placement": Placement(type="partial", sleep=True)})
    (problem,) = does_not_fit(replace(partial, recipe=asleep, asked=[judge], phases=phases, device_memory=2**30))
    assert "sleep: true" not in problem


@cache
def judge_recipe():
    return load_recipe(["shapes-judge"]).recipe


@given(
    prompts=st.integers(1, 9),
    group=st.integers(2, 9),
    micro=st.integers(1, 40),
    batch=st.none() | st.integers(1, 80),
    size=st.none() | st.integers(1, 30),
    devices=st.integers(2, 8),
    kind=st.sampled_from(["colocate", "partial", "adaptive", "disaggregated"]),
    entries=st.integers(1, 3),
)
@settings(deadline=None, max_examples=60)
def test_a_note_on_idle_devices_is_true_and_its_edit_mends_it(
    prompts, group, micro, batch, size, devices, kind, entries
):
    base = judge_recipe()
    train = {"prompts_per_step": prompts, "group_size": group, "micro_batch_size": micro}
    changes = {
        "train": base.train.model_copy(update=train),
        "sampling": base.sampling.model_copy(update={"batch_size": batch}),
        "devices_per_controller": devices,
        "placement": base.placement.model_copy(update={"type": kind}),
    }
    recipe = base.model_copy(update=changes)
    asked = Asked("judge", True, size)
    made = counted(recipe, [asked], entries)
    split, c = split_of(made), made.counts
    runs = list(chunks(list(range(c.samples)), c.batch))
    config = base.rewards[0].model_copy(update={"batch_size": size})
    entry = Entry("judge", config, SimpleNamespace(declaration=Declaration()), None)  # type: ignore[arg-type]
    sample = SimpleNamespace(tensor=None)
    real = sum(len(batches(entry, range(len(run)), [sample] * len(run))) for run in runs)
    assert calls(c, size) == real
    notes = list(idle(made))
    enough = len(runs) >= split.rollout and real >= (split.judge or split.rollout)
    enough = enough and c.slices >= recipe.placement.training(devices)
    assert enough == (not notes)
    for note in notes:
        if found := re.search(r"set ([\w.]+)=(\d+) or less", note):
            section, key = found[1].split(".")
            before = changes[section]
            changes[section] = before.model_copy(update={key: min(int(found[2]), getattr(before, key) or 10**6)})
        else:
            assert "lower devices_per_controller, or raise train.prompts_per_step" in note
    rest = list(idle(counted(base.model_copy(update=changes), [asked], entries)))
    assert not [note for note in rest if "set " in note and note in notes]
    if not [note for note in notes if "lower" in note]:
        assert not [note for note in rest if "sampling micro" in note or "slice" in note]


def test_a_reward_that_cannot_sleep_is_not_said_to(tmp_path):
    head = (
        f"import mmrl\nfrom mmrl.core.reward_contract import Weights\nM = lambda options: [Weights({str(JUDGE)!r})]\n"
    )
    own = "@mmrl.reward(device=True, models=M)\nclass Own:\n"
    own += "    def score(self, samples, *, context):\n        return [0.0 for _ in samples]\n"
    sleeps = "    def sleep(self, device):\n        pass\n    def wake(self, device):\n        pass\n"
    recipe = load_recipe(
        ["shapes-judge"], [*JUDGED, "devices_per_controller=2", "placement={type: partial, sleep: true}"]
    ).recipe
    for name, able in (("awake", False), ("asleep", True)):
        file = tmp_path / f"{name}.py"
        file.write_text(head + own + sleeps * able)
        asked, _, _ = asked_of(f"rewards=[{{name: {file}:Own}}]")
        assert [one.sleeps for one in asked] == [able]
        assert ("Own asleep" in str(rows(counted(recipe, asked)))) == able
