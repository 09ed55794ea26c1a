"""A sweep over the strength of an adapter: the curve, the grid and what cannot be scaled."""

import json

import pytest
from typer.testing import CliRunner

from mmrl.app.build import evaluate
from mmrl.app.lora_scale import parse_strengths, sweep
from mmrl.app.trainer import Trainer
from mmrl.cli import app
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.signals import Stop
from mmrl.logging.rundir import RunDir
from mmrl.report.html import write_report
from tests.support.guards import SMALL
from tests.support.tiny_diffusion import two_blocks


def trained(out, recipe, *changes):
    loaded = load_recipe([recipe], changes)
    with RunDir.create(out) as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        assert Trainer(loaded, directory).begin(Stop(), resume=False).error is None
    return out


def test_the_adapter_is_scaled_from_the_base_model_to_itself(tmp_path):
    out = trained(
        tmp_path / "run",
        "shapes-draft",
        f"model.path={two_blocks()}",
        *SMALL,
        "train.steps=1",
        "eval.grid=2",
        "eval.samples=2",
    )
    result = CliRunner().invoke(app, ["eval", str(out), "--lora-strength", "1.5,0,1"])
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "strength" / "sweep.json").read_text())["rows"]
    assert [row["strength"] for row in rows] == [0, 1, 1.5]
    heldout = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    for row, same in zip(rows, heldout, strict=False):
        for label in ("target", "halfway"):
            assert row[f"reward/{label}"] == pytest.approx(same[f"reward/{label}"], abs=1e-7)
        assert row["guard/distance"] == pytest.approx(same["guard/distance"], abs=1e-7)
    distances = [row["guard/distance"] for row in rows]
    assert distances == sorted(set(distances)), "the stronger, the further"
    page = write_report(out).read_text()
    assert "Strength of the adapter" in page
    assert "the same prompts with each strength" in page
    assert evaluate(out)["reward/target"] == pytest.approx(rows[1]["reward/target"], abs=1e-7)


def test_texts_have_a_curve_too(tmp_path):
    small = ["train.steps=1", "train.prompts_per_step=1", "train.group_size=2", "sampling.max_new_tokens=4"]
    out = trained(tmp_path / "run", "sums", *small, "model.lora={rank: 2}", "eval.samples=2", "optim.lr=0.01")
    rows = sweep(out, [0.0, 1.0])
    assert rows[0]["guard/distance"] == pytest.approx(0, abs=1e-6)
    assert len(json.loads((out / "strength" / "sweep.json").read_text())["texts"]) == 4
    assert "Strength of the adapter" in write_report(out).read_text()


@pytest.mark.parametrize("text", ["", "a", "0,,1", "nan", "1,inf", ",".join(map(str, range(21)))])
def test_what_is_no_strength_is_refused(text):
    with pytest.raises(UserError, match=r"--lora-strength .*numbers with commas between"):
        parse_strengths(text)


def test_a_run_without_an_adapter_is_refused_before_a_model_is_loaded(tmp_path):
    loaded = load_recipe(["shapes-full"], [])
    with RunDir.create(tmp_path / "run") as directory:
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
    with pytest.raises(UserError, match="trains all weights, and no adapter could be scaled"):
        sweep(tmp_path / "run", [1.0])
