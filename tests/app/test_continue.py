"""``mmrl continue``: a run goes on from its directory alone, also longer and with another learning rate."""

import json
import os
import shlex
import shutil
import signal

import pytest

import mmrl
from mmrl.app.continuing import continued
from mmrl.config.learning_rate import learning_rate
from mmrl.config.loader import load_recipe
from mmrl.logging.metrics import read
from mmrl.logging.rundir import read_ended
from mmrl.report.html import write_report
from tests.support import recipes, tiny
from tests.support.cli import mmrl as run_command
from tests.support.ranks import Command, free_port
from tests.support.runs import alike, ended
from tests.support.sweep import RECIPE, REWARDS

KILLING = """
import os, pathlib, signal
import mmrl

@mmrl.reward(inputs=("text",))
def short(samples, *, context):
    at = pathlib.Path(__file__).with_name("at")
    if at.exists() and context.step == int(at.read_text()):
        at.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return [-len(s.text) / 50 for s in samples]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("continue")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "two.py").write_text(REWARDS)
    (folder / "kill.py").write_text(KILLING)
    (folder / "recipe.yaml").write_text(RECIPE.replace("eval: {every: 4", "eval: {every: 2"))
    return folder


def train(root, out, *words):
    loaded = load_recipe([root / "recipe.yaml"], ["rewards.0.name=kill.py:short", *words])
    from mmrl.runtime.start import train as into

    return into(loaded, out)


def goes_on(out, *words, choice=None):
    from mmrl.runtime.start import train as into

    into(continued(out, (), words, choice), out, resume=True)


def weights(out):
    newest = max((out / "checkpoints").glob("step_*"))
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def rates(out):
    return {row["step"]: row["optim/lr"] for row in read(out / "metrics.jsonl")}


@pytest.fixture(scope="module")
def finished(root):
    """A run by schedule, at its end."""
    found = {}
    for schedule in ("constant", "linear", "cosine"):
        found[schedule] = root / schedule
        train(root, found[schedule], f"optim.schedule={schedule}", "optim.warmup_steps=1", "train.updates_per_step=2")
    return found


def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


WAYS = [
    ("constant", None, ["train.steps=7"]),
    ("constant", None, ["train.steps=7", "optim.lr=0.001"]),
    ("linear", "extend", ["train.steps=7"]),
    ("linear", "hold", ["train.steps=7"]),
    ("linear", "hold", ["train.steps=7", "optim.lr=0.001"]),
    ("cosine", "extend", ["train.steps=7", "optim.lr=0.001"]),
    ("cosine", "hold", ["train.steps=7"]),
]


def expected(schedule, choice, words, before):
    """The rate of each step that is added, by formulas of their own; two updates a step."""
    lr = 0.001 if "optim.lr=0.001" in words else 0.02
    if choice == "hold":
        return [lr if lr == 0.001 else before] * 3
    total = 14
    linear = [min(1, (n + 1) / 2) * (1 - n / total) for n in range(total)]
    cosine = tiny_cosine(total)
    shape = {"constant": [1.0] * total, "linear": linear, "cosine": cosine}[schedule]
    return [lr * (shape[n] + shape[n + 1]) / 2 for n in (8, 10, 12)]


def tiny_cosine(total):
    """transformers' own schedule."""
    import torch
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, total)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "choice", "words"), WAYS)
def test_a_finished_run_goes_on_longer_and_after_a_kill_to_the_bit(finished, tmp_path, schedule, choice, words):
    whole = shutil.copytree(finished[schedule], tmp_path / "whole")
    before = rates(whole)
    last = learning_rate(*_state(whole), 7)
    goes_on(whole, *words, choice=choice)
    now = rates(whole)
    assert {step: now[step] for step in before} == before, "what the rate of a step was stays recorded"
    assert [now[step] for step in (5, 6, 7)] == pytest.approx(expected(schedule, choice, words, last), rel=1e-12)

    # As kill -9 before the first new checkpoint leaves it: rows of steps that no checkpoint has.
    killed = shutil.copytree(whole, tmp_path / "killed")
    (killed / "ended.json").unlink()
    shutil.rmtree(killed / "checkpoints")
    shutil.copytree(finished[schedule] / "checkpoints", killed / "checkpoints")
    goes_on(killed)
    assert recipes.metrics(killed) == recipes.metrics(whole)
    assert recipes.heldout(killed) == recipes.heldout(whole)
    assert weights(killed) == weights(whole)
    assert len(read(killed / "continued.jsonl")) == 1
    page = write_report(killed).read_text()
    assert "Continued after step 4" in page
    assert "train.steps" in page


def _state(run):
    recipe = mmrl.Recipe.model_validate(json.loads((run / "resolved.json").read_text()))
    return recipe.optim, recipe.train.steps * recipe.train.updates_per_step


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_goes_on_ends_as_one_that_is_not(finished, tmp_path):
    whole, killed = (shutil.copytree(finished["linear"], tmp_path / name) for name in ("whole", "killed"))
    goes_on(whole, "train.steps=7", choice="extend")
    (finished["linear"].parent / "at").write_text("5")
    words = ["continue", killed, "train.steps=7", "--extend"]
    process = Command("mmrl.cli", words, recipes.ROOT)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, said
    assert read_ended(killed) is None
    assert rates(killed).keys() == {1, 2, 3, 4, 5}
    goes_on(killed)
    assert recipes.metrics(killed) == recipes.metrics(whole)
    assert weights(killed) == weights(whole)


@pytest.mark.slow
def test_an_older_checkpoint_repeats_the_steps_before_with_the_rates_of_before(finished, tmp_path):
    out = copied(finished["linear"], tmp_path)
    before = recipes.metrics(out)
    newest = max((out / "checkpoints").glob("step_*"))
    goes_on(out, "train.steps=5", choice="extend")
    for damaged in (newest, out / "checkpoints" / "step_000005"):
        for file in damaged.glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-8]) if damaged.exists() else None
    if not (out / "checkpoints" / "step_000003").exists():
        shutil.copytree(finished["linear"] / "checkpoints" / "step_000003", out / "checkpoints" / "step_000003")
    rows = recipes.metrics(out)
    goes_on(out)
    assert recipes.metrics(out)[:4] == before
    assert recipes.metrics(out) == rows


def refused(capsys, *words):
    assert run_command("continue", *words) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_what_cannot_change_or_go_on_is_refused_by_name(finished, tmp_path, capsys):
    out = copied(finished["linear"], tmp_path)
    kept = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    said = refused(capsys, str(out), "train.steps=6")
    assert "depends on the length of the run" in said
    assert "--extend stretches the schedule over 6 steps from here" in said
    assert "--hold keeps 0.00" in said
    assert "optim.schedule=linear depends" in refused(capsys, str(out), "train.steps=6", "optim.schedule=constant")
    assert "has finished all of them; name more: train.steps=8" in refused(capsys, str(out))
    assert "has finished all of them" in refused(capsys, str(out), "optim.lr=0.1")
    assert "has finished all of them" in refused(capsys, str(out), "train.steps=2", "--hold")
    assert "exclude each other" in refused(capsys, str(out), "train.steps=6", "--hold", "--extend")
    assert "leave them out" in refused(capsys, str(out), "train.steps=6", "optim.held=0.1")
    said = refused(capsys, str(out), "train.steps=6", "train.group_size=8", "optim.eps=1e-3", "--extend")
    assert "optim.eps, train.group_size differ from" in said
    assert "train.steps, train.max_cpu_seconds, optim.lr, eval, checkpoint, log" in said
    assert "is no run directory" in refused(capsys, str(tmp_path))
    assert "train.stepz" in refused(capsys, str(out), "train.stepz=6")
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == kept


@pytest.mark.slow
def test_resume_points_to_continue(finished, root, tmp_path, capsys):
    out = copied(finished["linear"], tmp_path)
    words = ["optim.schedule=linear", "optim.warmup_steps=1", "train.updates_per_step=2", "--out", str(out), "--resume"]
    given = ["train", str(root / "recipe.yaml"), "rewards.0.name=kill.py:short"]
    assert run_command(*given, "train.steps=6", "optim.lr=0.1", *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "optim.lr, train.steps differ from" in said
    assert f"mmrl continue {out} optim.lr=0.1 train.steps=6 (and --extend or --hold)" in said
    goes_on(out, "train.steps=5", choice="hold")
    assert run_command(*given, *words) == 2
    assert (
        f"because the run was continued with other steps or another rate. Go on with: mmrl continue {out}"
        in " ".join(capsys.readouterr().err.split())
    )


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(root, finished, tmp_path, capsys):
    (root / "stop").touch()
    out = tmp_path / "run"
    train(root, out, "rewards.0.name=two.py:short")
    assert str(read_ended(out)) == "stopped at step 0: Ctrl-C"
    assert "stopped at step 0: Ctrl-C" in (out / "report.html").read_text()
    assert run_command("continue", str(out)) == 0
    other = tmp_path / "other"
    train(root, other, "rewards.0.name=two.py:short")
    assert recipes.metrics(out) == recipes.metrics(other)
    assert weights(out) == weights(other)
    assert not (out / "continued.jsonl").exists(), "nothing was changed"
    assert (out / "recipe.yaml").read_text() == (other / "recipe.yaml").read_text()


@pytest.mark.slow
def test_a_run_that_early_stopping_ended_goes_on_and_says_how_it_ended(root, tmp_path, capsys):
    out = tmp_path / "run"
    stopping = "eval.early_stopping={metric: reward/short, patience: 2, threshold: 9}"
    train(root, out, stopping, "eval.every=1", "train.steps=9")
    assert len(read(out / "metrics.jsonl")) == 2
    run = mmrl.load_run(out)
    assert run.finished
    assert run.status.startswith("stopped early at step 2: reward/short was best after step 0")
    page = (out / "report.html").read_text()
    assert "stopped early at step 2: reward/short was best after step 0" in page
    assert "running" not in page.split("<main>")[1].split("</header>")[0]
    assert "is short" not in page
    assert run_command("continue", str(out)) == 0
    assert "eval.early_stopping ended the run after step 2; it goes on" in capsys.readouterr().err
    assert mmrl.load_run(out).status.startswith("stopped early at step 4")
    assert run_command("continue", str(out), "eval.early_stopping=null") == 0
    assert mmrl.load_run(out).status == "finished"
    assert len(read(out / "metrics.jsonl")) == 9


def launched_with(monkeypatch):
    """What reaches the start of several controllers, in place of that."""
    from mmrl.app.trainer import Outcome
    from mmrl.runtime import start

    calls = []

    def launch(loaded, directory, stop, *, resume, callbacks):
        assert not callbacks
        calls.append((loaded, directory.path, resume))
        return Outcome(False, 4, 4, 0.0)

    monkeypatch.setattr(start, "launch", launch)
    return calls


@pytest.mark.slow
def test_several_controllers_are_started_as_by_resume(finished, root, tmp_path, monkeypatch):
    out, calls = copied(finished["linear"], tmp_path), launched_with(monkeypatch)
    words = ["controllers=2", "optim.schedule=linear", "optim.warmup_steps=1", "train.updates_per_step=2"]
    loaded = load_recipe([root / "recipe.yaml"], ["rewards.0.name=kill.py:short", *words])
    from mmrl.runtime.start import train as into

    into(loaded, out, resume=True)
    goes_on(out, "controllers=2", "train.steps=6", choice="extend")
    (first, *resumed), (second, *continued_) = calls
    assert resumed == continued_ == [out, True]
    assert second.recipe.controllers == 2
    settings = [{k: v for k, v in of.resolved().items() if k not in ("train", "optim")} for of in (first, second)]
    assert settings[0] == settings[1]
    assert second.recipe.train.steps == 6
    assert [one.until for one in second.recipe.optim.earlier] == [8]


@pytest.mark.slow
def test_two_controllers_of_ray_go_on_with_a_run_as_one_does(finished, tmp_path):
    pytest.importorskip("ray")
    one, two = (shutil.copytree(finished["linear"], tmp_path / name) for name in ("one", "two"))
    goes_on(one, "train.steps=6", choice="extend")
    process = Command("mmrl.cli", ["continue", two, "train.steps=6", "--extend", "controllers=2"], recipes.ROOT)
    code, said = ended(process)
    assert code == 0, said
    assert rates(two) == rates(one)
    alike(one, two)


@pytest.mark.slow
def test_processes_of_slurm_go_on_with_a_run_together(finished, tmp_path):
    one, two = (shutil.copytree(finished["linear"], tmp_path / name) for name in ("one", "two"))
    goes_on(one, "train.steps=6", choice="extend")
    words = ["continue", two, "train.steps=6", "--extend"]
    port = str(free_port())
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_NODELIST": "localhost", "MASTER_PORT": port}
    each = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    tasks = [Command("mmrl.cli", words, recipes.ROOT, {**os.environ, **slurm, **own}) for own in each]
    found = [ended(task) for task in tasks]
    assert [code for code, _ in found] == [0, 0], found
    assert rates(two) == rates(one)
    alike(one, two)


MOVED = {
    "data.train.path": "rows.jsonl",
    "data.heldout.path": "held.jsonl",
    "rewards[0].name": "kill.py",
    "model.path": "tinylm",
}


@pytest.mark.slow
@pytest.mark.parametrize("key", list(MOVED))
@pytest.mark.parametrize("resume", [False, True])
def test_what_was_moved_is_named_with_the_edits_that_work(root, tmp_path, monkeypatch, capsys, key, resume):
    """Back to its place, or the printed command for a new run; an edit of the path is told the same."""
    shutil.copytree(root / "tinylm", tmp_path / "tinylm")
    for name in ("recipe.yaml", "kill.py", "two.py"):
        shutil.copy(root / name, tmp_path)
    for name in ("rows.jsonl", "held.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+3?", "answer": "4"}\n')
    monkeypatch.chdir(tmp_path)
    data = "data={name: jsonl, train: {path: rows.jsonl}, heldout: {path: held.jsonl}}"
    out, old = tmp_path / "run", tmp_path / MOVED[key]
    train(tmp_path, out, data, "train.steps=1")
    new = old.rename(tmp_path / f"moved-{old.name}")
    named = f"{new}:short" if key == "rewards[0].name" else str(new)
    again = ["train", "recipe.yaml", data, "rewards.0.name=kill.py:short", "train.steps=2", "--resume", "--out", "run"]
    command = again if resume else ["continue", "run", "train.steps=2"]
    for edit in ([], [f"{key}={named}"]):
        capsys.readouterr()
        assert run_command(*command, *edit) == 2
        said = capsys.readouterr().err
        assert f"{key}: there is no {str(old)!r} any more" in said
        assert f"mmrl train run/resolved.json {shlex.quote(key + '=NEW')} --out OTHER" in said
    assert run_command("train", "run/resolved.json", f"{key}={named}", "--out", "other") == 0
    new.rename(old)
    goes_on(out, "train.steps=2")


def test_what_a_run_may_change_is_not_asked_back(root, tmp_path, monkeypatch):
    """A reward of the evaluations may be edited."""
    for name in ("recipe.yaml", "kill.py", "two.py"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / "tinylm", tmp_path / "tinylm")
    monkeypatch.chdir(tmp_path)
    train(tmp_path, tmp_path / "run", "train.steps=1", 'eval.rewards=[{name: "two.py:short", label: other}]')
    (tmp_path / "two.py").rename(tmp_path / "three.py")
    assert run_command("continue", "run", "train.steps=2", "eval.rewards.0.name=three.py:short") == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--out", "a run"], "mmrl continue 'a run'"),
        (["train.steps=9", "--out", "run"], "mmrl continue run"),
        (["run/recipe.yaml", "--out", "run"], "mmrl continue run"),
        (["run/recipe.yaml"], "mmrl continue run"),
        (["run"], "mmrl continue run"),
        ([], "mmrl continue RUN"),
    ],
)
def test_resuming_without_a_recipe_names_the_command_that_goes_on(root, tmp_path, monkeypatch, capsys, given, named):
    (tmp_path / "run").mkdir()
    for name in ("recipe.yaml", "resolved.json"):
        (tmp_path / "run" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert run_command("train", "--resume", *given) == 2
    assert named in capsys.readouterr().err
    assert run_command("train") == 2
    assert "mmrl train RECIPE" in capsys.readouterr().err


EDITS = {
    "nothing": (None, False),
    "time": (lambda file: os.utime(file, (1, 1)), False),
    "an answer": (lambda file: file.write_text(file.read_text().replace('"9"', '"8"')), True),
    "a letter of a prompt": (lambda file: file.write_text(file.read_text().replace("1+7", "2+7")), True),
    "a record more": (lambda file: file.write_text(file.read_text() + file.read_text().splitlines()[0] + "\n"), True),
    "a record less": (lambda file: file.write_text("\n".join(file.read_text().splitlines()[:-1])), True),
    "two records exchanged": (lambda file: file.write_text("\n".join(reversed(file.read_text().splitlines()))), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("how", EDITS)
def test_data_that_were_edited_in_place_are_named(root, tmp_path, capsys, how, split):
    for name in ("train", "heldout"):
        rows = [json.dumps({"prompt": f"1+{k}?", "answer": str(1 + k)}) for k in range(1, 9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    options = {name: {"path": str(tmp_path / f"{name}.jsonl"), "heldout": 0} for name in ("train", "heldout")}
    train(root, tmp_path / "run", f"data={json.dumps({'name': 'jsonl', **options})}", "train.steps=1")
    edit, told = EDITS[how]
    if edit is not None:
        edit(tmp_path / f"{split}.jsonl")
    capsys.readouterr()
    goes_on(tmp_path / "run", "train.steps=2")
    assert (f"warning: data.{split} is not what it was at step 1" in capsys.readouterr().err) == told
    goes_on(tmp_path / "run", "train.steps=3")
    assert "is not what it was" not in capsys.readouterr().err, "it is said once"
