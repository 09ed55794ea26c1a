"""The layers of mmrl hold, apart from a list that only gets shorter; and the checker sees what it should."""

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TABLE = {"low": "mmrl low", "middle": "middle rewards", "high": "high cli"}
FILES = dict.fromkeys(
    ["mmrl/__init__", "mmrl/low", "mmrl/middle", "mmrl/high", "mmrl/cli/__init__", "rewards/ours"], ""
)


@pytest.fixture(scope="module")
def layers():
    sys.path.insert(0, str(TOOLS))
    try:
        yield importlib.import_module("layers")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def tree(tmp_path):
    """Writes a small tree of modules, those named and empty ones, and returns where it is."""

    def write(**named):
        for name, text in (FILES | named).items():
            path = tmp_path / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_every_import_keeps_the_layers(layers):
    found = layers.check(layers.ROOT, layers.LAYERS, layers.OPTIONAL, layers.ALLOWED)
    listed = layers.listed(layers.LISTED.read_text())
    kept = layers.known(found, listed)
    new = [f"{' '.join(entry)}: {', '.join(map(str, found[entry][:3]))}" for entry in sorted(set(found) - kept)]
    assert not new, "breaks a rule at the top of tools/layers.py: " + "; ".join(new)
    gone = [" ".join(entry) for entry in sorted(listed - kept)]
    assert not gone, f"python tools/layers.py --update takes out what is gone: {gone}"


def broken(layers, root, optional=""):
    return sorted(layers.check(root, TABLE, optional))


UP = ("upward", "mmrl.low", "mmrl.high")
INSIDE = ("inside", "mmrl.low", "mmrl.high")


@pytest.mark.parametrize(
    ("low", "expected"),
    [
        ("import os\nfrom json import loads", []),
        ("import mmrl.high", [UP]),
        ("import mmrl.high as other", [UP]),
        ("from mmrl.high import name", [UP]),
        ("from mmrl import high", [UP]),
        ("from . import high", [UP]),
        ("from .high import name", [UP]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mmrl.high import Name", [UP]),
        ("import typing\nif typing.TYPE_CHECKING:\n    from mmrl.high import Name", [UP]),
        ("try:\n    import mmrl.high\nexcept ImportError:\n    pass", [UP]),
        ("try:\n    pass\nexcept ImportError:\n    import mmrl.high", [UP]),
        ("if True:\n    pass\nelse:\n    import mmrl.high", [UP]),
        ("with open('f'):\n    import mmrl.high", [UP]),
        ("match 1:\n    case 1:\n        import mmrl.high", [UP]),
        ("class Name:\n    import mmrl.high", [UP]),
        ("def name():\n    import mmrl.high", [INSIDE, UP]),
        ("async def name():\n    for _ in range(2):\n        from .high import name", [INSIDE, UP]),
        ("class Name:\n    def method(self):\n        def inner():\n            import mmrl.high", [INSIDE, UP]),
        ("from .rewards import ours", [("upward", "mmrl.low", "mmrl.rewards.ours")]),
    ],
)
def test_an_import_of_a_higher_layer_is_found(layers, tree, low, expected):
    assert broken(layers, tree(**{"mmrl/low": low})) == expected


def test_own_layer_and_lower_ones_are_free(layers, tree):
    high = "import mmrl.cli\nfrom mmrl.low import x\nfrom . import middle"
    assert broken(layers, tree(**{"mmrl/high": high, "mmrl/middle": "import mmrl"})) == []


def test_a_drop_in_is_a_module_of_the_package_it_joins(layers, tree):
    other = "from ..ours import y\nfrom ... import low"
    root = tree(**{"rewards/ours": "from mmrl.high import x", "rewards/folder/other": other})
    assert broken(layers, root) == [("upward", "mmrl.rewards.ours", "mmrl.high")]
    own = {one.imported for one in layers.imports(layers.modules(root)) if one.importer == "mmrl.rewards.folder.other"}
    assert own == {"mmrl.rewards.ours", "mmrl.low"}


def test_imports_inside_functions_are_for_commands_lazy_attributes_and_optional_packages(layers, tree):
    inside = "def {}(name):\n    from mmrl.high import x"
    command = {"mmrl/cli/runs": inside.format("train")}
    assert broken(layers, tree(**command, **{"mmrl/__init__": inside.format("__getattr__")})) == []
    root = tree(**command, **{"mmrl/__init__": inside.format("train")})
    assert broken(layers, root) == [("inside", "mmrl", "mmrl.high"), ("upward", "mmrl", "mmrl.high")]
    root = tree(**{"mmrl/high": "def build():\n    from mmrl.middle import x"})
    assert broken(layers, root) == [("inside", "mmrl.high", "mmrl.middle")]
    assert broken(layers, root, optional="middle") == []


def test_an_import_that_is_allowed_closes_no_circle_and_stays_upward(layers, tree):
    root = tree(**{"mmrl/low": "def build():\n    from mmrl.middle import x", "mmrl/middle": "import mmrl.low"})
    up = ("upward", "mmrl.low", "mmrl.middle")
    found = layers.check(root, TABLE, "")
    assert sorted(found) == [("circle", "mmrl.low", "mmrl.middle"), ("inside", "mmrl.low", "mmrl.middle"), up]
    assert sorted(layers.check(root, TABLE, "", ["low middle"])) == [up]
    with pytest.raises(ValueError, match="do not exist: middle low"):  # it is there, at the top of the module
        layers.check(root, TABLE, "", ["low middle", "middle low"])


@pytest.mark.parametrize(
    "back",
    [
        "import mmrl.middle",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..middle import Name",
        "def name():\n    import mmrl.middle",
    ],
)
def test_a_circle_is_found_however_it_is_closed(layers, tree, back):
    root = tree(**{"mmrl/middle": "import mmrl.low", "mmrl/low": "import mmrl.rewards.ours", "rewards/ours": back})
    circle = ("circle", "mmrl.low", "mmrl.middle", "mmrl.rewards.ours")
    assert [entry for entry in broken(layers, root) if entry[0] == "circle"] == [circle]
    assert len(layers.check(root, TABLE, "")[circle]) == 3


def test_every_module_has_a_layer_and_every_layer_a_module(layers, tree):
    with pytest.raises(ValueError, match="do not exist: moved"):
        layers.check(tree(), TABLE | {"top": "moved"}, "")
    with pytest.raises(ValueError, match=r"mmrl\.other has no layer"):
        layers.check(tree(**{"mmrl/other": ""}), TABLE, "")


def test_the_longest_name_says_the_layer(layers):
    table = {"low": "mmrl text.pairs", "high": "text"}
    names = ["mmrl", "mmrl.text", "mmrl.text.pairs", "mmrl.text.pairs.more"]
    assert layers.placed(names, table) == dict(zip(names, [0, 1, 0, 0], strict=True))
    with pytest.raises(ValueError, match=r"mmrl\.texts has no layer"):  # the start of a word is no name
        layers.placed([*names, "mmrl.texts"], table)


def test_update_only_takes_away(layers, tree, tmp_path, monkeypatch, capsys):
    """A circle that lost a module replaces its line; what is new stays out of the list and fails."""
    root = tree(**{"mmrl/low": "import mmrl.middle", "mmrl/middle": "import mmrl.low\nimport mmrl.high"})
    text = "# why\ncircle mmrl.high mmrl.low mmrl.middle\nupward mmrl.low mmrl.middle\nupward mmrl.low mmrl.high\n"
    listing = tmp_path / "layers.txt"
    listing.write_text(text)
    for name, value in {"ROOT": root, "LISTED": listing, "LAYERS": TABLE, "OPTIONAL": "", "ALLOWED": ()}.items():
        monkeypatch.setattr(layers, name, value)
    assert layers.main([]) == 1
    assert listing.read_text() == text
    said = capsys.readouterr().out
    assert "gone, remove it with --update: upward mmrl.low mmrl.high" in said
    assert "NEW: upward mmrl.middle mmrl.high" in said
    assert layers.main(["--update"]) == 1
    assert listing.read_text() == "# why\ncircle mmrl.low mmrl.middle\nupward mmrl.low mmrl.middle\n"
    (root / "mmrl/middle.py").write_text("")
    assert layers.main(["--update"]) == 0
    assert listing.read_text() == "# why\nupward mmrl.low mmrl.middle\n"
    assert layers.main([]) == 0
