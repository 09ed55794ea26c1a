"""Names that modules had before still load, with a warning that says the new one."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from mmrl._moved import new_name, table


@pytest.mark.parametrize("old", sorted(table()))
def test_every_new_name_is_a_module(old: str):
    assert importlib.util.find_spec(table()[old]) is not None
    assert new_name(old) == table()[old]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mmrl.errors", "mmrl.core.errors"),
        ("mmrl.judge.answers", "mmrl.rewards.judging.answers"),
        ("mmrl.datasets.sampler", "mmrl.data.sampler"),
        ("mmrl.engines.megatron.mapping", "mmrl.models.megatron.mapping"),
        ("mmrl.text.pipeline", "mmrl.families.text.pipeline"),
    ],
)
def test_an_old_name_is_the_same_module(old: str, new: str):
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is {new} now"):
        module = importlib.import_module(old)
    today = importlib.import_module(new)
    assert all(getattr(module, name) is value for name, value in vars(today).items() if not name.startswith("__"))


def test_a_plug_in_with_old_imports_loads():
    program = (
        "from mmrl.rewards.contract import Failed, reward\nfrom mmrl.judge import answers\nimport mmrl.errors\n"
        "from mmrl.core.errors import UserError\nassert mmrl.errors.UserError is UserError\nassert answers.Words"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert "mmrl.rewards.contract is mmrl.core.reward_contract now" in said.stderr


@pytest.mark.parametrize("name", ["mmrl.nothing", "mmrl.judge.nothing", "mmrl.engines.nothing", "mmrl.rewards.nothing"])
def test_what_never_was_is_not_found(name: str):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
