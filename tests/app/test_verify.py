"""``mmrl verify``: a step is repeated to the bit, what differs is named, and the run's directory stays as it is."""

import hashlib
import itertools
import json
import math
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

from mmrl import cli
from mmrl.app.verify.notes import of_environment, of_servers
from mmrl.config.loader import load_recipe
from mmrl.logging.rundir import RunDir
from mmrl.report.nondeterministic_metrics import MEASURED, OF_PROCESS, why_not_compared
from mmrl.rewards.judging import remote
from mmrl.rewards.judging.store import CACHE, TRANSCRIPTS
from mmrl.runtime.start import train
from tests.support import judging, partial_rollouts, tiny

RECIPE = """
name: verified
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 4}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.1}
train: {steps: 6, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
optim: {lr: 1.0e-2}
eval: {every: 2, samples: 4}
checkpoint: {every: 2, keep: 2}
"""
REWARD = """
import random
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context, luck=0.0):
    return [len(set(s.text)) + luck * random.random() for s in samples]
"""
SMALL = ["train.steps=2", "train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=4"]
SMALL += ["eval.samples=4", "eval.every=2", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    tiny.language_model(folder / "model", hidden_size=16, intermediate_size=32, num_attention_heads=2)
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(40)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "rubric.txt").write_text("{{ prompt }}\n{{ response }}\nGood?")
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return train(load_recipe([folder / "recipe.yaml"]), folder / "run")


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def verify(capsys, run, *words):
    """The exit code of ``mmrl verify``, and what it printed: on stdout and on stderr."""
    before = sys.argv
    sys.argv = ["mmrl", "verify", str(run), *words]
    capsys.readouterr()
    try:
        cli.main()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        sys.argv = before
    said = capsys.readouterr()
    assert all(len(line) <= 80 for line in said.out.splitlines())
    return code, said.out, said.err


def content(run):
    """Every file of a run, by name."""
    return {
        path.relative_to(run): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in run.rglob("*")
        if path.is_file()
    }


def differing(out):
    return [line.split()[0] for line in out.splitlines() if "DIFFERS" in line]


def edited(run, step, **changes):
    """Change numbers in the row of ``step``, each by a function."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, change in changes.items():
        rows[step - 1][name.replace("__", "/")] = change(rows[step - 1][name.replace("__", "/")])
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- a run that is as it was


def test_numbers_evaluation_samples_and_weights_are_the_same_and_nothing_is_changed(run, capsys):
    before = content(run)
    code, out, err = verify(capsys, run, "--step", "6")
    assert code == 0, out
    assert content(run) == before
    assert "replaying steps 5 to 6 from the checkpoint of step 4" in err
    weights = sum(len(load_file(f)) for f in (run / "checkpoints" / "step_000006").glob("*.safetensors"))
    assert weights > 20
    assert f"checkpoint of step 6: {weights} of {weights} tensors are the same to the bit" in out
    assert "samples after step 6: 1 of 1 files" in out
    assert "step 6 is the same to the bit" in " ".join(out.split())
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[5])
    names = {name for name in row if not name.startswith(("time/", "perf/", "plan/", "features/", "step"))}
    listed = out[out.index("step 6: ") : out.index("evaluation after")]
    assert {line.split()[0] for line in listed.splitlines()[1:]} == names
    assert json.dumps(row["policy/loss"]) in listed


def test_without_a_step_it_is_the_first_after_the_newest_checkpoint_that_has_one(run, capsys):
    code, out, _ = verify(capsys, run)
    assert code == 0
    assert out.startswith("step 5, replayed from the checkpoint of step 4\n")
    assert "With --step 6 weights are compared too" in out


def test_a_first_step_is_repeated_from_the_base_model(run, capsys):
    code, out, _ = verify(capsys, run, "--step", "1")
    assert code == 0
    assert out.startswith("step 1, replayed from the base model\n")


def test_a_step_before_every_checkpoint_is_refused_and_those_that_can_be_are_named(run, capsys):
    code, out, err = verify(capsys, run, "--step", "3")
    assert (code, out) == (2, "")
    assert "no checkpoint before it is kept" in err
    assert "--step 1 to 2, from the base model, or 5 to 6" in err
    code, _, err = verify(capsys, run, "--step", "7")
    assert code == 2
    assert "the run has steps 1 to 6" in err


def test_the_learning_rate_follows_the_cpu_time_that_was_recorded(folder, tmp_path, capsys, monkeypatch):
    ticks = itertools.count()  # every step takes a CPU-second
    with monkeypatch.context() as clock:
        clock.setattr("mmrl.placement.single_device.SingleDevice.cpu_seconds", lambda self, run: float(next(ticks)))
        changes = ["optim={schedule: linear, lr: 0.01}", "train.steps=50", "train.max_cpu_seconds=5", "eval.every=null"]
        run = train(load_recipe([folder / "recipe.yaml"], changes), tmp_path / "run")
    rates = [json.loads(line)["optim/lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rates == pytest.approx([0.01, 0.0085, 0.0065, 0.0045, 0.0025])
    for step in ("1", "5"):
        code, out, _ = verify(capsys, run, "--step", step)
        assert code == 0, out


@pytest.mark.parametrize(
    "changes",
    [
        ["algorithm={type: ppo, critic_lr: 1.0e-3}", "train.group_size=1", "optim.ema_decay=0.9"],
        ["algorithm={type: dapo, dynamic_sampling: true}", "optim.schedule=linear", "train.updates_per_step=2"],
    ],
    ids=["critic and moving average", "dynamic sampling"],
)
def test_what_a_run_keeps_beside_its_weights_is_taken_up(folder, tmp_path, capsys, changes):
    loaded = load_recipe([folder / "recipe.yaml"], [*changes, "train.steps=3", "eval.every=null"])
    run = train(loaded, tmp_path / "run")
    code, out, _ = verify(capsys, run, "--step", "3")
    assert code == 0, out
    assert out.startswith("step 3, replayed from the checkpoint of step 2\n")


def test_responses_in_flight_are_taken_up(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.families.text.engine_sampling.engine_class", lambda name: partial_rollouts.Sampler)
    loaded = partial_rollouts.load(
        partial_rollouts.write(tmp_path), "train.steps=4", "checkpoint.every=3", "eval.every=null"
    )
    run = train(loaded, tmp_path / "run")
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[3])["sampling/stale_tokens"] > 0
    code, out, _ = verify(capsys, run, "--step", "4")
    assert code == 0, out
    assert out.startswith("step 4, replayed from the checkpoint of step 3\n")


def test_a_run_without_a_step_is_refused(copy, capsys):
    (copy / "metrics.jsonl").write_text("")
    code, _, err = verify(capsys, copy)
    assert code == 2
    assert "has no finished step yet" in err


# ---- a run that is not


def test_the_last_bit_of_a_number_is_seen(copy, capsys):
    edited(copy, 5, policy__loss=lambda value: math.nextafter(value, 9.0))
    edited(copy, 6, **{"reward__mean": lambda value: 0.5, "text__length": lambda value: None})
    code, out, _ = verify(capsys, copy, "--step", "6")
    assert code == 1
    assert set(differing(out)) == {"policy/loss", "text/length", "reward/mean"}
    assert "step 6 is NOT the same" in " ".join(out.split())
    assert "recorded not finite" in out


def test_a_number_that_is_missing_in_the_replay_differs_and_one_that_was_not_recorded_is_named(copy, capsys):
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    del rows[4]["policy/loss"]
    rows[4]["policy/of_another_version"] = 1.0
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = verify(capsys, copy, "--step", "5")
    assert code == 1
    assert differing(out) == ["policy/of_another_version"]
    assert "Not compared (not in the run's records): policy/loss." in out


def test_a_changed_weight_of_the_later_checkpoint_is_named(copy, capsys):
    later = copy / "checkpoints" / "step_000006"
    tensors = load_file(later / "weights.safetensors")
    name = sorted(tensors)[3]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, later / "weights.safetensors")
    manifest = json.loads((later / "manifest.json").read_text())
    data = (later / "weights.safetensors").read_bytes()
    described = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"]["weights.safetensors"] = described
    (later / "manifest.json").write_text(json.dumps(manifest))
    code, out, _ = verify(capsys, copy, "--step", "6")
    assert code == 1
    assert name in out
    assert out.count("DIFFERS") == 1


def test_a_damaged_checkpoint_is_named_and_before_the_step_an_older_one_is_taken(copy, capsys):
    later = copy / "checkpoints" / "step_000006" / "weights.safetensors"
    data = bytearray(later.read_bytes())
    data[-1] ^= 1
    later.write_bytes(data)
    code, out, _ = verify(capsys, copy, "--step", "6")
    assert code == 1
    assert differing(out) == ["step_000006"]
    assert "Checkpoint step_000006 is not whole: weights.safetensors does not match its checksum" in " ".join(
        out.split()
    )
    (copy / "checkpoints" / "step_000004" / "state.json").unlink()
    code, out, err = verify(capsys, copy, "--step", "5")
    assert code == 2
    assert "--step 1 to 2" in err


def test_a_reward_that_draws_at_random_is_found(folder, tmp_path, capsys):
    changes = ["rewards=[{name: reward.py, options: {luck: 1.0}}]", "train.steps=1", "eval.every=null"]
    run = train(load_recipe([folder / "recipe.yaml"], changes), tmp_path / "run")
    code, out, _ = verify(capsys, run)
    assert code == 1
    assert "reward/reward" in differing(out)
    assert "text/length" not in differing(out)
    assert "Of reward: a reward that draws at random" in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"controllers": 2}, "has 2 controllers of 1 devices"),
        ({"rollout": {"engine": "vllm_server", "reproducible": False}}, "drew its samples without seeds"),
    ],
)
def test_what_cannot_be_repeated_is_refused(copy, capsys, changes, said):
    settings = json.loads((copy / "resolved.json").read_text())
    (copy / "resolved.json").write_text(json.dumps(settings | changes))
    code, _, err = verify(capsys, copy)
    assert code == 2
    assert said in err


def test_what_is_not_as_in_the_run_is_named(copy):
    directory = RunDir(copy)
    assert of_environment(directory) == ["Versions, processor, devices and threads are those of the run."]
    env = json.loads(directory.env.read_text())
    env["versions"]["torch"], env["cpu"]["count"] = "1.0", 999
    directory.env.write_text(json.dumps(env))
    (said,) = of_environment(directory)
    assert "versions.torch 1.0, now " in said
    assert "999" not in said


# ---- what others said


def serve(body):
    """The verdict on a question, which depends on its text; None for one that is refused."""
    text = json.dumps(body["messages"]).encode()
    return None if sum(text) % 4 == 0 else sum(text) % 10


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_BACKOFF_S", 0.01)

    def answer(handler, body):
        if body is None:
            return False
        verdict = serve(body)
        choice = {"message": {"content": str(verdict)}, "finish_reason": "stop"}
        handler.say(400, "{}") if verdict is None else handler.say(200, json.dumps({"choices": [choice]}))
        return True

    with judging.Served(before=answer) as server:
        yield server


def judged(folder, out, url, **options):
    judge = {
        "model": {"url": url, "name": "tiny"},
        "rubric": "rubric.txt",
        "answer": {"type": "number", "min": 0, "max": 10},
        "retries": 0,
        **options,
    }
    rewards = f"rewards=[{{name: judge, on_failure: drop, options: {json.dumps(judge)}}}]"
    changes = [rewards, "train.steps=2", "eval.every=2"]
    return train(load_recipe([folder / "recipe.yaml"], [*changes, "scoring.max_failed=0.9"]), out)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
def test_recorded_verdicts_stand_in_for_an_endpoint_that_is_gone(folder, tmp_path, capsys, endpoint, cache):
    run = judged(folder, tmp_path / "run", endpoint.url, cache=cache)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["reward/dropped"] for row in rows) > 0, "failures are repeated too"
    endpoint.__exit__()
    asked = len(endpoint.requests)
    (run / CACHE).unlink(missing_ok=True)
    before = content(run)
    code, out, _ = verify(capsys, run, "--step", "2")
    assert code == 0, out
    assert "20 verdicts of judge were taken from the run's records" in out
    assert len(endpoint.requests) == asked
    assert content(run) == before
    (run / TRANSCRIPTS).unlink()
    code, _, err = verify(capsys, run, "--step", "2")
    assert code == 2
    assert "the replay needs rewards that do not answer now" in err


def test_a_question_that_is_not_in_the_records_is_asked_again(folder, tmp_path, capsys, endpoint):
    run = judged(folder, tmp_path / "run", endpoint.url)
    (run / TRANSCRIPTS).unlink()
    code, out, _ = verify(capsys, run, "--step", "2")
    assert code == 0, out
    assert "judge was asked again: 20 questions are not in the run's records." in out
    assert "were taken" not in out


def test_a_judge_in_this_process_answers_again(folder, tmp_path, capsys):
    model = judging.text_model(tmp_path / "critic", positions=1024)
    judge = json.dumps({"model": model, "rubric": "rubric.txt", "answer": {"type": "yes_no", "floor": 0}})
    changes = [f"rewards=[{{name: judge, options: {judge}}}]", "train.steps=2", "eval.every=null"]
    run = train(load_recipe([folder / "recipe.yaml"], changes), tmp_path / "run")
    (run / CACHE).unlink()
    code, out, _ = verify(capsys, run, "--step", "2")
    assert code == 0, out
    assert "taken from the run's records" not in out
    rows = [json.loads(line) for line in (run / TRANSCRIPTS).read_text().splitlines()]
    for row in rows:
        row |= {"cached": row["step"] == 1, "verdicts": [0.25]}
    (run / TRANSCRIPTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = verify(capsys, run, "--step", "2")
    assert code == 1
    assert "reward/judge                       DIFFERS" in out
    assert "replayed 0.25" in out
    assert "8 verdicts of judge were taken" in out


def test_rewards_behind_http_are_said_to_be_asked_again():
    reward = "{name: 'http:score', label: far, options: {url: 'http://user:word@127.0.0.1:9'}}"
    recipe = load_recipe(["shapes-lora"], [f"rewards=[{reward}]"]).recipe
    assert of_servers(recipe, evaluated=False) == ["The reward far was asked again, at http://<secret>@127.0.0.1:9."]


# ---- what counts


def test_what_clocks_measured_is_not_compared():
    tables = MEASURED["metrics"] | OF_PROCESS
    assert why_not_compared("time/step", tables) == "times"
    assert why_not_compared("features/bytes", tables) == "what the process held in memory"
    for name in ("policy/loss", "reward/time/step", "optim/lr", "balance/padding", "sampling/rounds"):
        assert why_not_compared(name, tables) is None


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["shapes-lora", "sums", "scenes"])
def test_shipped_recipes_are_repeated(recipe, tmp_path, capsys):
    """Pictures, texts, and texts on pictures."""
    if recipe == "scenes":
        pytest.importorskip("torchvision")
    more = ["sampling.steps=4", "sampling.window={size: 2}"] if recipe == "shapes-lora" else ["sampling.batch_size=8"]
    run = train(load_recipe([recipe], [*SMALL, *more]), tmp_path / "run")
    before = content(run)
    code, out, _ = verify(capsys, run)
    assert code == 0, out
    assert content(run) == before
    assert out.startswith("step 2, replayed from the checkpoint of step 1\n")
    for part in ("step 2", "evaluation after step 2", "samples after step 2", "checkpoint of step 2"):
        assert f"\n{part}: " in out
