"""Predicted workload, assignment and packing: against brute force, and in real steps."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.balance import (
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
from mmrl.batch import packed

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


@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=7), bins=BINS)
@settings(deadline=None, max_examples=60)
def test_divisions_are_near_the_best(costs, bins):
    bound = 4 / 3 - 1 / (3 * bins)
    best = best_division(costs, bins)
    assert max(loads(costs, greedy(costs, bins))) <= bound * best + 1e-9
    assert max(loads(costs, karmarkar_karp(costs, bins))) <= bound * best + 1e-9
    even = best_division(costs, bins, equal_size=True)
    assert even - 1e-9 <= max(loads(costs, divide(costs, bins))) <= 4 / 3 * even + 1e-9


@given(costs=st.lists(st.floats(0, 100), max_size=40), bins=st.integers(1, 9))
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


@given(
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


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    most=st.integers(1, 20),
    tokens=st.none() | st.integers(3000, 9000),
)
@settings(deadline=None)
def test_packing_is_never_worse_than_filling_up(lengths, most, tokens):
    sizes = [(n,) for n in lengths]
    filled = packing_cost(sizes, in_a_row(lengths, most, tokens))
    assert packing_cost(sizes, pack(sizes, most, tokens)) <= filled * (1 + 1e-12)


@given(n=st.integers(1, 40), length=st.integers(1, 90), most=st.integers(1, 9), tokens=st.none() | st.integers(50, 400))
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


@given(st.lists(st.lists(st.floats(0, 1e4), min_size=7, max_size=7), min_size=1, max_size=20), st.randoms())
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
