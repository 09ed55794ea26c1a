"""Shared by the tests of megatron and others."""

import faulthandler
import functools
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import SampleId, Slot
from mmrl.models.text.likelihood import Vocabulary, entropy, token_log_probs
from tests.support.ranks import launched

allow_cpu_only()  # before transformers imports torchvision
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "pipelines/llm/models/sums-qwen3"
TP = ["train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=2"]
PP = ["train.backend=megatron", "train.pipeline_parallel=2", "devices_per_controller=2"]
TURNS = [*PP, "train.pipeline_chunks=2"]
BOTH = [*PP, "train.tensor_parallel=2", "train.sequence_parallel=true", "devices_per_controller=4"]
CP = ["train.backend=megatron", "train.context_parallel=2", "devices_per_controller=2"]
LONG = [*CP, "train.tensor_parallel=2", "train.sequence_parallel=true", "devices_per_controller=4"]
ZERO = ["train.backend=megatron", "controllers=2", "train.distributed_optimizer=true"]
FOUR = [*TP, "controllers=2", "train.sequence_parallel=true", "model.gradient_checkpointing=true"]
WIDE = ["train.backend=megatron", "train.tensor_parallel=4", "devices_per_controller=4"]
SMALL = [
    "model.dtype=float32",
    "algorithm.kl_coef=0.01",
    "optim.schedule=constant",
    "sampling.max_new_tokens=16",
    "optim.lr=3e-5",
]
UPDATES = 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 8}


def tiny(folder, family, **more):
    """A random decoder of another family, with the shipped tokenizer; its vocabulary is divided by no layout."""
    import transformers

    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("model*", "config.json"))
    sizes = {**SIZES, "vocab_size": 335, "max_position_embeddings": 256, "num_key_value_heads": 4}
    config = getattr(transformers, f"{family}Config")(
        **{**sizes, "tie_word_embeddings": False, "eos_token_id": 331, **more}
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for p in model.parameters():  # biases and norms too, so that none is right by being 0 or 1
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.05)
    model.save_pretrained(folder)
    return folder


def made(path, controller=None, *overrides, name="sums"):
    loaded = load_recipe([name], [*SMALL, f"model.path={path}", *overrides])
    return build(loaded.recipe, controller)


def rows_of(run, first, every):
    """Some of eight prompts, each with a response that the model draws, whoever draws it."""
    slots = [Slot(0, n, 0, run.prompts[n]) for n in range(first, 8, every)]
    ids = [SampleId(0, slot.index, 0, 0) for slot in slots]
    run.pipeline.encode(slots)
    with run.policy.unsharded("current"):
        return run.pipeline.sample(slots, ids, [], 5)


def updates(run, rows):
    """Log-probs, entropy and gradient of the first update, and log-probs and weights after four, by Hugging Face's
    names."""
    policy = frozenset({"log_probs", "entropy"})
    found = {f"start/{k}": of_all(run, k, p.detach()) for k, p in run.policy.trainable.items()}
    found |= replayed(run, rows, policy) | replayed(run, rows, frozenset({"reference_log_probs"}))
    run.policy.optimizer.register_step_pre_hook(lambda *_: keep(run, found))

    def loss_of(rows):
        weigh = torch.linspace(-1, 1.5, 8)[[s.index for s in rows.slots]].unsqueeze(1)
        new = run.pipeline.replay(rows, [0], policy, run.policy.using)
        return ((weigh * new["log_probs"] + 0.01 * new["entropy"]) * rows.padded("action_mask")).sum() / 100

    halves = [rows.rows(list(range(n, len(rows), 2))) for n in range(2)]
    for _ in range(UPDATES):
        run.policy.accumulate(halves, loss_of)
        run.policy.apply()
    if after := replayed(run, rows, frozenset({"log_probs"})):
        found["after"] = after["log_probs"]
    close = 1e-4 if run.recipe.model.dtype == "float32" else 0.15
    with torch.no_grad(), run.policy.unsharded("current"):  # what is sampled with and exported
        inside = run.pipeline.replay(rows, [0], frozenset(), run.policy.using)["log_probs"] * rows.padded("action_mask")
        torch.testing.assert_close(inside, found.get("after", inside), rtol=0, atol=close)
    return found | {f"weights/{k}": of_all(run, k, p.detach()) for k, p in run.policy.trainable.items()}


def replayed(run, rows, needs):
    """Without a graph, what is known of tokens; nothing on a stage that is not the last."""

    def made(rows):
        return run.pipeline.replay(rows, [0], needs, run.policy.using)

    with torch.no_grad():  # twice, as slices go through several stages of a rank by two
        found = run.policy.each([rows, rows], made)
    return {name: found[0][name] * rows.padded("action_mask") for name in needs} if found else {}


def keep(run, found):
    for name in run.policy.weights.stepped:
        found.setdefault(f"gradient/{name}", of_all(run, name, run.policy.trainable[name].grad))


def of_all(run, name, part):
    """The whole tensor that every rank has a part of."""
    return run.policy.weights.whole(name, part).clone()


def serve(out, rank, size, port, path, *overrides, name="sums"):
    """One rank of a layout: the script's work."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody wrote is nan, so that its use shows
    faulthandler.dump_traceback_later(280, exit=True)  # a rank that waits for another says where
    recipe = load_recipe([name], [*SMALL, *overrides]).recipe
    devices = recipe.devices_per_controller
    peers = Group(rank, size, "127.0.0.1", port, devices=devices)
    run = made(path, Controller(0, rank // devices, size // devices, peers), *overrides, name=name)
    if recipe.train.backend == "megatron":  # a module of FSDP2 has its weights in shards again once it is written
        with run.policy.for_evaluation():  # all together
            if rank == 0:
                run.pipeline.write(out.with_suffix(""), "merged")
    share = size // run.policy.weights.width
    torch.save(updates(run, rows_of(run, rank // run.policy.weights.width, share)), out)
    peers.close()


def unknown(out, rank, size, port, path, *overrides):
    """One rank of a model that computes what no key of its config.json says: why its layout is refused, or nothing."""
    import transformers

    plain = transformers.LlamaForCausalLM.forward

    @functools.wraps(plain)
    def forward(self, *given, **named):
        made = plain(self, *given, **named)
        made.logits = made.logits - 0.5 * made.logits.mean(1, keepdim=True)  # of all tokens of the row
        return made

    transformers.LlamaForCausalLM.forward = forward
    peers = Group(rank, size, "127.0.0.1", port, devices=size)
    try:
        made(path, Controller(0, 0, 1, peers), *overrides)
        said = ""
    except UserError as error:
        said = str(error)
    torch.save(said, out)
    peers.close()


def words(out, rank, size, port):
    """One rank of the vocabulary alone: log-probs and entropy of its part, and their gradients."""
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    logits, tokens = given()
    each = -(-logits.shape[-1] // size)
    part = logits[..., rank * each : (rank + 1) * each].clone().requires_grad_()
    vocabulary = Vocabulary(rank * each, dist.group.WORLD)
    both = torch.stack([token_log_probs(part, tokens, 0.7, vocabulary), entropy(part, 0.7, vocabulary)])
    (both * given()[0][0, 0, 0].sign() * torch.arange(1, 13).view(2, 2, 3)).sum().backward()
    torch.save({"both": both.detach(), "gradient": part.grad}, out)
    dist.destroy_process_group()


def given():
    made = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=made) * 4
    logits[0, 1, 3] = -torch.inf  # a token that must not be drawn
    return logits, torch.tensor([[0, 10, 5], [3, 4, 9]])


def together(folder, size, what, *rest, script=__file__):
    """What ``size`` ranks came to, each in a process of its own."""
    outs = [folder / f"{rank}-of-{size}.pt" for rank in range(size)]
    return launched(script, outs, lambda rank, port, out: [what, out, rank, size, port, *rest])


def equal(found, whole, width):
    """What ranks found, ``width`` to a share of the rows, is what one process found of all."""
    shares = len(found) // width
    for rank in found:
        names = [name.removeprefix("start/") for name in rank if name.startswith("start/")]
        assert all(torch.equal(rank[f"start/{name}"], whole[f"start/{name}"]) for name in names)
        for kind, tolerance in (("gradient/", 1e-5), ("weights/", 1e-5)):
            of_kind = [f"{kind}{name}" for name in names if f"{kind}{name}" in rank]  # who steps on it has its gradient
            one, all_ = (torch.cat([of[name].flatten() for name in of_kind]) for of in (rank, whole))
            assert (one - all_).norm() <= tolerance * all_.norm(), kind
    assert {name for rank in found for name in rank} == whole.keys()
    for name, value in whole.items():
        for n, rank in enumerate(found if "/" not in name else ()):
            if name not in rank:  # of stages the last knows
                assert n % width < width - 1
                continue
            of = value[n // width :: shares, : rank[name].shape[1]]  # without the columns that its rows do not fill
            torch.testing.assert_close(rank[name], of, rtol=0, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        (None, TP),
        (None, PP),  # an embedding that is tied over the ends
        ("Qwen2", ZERO),
        (None, TURNS),
        (None, CP),
        ("Qwen3", LONG),
        ("Qwen2", BOTH),
        ("Qwen2", WIDE),  # biases, four parts, a vocabulary that they do not divide
        ("Llama", FOUR),  # neither biases nor norms of heads; two models of two
        ("Qwen3", FOUR),
    ],
)
def test_parts_of_layers_have_the_gradients_and_log_probs_of_the_whole(family, layout, tmp_path):
    pytest.importorskip("megatron.core")
    path = SHIPPED if family is None else tiny(tmp_path / "model", family)
    run = made(path)
    whole = updates(run, rows_of(run, 0, 1))
    train = load_recipe(["sums"], layout).recipe.train
    width, shares = train.width, (2 if "controllers=2" in layout else 1)
    found = together(tmp_path, width * shares, "serve", path, *layout)
    equal(found, whole, width)


if __name__ == "__main__":
    what, out, rank, size, port, *rest = sys.argv[1:]
    {"serve": serve, "words": words, "unknown": unknown}[what](Path(out), int(rank), int(size), int(port), *rest)
