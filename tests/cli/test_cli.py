"""The command line: answers at once, refuses with a line and exit code 2, copies and lists what is shipped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mmrl.cli import app
from mmrl.cli.grouped import GROUPS
from mmrl.commands.arguments import read_recipe, reward_options
from mmrl.config.algorithms import algorithm_names
from mmrl.config.loader import find_recipe, load_recipe, shipped_recipes
from mmrl.core.errors import UserError
from mmrl.planner.doctor import examine
from tests.support.cli import folder, mmrl  # noqa: F401

COMMANDS = (
    *("train", "plan", "simulate", "score", "eval", "sample", "report", "compare", "export", "verify"),
    *("check", "serve", "judge", "ls", "cp", "init", "data", "doctor"),
)
SHIPPED = next(iter(shipped_recipes()))


SLOW_TO_LOAD = ("torch", "transformers", "diffusers", "numpy", "PIL", "yaml", "rich", "mmrl.config", "mmrl.algorithms")


def test_help_answers_at_once() -> None:
    """Counted in what it imports, which is the same on every machine."""
    code = "import sys; from mmrl.cli import app; app(standalone_mode=False); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    loaded = set(done.stderr.split())
    assert "mmrl.cli.simulate" in loaded
    assert not [name for name in SLOW_TO_LOAD if name in loaded]


def test_help_has_every_command_in_a_group_on_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = typer.main.get_command(app)
    lines = CliRunner().invoke(app, ["--help"]).output.splitlines()
    assert {*GROUPS} < {line.removesuffix(":") for line in lines}
    assert "Others:" not in lines
    listed = [line.split()[0] for line in lines[lines.index("Train:") :] if line.startswith("  ")]
    assert sorted(listed) == sorted(found.commands)
    assert all(len(line) <= 80 and "..." not in line for line in lines[lines.index("Train:") :])


def test_a_shell_completes_the_names_of_recipes(monkeypatch):
    words = {"_MMRL_COMPLETE": "complete_bash", "COMP_WORDS": "mmrl train shapes-f", "COMP_CWORD": "2"}
    code = [sys.executable, "-m", "mmrl"]
    done = subprocess.run(code, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["shapes-full"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert mmrl(command, "--help") == 0
    assert f"Usage: mmrl {command}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_users_mistakes_exit_with_2_and_no_traceback(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.cli", "train", "recipe.yaml", "optim.lrr=1", "train.stepz=2"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: 2 problems in the recipe",
        "command line  optim.lrr: unknown key; did you mean 'lr'?  (keys: lr, betas, eps, weight_decay, max_grad_norm, "
        "warmup_steps, schedule, min_lr_ratio, held, earlier, ema_decay, ema_every)",
        "command line  train.stepz: unknown key; did you mean 'steps'?  (keys: steps, prompts_per_step, group_size, "
        "micro_batch_size, micro_batch_tokens, packing, steps_per_forward, updates_per_step, balance, backend, "
        "shard_size, "
        "tensor_parallel, sequence_parallel, pipeline_parallel, pipeline_chunks, distributed_optimizer, "
        "context_parallel, expert_parallel, max_cpu_seconds)",
    ]


MISTAKES = [
    (["plan", "recipe"], "error: recipe  there is no such file or recipe"),
    (["plan", f"{SHIPPED}x"], f"error: {SHIPPED}x  there is no such file or recipe; did you mean '{SHIPPED}'?"),
    (["plan", "recipe.yaml", "over.yaml"], "error: 'over.yaml' is neither a file to layer"),
    (["train", "recipe.yaml", "--resume", "--overwrite"], "error: --resume goes on with a run"),
    (["eval", "runs/none"], "error: runs/none is no run directory: it has no resolved.json"),
    (["report", "recipe.yaml"], "error: recipe.yaml/resolved.json cannot be read"),
    (["export", "runs/none", "--out", "x"], "error: runs/none is no run directory"),
    (["score", "gone.py:score", "--images", "."], "error: there is no file 'gone.py' (looked in the current folder)"),
    (["score", "shapes:scoer", "--images", "."], "has no 'scoer'; did you mean 'score'?"),
    (
        ["score", "shapes", "--images", ".", "--options", "k"],
        "error: --options 'k' is no setting; write --options key=value",
    ),
    (["serve", "shapes", "--python", "p", "--requirements", "r"], "error: --python names an environment and"),
    (["serve", "shapes", "--device", "gpu"], "error: --device 'gpu' is no device; write cpu, cuda, cuda:1 or mps"),
    (["cp", SHIPPED, "nowhere"], "error: nowhere is no folder and does not end in .yaml"),
    (["trian"], "No such command 'trian'"),
    (["ls", "reward"], "'reward' is not one of"),
    (["eval", "x", "--samples", "0"], "Invalid value for '--samples'"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert mmrl(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_what_mmrl_logs_reaches_stderr_from_the_level_on(folder: Path) -> None:
    """In a process of its own, as handlers stay; other libraries' loggers and the root's handlers are left alone."""
    code = (
        "import logging, sys, mmrl.cli\nsys.argv = ['mmrl', 'ls', 'rewards']\n"
        "try:\n    mmrl.cli.main()\nexcept SystemExit:\n    pass\n"
        "log = logging.getLogger('mmrl.core.media')\nlog.warning('%s: odd', 'a.mp4')\nlog.info('plain')\n"
        "logging.getLogger('other').info('theirs')\nprint(logging.getLogger().handlers, logging.getLogger().level)\n"
    )

    def said(**level: str) -> tuple[str, str]:
        env = {**os.environ, **level}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=env)
        return done.stdout.splitlines()[-1], done.stderr

    assert said() == ("[] 30", "warning: a.mp4: odd\n")
    assert said(MMRL_LOG="info") == ("[] 30", "warning: a.mp4: odd\ninfo: plain\n")
    assert "error: MMRL_LOG=loud is no level; write debug," in said(MMRL_LOG="loud")[1]


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mmrl("ls") == 0
    everything = capsys.readouterr().out
    titles = ("recipes", "pipelines", "rewards", "datasets", "environments", "algorithms")
    assert [line for line in everything.splitlines() if line in titles] == [*titles]
    assert {*shipped_recipes(), *algorithm_names()} <= {*everything.split()}
    assert mmrl("ls", "algorithms") == 0
    listed = capsys.readouterr().out
    assert " grpo GRPO: group advantages and a clipped ratio per token" in " ".join(listed.split())
    assert "formulas and settings: docs/algorithms.md" in listed
    assert " shapes " not in listed
    assert mmrl("ls", "rewards") == 0
    (title, *rows) = capsys.readouterr().out.splitlines()
    assert title.strip() == "rewards"
    assert any(row.startswith(" shapes ") and "coloured shapes" in row for row in rows)


def test_cp_never_writes_over_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sub").mkdir()
    assert mmrl("cp", SHIPPED, "sub") == 0
    copy = folder / "sub" / find_recipe(SHIPPED).name
    assert copy.read_bytes() == find_recipe(SHIPPED).read_bytes()
    assert capsys.readouterr().out.startswith(f"sub/{copy.name}: change it, then run mmrl train sub/{copy.name}")
    copy.write_text("mine")
    assert mmrl("cp", SHIPPED, str(copy)) == 2
    assert copy.read_text() == "mine"
    assert mmrl("cp", SHIPPED, "new/mine.yaml") == 0
    assert (folder / "new/mine.yaml").is_file()


def test_a_copied_recipe_loads_as_the_original_with_the_name_of_its_file(folder: Path) -> None:
    assert mmrl("cp", SHIPPED, "copy.yaml") == 0
    assert load_recipe(["copy.yaml"]).resolved() == {**load_recipe([SHIPPED]).resolved(), "name": "copy"}


def test_recipe_sets_threads_and_leaves_what_the_user_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_recipe("recipe.yaml", ["threads=null"])
    assert "OMP_NUM_THREADS" not in os.environ
    read_recipe("recipe.yaml", [])
    assert os.environ["OMP_NUM_THREADS"] == "3"
    read_recipe("recipe.yaml", ["threads=2"])
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_overlays_and_settings_are_told_apart(folder: Path) -> None:
    (folder / "over.yaml").write_text("seed: 5\n")
    (folder / "a=b.yaml").write_text("checkpoint: {keep: 9}\n")
    recipe = read_recipe("recipe.yaml", ["over.yaml", "optim.lr=1e-5", "a=b.yaml"]).recipe
    assert (recipe.seed, recipe.optim.lr, recipe.checkpoint.keep) == (5, 1e-5, 9)


def test_main_quiets_the_libraries_but_keeps_the_users_choice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    assert mmrl("--version") == 0
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_no_command_imports_torch_to_say_no(folder: Path) -> None:
    code = (
        "import sys; from mmrl.cli import main\n"
        "for arguments in (['train', 'no.yaml', 'x=1'], ['score', 'no.py', '--images', '.'], ['eval', 'no']):\n"
        "    sys.argv = ['mmrl', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as leaving: print(leaving.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout.splitlines() == ["2 False"] * 3


def test_reward_options() -> None:
    assert reward_options(["a=1e-3", "b=[1, x]", "c=", "d=a=b"]) == {"a": 1e-3, "b": [1, "x"], "c": None, "d": "a=b"}
    with pytest.raises(UserError, match="--options a: not YAML"):
        reward_options(["a=[1"])


def test_doctor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = examine()
    rows = dict(found.rows)
    assert rows["torch"] == __import__("torch").__version__  # with the build, +cpu or +cu130
    assert rows["current folder"].startswith("writable, ")
    assert rows["hub"].endswith("token set")
    assert "hf_secret" not in str(found)


def test_doctor_finds_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/proc")
    found = examine()
    assert dict(found.rows)["model cache"].startswith("not writable")
    said = "the model cache /proc cannot be written to; set HF_HOME to a folder elsewhere"
    assert [problem for problem in found.problems if " free; " not in problem] == [said]  # a full disk is named too


def test_eval_takes_the_runs_threads(folder: Path) -> None:
    from mmrl.commands.arguments import use_threads_of

    (folder / "run").mkdir()
    (folder / "run/resolved.json").write_text(json.dumps({"threads": 2}))
    use_threads_of(folder / "run")
    assert os.environ["OMP_NUM_THREADS"] == "2"
