"""Every family of diffusion models with every kind of objective on a CUDA device that is pretended: nothing mixes its
tensors with the host's, in training, evaluation, a checkpoint and a resumed run."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from smoke_waits import BUDGETS

from tests.support.pretended_families import EDITORS, KINDS, settings

pytestmark = pytest.mark.pretend_cuda

FAMILIES = [
    "sd3",
    "sd",
    "sdxl",
    "flux",
    "qwen_image",
    "qwen_image_edit",
    "wan",
    "sana",
    "z_image",
    "flux2_klein",
    "flux2_klein_edit",
    "flux_kontext",
    "wan22_ti2v",
    "wan22_a14b",
    "wan_i2v",
    "wan22_i2v_5b",
    "wan_v2v",
    "qwen_image_edit_plus",
    "flux2",
    "flux2_edit",
    "hunyuan_video15",
    "hunyuan_video15_i2v",
    "ltx2",
    "ltx2_i2v",
]
OTHER_WAITS = {
    "qwen_image": " of Qwen-Image",
    "qwen_image_edit": " of Qwen-Image",
    "qwen_image_edit_plus": " of Qwen-Image",
    "wan22_a14b": " of two models",
    "hunyuan_video15": " of HunyuanVideo",
    "hunyuan_video15_i2v": " of HunyuanVideo",
}
CLIPS = """
import mmrl
import numpy as np
import torch

@mmrl.reward(inputs=("video",))
def dark(samples, *, context):
    return [-float(np.mean([np.asarray(frame) for frame in s.video])) for s in samples]

@mmrl.reward(inputs=("tensor",), differentiable=True)
def light(samples, *, context):
    return torch.stack([s.tensor.mean() for s in samples])
"""
COMBINED = [  # of SD3 all; of another family one kind, which takes turns, as adapters and all weights do
    pytest.param(family, kind, lora, marks=[pytest.mark.long] * (family != "sd3" and (k, lora) != (f % 3, f % 2 == 0)))
    for f, family in enumerate(FAMILIES)
    for k, kind in enumerate(KINDS)
    for lora in (True, False)
    if kind != "offline"
    or family
    not in (*EDITORS, "wan", "wan22_ti2v", "wan22_a14b", "hunyuan_video15", "ltx2")  # which the recipe's checks refuse
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Where the tiny model of a family is, which is made when it is first asked for."""
    from tests.support.tiny_diffusion import SHAPES, save

    root = tmp_path_factory.mktemp("families")
    saved = cache(lambda family: save(family, root / family))
    of = {"flux2_klein_edit": "flux2_klein", "flux2_edit": "flux2", "wan22_i2v_5b": "wan22_ti2v", "wan_v2v": "wan"}
    of |= {"ltx2_i2v": "ltx2"}
    return lambda family: SHAPES if family == "sd3" else saved(of.get(family, family))


@pytest.mark.parametrize(("family", "kind", "lora"), COMBINED)
def test_no_devices_are_mixed_and_no_denoising_step_waits(folder_of, tmp_path, monkeypatch, family, kind, lora):
    from mmrl.app.trainer import Trainer
    from mmrl.config.loader import load_recipe
    from mmrl.core.signals import Stop
    from mmrl.logging.rundir import RunDir
    from mmrl.pipelines.diffusion.flow import FlowPipeline
    from tests.support import pretend

    predict, waited = FlowPipeline.velocity, []

    def counted(*given):
        with pretend.waits() as found:
            velocity = predict(*given)
        waited.append(found)
        return velocity

    monkeypatch.setattr(FlowPipeline, "velocity", counted)
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings(family, folder_of(family), kind, lora)))
    (tmp_path / "clips.py").write_text(CLIPS)
    for steps in (2, 3):
        loaded = load_recipe([tmp_path / "recipe.yaml"], [f"train.steps={steps}"])
        with RunDir(tmp_path / "run") if steps == 3 else RunDir.create(tmp_path / "run") as directory:
            Trainer(loaded, directory).begin(Stop(), resume=steps == 3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["optim/grad_norm"] > 0 for row in rows)
    assert len((tmp_path / "run" / "heldout.jsonl").read_text().splitlines()) >= 1
    budget = BUDGETS["a denoising step" + OTHER_WAITS.get(family, "")]
    last = waited[-1] if waited else {}  # earlier ones make what is made once
    assert {
        str(wait) for wait in last if wait.where.partition(":")[0] not in (*budget.libraries, *budget.ours)
    } == set()
    assert sum(last.values()) <= budget.total


def test_of_two_models_one_waits_in_the_hosts_memory(folder_of, tmp_path):
    """Through training, evaluation and a checkpoint, with the same figures as if both stayed; both are exported."""
    from mmrl.app.trainer import Trainer
    from mmrl.config.loader import load_recipe
    from mmrl.core.signals import Stop
    from mmrl.logging.rundir import RunDir

    found, rows = {}, {}
    made = settings("wan22_a14b", folder_of("wan22_a14b"), "policy_gradient", lora=True)
    (tmp_path / "recipe.yaml").write_text(json.dumps(made | {"sampling": made["sampling"] | {"steps": 5}}))
    (tmp_path / "clips.py").write_text(CLIPS)
    for offload in ("true", "false"):
        loaded = load_recipe([tmp_path / "recipe.yaml"], [f"model.offload={offload}"])
        with RunDir.create(tmp_path / offload) as directory:
            trainer = Trainer(loaded, directory)
            trainer.begin(Stop(), resume=False)
        pipeline = trainer.run.pipeline
        frozen = [[p for p in one.parameters() if not p.requires_grad] for one in pipeline.adapter.model.models]
        found[offload] = sorted({p.device.type for p in of} == {"cuda"} for of in frozen)
        assert {p.device.type for p in pipeline.policy.parameters() if p.requires_grad} == {"cuda"}
        pipeline.write(tmp_path / f"out-{offload}", "merged")
        assert (tmp_path / f"out-{offload}" / "transformer_2" / "config.json").exists()
        lines = (tmp_path / offload / "metrics.jsonl").read_text().splitlines()
        rows[offload] = [json.loads(line) for line in lines]
    assert found == {"true": [False, True], "false": [True, True]}
    for name in ("reward/mean", "optim/grad_norm", "policy/kl"):
        assert [row[name] for row in rows["true"]] == pytest.approx([row[name] for row in rows["false"]], rel=1e-3)
