"""Models of rewards that sleep: what is freed, what is copied and when, and what the placement counts as the price."""

import time
from concurrent.futures import wait
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mmrl.config.placement import Placement
from mmrl.config.schema import Reward
from mmrl.core import offload as freezing
from mmrl.core.errors import UserError
from mmrl.core.offload import Frozen, Offloaded
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.placement.multi_device import MultiDevice
from mmrl.rewards.judging.answers import parse_kind
from mmrl.rewards.judging.asking import Ask
from mmrl.rewards.judging.asking import Settings as Asking
from mmrl.rewards.judging.local import LocalModel
from mmrl.rewards.loading import build, can_sleep, find
from mmrl.rewards.scoring import RewardSet
from tests.support import asleep, tiny

REPO = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    """Weights that are tied in both ways, turned round, cut out of a larger storage and of half precision."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight
        self.view = nn.Parameter(self.words.weight.data[2:4])
        self.turned = nn.Parameter(torch.randn(5, 3).T)
        self.query, self.key = (nn.Parameter(part) for part in torch.randn(6, 5).chunk(2))
        self.short = nn.Parameter(torch.randn(33).bfloat16())
        self.none = nn.Parameter(torch.empty(0))
        self.register_buffer("frequencies", torch.randn(9), persistent=False)
        self.register_buffer("step", torch.tensor(3))
        self.requires_grad_(False)

    def forward(self, x):
        return self.head(self.words(x)) * self.frequencies.sum() + self.turned.sum() + self.query.sum() * self.key.sum()


def note_copies(monkeypatch, events):
    """Note in ``events`` every copy between tensors, and every time the device is waited for."""

    def noting(name):
        call = getattr(torch.Tensor, name)

        def noted(tensor, *given, **named):
            made = call(tensor, *given, **named)
            if name == "copy_" or made is not tensor:
                events.append("copy")
            return made

        return noted

    for name in ("copy_", "to", "cpu", "cuda", "clone"):
        monkeypatch.setattr(torch.Tensor, name, noting(name))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(f"wait for {device}"))


@pytest.mark.parametrize("slab", [4, 512, 256 << 20])
def test_a_module_comes_back_to_the_bit_and_what_was_tied_is_tied(monkeypatch, slab):
    asleep.apart(monkeypatch)
    monkeypatch.setattr(freezing, "SLAB", slab)
    monkeypatch.setattr(freezing, "REST", min(slab, freezing.REST))
    model, x = Model(), torch.arange(7)
    before, said, frozen = asleep.state(model), model(x), Frozen(model)
    there = asleep.where(model)
    for _ in range(2):
        frozen.sleep("cpu")
        frozen.sleep("cpu")
        host = asleep.where(model)
        assert host == {piece.host.untyped_storage().data_ptr() for piece in frozen._slabs}
        assert not host & there
        asleep.assert_same(model, before)  # a state dict is right while it sleeps
        frozen.wake("cpu")
        there = asleep.where(model)
        assert not host & there
        asleep.assert_same(model, before)
        assert torch.equal(model(x), said)
    assert model.head.weight is model.words.weight
    words, view, query, key = (t.data_ptr() for t in (model.words.weight, model.view, model.query, model.key))
    assert (view - words, key - query) == (2 * 5 * 4, 3 * 5 * 4)


def test_the_weights_wait_in_one_copy_and_only_waking_copies_and_waits_for_it(monkeypatch):
    asleep.apart(monkeypatch)
    events, model = [], Model()
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    frozen = Frozen(model)
    frozen.sleep("cpu")
    host = [slab.host for slab in frozen._slabs]
    places = [slab.data_ptr() for slab in host]
    assert size <= frozen.host_bytes == sum(slab.nbytes for slab in host) <= size + 256 * len(storages)
    note_copies(monkeypatch, events)
    frozen.wake("cpu")
    woken = list(events)
    frozen.wake("cpu")
    frozen.sleep("cpu")
    assert events == woken == ["copy"] * len(host) + ["wait for cpu"]  # nothing is copied back
    assert [slab.host.data_ptr() for slab in frozen._slabs] == places


def test_page_locked_memory_is_taken_in_pieces_that_round_up_little():
    """torch rounds page-locked memory up to a power of two. Sizes as of T5-XXL in half precision, 9.5 GB."""
    block = 4 * [4096 * 4096] + 3 * [4096 * 10240] + 2 * [4096]
    sizes = [32128 * 4096, 64 * 32, *(24 * block)]
    storages = [[torch.empty(size, dtype=torch.bfloat16, device="meta")] for size in sizes]
    slabs = freezing._packed(storages)
    placed = [storage for slab in slabs for storage in slab]
    assert sorted(map(id, placed)) == sorted(map(id, storages))
    taken = [sum(map(freezing._aligned, slab)) for slab in slabs]
    assert sum(1 << (n - 1).bit_length() for n in taken) < 1.05 * 2 * sum(sizes)


def test_of_several_modules_only_those_in_use_are_on_the_device_and_nobody_waits(monkeypatch):
    waited, models = asleep.apart(monkeypatch), [Model(seed) for seed in range(3)]
    before = [asleep.state(model) for model in models]
    offloaded = Offloaded(models[:2], torch.device("cpu"))
    host = [asleep.where(model) for model in models]
    with offloaded.using(models[1], models[2]):  # the last is none of them
        there = [asleep.where(model) for model in models]
        assert [a == b for a, b in zip(host, there, strict=True)] == [True, False, True]
        offloaded.rest()
        with offloaded.using(models[0]):  # another thread
            assert asleep.where(models[0]) != host[0]
            assert asleep.where(models[1]) == there[1]  # no second copy
    with offloaded.using(models[1]):
        assert [asleep.where(model) for model in models[:2]] == [host[0], there[1]]
    assert asleep.where(models[1]) == there[1]  # until something else is used
    offloaded.rest()
    assert [asleep.where(model) for model in models] == host
    for model, values in zip(models, before, strict=True):
        asleep.assert_same(model, values)
    assert offloaded.host_bytes == sum(frozen.host_bytes for frozen in offloaded._frozen.values()) > 0
    assert not waited


def test_nothing_is_kept_of_what_never_sleeps_and_coming_for_good_is_no_price(monkeypatch):
    waited, model = asleep.apart(monkeypatch), Model()
    frozen = Frozen(model)
    assert frozen.wake("cpu") is True
    assert frozen.wake("cpu") is False
    assert len(waited) == 1
    assert frozen._slabs == []
    frozen.sleep("cpu")
    assert frozen.wake("cpu") is False  # the next one takes as long


def test_on_a_cpu_waking_reads_from_disk_and_without_a_way_to_read_nothing_is_freed():
    model, x, reads = Model(), torch.arange(7), []
    before, said = asleep.state(model), model(x)
    frozen = Frozen(model, lambda: reads.append(1) or Model())
    for n in (1, 2):
        frozen.sleep("cpu")
        frozen.sleep("cpu")
        assert {p.nbytes for p in model.parameters()} == {0}
        assert len(reads) == n - 1
        assert frozen.wake("cpu") is False
        assert len(reads) == n
        asleep.assert_same(model, before)
        assert torch.equal(model(x), said)
    kept = Frozen(model)
    kept.sleep("cpu")
    kept.wake("cpu")
    asleep.assert_same(model, before)


def test_what_was_dropped_is_never_taken_for_the_weights(monkeypatch):
    model = Model()
    before, frozen = asleep.state(model), Frozen(model, Model)
    frozen.sleep("cpu")
    asleep.apart(monkeypatch)
    frozen.sleep("cpu")  # of another device than before
    frozen.wake("cpu")
    asleep.assert_same(model, before)


def test_a_module_whose_weights_cannot_be_read_again_stays_asleep_and_may_try_again():
    model, answers = Model(), [OSError("gone"), Model()]
    before = asleep.state(model)

    def read():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    frozen = Frozen(model, read)
    frozen.sleep("cpu")
    with pytest.raises(OSError, match="gone"):
        frozen.wake("cpu")
    frozen.wake("cpu")
    asleep.assert_same(model, before)


class Packed(nn.Parameter):
    """As weights of a quantised model: a class of its own."""


def test_weights_of_a_class_of_their_own_move_as_their_module_says(monkeypatch):
    asleep.apart(monkeypatch)
    model, moved = Model(), []
    model.packed = Packed(torch.randn(4), requires_grad=False)
    before, to = asleep.state(model), model.to
    monkeypatch.setattr(model, "to", lambda device: moved.append(str(device)) or to(device))
    frozen = Frozen(model, Model)
    frozen.sleep("cpu")
    assert moved == ["cpu"]
    assert frozen.wake("cpu") is False
    asleep.assert_same(model, before)
    assert frozen._slabs == []


def test_a_buffer_that_a_model_registers_while_it_computes_survives(monkeypatch):
    asleep.apart(monkeypatch)
    model = Model()
    frozen = Frozen(model)
    frozen.sleep("cpu")
    frozen.wake("cpu")
    model.register_buffer("frequencies", torch.full((9,), 2.0), persistent=False)  # as dynamic rotary embeddings do
    frozen.sleep("cpu")
    frozen.wake("cpu")
    assert model.frequencies.tolist() == [2.0] * 9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_memory_is_free_and_the_copy_pinned():
    device, model = torch.device("cuda"), nn.Linear(4096, 4096).requires_grad_(False)
    weight = model.weight.clone()
    frozen = Frozen(model)
    frozen.sleep(device)
    before = torch.cuda.memory_allocated()
    frozen.wake(device)
    assert torch.cuda.memory_allocated() - before >= 4096 * 4096 * 4
    assert torch.equal(model.weight.cpu(), weight)
    frozen.sleep(device)
    assert torch.cuda.memory_allocated() == before
    assert all(slab.host.is_pinned() for slab in frozen._slabs)


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_every_reward_of_ours_with_a_model_on_a_device_can_sleep():
    found = {}
    for file in sorted((REPO / "rewards").glob("*.py")):
        module = import_module(f"mmrl.rewards.{file.stem}")
        for name, target in vars(module).items():
            declared = vars(target).get("__mmrl_reward__") if isinstance(target, type) else None
            here = declared is not None and (target.__module__, target.__name__) == (module.__name__, name)
            if here and (declared.device or name == "Judge"):  # whose options say whether it does
                found[f"{file.stem}:{name}"] = target
    assert found.keys() == asleep.TESTED
    assert [name for name, target in found.items() if not can_sleep(target)] == []


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A language model with rotary buffers and tied weights."""
    return tiny.language_model(tmp_path_factory.mktemp("words") / "model", tie_word_embeddings=True)


def texts(*given):
    return [Sample(Prompt(str(i), "Say"), SampleId(0, i, 0, 0), text=text) for i, text in enumerate(given)]


def test_a_judge_of_ours_sleeps_whole_and_judges_the_same(words, monkeypatch):
    options = {"model": str(words), "rubric": "{{ response }}", "answer": {"type": "number", "min": 0, "max": 9}}
    judge = build(find("judge"), {**options, "cache": False, "max_tokens": 4, "reasks": 0}).sleeper
    asks = judge._open(texts("one", "two"), Context()).open.values()
    asleep.scores_the_same(
        judge, lambda: [o.raw for o in judge.local.ask(list(asks), judge.kind, judge.settings, "cpu")], monkeypatch
    )


def test_a_judge_is_read_again_when_it_wakes_and_not_when_it_is_asked(words, monkeypatch):
    from mmrl.rewards.judging import local

    reads, load = [], local._load_model
    model = LocalModel(str(words))
    monkeypatch.setattr(local, "_load_model", lambda *given: reads.append(1) or load(*given))
    model.sleep("cpu")
    model.wake("cpu")
    assert len(reads) == 1
    kind = parse_kind("pointwise", {"type": "yes_no"})
    (answer,) = model.ask([Ask(["Say"], None, 7)], kind, Asking(0.0, 4, 0), "cpu")
    assert answer.raw or answer.reason
    assert len(reads) == 1


def test_a_reward_model_sleeps_whole_and_scores_the_same(words, tmp_path, monkeypatch):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoModelForSequenceClassification.from_pretrained(words, num_labels=1).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(words).save_pretrained(tmp_path)
    reward = build(find("reward_model"), {"path": str(tmp_path)}).sleeper
    scored = texts("one", "two and three")
    asleep.scores_the_same(reward, lambda: reward.score(scored, context=Context()), monkeypatch)
    assert len(set(reward.score(scored, context=Context()))) == 2


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(tiny.clip(tmp_path_factory.mktemp("clip")))


def pictures(n):
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)) for _ in range(n)]


def shown(n):
    return [Sample(Prompt("p", "a red cat"), SampleId(0, 0, 0, i), image) for i, image in enumerate(pictures(n))]


def test_the_reward_behind_frames_sleeps(clip, monkeypatch):
    reward = build(find("frames"), {"name": "clip", "count": 2, "options": {"path": clip}}).sleeper
    clips = [Sample(Prompt("p", "a cat"), SampleId(0, 0, 0, 0), video=tuple(pictures(3)))]
    asleep.scores_the_same(reward, lambda: reward.score(clips, context=Context()), monkeypatch)
    plain = build(find("frames"), {"name": "colour:brightness"})
    plain.sleep("cpu")  # it has nothing that sleeps
    assert plain.wake("cpu") is False


OWN = """
import mmrl

@mmrl.reward(device=True)
class Own:
    def score(self, samples, *, context):
        return [0.0 for s in samples]

    def sleep(self{0}):
        pass

    def wake(self{0}):
        {1}
"""


def test_a_reward_of_ones_own_is_told_its_device_and_what_is_wrong_with_it_is_said(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN.format("", "pass"))
    with pytest.raises(UserError) as said:
        RewardSet([Reward(name=f"{file}:Own")])
    assert "sleep of Own must take the device alone; write def sleep(self, device)" in str(said.value)
    assert "wake of Own must take the device alone; write def wake(self, device)" in str(said.value)

    file = tmp_path / "noted.py"
    file.write_text(OWN.format(", device", "Own.told = device"))
    RewardSet([Reward(name=f"{file}:Own")], torch.device("meta"))
    assert find(str(file) + ":Own").target.told == torch.device("meta")

    file = tmp_path / "broken.py"
    file.write_text(OWN.format(", device", "raise ValueError('no room')"))
    with pytest.raises(
        UserError, match=r"the wake\(\) of the reward .*Own raised ValueError: no room at .*broken.py:13"
    ):
        RewardSet([Reward(name=f"{file}:Own")])


# -- the price of a move ----------------------------------------------------------------------------------------------

PRICE_S = 0.15


def backward(run):
    """A task by the name of one that trains."""


@pytest.mark.parametrize("sleep", [True, False])
def test_the_price_of_a_move_has_the_waking_of_scorers_in_it_and_judging_has_not(clip, monkeypatch, sleep):
    """A device goes on copying after the call that began it: here for ``PRICE_S``, until it is waited for."""
    monkeypatch.setattr(freezing, "apart", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: time.sleep(PRICE_S))
    rewards = RewardSet([Reward(name="clip", options={"path": clip})], awake=False)
    if sleep:
        rewards.sleep()
    several = MultiDevice([], Placement(type="colocate", sleep=sleep))
    recipe = SimpleNamespace(threads=None, rollout=SimpleNamespace(in_process=True), environment=None)
    compute = SimpleNamespace(device=torch.device("cpu"))
    run = SimpleNamespace(rewards=rewards, recipe=recipe, compute=compute)
    run.pipeline = SimpleNamespace(sleep=lambda: None)
    several.open(run)
    done = []
    try:
        for _ in range(2):
            done += [rewards.score(shown(2), [[0, 1]]).total.tolist()]
            (slept,) = several._put([0], backward, ())  # training: the judge sleeps
            wait([slept], 20)
    finally:
        several.close()
        rewards.close()
    assert done[0] == done[1]
    scheduler = several._board.scheduler
    events = scheduler.events
    judged = [e.ended - e.began for e in events if e.role == "judge"]
    woken = [(e.ended - e.began, e.priced) for e in events if e.role == "wake" and e.ended - e.began > PRICE_S]
    assert len(judged) == 2
    if sleep:
        assert scheduler.price("judge") > PRICE_S
        assert [priced for _, priced in woken] == [True, True]
    else:
        assert scheduler.price("judge") == 0.0
        assert [priced for _, priced in woken] == [False]  # it came for good
