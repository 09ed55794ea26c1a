"""Sampling ahead of training: which weights draw what, that a resumed run draws the same, and that devices do so at
once. The reference draws with the same versions in one process, one thing after another."""

import json
from dataclasses import replace

import pytest
import torch

from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.checkpoint import run_state
from mmrl.checkpoint.writer import Saver
from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core import checkpoint_reader as reader
from mmrl.core.clock import Clock
from mmrl.core.signals import Stop
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import DenoisingRows
from mmrl.logging.rundir import RunDir
from mmrl.models.policy import Version
from mmrl.placement import device_tasks
from mmrl.placement.adaptive import Split
from mmrl.placement.single_device import SingleDevice
from mmrl.placement.step_records import as_rows
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.rollout.async_rollout import AsyncRollout
from mmrl.rollout.dynamic_sampling import DynamicSampling
from mmrl.training.loop import train_step
from tests.support.runs import learned, rows, run, same_heldout
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before transformers imports torchvision

SMALL = ["train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4", "model.dtype=float32"]
TEXT = ["sums", *SMALL, "optim.lr=0.01", "optim.warmup_steps=0"]
# at a low temperature many groups are flat; each micro-batch is of one group
REPLACED = [*TEXT, "optim.lr=0.0003", "algorithm={type: dapo, max_attempts: 4}", "sampling.temperature=0.3"]
REPLACED += ["sampling.batch_size=4"]
PICTURES = ["shapes-lora", *SMALL, "sampling.steps=4", "sampling.window={size: 2}", "optim.lr=0.01"]
FORWARD = ["shapes-nft", *SMALL, "sampling.steps=4", "algorithm.noise_levels=2", "algorithm.old_decay_rate=0.2"]
JUDGED = [
    "train.steps=4",
    *SMALL,
    "eval.every=2",
    "eval.samples=8",
    "checkpoint.every=1",
    "rewards.0.batch_size=4",
    "devices_per_controller=3",
    "optim.schedule=constant",
]


class Lagging(SingleDevice):
    """Draws with the version it is given, in the process that trains."""

    def __init__(self):
        self.ever = {}

    def sample(self, run, chunks, how, clock, version=None):
        now = run.policy.version(run.policy.active)
        run.policy.load_version(version or now)
        drawn = list(super().sample(run, chunks, how, clock))
        run.policy.load_version(now)
        self.drawn = [trajectory for _, trajectory, _ in drawn]
        self.ever.update((i, t.rows([n])) for t in self.drawn for n, i in enumerate(t.ids))
        return iter(drawn)


class InTurn(AsyncRollout):
    """All rounds of a step, before anything else is done."""

    def _begin(self, *given):
        begun = super()._begin(*given)
        begun.ended.exception()
        return begun


class OneByOne(DynamicSampling):
    """Nothing is tried ahead."""

    def ahead(self, rounds, tried):
        return min(1, self.most - tried)


def with_part(run, name, part):
    """``run`` with another part, which its strategy is made of."""
    parts = {**run.rollout.parts, name: part}
    ahead = parts["ahead"]
    if name == "attempts":
        ahead.dynamic = part
    return replace(run, rollout=replace(run.rollout, parts=parts, strategy=ahead))


def in_turn(run):
    then = run.rollout.parts["ahead"]
    return with_part(run, "ahead", InTurn(then.staleness, then.partial, then.dynamic))


def opened(recipe, staleness=1, devices=None):
    name, *changes = recipe
    settings = f"placement={{type: disaggregated, staleness: {staleness}}}"
    less = [f"model.path={two_blocks()}"] if name.startswith("shapes") else []
    loaded = load_recipe([name], [*less, *changes, "devices_per_controller=2", settings])
    return in_turn(build(loaded.recipe, devices=devices or Lagging()))


def steps(run, first, last):
    return [train_step(run, n, Clock(torch.device("cpu")))[0] for n in range(first, last)]


def figures(found):
    return [
        {k: v for k, v in row.items() if not k.startswith(("balance/", "placement/", "time/", "reward_seconds/"))}
        for row in found
    ]


def replayed(run, trajectory, version):
    """The largest distance of the recorded log-probs from those under ``version``."""
    run.policy.load_version(version)
    with torch.no_grad():
        if isinstance(trajectory, DenoisingRows):
            new = run.pipeline.replay(trajectory, [0], frozenset({"log_probs"}), run.policy.using)["log_probs"]
            return (new - trajectory.log_probs[:, :1]).abs().max().item()
        new = run.pipeline.replay(trajectory, [0], frozenset({"log_probs"}), run.policy.using)["log_probs"]
        return ((new - trajectory.padded("log_probs")) * trajectory.padded("action_mask")).abs().max().item()


def log_probs(run, trajectory, action, version):
    """Of pictures under ``version``, float64 ``[B]``."""
    run.policy.load_version(version)
    with torch.no_grad():
        new = run.pipeline.replay(trajectory, [action], frozenset({"log_probs"}), run.policy.using)
    return new["log_probs"].squeeze(1).double()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "near"), [(TEXT, 1e-4), (PICTURES, 1e-6)], ids=["text", "pictures"])
def test_a_step_is_drawn_with_the_weights_of_some_steps_before(recipe, near):
    devices = Lagging()
    run = opened(recipe, devices=devices)
    versions = [run.policy.version("current")]
    found = []
    for n in range(3):
        found += steps(run, n, n + 1)
        versions.append(run.policy.version("current"))
    assert [row["sampling/stale_steps"] for row in found] == [0, 1, 1]
    drawn = devices.drawn[0]  # what was begun last, by step 2 and for step 3
    assert drawn.ids[0].step == 3
    assert replayed(run, drawn, versions[2]) < near
    assert replayed(run, drawn, versions[1]) > 10 * near
    assert replayed(run, drawn, versions[3]) > 10 * near


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [TEXT, PICTURES], ids=["text", "pictures"])
def test_older_samples_are_weighed_by_how_likely_they_have_become(recipe):
    found = steps(opened(recipe), 0, 3)
    for row in found:
        assert row["policy/ratio_max_dev"] == 0  # of the policy before the update, not of the one that drew
    assert found[0]["mismatch/weight_mean"] == pytest.approx(1, abs=1e-5)
    assert found[0]["mismatch/log_prob_gap_max"] < 1e-4
    assert found[2]["mismatch/log_prob_gap_max"] > 1e-3
    assert found[2]["mismatch/weight_mean"] != pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_several_updates_of_older_pictures_follow_the_decoupled_objective():
    """AReaL (arXiv 2505.24298), eq. 5, in float64: min(before / drew, cap) min(r A, clip(r) A), r = now / before."""
    cap, clip = 0.95, 1e-3
    settings = [f"rollout.importance_cap={cap}", f"algorithm={{type: flow_grpo, clip_range: {clip}, kl_coef: 0.0}}"]
    run = opened([*PICTURES, *settings, "train.updates_per_step=2"])
    replay, loss = run.pipeline.replay, run.objective.loss
    slices, losses = [], []

    def replaying(rows, actions, *given):
        slices.append((rows, *actions))
        return replay(rows, actions, *given)

    def losing(new, old, total):
        now, found = run.policy.version("current"), loss(new, old, total)
        losses.append((*slices[-1], now, old["advantages"].double(), total, found.value.item()))
        return found

    steps(run, 0, 1)
    drew = run.policy.version("current")
    steps(run, 1, 2)
    before = run.policy.version("current")
    run.pipeline.replay, run.objective.loss = replaying, losing
    row = steps(run, 2, 3)[0]
    run.pipeline.replay = replay
    assert (drew.updates, before.updates, losses[-1][2].updates) == (2, 4, 5)
    weights, ratios = [], []
    for rows_, action, now, advantages, total, value in losses:
        under = [log_probs(run, rows_, action, version) for version in (drew, before, now)]
        weights.append((under[1] - under[0]).exp())
        ratios.append((under[2] - under[1]).exp())
        a, r = advantages.clamp(-5, 5), ratios[-1]
        expected = -(weights[-1].clamp(max=cap) * torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)).sum() / total
        assert value == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    first, second = ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]
    assert max((r - 1).abs().max() for r in first) < 1e-6
    assert row["policy/first_ratio_max_dev"] == 0
    assert row["policy/ratio_max_dev"] == pytest.approx(max((r - 1).abs().max().item() for r in second), rel=1e-3)
    assert row["policy/ratio_max_dev"] > clip
    mean = torch.cat(weights).clamp(max=cap).mean().item()
    assert row["mismatch/weight_mean"] == pytest.approx(mean, abs=1e-6)
    assert 0 < row["mismatch/weight_clipped"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_clean_samples_are_compared_with_the_old_policy_that_drew_them(staleness):
    devices = Lagging()
    run = opened(FORWARD, staleness, devices)
    loss, compared, versions = run.objective.loss, [], []

    def losing(new, old, total):
        compared.append({name: new[name] for name in ("x0", "x_s", "sigma", "v_old")})
        return loss(new, old, total)

    run.objective.loss = losing
    for n in range(4):
        versions.append(run.policy.version("old"))
        compared.clear()
        (row,) = steps(run, n, n + 1)
        of = max(0, n - staleness)
        assert row["sampling/stale_steps"] == n - of
    now = run.policy.version("current")
    drawn = {i: rows for i, rows in devices.ever.items() if i.step == 3}
    ids = list(drawn)
    slots = [rows.slots[0] for rows in drawn.values()]
    for n, version in enumerate([*versions, now]):
        run.policy.load_version(version)
        again = torch.cat([run.pipeline.sample(slots[k : k + 4], ids[k : k + 4], [], 0).clean for k in range(0, 16, 4)])
        assert ((again - torch.cat([rows.clean for rows in drawn.values()])).abs().max() < 1e-6) == (n == of)
        gaps = []
        for one in compared:
            shown = [drawn[i].slots[0] for i in ids if (drawn[i].clean == one["x0"]).flatten(1).all(1).any()]
            with torch.no_grad():
                timestep = run.pipeline.adapter.timestep(one["sigma"])
                velocity = run.pipeline.velocity(one["x_s"], timestep, run.pipeline.batch_features(shown))
            gaps.append((velocity - one["v_old"]).abs().max())
        assert (max(gaps) < 1e-6) == (n == of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "staleness"),
    [
        (TEXT, 2),
        pytest.param(TEXT, 1, marks=pytest.mark.long),
        pytest.param(REPLACED, 2, marks=pytest.mark.long),
        (FORWARD, 2),
    ],
)
def test_a_resumed_run_draws_again_what_was_under_way(recipe, staleness, tmp_path):
    whole = steps(opened(recipe, staleness), 0, 5)
    first = opened(recipe, staleness)
    found = steps(first, 0, 3)
    saver = Saver(tmp_path, keep=1)
    saver.begin(run_state.of_run(first, 3))
    saver.finish()
    second = opened(recipe, staleness)
    run_state.restore(second, reader.load(tmp_path, 3))
    found += steps(second, 3, 5)
    assert figures(found) == figures(whole)
    without = opened(recipe, staleness)
    run_state.restore(without, reader.load(tmp_path, 3))
    without.rollout.parts["ahead"]._versions = dict.fromkeys(
        range(4), without.policy.version("current")
    )  # had it kept no versions
    assert figures(steps(without, 3, 5)) != figures(whole)[3:]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.long), 2])
def test_replacements_are_drawn_with_the_weights_of_their_step(staleness):
    devices = Lagging()
    run = opened(REPLACED, staleness, devices)
    versions = [run.policy.version("current")]
    found = []
    for n in range(4):
        found += steps(run, n, n + 1)
        versions.append(run.policy.version("current"))
    for step in (2, 3):
        assert found[step]["sampling/rounds"] > 1
        again = [rows for i, rows in devices.ever.items() if i.step == step and i.attempt]
        gaps = [max(replayed(run, rows, version) for rows in again) for version in versions]
        assert gaps.pop(max(0, step - staleness)) < 1e-4
        assert min(gaps) > 1e-3


@pytest.mark.slow
def test_how_many_are_tried_ahead_changes_no_group_that_stands():
    """Nor the weights, to the bit: a micro-batch is of one group."""
    weights = []
    for made in (DynamicSampling, OneByOne):
        run = opened(REPLACED)
        run = with_part(run, "attempts", made(4))
        found = steps(run, 0, 4)
        weights.append([p.detach().clone() for p in run.policy.trainable.values()])
        asked = sum(row["sampling/groups"] for row in found), sum(row["sampling/rounds"] for row in found)
        if made is DynamicSampling:
            together = asked
    assert together[0] > asked[0]
    assert together[1] < asked[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_nothing_is_drawn_beyond_the_last_step():
    run = opened([*TEXT, "train.steps=3"], staleness=2)
    steps(run, 0, 3)
    assert not run.rollout.parts["ahead"]._begun
    assert run.pipeline.features.held == 0


def test_apart_each_device_keeps_its_role():
    board = TaskQueue(3, Placement())
    board.apart(Split(1, 1))
    assert board.scheduler.roles == ["train", "rollout", "judge"]
    for role in ("rollout", "judge"):
        board.put(Task(role, device_tasks.sample, ()))
    assert board.scheduler.next_task(0) is None
    assert board.take(2).role == "judge"
    assert board.scheduler.next_task(2) is None
    assert board.take(1).role == "rollout"


def test_what_an_earlier_step_waits_for_goes_first():
    board = TaskQueue(2, Placement())
    board.apart(Split(1, 0))
    for name, updates in (("later", 3), ("replacement", 2), ("another", 3), ("first", 1)):
        board.put(Task("rollout", device_tasks.sample, (name,), version=Version(updates, "current", {})))
    assert [board.take(1).arguments[0] for _ in range(4)] == ["first", "replacement", "later", "another"]


def test_work_that_goes_on_into_the_next_step_counts_in_both():
    board = TaskQueue(1, Placement())
    board.put(Task("rollout", device_tasks.sample, (), of=(4, 1)))
    board.take(0)
    began = board.scheduler.since[0]
    board.tell(board.scheduler.cut)
    (row,) = as_rows(board.scheduler.events, 4, 0)
    assert (row["of"], row["round"], row["cut"]) == (5, 1, True)
    board.tell(board.scheduler.new_step)
    board.done(0, "rollout", began, began, board.scheduler.start + 2.0)
    assert [(e.began, e.ended) for e in board.scheduler.events] == [(0.0, pytest.approx(2.0))]
    (row,) = as_rows(board.scheduler.events, 5, 0)
    assert "of" not in row  # it is of this step now
    assert "cut" not in row
    assert row["round"] == 1


def test_work_that_ends_as_the_step_does_counts_once():
    board = TaskQueue(1, Placement())
    board.put(Task("rollout", device_tasks.sample, ()))
    board.take(0)
    began = board.scheduler.since[0]
    board.tell(board.scheduler.cut)
    board.done(0, "rollout", began, began, began + 5.0)
    first, rest = board.scheduler.events
    assert first.ended == rest.began
    assert board.scheduler.events.seconds("rollout") == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("sums", ["placement=disaggregated"], "set devices_per_controller to 2 or more"),
        ("sums", ["devices_per_controller=2", "placement={type: disaggregated, trainers: 2}"], "one must sample"),
        ("sums", ["devices_per_controller=2", "placement={type: disaggregated, sleep: true}"], "placement.sleep"),
        ("sums", ["devices_per_controller=2", "placement={staleness: 2}"], "placement.staleness"),
        ("shapes-draft", ["devices_per_controller=2", "placement=disaggregated"], "placement to colocate"),
    ],
)
def test_what_cannot_be_drawn_ahead_is_refused(recipe, overrides, message):
    from mmrl.core.errors import UserError

    with pytest.raises(UserError, match=message):
        load_recipe([recipe], overrides)


@pytest.mark.slow
@pytest.mark.parametrize("controllers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_devices_draw_judge_and_train_at_once_and_learn_as_one_process(tmp_path, controllers):
    pytest.importorskip("torchvision")
    placement = "placement={type: disaggregated, staleness: 1}"
    loaded = load_recipe(["shapes-judge"], [*JUDGED, placement])
    in_one_process(loaded, tmp_path / "one")
    out = tmp_path / "apart"
    apart = [f"controllers={controllers}", "devices_per_controller=3"]
    run("shapes-judge", out, *JUDGED, placement, *apart)
    assert len(learned(out)) == 4
    for mine, theirs in zip(rows(out), rows(tmp_path / "one"), strict=True):
        for key in ("reward/mean", "optim/grad_norm", "mismatch/weight_mean", "sampling/stale_steps"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), (mine["step"], key)
    same_heldout(rows(out, "heldout.jsonl"), rows(tmp_path / "one", "heldout.jsonl"))
    placed = [json.loads(line) for line in (out / "placement.jsonl").read_text().splitlines()]
    ahead = [line for line in placed if line.get("of", line["step"]) > line["step"]]
    assert {line["role"] for line in ahead} == {"rollout", "judge"}
    assert all(line["of"] == line["step"] + 1 for line in ahead)
    for device, roles in enumerate(({"train"}, {"rollout", "wake"}, {"judge"})):
        assert {line["role"] for line in placed if line.get("device") == device} == roles
    assert any(overlap(a, b) > 0.001 for a in placed if a["role"] == "train" for b in placed if b["role"] == "rollout")


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_drew_ahead_goes_on_with_another_number_of_controllers(tmp_path):
    pytest.importorskip("torchvision")
    placement, out = "placement={type: disaggregated, staleness: 1}", tmp_path / "whole"
    run("shapes-judge", out, *JUDGED, placement, "controllers=2")
    resumed = tmp_path / "resumed"
    run("shapes-judge", resumed, *JUDGED, placement, "controllers=2", "train.steps=2")
    run("shapes-judge", resumed, *JUDGED, placement, "--resume")
    for mine, theirs in zip(rows(resumed), rows(out), strict=True):
        assert mine["reward/mean"] == pytest.approx(theirs["reward/mean"], rel=1e-3, abs=1e-5)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(REPLACED, id="replacements"),
        pytest.param(FORWARD, id="clean samples", marks=pytest.mark.long),
    ],
)
def reference(request, tmp_path_factory):
    """The words of a run, and what one process makes of it: the same versions draw, one thing after another."""
    name, *changes = request.param
    words = [*changes, "train.steps=4", "eval.every=4", "eval.samples=4", "checkpoint.every=1"]
    words += ["optim.schedule=constant", "devices_per_controller=2", "placement={type: disaggregated, staleness: 1}"]
    out = tmp_path_factory.mktemp("reference") / "one"
    in_one_process(load_recipe([name], words), out)
    return [name, *words], rows(out)


@pytest.mark.long  # in short: devices that draw, judge and train at once, above; two controllers in one process
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [["controllers=1"], ["controllers=2"], ["controllers=2", "train.backend=fsdp"]],
    ids=" ".join,
)
def test_any_number_of_controllers_draws_the_same_ahead_and_goes_on(reference, layout, tmp_path):
    (name, *words), wanted = reference
    run(name, tmp_path, *words, *layout, "train.steps=2")
    run(name, tmp_path, *words, *layout, "--resume")
    for mine, theirs in zip(rows(tmp_path), wanted, strict=True):
        for key in ("sampling/groups", "sampling/rounds", "sampling/valid", "sampling/ahead_unused"):
            assert mine.get(key) == theirs.get(key), (mine["step"], key)
        for key in (
            "reward/mean",
            "optim/grad_norm",
            "mismatch/weight_mean",
            "policy/v_change",
            "sampling/stale_steps",
        ):
            assert (key in mine) == (key in theirs), (mine["step"], key)
            assert mine.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-3, abs=1e-5), (mine["step"], key)


def in_one_process(loaded, out):
    with RunDir.create(out) as directory:
        session = Trainer(loaded, directory, devices=Lagging())
        session.run = in_turn(session.run)
        session.begin(Stop(), resume=False)


def overlap(a, b):
    """Seconds in which both were at work; 0 of different steps and controllers."""
    if (a["step"], a["controller"]) != (b["step"], b["controller"]):
        return 0.0
    return min(a["ended"], b["ended"]) - max(a["began"], b["began"])
