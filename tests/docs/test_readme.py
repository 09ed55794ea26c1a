"""What the README shows is what runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.answers import Number, parse_kind

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(mark):
    """The fenced block after ``<!-- mark -->``."""
    found = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, mark
    return found.group(1)


def test_the_reward_of_the_first_screen_runs_as_it_stands(tmp_path):
    shapes = mmrl.load("datasets", "shapes")
    prompts = {p.text: p for p in shapes.prompts("all")}
    (tmp_path / "red.py").write_text(block("reward"))
    assert len(block("reward").strip().splitlines()) <= 12
    score = mmrl.load("rewards", f"{tmp_path}/red.py:score")
    samples = [
        Sample(Prompt("x", text), SampleId(0, 0, 0, i), image=shapes.picture(prompts[text], seed=1))
        for i, text in enumerate(["three red squares", "three blue squares"])
    ]
    red, blue = score(samples, context=None)
    assert red > blue
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i, sample in enumerate(samples):
        sample.image.save(pictures / f"{i}.png")
    done = subprocess.run(
        [sys.executable, "-m", "mmrl.cli", "score", f"{tmp_path}/red.py:score", "--images", str(pictures)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0.png" in done.stdout


def test_the_two_commands_are_there_and_ci_runs_the_second():
    assert "mmrl train shapes-crd" in block("main job")
    assert "pytest" in block("tests")
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text()


def test_the_recipes_of_the_readme_take_what_it_puts_into_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("".join(f"a red circle {i}\n" for i in range(40)))
    (tmp_path / "judge.yaml").write_text(block("judge"))
    for line in block("pictures").splitlines()[:2]:
        words = line.split("#")[0].split()
        recipe = load_recipe([words[2]], [word for word in words[3:] if "=" in word]).recipe
        assert Path(recipe.data.train["path"]).resolve() == tmp_path / "prompts.txt"
        assert [reward.name for reward in recipe.rewards] == ["pickscore"]
    for name in ("qwen25-vl-3b", "scenes"):
        (judge,) = load_recipe([name, "judge.yaml"], []).recipe.rewards
        assert parse_kind("pointwise", judge.options["answer"]) == Number(0, 1)


def test_the_first_command_is_on_the_first_screen():
    before = README.split("<!-- main job -->")[0]
    assert len(before.splitlines()) <= 12
    assert before.count("![") == 1


@pytest.mark.parametrize(("name", "least"), [("README.md", 7), ("docs/beside_others.md", 15)])
def test_every_word_about_another_tool_has_its_source(name, least):
    page = (ROOT / name).read_text()
    rows = page.split("<!-- peers -->\n")[1].split("\n\n")[0].splitlines()
    tools = [cell.strip() for cell in rows[0].strip("|").split("|")][2:]
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://github\.com/\S+)$", page, re.MULTILINE))
    assert len(rows) >= least
    for row in rows[2:]:
        name, ours, *cells = [cell.strip() for cell in row.strip().removeprefix("|").removesuffix("|").split("|")]
        assert len(cells) == len(tools), name
        assert ours == "no" or re.search(r"\]\((docs/)?\w+\.md", ours), name
        for tool, cell in zip(tools, cells, strict=True):
            assert re.search(r"\]\[", cell), f"{name}, {tool}: {cell}"
    used = set(re.findall(r"\]\[([\w-]+)\]", page))
    assert used == set(sources)
    assert all(re.search(r"/(?:blob|tree)/[0-9a-f]{40}/", source) for source in sources.values())


def test_every_recipe_named_is_shipped():
    shipped = {p.stem for p in ROOT.glob("pipelines/*/recipes/*.yaml")}
    starts = (
        "shapes|sd35|sd15|sdxl|flux|sana|z-image|wan|moving|sums|scenes|clips|qwen|smollm2|words|reason|minigrid|draw-"
        "|guess|hunyuan|ltx2"
    )
    page = (ROOT / "docs" / "recipes.md").read_text()
    named = set(re.findall(rf"`((?:{starts})[\w.-]*)`", page))
    assert named == shipped


def test_contributors_get_the_same_test_command():
    assert f"```bash\n{block('tests')}```" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_pages_beside_the_readme_link_to_what_is_there():
    for page in ("README.md", "CONTRIBUTING.md", "SECURITY.md"):
        targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
        assert targets
        assert [target for target in targets if not (ROOT / target).is_file()] == []
