"""Export: a fresh stock pipeline draws from the files what the run's policy draws, by every public way to load them."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline  # pyright: ignore[reportPrivateImportUsage]
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file

import mmrl
from mmrl.app.build import build, restored
from mmrl.app.export import export
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.logging.card import public
from mmrl.runtime.start import train
from mmrl.training.evaluation import SEED
from tools.make_models import shapes_sd3

PROMPT = "two red circles"
DRAWING = {"num_inference_steps": 4, "guidance_scale": 2.0, "height": 32, "width": 32, "max_sequence_length": 12}
REWARD = """
def score(samples, *, context, api_token=""):
    return [sum(s.image.convert("L").tobytes()) / (255 * 32 * 32) for s in samples]
"""
RECIPE = """
name: tiny
pipeline: diffusion/sd3
model: {path: tiny-sd3, lora: {rank: 4, alpha: 12}}
data: {name: shapes}
sampling: {steps: 4, height: 32, width: 32, max_sequence_length: 12, guidance_scale: 2.0}
rewards: [{name: "bright.py", weight: 0.5, options: {api_token: hush-hush}}]
algorithm: {type: flow_grpo}
train: {steps: 2, prompts_per_step: 2, group_size: 4, micro_batch_size: 8}
optim: {lr: 0.03, ema_decay: 0.9}
eval: {every: 1, samples: 4, grid: 4}
checkpoint: {every: 1}
"""


@pytest.fixture(scope="module", autouse=True)
def secret() -> Iterator[None]:
    """What the run directory does not hold, and an export needs to open the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMRL_REWARDS_0_OPTIONS_API_TOKEN", "hush-hush")
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Stable Diffusion 3, a reward, a LoRA run and a run of all weights (both averaged)."""
    folder = tmp_path_factory.mktemp("export")
    torch.manual_seed(0)
    captions = [p.text for p in mmrl.load("datasets", "shapes").prompts("train")][:6]
    base = shapes_sd3.build(captions)
    base.transformer = type(base.transformer).from_config({**base.transformer.config, "num_layers": 2})
    base.vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    base.save_pretrained(folder / "tiny-sd3")
    (folder / "bright.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    train(load_recipe([folder / "recipe.yaml"]), folder / "lora-run")
    train(load_recipe([folder / "recipe.yaml"], ["model.lora=null", "optim.lr=2e-3"]), folder / "full-run")
    return folder


@pytest.fixture(scope="module")
def exported(root: Path) -> SimpleNamespace:
    return SimpleNamespace(
        merged=export(root / "lora-run", root / "lora-merged", "merged", "latest"),
        lora=export(root / "lora-run", root / "lora-adapter", "lora", "latest"),
        full=export(root / "full-run", root / "full-merged", "merged", "latest"),
    )


def draw(pipe: Any, **options: Any) -> torch.Tensor:
    """One picture ``[1, H, W, 3]`` by the stock call."""
    pipe.set_progress_bar_config(disable=True)
    options = {"generator": torch.Generator().manual_seed(0), **DRAWING, **options}
    return torch.from_numpy(pipe(PROMPT, output_type="np", **options).images)


@cache
def of_run(run: Path) -> torch.Tensor:
    """What the run's own policy draws, under the weights that evaluation uses."""
    restored_run, _, _ = restored(run, "latest")
    with restored_run.policy.for_evaluation():
        return draw(restored_run.pipeline.adapter.pipe)  # type: ignore[attr-defined]


@cache
def of_base(root: Path) -> torch.Tensor:
    """What the model draws that the runs began with."""
    return draw(fresh(root / "tiny-sd3"))


def fresh(folder: Path) -> Any:
    return DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.slow
def test_the_runs_changed_the_model_so_that_equal_pixels_mean_something(root: Path) -> None:
    base = of_base(root)
    for name in ("lora-run", "full-run"):
        restored_run, _, _ = restored(root / name, "latest")
        assert difference(of_run(root / name), base) > 0.02
        current = draw(restored_run.pipeline.adapter.pipe)  # type: ignore[attr-defined]
        assert difference(of_run(root / name), current) > 0.01, "the average and the weights must differ here"


def test_exported_files_have_the_permissions_of_new_files(exported: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    wanted = (tmp_path / "new").stat().st_mode
    for folder in (exported.merged, exported.lora):
        assert {file.stat().st_mode for file in folder.rglob("*") if file.is_file()} == {wanted}


def test_merged_lora_draws_what_the_policy_draws(root: Path, exported: SimpleNamespace) -> None:
    pipe = fresh(exported.merged)
    assert type(pipe) is StableDiffusion3Pipeline
    assert not any("lora" in name for name, _ in pipe.transformer.named_parameters())
    assert difference(draw(pipe), of_run(root / "lora-run")) < 1e-4


def test_all_weights_draw_the_same_pixels(root: Path, exported: SimpleNamespace) -> None:
    assert difference(draw(fresh(exported.full)), of_run(root / "full-run")) == 0


def test_the_stock_pipeline_draws_the_runs_held_out_pictures(root: Path, exported: SimpleNamespace) -> None:
    """Not only the same weights: mmrl's own sampler and the stock one agree on what they draw from them."""
    run, _, _ = restored(root / "full-run", "latest")
    slots, ids = [Slot(-1, 0, 0, Prompt("0", PROMPT))], [SampleId(-1, 0, 0, 0)]
    run.pipeline.encode(slots)
    with run.policy.for_evaluation():
        ours = run.pipeline.images(run.pipeline.sample(slots, ids, [], SEED)).permute(0, 2, 3, 1)
    noise = run.pipeline.initial(ids, SEED, run.pipeline.adapter.schedule(4))  # type: ignore[attr-defined]
    assert difference(draw(fresh(exported.full), latents=noise), ours) < 1e-4


def test_lora_loads_with_diffusers(root: Path, exported: SimpleNamespace) -> None:
    pipe = fresh(root / "tiny-sd3")
    pipe.load_lora_weights(exported.lora)
    assert difference(draw(pipe), of_run(root / "lora-run")) == 0


def test_the_last_steps_are_the_base_models_as_the_docs_say(root: Path, exported: SimpleNamespace) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reward_hacking.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "disable_lora" in b)
    said: dict[str, Any] = {}
    exec(block.partition("\nimage = ")[0].replace("0.8", "0.5"), said)
    run, _, _ = restored(root / "lora-run", "latest")
    run.pipeline.recipe = run.recipe.model_copy(  # type: ignore[attr-defined]
        update={"eval": run.recipe.eval.model_copy(update={"tuned_fraction": 0.5})}
    )
    slots, ids = [Slot(-1, 0, 0, Prompt("0", PROMPT))], [SampleId(-1, 0, 0, 0)]
    run.pipeline.encode(slots)
    with run.policy.for_evaluation():
        trajectory = run.pipeline.sample(slots, ids, [], SEED, evaluate=True)
        ours = run.pipeline.images(trajectory).permute(0, 2, 3, 1)
    noise = run.pipeline.initial(ids, SEED, run.pipeline.adapter.schedule(4))  # type: ignore[attr-defined]
    pipe = fresh(root / "tiny-sd3")
    pipe.load_lora_weights(exported.lora)
    whole = draw(pipe, latents=noise)
    assert difference(draw(pipe, latents=noise, callback_on_step_end=said["leave"]), ours) < 1e-4
    assert difference(whole, ours) > 0.01


def test_lora_loads_with_peft(root: Path, exported: SimpleNamespace) -> None:
    pipe = fresh(root / "tiny-sd3")
    pipe.transformer = PeftModel.from_pretrained(pipe.transformer, exported.lora)
    assert difference(draw(pipe), of_run(root / "lora-run")) == 0


@pytest.mark.parametrize("kept", ["adapter_config.json adapter_model.safetensors", "pytorch_lora_weights.safetensors"])
def test_a_run_goes_on_with_the_lora_as_peft_or_diffusers_wrote_it(
    root: Path, exported: SimpleNamespace, tmp_path: Path, kept: str
) -> None:
    for name in kept.split():
        shutil.copy(exported.lora / name, tmp_path)
    loaded = load_recipe([root / "recipe.yaml"], [f"model.lora={{path: {tmp_path}}}", "algorithm.kl_coef=0.1"])
    lora = loaded.recipe.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (4, 12.0)
    run = build(loaded.recipe)
    assert difference(draw(run.pipeline.adapter.pipe), of_run(root / "lora-run")) == 0  # type: ignore[attr-defined]
    assert run.policy.copies["reference"].keys() == run.policy.trainable.keys()


def test_the_lora_guards_can_fail(root: Path, exported: SimpleNamespace, tmp_path: Path) -> None:
    """What others save: without metadata the scale is lost (alpha != rank), and peft's file alone is ignored."""
    expected = of_run(root / "lora-run")
    written = load_file(exported.lora / "pytorch_lora_weights.safetensors")
    layers: dict[str, Any] = {key.removeprefix("transformer."): value for key, value in written.items()}
    StableDiffusion3Pipeline.save_lora_weights(tmp_path / "bare", transformer_lora_layers=layers)
    pipe = fresh(root / "tiny-sd3")
    pipe.load_lora_weights(tmp_path / "bare")
    assert difference(draw(pipe), expected) > 1e-3

    (tmp_path / "peft").mkdir()
    shutil.copy(exported.lora / "adapter_model.safetensors", tmp_path / "peft")
    pipe = fresh(root / "tiny-sd3")
    pipe.load_lora_weights(tmp_path / "peft")
    assert difference(draw(pipe), of_base(root)) == 0


@pytest.mark.parametrize("name", ["lora-run", "full-run"])
def test_writing_leaves_the_policy_as_it_was(root: Path, tmp_path: Path, name: str) -> None:
    run, _, _ = restored(root / name, "latest")
    before = {key: value.clone() for key, value in run.pipeline.policy.state_dict().items()}
    for what in ["merged", "lora"] if name == "lora-run" else ["merged"]:
        run.pipeline.write(tmp_path / what, what)  # type: ignore[arg-type]
    after = run.pipeline.policy.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert {n for n, p in run.pipeline.policy.named_parameters() if p.requires_grad} == set(run.policy.trainable)


def test_merged_weights_take_the_models_dtype_and_are_rounded_once(root: Path, tmp_path: Path) -> None:
    run, _, _ = restored(root / "lora-run", "latest")
    pipe = run.pipeline.adapter.pipe  # type: ignore[attr-defined]
    mmrl.load("pipelines", "diffusion/export:write_merged")(run.pipeline.adapter, torch.bfloat16, tmp_path / "half")
    written = load_file(tmp_path / "half" / "transformer" / "diffusion_pytorch_model.safetensors")
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    base, a, b = (
        w.detach().double()
        for w in (layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    )
    exact = base + 3 * b @ a
    half_a_step = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 9)
    half_a_step += 2**-23 * (base.abs() + (3 * b @ a).abs())  # and of the sum in float32, whose terms may cancel
    within = (written["transformer_blocks.0.attn.to_q.weight"].double() - exact).abs() <= half_a_step
    assert within.all()
    twice = (base.bfloat16() + (3 * b @ a).bfloat16()).double()
    assert ((twice - exact).abs() > half_a_step).any(), "the measure must tell what was rounded twice"
    vae = load_file(tmp_path / "half" / "vae" / "diffusion_pytorch_model.safetensors")
    assert {t.dtype for t in [*written.values(), *vae.values()]} == {torch.bfloat16}


def test_the_base_checkpoint_is_the_base_model(root: Path) -> None:
    out = export(root / "lora-run", root / "untrained", "merged", "base")
    assert difference(draw(fresh(out)), of_base(root)) == 0
    card = (out / "README.md").read_text()
    assert "after 0 steps" in card
    assert not (out / "before_after.png").exists()


def test_the_cards_code_runs(root: Path, exported: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of Python in the cards, from the folder that holds the exports, draws the run's picture."""
    monkeypatch.chdir(root)
    drawn = {}
    for name in ("lora-merged", "lora-adapter", "full-merged"):
        blocks = re.findall(r"```python\n(.*?)```", (root / name / "README.md").read_text(), re.DOTALL)
        for i, block in enumerate(blocks):
            namespace: dict[str, Any] = {}
            exec(compile(block, f"{name} block {i}", "exec"), namespace)
            drawn[name, i] = torch.tensor(list(namespace["image"].convert("RGB").tobytes())).float()
    assert list(drawn) == [("lora-merged", 0), ("lora-adapter", 0), ("lora-adapter", 1), ("full-merged", 0)]
    assert difference(drawn["lora-adapter", 0], drawn["lora-adapter", 1]) == 0
    assert difference(drawn["lora-adapter", 0], drawn["lora-merged", 0]) <= 1
    assert difference(drawn["lora-adapter", 0], drawn["full-merged", 0]) > 1


def test_the_card_says_what_was_trained_and_what_it_changed(root: Path, exported: SimpleNamespace) -> None:
    card = (exported.lora / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["base_model"], head["library_name"]) == ("tiny-sd3", "diffusers")
    assert head["base_model_relation"] == "adapter"
    assert {"lora", "flow_grpo"} <= set(head["tags"])
    assert "`bright.py`, weight 0.5" in card
    rows = [json.loads(line) for line in (root / "lora-run" / "heldout.jsonl").read_text().splitlines()]
    first, last = rows[0]["reward/bright"], rows[-1]["reward/bright"]
    assert f"| bright | {first:.3f} | {last:.3f} | {last - first:+.3f} |" in card
    assert "before (step 0) | after (step 2)" in card
    results = ModelCard(card).data.eval_results
    assert [(r.metric_type, r.metric_value, r.dataset_type) for r in results] == [("bright", last, "shapes")]
    settings = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", card, re.DOTALL)[0])
    assert settings["optim"]["lr"] == 0.03
    assert settings["rewards"][0]["options"] == {"api_token": "(withheld)"}
    from PIL import Image

    with Image.open(exported.lora / "before_after.png") as picture:
        assert picture.format == "PNG"


def test_the_card_of_an_earlier_checkpoint_stops_there(root: Path, tmp_path: Path) -> None:
    card = (export(root / "lora-run", tmp_path / "early", "lora", "1") / "README.md").read_text()
    assert "after 1 step of" in card
    assert "after (step 1)" in card


def test_nothing_exported_names_this_machines_folders(root: Path, exported: SimpleNamespace) -> None:
    for folder in vars(exported).values():
        for path in folder.rglob("*"):
            assert path.is_dir() or str(root).encode() not in path.read_bytes(), path
            assert "hush-hush" not in (path.read_text(errors="ignore") if path.is_file() else "")
    assert not [p.name for p in root.iterdir() if p.name.startswith(".")], "nothing is left beside an export"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/models/my sd3", "my sd3"),
        ("/home/me/my.py:score", "my.py:score"),
        ("stabilityai/stable-diffusion-3.5-medium", "stabilityai/stable-diffusion-3.5-medium"),
        ("http://me:word@scorer:8080/v1/score", "http://scorer:8080/v1/score"),
        ("python /home/me/judge.py --fast", "python judge.py --fast"),
        ("~/models/sd3", "sd3"),
        ("../models/sd3", "../models/sd3"),
    ],
)
def test_public_names(text: str, shown: str) -> None:
    assert public(text) == shown


def test_a_lora_file_of_a_run_draws_the_runs_pictures(root: Path, tmp_path: Path) -> None:
    out = export(root / "lora-run", tmp_path / "out", "lora-file", "latest")
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "before_after.png", "lora.safetensors"]
    assert 'weight_name="lora.safetensors"' in (out / "README.md").read_text()
    pipe = fresh(root / "tiny-sd3")
    pipe.load_lora_weights(out, weight_name="lora.safetensors")
    assert difference(draw(pipe), of_run(root / "lora-run")) < 1e-4


def test_what_cannot_be_exported_is_refused_before_a_model_is_loaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.app.export.restored", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("keep me")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trained all weights.*use --what merged"):
        export(root / "full-run", tmp_path / "out", "lora", "latest")
    with pytest.raises(UserError, match=r"is not empty.*--out"):
        export(root / "lora-run", tmp_path / "taken", "merged", "latest")
    with pytest.raises(UserError, match="is a file"):
        export(root / "lora-run", tmp_path / "file", "merged", "latest")
    with pytest.raises(UserError, match="name a new directory"):
        export(root / "lora-run", Path("."), "merged", "latest")
    with pytest.raises(UserError, match="merged, lora, lora-file"):
        export(root / "lora-run", tmp_path / "out", "gguf", "latest")
    with pytest.raises(UserError, match="no run directory"):
        export(tmp_path / "taken", tmp_path / "out", "merged", "latest")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
    assert (tmp_path / "taken" / "mine.txt").read_text() == "keep me"


@pytest.mark.parametrize("what", ["merged", "lora"])
def test_a_full_disk_leaves_nothing_behind(root: Path, tmp_path: Path, what: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a write past it fails as on a full disk
    try:
        with pytest.raises(UserError, match=r"could not be written.*File too large.*MiB are free.*--out"):
            export(root / "lora-run", tmp_path / "out", what, "latest")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    assert export(root / "lora-run", tmp_path / "out", what, "latest") == tmp_path / "out"
    assert (tmp_path / "out" / "README.md").is_file()
