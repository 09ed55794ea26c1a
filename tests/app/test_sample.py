"""``mmrl sample``: pictures, clips and texts of a run's checkpoint for prompts of one's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageChops

from mmrl.app import sample as module
from mmrl.app.build import build, opened
from mmrl.app.sample import draw, prompts_of
from mmrl.checkpoint.run_state import of_run, saver_of
from mmrl.config.loader import load_recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Slot
from mmrl.logging.rundir import RunDir
from tests.support import tiny
from tests.support.cli import mmrl
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()  # before anything imports torchvision

SHAPES = ["shapes-lora", "optim.ema_decay=null", "sampling.steps=3", "sampling.window={size: 1}"]
TEXT = """
name: tiny
pipeline: llm/chat
model: {path: tinylm}
data: {name: sums, train: {count: 20, operations: 1}, heldout: {count: 4, operations: 1}}
sampling: {max_new_tokens: 12}
rewards: [{name: judge, options: {rubric: "Good?", model: {url: "http://127.0.0.1:9/v1", name: gone}}}]
algorithm: {type: grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
eval: {every: 1, samples: 4}
"""


def a_run(out: Path, recipe: str | Path, *overrides: str, nudge: float = 0.1) -> Path:
    """A run directory with a checkpoint of step 3 whose weights differ from the base's."""
    loaded = load_recipe([recipe], overrides)
    with RunDir.create(out) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        run = build(loaded.recipe, scored=False)
        draws = torch.Generator().manual_seed(1)
        for parameter in run.policy.trainable.values():
            parameter.data += nudge * torch.randn(parameter.shape, generator=draws)
        saver = saver_of(run, directory.checkpoints)
        saver.begin(of_run(run, 3, {"placement": run.compute.devices}, cpu_seconds=0.0), proved=True)
        saver.finish()
    return out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("sample") / "run", *SHAPES)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample-text")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "recipe.yaml").write_text(TEXT)
    return a_run(folder / "run", folder / "recipe.yaml")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_both_checkpoints_draw_the_same_noise_and_a_seed_the_same_pictures(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt", "a red circle", "--prompt", "two blue squares", "--n", "2", "--compare", "base"]
    assert mmrl("sample", str(pictures), *asked, "--out", str(tmp_path / "one")) == 0
    assert capsys.readouterr().out == f"{tmp_path}/one\n"
    found = rows(tmp_path / "one")
    assert [row["file"] for row in found] == [
        f"{which}/{name}.png" for which in ("base", "latest") for name in ("000_0", "000_1", "001_0", "001_1")
    ]
    assert [row["step"] for row in found] == [0] * 4 + [3] * 4
    assert {row["prompt"] for row in found} == {"a red circle", "two blue squares"}
    files = {row["file"]: (tmp_path / "one" / row["file"]).read_bytes() for row in found}
    assert len(set(files.values())) == 8
    with Image.open(tmp_path / "one" / "sheet.png") as sheet:
        assert sheet.width > 4 * 128
    mmrl("sample", str(pictures), *asked, "--seed", "1", "--out", str(tmp_path / "other"))
    assert all((tmp_path / "other" / name).read_bytes() != data for name, data in files.items())
    mmrl("sample", str(pictures), *asked[:-2], "--checkpoint", "base", "--out", str(tmp_path / "base"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "base" / "base").iterdir()} == {
        name.removeprefix("base/"): data for name, data in files.items() if name.startswith("base/")
    }
    a, b = (Image.open(tmp_path / "one" / which / "000_0.png") for which in ("base", "latest"))
    assert ImageChops.difference(a, b).getbbox()


def test_a_prompt_that_is_longer_than_the_encoders_read_is_named(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt", "a red circle", "--prompt", "a red circle above " * 30, "--n", "1"]
    assert mmrl("sample", str(pictures), *asked, "--out", str(tmp_path / "one")) == 0
    assert "note: 1 of 2 prompts looked at are too long" in capsys.readouterr().err


def test_a_file_of_prompts_names_the_lines_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("a red circle\n\n two blue squares \n")
    assert [p.text for p in prompts_of(["first"], file=tmp_path / "p.txt")] == [
        "first",
        "a red circle",
        "two blue squares",
    ]
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "system": "Be brief."}\nno json\n{"prompt": "two"}\n')
    found = prompts_of([], file=tmp_path / "p.jsonl")
    assert [(p.text, p.system) for p in found] == [("one", "Be brief."), ("two", None)]
    assert "left out: p.jsonl:2" in capsys.readouterr().err


def test_texts_are_rows_and_a_table_and_no_reward_is_asked(texts: Path, tmp_path: Path) -> None:
    """The run's judge is behind an endpoint that is gone."""
    draw(texts, prompts_of(["1+2|=", "3+4="]), tmp_path / "out", n=3, compare="base")
    found = rows(tmp_path / "out")
    assert [(row["checkpoint"], row["sample"]) for row in found] == [
        (which, k) for which in ("base", "latest") for _ in range(2) for k in range(3)
    ]
    assert len({row["text"] for row in found}) > 6
    table = (tmp_path / "out" / "sheet.md").read_text().splitlines()
    assert table[0] == "| prompt | base | step 3 |"
    assert len(table) == 2 + 6
    assert all(line.count("|") == 4 for line in table)


def test_greedy_texts_are_drawn_once(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(texts, run)
    settings = json.loads((run / "resolved.json").read_text())
    settings["eval"]["temperature"] = 0.0
    (run / "resolved.json").write_text(json.dumps(settings))
    draw(run, prompts_of(["1+2="]), tmp_path / "out", n=3)
    assert len(rows(tmp_path / "out")) == 1
    assert "one is drawn" in capsys.readouterr().err


def test_a_run_on_pairs_of_pictures_draws_prompts_that_have_no_pair(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "shapes-dpo", f"model.path={two_blocks()}", "sampling.steps=2")
    draw(run, prompts_of(["one red circle", "one blue cross"]), tmp_path / "out", n=2)
    assert [row["prompt"] for row in rows(tmp_path / "out")] == ["one red circle"] * 2 + ["one blue cross"] * 2
    pipeline = opened(run, scored=False)[0].pipeline
    with pytest.raises(BadPromptError, match="it has 0 media; a pair is"):
        pipeline.encode([Slot(-1, 0, 0, Prompt("0", "one red circle"))])  # what is trained or measured needs one


def test_clips_move(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "moving-shapes", "sampling.steps=2", "sampling.window=null", nudge=0.0)
    draw(run, prompts_of(["a red circle moves left"]), tmp_path / "out", n=2, checkpoint="base")
    with Image.open(tmp_path / "out" / "base" / "000_0.webp") as clip:
        assert clip.n_frames == 5  # type: ignore[attr-defined]
    assert (tmp_path / "out" / "sheet.png").is_file()


def test_pictures_of_a_prompt_reach_a_model_that_sees(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    run = a_run(tmp_path / "run", "scenes", nudge=0.0)
    answers = []
    for colour in ("red", "blue"):
        Image.new("RGB", (48, 48), colour).save(tmp_path / f"{colour}.png")
        asked = prompts_of(["<image>What colour is the circle?"], [tmp_path / f"{colour}.png"])
        draw(run, asked, tmp_path / colour, n=1, checkpoint="base")
        row = rows(tmp_path / colour)[0]
        answers.append(row["text"])
        with (
            Image.open(tmp_path / colour / row["pictures"][0]) as kept,
            Image.open(tmp_path / f"{colour}.png") as given,
        ):
            assert list(kept.getdata()) == list(given.getdata())
    assert answers[0] != answers[1]


def test_what_cannot_be_sampled_is_refused(pictures: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    out, one = tmp_path / "out", prompts_of(["a red circle"])
    seen = prompts_of(["a red circle"], [tmp_path / "a.png"])
    for run in (pictures, texts):
        with pytest.raises(UserError, match=r"reads no pictures in a prompt; leave out --images"):
            draw(run, seen, out)
    for call, said in (
        (lambda: draw(pictures, [], out), "give --prompt TEXT"),
        (lambda: draw(pictures, one, out, checkpoint="base", compare="base"), "name another one"),
        (lambda: draw(tmp_path, one, out), "no run directory"),
        (lambda: draw(pictures, one, tmp_path), "is not empty"),
        (lambda: draw(pictures, one, out, checkpoint="7"), "no checkpoint of step 7"),
        (lambda: draw(pictures, one, out, checkpoint="newest"), "give latest, best, base or a step"),
        (lambda: prompts_of([], [tmp_path / "a.png"]), "--prompts name their own"),
        (lambda: prompts_of(["x"], [tmp_path / "a.txt"]), "no picture or clip"),
        (lambda: prompts_of(["x"], [tmp_path / "torn.png"]), "torn.png"),
        (lambda: prompts_of(["<image> <image>"], [tmp_path / "a.png"]), "2 <image>"),
        (lambda: prompts_of([" "]), "the prompt is empty"),
        (lambda: prompts_of([], file=tmp_path / "gone.txt"), "no file"),
    ):
        with pytest.raises(UserError, match=said):
            call()
    assert not out.exists()


def test_a_damaged_checkpoint_is_refused_before_a_model_is_loaded(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pictures, run)
    weights = next((run / "checkpoints").rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    monkeypatch.setattr(module, "opened", lambda *_, **__: pytest.fail("a model was loaded"))
    for which in ("latest", "3"):
        with pytest.raises(UserError, match=weights.name):
            draw(run, prompts_of(["a red circle"]), tmp_path / "out", checkpoint=which)


def test_eval_prints_one_document(pictures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert mmrl("eval", str(pictures), "--samples", "2", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["step"], found["samples"]) == (3, 2)
    assert found["reward/shapes"] is not None
