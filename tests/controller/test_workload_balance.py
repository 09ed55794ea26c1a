"""Predicted workload, assignment and packing: against brute force, and in real steps."""

import copy
import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from mmrl.app.build import build
from mmrl.checkpoint import run_state, writer
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group
from mmrl.controller.workload_balance import (
    PRIOR,
    TERMS,
    Lengths,
    Size,
    Workload,
    divide,
    fit,
    greedy,
    karmarkar_karp,
    loads,
    pack,
    packing_cost,
    padded,
    residual,
    unevenness,
)
from mmrl.core import checkpoint_reader as reader
from mmrl.core.clock import Clock
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records
from mmrl.step.micro_batches import packed
from mmrl.training.loop import train_step
from tests.support import tiny
from tests.support.ranks import launched

COSTS = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=8)
BINS = st.integers(1, 4)


# -- assignment --------------------------------------------------------------------------------------------------------


def best_division(costs, bins, equal_size=False):
    """The least largest load of any division, by trying all of them."""
    least = float("inf")
    for chosen in itertools.product(range(bins), repeat=len(costs)):
        found = [[i for i, b in enumerate(chosen) if b == n] for n in range(bins)]
        sizes = [len(items) for items in found]
        if not equal_size or max(sizes) - min(sizes) <= 1:
            least = min(least, max(loads(costs, found)))
    return least


@pytest.mark.slow
@drawn(costs=st.lists(st.floats(0, 100), min_size=1, max_size=7), bins=BINS)
@settings(deadline=None, max_examples=60)
def test_divisions_are_near_the_best(costs, bins):
    bound = 4 / 3 - 1 / (3 * bins)
    best = best_division(costs, bins)
    assert max(loads(costs, greedy(costs, bins))) <= bound * best + 1e-9
    assert max(loads(costs, karmarkar_karp(costs, bins))) <= bound * best + 1e-9
    even = best_division(costs, bins, equal_size=True)
    assert even - 1e-9 <= max(loads(costs, divide(costs, bins))) <= 4 / 3 * even + 1e-9


@drawn(costs=st.lists(st.floats(0, 100), max_size=40), bins=st.integers(1, 9))
def test_every_item_is_in_one_bin_and_sizes_are_even(costs, bins):
    for way in (divide, *(lambda c, b, w=w: w(c, b, equal_size=True) for w in (greedy, karmarkar_karp))):
        found = way(costs, bins)
        assert sorted(i for items in found for i in items) == list(range(len(costs)))
        assert len(found) == bins
        assert {len(items) for items in found} <= {len(costs) // bins, -(-len(costs) // bins)}
        assert all(items == sorted(items) for items in found)
        assert way(costs, bins) == found
    for way in (greedy, karmarkar_karp):
        assert sorted(i for items in way(costs, bins) for i in items) == list(range(len(costs)))


def test_differencing_is_mostly_no_worse_than_greedy_and_equal_costs_are_dealt_out_in_turn():
    rng = random.Random(0)
    worse = better = 0
    for _ in range(300):
        costs = [rng.lognormvariate(0, 1) for _ in range(24)]
        one, other = (max(loads(costs, way(costs, 4))) for way in (karmarkar_karp, greedy))
        worse, better = worse + (one > other + 1e-12), better + (one < other - 1e-12)
    assert better > 5 * worse
    assert divide([3.0] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert sorted(loads([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2))) == [14, 16]  # 8-7, 6-5, 4-1, 3-1


# -- packing -----------------------------------------------------------------------------------------------------------


def contiguous(n):
    for cuts in itertools.product([False, True], repeat=n - 1):
        ends = [*(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield list(zip([0, *ends[:-1]], ends, strict=True))


@drawn(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=9),
    most=st.integers(1, 5),
    tokens=st.none() | st.integers(60, 400),
    launch=st.sampled_from([0.0, 10.0, 100.0]),
)
@settings(deadline=None)
def test_packing_costs_the_least_of_all_contiguous_divisions(sizes, most, tokens, launch):
    found = pack(sizes, most, tokens, quadratic=0.01, launch=launch)
    order = sorted(range(len(sizes)), key=lambda i: sum(sizes[i]))
    assert [i for index in found for i in index] == order
    least = float("inf")
    for division in contiguous(len(sizes)):
        tried = [order[a:b] for a, b in division]
        allowed = all(len(i) <= most for i in tried) and all(
            tokens is None or len(i) == 1 or padded([sizes[n] for n in i]) <= tokens for i in tried
        )
        if allowed:
            least = min(least, packing_cost(sizes, tried, 0.01, launch))
    assert packing_cost(sizes, found, 0.01, launch) == pytest.approx(least)
    for index in found:
        assert len(index) <= most
        assert tokens is None or len(index) == 1 or padded([sizes[n] for n in index]) <= tokens


def in_a_row(lengths, most, tokens):
    """Sorted by length and filled up one micro-batch after another."""
    batch = []
    for n in sorted(range(len(lengths)), key=lambda n: lengths[n]):
        if batch and (len(batch) == most or (tokens is not None and lengths[n] * (len(batch) + 1) > tokens)):
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


@drawn(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    most=st.integers(1, 20),
    tokens=st.none() | st.integers(3000, 9000),
)
@settings(deadline=None)
def test_packing_is_never_worse_than_filling_up(lengths, most, tokens):
    sizes = [(n,) for n in lengths]
    filled = packing_cost(sizes, in_a_row(lengths, most, tokens))
    assert packing_cost(sizes, pack(sizes, most, tokens)) <= filled * (1 + 1e-12)


@drawn(n=st.integers(1, 40), length=st.integers(1, 90), most=st.integers(1, 9), tokens=st.none() | st.integers(50, 400))
def test_rows_of_one_size_are_cut_in_their_order(n, length, most, tokens):
    assert pack([(length,)] * n, most, tokens) == list(in_a_row([length] * n, most, tokens))
    rows = random.Random(n).sample(range(n), n)
    assert [i for index in packed(rows, [(length,)] * n, most, tokens) for i in index] == rows


def test_long_rows_do_not_pad_the_short_ones():
    lengths = [100] * 60 + [3000] * 4
    sizes = [(n,) for n in lengths]
    assert pack(sizes, 64) == [list(range(60)), list(range(60, 64))]
    assert packing_cost(sizes, pack(sizes, 64)) < 0.15 * packing_cost(sizes, in_a_row(lengths, 64, None))


# -- prediction --------------------------------------------------------------------------------------------------------


def sizes_of(rng, n):
    return [
        Size(rng.uniform(10, 400), rng.choice([0, 256]), rng.choice([0, 900]), rng.expovariate(0.01)) for _ in range(n)
    ]


def summed(sizes):
    return [sum(column) for column in zip(*(size.terms for size in sizes), strict=True)]


def test_coefficients_are_found_again():
    rng = random.Random(1)
    truth = [2e-8, 1e-5, 3e-5, 5e-6, 4e-4, 0.0, 1e-3]
    workload = Workload()
    for _ in range(40):
        terms = summed(sizes_of(rng, rng.randint(3, 12)))
        workload.learn([(terms, workload_cost(truth, terms) * rng.uniform(0.98, 1.02))])
    workload.adopt(workload.fitted())
    assert workload.calibrated
    fresh = [summed(sizes_of(rng, 8)) for _ in range(50)]
    predicted = [workload.cost(terms) for terms in fresh]
    assert residual(predicted, [workload_cost(truth, terms) for terms in fresh]) < 0.03
    assert all(c >= 0 for c in workload.coefficients)


def workload_cost(coefficients, terms):
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))


def test_one_measurement_scales_the_prior_and_what_was_never_seen_keeps_it():
    terms = summed([Size(text=100, response=50), Size(text=20, response=10)])
    found = fit([terms], [3.0])
    scale = 3.0 / workload_cost(PRIOR, terms)
    assert found == pytest.approx([scale * p for p in PRIOR])
    assert found[TERMS.index("steps")] > 0


@drawn(st.lists(st.lists(st.floats(0, 1e4), min_size=7, max_size=7), min_size=1, max_size=20), st.randoms())
@settings(deadline=None)
def test_no_coefficient_is_below_zero_or_no_number(terms, rng):
    found = fit(terms, [rng.uniform(1e-3, 10) for _ in terms])
    assert all(np.isfinite(c) and c >= 0 for c in found)


def test_a_prompt_has_an_average_of_its_own_and_others_lie_on_a_line():
    lengths = Lengths(most=500)
    assert lengths.expect("new", 30) == 500
    for n in range(1, 30):
        lengths.learn(str(n), n, 10 + 3 * n)
    assert lengths.expect("new", 40) == pytest.approx(130, rel=1e-3)
    assert lengths.expect("new", 4000) == 500
    assert lengths.expect("7", 7) == 31
    lengths.learn("7", 7, 61)
    assert lengths.expect("7", 7) == 46
    same = Lengths(most=500)
    same.learn("a", 5, 9)
    same.learn("b", 5, 11)
    assert same.expect("new", 5) == pytest.approx(10, abs=0.01)


def test_what_was_learned_survives_json_to_the_last_bit_and_is_bounded():
    rng = random.Random(3)
    lengths, workload = Lengths(most=100, kept=20), Workload(window=5)
    for _ in range(50):
        lengths.learn(str(rng.randint(0, 40)), rng.random() * 50, rng.random() * 90)
        workload.learn([(summed(sizes_of(rng, 3)), rng.random())])
    assert len(lengths.state()["average"]) == 20
    assert len(workload.state()["measured"]) == 5
    again, same = Lengths(most=100, kept=20), Workload(window=5)
    again.load_state(json.loads(json.dumps(lengths.state())))
    same.load_state(json.loads(json.dumps(workload.state())))
    for one, other in ((lengths, again), (workload, same)):
        assert one.state() == other.state()
    lengths.learn("x", 5, 9)
    again.learn("x", 5, 9)
    assert list(lengths.state()["average"].items()) == list(again.state()["average"].items())


def test_unevenness_is_the_largest_over_the_mean():
    assert unevenness([1, 1, 4]) == 2
    assert unevenness([0.0, 0.0]) == 1


# -- in real steps -----------------------------------------------------------------------------------------------------

REWARD = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [sum(c in "aeiou" for c in s.text) / max(1, len(s.text)) for s in samples]
"""
RECIPE = """
name: mixed
pipeline: llm/chat
model: {path: model}
data: {name: jsonl, train: {path: data.jsonl, heldout: 8}, heldout: {path: data.jsonl, heldout: 8}}
sampling: {max_new_tokens: 10}
rewards: [{name: reward.py}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 4, prompts_per_step: 8, group_size: 2, micro_batch_size: 2}
optim: {lr: 1.0e-3}
eval: {every: 2, samples: 8, temperature: 0.0}
checkpoint: {every: 1}
"""
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe whose prompts are long and short."""
    folder = tmp_path_factory.mktemp("mixed")
    allow_cpu_only()
    tiny.language_model(folder / "model", sharp=0.3, max_position_embeddings=512)
    (folder / "reward.py").write_text(REWARD)
    rng = random.Random(0)
    lengths = [rng.choice([4, 6, 8, 400]) for _ in range(40)]
    rows = [{"id": str(i), "prompt": f"{i} " + "a" * n} for i, n in enumerate(lengths)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def make(folder, controller=None, *overrides):
    loaded = load_recipe([folder / "recipe.yaml"], list(overrides))
    return build(loaded.recipe, controller)


def steps(run, n=STEPS):
    """What ``n`` steps began with, their metrics, and what was learned of workloads after each."""
    out = []
    for step in range(n):
        given = []
        ask = run.controller.slots

        def slots(*args, ask=ask, given=given):
            given += ask(*args)
            return given

        object.__setattr__(run.controller, "slots", slots)
        row, _ = train_step(run, step, Clock(torch.device("cpu")))
        object.__delattr__(run.controller, "slots")
        known = run.rollout.parts["balance"].state_dict().numbers
        out.append({"slots": {s.index: s.prompt.id for s in given}, "row": row, "known": json.loads(json.dumps(known))})
    return out


def serve(folder, rank, size, port, out, by, lag):
    """A controller in this process: the script's work. It takes ``lag`` seconds longer over each step's prompts."""
    torch.set_num_threads(1)
    peers = Group(rank, size, "127.0.0.1", port)
    run = make(Path(folder), Controller(0, rank, size, peers), f"train.balance={by}")
    encode = run.pipeline.encode
    run.pipeline.encode = lambda slots: (time.sleep(lag), encode(slots))[1]
    found = steps(run)
    found[-1]["weights"] = {name: p.detach().clone() for name, p in run.policy.module.named_parameters()}
    torch.save(found, out)
    peers.close()


def together(folder, size, into, by="predicted", lags=(0.0, 0.0)):
    """What ``size`` controllers did, each in a process of its own."""
    into.mkdir(exist_ok=True)
    outs = [into / f"{rank}.pt" for rank in range(size)]
    return launched(__file__, outs, lambda rank, port, out: [folder, rank, size, port, out, by, lags[rank]])


@pytest.mark.slow
def test_two_controllers_share_long_and_short_prompts_evenly(folder, tmp_path):
    run = make(folder)
    texts = {prompt.id: prompt.text for prompt in run.prompts}
    alone, (one, other) = steps(run), together(folder, 2, tmp_path)
    dealt = []
    for whole, first, second in zip(alone, one, other, strict=True):
        parts = [{int(k): v for k, v in part["slots"].items()} for part in (first, second)]
        assert parts[0] | parts[1] == whole["slots"]
        assert [len(part) for part in parts] == [4, 4]
        assert list(parts[0]) == sorted(parts[0])
        assert first["known"] == second["known"]
        assert first["row"]["balance/load_predicted"] == second["row"]["balance/load_predicted"]
        assert first["row"]["balance/load"] >= 1
        assert 0 <= first["row"]["balance/padding"] < 1
        long = [sum(len(texts[i]) > 100 for i in part.values()) for part in parts]
        assert abs(long[0] - long[1]) <= 1
        in_turn = [sum(len(texts[whole["slots"][i]]) > 100 for i in range(rank, 8, 2)) for rank in (0, 1)]
        dealt.append(abs(in_turn[0] - in_turn[1]))
    assert max(dealt) > 1, "dealt out in turn they would have been as even"
    assert "balance/residual" not in one[0]["row"]  # nothing was measured before
    assert one[2]["row"]["balance/residual"] > 0
    assert len(one[2]["known"]["workload"]["measured"]) == 2 * STEPS
    # Of the first step all samples are equal to the bit, and so is what is learned of them, whoever drew them.
    assert one[0]["known"]["lengths"] == alone[0]["known"]["lengths"]
    assert not any(key.startswith(("balance/load", "balance/residual")) for key in alone[0]["row"])


@pytest.mark.slow
def test_two_equal_runs_on_two_controllers_are_equal_to_the_bit(folder, tmp_path):
    """However long each controller takes. Costs that follow the seconds give the prompts out differently."""

    def run(name, lags, by="predicted"):
        return together(folder, 2, tmp_path / name, by, lags)

    first, second = run("first", (0.0, 0.0)), run("second", (0.0, 0.7))
    for one, other in zip(first, second, strict=True):
        assert [part["slots"] for part in one] == [part["slots"] for part in other]
        assert [numbers(part["row"]) for part in one] == [numbers(part["row"]) for part in other]
        weights = other[-1]["weights"]
        assert all(torch.equal(value, weights[name]) for name, value in one[-1]["weights"].items())
    assert first[0][-1]["row"]["balance/load"] != second[0][-1]["row"]["balance/load"]
    slow = [run(f"slow{rank}", [0.7 * (rank == 0), 0.7 * (rank == 1)], "measured")[0] for rank in (0, 1)]
    costs = [part["known"]["workload"]["coefficients"] for part in slow[0]]
    assert costs != [part["known"]["workload"]["coefficients"] for part in slow[1]]


def numbers(row):
    """All of a row but what clocks say."""
    clocked = ("time/", "perf/", "plan/", "placement/", "balance/load", "balance/residual")
    return {key: value for key, value in row.items() if not key.startswith(clocked) or key.endswith("_predicted")}


def test_costs_follow_seconds_only_where_the_recipe_says_so(folder):
    prompt = Prompt("p", "Say a." * 20)
    for by, follows in (("predicted", False), ("measured", True)):
        balance = make(folder, None, f"train.balance={by}").rollout.parts["balance"]
        before = balance.cost(prompt)
        balance.workload.learn([([4.0, 2.0, 0.0, 0.0, 1.0, 0.0, 1.0], 50.0)])
        balance.workload.adopt(balance.workload.fitted())
        assert (balance.cost(prompt) != before) is follows
        assert balance.seconds(prompt) != before


class Threads:
    """Controllers in the threads of one process; the numbers they gather are shown to be JSON."""

    def __init__(self, size):
        self.sent, self.waited = Counter(), 0.0
        self.barrier, self.values = threading.Barrier(size, timeout=60), [None] * size

    def of(self, rank):
        peers = copy.copy(self)
        peers.gather = lambda values: self.gather(rank, values)
        return peers

    def gather(self, rank, values):
        self.values[rank] = json.loads(json.dumps(values))
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def given(size, prompts, per_step, cost):
    """The slots of step 3 that each of ``size`` controllers is given."""
    peers = Threads(size)
    controllers = [Controller(7, rank, size, peers.of(rank)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda c: c.slots(3, prompts, per_step, cost), controllers))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_prompts_are_given_out_unread_and_media_unopened(size):
    read = Counter()

    def get(i):
        read[i] += 1
        return Prompt(str(i), "x" * (i % 50), media=(Media("image", path="/nowhere.png"),))

    prompts = Records(1000, get)
    whole = Controller(7).slots(3, prompts, 8)
    step = set(read)
    read.clear()
    parts = given(size, prompts, 8, lambda prompt: len(prompt.text))
    assert sorted((s for part in parts for s in part), key=lambda s: s.index) == whole
    assert all(parts)
    assert set(read) <= step
    assert max(read.values()) <= 2, "each is read where it is weighed and where it goes"
    if size > 1:
        work = [sum(len(s.prompt.text) for s in part) for part in parts]
        assert max(work) == max(
            loads([len(s.prompt.text) for s in whole], divide([len(s.prompt.text) for s in whole], size))
        )


def test_pictures_and_clips_count_by_their_pixels_without_being_decoded(folder):
    balance = make(folder).rollout.parts["balance"]
    plain = Prompt("p", "Say a.")
    seen = [
        Media("image", path="/nowhere.png", pixels=28 * 28 * 100),
        Media("image", data=b"\xff" * 1000),
        Media("image", path="/nowhere.png"),
        Media("video", path="/nowhere.mp4", pixels=28 * 28 * 100),
    ]
    costs = [balance.cost(replace(plain, media=(medium,))) for medium in seen]
    assert all(cost > balance.cost(plain) for cost in costs)
    assert costs[0] > costs[3] > costs[1]
    assert Media("image", path="x", pixels=3) == Media("image", path="x")


def test_a_resumed_run_gives_prompts_to_the_controllers_that_would_have_had_them(folder, tmp_path):
    run = make(folder)
    steps(run)
    run.rollout.parts["balance"].workload.adopt(
        run.rollout.parts["balance"].workload.fitted()
    )  # as several controllers do
    before = [run.rollout.parts["balance"].seconds(p) for p in run.prompts]
    writer.save(tmp_path, run_state.of_run(run, STEPS, cpu_seconds=0.0), keep=1)
    again = make(folder)
    unlearned = given(3, again.prompts, 8, again.rollout.parts["balance"].cost)
    run_state.restore(again, reader.load(tmp_path, STEPS))
    assert again.rollout.parts["balance"].state_dict().numbers == json.loads(
        json.dumps(run.rollout.parts["balance"].state_dict().numbers)
    )
    assert [again.rollout.parts["balance"].cost(p) for p in again.prompts] == [
        run.rollout.parts["balance"].cost(p) for p in run.prompts
    ]
    assert [again.rollout.parts["balance"].seconds(p) for p in again.prompts] == before
    assert given(3, again.prompts, 8, again.rollout.parts["balance"].cost) == given(
        3, run.prompts, 8, run.rollout.parts["balance"].cost
    )
    assert sorted(s.index for part in unlearned for s in part) == list(range(8))


if __name__ == "__main__":
    folder, rank, size, port, out, by, lag = sys.argv[1:]
    serve(folder, int(rank), int(size), int(port), out, by, float(lag))
