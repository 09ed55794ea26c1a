"""A teacher that is a reward: the same run as with a teacher in the process, on one device and on several."""

import json
import math
from pathlib import Path

import pytest
import torch

from mmrl.app.build import build, restored
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.config.schema import Reward
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.reward_contract import Context, Failed, Span
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId, Segment, Slot, TextRows, Tokens
from mmrl.logging.metrics import read_numbers
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan import plan
from mmrl.rewards.bench import measure
from mmrl.rewards.loading import build as build_reward
from mmrl.rewards.loading import find
from mmrl.rewards.scoring import check
from mmrl.rewards.serve import RewardServer
from mmrl.rollout.collect import collect_batch, slices, values_of_tokens, written_places
from mmrl.runtime.start import train
from mmrl.step.step_metrics import StepMetrics
from mmrl.training.loop import computed, train_step
from tests.support import asleep, tiny
from tests.support.episodes import SMALL
from tests.support.planning import LEFT_OUT, without_the_step
from tests.support.teachers import write_letters

allow_cpu_only()  # before transformers imports torchvision
ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
name: taught
pipeline: llm/chat
model: {path: model}
data:
  mixture:
    - {name: jsonl, label: plain, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
    - {name: jsonl, label: other, train: {path: data.jsonl, heldout: 8}, heldout: null}
sampling: {max_new_tokens: 8}
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 2, prompts_per_step: 4, group_size: 2, micro_batch_size: 3, updates_per_step: 2}
optim: {lr: 3.0e-3}
eval: {every: null}
checkpoint: {every: 2}
device: cpu
"""
LARGE = "{name: teacher, label: large, weight: 0, options: {path: large, dtype: float32}}"
PLACED = [f"rewards=[{{name: reward.py}}, {LARGE}]", "teacher={reward: large, divergence: sampled, weight: 0.7}"]
INSIDE = ["rewards=[{name: reward.py}]", "teacher={model: large, divergence: sampled, weight: 0.7}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("placed")
    tiny.language_model(folder / "model")
    write_letters(folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def made(folder, *overrides):
    return load_recipe([folder / "recipe.yaml"], [*overrides])


def trained(folder, out, *overrides):
    """The weights of a run, and its metrics."""
    train(made(folder, *overrides), out)
    policy = restored(out, "latest")[0].policy
    return {name: p.detach().clone() for name, p in policy.trainable.items()}, read_numbers(out / "metrics.jsonl")


def assert_same(one, other):
    (weights, rows), (others, expected) = one, other
    assert max((weights[name] - others[name]).abs().max() for name in weights) < 2e-6
    for row, wanted in zip(rows, expected, strict=True):
        for name in (n for n in wanted if "teacher/" in n or n == "optim/grad_norm"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name
    assert rows[0]["teacher/kl"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["sampling.temperature=0.7"]])
def test_a_reward_teaches_as_the_model_in_the_process_does(folder, tmp_path, more):
    placed = trained(folder, tmp_path / "placed", *PLACED, *more)
    assert_same(placed, trained(folder, tmp_path / "inside", *INSIDE, *more))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placed", "inside"),
    [
        (["devices_per_controller=2", "placement={type: partial, judges: 1, sleep: true}"], []),
        (
            ["devices_per_controller=3", "placement={type: disaggregated, lend: true}"],  # one trains, judges, samples
            ["devices_per_controller=2", "placement={type: disaggregated}"],
        ),
    ],
)
def test_it_teaches_from_a_device_of_its_own(folder, tmp_path, placed, inside):
    pytest.importorskip("ray")
    expected = trained(folder, tmp_path / "inside", *INSIDE, *inside)
    assert_same(trained(folder, tmp_path / "placed", *PLACED, *placed), expected)
    done = [json.loads(line) for line in (tmp_path / "placed" / "placement.jsonl").read_text().splitlines()]
    roles = {(line["device"], line["role"]) for line in done if "device" in line}
    judges = {device for device, role in roles if role == "judge"}
    assert judges
    assert "sleep" in placed[1] or not {device for device, role in roles if role == "rollout"} >= judges


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "layout"),
    [
        ("ray", ["controllers=2", "train.backend=fsdp"]),
        ("megatron.core", ["devices_per_controller=2", "train.backend=megatron", "train.pipeline_parallel=2"]),
    ],
)
def test_it_teaches_a_student_in_parts(folder, tmp_path, needs, layout):
    pytest.importorskip("ray")
    pytest.importorskip(needs)
    expected = trained(folder, tmp_path / "inside", *INSIDE)
    assert_same(trained(folder, tmp_path / "placed", *PLACED, *layout), expected)


ANEW = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{{ ' ok' if message['role'] == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that writes something behind every earlier turn, so that each is read behind a text of its own."""


def test_every_turn_of_an_episode_is_taught_behind_what_it_read(tmp_path):
    (tmp_path / "anew.jinja").write_text(ANEW)
    world = "{name: guess, options: {most: 9}, max_turns: 3, max_tokens: 150, history: template, role: user}"
    words = [*SMALL, f"environment={world}", f"model.chat_template={tmp_path / 'anew.jinja'}"]
    critic = ROOT / "pipelines" / "llm" / "models" / "sums-critic"
    found = []
    for teacher in ({"model": str(critic)}, {"reward": "large"}):
        options = {"path": str(critic), "dtype": "float32"}
        judge = {"name": "teacher", "label": "large", "weight": 0, "options": options}
        listed = [{"name": "environment"}, *([judge] if "reward" in teacher else [])]
        more = [f"rewards={json.dumps(listed)}", f"teacher={json.dumps(teacher | {'divergence': 'sampled'})}"]
        run = build(load_recipe(["sums"], [*words, *more]).recipe)
        row = train_step(run, 0, Clock(torch.device("cpu")))[0]
        found.append({name: row[name] for name in ("teacher/kl", "optim/grad_norm", "episode/turns")})
        run.pipeline.close()
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0]["teacher/kl"] > 0.1
    assert found[0]["episode/turns"] > 1


def test_alone_it_teaches_its_prompts_and_no_sample_that_failed(folder, tmp_path):
    """The rows of the other source, and those that the reward leaves out, have a divergence of 0."""
    (folder / "half.py").write_text(
        "import mmrl\nfrom mmrl.core.reward_contract import Failed, Spans\n\n\n"
        "@mmrl.reward(inputs=('tokens',), spans='token')\ndef score(samples, *, context):\n"
        "    left_out = [s.id.sample == 1 for s in samples]\n"
        "    spans = [Spans([(n, n + 1, -1.0 - n) for n in range(s.tokens.count)]) for s in samples]\n"
        "    return {'score': [Failed('left out') if x else 0.0 for x in left_out], 'spans': spans}\n"
    )
    alone = "rewards=[{name: half.py, weight: 0, on_failure: drop}]"
    run = build(made(folder, alone, "teacher={reward: half, divergence: sampled, prompts: plain}").recipe)
    assert "teacher_kl" not in run.objective.needs
    slots = run.controller.slots(0, run.prompts, 4)
    batch = collect_batch(run, slots, 0, Clock(torch.device("cpu")), StepMetrics(4))
    taught = 0
    for one in slices(run, batch, list(range(8))):
        new = computed(run, one, 0, StepMetrics())
        for n, (slot, name) in enumerate(zip(one.rows.slots, one.rows.ids, strict=True)):
            own, kl = new["log_probs"][n].detach(), new["teacher_kl"][n].detach()
            inside = one.old["mask"][n] * (name.sample != 1 and slot.prompt.id.startswith("plain"))
            assert torch.allclose(kl, inside * (own + 1 + torch.arange(len(own))), atol=1e-6)
            taught += int(inside.any())
    assert 0 < taught < 8
    assert train_step(run, 0, Clock(torch.device("cpu")))[0]["teacher/kl"] > 0


def of_tokens(*texts, media=(), asked=2, temperature=1.0):
    """Samples of these tokens, the first ``asked`` of each a prompt."""
    found = [Tokens(tuple(ids), ((asked, len(ids)),), (0,), temperature) for ids in texts]
    return [Sample(Prompt("1", "?", media=media), SampleId(0, 0, 0, n), tokens=of) for n, of in enumerate(found)]


def test_it_sleeps_and_says_what_the_model_does_in_any_batch(folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    options = {"path": str(folder / "large"), "batch_size": 2, "dtype": "float32"}
    reward = build_reward(find("teacher"), options)
    texts = [[5, 6, 7, 8, 9], [3, 4, 5], [9, 8], [4, 4, 8, 7, 6, 5]]
    samples = of_tokens(*texts, temperature=0.7)
    several = Tokens((5, 6, 7, 8, 3, 4, 5), ((2, 3), (6, 7)), (0, 4), 0.7)  # two texts, and one token that was told
    samples.append(Sample(Prompt("1", "?"), SampleId(0, 0, 0, 9), tokens=several))
    asleep.scores_the_same(reward.sleeper, lambda: reward.call(samples, context=Context())["score"], monkeypatch)
    said = reward.call(samples, context=Context())
    model = AutoModelForCausalLM.from_pretrained(folder / "large", dtype=torch.float32)

    def by_hand(ids, places):
        found = (model(torch.tensor([ids])).logits[0].detach() / 0.7).log_softmax(-1)
        return [found[n - 1, ids[n]].item() for n in places]

    expected = [by_hand(ids, range(2, len(ids))) for ids in texts]
    expected.append(by_hand([5, 6, 7, 8], [2]) + by_hand([3, 4, 5], [2]))
    for spans, score, values in zip(said["spans"], said["score"], expected, strict=True):
        assert [span.value for span in spans.spans] == pytest.approx(values, abs=1e-5)
        assert score == pytest.approx(sum(values) / max(1, len(values)), abs=1e-5)


def test_what_it_cannot_read_fails_alone(folder):
    reward = build_reward(find("teacher"), {"path": str(folder / "large")})
    seen = of_tokens([3, 4, 5], media=(Media("image", path="x.png"),))
    said = reward.call([*of_tokens([3, 4, 5], [3, 4] * 3000, [3, 4, 10**6]), *seen], context=Context())
    assert math.isfinite(said["score"][0])
    why = [of.reason for of in said["score"][1:] if isinstance(of, Failed)]
    for reason, part in zip(why, ("the teacher's context", "vocabulary", "pictures"), strict=True):
        assert part in reason
    assert said["spans"][1:] == [None] * 3


def test_the_plan_names_it_where_judges_are(folder):
    more = ["device=cuda", "devices_per_controller=2", "placement={type: partial, judges: 1, sleep: true}"]
    planned = plan(made(folder, *PLACED, *more), gpu=GPUS["h100-80g"], gpus=2)
    assert not planned.problems
    (role,) = [role for role in planned.roles if role.name == "reward large"]
    assert role.bytes == pytest.approx((folder / "large" / "model.safetensors").stat().st_size, rel=0.05)
    assert "teacher" not in {role.name for role in planned.roles}


REWARDS = "rewards=[{name: reward.py}, %s]"
REFUSED = {
    "both": (["teacher.model=large"], "has model and reward; remove one", "teacher.model=null"),
    "neither": (["teacher.reward=null"], "has neither model nor reward; write one", "teacher.reward=large"),
    "no such reward": (["teacher.reward=small"], "'small' is no label of rewards", "teacher.reward=large"),
    "a weight": (["rewards[1].weight=1"], "set its weight to 0", "rewards[1].weight=0"),
    "the whole vocabulary": (["teacher.divergence=reverse"], "set it to sampled", "teacher.divergence=sampled"),
    "no log-probs": (
        ["teacher.reward=reward", "rewards[0].weight=0", "rewards[1].weight=0"],
        "says nothing of single tokens",
        "teacher.reward=large",
    ),
    "another vocabulary": (
        ["rewards[1].options.path=foreign"],
        "rewards[1].options.path: ",
        "rewards[1].options.path=large",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_teach_is_refused_by_the_plan_with_an_edit_that_works(folder, what):
    overrides, why, edit = REFUSED[what]

    def problems(*more):
        try:
            with without_the_step():
                return "\n".join(plan(made(folder, *PLACED, *overrides, *more)).problems)
        except (RecipeError, UserError) as error:
            return str(error)

    assert why in problems()
    assert problems(edit) == LEFT_OUT


def test_pictures_are_refused_and_tokens_are_not_sent(folder):
    with pytest.raises(RecipeError, match="makes pictures, and a reward reads tokens alone"):
        load_recipe(["shapes-lora"], ["teacher={reward: large, divergence: reverse}"])
    with pytest.raises(RecipeError, match="reads pictures, and a reward reads tokens alone"):
        load_recipe(["scenes"], ["teacher={reward: large, divergence: sampled}"])
    with pytest.raises(UserError, match="reads 'tokens', and this pipeline makes pictures"):
        check([Reward(name="teacher", options={"path": str(folder / "large")})], "image")
    with pytest.raises(UserError, match="name it in the rewards of a recipe"):
        measure("teacher", [], {"path": str(folder / "large")}, of="response")
    with pytest.raises(UserError, match="tokens are not sent"):
        build_reward(find("http"), {"url": "http://127.0.0.1:1", "inputs": ["tokens"]})
    with pytest.raises(UserError, match="reads tokens, which are not sent"):
        RewardServer("teacher", port=0, options={"path": str(folder / "large")})


def test_values_of_tokens_count_with_a_weight(folder):
    """What is told between written tokens has none."""
    rows = TextRows.answers(
        [Slot(0, 0, 0, Prompt("1", "?"))],
        [SampleId(0, 0, 0, 0)],
        [("", torch.tensor([1, 2]))],
        [torch.tensor([3, 4, 5, 6])],
        torch.tensor([False]),
        behind=[[Segment(2, 4, "written"), Segment(4, 5, "told"), Segment(5, 6, "written")]],
    )
    (tokens,) = rows.spelled(1.0)
    assert tokens == Tokens((1, 2, 3, 4, 5, 6), ((2, 4), (5, 6)))
    assert tokens.count == 3
    assert written_places(rows.segments[0]) == [0, 1, 3]
    assert values_of_tokens([Span(0, 2, 1.0), Span(1, 3, 0.5)], 3) == [1.0, 1.5, 0.5]
