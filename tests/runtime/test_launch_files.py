"""``mmrl launch --print``: what it prints starts the recipe."""

import shlex
import subprocess

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from tests.support.cli import mmrl


def printed(capsys, *words):
    code = mmrl("launch", *words)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_batch_script_asks_for_what_the_recipe_needs(capsys, tmp_path):
    code, script = printed(capsys, "sums", "controllers=16", "optim.lr=1e-4", "device=cuda", "--print", "slurm")
    assert code == 0, script
    asked = dict(line.split()[1].partition("=")[::2] for line in script.splitlines() if line.startswith("#SBATCH"))
    assert (asked["--nodes"], asked["--ntasks-per-node"], asked["--gpus-per-node"]) == ("2", "8", "8")
    unknown = script[script.index("# TO FILL IN") :]
    assert all(f"##SBATCH --{key}=" in unknown for key in ("partition", "account", "time"))
    assert "mmrl train sums controllers=16 optim.lr=1e-4 device=cuda --out runs/sums" in next(
        line for line in script.splitlines() if line.startswith("srun")
    )
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    assert "gpus" not in printed(capsys, "sums", "controllers=2", "device=cpu")[1].replace("no GPUs", "")


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        (["device=cuda"], "8"),
        (["device=cuda", "threads=12"], "12"),
        (["device=cuda", "--cpus-per-task", "4"], "4"),
        (["device=cpu", "threads=3"], "3"),
        (["device=cpu", "threads=null"], "1"),
    ],
)
def test_a_batch_script_asks_for_cores(capsys, words, cores):
    code, script = printed(capsys, "sums", "controllers=2", *words)
    assert code == 0, script
    assert f"#SBATCH --cpus-per-task={cores}\n" in script
    assert '\nsrun --cpus-per-task="$SLURM_CPUS_PER_TASK" ' in script
    assert printed(capsys, "sums", "controllers=2", "--print", "torchrun", "--cpus-per-task", "4")[0] == 2


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["threads=3", "rewards.0.process=true"], "4  # threads: 3, rewards.process: 1"),
        (["environment.isolate=true", "environment.workers=3"], "4  # threads: 1, environment.isolate: 3"),
        (["environment.isolate=true", "environment.workers=64"], "9  # threads: 1, environment.isolate: 8"),
        (["device=cuda", "rewards.0.process=true"], "8"),
        (["device=cuda", "threads=8", "rewards.0.process=true"], "9  # threads: 8, rewards.process: 1"),
        (["rewards.0.process=true", "--cpus-per-task", "2"], "2"),
    ],
)
def test_a_batch_script_asks_for_the_cores_of_processes_beside_the_run(capsys, words, asked):
    code, script = printed(capsys, "sums-tool", "controllers=2", "device=cpu", *words)
    assert code == 0, script
    assert f"#SBATCH --cpus-per-task={asked}\n" in script


def test_commands_of_torchrun_and_ray(capsys):
    code, said = printed(capsys, "sums", "controllers=8", "--print", "torchrun", "--per-node", "4")
    assert code == 0
    assert 'torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "$HEAD"' in said
    assert "-m mmrl train sums controllers=8" in said
    shape = ["controllers=4", "devices_per_controller=4", "device=cuda"]
    assert "--nnodes 2 --nproc-per-node 8 " in printed(capsys, "shapes-judge", *shape, "--print", "torchrun")[1]
    script = printed(capsys, "shapes-judge", *shape, "--print", "slurm")[1]
    assert all(f"#SBATCH --{key}-per-node=8\n" in script for key in ("ntasks", "gpus"))
    code, said = printed(capsys, "shapes-judge", *shape, "placement=adaptive", "--print", "ray")
    assert code == 0
    assert "# 2 hosts with 8 GPUS each" in said
    submitted = shlex.split(said.splitlines()[-1])
    assert submitted[:3] == ["ray", "job", "submit"]
    assert "controllers=4 devices_per_controller=4 device=cuda placement=adaptive ray=auto" in submitted[-1]


def test_a_secret_is_not_printed(capsys):
    reward = 'rewards=[{name: judge, options: {model: {url: "http://h/v1", name: j, api_key: sk-12345678}, rubric: a}}]'
    _, said = printed(capsys, "sums", "controllers=2", reward)
    assert "sk-12345678" not in said
    assert "<secret>" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["controllers=12"],
            "12 do not divide among hosts with 8 each; set controllers=16, or --per-node 6",
        ),
        ([], "controllers: the recipe has one"),
    ],
)
def test_what_cannot_be_printed_is_refused_with_the_edit(capsys, words, expected):
    code, said = printed(capsys, "sums", *words)
    assert code == 2
    assert expected in " ".join(said.split())


@pytest.mark.parametrize("kind", ["slurm", "torchrun", "ray"])
def test_a_line_break_in_a_name_leaves_no_comment(kind, capsys, tmp_path):
    folder = f"runs/a\ntouch {tmp_path}/broken\r\u2028#"
    code, said = printed(capsys, "sums", "controllers=16", "device=cuda", "--print", kind, "--out", folder)
    assert code == 0
    (tmp_path / "job.sh").write_text("".join(f"{name}() {{ :; }}\n" for name in ("srun", "ray", "torchrun")) + said)
    subprocess.run(["bash", tmp_path / "job.sh"], check=False, env={"HEAD": "x", "PATH": "/usr/bin:/bin"})
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"]


def test_one_device_is_on_no_cluster(capsys):
    code, said = printed(capsys, "sums", "--print", "ray")
    assert code == 2
    assert "controllers: the recipe has one, which `mmrl train` starts; set controllers=8" in " ".join(said.split())
    with pytest.raises(UserError, match=r"ray: one device .* remove it, or set controllers to 2 or more"):
        load_recipe(["sums"], ["ray=auto"])
    for words in ([], ["ray=local"], ["ray=auto", "controllers=2"], ["ray=auto", "devices_per_controller=2"]):
        load_recipe(["sums"], words)
