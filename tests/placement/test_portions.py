"""Which controller begins which prompts: every portion once, those of a slow controller elsewhere; the refusals."""

import random
import threading
import time
from contextlib import nullcontext
from itertools import pairwise

import pytest

from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.errors import UserError
from mmrl.placement import claimed
from mmrl.placement.adaptive import Split
from mmrl.placement.portions import Claims, Numbers, Progress, ahead, slowest
from mmrl.placement.simulated_devices import MicroBatch, SimulatedDevices, SimulatedTime
from mmrl.placement.simulated_moving import step
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.planner.simulator.simulate import Cluster, adaptive
from mmrl.planner.simulator.trace import LOADS, Trace, Work, synthetic
from mmrl.step.step_context import Chunk, ComingChunks


class Locked(Numbers):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def add(self, number, value):
        with self.lock:
            return super().add(number, value)


def test_every_portion_is_begun_once_whoever_is_first():
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 40) for _ in range(4)]
        counters, begun = Locked(), [[] for _ in lengths]

        def work(rank, lengths=lengths, counters=counters, begun=begun):
            claims = Claims(rank, lengths, counters, 2)
            while (number := claims.own()) is not None:
                begun[rank].append((rank, number))
                claims.tell(0.5 * rank, 1.0)
            while (found := claims.other()) is not None:
                begun[rank].append(found)
            assert claims.left == 0

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [one for of in begun for one in of]
        assert len(found) == len(set(found)) == sum(lengths)
        assert set(found) == {(rank, n) for rank, length in enumerate(lengths) for n in range(length)}
        for rank, of in enumerate(begun):
            assert of[0] == (rank, 0)
            own = [n for r, n in of if r == rank]
            assert own == list(range(len(own)))  # from the front; the others' from the end


def test_a_portion_moves_if_it_ends_earlier_so():
    idle, busy = Progress(0, 0.0, 1.0), Progress(0, 9.0, 1.0)
    assert slowest(idle, {1: Progress(1, 0.5, 1.0), 2: Progress(3, 0.5, 1.0)}, 1) == 2
    assert slowest(idle, {1: Progress(1, 0.5, 1.0), 2: Progress(1, 0.5, 4.0)}, 1) == 2
    assert slowest(busy, {1: Progress(3, 0.5, 1.0)}, 1) is None
    assert slowest(Progress(0, 0.0, 3.0), {1: Progress(2, 0.5, 1.0)}, 1) is None  # it would take longer here
    assert slowest(idle, {1: Progress(0, 9.0, 1.0)}, 1) is None
    assert slowest(idle, {1: Progress(1, 0.0, 0.0)}, 1) == 1  # it has not told anything


def made(work, slow, devices=2):
    """The work of a step with two controllers, of which one is slower."""
    time = SimulatedTime()
    both = [SimulatedDevices(devices, 0.0, time, slow=times) for times in (slow, 1.0)]
    moved = step(both, work, Split(devices, 0), "worth")
    return both, moved


@pytest.mark.parametrize("judging", [0.0, 0.5])
def test_simulated_controllers_do_all_work_once(judging):
    draw = random.Random(0)
    rounds = [[MicroBatch(draw.uniform(0.5, 1.5), judging * draw.random()) for _ in range(n)] for n in (16, 2)]
    both, moved = made([rounds, rounds], 4.0)
    done = [event for one in both for event in one.scheduler.events]
    assert sum(event.role == "rollout" for event in done) == 36
    assert sum(event.role == "judge" for event in done) == 36 * (judging > 0)
    assert moved > 0
    for one in both:
        for device in range(2):
            spans = sorted((e.began, e.ended) for e in one.scheduler.events if e.device == device)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))


def test_what_a_slow_controller_has_not_begun_moves():
    """Two controllers of one device with 12 s of work each; the first takes three times as long. Together they do 24 s
    of work in the time in which they do 1 + 1/3 s a second."""
    both, moved = made([[[MicroBatch(1.0, 0.0)] * 12]] * 2, 3.0, devices=1)
    ends = [one.scheduler.events.done_after("rollout") for one in both]
    assert moved == 6
    assert ends == pytest.approx([18.0, 18.0])
    assert made([[[MicroBatch(1.0, 0.0)] * 12]] * 2, 1.0, devices=1)[1] == 0  # equal work stays


def test_nobody_waits_long_for_a_slow_controller_where_prompts_move():
    trace = synthetic(LOADS["tailed"], 6, 4, 16, 128)
    stays, moves = (adaptive(trace, Cluster(4, 4, slow=2.0), prompts_move=move) for move in (False, True))
    assert moves.apart / moves.seconds < 0.5 * stays.apart / stays.seconds
    assert moves.seconds < 0.8 * stays.seconds
    even = Trace([Work([[[MicroBatch(1.0, 0.5)] * 30]] * 4, 1.0)], 0.1, "")
    assert adaptive(even, Cluster(4, 4), prompts_move=True).steps == pytest.approx(adaptive(even, Cluster(4, 4)).steps)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "sums",
            ["devices_per_controller=2", "placement=disaggregated"],
            "with placement disaggregated devices sample for later steps.*placement to adaptive",
        ),
        ("sums", ["rollout.partial={cut_after: 4, extra: 2}"], "with rollout.partial.*or remove rollout.partial"),
        ("sums", ["rollout.engine=vllm_server"], "begins all prompts of a step at once.*engine to transformers"),
        ("sums", ["midway={tokens: 4, group_size: 16}"], "with midway.*or remove midway"),
        ("sums-dpo", [], "samples nothing before its update.*set train.balance to predicted"),
        ("shapes-draft", [], "samples nothing before its update.*set train.balance to predicted"),
        (
            "sums",
            ["controllers=2", "train.prompts_per_step=4", "sampling.batch_size=16", "train.group_size=8"],
            "begins 2 at once .whole micro-batches of sampling.batch_size.*raise train.prompts_per_step",
        ),
    ],
)
def test_what_cannot_move_is_refused_with_the_edit(name, changes, message):
    with pytest.raises(UserError, match=f"train.balance: .*{message}"):
        load_recipe([name], [*changes, "train.balance=moving"])


class Listed(ComingChunks):
    """The micro-batches of a list."""

    over = True

    def __init__(self, chunks):
        self.chunks, self.told = list(chunks), []

    @property
    def left(self):
        return len(self.chunks)

    def tell(self, open, each):
        self.told.append((open, each))

    def __next__(self):
        if not self.chunks:
            raise StopIteration
        return self.chunks.pop(0)


def test_devices_claim_only_what_they_can_begin(monkeypatch):
    """Two threads are the devices, whose judging is as long as sampling; all is drawn and nothing is claimed early."""
    monkeypatch.setattr("mmrl.placement.claimed.features_of", lambda context, slots: {})
    board, coming = TaskQueue(2, Placement()), Listed(Chunk([], [], n) for n in range(9))
    board.tell(board.scheduler.new_step)
    board.begin(Split(2, 0), "worth", coming.left)
    drawing, judged = [], []

    def device(number):
        while (task := board.take(number)) is not None:
            began = time.perf_counter()
            if task.role == "rollout":
                drawing.append(9 - coming.left - len(drawing))
            board.done(number, task.role, began, began, time.perf_counter() + 0.01)
            task.answer.set_result((task.arguments[0].begun, []))

    threads = [threading.Thread(target=device, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    found = []
    for n, begun, _ in claimed.drawn(board, None, coming, None, lambda name: nullcontext()):
        found.append((n, begun))
        judged.append(board.put(Task("judge", print, (Chunk([], [], -n),))))
    for answer in judged:
        answer.result(timeout=60)
    board.close()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(n, n) for n in range(9)]
    assert max(drawing) <= ahead(2)
    assert any(each > 0 for _, each in coming.told)
    assert not board.at_work


def test_an_error_on_a_device_reaches_who_waits_for_samples(monkeypatch):
    monkeypatch.setattr("mmrl.placement.claimed.features_of", lambda context, slots: {})
    board, coming = TaskQueue(2, Placement()), Listed(Chunk([], [], n) for n in range(9))
    board.begin(Split(2, 0), "worth", coming.left)
    threading.Timer(0.2, board.fail, (0, RuntimeError("lost"))).start()
    with pytest.raises(RuntimeError, match="lost"):
        list(claimed.drawn(board, None, coming, None, lambda name: nullcontext()))
