"""Partial rollout in the loop: responses that take several steps, sampled by a real engine with weights of its own."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from mmrl.app.build import build
from mmrl.checkpoint import run_state
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.core import checkpoint_reader as reader
from mmrl.core.clock import Clock
from mmrl.core.errors import BadPromptError, UserError
from mmrl.logging.metrics import describe
from mmrl.runtime.start import train
from mmrl.step.step_metrics import StepMetrics
from tests.support.partial_rollouts import (
    CUT,
    EXTRA,
    LONGEST,
    PER_STEP,
    Room,
    Sampler,
    load,
    make,
    replayed,
    step,
    watched,
    write,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("flight"))


@pytest.fixture(autouse=True)
def sampler(monkeypatch):
    monkeypatch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: Sampler)


def positions(slots):
    return [slot.step * PER_STEP + slot.index for slot in slots]


def test_every_step_trains_on_as_many_groups_and_nothing_is_lost_or_trained_twice(folder):
    run = make(folder)
    rounds, rows = watched(run), []
    for n in range(10):
        rows.append(step(run, n)[0])
        trained, flying = [s for r in rounds for s in r.slots], [g.slot for g in run.rollout.parts["flight"].in_flight]
        assert len(rounds[-1].slots) == PER_STEP
        assert len(rounds[-1].scores.total) == PER_STEP * 2
        assert sorted(positions([*trained, *flying])) == list(range(PER_STEP * (n + 1) + EXTRA))
        assert positions(flying) == sorted(positions(flying))
        assert rows[-1]["sampling/in_flight"] + rows[-1]["sampling/waiting"] == EXTRA
        assert all(describe(key) for key in rows[-1]), [key for key in rows[-1] if not describe(key)]
    assert positions(trained) != sorted(positions(trained))  # a long one was overtaken
    assert {most for most, _ in run.pipeline.engine.calls} == {CUT}
    assert rows[0]["sampling/stale_tokens"] == 0
    assert rows[0]["sampling/stale_steps"] == 0
    assert max(row["sampling/stale_steps"] for row in rows) >= 2
    assert max(row["sampling/in_flight"] for row in rows) > 0


def test_every_token_keeps_the_log_prob_of_the_weights_that_drew_it(folder):
    import copy

    run = make(folder)
    model = copy.deepcopy(run.pipeline.policy).double()
    rounds, weights, rows = watched(run), [], []
    for n in range(6):
        weights.append({k: v.double() for k, v in run.pipeline.policy.state_dict().items()})
        rows.append(step(run, n)[0])
    mixed = 0
    for now, landed in enumerate(rounds):
        ages, gaps = [], []
        for rows_of_step in landed.micro_batches:
            for i, n in enumerate(rows_of_step.padded("action_mask").sum(1).long().tolist()):
                tokens, dates = rows_of_step.padded("tokens")[i, :n].tolist(), rows_of_step.padded("drawn_at")[i, :n]
                prompt = run.pipeline.conditioner.encode(rows_of_step.slots[i].prompt)["input_ids"].tolist()
                under = {v: replayed(weights[v], model, prompt, tokens) for v in {*dates.tolist(), now}}
                then = torch.stack([under[v][t] for t, v in enumerate(dates.tolist())])
                assert (rows_of_step.padded("log_probs")[i, :n] - then).abs().max() < 1e-5
                assert dates.tolist() == sorted(dates.tolist())
                mixed += len(set(dates.tolist())) > 1
                ages.append(now - dates)
                gaps.append((under[now] - then).abs())
        ages, gaps = torch.cat(ages), torch.cat(gaps)
        assert rows[now]["sampling/stale_tokens"] == pytest.approx((ages > 0).double().mean().item())
        assert rows[now]["sampling/stale_steps"] == ages.max()
        assert rows[now]["mismatch/log_prob_gap_max"] == pytest.approx(gaps.max().item(), abs=1e-4)
        assert bool((gaps > 1e-2).any()) == bool((ages > 0).any())  # what is stale is not what trains
    assert mixed >= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drawn_in_parts_or_whole_a_greedy_response_is_the_same(folder, temperature):
    run = make(folder)
    run.pipeline.settings = run.pipeline.settings.model_copy(update={"temperature": temperature})
    clock = Clock(torch.device("cpu"))
    rounds = [
        run.rollout.parts["flight"].collect(
            run, run.rollout.parts["flight"].draw(run, n, n, clock), n, clock, StepMetrics()
        )
        for n in range(4)
    ]
    assert max(len(t.drawn_at[t.action_mask].unique()) for r in rounds for t in r.micro_batches) > 1
    equal = []
    for cut in (t for r in rounds for t in r.micro_batches):
        keys = run.pipeline.encode(cut.slots)
        whole = run.pipeline.sample(cut.slots, cut.ids, [], run.recipe.seed)
        run.pipeline.features.release(keys)
        for i, n in enumerate(whole.padded("action_mask").sum(1).long().tolist()):
            equal.append(
                n == cut.padded("action_mask")[i].sum()
                and torch.equal(cut.padded("tokens")[i, :n], whole.padded("tokens")[i, :n])
                and bool(cut.truncated[i] == whole.truncated[i])
                and bool((cut.padded("log_probs")[i, :n] - whole.padded("log_probs")[i, :n]).abs().max() < 1e-5)
            )
    assert all(equal) == (temperature == 0)  # what goes on draws with numbers of its own


def test_what_the_engine_must_not_draw_ends_a_response(folder):
    run = make(folder)
    run.pipeline.conditioner.forbidden = list(range(1, 256, 6))
    rounds = watched(run)
    for n in range(4):
        step(run, n)
    ends = 0
    for rows in (t for r in rounds for t in r.micro_batches):
        assert not torch.isin(rows.padded("tokens"), torch.tensor(run.pipeline.conditioner.forbidden)).any()
        for i, n in enumerate(rows.padded("action_mask").sum(1).long().tolist()):
            stopped = n > 0 and rows.padded("tokens")[i, n - 1].item() in run.pipeline.conditioner.stop_tokens
            assert bool(rows.truncated[i]) != stopped
            ends += not stopped and n < LONGEST
    assert ends >= 2


def test_features_stay_while_a_group_is_in_flight_and_no_longer(folder):
    run = make(folder, "data.train={path: few.jsonl, heldout: 0}")  # several groups share a prompt
    run.pipeline.features.budget_bytes = 0  # what nobody holds is dropped
    for n in range(5):
        step(run, n)
        keys = [key for g in run.rollout.parts["flight"].in_flight for key in g.keys]
        assert len(keys) == EXTRA
        assert +run.pipeline.features._held == {key: keys.count(key) for key in keys}


def test_a_prompt_that_cannot_be_used_is_replaced_in_the_flight_and_named(folder):
    run = make(folder)
    encode = run.pipeline.conditioner.encode
    bad = {slot.prompt.id for slot in run.controller.slots(1, run.prompts, PER_STEP)}

    def picky(prompt):
        if prompt.id in bad:
            raise BadPromptError(prompt.id, "its picture is torn")
        return encode(prompt)

    run.pipeline.conditioner.encode = picky
    rounds, failures = watched(run), []
    for n in range(5):
        failures += step(run, n)[1]
    assert [(f.sample.step, f.sample.slot, f.reason) for f in failures] == [
        (1, 0, "its picture is torn"),
        (1, 1, "its picture is torn"),
    ]
    slots = {
        (s.step, s.index): s
        for s in [*(s for r in rounds for s in r.slots), *(g.slot for g in run.rollout.parts["flight"].in_flight)]
    }
    for index in range(PER_STEP):
        assert slots[1, index].attempt == 1
        assert slots[1, index].prompt.id not in bad


def test_rewards_of_groups_see_whole_groups(folder):
    run = make(folder, "rewards[0].name=reward.py:whole")
    for n in range(4):
        assert step(run, n)[0]["reward/mean"] == 0.5


def rows_of(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "plan/", "features/"))} for row in rows
    ]


def same_end(one, other):
    """Whether two runs ended alike: metrics, evaluations, and all that their last checkpoints hold. Of one pool."""
    assert rows_of(one) == rows_of(other)
    assert (one / "heldout.jsonl").read_text() == (other / "heldout.jsonl").read_text()
    a, b = (reader.load_latest(path / "checkpoints")[0] for path in (one, other))
    assert a.state["flight"] == b.state["flight"]
    assert len(a.state["flight"]["slots"]) == EXTRA
    for part in a.tensors:
        assert a.tensors[part].keys() == b.tensors[part].keys()
        assert all(torch.equal(a.tensors[part][name], b.tensors[part][name]) for name in a.tensors[part]), part
    assert not (a.tensors["flight-0"]["under_way"] & ~a.tensors["flight-0"]["truncated"]).any()


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: Sampler)
        return train(load(folder), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("done", [2, 4])
def test_a_resumed_run_takes_the_steps_that_would_have_come(folder, tmp_path, uninterrupted, done):
    train(load(folder, f"train.steps={done}"), tmp_path / "run")
    flight = reader.load(tmp_path / "run" / "checkpoints", done)
    assert flight.tensors["flight-0"]["mask"].sum() > 0  # tokens were in flight
    train(load(folder), tmp_path / "run", resume=True)
    same_end(tmp_path / "run", uninterrupted)


def test_a_step_that_failed_leaves_the_flight_of_the_step_before(folder, tmp_path, uninterrupted):
    loaded = load(folder, "rewards[0].name=reward.py:breaks_once", "checkpoint.every=100")
    with pytest.raises(UserError, match="steps up to 2 are saved"):
        train(loaded, tmp_path / "run")
    train(loaded, tmp_path / "run", resume=True)
    same_end(tmp_path / "run", uninterrupted)


def test_other_data_than_what_is_in_flight_is_refused(folder, tmp_path, uninterrupted):
    run = make(folder)
    found, _ = reader.load_latest(uninterrupted / "checkpoints")
    run = replace(run, prompts=[*run.prompts[1:], run.prompts[0]])
    with pytest.raises(
        UserError, match=r"slot \d of step \d had the prompt data:\d+, and now has .* the data set has changed"
    ):
        run_state.restore(run, found)


def together(folder, size, pools):
    """The runs of ``size`` controllers, of four prompts a step and five groups more in flight."""
    partial = f"rollout={{engine: vllm_server, partial: {{cut_after: {CUT}, extra: 5, pools: {pools}}}}}"
    loaded = load(folder, "train.prompts_per_step=4", partial)
    room = Room(size)
    return [build(loaded.recipe, Controller(0, rank, size, room.member(rank))) for rank in range(size)]


def gone_through(folder, pools, *stages):
    """Of each step its metrics, the slots trained on and the tokens left in flight; ``stages``: controllers and steps
    of each."""
    saved, found, trained, done = None, [], [], 0
    for size, steps in stages:
        runs = together(folder, size, pools)
        if saved:
            for run in runs:
                run.policy.load_state(*saved[0])
                run.rollout.parts["flight"]._load(run, *saved[1:])
        rounds = [watched(run) for run in runs]
        with ThreadPoolExecutor(size) as pool:
            for n in range(done, done + steps):
                rows = [row for row, _ in pool.map(lambda run, n=n: step(run, n), runs)]
                assert all(row["sampling/in_flight"] + row["sampling/waiting"] == 5 for row in rows)
                slots = sorted(s.step * 4 + s.index for of in rounds for s in of[-1].slots)
                assert len(slots) == 4
                trained += slots
                flying = {
                    (g.slot.step, g.slot.index): g.rows.padded("tokens").tolist()
                    for r in runs
                    for g in r.rollout.parts["flight"].in_flight
                }
                places = [*trained, *(of * 4 + index for of, index in flying)]
                assert len(set(places)) == len(places) == 4 * (n + 1) + 5  # none is lost, none is trained on twice
                found.append((rows[0], slots, flying))
        done += steps
        states = [json.loads(json.dumps(run.rollout.parts["flight"].state_dict().numbers)) for run in runs]
        assert all(state == states[0] for state in states)
        pools_of_all = {
            int(file.partition("-")[2]): rows
            for run in runs
            for file, rows in run.rollout.parts["flight"].state_dict().tensors.items()
        }
        saved = runs[0].policy.state(), pools_of_all, states[0]
    return found


@pytest.mark.slow
def test_whatever_the_number_of_controllers_the_same_groups_are_trained_on(folder):
    alone = gone_through(folder, 4, (1, 7))
    several = gone_through(folder, 4, (2, 2), (4, 3), (1, 1), (2, 1))
    for (row, slots, flying), (other, theirs, also) in zip(alone, several, strict=True):
        assert slots == theirs
        assert flying == also
        for key in ("reward/mean", "optim/grad_norm", "sampling/stale_tokens", "sampling/stale_steps"):
            assert row[key] == pytest.approx(other[key], rel=1e-4), key
    assert any(any(tokens) for of in flying.values() for tokens in of)  # of what is in flight some is drawn
    assert [slots for _, slots, _ in gone_through(folder, 1, (1, 7))] != [slots for _, slots, _ in alone]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.engine=transformers"], "rollout.partial: only an engine with its own copy of the weights"),
        (["algorithm={type: dapo}"], "set algorithm.dynamic_sampling to false"),
        ([f"rollout.partial.cut_after={LONGEST}"], "rollout.partial.cut_after: no response is longer than 14 tokens"),
        (["rollout.partial.extra=0"], "rollout.partial.extra"),
        (["rollout.partial.pools=3"], "set pools to 2 or less, or train.prompts_per_step to 3 or more"),
        (["rollout.partial={cut_after: 4, extra: 1, pools: 2}"], "set pools to 1 or less, or extra to 2 or more"),
        (["rollout.engine=vllm_server", "controllers=2"], "set it to 2, or controllers to a divisor of it"),
        (["algorithm={type: dpo}", "train.group_size=1", "rewards=[]"], "rollout.partial: dpo samples nothing"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, overrides, why):
    with pytest.raises(UserError) as refused:
        load(folder, *overrides)
    assert why in str(refused.value)


def test_pictures_are_not_drawn_in_parts():
    with pytest.raises(UserError, match=r"rollout\.partial: pictures are not sampled in parts"):
        load_recipe(["shapes-lora"], ["rollout={partial: {cut_after: 2, extra: 2}}"])


def test_without_partial_rollout_the_engine_is_never_told_to_cut(folder):
    run = make(folder, "rollout={engine: vllm}")
    row, _ = step(run)
    assert {most for most, _ in run.pipeline.engine.calls} == {None}
    assert "flight" not in run.rollout.parts
    assert "sampling/stale_tokens" not in row
