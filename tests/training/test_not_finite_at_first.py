"""Numbers that are not finite before the first update name the checkpoint or its scheduler, and offer no lower rate."""

import json
import math
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.app.build import build
from mmrl.app.divergence import divergence
from mmrl.app.export import export
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.core.errors import NotFiniteError, UserError
from mmrl.runtime import start
from mmrl.training import loop
from tests.support.tiny_diffusion import SHAPES

SUMS = Path(__file__).resolve().parents[2] / "pipelines" / "llm" / "models" / "sums-qwen3"
ONE_STEP = ["train.steps=1", "train.prompts_per_step=2", "eval.every=null", "checkpoint.every=1"]
GROUP = [*ONE_STEP, "train.group_size=2", "train.micro_batch_size=4"]
PAIR = [*ONE_STEP, "train.group_size=1", "train.micro_batch_size=2"]
TEXT = ["sampling.max_new_tokens=8"]
PICTURES = ["sampling.steps=3"]
RUNS = {
    "grpo": ("sums", [*GROUP, *TEXT]),
    "ppo": ("sums", [*GROUP, *TEXT, "algorithm={type: ppo, critic_lr: 1.0e-3}"]),
    "dpo": ("sums-dpo", [*PAIR, *TEXT]),
    "lora": ("sums", [*GROUP, *TEXT, "model.lora={rank: 2, alpha: 4}"]),
    "flow_grpo": ("shapes-lora", [*GROUP, *PICTURES, "sampling.window={size: 2}"]),
    "nft": ("shapes-nft", [*GROUP, *PICTURES, "algorithm.noise_levels=1"]),
    "draft": ("shapes-draft", [*PAIR, *PICTURES]),
    "picture_dpo": ("shapes-dpo", [*PAIR, *PICTURES]),
}
"""A run of one step for every kind of objective: the shipped recipe and what makes it small."""
TEXT_RUNS = ("grpo", "ppo", "dpo", "lora")
READ_IN_PART = re.compile("embedding|shared|relative_attention_bias|pos_embed.pos_embed")
"""Tensors whose rows are for tokens, places or distances that no prompt may have."""
BAD = (math.nan, math.inf, -math.inf, 3e38)


@dataclass(frozen=True)
class Case:
    """``bad`` stands in ``where`` of the checkpoint: in one number of a tensor, in a whole tensor, or in a field."""

    run: str
    where: str
    what: str
    bad: float
    seed: int


def poison(case: Case, model: Path) -> None:
    """Put ``case.bad`` into a tensor or a field of the checkpoint ``model``."""
    draw = random.Random(case.seed)
    if case.where in ("scheduler", "vae/config.json"):
        file = model / ("scheduler/scheduler_config.json" if case.where == "scheduler" else case.where)
        file.write_text(json.dumps({**json.loads(file.read_text()), case.what: case.bad}))
        return
    ruin(next((model / case.where).glob("*.safetensors")), case, draw)


def ruin(file: Path, case: Case, draw: random.Random) -> None:
    """Put ``case.bad`` into one number, or all, of a tensor that the run of ``case`` multiplies with."""
    tensors = load_file(file)
    part = "" if case.where != "vae" else "encoder." if case.run == "picture_dpo" else "decoder."
    tensor = tensors[draw.choice(sorted(k for k in tensors if k.startswith(part) and not READ_IN_PART.search(k)))]
    bad = min(case.bad, torch.finfo(tensor.dtype).max) if math.isfinite(case.bad) else case.bad
    tensor.fill_(bad) if case.what == "all" else tensor.view(-1)[draw.randrange(tensor.numel())].fill_(bad)
    save_file(tensors, file, metadata={"format": "pt"})


def said(case: Case, folder: Path) -> str | None:
    """What the run of ``case`` says; None where it ends well."""
    recipe, settings = RUNS[case.run]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SUMS if case.run in TEXT_RUNS else SHAPES, folder / "model")
    poison(case, folder / "model")
    try:
        start.train(load_recipe([recipe], [*settings, f"model.path={folder / 'model'}"]), folder / "run")
    except UserError as error:
        return str(error)
    return None


def right(case: Case, folder: Path) -> bool:
    """Whether the message names the part that has the number, and no rate. A part may swallow an infinity, and a large
    number may do no harm; nan goes through."""
    text = said(case, folder)
    if text is None:
        return not math.isnan(case.bad)
    part = {"": "checkpoint", "transformer": "checkpoint", "vae": "VAE"}.get(case.where, case.where.split("_")[0])
    return part in text and not re.search(r"optim\.lr|learning rate|lower|batch shapes|rewards", text)


def cases(count: int) -> list[Case]:
    """``count`` cases; the first few of them are one of each part."""
    draw = random.Random(7)
    made = []
    fields = {"scheduler": ("shift", "num_train_timesteps"), "vae/config.json": ("scaling_factor", "shift_factor")}
    for n in range(count):
        run = list(RUNS)[n % len(RUNS)]
        encoders = [f"text_encoder{number}" for number in ("", "_2", "_3")]
        places = [""] if run in TEXT_RUNS else ["transformer", *encoders, "vae", *fields]
        where = places[n // len(RUNS) % len(places)]
        what = draw.choice(fields.get(where, ("one", "all")))
        made.append(Case(run, where, what, draw.choice(BAD), n))
    return made


@pytest.mark.slow
@pytest.mark.sweep("numbers that are not finite before the first update")
def test_they_name_where_they_are_and_offer_no_lower_rate(sweep, tmp_path):
    drawn = [
        *cases(sweep.size(8, 200)),
        Case("nft", "transformer", "all", 3e38, 173),  # a gradient of finite weights
        Case("draft", "text_encoder", "all", math.nan, 182),  # attention answers zeros
    ]
    sweep.run(drawn, lambda case: right(case, tmp_path / "case"))
    sweep.done()


def test_an_adapter_is_named_by_its_own_path(tmp_path):
    recipe, settings = RUNS["lora"]
    start.train(load_recipe([recipe], settings), tmp_path / "first")
    adapter = tmp_path / "adapter"
    export(tmp_path / "first", adapter, "lora")
    ruin(adapter / "adapter_model.safetensors", Case("lora", "", "one", math.nan, 0), random.Random(0))
    with pytest.raises(UserError) as error:
        start.train(load_recipe([recipe], [*settings, f"model.lora={{path: {adapter}}}"]), tmp_path / "run")
    assert f"repair the weights of the adapter in model.lora.path ({adapter})" in str(error.value)


def test_a_row_that_nothing_reads_is_named_at_the_first_update():
    recipe, settings = RUNS["ppo"]
    of = load_recipe([recipe], settings)
    run = build(of.recipe)
    assert run.critic is not None
    name, rows = next((k, p) for k, p in run.critic.trainable.items() if "embed" in k)
    with torch.no_grad():
        rows[3] = math.nan  # of `$`, which no sum has
    with pytest.raises(NotFiniteError) as error:
        loop.train_step(run, 0, Clock(torch.device("cpu")))
    assert str(error.value) == f"the critic: update 0 starts from weights that are not finite: {name} (nan)"
    found = divergence(run, error.value, 0, evaluating=False, proved=False)
    assert (found.where, found.trained) == ("the weights", False)


SCHEDULERS = (
    *("DDIM", "DDPM", "PNDM", "LCM", "DPMSolverMultistep", "DPMSolverSinglestep", "DEISMultistep", "UniPCMultistep"),
    *("SASolver", "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete", "FlowMatchEulerDiscrete"),
)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_as_diffusers_saves_it_is_accepted(name, tmp_path):
    import diffusers

    from mmrl.pipelines.diffusion.refusals import check_scheduler

    getattr(diffusers, f"{name}Scheduler")().save_pretrained(tmp_path / "scheduler")
    check_scheduler(str(tmp_path))
