"""Several judges of a recipe: which device has which, in the scheduler, the simulator, and on devices."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.cli.simulate import shape
from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.errors import UserError
from mmrl.placement.adaptive import Split
from mmrl.placement.scheduler import Judges, shares
from mmrl.placement.simulated_devices import MicroBatch, SimulatedDevices
from mmrl.placement.step_records import as_rows
from mmrl.placement.what_if import rounds
from mmrl.planner.simulator.simulate import static
from mmrl.planner.simulator.trace import Trace, Work
from mmrl.planner.simulator.trace_from_run import read_run
from tests.support.planning import planned, planned_in_short
from tests.support.runs import JUDGED, alike, placed, rows, run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from sleeping_devices import SleepingDevices


def judged(sampling, **seconds):
    return MicroBatch(sampling, sum(seconds.values()), judges=tuple(seconds.items()))


@pytest.mark.parametrize(
    ("work", "devices", "found"),
    [
        ({"a": 3.0, "b": 1.0}, 4, {"a": 3, "b": 1}),
        ({"a": 9.0, "b": 1.0}, 2, {"a": 1, "b": 1}),
        ({"a": 1.0, "b": 2.0}, 1, {"a": 0, "b": 1}),
        ({"a": 0.0, "b": 0.0}, 5, {"a": 3, "b": 2}),  # nothing is known yet
        ({"a": 1.0, "b": 1.0, "c": 4.0}, 6, {"a": 1, "b": 1, "c": 4}),
    ],
)
def test_devices_are_divided_by_work(work, devices, found):
    assert shares(work, devices) == found


def judges(**seconds):
    made = Judges(4, alone=False)
    made.know(seconds)
    for name, one in seconds.items():
        made.took(name, one)
    return made


def test_a_device_keeps_its_judge_where_the_shares_allow_it():
    made = judges(a=1.0, b=1.0)
    made.divide([0, 1, 2, 3])
    assert sorted(made.of) == ["a", "a", "b", "b"]
    before = list(made.of)
    made.divide([0, 1, 2, 3])
    assert made.of == before
    for _ in range(20):
        made.took("a", 3.0)
    made.divide([0, 1, 2, 3])
    assert made.of.count("a") == 3
    assert all(now == "a" for now, then in zip(made.of, before, strict=True) if then == "a")


def tasks(names, step=None):
    return [SimpleNamespace(judge=name, of=None if step is None else (step, 0)) for name in names]


def test_a_device_takes_its_own_judge_s_task_then_that_with_the_most_work_per_device():
    made = judges(a=1.0, b=4.0)
    made.of = ["a", "b", "", ""]
    assert made.choose(tasks("bba"), 0, [0, 1], 0.0) == 2
    assert made.choose(tasks("bbb"), 0, [0, 1], 0.0) == 0  # 12 device-seconds for one device
    assert made.choose(tasks("bbb"), 0, [0, 1], 13.0) is None  # (12 + 13) / 2 is no sooner
    assert made.choose(tasks("aab"), 2, [0, 1, 2], 100.0) == 2  # it has no judge: whatever it takes has to wake
    assert made.choose(tasks("c"), 0, [0, 1], 100.0) == 0  # nobody has this judge
    assert made.choose([*tasks("b", 1), *tasks("a", 2)], 0, [0, 1], 0.0) == 0  # the step that trains first


def test_a_lent_device_prefers_the_judge_that_it_has():
    made = judges(a=1.0, b=1.0)
    made.of = ["b", "", "", ""]
    assert made.preferred(iter(tasks("aab")), 0).judge == "b"
    assert made.preferred(iter(tasks("aab")), 1).judge == "a"
    assert made.preferred(iter(tasks("aa")), 0).judge == "a"


def test_one_judge_is_taken_in_order():
    made = Judges(2, alone=False)
    made.know(["a"])
    assert not made.several
    assert made.choose(tasks("aa"), 0, [0, 1], 9.0) == 0
    assert made.of == ["", ""]


def test_each_device_that_judges_wakes_one_judge():
    devices = SimulatedDevices(3, 5.0)
    devices.step([[judged(0.125, a=1.0, b=1.0)] * 8], Split(1, 2), "never")
    events = devices.scheduler.events
    assert [e.role for e in events].count("wake") == 2
    assert {(e.device, e.judge) for e in events if e.role == "judge"} in ({(1, "a"), (2, "b")}, {(1, "b"), (2, "a")})
    assert events.done_after("judge") == 5.0 + 8 * 1.0


def test_the_slice_of_a_judge_grows_with_its_work():
    devices = SimulatedDevices(5, 0.5)
    counts = []
    for a, b in [(1.0, 1.0)] * 2 + [(3.0, 1.0)] * 4:
        devices.begin([[judged(0.125, a=a, b=b)] * 16], Split(1, 4), "never")
        counts.append(devices.scheduler.judges.of[1:].count("a"))
        devices.time.run()
    assert counts[1] == 2
    assert counts[-1] == 3


def test_a_device_without_work_for_its_judge_takes_the_other_one_where_that_ends_sooner():
    work = [[judged(0.125, a=3.0, b=1.0)] * 8]
    free, dear = SimulatedDevices(3, 0.0), SimulatedDevices(3, 100.0)
    for devices in (free, dear):
        devices.step(work, Split(1, 2), "never")
    assert free.scheduler.events.done_after("judge") <= 8 * 4.0 / 2 + 3.0  # shared
    assert dear.scheduler.events.done_after("judge") == 100.0 + 8 * 3.0  # each kept its own


@pytest.mark.parametrize("moves", ["never", "worth", "after"])
def test_all_work_is_done_once(moves):
    work = [[judged(1.0 + n / 7, a=1.0 + n % 3, b=2.0) for n in range(9)], [judged(2.0, a=1.0, b=0.5)]]
    devices = SimulatedDevices(4, 0.25)
    devices.step(work, Split(4, 0) if moves == "after" else Split(2, 2), moves)
    events = devices.scheduler.events
    assert events.seconds("judge") == pytest.approx(sum(b.judging for one in work for b in one))
    assert [e.role for e in events].count("judge") == 2 * 10


def test_the_work_of_a_step_and_its_record_know_the_judges(tmp_path):
    work = [[judged(2.0, a=1.0, b=4.0), judged(3.0, a=1.5, b=2.0)]]
    devices = SimulatedDevices(3, 0.0)
    devices.step(work, Split(1, 2), "never")
    assert rounds(devices.scheduler.events) == work
    lines = as_rows(devices.scheduler.events, 1, 0)
    (tmp_path / "placement.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(tmp_path).trace.steps[0].shares[0][0]
    assert [batch.judges for batch in found] == [batch.judges for batch in work[0]]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["placement={type: partial, one_judge: true}", "devices_per_controller=3"], "set placement.sleep=true"),
        (["placement={sleep: true, one_judge: true}"], "devices_per_controller to 2 or more"),
    ],
)
def test_one_judge_is_refused_where_nothing_sleeps(words, why):
    with pytest.raises(UserError, match=why):
        load_recipe(["shapes-judge"], words)


def test_one_judge_of_one_is_refused_by_the_plan():
    placement = "placement={type: partial, sleep: true, one_judge: true}"
    problems = planned_in_short("shapes-judge", "devices_per_controller=2", placement).problems
    assert any("placement.one_judge: 1 of the recipe's rewards" in problem for problem in problems)


@pytest.mark.parametrize(("alone", "wakes"), [(True, 8), (False, 1)])
def test_one_device_with_two_judges_keeps_both_or_changes(alone, wakes):
    settings = Placement(type="partial", judges=1, sleep=True, one_judge=alone)
    devices = SimulatedDevices(2, 5.0, settings=settings)
    devices.step([[judged(30.0, a=1.0, b=1.0)] * 4], Split(1, 1), "never")  # each waits for the next to be sampled
    events = devices.scheduler.events
    assert len([e for e in events if e.role == "wake"]) == wakes


def test_the_simulator_keeps_what_a_recipe_says_beside_roles():
    work = Trace([Work([[[judged(30.0, a=1.0, b=1.0)] * 4]], 0.0)], 5.0, "")  # a device changes its judge in 5 seconds
    recipe = load_recipe(["shapes-judge"], ["devices_per_controller=2", "placement={type: greedy, sleep: true}"]).recipe
    alone = recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"one_judge": True})})
    found = [static(work, shape(of, 2), Split(1, 1)).steps for of in (recipe, alone)]
    assert found == [[4 * 30.0 + 1.0 + 1.0], [4 * 30.0 + 5.0 + 1.0 + 5.0 + 1.0]]


@pytest.mark.parametrize("sleep", [False, True])
def test_devices_switch_to_the_judge_that_they_are_asked(sleep):
    settings = Placement(type="partial", judges=2, sleep=sleep, one_judge=sleep, log=True)
    price = 0.4  # more than all of the judging takes, so that no device changes its judge for the other's work
    devices = SleepingDevices(3, settings, price, judges=["a", "b"])
    try:
        devices.run_step(0, [[judged(0.002, a=0.005, b=0.005)] * 8])
        lines = [line for line in devices.lines() if line.get("role") == "judge"]
    finally:
        devices.close()
    switched = {(device, words) for device, name, words in devices.performed if name == "switch_role" and device}
    assert {words for _, words in switched if "judge" in words} == {"judge a", "judge b"}
    assert len([words for _, words in switched if "judge" in words]) == (2 if sleep else len(switched))
    assert sorted(line["judge"] for line in lines) == ["a"] * 8 + ["b"] * 8
    replay = devices.replayed()
    assert replay.differs is None
    assert replay.handed > 24


def second():
    """Overrides that add the recipe's judge again, under another name."""
    loaded = load_recipe(["shapes-judge"])
    options = loaded.recipe.rewards[0].options
    judge = {"name": "judge", "on_failure": "drop", "batch_size": 4, "options": options}
    return [f"rewards={json.dumps([judge, {**judge, 'label': 'second', 'weight': 0.5}])}"]


@pytest.mark.slow
@pytest.mark.parametrize(("alone", "judging"), [(True, 1), (False, 2)])
def test_the_plan_counts_one_judge_that_is_awake(alone, judging):
    placement = f"placement={{type: partial, judges: 2, sleep: true, one_judge: {str(alone).lower()}}}"
    made = planned("shapes-judge", *second(), "devices_per_controller=3", placement)
    assert made.problems == []
    sizes = {one.bytes for one in made.asked if one.trained_on}
    most = max(phase.parts.get("rewards' models", 0) for phase in made.phases)
    assert [most] == [judging * size for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    ["{type: partial, judges: 2, sleep: true, one_judge: true}", pytest.param("adaptive", marks=pytest.mark.long)],
)
def test_two_judges_on_devices_of_their_own_learn_as_on_one_device(tmp_path, placement):
    pytest.importorskip("torchvision")
    twice = second()
    run("shapes-judge", tmp_path / "one", *JUDGED, *twice)
    run("shapes-judge", tmp_path / "two", *JUDGED, *twice, "devices_per_controller=3", f"placement={placement}")
    alike(tmp_path / "one", tmp_path / "two")
    lines = [line for line in placed(tmp_path / "two") if line.get("role") == "judge"]
    assert {line["judge"] for line in lines} == {"judge", "second"}
    assert "reward/second" in rows(tmp_path / "two")[0]
