"""Who watches whom, what the processes of a run are called, and which devices their servers have."""

import subprocess

import psutil
import pytest

from mmrl.config.loader import load_recipe
from mmrl.config.replicas import devices_of_workers, in_workers
from mmrl.inference.server_devices import ServerDevices
from mmrl.runtime.heartbeat import HeartbeatMonitor, Processes, whereabouts


def processes(hosts, devices=1, workers=None):
    """Of these hosts; each sees a GPU of its own number."""
    where = {n: whereabouts() | {"host": host, "pid": 100 + n, "visible": str(n)} for n, host in enumerate(hosts)}
    return Processes(where, devices, workers or range(devices))


def test_processes_are_named_by_their_controller_and_device():
    found = processes("aabb", devices=2)
    assert [found.name(n) for n in (2, 3)] == [
        "controller 1 of 2 (process 102 on b)",
        "device 1 of controller 1 of 2 (process 103 on b)",
    ]
    assert [found.log(n) for n in range(4)] == ["0.log", "0.1.log", "1.log", "1.1.log"]
    assert [found.others_of(n) for n in range(4)] == [[1], [], [3], []]
    assert found.hosts(1) == {0: "a", 1: "b"}
    assert found.hosts(2) == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert found.servers(load_recipe(["sums"], ["devices_per_controller=2"]).recipe, 1) is None


@pytest.mark.parametrize("placement", ["{type: disaggregated, trainers: 1}", "colocate"])
def test_a_server_of_several_devices_has_those_of_its_processes(placement):
    n = 5 if "trainers" in placement else 4
    engine = "rollout={engine: vllm_server, options: {tensor_parallel_size: 2}}"
    recipe = load_recipe(["sums"], [f"devices_per_controller={n}", engine, f"placement={placement}"]).recipe
    widths = devices_of_workers(recipe)
    workers = [sum(widths[:w]) for w in range(len(widths))]
    found = processes("a" * 2 * n, n, workers)
    mine = {number: found.servers(in_workers(recipe), number) for number in range(n, 2 * n)}
    if n == 5:  # one trains, and two engines sample; the processes of their second devices only keep them
        assert workers == [0, 1, 3]
        assert {number: mine[number].visible for number in (5, 6, 8)} == {5: "5", 6: "6,7", 8: "8,9"}
        assert all(mine[number].samples for number in (5, 6, 8))
    else:  # all train, and those of the first and third device start an engine
        assert mine[4] == ServerDevices("4,5", samples=True)
        assert mine[6] == ServerDevices("6,7", samples=True)
        assert mine[5] == mine[7] == ServerDevices("", samples=False)


def test_the_first_process_of_a_host_sees_that_another_of_its_host_has_ended():
    here, sleeper = whereabouts(), subprocess.Popen(["sleep", "100"])
    try:
        near = here | {"pid": sleeper.pid, "since": psutil.Process(sleeper.pid).create_time()}
        far = here | {"host": "far"}
        found = Processes({0: far, 1: here, 2: near, 3: far}, 1, [0])

        def monitor(number):
            return HeartbeatMonitor(None, number, found, 120.0, None, print)

        assert [monitor(n)._watched for n in range(4)] == [[1, 2, 3], [0, 2], [0], [0]]
        assert monitor(1)._silent(2, 3.0) == ""
        sleeper.kill()
        sleeper.wait()
        assert monitor(0)._silent(2, 3.0) == ""  # another host cannot know that
        assert monitor(1)._silent(2, 3.0) == f"{found.name(2)} has died"
    finally:
        sleeper.kill()
        sleeper.wait()


def test_process_1_tells_the_user_that_process_0_is_silent_and_process_0_tells_of_the_others():
    here = whereabouts()
    found = Processes(
        {n: here | {"host": host} for n, host in enumerate("abc")}, 1, [0]
    )  # none can read another's state
    told = {n: [] for n in range(3)}
    for number in range(3):
        monitor = HeartbeatMonitor(None, number, found, 120.0, None, print, told[number].append)
        for other in monitor._watched:
            for seconds in (5.0, 20.0, 40.0):
                assert monitor._silent(other, seconds) == ""
    words = (
        "{} has given no sign of life for 20 s; its state is not known. "
        "The run waits at most 2 min 00 s (runtime.patience)"
    )
    assert told == {0: [words.format(found.name(n)) for n in (1, 2)], 1: [words.format(found.name(0))], 2: []}
