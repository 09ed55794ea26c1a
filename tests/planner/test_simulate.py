"""The simulator of placements: closed forms of simple loads, nothing lost, no placement faster than the bound."""

import importlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from mmrl.cli.simulate import MadeUp, micro_batches, shape
from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.errors import UserError
from mmrl.placement.adaptive import Split, splits
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.simulated_ahead import SimulatedAhead
from mmrl.placement.simulated_devices import MicroBatch, SimulatedDevices, SimulatedTask, SimulatedTime
from mmrl.placement.step_records import as_rows
from mmrl.planner.simulator.simulate import (
    Cluster,
    adaptive,
    best_disaggregated,
    bound,
    compare,
    device_seconds,
    disaggregated,
    static,
    three_roles,
)
from mmrl.planner.simulator.trace import LOADS, Load, Trace, Work, synthetic
from mmrl.planner.simulator.trace_from_run import fitted, read_run
from tests.support.cli import folder, mmrl  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def equal(controllers, count, sampling, judging, train=0.0, price=0.0, steps=1):
    """Steps of ``count`` equal micro-batches a controller."""
    return Trace([Work([[[MicroBatch(sampling, judging)] * count]] * controllers, train)] * steps, price, "equal")


def best_static(trace, cluster):
    """The fastest static split, including colocate: the best choice if the whole run was known beforehand."""
    return min((static(trace, cluster, split) for split in splits(cluster.devices)), key=lambda o: o.seconds)


def test_colocate_of_equal_work_is_both_phases_and_the_swap():
    out = static(equal(2, 16, 3.0, 5.0, train=7.0, price=2.0), Cluster(2, 4), Split(4, 0))
    assert out.generate == pytest.approx([16 * 3 / 4 + 2 + 16 * 5 / 4])
    assert out.steps == pytest.approx([out.generate[0] + 7])


def test_colocate_in_rounds_swaps_back_for_every_further_round():
    rounds = [[MicroBatch(3.0, 5.0)] * 4, [MicroBatch(3.0, 5.0)] * 4]
    out = static(Trace([Work([rounds], 0.0)], 2.0, ""), Cluster(1, 4), Split(4, 0))
    assert out.generate == pytest.approx([(3 + 2 + 5) + 2 + (3 + 2 + 5)])


@pytest.mark.parametrize(("sampling", "judging"), [(4.0, 1.0), (1.0, 4.0), (2.0, 2.0)])
def test_partial_of_equal_work_is_the_longer_slice_and_the_fill_of_the_other(sampling, judging):
    out = static(equal(1, 16, sampling, judging), Cluster(1, 4), Split(2, 2))
    assert out.generate == pytest.approx([max(8 * sampling + judging, sampling + 8 * judging)])


def test_disaggregated_is_its_slowest_slice_once_it_flows():
    trace = equal(1, 8, 2.0, 1.0, train=1.0, steps=30)
    out = disaggregated(trace, Cluster(1, 4), train=1, judge=1, staleness=4)
    assert out.steps[-1] == pytest.approx(max(8 * 2.0 / 2, 8 * 1.0 / 1, 1.0 * 4 / 1))


def test_no_staleness_leaves_nothing_to_overlap_with_training():
    trace = equal(1, 8, 2.0, 1.0, train=1.0, steps=5)
    out = disaggregated(trace, Cluster(1, 4), train=1, judge=1, staleness=0)
    assert out.steps == pytest.approx([8 * 2.0 / 2 + 2 * 1.0 + 4.0] * 5)  # two samples end together, for one judge


@pytest.mark.parametrize(("train", "price", "period"), [(2.0, 0.0, 10.0), (2.0, 1.0, 11.0), (9.0, 0.0, 18.0)])
def test_a_lent_trainer_shares_what_is_left_of_sampling_when_it_has_trained(train, price, period):
    trace = equal(1, 8, 2.0, 0.0, train=train, price=price, steps=12)
    fixed = disaggregated(trace, Cluster(1, 2), train=1, judge=0, staleness=1)
    lent = disaggregated(trace, Cluster(1, 2), train=1, judge=0, staleness=1, lend=True)
    assert fixed.steps[6:-1] == pytest.approx([max(8 * 2.0, 2 * train)] * 5)
    assert sum(lent.steps[4:10]) / 6 == pytest.approx(period)  # micro-batches are whole
    assert lent.moves[4:10] == [int(2 * train < 16)] * 6


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize(("split", "moves"), [(Split(1, 1), "never"), (Split(1, 1), "worth"), (Split(2, 0), "worth")])
def test_devices_that_move_do_all_work_once_and_are_never_in_two_places(lend, split, moves):
    trace = synthetic(replace(LOADS["tailed"], again=(0.3, 0.3), ahead=False), 4, 2, 8, 48, seed=4)
    for price in (0.0, 3.0):
        time, shares = SimulatedTime(), [work.shares for work in trace.steps]
        controllers = [SimulatedDevices(4, price, time) for _ in range(2)]
        for devices in controllers:
            devices.apart(split, moves)
        training = [2 * work.train for work in trace.steps]
        SimulatedAhead(controllers, shares, training, 1, lambda step: None, lend=lend).trained()
        for share, devices in enumerate(controllers):
            events, batches = devices.scheduler.events, [b for w in trace.steps for one in w.shares[share] for b in one]
            assert devices.scheduler.events.seconds("rollout") == pytest.approx(sum(b.sampling for b in batches))
            assert devices.scheduler.events.seconds("judge") == pytest.approx(sum(b.judging for b in batches))
            assert {e.device for e in events if e.role != "wake"} == ({0, 1, 2, 3} if lend else {2, 3})
            for device in range(4):
                spans = sorted((e.began, e.ended) for e in events if e.device == device)
                assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


def test_devices_beside_training_share_all_work_where_no_split_fits_it():
    """Of three devices one trains. A step has 4 s of sampling and 12 s of judging, which one judge takes 12 s for."""
    trace = equal(1, 4, 1.0, 3.0, train=1.0 / 3, steps=12)
    fixed = disaggregated(trace, Cluster(1, 3), train=1, judge=1, staleness=1)
    greedy = three_roles(trace, Cluster(1, 3), 1, 1, "greedy", lend=False)
    found = three_roles(trace, Cluster(1, 3), 1, 1, "adaptive", lend=False)
    lent = three_roles(trace, Cluster(1, 3), 1, 1, "greedy")
    assert sum(fixed.steps[4:10]) / 6 == pytest.approx(12.0)
    assert sum(greedy.steps[4:10]) / 6 == pytest.approx(8.0)
    assert found.seconds == pytest.approx(greedy.seconds)
    assert len(found.decisions) == 12
    assert "greedy stays" in found.decisions[-1].why
    assert 16 / 3 < sum(lent.steps[4:10]) / 6 < 7.0


def test_what_trains_next_is_judged_before_a_later_step_is_sampled():
    scheduler = Scheduler(2, lambda: 0.0, Placement())
    scheduler.apart(Split(1, 0), "worth")
    for device in range(2):
        scheduler.idle(device)
    done = [SimulatedTask("rollout", 1.0, lambda: None, of=(step, 0)) for step in (0, 1)]
    judge = SimulatedTask("judge", 1.0, lambda: None, of=(0, 0))
    scheduler.ready(done[1])
    scheduler.ready(done[0])
    assert scheduler.handed() == [(1, done[0])]
    scheduler.done(1, "rollout", 0.0, 0.0, 1.0)
    scheduler.ready(judge)
    scheduler.idle(1)
    assert scheduler.handed() == [(1, judge)]
    scheduler.done(1, "judge", 1.0, 1.0, 2.0)
    scheduler.idle(1)
    assert scheduler.handed() == [(1, done[1])]
    assert scheduler.roles == ["train", "rollout"]
    assert scheduler.moves == 2


def test_a_run_on_a_load_that_changes_is_followed_beside_training():
    trace = synthetic(LOADS["shifting"], 16, 1, 4, 32, seed=1)
    found = three_roles(trace, Cluster(1, 4), 1, 1, "adaptive")
    fixed = [disaggregated(trace, Cluster(1, 4), 1, judge, 1, lend=True) for judge in (1, 2)]
    assert found.seconds < min(one.seconds for one in fixed)
    assert sum(split.rollout + split.judge for split in found.splits) == 16 * 3


CASES = list(itertools.product(LOADS, (0.0, 1.0, 5.0), ("never", "worth")))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "price", "moves"), CASES)
def test_all_work_is_done_once_and_no_device_does_two_things(name, price, moves):
    load = replace(LOADS[name], again=(0.3, 0.3), ahead=False)
    trace = synthetic(load, 2, 2, 12, 60, seed=4)
    for split, share in itertools.product(splits(6), (0, 1)):
        devices = SimulatedDevices(6, price)
        for work in trace.steps:
            rounds = work.shares[share]
            devices.step(rounds, split, moves if split.judge else "after")
            batches = [batch for one in rounds for batch in one]
            events = devices.scheduler.events
            by_role = {role: [e for e in events if e.role == role] for role in ("rollout", "judge")}
            assert {role: len(found) for role, found in by_role.items()} == dict.fromkeys(by_role, len(batches))
            assert devices.scheduler.events.seconds("rollout") == pytest.approx(sum(b.sampling for b in batches))
            assert devices.scheduler.events.seconds("judge") == pytest.approx(sum(b.judging for b in batches))
            for device in range(6):
                spans = sorted((e.began, e.ended) for e in events if e.device == device)
                assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_nothing_is_faster_than_the_bound(name):
    cluster = Cluster(3, 4)
    trace = synthetic(replace(LOADS[name], again=(0.2, 0.2)), 3, 3, 12, 48, seed=1)
    least = bound(trace, cluster)
    assert all(b > 0 for b in least)
    for outcome in compare(trace, cluster).outcomes:
        if outcome.name.startswith(("disaggregated", "three roles")):  # on stale samples: only the work bounds it
            work = sum(device_seconds(work, cluster) for work in trace.steps)
            assert outcome.seconds >= work / cluster.total
        else:
            assert all(step >= b - 1e-9 for step, b in zip(outcome.steps, least, strict=True))
        assert 0 <= outcome.idle < 1


def test_the_bound_is_the_longest_chain_where_that_is_longer():
    rounds = [[MicroBatch(1.0, 1.0), MicroBatch(9.0, 2.0)], [MicroBatch(1.0, 1.0), MicroBatch(2.0, 3.0)]]
    assert bound(Trace([Work([rounds, [[MicroBatch(1.0, 1.0)]]], 4.0)], 0.0, ""), Cluster(2, 8)) == [
        9 + 2 + 2 + 3 + 4.0
    ]


@pytest.mark.slow
@pytest.mark.parametrize("price", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("name", ["steady", "judge-heavy"])
def test_adaptive_is_at_most_2_percent_behind_the_best_static_split_on_steady_loads(name, price):
    cluster = Cluster(1, 8)
    trace = synthetic(replace(LOADS[name], price=price), 30, 1, 8, 40, seed=2)
    assert adaptive(trace, cluster).seconds <= 1.02 * best_static(trace, cluster).seconds


@pytest.mark.slow
@pytest.mark.parametrize("price", [1.0, 3.0])
def test_adaptive_settles_within_10_steps_of_a_shift(price):
    trace = synthetic(replace(LOADS["shifting"], price=price), 36, 1, 8, 48, seed=2)
    for moves in (False, True):
        found = [split.judge for split in adaptive(trace, Cluster(1, 8), moves=moves).splits]
        assert sum(a != b for a, b in itertools.pairwise(found[28:])) <= 1, found


@pytest.mark.slow
def test_moves_inside_a_step_mend_a_tail_that_no_split_can():
    cluster = Cluster(4, 8)
    trace = synthetic(LOADS["tailed"], 20, 4, 32, 256, seed=2)
    moving, best = adaptive(trace, cluster), best_static(trace, cluster)
    assert sum(moving.moves) > 0
    assert moving.seconds < 0.93 * best.seconds


def test_a_load_is_the_same_from_the_same_seed_and_has_the_mean_it_says():
    load = Load("", lambda at: 2.0, sample=10.0, pareto=1.5)
    a, b, c = (synthetic(load, 2, 2, 8, 4000, seed) for seed in (1, 1, 2))
    assert a == b
    assert a != c
    batches = [batch for work in a.steps for rounds in work.shares for one in rounds for batch in one]
    assert sum(b.sampling for b in batches) / len(batches) == pytest.approx(10.0, rel=0.06)
    assert sum(b.judging for b in batches) / len(batches) == pytest.approx(20.0, rel=0.02)


def test_dynamic_sampling_tries_ahead_what_the_step_before_lacked():
    rounds = {
        ahead: synthetic(Load("", lambda at: 1.0, again=(0.4, 0.4), ahead=ahead), 2, 1, 8, 500).steps[1].shares[0]
        for ahead in (False, True)
    }
    assert len(rounds[False][0]) == 500
    assert len(rounds[False]) > 2
    assert 800 <= len(rounds[True][0]) <= 850


def test_one_device_has_nothing_beside_it():
    with pytest.raises(ValueError, match="leaves none"):
        compare(equal(1, 4, 1.0, 1.0), Cluster(1, 1))
    assert best_disaggregated(equal(1, 4, 1.0, 1.0), Cluster(1, 2)) is None


# -- traces of runs ----------------------------------------------------------------------------------------------------


def record(path, trace, split, price=0.5):
    """What a run with this work would have written, by the scheduler's own account of its devices."""
    path.mkdir(exist_ok=True)
    lines, metrics = [], []
    controllers = [SimulatedDevices(split.rollout + split.judge, price) for _ in trace.steps[0].shares]
    for step, work in enumerate(trace.steps):
        lead = 0.25  # encoding, before the phase
        seconds = []
        for rank, (devices, rounds) in enumerate(zip(controllers, work.shares, strict=True)):
            devices.step(rounds, split, "never" if split.judge else "after")
            seconds.append(devices.scheduler.events.done_after("judge"))
            rows = as_rows(devices.scheduler.events, step, rank)
            lines += [row | {"began": row["began"] + lead, "ended": row["ended"] + lead} for row in rows]
        lines.append({"step": step, "decision": "so", "rollout": split.rollout, "judge": split.judge, "numbers": {}})
        metrics.append({"step": step, "time/step": max(seconds) + work.train})
    for name, rows in (("placement.jsonl", lines), ("metrics.jsonl", metrics)):
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("split", [Split(2, 2), Split(4, 0)])
def test_a_recorded_run_is_predicted_as_it_was(tmp_path, split):
    trace = synthetic(LOADS["steady"], 3, 2, 8, 48, seed=5)
    record(tmp_path / "run", trace, split, price=6.0)
    found = read_run(tmp_path / "run")
    assert (found.controllers, found.devices) == (2, 4)
    again = static(found.trace, Cluster(2, 4), split)
    assert again.steps == pytest.approx(static(replace(trace, price=6.0), Cluster(2, 4), split).steps, rel=0.03)
    assert fitted(found, 2, 8, 48) is found.trace
    assert found.trace.price == pytest.approx(6.0)


def test_a_recorded_run_on_more_devices_has_the_same_work_for_each(tmp_path):
    record(tmp_path / "run", synthetic(LOADS["steady"], 3, 2, 8, 48, seed=5), Split(2, 2))
    larger = fitted(read_run(tmp_path / "run"), 16, 64, 48 * 8, seed=0)
    small, large = read_run(tmp_path / "run").trace.steps, larger.steps
    assert [work.train for work in large] == pytest.approx([work.train for work in small])
    even = [
        device_seconds(work, cluster) / cluster.total
        for work, cluster in ((small[0], Cluster(2, 4)), (large[0], Cluster(16, 4)))
    ]
    assert even[1] == pytest.approx(even[0], rel=0.15)


def test_metrics_alone_give_the_means(tmp_path):
    (tmp_path / "resolved.json").write_text(
        json.dumps(
            {"train": {"prompts_per_step": 4, "group_size": 4, "micro_batch_size": 2}, "sampling": {}, "controllers": 2}
        )
    )
    row = {"step": 0, "time/step": 10.0, "time/sample": 3.0, "time/decode": 1.0, "time/reward": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (work,) = read_run(tmp_path).trace.steps
    assert work.shares == [[[MicroBatch(1.0, 0.5)] * 4]] * 2
    assert work.train == pytest.approx(4.0)


def test_a_run_without_records_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "placement.jsonl").write_text('{"role": "rollout", "step": 0}\n')
    with pytest.raises(UserError, match=r"placement\.jsonl has a line with an unexpected format"):
        read_run(tmp_path)


def test_a_run_that_sampled_ahead_has_the_work_of_each_step_that_it_was_for(tmp_path):
    steps = [{"step": n, "time/step": 10.0, "sampling/stale_steps": float(n > 1)} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    lines = [
        (1, 1, "rollout", 0.0, 4.0, {}),
        (1, 2, "judge", 4.0, 5.0, {}),
        (1, 0, "train", 5.0, 8.0, {}),
        (1, 1, "rollout", 4.0, 6.0, {"of": 2}),
        (1, 2, "judge", 6.0, 7.0, {"of": 2}),
        (1, 1, "rollout", 7.0, 9.5, {"of": 2, "round": 1, "cut": True}),
        (1, 1, "rollout", 9.5, 10.0, {"of": 2, "round": 1, "cut": True}),
        (2, 1, "rollout", 0.0, 2.0, {"round": 1}),
        (2, 2, "judge", 2.0, 2.5, {"round": 1}),
        (2, 1, "rollout", 3.0, 3.5, {"of": 3}),  # of a step that was never trained
        (2, 0, "train", 3.0, 9.0, {}),
    ]
    rows = [
        {"step": step, "controller": 0, "device": device, "role": role, "began": began, "ended": ended, **more}
        for step, device, role, began, ended, more in lines
    ]
    (tmp_path / "placement.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_run(tmp_path).trace.steps
    assert first.shares == [[[MicroBatch(4.0, 1.0)]]]
    assert second.shares == [[[MicroBatch(2.0, 1.0)], [MicroBatch(5.0, 0.5)]]]
    assert [first.train, second.train] == [pytest.approx(1.0), pytest.approx(2.0)]  # by all three devices
    steps[1]["sampling/stale_tokens"] = 1.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    with pytest.raises(UserError, match=r"rollout\.partial"):
        read_run(tmp_path)


def test_a_run_that_sampled_ahead_and_does_not_say_for_what_is_no_trace(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0, "sampling/stale_steps": 1.0}\n')
    event = {"step": 1, "controller": 0, "device": 1, "role": "rollout", "began": 0.0, "ended": 1.0}
    (tmp_path / "placement.jsonl").write_text(json.dumps(event) + "\n")
    with pytest.raises(UserError, match="name a run of this version, or of a different placement"):
        read_run(tmp_path)


# -- the command -------------------------------------------------------------------------------------------------------

GROWN = ("train.prompts_per_step=64", "train.group_size=4", "train.micro_batch_size=4")


@pytest.mark.slow
def test_command_shows_every_placement(folder, capsys):
    assert mmrl("simulate", "recipe.yaml", *GROWN, "controllers=2", "--devices", "16", "--steps", "3") == 0
    out = capsys.readouterr().out
    for name in (
        "colocate",
        "partial",
        "disaggregated",
        "greedy",
        "with moves",
        "adaptive, split alone",
        "adaptive",
        "bound: no gap",
        "best static",
    ):
        assert name in out
    assert "16 devices: 2 controllers of 8" in out


@pytest.mark.slow
@pytest.mark.parametrize("price", ["20", "12345678"])
def test_the_table_cuts_no_number_at_80_columns(folder, capsys, monkeypatch, price):
    monkeypatch.setenv("COLUMNS", "80")
    command = ("simulate", "recipe.yaml", *GROWN, "--devices", "8", "--steps", "2", "--price", price)
    assert mmrl(*command) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "waiting  moves  changes" in shown
    assert mmrl(*command, "--json") == 0
    placements = json.loads(capsys.readouterr().out)["placements"]
    assert all(f" {row['step']:,.2f} " in shown for row in placements)
    if price == "20":
        assert max(len(line) for line in shown.splitlines() if line.startswith((" ", "─"))) <= 80


def test_command_prints_json_of_a_recorded_run(folder, capsys):
    record(folder / "run", synthetic(LOADS["steady"], 4, 2, 8, 48, seed=5), Split(4, 0), price=6.0)
    options = ("--devices", "8", "--trace", "run", "--json", "--steps", "2")
    assert mmrl("simulate", "recipe.yaml", *GROWN, "controllers=2", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["price"] == pytest.approx(6.0)
    names = [row["placement"] for row in found["placements"]]
    assert names[0] == "colocate"
    assert names[-1] == "adaptive"
    assert all(len(row["steps"]) == 2 and row["step"] >= found["bound"] * 0.5 for row in found["placements"])


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        (["controllers=2"], 9, "--devices 9 cannot be shared by controllers=2; write --devices 10"),
        (["controllers=2"], 2, "2 controllers on 2 devices have 1 each"),
        ([], 1, "1 controllers on 1 devices have 1 each"),
    ],
)
def test_shapes_that_cannot_be_are_refused_with_the_edit(folder, changes, devices, message):
    recipe = load_recipe(["recipe.yaml"], [*GROWN, *changes]).recipe
    with pytest.raises(UserError) as error:
        shape(recipe, devices)
    assert message in str(error.value)


def test_micro_batches_are_those_of_the_loop(folder):
    recipe = load_recipe(["recipe.yaml"], ["train.prompts_per_step=5", "train.group_size=3", "controllers=2"]).recipe
    assert micro_batches(recipe, 2) == -(-9 // 4) + -(-6 // 4)


def test_the_commands_loads_are_the_simulators():
    assert [*get_args(MadeUp)] == list(LOADS)


@pytest.mark.slow
def test_benchmark_runs_and_counts(capsys, tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        placement = importlib.import_module("placement")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    placement.JUDGE, placement.PRICE, placement.AGAIN, placement.LOAD_PRICES = (1.0,), (0.1, 0.4), (0.0,), (0.1,)
    placement.main(["--devices", "8", "--steps", "4", "--grid-steps", "2", "--json", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert "partial beats colocate in" in out
    rows = json.loads((tmp_path / "out.json").read_text())["8"]
    assert [row["load"] for row in rows["loads"]] == list(placement.GOALS)
    for row in rows["grid"]:
        (name,) = [name for name in row["steps"] if name.startswith("partial")]
        assert (sum(row["steps"][name]) < sum(row["steps"]["colocate"])) == (row["gain"] > 0)


def test_the_table_of_regret_has_every_policy(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    placement = importlib.import_module("placement")
    placement.main(["--regret", "--devices", "8", "--steps", "3", "--prices", "0.1", "--loads", "alternating"])
    out = capsys.readouterr().out
    head, _, row = [line.split(" | ") for line in out.splitlines() if line.startswith("|")]
    named = ["colocate", "partial", "disaggregated", "disaggregated, lent", "three roles, greedy"]
    assert head[2:11] == [*named, "three roles, adaptive", "greedy", "static with moves", "adaptive"]
    assert len(row) == len(head)
    assert "regret of adaptive: median" in out
    assert "regret of three roles, adaptive: median" in out


def test_the_table_of_prompts_that_move(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    placement = importlib.import_module("placement")
    words = ["--devices", "16", "--steps", "2", "--prices", "0.1", "--loads", "steady", "--micro-batches", "4"]
    placement.main(["--moving", *words])
    out = capsys.readouterr().out
    head, _, alike, slower = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert head[2:5] == ["one controller", "waiting", "prompts move"]
    assert [alike[2], slower[2]] == ["as fast", "half as fast"]
    stays, moves = (float(share.rstrip("%")) for share in slower[3:5])
    assert 0 < moves < stays


def test_several_controllers_show_prompts_that_move_beside_the_others():
    of = {n: compare(synthetic(LOADS["steady"], 3, n, 4, 32), Cluster(n, 4 // n)).outcomes for n in (1, 2)}
    assert [one.name for one in of[2]][-2:] == ["adaptive, prompts move", "adaptive"]
    assert "adaptive, prompts move" not in [one.name for one in of[1]]
