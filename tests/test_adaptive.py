"""The adaptive split: what it settles on, how soon, and that it stays; moves inside a step; its state as JSON."""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from mmrl.config.placement import Placement
from mmrl.placement.adaptive import Measured, Split, State, begin, decide, splits, worth_moving

CONTROLLERS = 4


def fluid(split, devices, rollout, judge, price):
    """A phase without grain: what one controller's devices would take for this work under a static split."""
    if not split.judge:
        sampled = rollout / devices
        return sampled, sampled + price + judge / devices
    sampled = rollout / split.rollout
    return sampled, max(sampled, judge / split.judge)


def after(state, steps, rollout, judge, price=1.0, noise=lambda step: 1.0):
    """The splits of ``steps`` steps of a load, per controller, and the state after them."""
    seen = []
    for step in range(steps):
        factor = noise(step)
        sampled, judged = fluid(state.split, state.devices, rollout * factor, judge / factor, price)
        measured = Measured(
            rollout_busy=rollout * factor * CONTROLLERS,
            judge_busy=judge / factor * CONTROLLERS,
            rollout_done=sampled,
            judge_done=judged,
            devices=state.devices * CONTROLLERS,
            price=price,
        )
        state, decision = decide(state, measured)
        assert decision.split == state.split
        seen.append(decision.split)
    return seen, state


def best(devices, replica, rollout, judge, price):
    return min(splits(devices, replica), key=lambda split: fluid(split, devices, rollout, judge, price)[1])


@pytest.mark.parametrize(("devices", "replica"), [(1, 1), (2, 1), (2, 2), (7, 3), (8, 2), (8, 8)])
def test_every_split_is_whole_replicas_and_leaves_a_sampler(devices, replica):
    found = splits(devices, replica)
    assert found[0] == Split(devices, 0)
    for split in found:
        assert split.rollout + split.judge == devices
        assert split.judge % replica == 0
        assert split.rollout > 0
    assert begin(devices, replica).split in found
    assert len(found) == 1 + (devices - 1) // replica


def test_begin_refuses_what_is_no_shape():
    with pytest.raises(ValueError, match="at least 1"):
        begin(0)
    with pytest.raises(ValueError, match="at least 1"):
        begin(4, 0)


@pytest.mark.parametrize("price", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("judge", [20.0, 100.0, 300.0, 900.0])
@pytest.mark.parametrize(("devices", "replica"), [(2, 1), (8, 1), (8, 2), (16, 4)])
def test_settles_on_the_best_static_split_and_stays(devices, replica, judge, price):
    seen, state = after(begin(devices, replica, moves=False), 30, 300.0, judge, price)
    wanted = best(devices, replica, 300.0, judge, price)
    seconds = [fluid(split, devices, 300.0, judge, price)[1] for split in (seen[-1], wanted)]
    assert seconds[0] <= 1.03 * seconds[1]
    assert len(set(seen[10:])) == 1
    assert state.kept >= 20


def test_the_first_decision_goes_straight_to_the_ratio_of_busy_seconds():
    seen, _ = after(begin(16, moves=False), 1, 100.0, 300.0, price=20.0)
    assert seen == [Split(4, 12)]


def test_later_ones_go_half_the_way_in_whole_replicas():
    _, state = after(begin(16, 2, moves=False), 3, 300.0, 100.0, price=30.0)
    assert state.split == Split(12, 4)
    sampled, judged = fluid(state.split, 16, 100.0, 300.0, 30.0)
    shifted = Measured(400.0, 1200.0, sampled, judged, 64, 30.0)
    _, decision = decide(state, shifted)
    assert decision.numbers["target_judge"] == 8
    assert decision.split == Split(10, 6)
    seen, _ = after(state, 12, 100.0, 300.0, price=30.0)
    judges = [split.judge for split in seen]
    assert judges[-1] == 12
    assert judges == sorted(judges)
    assert len(set(judges)) > 2
    assert all(judge % 2 == 0 for judge in judges)


@pytest.mark.parametrize("moves", [False, True])
def test_settles_within_10_steps_of_a_shift(moves):
    _, state = after(begin(8, moves=moves), 20, 300.0, 100.0, price=30.0)
    seen, _ = after(state, 30, 300.0, 900.0, price=30.0)
    assert len(set(seen[9:])) == 1


def test_never_flaps_on_a_steady_load_with_noise():
    import random

    rng = random.Random(3)
    for judge in (60.0, 150.0, 330.0, 800.0):
        seen, _ = after(begin(8, moves=False), 60, 300.0, judge, 10.0, lambda step: rng.uniform(0.93, 1.07))
        changes = sum(a != b for a, b in itertools.pairwise(seen[10:]))
        assert changes <= 1, f"judge {judge}: {[split.judge for split in seen]}"


def test_colocate_where_the_swap_costs_less_than_the_split_wastes():
    cheap, _ = after(begin(2, moves=False), 5, 300.0, 60.0, price=1.0)
    dear, _ = after(begin(2, moves=False), 5, 300.0, 60.0, price=400.0)
    assert cheap[-1] == Split(2, 0)
    assert dear[-1] == Split(1, 1)


def test_a_load_without_judging_samples_on_all_devices():
    seen, _ = after(begin(8), 3, 300.0, 0.0, price=1.0)
    assert seen[-1] == Split(8, 0)


def test_a_step_in_which_nothing_was_done_changes_nothing():
    state = begin(8)
    again, decision = decide(state, Measured(0.0, 0.0, 0.0, 0.0, 8, 1.0))
    assert again == state
    assert decision.split == state.split


def test_too_small_a_gain_keeps_the_split_and_says_so():
    _, state = after(begin(8, moves=False), 4, 300.0, 300.0, price=50.0)
    assert state.split == Split(4, 4)
    phase = fluid(state.split, 8, 300.0, 300.0, 50.0)[1]
    measured = Measured(302.0 * 4, 298.0 * 4, phase, phase, 32, 50.0)
    again, decision = decide(state, measured)
    assert again.split == state.split
    assert "4 sampling + 4 judging" in decision.why
    assert decision.numbers["judge_share"] == pytest.approx(0.5, abs=0.01)


def test_state_is_the_same_after_json():
    _, state = after(begin(8, 2), 3, 300.0, 200.0)
    again = State.read(json.loads(json.dumps(asdict(state))), Placement(type="adaptive"))
    assert again == state
    assert after(again, 4, 300.0, 900.0) == after(state, 4, 300.0, 900.0)


def test_a_resumed_run_moves_devices_inside_a_step_as_its_own_recipe_says():
    settings = Placement(type="adaptive", inside=False)
    assert State.read(asdict(begin(8)), settings) == begin(8, moves=False)


def test_decisions_are_json():
    _, decision = decide(begin(8), Measured(100.0, 300.0, 20.0, 60.0, 8, 1.0))
    assert json.loads(json.dumps(asdict(decision)))["split"] == asdict(decision.split)
    assert decision.why
    assert "\n" not in decision.why


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


@pytest.mark.parametrize(
    "module",
    [
        *(f"placement.{name}" for name in ("adaptive", "scheduler", "simulated_devices")),
        *(f"simulator.{name}" for name in ("trace", "simulate", "trace_from_run")),
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
