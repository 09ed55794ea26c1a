"""The adaptive policy: what it settles on, how soon, and that it stays; moves inside a step; its state as JSON."""

import itertools
import json
import random
import subprocess
import sys
from dataclasses import asdict

import pytest

from mmrl.config.placement import Placement
from mmrl.placement.adaptive import Candidate, Split, candidates, decide, opening, splits, starting, worth_moving
from mmrl.placement.simulated_devices import MicroBatch, SimulatedDevices
from mmrl.placement.tasks import Event
from mmrl.placement.what_if import pairs, rounds, slowest, tried

ADAPTIVE, ALONE = Placement(type="adaptive"), Placement(type="adaptive", inside=False)


def fluid(candidate, devices, rollout, judge, price):
    """A phase without grain: what one controller's devices would take for this work."""
    split = candidate.split
    if not split.judge:
        return (rollout + judge) / devices + price
    apart = max(rollout / split.rollout, judge / split.judge)
    return apart if candidate.moves == "never" else min(apart, (rollout + judge) / devices + price)


def after(state, steps, rollout, judge, price=1.0, noise=lambda step: 1.0):
    """The splits of ``steps`` steps of a load and the state after them."""
    seen = []
    for step in range(steps):
        factor = noise(step)
        known = candidates(state.devices, inside=state.inside)
        seconds = [fluid(one, state.devices, rollout * factor, judge / factor, price) for one in known]
        state, decision = decide(state, seconds)
        assert decision.split == state.split
        seen.append(decision.split)
    return seen, state


def best(devices, rollout, judge, price):
    return min(fluid(one, devices, rollout, judge, price) for one in candidates(devices, inside=False))


def test_every_split_leaves_a_sampler_and_greedy_is_the_first_candidate():
    for devices in (1, 2, 8):
        assert [split.rollout for split in splits(devices)] == list(range(devices, 0, -1))
        assert all(split.rollout + split.judge == devices for split in splits(devices))
    assert candidates(2) == [
        Candidate(Split(2, 0), "worth"),
        Candidate(Split(2, 0), "after"),
        Candidate(Split(1, 1), "worth"),
        Candidate(Split(1, 1), "never"),
    ]
    assert candidates(2, inside=False) == [Candidate(Split(2, 0), "after"), Candidate(Split(1, 1), "never")]


@pytest.mark.parametrize(
    ("placement", "split", "moves"),
    [
        ({}, Split(4, 0), "after"),
        ({"type": "partial"}, Split(2, 2), "never"),
        ({"type": "partial", "judges": 1}, Split(3, 1), "never"),
        ({"type": "greedy"}, Split(4, 0), "worth"),
        ({"type": "greedy", "judges": 3}, Split(1, 3), "worth"),
        ({"type": "adaptive"}, Split(4, 0), "worth"),
        ({"type": "adaptive", "judges": 1}, Split(3, 1), "worth"),
        ({"type": "adaptive", "inside": False}, Split(4, 0), "after"),
        ({"type": "disaggregated"}, Split(1, 1), "never"),
        ({"type": "disaggregated", "split": "greedy"}, Split(2, 0), "worth"),
        ({"type": "disaggregated", "split": "adaptive", "judges": 1}, Split(1, 1), "worth"),
        ({"type": "disaggregated", "split": "adaptive", "inside": False}, Split(1, 1), "never"),
    ],
)
def test_every_placement_begins_as_its_name_says(placement, split, moves):
    state = starting(Placement(**placement), 4)
    assert opening(state, judged=True) == (split, moves)
    assert opening(state, judged=False) == (Split(state.devices, 0), "after")
    with pytest.raises(ValueError, match="at least 1"):
        starting(Placement(), 0)


@pytest.mark.parametrize("price", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("judge", [20.0, 100.0, 300.0, 900.0])
@pytest.mark.parametrize("devices", [2, 8, 16])
def test_settles_on_the_best_static_split_and_stays(devices, judge, price):
    seen, _ = after(starting(ALONE, devices), 30, 300.0, judge, price)
    found = fluid(Candidate(seen[-1], "never"), devices, 300.0, judge, price)
    assert found <= 1.05 * best(devices, 300.0, judge, price)
    assert len(set(seen[10:])) == 1


def test_the_first_placement_stays_until_two_steps_are_measured():
    seen, _ = after(starting(ADAPTIVE, 16), 4, 100.0, 300.0, price=20.0)
    assert seen == [Split(16, 0), Split(4, 12), Split(4, 12), Split(4, 12)]


def test_follows_a_shift_and_settles():
    _, state = after(starting(ADAPTIVE, 8), 20, 300.0, 100.0, price=30.0)
    seen, _ = after(state, 30, 300.0, 900.0, price=30.0)
    assert len(set(seen[9:])) == 1
    assert seen[-1] == Split(2, 6)


def test_never_flaps_on_a_steady_load_with_noise():
    rng = random.Random(3)
    for judge in (60.0, 150.0, 330.0, 800.0):
        seen, _ = after(starting(ALONE, 8), 60, 300.0, judge, 10.0, lambda step: rng.uniform(0.93, 1.07))
        changes = sum(a != b for a, b in itertools.pairwise(seen[10:]))
        assert changes <= 1, f"judge {judge}: {[split.judge for split in seen]}"


def test_a_load_that_alternates_does_not_make_the_split_alternate():
    state, seen, mine = starting(ADAPTIVE, 8), [], 0.0
    known, totals = candidates(8), [0.0] * 16
    for step in range(40):
        judge = 40.0 if step % 2 else 800.0
        seconds = [fluid(one, 8, 300.0, judge, 60.0) for one in known]
        mine += seconds[known.index(Candidate(state.split, state.moves))]
        totals = [a + b for a, b in zip(totals, seconds, strict=True)]
        state, _ = decide(state, seconds)
        seen.append(state.split)
    assert sum(a != b for a, b in itertools.pairwise(seen[6:])) <= 1
    assert mine <= 1.05 * min(totals)


def test_regret_is_bounded_on_a_load_that_is_made_to_hurt():
    """The candidate in use is always the slowest of the next step."""
    state, known, totals, mine = starting(ADAPTIVE, 4), candidates(4), [0.0] * 8, 0.0
    for _ in range(100):
        current = known.index(Candidate(state.split, state.moves))
        seconds = [1.3 if n == current else 1.0 for n in range(len(known))]
        mine, totals = mine + seconds[current], [a + b for a, b in zip(totals, seconds, strict=True)]
        state, _ = decide(state, seconds)
    assert mine <= 1.3 * min(totals)


def test_a_step_in_which_nothing_was_judged_changes_nothing():
    state = starting(ADAPTIVE, 8)
    assert decide(state, [])[0] == state
    assert decide(state, [])[1].split == state.split


def test_state_is_the_same_after_json_and_another_recipe_begins_anew():
    _, state = after(starting(ADAPTIVE, 8), 3, 300.0, 200.0)
    written = json.loads(json.dumps(asdict(state)))
    again = starting(ADAPTIVE, 8).read(written)
    assert again == state
    assert after(again, 4, 300.0, 900.0) == after(state, 4, 300.0, 900.0)
    assert starting(ALONE, 8).read(written) == starting(ALONE, 8)
    beside = starting(Placement(type="disaggregated", trainers=1, split="adaptive"), 9)
    assert beside.read(written) == beside
    earlier = {"devices": 8, "replica": 1, "split": {"rollout": 8, "judge": 0}, "over": {}}  # of a version before
    assert starting(ADAPTIVE, 8).read(earlier) == starting(ADAPTIVE, 8)


def test_decisions_are_json_and_say_why_in_a_line():
    _, state = after(starting(ADAPTIVE, 8), 1, 100.0, 300.0, price=20.0)
    _, decision = decide(state, [fluid(one, 8, 100.0, 300.0, 20.0) for one in candidates(8)])
    assert json.loads(json.dumps(asdict(decision)))["split"] == asdict(decision.split)
    assert decision.why.startswith("greedy to 2 sampling + 6 judging")
    assert "\n" not in decision.why


def test_a_step_is_done_again_under_every_candidate_from_its_events():
    seconds = [[(2.0, 1.0), (3.0, 4.0), (5.0, 2.0), (4.0, 1.0), (2.0, 3.0)], [(1.0, 2.0)]]
    state, work = starting(ADAPTIVE, 4), [[MicroBatch(*both) for both in one] for one in seconds]
    devices = SimulatedDevices(4, 0.5)
    devices.step(work, Split(3, 1), "never")
    assert sorted(rounds(devices.scheduler.events)[0]) == sorted(work[0])
    found = tried(devices.scheduler, state)
    assert len(found) == len(candidates(4))
    assert found[candidates(4).index(Candidate(Split(3, 1), "never"))] == pytest.approx(
        devices.scheduler.events.done_after("judge")
    )
    assert slowest([found, [], [second + 1 for second in found]]) == [second + 1 for second in found]
    devices.step([[MicroBatch(1.0, 0.0)]], Split(4, 0), "after")
    assert tried(devices.scheduler, state) == []


def test_sampling_and_judging_are_paired_in_order_and_several_rewards_are_shared_out():
    assert pairs([(0.0, 3.0), (0.0, 1.0)], [(1.0, 5.0), (3.0, 4.0)]) == [MicroBatch(1.0, 4.0), MicroBatch(3.0, 1.0)]
    assert pairs([(0.0, 1.0), (1.0, 3.0)], [(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)]) == [
        MicroBatch(1.0, 2.0),
        MicroBatch(2.0, 2.0),
    ]
    assert rounds([Event(0, "rollout", 0.0, 1.0), Event(0, "wake", 1.0, 2.0), Event(0, "train", 3.0, 4.0)]) == [
        [MicroBatch(1.0, 0.0)]
    ]


def test_a_dry_device_moves_where_the_other_role_then_ends_sooner():
    assert not worth_moving(0.0, 0.0, 3, 0.0)
    assert worth_moving(0.0, 30.0, 3, 9.9)  # 10 s left for three; four need (30 + 9.9) / 4
    assert not worth_moving(0.0, 30.0, 3, 10.1)
    assert worth_moving(0.0, 1.0, 0, 100.0)  # else nobody does it


def test_a_judge_that_will_be_needed_again_stays():
    assert not worth_moving(100.0, 100.0, 1, 1.0)  # the only judge: its own work would wait
    assert not worth_moving(100.0, 100.0, 4, 1.0, own_devices=3)  # both roles are even
    assert worth_moving(10.0, 100.0, 4, 1.0, own_devices=3)  # judging needs few of its four
    assert worth_moving(1.0, 100.0, 1, 1.0)  # there and back in time
    assert not worth_moving(1.0, 100.0, 1, 1.0, back=60.0)  # but the way back is dear


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        *(f"placement.{name}" for name in ("adaptive", "what_if", "scheduler", "simulated_devices")),
        *(f"planner.simulator.{name}" for name in ("trace", "simulate", "trace_from_run")),
    ],
)
def test_imports_no_torch(module):
    """The parent packages of the source tree may; what the module itself imports may not."""
    code = (
        "import sys, types\n"
        "import mmrl\n"
        "before = 'torch' in sys.modules\n"
        f"import mmrl.{module}\n"
        "assert not before and 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
