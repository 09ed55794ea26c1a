"""Judges and engines that sleep on one device while the policy trains; an engine that is asked for a round at once."""

import pytest
import torch

from mmrl.app.build import load_prompts
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.inference.sleep_mode import SleepMode
from mmrl.logging.metrics import describe
from mmrl.placement import device_tasks
from mmrl.planner.plan import plan
from mmrl.rollout.encoding import encode
from mmrl.step.batch import chunks, samples_of
from mmrl.step.step_context import Chunk, SamplingSpec
from mmrl.training.evaluation import Evaluator
from tests.support.asleep import modules
from tests.support.partial_rollouts import Sampler, load, make, step, write
from tests.support.planning import planned_in_short

SLEEP, ENGINE = "placement={sleep: true}", "rollout={engine: vllm}"
WORDS = ["train.micro_batch_size=2", "rewards=[{name: reward_model, options: {path: scorer}}]"]
TEXTS = "rollout={engine: transformers}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    made = write(tmp_path_factory.mktemp("alone"))
    AutoModelForSequenceClassification.from_pretrained(made / "model", num_labels=1).save_pretrained(made / "scorer")
    AutoTokenizer.from_pretrained(made / "model").save_pretrained(made / "scorer")
    return made


@pytest.fixture(autouse=True)
def sampler(monkeypatch):
    monkeypatch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: Sampler)


def awake(run):
    """Bytes of the model that scores, and whether there is an engine."""
    (entry,) = run.rewards._entries
    engine = getattr(run.pipeline.engine, "_engine", run.pipeline.engine)
    (model,) = modules(entry.loaded.sleeper)
    return sum(p.nbytes for p in model.parameters()), engine is not None


def run_of(folder, monkeypatch, *words):
    """The rows of two steps with an evaluation between them, and what was awake when it sampled and trained."""
    run, seen = make(folder, *WORDS, *words), []
    for name in ("sample", "replay"):
        call = getattr(run.pipeline, name)

        def noted(*given, _call=call, _name=name, **named):
            seen.append((_name, *awake(run)))
            return _call(*given, **named)

        monkeypatch.setattr(run.pipeline, name, noted)
    begins = awake(run)
    rows = [step(run)[0]]
    rows.append(Evaluator(run, load_prompts(run.recipe, "heldout")).score(4)[0])
    seen.append(("judged", *awake(run)))
    rows.append(step(run, 1)[0])
    run.pipeline.close()
    return begins, rows, seen


@pytest.mark.slow
@pytest.mark.parametrize("engine", [TEXTS, ENGINE])
def test_what_is_not_needed_to_train_sleeps_then_and_the_run_is_the_same(folder, monkeypatch, engine):
    begins, rows, seen = run_of(folder, monkeypatch, engine, SLEEP)
    _, expected, always = run_of(folder, monkeypatch, engine)
    has_engine, size = engine == ENGINE, always[0][1]
    assert begins[0] == 0
    assert set(always) == {(name, size, has_engine) for name in ("sample", "replay", "judged")}
    steps = {(name, n, up) for name, n, up in seen if name != "sample"}
    assert steps == {("replay", 0, False), ("judged", size, has_engine)}
    drawn = [n for name, n, up in seen if name == "sample" and up == has_engine]
    assert len(drawn) == sum(name == "sample" for name, *_ in seen)
    assert sorted(set(drawn)) == [0, size]  # an evaluation judges when all is drawn
    assert rows[0].pop("placement/wake") > 0
    assert rows[2].pop("placement/wake") > 0
    assert rows == expected


def test_a_round_is_one_call_of_an_engine_and_its_micro_batches_are_as_before(folder):
    run = make(folder, *WORDS, ENGINE, "train.prompts_per_step=4")
    slots, _, _ = encode(run, run.controller.slots(0, run.prompts, 4))
    asked = [Chunk([s for s, _ in part], [i for _, i in part]) for part in chunks(samples_of(slots, 2), 3)]
    how, clock = SamplingSpec([], "current", 0, frozenset({"text"})), Clock(torch.device("cpu"))
    drawn = list(run.compute.devices.sample(run, asked, how, clock))
    calls = run.pipeline.engine.calls
    assert [n for _, n in calls] == [8]
    assert [n for n, _, _ in drawn] == [0, 1, 2]
    for n, trajectory, samples in drawn:
        before, shown = device_tasks.sample(run, asked[n], how)
        assert [s.text for s in samples] == [s.text for s in shown]
        assert (trajectory.ids, trajectory.features) == (before.ids, before.features)
        assert trajectory.segments == before.segments
        for name in ("tokens", "log_probs", "action_mask", "truncated"):
            assert torch.equal(getattr(trajectory, name), getattr(before, name)), name
    assert [n for _, n in calls[1:]] == [3, 3, 2]
    given = run.pipeline.updates()
    assert (given["perf/engine_calls"], given["perf/engine_requests"]) == (4, 16)
    assert all(map(describe, given))


def test_an_evaluation_asks_an_engine_for_as_many_as_a_step_has(folder):
    run = make(folder, *WORDS, ENGINE)
    Evaluator(run, load_prompts(run.recipe, "heldout")).score(10)
    assert [n for _, n in run.pipeline.engine.calls] == [4, 4, 2]


def test_responses_in_flight_go_on_in_one_call(folder):
    run = make(folder, "train.micro_batch_size=2")
    row, _ = step(run)
    calls = run.pipeline.engine.calls
    assert calls[0] == (4, 2 * (2 + 3))
    assert len(calls) == row["sampling/rounds"]


@pytest.mark.parametrize("keep", [True, False])
def test_weights_come_back_before_the_cache_and_what_was_dropped_is_never_sampled_with(keep):
    said = []
    mode = SleepMode(
        keep_weights=keep, sleep=lambda level: said.append(f"sleep {level}"), wake=lambda parts: said.extend(parts)
    )
    mode.ready()
    mode.wake()
    assert said == []
    for _ in range(2):
        said.clear()
        mode.sleep()
        mode.sleep()
        mode.wake()
        assert said == [f"sleep {1 if keep else 2}", "weights"]
        if not keep:
            with pytest.raises(RuntimeError, match="update it before it samples"):
                mode.ready()
            with pytest.raises(ValueError, match="bad weights"), mode.filled():
                raise ValueError("bad weights")
            with pytest.raises(RuntimeError, match="update it before it samples"):
                mode.ready()
        with mode.filled():
            said.append("new weights")
        assert said[2:] == ["new weights", "kv_cache"]
        mode.ready()
        assert len(said) == 4


# -- plans -------------------------------------------------------------------------------------------------------------


def parts(made, name):
    return {phase.name: phase.parts[name] for phase in made.phases if name in phase.parts}


def test_a_plan_counts_what_sleeps_on_the_host_while_one_device_trains(folder):
    words = [*WORDS, ENGINE, "device=cuda", "model.lora={rank: 2, alpha: 4}"]
    awake, asleep = (plan(load(folder, *words, *more), 2**33) for more in ([], [SLEEP]))
    assert not [problem for problem in asleep.problems if "sleep" in problem]
    (judge,), engine = {*parts(awake, "rewards' models").values()}, int(0.4 * 2**33)
    assert parts(asleep, "rewards' models") == {"sample": judge, "decode": judge}
    assert parts(asleep, "engine") == {"encode": engine, "sample": engine, "decode": engine}
    assert "judge" not in [phase.name for phase in asleep.phases]
    frozen = next(role.bytes for role in asleep.roles if role.name == "policy, frozen")
    assert asleep.host - awake.host >= judge + frozen
    assert awake.load.total - asleep.load.total == judge + engine
    where = {role.name: role.where for role in asleep.roles}
    assert where["reward reward_model"] == "sample and decode, else in host memory"
    assert where["engine"] == "encode, sample and decode, else in host memory"
    whole = plan(load(folder, *WORDS, ENGINE, "device=cuda", SLEEP), 2**33)  # all weights are given anew
    assert {r.name: r.where for r in whole.roles}["engine"] == "encode, sample and decode, else freed"
    assert whole.host == judge


def test_what_has_nothing_to_put_to_sleep_is_refused(folder, tmp_path):
    for recipe in ("shapes-draft", "shapes-dpo"):
        with pytest.raises(UserError, match="does not sample before it trains, so nothing sleeps; remove it"):
            load_recipe([recipe], [SLEEP])
    said = " ".join(planned_in_short("sums", SLEEP).problems)
    assert "the policy itself samples, so nothing sleeps; remove it, or set rollout.engine" in said
    own = tmp_path / "own.py"
    own.write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',), device=True)\nclass Own:\n"
        "    def score(self, samples, *, context):\n        return [0.0 for _ in samples]\n"
    )
    said = " ".join(planned_in_short("sums", SLEEP, f"rewards=[{{name: {own}:Own}}]").problems)
    assert "placement.sleep: Own cannot sleep: give the class sleep(device) and wake(device)" in said
