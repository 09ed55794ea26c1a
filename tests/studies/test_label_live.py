"""Votes while a run trains: the log, the page's server, and runs whose reward the votes are."""

import asyncio
import http.client
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageStat
from safetensors.torch import load_file
from typer.testing import CliRunner

import mmrl
from mmrl.app.verify import verify
from mmrl.cli import app
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.data.loading import load_prompts
from mmrl.rewards.learned.labels.embeddings import Encoders
from mmrl.rewards.learned.labels.live import Batch, Shown, asks, fitted
from mmrl.rewards.learned.labels.spreading import HEAD
from mmrl.rewards.learned.labels.votes import Used, VoteLog, asked_in, named, place_of, wrong_value
from mmrl.studies.labels.live import VoteServer
from mmrl.studies.labels.voting import to_train
from tests.support.browser import opened

SMALL = [
    *("train.prompts_per_step=4", "train.group_size=6", "train.micro_batch_size=12", "sampling.steps=4"),
    *("eval.every=null", "checkpoint.every=1", "checkpoint.keep=9", "model.dtype=float32"),
    *("train.steps=3", "rewards=[{name: votes, on_failure: drop, options: {first: 24, wait: 4, refit: 4, by: head}}]"),
]


def vote(log, voter, sample, value):
    log.write("vote", voter=voter, time=1.0, samples=[sample], value=value)


@pytest.fixture
def log(tmp_path):
    found = VoteLog(tmp_path)
    found.begin("scores")
    return found


def test_the_log_counts_the_last_vote_of_each_voter_and_what_is_taken_back(log):
    vote(log, "ann", "0/0.0.0.1", 1)
    vote(log, "bob", "0/0.0.0.1", 0)
    half = len(log.data())
    vote(log, "ann", "0/0.0.0.2", 1)
    vote(log, "ann", "0/0.0.0.2", 0)
    log.write("undo", voter="bob", time=2.0, samples=["0/0.0.0.1"])
    log.write("pause", voter="bob", time=2.0, value=True)
    assert log.read().means == {("0/0.0.0.1",): 1.0, ("0/0.0.0.2",): 0.0}
    assert (log.read().events, log.read().paused) == (5, True)
    assert log.read(half).means == {("0/0.0.0.1",): 0.5}
    with log.path.open("ab") as file:
        file.write(b'{"kind": "vote", "voter": "ann"')  # another process is in the middle of a line
    assert log.read().events == 5


def test_votes_of_two_kinds_are_refused_with_what_to_do(log):
    log.write("vote", voter="ann", time=1.0, samples=["0/0.0.0.1", "0/0.0.0.2"], value=1)
    with pytest.raises(UserError, match=r"line 2: no vote of the kind scores.* remove the line"):
        log.read()
    with pytest.raises(UserError, match="two kinds"):
        VoteLog(log.folder.parent).begin("scores")


def test_a_log_of_pairs_is_not_gone_on_with_as_scores(tmp_path):
    VoteLog(tmp_path).begin("pairs")
    with pytest.raises(UserError, match="set votes: pairs in its options"):
        VoteLog(tmp_path).begin("scores")


def test_a_log_that_was_changed_after_a_step_used_it_is_refused(log):
    vote(log, "ann", "0/0.0.0.1", 1)
    used = Used(len(log.data()), (0, len(log.data())), ("0.0.0.0",))
    log.write_used(0, used)
    assert log.read().used == {0: used}
    log.check(used, 0)
    log.path.write_bytes(log.data().replace(b'"value": 1}', b'"value": 0}'))
    with pytest.raises(UserError, match="was changed after step 1 used it"):
        log.check(used, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 0.3, -1, True, "1", None, [1]])
def test_what_is_no_vote_is_refused(value):
    assert "one of 0, 0.25" in wrong_value("scores", ("0/0.0.0.1",), value)
    assert "two samples" in wrong_value("pairs", ("0/0.0.0.1",), 1)
    assert "two samples" in wrong_value("pairs", ("0/0.0.0.1", "0/0.0.0.1"), 1)
    assert [named(name) for name in ("", " ", "a\nb", "x" * 41, 7, " ann ")] == [None] * 5 + ["ann"]


def clusters(votes, tmp_path):
    """Samples in two clusters of one prompt, those of the first cluster better, by votes of the kind ``votes``."""
    torch.manual_seed(0)
    good = torch.arange(40) % 2 == 0
    parts = [torch.randn(40, 6) + 3 * good.unsqueeze(1) * torch.eye(6)[0]]
    pool = Batch([Shown(f"0/0.0.0.{n}", "a", "") for n in range(40)], parts)
    log = VoteLog(tmp_path)
    log.begin(votes)
    for n in range(0, 24, 2):
        if votes == "scores":
            vote(log, "ann", f"0/0.0.0.{n}", 1)
            vote(log, "ann", f"0/0.0.0.{n + 1}", 0)
        else:
            pair, value = ([n, n + 1], 1) if n % 4 else ([n + 1, n], 0)
            log.write("vote", voter="ann", time=1.0, samples=[f"0/0.0.0.{m}" for m in pair], value=value)
    return pool, log.read(), good


@pytest.mark.parametrize("votes", ["scores", "pairs"])
def test_votes_order_samples_that_nobody_voted_on_and_the_least_sure_is_asked_first(votes, tmp_path):
    pool, tally, good = clusters(votes, tmp_path)
    known = fitted(pool, tally, Encoders("image", "pixels", ""), HEAD, tmp_path / "votes" / "fit-0-1")
    scores = known.scores(pool.parts)
    assert scores[24:][good[24:]].min() > scores[24:][~good[24:]].max()
    again = fitted(pool, tally, Encoders("image", "pixels", ""), HEAD, tmp_path / "votes" / "fit-1-1")
    assert torch.equal(again.scores(pool.parts), scores)
    asked = asks(pool, tally, known, Encoders("image", "pixels", ""))
    if votes == "scores":
        assert {row["samples"][0] for row in asked} == {f"0/0.0.0.{n}" for n in range(24, 40)}
        return
    gaps = [abs(torch.logit(scores[[int(name.split(".")[-1]) for name in row["samples"]]]).diff()) for row in asked]
    assert gaps == sorted(gaps)


def drawn(step):
    """Red and blue pictures of two prompts, in two batches."""
    rows = [
        Sample(Prompt(f"p{n % 2}", f"prompt {n % 2}"), SampleId(step, n % 2, 0, n), image=Image.new("RGB", (8, 8), c))
        for n, c in enumerate([(200 + n, 0, n) if n % 3 else (n, 0, 200 + n) for n in range(24)])
    ]
    return rows[:12], rows[12:]


def test_a_step_waits_for_the_first_votes_and_while_the_page_pauses_it_and_uses_what_it_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.rewards.learned.labels.embeddings.lacking", lambda name: "not here")  # words are quick
    reward, log = mmrl.load("rewards", "votes").Voted(first=12, by="head"), VoteLog(tmp_path)

    async def scored(step):
        context = Context(step=step, folder=tmp_path)
        return [asyncio.ensure_future(reward.score(list(batch), context=context)) for batch in drawn(step)]

    async def scenario():
        assert isinstance((await reward.score(list(drawn(-1)[0]), context=Context(folder=tmp_path)))[0], Failed)
        first = await scored(0)
        while len(asked_in(log.folder).get("asks", ())) < 24 or not asked_in(log.folder)["waiting"]:
            await asyncio.sleep(0.01)
        for row in asked_in(log.folder)["asks"][:12]:
            assert not any(one.done() for one in first)
            vote(log, "ann", row["samples"][0], int(int(row["samples"][0].split(".")[-1]) % 3 > 0))
        vote(log, "ann", "0/0.0.0.0", 0)
        vote(log, "bob", "0/0.1.0.3", 0)
        scores = [value for one in first for value in await one]
        assert min(scores[n] for n in range(24) if n % 3) > max(scores[::3])
        log.write("pause", voter="ann", time=1.0, value=True)
        second = await scored(1)
        while asked_in(log.folder)["waiting"] != "paused on the page":
            await asyncio.sleep(0.01)
        assert not any(one.done() for one in second)
        log.write("pause", voter="ann", time=2.0, value=False)
        return scores, [value for one in second for value in await one]

    made = asyncio.run(scenario())
    assert sorted(log.read().used) == [0, 1]
    reward = mmrl.load("rewards", "votes").Voted(first=12, by="head")  # another process, after a kill

    async def again():
        return [[value for one in await scored(step) for value in await one] for step in (0, 1)]

    assert tuple(asyncio.run(again())) == made
    assert sorted(log.read().used) == [0, 1]


@contextmanager
def serving(folder):
    with VoteServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(server, method, path, said=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    given = {"X-Token": server.token, "Content-Type": "application/json"} | headers
    connection.request(method, path, said if isinstance(said, str | None) else json.dumps(said), given)
    reply = connection.getresponse()
    return reply.status, reply.read()


@pytest.fixture
def asking(log):
    """A run that asks for votes on three samples."""
    names = [f"0/0.0.0.{n}" for n in range(3)]
    (log.folder / "000000").mkdir()
    for n, name in enumerate(names):
        Image.new("RGB", (8, 8), (80 * n, 0, 0)).save(log.folder / "000000" / f"{name[2:]}.png")
    rows = [{"samples": [name], "prompt": "a <b>circle</b>", "texts": [""]} for name in names]
    said = {"run": log.read().run, "votes": "scores", "step": 0, "used": 0, "auc": None, "waiting": "0 of 20 votes"}
    (log.folder / "asks.json").write_text(json.dumps({**said, "asks": rows}))
    return log


def test_the_server_takes_votes_of_several_voters_and_shows_no_sample_to_two(asking):
    run = asking.read().run
    with serving(asking.folder.parent) as server:
        states = {who: json.loads(asked(server, "GET", f"/state?voter={who}")[1]) for who in ("ann", "bob")}
        shown = {who: state["ask"]["samples"][0] for who, state in states.items()}
        assert shown == {"ann": "0/0.0.0.0", "bob": "0/0.0.0.1"}
        status, data = asked(server, "GET", f"/file/{shown['ann']}")
        assert (status, data) == (200, (asking.folder / "000000" / "0.0.0.0.png").read_bytes())
        for who, name in shown.items():
            vote = {"kind": "vote", "run": run, "voter": who, "samples": [name], "value": 1}
            assert asked(server, "POST", "/vote", vote)[0] == 200
        assert asking.read().given == {("ann", ("0/0.0.0.0",)): 1.0, ("bob", ("0/0.0.0.1",)): 1.0}
        assert asked(server, "POST", "/vote", {"kind": "undo", "run": run, "voter": "ann"})[0] == 200
        assert asked(server, "POST", "/vote", {"kind": "undo", "run": run, "voter": "ann"})[0] == 400
        skip = {"kind": "skip", "run": run, "voter": "ann", "samples": ["0/0.0.0.0"]}
        assert json.loads(asked(server, "GET", "/state?voter=bob")[1])["ask"]["samples"] == ["0/0.0.0.2"]
        assert json.loads(asked(server, "GET", "/state?voter=ann")[1])["ask"]["samples"] == ["0/0.0.0.0"]
        assert asked(server, "POST", "/vote", skip)[0] == 200
        assert json.loads(asked(server, "GET", "/state?voter=ann")[1])["ask"] is None
        for kind in ("pause", "enough"):
            assert asked(server, "POST", "/vote", {"kind": kind, "run": run, "voter": "ann", "value": True})[0] == 200
        state = json.loads(asked(server, "GET", "/state?voter=bob")[1])
        assert (state["count"], state["voters"], state["paused"], state["enough"]) == (1, 1, True, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": 0.3},
        {"value": True},
        {"value": None},
        {"samples": ["0/0.0.0.7"]},
        {"samples": ["../../secret"]},
        {"samples": ["0/0.0.0.0", "0/0.0.0.1"]},
        {"run": "0" * 16},
        {"voter": "x" * 41},
        {"voter": "a\x1b[2J"},
        {"kind": "used"},
    ],
)
def test_votes_that_mean_nothing_or_are_of_another_run_are_refused_and_not_kept(asking, wrong):
    good = {"kind": "vote", "run": asking.read().run, "voter": "ann", "samples": ["0/0.0.0.0"], "value": 1}
    with serving(asking.folder.parent) as server:
        asked(server, "GET", "/state?voter=ann")
        assert asked(server, "POST", "/vote", {**good, **wrong})[0] == 400
        for text in (
            json.dumps(good).replace(": 1}", ": NaN}"),
            json.dumps(good).replace(": 1}", ": 1e999}"),
            "[" * 900,
        ):
            assert asked(server, "POST", "/vote", text)[0] == 400
        assert asked(server, "POST", "/vote", {**good, "x": "y" * 5000})[0] == 413
        assert asked(server, "POST", "/vote", good, **{"X-Token": "wrong"})[0] == 403
        assert asked(server, "POST", "/vote", good, Host="attacker.example")[0] == 403
        assert asked(server, "POST", "/vote", good, **{"Content-Type": "text/plain"})[0] == 404
        for path in ("/file/0/../votes.jsonl", "/file/0/0.0.0.9", "/file/0/0.0.0.0.png", "/file/..%2fvotes.jsonl"):
            assert asked(server, "GET", path)[0] == 404
    assert asking.read().events == 0


def redder(picture):
    red, _, blue = (ImageStat.Stat(band).sum[0] for band in picture.split())
    return int(red > blue)


class Voting(threading.Thread):
    """Votes by colour on all that the run asks for, through the server, until the run has ended."""

    def __init__(self, server, most=60):
        super().__init__(daemon=True)
        self.server, self.most, self.over = server, most, threading.Event()

    def run(self):
        while not self.over.is_set():
            state = json.loads(asked(self.server, "GET", "/state?voter=ann")[1])
            if not state["ask"]:
                time.sleep(0.05)
                continue
            name = state["ask"]["samples"][0]
            picture = Image.open(place_of(self.server.log.folder, name + ".png"))
            said = {"kind": "vote", "run": state["run"], "voter": "ann", "samples": [name], "value": redder(picture)}
            asked(self.server, "POST", "/vote", said)


@contextmanager
def voted(folder):
    with serving(folder) as server:
        voter = Voting(server)
        voter.start()
        try:
            yield server
        finally:
            voter.over.set()
            voter.join(60)


def weights(run, step):
    return {file.name: load_file(file) for file in sorted((run / "checkpoints").glob(f"step_*{step}/*.safetensors"))}


def same(one, other):
    assert one.keys() == other.keys() != set()
    return all(torch.equal(one[f][k], other[f][k]) for f in one for k in one[f])


@pytest.mark.slow
def test_a_run_that_goes_on_with_its_log_gets_the_same_weights_and_verify_asks_nobody(tmp_path):
    with voted(tmp_path / "run"):
        mmrl.train("shapes-full", SMALL, out=tmp_path / "run")
    log = VoteLog(tmp_path / "run")
    used = log.read().used
    assert sorted(used) == [0, 1, 2]
    assert log.read(used[0].bytes).events >= 24
    rewards = [row["reward/votes"] for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())]
    assert len({*rewards}) == 3
    trained = weights(tmp_path / "run", 3)
    assert not same(weights(tmp_path / "run", 1), weights(tmp_path / "run", 2))
    size = len(log.data())
    assert verify(tmp_path / "run", 3).equal
    assert len(log.data()) == size
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*[23]"):
        shutil.rmtree(folder)
    for folder in (tmp_path / "run" / "votes").glob("fit-*"):
        shutil.rmtree(folder)  # they are made again, the same
    done = CliRunner().invoke(app, ["label", str(tmp_path / "run"), "--train"])  # nobody votes any more
    assert done.exit_code == 0, done.exception
    assert "http://127.0.0.1:" in done.stdout
    assert same(weights(tmp_path / "run", 3), trained)
    assert len(log.data()) == size


@pytest.mark.slow
def test_a_run_that_is_killed_within_a_step_goes_on_with_the_votes_of_that_step(tmp_path):
    run = tmp_path / "run"
    log = VoteLog(run)
    command = [sys.executable, "-m", "mmrl", "train", "shapes-full", *SMALL, "--out", str(run)]
    with voted(run):
        with subprocess.Popen(command) as process:
            try:
                while not log.path.exists() or 1 not in log.read().used:  # its second step has its votes
                    assert process.poll() is None
                    time.sleep(0.02)
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
        before = log.data()
        used = log.read().used
        assert sorted(used) == [0, 1]
        assert not list((run / "checkpoints").glob("step_*2"))
        done = CliRunner().invoke(app, ["continue", str(run)])
        assert done.exit_code == 0, done.exception
    assert log.data().startswith(before)
    assert {step: log.read().used[step] for step in (0, 1)} == used
    assert all(verify(run, step).equal for step in (1, 2, 3))


@pytest.mark.slow
def test_a_stop_while_a_run_waits_for_its_first_votes_ends_it(tmp_path):
    asks = tmp_path / "run" / "votes" / "asks.json"

    def interrupt():
        while not asks.exists() or "0 of 24 votes" not in asks.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert not mmrl.train("shapes-full", SMALL, out=tmp_path / "run").finished
    assert VoteLog(tmp_path / "run").read().used == {}


@pytest.mark.slow
def test_what_cannot_train_on_votes_is_refused_before_a_model_is_loaded(tmp_path):
    for words, why in (
        (["shapes-full", "--train", "controllers=2"], "votes train a run of one process"),
        (["shapes-full", "--train", "train.prompts_per_step=2", "train.group_size=4"], "a step has 8 samples"),
        (["shapes-full", "--train", "--stars"], "leave them out with --train"),
        (["samples", "train.steps=2"], "are for --train"),
        ([str(tmp_path), "--train"], "is a folder; --train trains a recipe's model"),
        (["moving-shapes", "--train"], "clips cannot be voted on while a run trains"),
    ):
        out = ["--out", str(tmp_path / "run")] if "--train" in words else []
        done = CliRunner().invoke(app, ["label", *words, *out])
        assert why in str(done.exception), words
    one = ["controllers=1", "devices_per_controller=1", "train.prompts_per_step=5", "train.group_size=4"]
    assert to_train("shapes-full", one, tmp_path / "run", pairs=False)[1:] == (tmp_path / "run", False)
    wrong = {"votes: both": "no kind of vote", "votes: pairs, by: graph": "cannot spread pairs", "first: 0": "first: 0"}
    wrong |= dict.fromkeys(("noises: 17", "noises: 1.5"), "under 1 to 16 of them") | {"noises: 0": "noises: 0"}
    for options, why in wrong.items():
        with pytest.raises(UserError, match=why):
            mmrl.train("shapes-full", [f"rewards=[{{name: votes, options: {{{options}}}}}]"], out=tmp_path / "run")


@pytest.mark.slow
def test_a_short_proof_votes_change_the_reward_and_the_weights(tmp_path, monkeypatch):
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        proof = importlib.import_module("proof_votes")
    finally:
        sys.path.remove(folder)
    shapes, judge = mmrl.load("datasets", "shapes"), proof.verifier()
    asked_for, *others = load_prompts(load_recipe(["shapes-full"], []).recipe, "train")
    other = next(one for one in others if one.text != asked_for.text)
    drawn = [shapes.picture(one, seed=1) for one in (asked_for, other)]
    assert [judge(asked_for.text, [one]) for one in drawn] == [1, 0]
    assert judge(asked_for.text, drawn) == 1
    # What is right is too rare in so few pictures: a reward that cannot tell it gives all of them one score.
    monkeypatch.setattr(proof, "verifier", lambda: lambda _prompt, pictures: redder(pictures[0]))
    small = [one for one in SMALL[:8] if "eval.every" not in one and "sampling" not in one]
    words = f"--folder {tmp_path} --votes 32 --first 24 --wait 4 --errors 0 --steps 3 --heldout 24".split()
    found = proof.main([*words, "--set", *small, "checkpoint.every=1"])
    assert (found[0]["votes"], found[0]["steps"]) == (32, 3)
    rows = list(map(json.loads, (tmp_path / "seed-0" / "metrics.jsonl").open()))
    assert len({row["reward/votes"] for row in rows}) == 3
    assert not same(weights(tmp_path / "seed-0", 1), weights(tmp_path / "seed-0", 3))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (1400, "light"), (1400, "dark")])
def test_in_a_browser_the_page_works_by_keyboard_and_says_what_happened(asking, tmp_path, width, scheme):
    with serving(asking.folder.parent) as server, opened(tmp_path) as browser:
        browser.tell("Page.enable")
        browser.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        browser.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.tell("Page.navigate", url=server.url)
        said = "document.querySelector('[role=status]')?.textContent"
        browser.until(said, "Type your name to vote.")
        browser.until("document.querySelector('#shown img')?.naturalWidth", 8)
        browser.press("1")
        wrong = "Not kept: send an object with voter, a name of 1 to 40 characters. Type your name to vote."
        browser.until(said, wrong)
        name = "document.getElementById('voter')"
        browser.value(f"{name}.value = 'ann'; {name}.dispatchEvent(new Event('change'))")
        assert browser.value("document.getElementById('prompt').textContent") == "a <b>circle</b>"
        browser.press("1")
        browser.until(said, "Kept: good. Training waits: 0 of 20 votes.")
        browser.press("Backspace")
        browser.until(said, "Your last vote is taken back. Training waits: 0 of 20 votes.")
        browser.press("p")
        browser.until("document.getElementById('pause').getAttribute('aria-pressed')", "true")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    assert (asking.read().events, asking.read().paused) == (2, True)


@pytest.mark.slow
def test_votes_by_the_keyboard_of_a_browser_train_a_run(tmp_path):
    over = threading.Event()

    def press(browser):
        while not over.is_set():
            if name := browser.value("busy || !state.waiting || !state.ask ? '' : state.ask.samples[0]"):
                browser.press("1" if int(name.split(".")[-1]) % 2 else "0")
            time.sleep(0.05)

    with serving(tmp_path / "run") as server, opened(tmp_path) as browser:
        browser.tell("Page.enable")
        browser.tell("Page.navigate", url=server.url)
        browser.until("typeof state", "object")
        browser.value("document.getElementById('voter').value = 'ann'")
        presses = threading.Thread(target=press, args=(browser,))
        presses.start()
        try:
            mmrl.train("shapes-full", SMALL, out=tmp_path / "run")
        finally:
            over.set()
            presses.join(60)
    log = VoteLog(tmp_path / "run")
    given = log.read().given
    assert len(given) >= 16
    assert all(value == int(samples[0].split(".")[-1]) % 2 for (_, samples), value in given.items())
    counts = [log.read(used.bytes).events for _, used in sorted(log.read().used.items())]
    assert len(counts) == 3
    assert 24 <= counts[0] < counts[1] < counts[2]
    assert not same(weights(tmp_path / "run", 1), weights(tmp_path / "run", 3))
