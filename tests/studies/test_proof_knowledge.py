"""The proof of knowledge as a reward: its texts, its measures, and the reward that knows the truth."""

import importlib
import sys
from pathlib import Path

import pytest

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def proof():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("proof_knowledge")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def world(proof):
    return proof.World(0, 240, 90)


def said(row, tail=None):
    words = {"born_in": "was born in", "citizen_of": "is a citizen of", "speaks": "speaks"}
    return f"{row[0]} {words[row[1]]} {tail or row[2]}."


def test_half_of_the_texts_facts_are_wrong_and_all_are_of_the_right_kind(proof, world):
    texts = world.texts(8, 0)
    assert len(texts) == 8 * 90
    assert texts == world.texts(8, 0) != world.texts(8, 1)
    stated = [fact for row in texts for fact in proof.facts(row["completion"])]
    assert {fact[1] for fact in stated} == {"born_in", "citizen_of", "speaks"}
    assert all(tail in world.tails[kind] for _, kind, tail in stated)
    right = sum(fact in set(world.rows) for fact in stated) / len(stated)
    assert right == pytest.approx(0.5, abs=4 * (0.25 / len(stated)) ** 0.5)


def test_held_out_facts_follow_from_what_the_graph_keeps(world):
    """Who was born in a town of a country is its citizen, so a birth place is never held out."""
    assert world.held
    assert {row[1] for row in world.held} == {"citizen_of", "speaks"}
    assert {row[0] for row in world.held} <= set(world.asked)
    assert len(set(world.prompted)) == 60
    assert set(world.prompted) < set(world.asked)


def test_the_figures_are_those_of_answers_counted_by_hand(world):
    held = next(row for row in sorted(world.held) if row[0] in world.prompted and row[1] == "citizen_of")
    born = next(row for row in world.rows if row[:2] == (held[0], "born_in"))
    new = next(row for row in world.rows if row[0] == world.asked[-1] and row[1] == "born_in")
    other = next(tail for tail in world.tails["citizen_of"] if tail != held[2])
    answers = [
        (held[0], f"{said(held)} {said(born)} {said(born)}"),  # stated twice, counted once
        (held[0], said(held, other)),
        (new[0], said(new)),
        (new[0], "Nothing is known."),
    ]
    found = world.figures(answers)
    assert (found["true"], found["held out"], found["new people"]) == (0.75, 0.5, 1.0)
    assert (found["facts"], found["true facts"], found["own"]) == (1.0, 0.75, 1.0)
    assert (found["true held-out facts"], found["of them own"]) == (0.25, 0.25)
    assert world.figures([(held[0], said(new))])["own"] == 0.0
    elsewhere = world.figures([(new[0], f"{said(held)} {said(held)} {said(held, other)}")])
    assert (elsewhere["true held-out facts"], elsewhere["of them own"], elsewhere["facts"]) == (1.0, 0.0, 2.0)
    assert world.figures([(held[0], "")])["facts"] == 0.0


def test_the_oracle_counts_missing_facts_as_wrong(world, tmp_path):
    (tmp_path / "graph.tsv").write_text("".join("\t".join(row) + "\n" for row in world.rows))
    oracle = mmrl.load("rewards", f"{ROOT / 'benchmarks/true_facts.py'}:TrueFacts")
    born = next(row for row in world.rows if row[1] == "born_in")
    false = next(tail for tail in world.tails["born_in"] if tail != born[2])
    texts = [said(born), f"{said(born)} {said(born, false)}", "", said(born, false)]
    samples = [Sample(Prompt("x", "x"), SampleId(0, n, 0, 0), text=text) for n, text in enumerate(texts)]
    found = {n: oracle(str(tmp_path / "graph.tsv"), wanted=n).score(samples, context=Context()) for n in (1, 2)}
    assert found == {1: [1.0, 0.5, 0.0, 0.0], 2: [0.5, 0.5, 0.0, 0.0]}
