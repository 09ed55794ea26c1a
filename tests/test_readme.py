"""What the README shows is what runs."""

import re
import subprocess
import sys
from pathlib import Path

import mmrl
from mmrl.trajectory import Prompt, Sample, SampleId

ROOT = Path(__file__).resolve().parents[1]
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
    assert "mmrl train shapes-full" in block("main job")
    assert "pytest" in block("tests")
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text()


def test_every_recipe_named_is_shipped():
    shipped = {p.stem for p in ROOT.glob("pipelines/*/recipes/*.yaml")}
    starts = "shapes|sd35|sd15|sdxl|flux|sana|z-image|wan|moving|sums|scenes|clips|qwen"
    named = set(re.findall(rf"`((?:{starts})[\w.-]*)`", README))
    assert named == shipped


def test_contributors_get_the_same_test_command():
    assert f"```bash\n{block('tests')}```" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_pages_beside_the_readme_link_to_what_is_there():
    for page in ("CONTRIBUTING.md", "SECURITY.md"):
        targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
        assert targets
        assert [target for target in targets if not (ROOT / target).is_file()] == []
