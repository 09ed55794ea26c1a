"""What the messages of the toolkit tell a user to do can be done, and mends what they complain of."""

import json
import re
import shutil
import warnings
from importlib.util import find_spec

import pytest
import yaml

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan
from tests.support.carried import note, said_by
from tests.support.carried_table import CARRIED, PLANNED, SEEING
from tests.support.messages import content, edits, faults, literals, put
from tests.support.planning import without_the_step

allow_cpu_only()  # before transformers imports torchvision

APART = {"devices_per_controller": 2, "device": "cpu"}
WINDOWED = "a model with a sliding window"
VLLM = {"rollout.engine": "vllm", "rollout.sampling.top_k": 3}
ONE_ENGINE = {"rollout": {"engine": "vllm_server", "options": {"tensor_parallel_size": 2}}}
ON_TWO = {"vllm": "../models/sums-qwen3", "args": {"tensor_parallel_size": 2}}


def asks(model):
    return [{"name": "judge", "options": {"model": model, "rubric": "Is it right? {{ response }}"}}]


PLANS = [
    ("shapes-judge", {"placement.one_judge": True, "placement.sleep": True, **APART}),
    ("shapes-judge", {"placement.type": "disaggregated", "placement.trainers": 1, **APART}),
    ("shapes-lora", {"placement": "partial", **APART}),
    ("sums-dpo", {"placement": "partial", **APART}),
    ("shapes-lora", {"placement.sleep": True}),
    ("shapes-lora", {"placement.type": "disaggregated", "placement.split": "greedy", **APART}),
    ("shapes-lora", {"placement.type": "disaggregated", "placement.judges": 1, **APART, "devices_per_controller": 3}),
    ("shapes-lora", {"model.lora.rank": 100_000}),
    ("shapes-lora", {"performance.tf32": True}),
    ("shapes-judge", {"performance.attention": "flash", "model.dtype": "bfloat16"}),
    ("words-ocr", {"performance.attention": "native"}),
    ("words-ocr", {"performance.attention": "xformers"}),
    ("sums", {"performance.attention": "flash_attention_2", "model.dtype": "bfloat16"}),
    ("sums", {"rollout.sampling.top_k": 3}),
    ("sums", {**VLLM, "rollout.sampling.top_p": 0.3}),
    ("sums", {**VLLM, "rollout.sampling.stop": ["a"]}),
    ("sums", {**VLLM, "rollout.sampling.logprobs": 3}),
    ("sums", {**VLLM, "rollout.sampling.nothing": 3}),
    ("sums", {"device": "cuda"}),
    ("sums", {"sampling.max_new_tokens": 100_000}),
    ("sums", {"data.overlong": "error", "sampling.max_prompt_tokens": 3}),
    ("sums", {"pipeline": "llm/score"}),
    ("sums", {"model.dtype": "bfloat16"}),
    ("sums-reward", {"pipeline": "llm/chat"}),
    ("sums-dpo", {"pipeline": "llm/score"}),
    ("sd15", {"sampling.shift": 3.0}),
    ("sd15", {"sampling.schedule": "checkpoint"}),
    ("flux-dev", {"sampling.negative_prompt": "x"}),
    ("shapes-nft", {"algorithm": {"type": "v_grpo", "old_kl_coef": 0.3}}),
    ("scenes", {"model.min_pixels": 1_000_000}),
    ("scenes", {"model.max_pixels": 100}),
    ("sums", {"model.path": WINDOWED, "train.context_parallel": 2, "train.backend": "fsdp", **APART}),
    ("shapes-full", {"train.context_parallel": 2, **APART}),
    ("moving-shapes", {"train.context_parallel": 8, **APART, "devices_per_controller": 8}),
    ("moving-shapes", {"train.context_parallel": 3, **APART, "devices_per_controller": 3}),
    ("scenes", {"train.pipeline_parallel": 2, "train.backend": "megatron", **APART}),
    ("sums", {"model.freeze": ["embed_tokens"], "train.tensor_parallel": 2, "train.backend": "megatron", **APART}),
    ("sums", {"device": "cuda", "devices_per_controller": 2}),
    ("sums", {"rollout.options": {"max_num_seqs": 3}}),
    ("sums", {"data": {"name": "scenes"}}),
    ("sums", {**ONE_ENGINE, "rewards": asks({"path": "../models/sums-qwen3"}), **APART, "devices_per_controller": 4}),
    ("sums", {"rewards": asks(ON_TWO), "controllers": 2, "device": "cpu"}),
    ("sums-dpo", {"algorithm.loss_type": "hinge", "algorithm.label_smoothing": 0.1}),
    ("shapes-draft", {"rewards": [{"name": "shapes"}], "eval.rewards": []}),
    ("clips", {"pipeline": "llm/chat"}),
]
"""Recipes with a mistake that the plan names."""
SEE = ("scenes", "clips")
"""Those of them whose models need the extra ``vlm``."""


@pytest.mark.slow
@pytest.mark.sweep("what texts of the code tell to do")
def test_every_key_value_command_and_option_in_the_code_exists(sweep):
    for text in literals():
        sweep.check(not (found := faults(text.text)), f"{text.file}:{text.line}: {found} in {text.text!r}")
    sweep.done()


@pytest.mark.parametrize(
    "text",
    [
        "x; set optim.lrs to 3",
        "x; set train.steps=many",
        "remove model.lora.nothing",
        "run mmrl trains RECIPE --resume",
        "run mmrl train RECIPE --resumes",
        "with --no-such-option",
        "set sampling.sde.kind: nothing",
        "raise eval.everys",
    ],
)
def test_what_cannot_be_done_is_found(text):
    assert faults(text)


def complaints(recipe, root, file):
    """What the plan says of a recipe: by the first words of each message, the message."""
    file.write_text(yaml.safe_dump(recipe))
    with without_the_step(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = plan(load_recipe([file], root=root))
            said = [*made.problems, *made.notes]
        except UserError as error:
            said = [line.partition("  ")[2].strip() or line.strip() for line in str(error).splitlines()]
    return {re.sub(r"\d[\d.,]*", "N", line.partition(";")[0]): line for line in said}


@pytest.fixture
def windowed(tmp_path):
    """The model of ``sums``, but that its config gives half of its layers a sliding window."""
    folder = shutil.copytree(content("sums")[0].parent.parent / "models" / "sums-qwen3", tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", "sliding_attention"] * (config["num_hidden_layers"] // 2)
    config |= {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
@pytest.mark.sweep("edits that messages of a plan name")
def test_the_edit_of_a_plan_takes_its_message_away(sweep, tmp_path, windowed, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # what is said of bfloat16 would depend on the CPU
    done = set()
    for name, changes in PLANS:
        if name in SEE and not find_spec("torchvision"):
            continue
        file, changed = content(name)
        for key, value in changes.items():
            changed = put(changed, key, str(windowed) if value == WINDOWED else value)
        told = 0
        first = complaints(changed, file.parent, tmp_path / "r.yaml")
        for said, message in first.items():
            for together in edits(message):
                told += 1
                done |= {*said_by(message, ())}
                mended = changed
                for where, edit, remove in together:
                    mended = put(mended, where, edit, remove=remove)
                left = complaints(mended, file.parent, tmp_path / "r.yaml")
                new = [one for one in left if one not in first and one.startswith(f"{together[0][0]}:")]
                case = f"{name} {changes}: {message!r}, and with {together} {new or message!r}"
                sweep.check(said not in left and not new, case)
        sweep.check(bool(told), f"{name} {changes}: no message names an edit: {[*first.values()]}")
    sweep.done()
    note(f"{one}\t{PLANNED}\tcarried out\tplan\n" for one in done)
    here = {PLANNED, *([SEEING] if find_spec("torchvision") else [])}
    assert {name for name, where in CARRIED.items() if where in here} <= done
