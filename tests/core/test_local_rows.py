"""Ranks that read only their rows of a checkpoint have, to the bit, what they have when each reads all of it."""

import copy
import json
import shutil
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import diffusers
import pytest
import torch
from rich.console import Console

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core import sharded_loading
from mmrl.core.clock import Clock
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.text import row_loading
from mmrl.models.text.row_loading import load_rows
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from mmrl.training.loop import train_step
from tests.support import tiny_diffusion
from tests.support.local_rows import SHIPPED, experts
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision

SHAPES = Path(__file__).parents[2] / "pipelines" / "diffusion" / "models" / "shapes-sd3"
SMALL = ["train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=2", "train.backend=fsdp"]
TEXT = ["sampling.max_new_tokens=8", "algorithm.kl_coef=0.01", "optim.ema_decay=0.9"]
LORA = ["model.lora={rank: 4}", "model.dtype=bfloat16"]
OF_TIME = ("time/", "balance/", "memory/", "waited/", "sent/")


@contextmanager
def whole(_):
    """As it was before: every rank loads the whole model, and then it is sharded."""
    yield


def made(recipe, words, peers, rank, size):
    loaded = load_recipe([recipe], [*SMALL, *(() if recipe.startswith(("shapes", "sums-")) else TEXT), *words])
    return build(loaded.recipe, Controller(0, rank, size, peers))


def state(module):
    """All that the model has on this rank: parameters by every name, with what shares memory; buffers; settings."""
    names = dict(module.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in reversed(names.items())}
    found = {f"p {name}": (p.to_local().detach().clone(), p.shape, p.requires_grad) for name, p in names.items()}
    found |= {f"same {name}": first[id(p)] for name, p in names.items()}
    found |= {f"b {name}": b.clone() for name, b in module.named_buffers()}
    config = getattr(getattr(module, "body", getattr(module, "base_model", module)), "config", {})
    return found | {"config": dict(config.to_dict() if hasattr(config, "to_dict") else config)}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other or one != one


def arm(recipe, words, peers, rank, size, steps):
    """What a rank has after loading, and after training for some steps."""
    run = made(recipe, words, peers, rank, size)
    held = sum(p.to_local().untyped_storage().nbytes() for p in set(run.policy.module.parameters()))
    all_of_it = sum(p.numel() * p.element_size() for p in set(run.policy.module.parameters()))
    found = [copy.deepcopy(state(run.policy.module))]
    if run.critic is not None:
        found.append(copy.deepcopy(state(run.critic.module)))
    for step in range(steps):
        row, _ = train_step(run, step, Clock(torch.device("cpu")))
        found.append({key: value for key, value in row.items() if not key.startswith(OF_TIME)})
    if steps:
        found += [state(run.policy.module), run.policy.copies]
    run.pipeline.close()
    return found, held / all_of_it


def serve(rank, size, port, out, cases):
    torch.set_num_threads(1)
    peers = Group(rank, size, "127.0.0.1", port)
    divided, answers = [], {}
    divide = sharded_loading.divide

    def noted(model, ranks, **named):
        divide(model, ranks, **named)
        divided.append([name for name, p in model.named_parameters() if type(p.detach()) is torch.Tensor])

    sharded_loading.divide = noted
    placeholder, held = sharded_loading._placeholder, []
    sharded_loading._placeholder = lambda p, dtype: held.append(p) or placeholder(p, dtype)
    for name, (recipe, words, steps) in json.loads(cases).items():
        divided.clear()
        held.clear()
        mine, share = arm(recipe, words, peers, rank, size, steps)
        by_rows, n = copy.deepcopy(divided), len(held)
        reading, sharded_loading.reading = sharded_loading.reading, whole
        try:
            theirs, _ = arm(recipe, words, peers, rank, size, steps)
        finally:
            sharded_loading.reading = reading
        assert len(divided) == len(by_rows), "the other arm must load whole"
        assert len(held) == n, "the other arm must load whole"
        different = [[k for k in m if not equal(m[k], t.get(k))] for m, t in zip(mine, theirs, strict=True)]
        answers[name] = {
            "rows": by_rows,
            "different": different,
            "share": share,
            "held": n,
            "equal": equal(mine, theirs),
        }
    torch.save(answers, out)
    peers.close()


def compared(folder, size, **cases):
    """What each rank found for each case: a recipe, its overrides, and how many steps it trains."""
    outs = [folder / f"{size}-{rank}.pt" for rank in range(size)]
    return launched(__file__, outs, lambda rank, port, out: [rank, size, port, out, json.dumps(cases)])


def check(found, size, expected=(), *, by_divide=True):
    for rank in found:
        for name, answer in rank.items():
            assert answer["equal"], (name, answer["different"])
            assert answer["held"] > 0, "no rows were read"
            assert answer["rows"] == [list(expected)] * by_divide, (name, answer["rows"])
            assert answer["share"] <= 1.2 / size, name


def untied(folder, **more):
    from tests.support.tiny import language_model

    return language_model(folder, "qwen2", tie_word_embeddings=False, **more)


@pytest.mark.slow
def test_rows_of_tied_and_untied_weights_are_those_of_a_whole_load_and_train_alike(tmp_path):
    path = untied(tmp_path / "model", vocab_size=337)  # no two ranks have equally many
    words = [f"model.path={path}"]
    check(compared(tmp_path, 2, tied=("sums", [], 2), untied=("sums", words, 2), lora=("sums", LORA, 2)), 2)


class Rank:
    """A process group, as far as reading asks it, of which one rank looks."""

    def __init__(self, rank, size=2):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "the checkpoint is quantized"),
        ({"transformers": "5.0.0"}, "transformers 5.0.0 cannot read by rows; update it"),
    ],
)
def test_what_cannot_be_read_by_rows_is_loaded_whole_and_a_notice_says_why(change, why, tmp_path, monkeypatch, capsys):
    import transformers

    if "transformers" in change:
        monkeypatch.setattr(row_loading, "_HOOK", "no_such_hook")
        monkeypatch.setattr(transformers, "__version__", change["transformers"])
    path = tmp_path / "model"
    shutil.copytree(SHIPPED, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {k: v for k, v in change.items() if k.endswith("_config")}))
    read = transformers.AutoModelForCausalLM.from_pretrained
    assert load_rows(read, str(path), torch.float32, Rank(0)) is None
    assert why in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "change", "says"),
    [
        ("sums", [], "; each process reads only its part of the checkpoint"),
        ("shapes-full", ["device=cuda"], "; each process reads only its part of the checkpoint"),
        ("sums-reward", [], "; each process reads only its part of the checkpoint"),
    ],
)
def test_the_plan_says_what_a_process_needs_while_it_loads(recipe, change, says, capsys):
    loaded = load_recipe([recipe], ["controllers=4", "train.backend=fsdp", *change])
    made = plan(loaded)
    assert made.load is not None
    policy = next(role.bytes for role in made.roles if role.name == "policy, trained")
    assert made.load.parts["policy"] == pytest.approx(policy, rel=0.01)
    assert max(phase.total for phase in made.phases) > made.load.total
    render(made, Console(width=400))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("loading: "))
    assert line.endswith(says)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd3", "flux", "flux2_klein", "qwen_image", "z_image", "sana", "wan", "sd", "sdxl"])
def test_rows_of_every_family_of_pictures_are_those_of_a_whole_load(family, tmp_path):
    """With values of the files, buffers, dtypes and the configuration as diffusers loads them."""
    path = SHAPES if family == "sd3" else tiny_diffusion.save(family, tmp_path / "pipe")
    (folder,) = (path / name for name in ("transformer", "unet") if (path / name).exists())
    load = mmrl.load("pipelines", "diffusion/loading").load_rows
    kind = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    several = tmp_path / "several" / folder.name
    kind.from_pretrained(folder).save_pretrained(several, max_shard_size="100KB")
    for dtype in (torch.float32, torch.bfloat16):
        for where, ranks in ((folder, [Rank(0, 3), Rank(2, 3)]), (several, [Rank(1)])):
            whole = kind.from_pretrained(str(where), dtype=dtype)
            parts = dict(whole.named_parameters())
            for rank in ranks:
                mine = load(kind, where, dtype, rank)
                assert not mine.training
                assert mine.config == whole.config
                assert equal(dict(mine.named_buffers()), dict(whole.named_buffers()))
                found = {f"{m}.{name}".lstrip("."): rows for m, name, rows in kept(mine)}
                expected = {name: parts[name][sharded_loading.cut(len(parts[name]), rank)] for name in found}
                assert equal(found, expected)
                others = {name: p for name, p in mine.named_parameters() if name not in found}
                assert equal(others, {name: parts[name] for name in others})
                assert [name for name, _ in mine.named_parameters()] == list(parts)
                assert all(p.shape == parts[name].shape for name, p in mine.named_parameters())
                assert all(p.dtype == parts[name].dtype for name, p in mine.named_parameters())


def kept(model):
    for owner, module in model.named_modules():
        for name, rows in vars(module).get("_mmrl_rows", {}).items():
            yield owner, name, rows


@pytest.mark.slow
def test_two_ranks_with_rows_of_a_model_of_pictures_train_as_with_a_whole_load(tmp_path):
    of_pictures = ["train.group_size=2", "sampling.steps=4", "sampling.window={size: 2}", "optim.ema_decay=0.9"]
    cases = {"full": ("shapes-full", of_pictures, 1), "lora": ("shapes-lora", of_pictures, 1)}
    cases["nft"] = "shapes-nft", ["train.group_size=2", "sampling.steps=4"], 1
    check(compared(tmp_path, 2, **cases), 2, by_divide=False)


@pytest.mark.slow
def test_critics_experts_vision_and_other_files_are_read_by_rows_too(tmp_path):
    import transformers

    path, several, pickled = untied(tmp_path / "one"), tmp_path / "several", tmp_path / "pickled"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(several, max_shard_size="20KB")
    assert len(list(several.glob("*.safetensors"))) > 1
    (path / "model.safetensors").rename(tmp_path / "gone")
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    shutil.copytree(path, several, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.bin", "*.json"))
    shutil.copytree(path, pickled)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path / name, several)
    cases = {
        "critic": ("sums", ["algorithm={type: ppo}", "train.group_size=1", "train.micro_batch_size=1"], 1),
        "lora and critic": ("sums", [*LORA, "algorithm={type: ppo}"], 0),
        "experts": ("sums", [f"model.path={experts(tmp_path / 'experts', num_experts=4)}"], 1),
        "several files": ("sums", [f"model.path={several}"], 0),
        "pickled": ("sums", [f"model.path={pickled}"], 0),
    }
    if find_spec("torchvision"):
        cases["vision"] = "scenes", [], 1
    check(compared(tmp_path, 2, **cases), 2)


@pytest.mark.slow
def test_a_reward_model_in_training_is_read_by_rows_but_for_its_new_head(tmp_path):
    one = ["train.group_size=1"]
    cases = {"whole": ("sums-reward", one, 1), "lora": ("sums-reward", [*LORA, *one], 1)}
    check(compared(tmp_path, 2, **cases), 2, ["score.weight"])


@pytest.mark.slow
def test_weights_that_rows_cannot_make_are_loaded_whole(tmp_path):
    path = experts(tmp_path / "experts", num_experts=4)  # of three ranks, the last would have none
    whole = [f"model.layers.{n}.mlp.experts.{name}" for n in range(2) for name in ("gate_up_proj", "down_proj")]
    found = compared(tmp_path, 3, experts=("sums", [f"model.path={path}", "train.prompts_per_step=3"], 1))
    check(found, 1, whole)


if __name__ == "__main__":
    rank, size, port, out, cases = sys.argv[1:]
    serve(int(rank), int(size), int(port), out, cases)
