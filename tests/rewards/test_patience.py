"""A failing reward never looks like training: a step waits and asks again, then the run stops and can be resumed."""

import json
import math
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mmrl import cli
from mmrl.app.trainer import Trainer
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Reward, Scoring
from mmrl.config.section import seconds_of
from mmrl.controller.peers import Group
from mmrl.core import checkpoint_reader as reader
from mmrl.core.errors import StoppedError, UnscoredError
from mmrl.core.signals import Stop
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.logging.progress import status_line
from mmrl.logging.rundir import RunDir
from mmrl.rewards import patience as patiences
from mmrl.rewards.patience import Patience, one_line, too_many
from mmrl.rewards.scoring import Failure, RewardSet
from mmrl.rewards.serve import RewardServer
from mmrl.training.evaluation import summary, unmeasured
from tests.support import judging, runs
from tests.support.ranks import launched

REPO = Path(__file__).resolve().parents[2]


class Clock:
    """In place of the module ``time``: who sleeps moves it."""

    def __init__(self):
        self.now, self.slept = 50.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(patiences, "time", made)
    monkeypatch.setattr(patiences, "SLICE_S", 100.0)
    return made


class Step:
    """``n`` samples of which ``bad`` have no score, until they were asked for ``heals`` times more."""

    def __init__(self, n, bad, heals=10**9, why="connection refused"):
        self.n, self.bad, self.heals, self.why, self.asked = n, bad, heals, why, 0

    def __len__(self):
        return self.n

    def failed(self):
        return [("far", self.why)] * (self.bad if self.asked < self.heals else 0)

    def lost(self):
        return {}

    def again(self):
        self.asked += 1


# How long a step waits


def test_pauses_grow_until_the_patience_is_over_and_the_last_try_is_at_its_end(clock, capsys):
    step = Step(24, 24)
    with pytest.raises(UnscoredError, match="step 3 was not trained: 24 of 24 samples failed") as stopped:
        Patience(Scoring(patience=200)).wait(step, 2, together=True)
    assert clock.slept == [1, 2, 4, 8, 16, 32, 60, 60, 17]
    assert step.asked == len(clock.slept)
    assert (stopped.value.exit_code, stopped.value.everywhere) == (3, True)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(clock.slept)
    assert said[0].startswith(
        "step 3: 24 of 24 samples failed (reward 'far': connection refused); asked again in 1.0 s"
    )
    assert str(stopped.value).endswith("Have the reward answer again"), "no share of failures would train on none"


def test_a_larger_share_is_named_where_other_samples_have_a_score(clock):
    with pytest.raises(
        UnscoredError, match=r"or set scoring\.max_failed above 0\.25 to train on the samples that have"
    ):
        Patience(Scoring(patience=200)).wait(Step(24, 23), 2, together=True)
    Patience(Scoring(patience=200, max_failed=1)).wait(Step(24, 23), 2, together=True)


def test_it_ends_as_soon_as_enough_samples_have_a_score(clock):
    step = Step(8, 3, heals=3)
    Patience(Scoring()).wait(step, 0, together=True)
    assert (step.asked, clock.slept) == (3, [1, 2, 4])


@pytest.mark.parametrize(
    ("bad", "n", "most", "waits"),
    [
        *((0, 8, 0.0, False), (1, 8, 0.0, True), (2, 8, 0.25, False), (3, 8, 0.25, True)),
        *((7, 8, 1.0, False), (8, 8, 1.0, True), (0, 0, 0.25, False)),
    ],
)
def test_a_share_past_max_failed_is_too_many_and_so_are_all(bad, n, most, waits):
    assert too_many(bad, n, most) == waits


def test_without_patience_the_run_stops_at_once(clock):
    with pytest.raises(UnscoredError):
        Patience(Scoring(patience=0)).wait(Step(4, 4), 0, together=False)
    assert clock.slept == []


def test_reasons_on_the_terminal_are_short_and_hold_nothing_that_it_acts_on(clock, capsys):
    with pytest.raises(UnscoredError) as stopped:
        Patience(Scoring(patience=1)).wait(Step(4, 4, why="\x1b[2J\x07down\nhere " + "x" * 10_000), 0, together=False)
    said = capsys.readouterr().err
    for text in (said, str(stopped.value)):
        assert "down here xxx" in text
        assert "\x1b" not in text
        assert len(text) < 700
    assert one_line("a\u202eb\r\nc", 60) == "a b c"


def in_two(steps, settings, stops=lambda rank: False):
    """What two controllers came to: for each its error or None, in threads that meet wherever controllers do."""
    meeting, posted, ended = threading.Barrier(2, timeout=60), [[], []], [None, None]

    def controller(rank):
        def gather(mine):
            posted[rank] = mine
            meeting.wait()
            found = list(posted)
            meeting.wait()
            return found

        try:
            patience = Patience(settings, gather)
            patience.stopped = lambda: stops(rank)
            patience.wait(steps[rank], 0, together=True)
        except UnscoredError as error:
            ended[rank] = error

    threads = [threading.Thread(target=controller, args=(rank,)) for rank in (0, 1)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return ended


def test_the_share_is_of_all_controllers_who_wait_and_stop_alike(monkeypatch):
    monkeypatch.setattr(patiences, "FIRST_PAUSE_S", 0.02)
    few = [Step(8, 4), Step(8, 0)]
    assert in_two(few, Scoring()) == [None, None]  # 4 of 16
    assert few[0].asked == few[1].asked == 0
    many = [Step(8, 0), Step(8, 6, heals=2)]
    assert in_two(many, Scoring(patience=20)) == [None, None]
    assert many[0].asked == many[1].asked == 2
    down = [Step(8, 0), Step(8, 6)]
    ended = in_two(down, Scoring(patience=0.3))
    assert all(isinstance(error, UnscoredError) for error in ended)
    assert down[0].asked == down[1].asked > 0
    assert "on other controllers" in str(ended[0])


# A stop


def test_a_stop_ends_the_pause_and_nothing_is_asked_again(clock, monkeypatch):
    monkeypatch.setattr(patiences, "SLICE_S", 1.0)
    step, patience = Step(8, 8), Patience(Scoring(patience=200))
    patience.stopped = lambda: clock.now >= 60  # in the fourth pause, of 8 s
    with pytest.raises(StoppedError, match="step 1 was not trained: the run was stopped while it waited: 8 of 8"):
        patience.wait(step, 0, together=True)
    assert (clock.now, step.asked) == (60, 3)


def test_controllers_stop_together_whoever_was_asked(monkeypatch):
    monkeypatch.setattr(patiences, "FIRST_PAUSE_S", 0.02)
    steps = [Step(8, 8), Step(8, 8)]
    ended = in_two(steps, Scoring(patience=60), stops=lambda rank: rank == 1 and steps[1].asked >= 2)
    assert all(isinstance(error, StoppedError) and error.everywhere for error in ended)


@pytest.mark.slow
def test_a_run_that_waits_for_its_rewards_hears_sigterm_and_resumes(tmp_path):
    reward = tmp_path / "gone.py"
    reward.write_text(GONE.format(mark=str(tmp_path / "mark")))
    words = [*runs.SMALL, f'rewards=[{{name: "{reward}:score", on_failure: drop}}]', "scoring.patience=2h"]
    out = tmp_path / "run"
    process = runs.train("sums", out, *words)
    seen = ""
    while "asked again in 4" not in seen:
        assert process.returncode is None, seen
        seen += process.stdout.read()
        time.sleep(0.1)
    process.terminate()
    code, said = runs.ended(process)
    assert code == 128 + signal.SIGTERM, said
    assert "stopped after step 2; continue with:" in said
    (tmp_path / "mark").touch()
    code, said = runs.ended(runs.train("sums", out, *words, "--resume"))
    assert code == 0, said
    assert [row["step"] for row in runs.rows(out)] == [1, 2, 3, 4]


GONE = """
from pathlib import Path
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    if context.step == 2 and not Path({mark!r}).exists():
        raise ConnectionError("refused")
    return [float(len(s.text) % 2) for s in samples]
"""

# What is asked again

FLAKY = """
import mmrl
calls = []
down = {"until": 0, "rows": ()}

def answer(samples):
    calls.append([s.id.sample for s in samples])
    if len(calls) <= down["until"]:
        if not down["rows"]:
            raise ConnectionError("refused")
        return [None if s.id.sample in down["rows"] else float(s.id.sample) for s in samples]
    return [float(s.id.sample) for s in samples]

@mmrl.reward(inputs=("text",))
def each(samples, *, context):
    return {"score": answer(samples), "half": [s.id.sample / 2 for s in samples]}

@mmrl.reward(inputs=("text",), per="group")
def group(samples, *, context):
    return answer(samples)

@mmrl.reward(inputs=("text",))
def never(samples, *, context):
    raise ConnectionError("refused")

@mmrl.reward(inputs=("text",))
def length(samples, *, context):
    return [float(sum(map(ord, s.text)) % 11) for s in samples]

@mmrl.reward(inputs=("text",))
def not_at_first(samples, *, context):
    calls.append(len(samples))
    return [None if len(calls) == 1 else float(len(calls) == 2)] * len(samples)
"""


@pytest.fixture
def flaky(tmp_path):
    import mmrl

    (tmp_path / "flaky.py").write_text(FLAKY)
    module = mmrl.load("rewards", str((tmp_path / "flaky.py").resolve()))
    return tmp_path, module


def samples(n=6):
    return [Sample(Prompt("p", "p"), SampleId(0, k // 3, 0, k), text="abc") for k in range(n)]


def scored(folder, *configs, **settings):
    rewards = RewardSet(configs, patience=Patience(Scoring(**settings)))
    scoring = rewards.start(0, 3)
    scoring.add(samples())
    try:
        return scoring.finish([[0, 1, 2], [3, 4, 5]])
    finally:
        rewards.close()


def test_batches_that_failed_are_asked_again_as_they_were(flaky, clock):
    folder, module = flaky
    module.down.update(until=5, rows=())
    scores = scored(folder, Reward(name=f"{folder}/flaky.py:each", batch_size=2, on_failure="drop"))
    assert module.calls == [[0, 1], [2, 3], [4, 5]] * 2 + [[0, 1], [2, 3]]
    assert scores.total.tolist() == [0, 1, 2, 3, 4, 5]
    assert scores.parts["each/half"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert (scores.failures, clock.slept) == ([], [1, 2])


def test_of_a_batch_only_failed_samples_are_asked_again_and_of_a_group_all(flaky, clock):
    folder, module = flaky
    module.down.update(until=2, rows=(1, 4))
    scores = scored(folder, Reward(name=f"{folder}/flaky.py:each", on_failure="drop", batch_size=3))
    assert module.calls == [[0, 1, 2], [3, 4, 5], [1], [4]]
    assert scores.total.tolist() == [0, 1, 2, 3, 4, 5]
    module.calls.clear()
    scores = scored(folder, Reward(name=f"{folder}/flaky.py:group", on_failure="drop"))
    assert module.calls == [[0, 1, 2], [3, 4, 5]] * 2
    assert scores.total.tolist() == [0, 1, 2, 3, 4, 5]


def test_few_failures_are_dropped_without_a_wait(flaky, clock):
    folder, module = flaky
    module.down.update(until=9, rows=(1,))
    scores = scored(folder, Reward(name=f"{folder}/flaky.py:each", on_failure="drop"))
    assert scores.total.isnan().tolist() == [False, True, False, False, False, False]
    assert [(f.sample.sample, f.reason) for f in scores.failures] == [(1, "returned None")]
    assert clock.slept == []


def test_what_stays_failed_is_named_once_and_what_only_watches_does_not_count(flaky, clock):
    folder, module = flaky
    module.down.update(until=1, rows=(0, 1, 2))
    scores = scored(
        folder,
        Reward(name=f"{folder}/flaky.py:each", on_failure="drop"),
        Reward(name=f"{folder}/flaky.py:never", on_failure="drop", weight=0),
    )
    assert scores.total.tolist() == [0, 1, 2, 3, 4, 5]
    assert [f.reward for f in scores.failures] == ["never"] * 6
    assert clock.slept == [1]


def test_rounds_of_dynamic_sampling_are_looked_at_by_each_controller_alone(flaky, clock):
    """Their number is not the same on all: one that asked the others would wait for ever."""
    folder, _ = flaky

    def gather(mine):
        raise AssertionError("asks the others")

    never = [Reward(name=f"{folder}/flaky.py:never", on_failure="drop")]
    scoring = RewardSet(never, patience=Patience(Scoring(patience=3), gather)).start(0, 3, scale=False)
    scoring.add(samples())
    with pytest.raises(UnscoredError) as stopped:
        scoring.finish([[0, 1, 2], [3, 4, 5]])
    assert not stopped.value.everywhere
    assert clock.slept == [1, 2]


def test_evaluations_do_not_wait(flaky, clock):
    folder, _ = flaky
    rewards = RewardSet(
        [Reward(name=f"{folder}/flaky.py:never", on_failure="drop")], patience=Patience(Scoring(patience=9))
    )
    assert len(rewards.score(samples(), [[0, 1, 2], [3, 4, 5]]).failures) == 6
    assert clock.slept == []


def test_a_judge_whose_endpoint_is_gone_is_waited_for(tmp_path, clock):
    gone = []

    def verdict(handler, body):
        if gone:
            raise ConnectionError  # also to whom it has a connection with
        if body is not None:
            said = {"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]}
            handler.say(200, json.dumps(said))
        return body is not None

    answer = {"type": "number", "min": 0, "max": 10}
    with judging.Served(before=verdict) as server:
        model = {"url": server.url, "name": "tiny"}
        options = {"model": model, "rubric": "{{ response }}", "answer": answer, "retries": 0, "cache": False}
        rewards = RewardSet(
            [Reward(name="judge", on_failure="drop", options=options)], patience=Patience(Scoring(patience=3))
        )
        assert rewards.score(samples(), [[0, 1, 2], [3, 4, 5]]).total.tolist() == [0.7] * 6
    gone.append(True)
    scoring = rewards.start(4)
    scoring.add([Sample(Prompt("p", "p"), SampleId(4, 0, 0, k), text=f"t{k}") for k in range(4)])
    with pytest.raises(UnscoredError, match=r"step 5 was not trained: 4 of 4 samples failed \(reward 'judge': http"):
        scoring.finish([[0, 1, 2, 3]])
    assert clock.slept == [1, 2]
    rewards.close()


# The recipe


def test_times_have_units():
    found = {text: seconds_of(text) for text in ("90s", "10m", "1h 30m", "2h", "0.5m", " 5 min ")}
    assert found == {"90s": 90, "10m": 600, "1h 30m": 5400, "2h": 7200, "0.5m": 30, " 5 min ": 300}
    assert load_recipe(["sums"], ["scoring.patience=10m"]).recipe.scoring == Scoring()
    assert load_recipe(["sums"], ["scoring={max_failed: 0.5, patience: 3}"]).recipe.scoring.patience == 3
    for wrong in ("soon", "10 parsecs", "-1", "1.2.3s", ""):
        with pytest.raises(RecipeError, match=r"scoring.patience: expected a time like 90s, 10m or 1h 30m, or seconds"):
            load_recipe(["sums"], [f"scoring.patience='{wrong}'"])


def test_rewards_that_all_weigh_nothing_are_refused():
    for recipe in ("sums", "shapes-lora"):
        with pytest.raises(RecipeError, match=r"rewards: all weights are 0.*give one of them a weight"):
            load_recipe([recipe], ["rewards[0].weight=0"])
    load_recipe(["sums-dpo"])  # has none


# What the terminal says


def test_no_value_stands_without_its_reason():
    assert status_line({"reward/mean": float("nan")}) == "reward -"
    row = {"reward/a": float("nan"), "reward/a/part": 0.5, "reward/b": 0.25, "samples": 8, "dropped": 8, "failed/a": 8}
    bad = [Failure(SampleId(-1, k, 0, 0), "p", "a", "connection\nrefused") for k in range(4)]
    assert summary(row, bad) == "a - (8 of 8 samples failed: connection refused)  a/part 0.500  b 0.250"
    assert summary(row, []).startswith("a - (8 of 8 samples failed: on other controllers)")


def test_an_evaluation_with_too_few_scores_of_the_metric_is_not_measured():
    row = {"samples": 8, "failed/a": 3}
    assert unmeasured(row, "reward/a/part", 0.25)
    assert not unmeasured(row, "reward/a", 0.5)
    assert not unmeasured(row, "reward/b", 0.25)


# Whole runs

TINY = [
    *("train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=8", "sampling.max_new_tokens=6"),
    *("train.steps=4", "checkpoint.every=2", "eval.every=null", "eval.samples=4", "eval.grid=1"),
]


def mmrl_train(monkeypatch, out, *words):
    """The exit code of ``mmrl train``, in this process."""
    monkeypatch.setattr(sys, "argv", ["mmrl", "train", "sums", *TINY, *words, "--out", str(out)])
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def train(out, *words, resume=False):
    """How a run without planning and report ended."""
    loaded = load_recipe(["sums"], [*TINY, *words])
    with RunDir.create(out, resume=resume) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        return Trainer(loaded, directory).begin(Stop(), resume=resume)


class Killed(RewardServer):
    """A server that dies, with all its connections, when it is first asked for step ``at``."""

    def __init__(self, name, port=0, at=None):
        super().__init__(name, port=port)
        self.at, self.open = at, []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def process_request(self, request, client_address):
        self.open.append(request)
        super().process_request(request, client_address)

    def score(self, request):
        if request.step == self.at:
            self.kill()
        return super().score(request)

    def kill(self):
        self.shutdown()
        self.server_close()
        for connection in self.open:
            self.shutdown_request(connection)


def remote(port):
    options = f"{{url: 'http://127.0.0.1:{port}', inputs: [text]}}"
    return f"rewards=[{{name: 'http:score', label: far, on_failure: drop, options: {options}}}]"


def learned(out):
    """The rows of a run without what is of the machine, and its last weights."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {k: v for k, v in r.items() if not k.startswith(("time/", "perf/", "plan/", "sent/", "features/"))}
        for r in rows
    ]
    found, _ = reader.load_latest(out / "checkpoints")
    return rows, {part: {k: t.tolist() for k, t in of.items()} for part, of in found.tensors.items()}


@pytest.fixture(scope="module")
def length(tmp_path_factory):
    file = tmp_path_factory.mktemp("length") / "flaky.py"
    file.write_text(FLAKY)
    return f"{file}:length"


@pytest.mark.slow
def test_a_run_whose_endpoint_is_killed_stops_with_3_and_resumes_to_the_same_numbers(length, tmp_path, capsys):
    server = Killed(length)
    assert train(tmp_path / "whole", remote(server.server_port)).finished
    server.kill()
    whole = learned(tmp_path / "whole")
    assert len(whole[0]) == 4
    assert " failed " not in capsys.readouterr().err

    server = Killed(length, at=2)
    rewards = remote(server.server_port)
    outcome = train(tmp_path / "cut", rewards, "scoring.patience=0.3s")
    assert (outcome.finished, outcome.done, outcome.saved, outcome.exit_code) == (False, 2, 2, 3)
    assert "step 3 was not trained" in outcome.error
    said = capsys.readouterr().err
    assert "step 3: 8 of 8 samples failed (reward 'far': cannot reach http://127.0.0.1:" in said
    assert " nan " not in said
    assert [row["step"] for row in learned(tmp_path / "cut")[0]] == [1, 2]
    assert reader.steps(tmp_path / "cut" / "checkpoints") == [2]

    server = Killed(length, server.server_port)
    assert train(tmp_path / "cut", rewards, resume=True).finished
    server.kill()
    assert learned(tmp_path / "cut") == whole


def test_an_endpoint_that_comes_back_in_time_costs_nothing_but_time(length, tmp_path, clock, capsys):
    back = []
    server = Killed(length, at=1)

    def sleep(seconds):
        clock.now += seconds
        if not back:
            back.append(Killed(length, server.server_port))

    clock.sleep = sleep
    assert train(tmp_path / "late", remote(server.server_port), "train.steps=2").finished
    assert len(back) == 1
    back[0].kill()
    said = capsys.readouterr().err
    assert "step 2: 8 of 8 samples failed" in said
    rows, _ = learned(tmp_path / "late")
    assert [row["reward/dropped"] for row in rows] == [0, 0]


@pytest.mark.parametrize("most", ["0.25", pytest.param("1.0", marks=pytest.mark.slow)])
def test_a_reward_that_always_fails_trains_nothing_and_is_never_done(length, tmp_path, monkeypatch, capsys, most):
    name = length.replace(":length", ":never")
    words = [f"rewards=[{{name: '{name}', on_failure: drop}}]", f"scoring={{max_failed: {most}, patience: 0}}"]
    assert mmrl_train(monkeypatch, tmp_path / "run", *words) == 3
    said = capsys.readouterr().err
    assert "8 of 8 samples failed (reward 'never': raised ConnectionError: refused at" in said
    assert "no step is saved; fix it, then: " in said
    assert "--resume" in said
    assert "done:" not in said
    assert reader.steps(tmp_path / "run" / "checkpoints") == []
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_heldout_reward_that_failed_is_shown_and_never_the_best(length, tmp_path, capsys):
    name = length.replace(":length", ":not_at_first")
    words = [
        *TINY,
        f"rewards=[{{name: '{length}'}}]",
        f"eval.rewards=[{{name: '{name}', label: held, on_failure: drop}}]",
        *("train.steps=2", "eval.every=1", "eval.early_stopping={metric: reward/held, patience: 2}"),
    ]
    loaded = load_recipe(["sums"], words)
    with RunDir.create(tmp_path / "run") as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        session = Trainer(loaded, directory)
        assert session.begin(Stop(), resume=False).error is None
    said = capsys.readouterr().err
    assert re.search(r"held - \(4 of 4 samples failed: returned None\).*; not counted by eval.early_stopping", said)
    assert (session.early.best, session.early.step, session.early.since) == (1.0, 1, 1)
    rows = [json.loads(line) for line in (tmp_path / "run" / "heldout.jsonl").read_text().splitlines()]
    assert [row.get("failed/held") for row in rows] == [4, None, None]


# Several controllers


def serve(rank, port, out):
    """A controller of two in a process of its own; on the second none of the first answers come."""
    peers = Group(rank, 2, "127.0.0.1", port)
    patiences.FIRST_PAUSE_S = 0.05
    steps = [Step(8, 4 * rank), Step(8, 6 * rank, heals=2), Step(8, 6 * rank)]
    ended = []
    for step, seconds in zip(steps, (60, 60, 0.4), strict=True):
        try:
            Patience(Scoring(patience=seconds), peers.gather).wait(step, 0, together=True)
            ended.append(0)
        except UnscoredError as error:
            ended.append(error.exit_code)
    torch.save({"ended": ended, "asked": [step.asked for step in steps]}, out)
    peers.close()


@pytest.mark.slow
def test_two_controllers_wait_and_stop_alike_over_a_real_group(tmp_path):
    outs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    found = launched(__file__, outs, lambda rank, port, out: [rank, port, out])
    assert found[0] == found[1]
    assert found[0]["ended"] == [0, 0, 3]
    assert found[0]["asked"][:2] == [0, 2]


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])


TELLS = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [context.patience] * len(samples)
"""


def test_a_reward_knows_how_long_the_run_waits(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    config = Reward(name=str(tmp_path / "tells.py"))
    assert scored(tmp_path, config, patience=4).parts["tells"].tolist() == [4.0] * 6
    assert RewardSet([config]).start(0, 3)._contexts["tells"].patience == math.inf
