"""Every combination of Megatron-Core's cuts trains as one process does, or is refused."""

import faulthandler
import re
import sys
from itertools import product
from math import lcm
from pathlib import Path

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.config.megatron_layouts import TESTED, combination, untested
from mmrl.config.placement_checks import of_placement
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.megatron.mapping import refusals
from mmrl.models.text.critic import Critic
from tests.support import megatron as megatron
from tests.support import megatron_critic as critic
from tests.support import megatron_experts as experts
from tests.support.planning import LEFT_OUT, planned_in_short

allow_cpu_only()  # before transformers imports torchvision

WORDS = {
    "TP": ["train.tensor_parallel=2"],
    "SP": ["train.tensor_parallel=2", "train.sequence_parallel=true"],
    "PP": ["train.pipeline_parallel=2"],
    "VPP": ["train.pipeline_parallel=2", "train.pipeline_chunks=2"],
    "CP": ["train.context_parallel=2"],
    "EP": ["train.expert_parallel=2"],
    "DO": ["train.distributed_optimizer=true"],
}
LONG = {
    "dense": """TP+PP TP+VPP SP+VPP TP+CP TP+DO SP+DO VPP+DO CP+DO
        TP+PP+CP SP+PP+CP TP+PP+DO SP+PP+DO TP+VPP+DO SP+VPP+DO TP+CP+DO SP+CP+DO PP+CP+DO
        SP+PP+CP+DO""",
    "mixture": """VPP CP DO
        SP+CP SP+DO PP+DO VPP+DO CP+DO EP+DO
        SP+PP+EP+DO SP+VPP+EP SP+CP+EP SP+CP+DO SP+EP+DO PP+CP+EP CP+EP+DO""",
    "sees": "TP+DO SP+DO",
    "critic": "DO TP+DO SP+DO",
}
SLOW = {"dense": "PP+CP PP+DO", "mixture": "CP+EP", "sees": "", "critic": ""}
"""Combinations by name; those of ``LONG`` run with ``pytest -m long`` alone."""


def layout(name):
    """The combination ``name`` on as few devices as have something to do."""
    cuts = name.split("+")
    width = 2 ** sum(cut not in ("EP", "DO") for cut in cuts)
    devices = max(width, 2) if "EP" in cuts else width
    controllers = 2 if "DO" in cuts and "CP" not in cuts else 1  # else devices that share rows divide it
    words = [f"devices_per_controller={devices}", f"controllers={controllers}"]
    return ["train.backend=megatron", *words, *(word for cut in cuts for word in WORDS[cut])]


def cases(kind):
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW[kind].split()]
    return slow + [pytest.param(name, marks=pytest.mark.long) for name in LONG[kind].split()]


# -- trained as by one process -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A model with tied embeddings, norms of heads and a vocabulary that no layout divides, and what one process makes
    of it."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("cuts") / "model"
    path = megatron.tiny(folder, "Qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    run = megatron.made(path)
    return path, megatron.updates(run, megatron.rows_of(run, 0, 1))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    pytest.importorskip("megatron.core")
    path = experts.mixture(tmp_path_factory.mktemp("cuts") / "model", **experts.ODD)
    run = megatron.made(path)
    return path, megatron.updates(run, megatron.rows_of(run, 0, 1))


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    pytest.importorskip("megatron.core")
    pytest.importorskip("torchvision")
    from tests.support import megatron_vision as seeing

    path = seeing.tiny_model(tmp_path_factory.mktemp("cuts") / "model")
    run = megatron.made(path, None, *seeing.OPEN, name="scenes")
    return path, megatron.updates(run, megatron.rows_of(run, 0, 1)), seeing


@pytest.fixture(scope="module")
def valued(tmp_path_factory):
    """A model with a critic, and what one process makes of both."""
    pytest.importorskip("megatron.core")
    path = megatron.tiny(tmp_path_factory.mktemp("cuts") / "model", "Qwen2")
    run = critic.opened("sums", path, None)
    return path, critic.updates(run, megatron.rows_of(run, 0, 1))


def ranks_of(name):
    """How many, and how many of them go through each slice together."""
    recipe = load_recipe(["sums"], layout(name)).recipe
    return recipe.controllers * recipe.devices_per_controller, recipe.train.width


@pytest.mark.parametrize("name", cases("dense"))
def test_a_decoder_with_several_cuts_has_the_gradients_and_log_probs_of_the_whole(name, dense, tmp_path):
    path, whole = dense
    ranks, width = ranks_of(name)
    found = megatron.together(tmp_path, ranks, "serve", path, *layout(name), script=megatron.__file__)
    megatron.equal(found, whole, width)


@pytest.mark.parametrize("name", cases("mixture"))
def test_a_mixture_with_several_cuts_has_the_gradients_and_log_probs_of_the_whole(name, mixture, tmp_path):
    path, whole = mixture
    ranks, width = ranks_of(name)
    found = megatron.together(tmp_path, ranks, "serve", path, *layout(name), script=megatron.__file__)
    megatron.equal(found, whole, width)


@pytest.mark.parametrize("name", cases("sees"))
def test_a_model_that_sees_with_several_cuts_has_the_gradients_and_log_probs_of_the_whole(name, sees, tmp_path):
    path, whole, seeing = sees
    ranks, width = ranks_of(name)
    words = [*seeing.OPEN, *layout(name)]
    found = megatron.together(tmp_path, ranks, "serve", path, *words, script=seeing.__file__)
    megatron.equal(found, whole, width)


def serve(out, rank, size, port, path, *overrides):
    """One rank of a layout of a policy and its critic: the script's work."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # as in test_megatron
    faulthandler.dump_traceback_later(280, exit=True)
    devices = load_recipe(["sums"], overrides).recipe.devices_per_controller
    peers = Group(rank, size, "127.0.0.1", port, devices=devices)
    run = critic.opened("sums", path, Controller(0, rank // devices, size // devices, peers), *overrides)
    width = run.policy.weights.width
    torch.save(critic.updates(run, megatron.rows_of(run, rank // width, size // width)), out)
    peers.close()


@pytest.mark.parametrize("name", cases("critic"))
def test_a_critic_with_several_cuts_has_the_values_and_gradients_of_the_whole(name, valued, tmp_path):
    path, whole = valued
    ranks, width = ranks_of(name)
    found = megatron.together(tmp_path, ranks, "serve", path, *layout(name), script=__file__)
    assert {key for rank in found for key in rank} == whole.keys()
    for n, rank in enumerate(found):
        for kind in ("policy/gradient/", "critic/gradient/", "weights/"):
            names = [key for key in rank if key.startswith(kind)]  # who steps on it has its gradient
            one, all_ = (torch.cat([of[key].flatten() for key in names]) for of in (rank, whole))
            assert (one - all_).norm() <= 1e-5 * all_.norm(), kind
        for key in ("values", "log_probs", "after/values", "after/log_probs"):
            of = whole[key][n // width :: ranks // width, : rank[key].shape[1]]
            torch.testing.assert_close(rank[key], of, rtol=0, atol=1e-4)


# -- or refused --------------------------------------------------------------------------------------------------------


def decoder(family, **more):
    """On the meta device."""
    import transformers

    sizes = {**megatron.SIZES, "num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 32, **more}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config)


def models(kind):
    """What a run has whose recipe differs by the words that come with it."""
    match kind:
        case "dense":
            return [decoder("Qwen3")], []
        case "mixture":
            return [decoder("Qwen3Moe", **experts.SIZES, norm_topk_prob=True)], []
        case "critic":
            return [decoder("Qwen3"), Critic(decoder("Qwen3"))], ["algorithm={type: ppo}"]
        case _:
            pytest.importorskip("torchvision")
            from tests.support import megatron_vision as seeing

            loaded = load_recipe(["scenes"], megatron.TP)
            return [seeing.pipeline(loaded, loaded.recipe.model.path).policy], []


def layouts(kind):
    """The layouts of the tests that compare such a model with one process."""
    function = {"dense": megatron.test_parts_of_layers_have_the_gradients_and_log_probs_of_the_whole}
    function["mixture"] = experts.test_divided_experts_have_the_gradients_and_log_probs_of_the_whole
    function["critic"] = critic.test_a_shared_body_has_the_values_and_gradients_of_the_whole
    if kind == "sees":
        pytest.importorskip("torchvision")
        from tests.support import megatron_vision as seeing

        of = seeing.test_a_shared_language_part_and_a_tower_on_each_rank_have_the_gradients_of_the_whole
        function["sees"] = of
    (mark,) = (mark for mark in function[kind].pytestmark if mark.name == "parametrize")
    names, values = mark.args
    yield from (getattr(case, "values", case)[names.index("layout")] for case in values)
    yield from (layout(name) for name in f"{SLOW[kind]} {LONG[kind]}".split())


def every():
    """What ``train`` may ask for, each cut in two, and experts in two or four."""
    keys = ("tensor_parallel", "sequence_parallel", "pipeline_parallel", "pipeline_chunks", "context_parallel")
    keys += ("expert_parallel", "distributed_optimizer")
    forms = [(1, False), (2, False), (2, True)], [(1, 1), (2, 1), (2, 2)], [1, 2], [1, 2, 4], [False, True]
    for layers, stages, rows, of_experts, optimizer in product(*forms):
        yield dict(zip(keys, (*layers, *stages, rows, of_experts, optimizer), strict=True))


@pytest.mark.parametrize("kind", TESTED)
def test_a_combination_of_cuts_is_allowed_where_a_test_compares_it_and_refused_everywhere_else(kind):
    policies, words = models(kind)
    recipe = load_recipe(["sums"], words).recipe
    found = {}
    for asked in every():
        train = recipe.train.model_copy(update={"backend": "megatron", **asked})
        devices = lcm(train.width, train.expert_parallel)
        placed = {"train": train, "controllers": 2, "devices_per_controller": devices}
        problems = [*of_placement(recipe.model_copy(update=placed)), *(p for m in policies for p in refusals(m, train))]
        assert all("; set " in p or "; remove " in p for p in problems)
        found.setdefault(combination(train), []).append(problems)
    del found[frozenset()]
    assert len(found) == 3 * 3 * 2 * 2 * 2 - 1
    allowed = {cuts for cuts, of_sizes in found.items() if not all(of_sizes)}
    assert allowed == set(TESTED[kind])
    base = recipe.train.model_dump()
    compared = set()
    for words in layouts(kind):
        of_train = dict(word.removeprefix("train.").split("=", 1) for word in words if word.startswith("train."))
        compared.add(combination(type(recipe.train).model_validate(base | of_train)))
    assert compared == allowed


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        (
            "dense",
            "TP+PP+CP+DO",
            "train.tensor_parallel: no test compares the training of a dense language model with "
            "train.tensor_parallel, train.pipeline_parallel, train.context_parallel and train.distributed_optimizer "
            "with that of one process; set train.sequence_parallel to true, or set train.backend to fsdp",
        ),
        (
            "mixture",
            "SP+VPP+EP+DO",
            "train.tensor_parallel: no test compares the training of a mixture of experts with train.tensor_parallel, "
            "train.sequence_parallel, train.pipeline_parallel, train.pipeline_chunks, train.expert_parallel and "
            "train.distributed_optimizer with that of one process; remove train.pipeline_chunks, or set train.backend "
            "to fsdp",
        ),
        (
            "critic",
            "EP",
            "train.expert_parallel: no test compares the training of a critic with train.expert_parallel with that of "
            "one process; remove train.expert_parallel, or set train.backend to fsdp",
        ),
    ],
)
def test_a_refusal_names_the_edits_that_lead_to_what_is_tested(kind, name, problem):
    base = load_recipe(["sums"]).recipe.train.model_dump()
    words = dict(word.removeprefix("train.").split("=", 1) for cut in name.split("+") for word in WORDS[cut])
    assert list(untested(kind, load_recipe(["sums"]).recipe.train.model_validate(base | words))) == [problem]


def test_the_documentation_lists_what_is_allowed():
    text = (Path(__file__).parents[2] / "docs" / "megatron.md").read_text()
    rows = re.findall(r"^\| (?:one|two|three|four) \|(.+)\|$", text, re.M)
    for column, (kind, allowed) in enumerate(TESTED.items()):
        cells = [row.split("|")[column].strip() for row in rows]
        names = [name for cell in cells if cell != "none" for name in cell.split(", ")]
        assert sorted(map(sorted, (name.split("+") for name in names))) == sorted(map(sorted, allowed)), kind


def test_a_plan_refuses_what_no_test_compares_and_takes_what_one_does():
    assert planned_in_short("sums", *layout("PP+CP")).problems == [LEFT_OUT]
    (problem, _) = planned_in_short("sums", *layout("TP+PP+CP+DO")).problems
    assert problem.startswith("train.tensor_parallel: no test compares the training of a dense language model with")


if __name__ == "__main__":
    what, out, rank, size, port, *rest = sys.argv[1:]
    {"serve": serve}[what](Path(out), int(rank), int(size), int(port), *rest)
