"""The drop-in folders merge into the package, shadow nothing, and keep to the import rules."""

import ast
import re
import subprocess
import sys
import zipfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DROP_INS = ("pipelines", "rewards", "datasets", "environments")


def imports(path: Path) -> set[str]:
    """Every module name that a file imports, relative imports left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_a_text_about_a_name_stands_below_its_value():
    for path in (p for folder in ("mmrl", *DROP_INS) for p in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for body in (tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))):
            for before, node in pairwise(body):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert isinstance(before, ast.Assign | ast.AnnAssign | ast.Expr), f"{where} is below no name"


@pytest.mark.parametrize("folder", DROP_INS)
def test_drop_in_folder_is_not_a_package(folder):
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would shadow a top-level module"


def test_no_test_package_shadows_datasets():
    assert not (ROOT / "tests" / "datasets" / "__init__.py").exists()


@pytest.mark.slow
def test_hugging_face_datasets_wins_from_the_repo_root():
    code = "import datasets, mmrl.datasets; assert hasattr(datasets, 'load_dataset'), datasets.__path__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("folder", DROP_INS)
def test_no_file_exists_on_both_sides_of_the_merge(folder):
    ours = {p.name for p in (ROOT / "mmrl" / folder).iterdir()} - {"__init__.py", "__pycache__"}
    assert not ours & {p.name for p in (ROOT / folder).iterdir()} - {"__pycache__"}


def test_core_never_imports_a_drop_in():
    names = {
        ".".join(["mmrl", *p.relative_to(ROOT).with_suffix("").parts])
        for f in DROP_INS
        for p in (ROOT / f).rglob("*.py")
    }
    for path in (ROOT / "mmrl").rglob("*.py"):
        assert not imports(path) & names, f"{path} imports a drop-in; load it by name instead"


@pytest.mark.parametrize("folder", DROP_INS)
def test_drop_ins_import_the_core_and_not_each_others_folder(folder):
    others = tuple(f"mmrl.{other}." for other in DROP_INS if other != folder)
    core = {f"mmrl.{f}.{p.stem}" for f in DROP_INS for p in (ROOT / "mmrl" / f).glob("*.py")}
    for path in (ROOT / folder).rglob("*.py"):
        wrong = {n for n in imports(path) if n.startswith(others) and not any(n.startswith(c) for c in core)}
        assert not wrong, f"{path} imports {wrong}"


def test_drop_ins_import_only_what_is_public():
    for path in (path for folder in DROP_INS for path in (ROOT / folder).rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        private = [alias.name for node in nodes for alias in node.names if alias.name.startswith("_")]
        assert not private, f"{path} imports {private}; make it public where it belongs"


def test_config_imports_no_torch():
    code = "import sys, mmrl.config.loader, mmrl.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_algorithms_are_pure():
    allowed = (
        "abc",
        "torch",
        "math",
        "typing",
        "dataclasses",
        "collections",
        "__future__",
        "mmrl.algorithms",
        "pydantic",
        "mmrl.core.errors",
        "mmrl.config",
    )
    for path in (ROOT / "mmrl" / "algorithms").glob("*.py"):
        assert all(name.startswith(allowed) for name in imports(path)), f"{path} imports {imports(path)}"


@pytest.mark.slow
def test_wheel_holds_one_top_level_package_with_its_data(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"mmrl"}
    for needed in (
        "mmrl/rewards/shapes.py",
        "mmrl/pipelines/diffusion/recipes/shapes-lora.yaml",
        "mmrl/pipelines/diffusion/models/shapes-sd3/transformer/diffusion_pytorch_model.safetensors",
        "mmrl/report/template.html",
    ):
        assert needed in names


@pytest.mark.slow  # a process that imports it all
def test_diffusion_training_needs_no_distributed_or_serving_stack():
    """The path of a GPU machine that has torch, transformers, diffusers, peft and accelerate, but no Ray or vLLM."""
    code = """
import sys
absent = {"ray", "vllm", "sglang", "megatron", "decord", "av", "webdataset", "torchvision", "datasets"}
sys.modules.update(dict.fromkeys(absent))  # they cannot be imported; transformers would import torchvision
import torch
from mmrl.training import loop
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.app.build import build
small = ["train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=2", "sampling.steps=3"]
loaded = load_recipe(["shapes-lora"], [*small, 'rewards=[{name: "jpeg:compressibility"}]'])
row, _ = loop.train_step(build(loaded.recipe), 0, Clock(torch.device("cpu")))
assert row["policy/first_ratio_max_dev"] == 0
assert not {m.partition(".")[0] for m, module in sys.modules.items() if module is not None} & absent
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module has: what it defines and imports outside its functions, and what lies beside it."""
    found = {p.stem for p in path.parent.iterdir()} if path.name == "__init__.py" else set()
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        left += ast.iter_child_nodes(node)
    return frozenset(found)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "tools"])
def test_what_is_imported_from_the_project_exists(folder):
    """Also where the import needs a library that is not installed here, and the test is skipped."""
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.module and node.level == 0):
                continue
            where = module_file(node.module)
            for alias in node.names if where else ():
                known = alias.name in defined(where) or module_file(f"{node.module}.{alias.name}")
                if not known and alias.name != "*" and "__getattr__" not in defined(where):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}")
    assert not wrong, "\n".join(wrong)


@cache
def module_file(name: str) -> Path | None:
    """The file of a module of the project; a drop-in's modules are imported as the package's."""
    parts = name.split(".")
    tails = [parts[1:]] if parts[0] == "mmrl" and parts[1:2] and parts[1] in DROP_INS else []
    for one in [parts, *tails]:
        place = ROOT.joinpath(*one)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


@pytest.mark.slow
def test_tests_mirror_the_folders_and_import_no_other_test():
    """What tests share is in ``tests/support``. A folder of tests has the name of one of mmrl, or of what it tests."""
    beside = {"benchmarks", "docs", "examples", "faults", "gpu", "support", "tools"}
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - beside <= {path.name for path in (ROOT / "mmrl").iterdir() if path.is_dir()}
    for path in (ROOT / "tests").rglob("*.py"):
        others = {name for name in imports(path) if re.match(r"tests\.(?!support\.)(\w+\.)*test_", name)}
        assert not others, f"{path.relative_to(ROOT)} imports {others}; move what both need to tests/support"
