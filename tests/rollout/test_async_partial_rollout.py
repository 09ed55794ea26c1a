"""Partial rollout while earlier steps train: which weights draw what, and that nothing else changes it: who is faster,
the number of controllers, a stop. The reference draws with the same versions in one process, one thing after another.
"""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mmrl.app.build import build
from mmrl.checkpoint import run_state
from mmrl.checkpoint.run_state import saver_of
from mmrl.controller import Controller
from mmrl.core import checkpoint_reader as reader
from mmrl.core.errors import UserError
from mmrl.placement import device_tasks
from mmrl.placement.single_device import SingleDevice
from mmrl.rollout.async_rollout import AsyncRollout
from tests.support import runs
from tests.support.partial_rollouts import EXTRA, PER_STEP, Room, Sampler, load, replayed, step, watched, write

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("flight"))


@pytest.fixture(autouse=True)
def sampler(monkeypatch):
    monkeypatch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: Sampler)


class Lagging(SingleDevice):
    """Draws with the version it is given, in the process that trains."""

    def continue_generation(self, run, parts, most, how, version=None):
        now = run.policy.version(run.policy.active)
        run.policy.load_version(version)
        drawn = super().continue_generation(run, parts, most, how)
        run.policy.load_version(now)
        return drawn


class Beside(SingleDevice):
    """Draws in a run of its own, while the other one trains; ``hesitates(n)`` before its n-th round."""

    def __init__(self, there, hesitates):
        self.there, self.hesitates, self.rounds, self.threads = there, hesitates, 0, set()

    def continue_generation(self, run, parts, most, how, version=None):
        self.threads.add(threading.current_thread().name)
        self.hesitates(self.rounds)
        self.rounds += 1
        self.there.policy.load_version(version)
        for part in parts:
            self.there.pipeline.encode(part.slots)
        return [device_tasks.continue_generation(self.there, part, most, how) for part in parts]


class InTurn(AsyncRollout):
    """The whole drawing of a step, before anything else is done."""

    def _begin(self, *given):
        begun = super()._begin(*given)
        begun.ended.result()
        return begun


def recipe_of(folder, staleness, *overrides):
    ahead = f"placement={{type: disaggregated, staleness: {staleness}}}"
    words = ["rollout.engine=vllm_server", "devices_per_controller=2", f"train.steps={STEPS}", *overrides, ahead]
    return load(folder, *words)


def made(folder, staleness, overrides=(), controller=None, devices=None):
    loaded = recipe_of(folder, staleness, *overrides)
    run = build(loaded.recipe, controller, devices=devices)
    run.pipeline.wake()  # models are not loaded in several threads at once
    return run


def with_ahead(run, ahead):
    return replace(run, rollout=replace(run.rollout, parts={**run.rollout.parts, "ahead": ahead}, strategy=ahead))


def opened(folder, staleness=1, devices=None, overrides=(), controller=None):
    run = made(folder, staleness, overrides, controller, devices or Lagging())
    return run if devices else with_ahead(run, InTurn(staleness, run.rollout.parts["flight"]))


def steps(run, first=0, last=STEPS):
    return [step(run, n)[0] for n in range(first, last)]


@pytest.fixture(scope="module")
def whole(folder):
    """By staleness, the steps of a run that was not interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: Sampler)
        return {n: steps(opened(folder, n)) for n in (1, 2)}


def save(run, folder, done):
    saver = saver_of(run, folder)
    saver.begin(run_state.of_run(run, done))
    saver.finish()
    assert saver.failed is None


def figures(found):
    return [{k: v for k, v in row.items() if not k.startswith(("balance/", "time/"))} for row in found]


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_response_goes_on_with_the_weights_of_the_step_that_takes_it_up(folder, staleness):
    run = opened(folder, staleness)
    model = copy.deepcopy(run.pipeline.policy).double()
    rounds, weights, rows = watched(run), [], []
    for n in range(STEPS):
        weights.append({k: v.double() for k, v in run.pipeline.policy.state_dict().items()})
        rows.append(step(run, n)[0])
    mixed = 0
    for now, landed in enumerate(rounds):
        ages = []
        for rows_of_step in landed.micro_batches:
            for i, n in enumerate(rows_of_step.padded("action_mask").sum(1).long().tolist()):
                tokens, dates = (
                    rows_of_step.padded("tokens")[i, :n].tolist(),
                    rows_of_step.padded("drawn_at")[i, :n].tolist(),
                )
                prompt = run.pipeline.conditioner.encode(rows_of_step.slots[i].prompt)["input_ids"].tolist()
                under = {v: replayed(weights[v], model, prompt, tokens) for v in set(dates)}
                then = torch.stack([under[v][t] for t, v in enumerate(dates)])
                assert (rows_of_step.padded("log_probs")[i, :n] - then).abs().max() < 1e-5
                assert dates == sorted(dates)
                assert all(v <= max(0, now - staleness) for v in dates)
                mixed += len(set(dates)) > 1
                ages += [now - v for v in dates]
        assert min(ages) >= min(now, staleness)
        assert rows[now]["sampling/stale_steps"] == max(ages)
        assert rows[now]["sampling/stale_age"] == pytest.approx(sum(ages) / len(ages))
        assert rows[now]["mismatch/weight_mean"] > 0
    assert mixed >= 3
    assert max(row["sampling/stale_steps"] for row in rows) > staleness
    assert rows[0]["mismatch/log_prob_gap_max"] < 1e-4 < rows[-1]["mismatch/log_prob_gap_max"]


@pytest.mark.slow
def test_who_is_faster_changes_nothing(folder, whole):
    """A drawing that is slow, and one that is slow now and then, while the updates go on."""
    for hesitates in (lambda n: None, lambda n: time.sleep(0.3 * (n % 3 == 1))):
        devices = Beside(made(folder, 2), hesitates)
        run = opened(folder, 2, devices)
        assert figures(steps(run)) == figures(whole[2])
        assert len(devices.threads) == STEPS  # each drawn by a thread of its own
        assert not run.rollout.parts["ahead"]._begun


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_a_resumed_run_goes_on_with_what_was_in_flight(folder, whole, staleness, tmp_path):
    first = opened(folder, staleness)
    found = steps(first, 0, 3)
    save(first, tmp_path, 3)
    saved = reader.load(tmp_path, 3)
    assert saved.parts("flight")["flight-0"]["mask"].sum() > 0
    assert len(saved.state["flight"]["slots"]) == EXTRA
    second = opened(folder, staleness)
    run_state.restore(second, saved)
    found += steps(second, 3)
    assert figures(found) == figures(whole[staleness])
    anew = opened(folder, staleness)
    run_state.restore(anew, saved)
    anew.rollout.parts["flight"].in_flight = [  # had it kept no tokens
        replace(g, rows=anew.pipeline.unwritten(g.rows.slots, g.rows.ids))
        for g in anew.rollout.parts["flight"].in_flight
    ]
    assert figures(steps(anew, 3)) != figures(whole[staleness])[3:]


@pytest.mark.slow
def test_any_number_of_controllers_draws_the_same_ahead_and_goes_on(folder, tmp_path):
    overrides = ["train.prompts_per_step=4", "rollout.partial={cut_after: 4, extra: 5, pools: 4}"]

    def gone_through(*stages):
        saved, found, done = tmp_path / str(len(stages)), [], 0
        for size, many in stages:
            room = Room(size)
            runs = [opened(folder, 1, None, overrides, Controller(0, r, size, room.member(r))) for r in range(size)]
            for run in runs if done else ():
                run_state.restore(run, reader.load(saved, done))
            with ThreadPoolExecutor(size) as pool:
                for n in range(done, done + many):
                    first, *_ = pool.map(lambda run, n=n: step(run, n)[0], runs)
                    found.append(first)
                done += many
                list(pool.map(save, runs, [saved] * size, [done] * size))
            assert not list(saved.glob(".*"))
            parts = reader.load(saved, done).parts("flight")
            assert parts.keys() == {f"flight-{pool}" for pool in range(4)}
            assert sum(of["mask"].sum() for of in parts.values()) > 0
        return found

    for row, other in zip(gone_through((1, STEPS)), gone_through((2, 2), (4, 2), (1, 2)), strict=True):
        for key in ("reward/mean", "optim/grad_norm", "sampling/stale_age", "sampling/stale_steps", "text/length"):
            assert row[key] == pytest.approx(other[key], rel=1e-4), key


def test_what_is_not_trained_on_stays_in_flight_at_the_end(folder):
    run = opened(folder)
    rounds = watched(run)
    steps(run)
    slots = [s for r in rounds for s in r.slots] + [g.slot for g in run.rollout.parts["flight"].in_flight]
    assert sorted(s.step * PER_STEP + s.index for s in slots) == list(range(STEPS * PER_STEP + EXTRA))
    assert not run.rollout.parts["ahead"]._begun
    assert run.pipeline.features.held == len({key for g in run.rollout.parts["flight"].in_flight for key in g.keys})


def test_a_drawing_that_fails_stops_the_run_and_those_after_it(folder):
    def fails(n):
        if n == 2:
            raise UserError("the engine is gone")

    run = opened(folder, 2, Beside(made(folder, 2), fails))
    with pytest.raises(UserError, match="the engine is gone"):
        steps(run)
    for begun in run.rollout.parts["ahead"]._begun.values():
        assert isinstance(begun.drawn.exception(timeout=60), UserError)


VLLM = [
    *("sums", "train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4", "model.dtype=float32"),
    *("eval.every=4", "eval.samples=4", "checkpoint.every=1", "optim.schedule=constant", "optim.lr=0.0003"),
    *("devices_per_controller=2", "placement={type: disaggregated, staleness: 1}"),
    "rollout={engine: vllm_server, partial: {cut_after: 4, extra: 4, pools: 2}}",
]


@pytest.mark.slow
@pytest.mark.long
def test_servers_beside_devices_go_on_with_responses_whatever_the_number_of_controllers(tmp_path):
    for name in ("ray", "vllm"):
        pytest.importorskip(name)
    recipe, *words = VLLM
    stages = ("one", "train.steps=4"), ("two", "train.steps=2", "controllers=2"), ("two", "train.steps=4", "--resume")
    for out, *more in stages:
        code, said = runs.ended(runs.train(recipe, tmp_path / out, *words, *more), timeout=900)
        assert code == 0, said
    for row, other in zip(runs.rows(tmp_path / "one"), runs.rows(tmp_path / "two"), strict=True):
        for key in ("sampling/stale_age", "sampling/stale_steps", "sampling/in_flight", "text/length", "reward/mean"):
            assert other[key] == row[key], (row["step"], key)
        assert other["optim/grad_norm"] == pytest.approx(row["optim/grad_norm"], rel=1e-3)
        assert row["mismatch/log_prob_gap_max"] < 1e-3 or row["sampling/stale_steps"]
    assert max(row["sampling/stale_steps"] for row in runs.rows(tmp_path / "one")) > 1
    ahead = [line for line in runs.placed(tmp_path / "one") if line.get("of", 0) > line["step"]]
    assert {line["role"] for line in ahead} == {"rollout"}
