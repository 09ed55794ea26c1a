"""Knowledge as a reward: formulas against closed forms, what training finds, the folder, and the reward."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Failed
from mmrl.rewards.knowledge import Knowledge
from mmrl.rewards.learned.knowledge import folder, formulas
from mmrl.rewards.learned.knowledge.embeddings import KINDS, Embedding
from mmrl.rewards.learned.knowledge.folder import Trained
from mmrl.rewards.learned.knowledge.graph import Graph, kept_back, of_rows, read
from mmrl.studies.knowledge import __main__ as command
from mmrl.studies.knowledge.towns import towns
from mmrl.studies.knowledge.training import Settings, ranks, train, write


def gram_schmidt(columns):
    """The textbook's algorithm, in float64."""
    found = []
    for column in columns.double().T:
        for other in found:
            column = column - (other @ column) * other
        found.append(column / column.norm())
    return torch.stack(found, 1)


def test_matrices_are_orthogonal_and_those_of_gram_schmidt():
    matrices = torch.randn(5, 3, 4, 4)
    made = formulas.orthogonal(matrices)
    assert (made @ made.mT - torch.eye(4)).abs().max() < 1e-5
    for matrix, of in zip(matrices.flatten(0, 1), made.flatten(0, 1), strict=True):
        torch.testing.assert_close(of.double(), gram_schmidt(matrix), atol=1e-5, rtol=0)


def test_scales_are_normalised_within_a_group_and_those_of_ote_invert_each_other():
    logs = torch.randn(2, 3, 4)
    there, back = (formulas.scale(logs, to_head=way, normalised=True) for way in (False, True))
    torch.testing.assert_close(there.norm(dim=-1), torch.ones(2, 3))
    torch.testing.assert_close(there, logs.exp() / logs.exp().square().sum(-1, keepdim=True).sqrt())
    assert (there - there.mean()).abs().max() > 0.1, "over an axis of length 1 every scale would be 1"
    assert not torch.allclose(there, back)
    ote = [formulas.scale(logs, to_head=way, normalised=False) for way in (False, True)]
    torch.testing.assert_close(ote[0] * ote[1], torch.ones(2, 3, 4))


def test_without_scales_both_directions_of_ote_are_the_same_distance():
    heads, tails = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4)
    turn, ones = formulas.orthogonal(torch.randn(2, 3, 4, 4)), torch.ones(2, 3, 4)
    there, back = (formulas.ote_distance(heads, turn, ones, tails, to_head=way) for way in (False, True))
    torch.testing.assert_close(there, back)
    by_hand = sum((turn[0, k] @ heads[0, 0, k] - tails[0, 0, k]).norm() for k in range(3))
    torch.testing.assert_close(there[0, 0], by_hand)


def test_transe_and_rotate_have_their_closed_forms():
    heads, tails, shift = torch.randn(1, 1, 4), torch.randn(1, 1, 4), torch.randn(1, 4)
    found = formulas.transe_distance(heads, shift, tails)
    assert float(found) == pytest.approx(float((heads[0, 0] + shift[0] - tails[0, 0]).abs().sum()))
    angle = torch.randn(1, 2)
    whole = [complex(float(v[0, 0, j]), float(v[0, 0, j + 2])) for v in (heads, tails) for j in range(2)]
    turned = [complex(math.cos(a), math.sin(a)) for a in angle[0].tolist()]
    by_hand = sum(abs(whole[j] * turned[j] - whole[2 + j]) for j in range(2))
    assert float(formulas.rotate_distance(heads, angle, tails)) == pytest.approx(by_hand, rel=1e-5)


def test_the_loss_is_that_of_the_paper_and_its_weights_have_no_gradient():
    true, false = torch.tensor([3.0], dtype=torch.float64), torch.tensor([[2.0, 5.0, math.inf]], dtype=torch.float64)
    false.requires_grad_()
    found = formulas.adversarial_loss(true, false, margin=4.0, temperature=0.5)

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    a, b = math.exp(-1.0), math.exp(-2.5)
    p = a / (a + b), b / (a + b)
    second = p[0] * log_sigmoid(2.0 - 4.0) + p[1] * log_sigmoid(5.0 - 4.0)
    assert found.item() == pytest.approx(-(log_sigmoid(4.0 - 3.0) + second) / 2)
    found.backward()
    wanted = [-p[0] / (1 + math.exp(2.0 - 4.0)) / 2, -p[1] / (1 + math.exp(5.0 - 4.0)) / 2, 0.0]
    assert false.grad is not None
    assert false.grad[0].tolist() == pytest.approx(wanted)
    alone = formulas.adversarial_loss(true, torch.full((1, 2), math.inf, dtype=torch.float64), 4.0, 1.0)
    assert float(alone) == pytest.approx(-log_sigmoid(1.0) / 2)


def test_smoothing_mixes_with_the_mean_of_the_neighbours():
    entities = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    triples = torch.tensor([[0, 0, 1], [2, 0, 1]])
    assert formulas.smoothed(entities, triples, 0.5).flatten().tolist() == [2.0, 3.0, 4.0, 7.0]
    assert torch.equal(formulas.smoothed(entities, triples, 1.0), entities)


def test_ranks_count_equal_candidates_half_and_leave_out_what_is_true():
    distances = torch.tensor([[2.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    assert formulas.rank_of(distances, torch.tensor([0, 3])).tolist() == [2.5, 4.0]
    graph = of_rows([("a", "r", "b"), ("a", "r", "c"), ("d", "r", "b")])
    embedding = Embedding("transe", 4, 1, 1, 1, 6.0)
    embedding.entities.data = torch.tensor([[0.0], [2.0], [1.0], [9.0]])
    embedding.relations.data = torch.zeros(1, 1)
    # tails of (a, r, b): c is true and nearer, and does not count; a itself is nearer; b then
    assert ranks(embedding, graph, graph.triples[:1]).tolist() == [2.0, 3.0]


def test_what_is_kept_back_has_all_its_names_in_what_is_trained():
    graph = of_rows(towns(people=40))
    trained, held = kept_back(graph, 0.2, seed=1)
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(len(graph.triples)))
    assert 0.1 * len(graph.triples) < len(held) <= round(0.2 * len(graph.triples))
    assert set(graph.triples[trained][:, [0, 2]].flatten().tolist()) == set(range(len(graph.entities)))
    assert set(graph.triples[trained][:, 1].tolist()) == set(range(len(graph.relations)))


def test_lines_that_are_no_triple_are_skipped_counted_and_named(tmp_path, capsys):
    path = tmp_path / "graph.tsv"
    path.write_text("a\tr\tb\n\na r b\na\tr\t\n b \tr\tc\na\tr\tb\n")
    graph = read(path)
    told = " ".join(capsys.readouterr().err.split())
    assert graph.entities == ("a", "b", "c")
    assert graph.triples.tolist() == [[0, 0, 1], [1, 0, 2]]
    assert "2 lines" in told
    assert "line 3" in told
    path.write_text("nothing\n")
    with pytest.raises(UserError, match=r"graph\.tsv: a graph without edges.*write a triple"):
        read(path)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.tsv")


@pytest.fixture(scope="module")
def known():
    graph, settings = of_rows(towns(people=80)), Settings(steps=400, size=32, batch=128, negatives=16)
    return graph, settings, train(graph, settings)


@pytest.mark.slow
def test_an_embedding_learns_what_is_kept_back(known):
    graph, settings, trained = known
    untrained = train(graph, Settings(**{**vars(settings), "steps": 1}))
    assert trained.figures["mrr"] > untrained.figures["mrr"] + 0.15
    assert trained.figures["auc"] > 0.75
    assert trained.figures["brier"] < 0.22
    again = train(graph, settings)
    assert again.figures == trained.figures
    said = trained.plausibility(graph.triples)
    assert 0 <= float(said.min()) <= float(said.max()) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_a_step_and_is_read_as_it_was_written(kind, tmp_path):
    graph = of_rows(towns(people=30))
    settings = Settings(kind=kind, size=8, steps=2, batch=16, negatives=4)
    trained = train(graph, settings)
    write(tmp_path / "it", trained, settings, graph)
    there = folder.read(tmp_path / "it")
    assert torch.equal(there.trained.plausibility(graph.triples), trained.plausibility(graph.triples))
    assert list(there.entities) == list(graph.entities)
    assert {path.name for path in (tmp_path / "it").iterdir()} == {"knowledge.json", "model.safetensors"}
    (tmp_path / "it" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"holds no trained knowledge.*python -m mmrl\.studies\.knowledge"):
        folder.read(tmp_path / "it")


BORN = r"(?P<head>\w+) was born in (?P<tail>\w+)"


@pytest.fixture
def path(tmp_path):
    """A trained embedding in which only (ann, born_in, rome) is plausible: 0.9, and all else 0.1."""
    embedding = Embedding("transe", 3, 2, 1, 1, 6.0)
    embedding.entities.data = torch.tensor([[0.0], [1.0], [5.0]])
    embedding.relations.data = torch.tensor([[1.0], [-90.0]])
    slope = math.log(9) * 2 / 4  # 0.9 at the distance 0, 0.1 at 4, next to 0 far away
    graph = Graph(("ann", "rome", "oslo"), ("born_in", "lives_in"), torch.tensor([[0, 0, 1]]))
    settings = Settings("transe", size=1, group=1)
    write(tmp_path / "it", Trained(embedding, slope, math.log(9), {}), settings, graph)
    return str(tmp_path / "it")


def scored(reward, *texts, prompt="Tell about somebody."):
    asked = SimpleNamespace(text=prompt)
    return reward.score([SimpleNamespace(text=text, prompt=asked) for text in texts], context=None)


def test_a_response_gets_the_mean_plausibility_of_its_different_facts(path):
    found = scored(
        Knowledge(path, BORN, relation="born_in"),
        "ann was born in rome.",
        "ann was born in oslo!",
        "ann was born in rome, ann was born in rome and ann was born in oslo",
        "nothing to say",
        None,
    )
    assert found["score"] == pytest.approx([0.9, 0.1, 0.5, 0.0, 0.0])
    assert found["facts"] == [1, 1, 2, 0, 0]
    wanted = Knowledge(path, BORN, relation="born_in", wanted=2)
    assert scored(wanted, "ann was born in rome")["score"] == pytest.approx([0.45])


def test_names_that_the_graph_lacks_fail_by_name_and_do_not_count_beside_others(path):
    found = scored(
        Knowledge(path, BORN, "born_in"), "bob was born in paris", "ann was born in rome; bob was born in rome"
    )
    assert found["score"][0] == Failed("the graph does not know bob, paris; add triples of it, or set on_failure: drop")
    assert found["score"][1] == pytest.approx(0.9)
    assert found["unknown"] == [2, 1]


def test_a_response_may_name_the_relation(path):
    pattern = r"(?P<head>\w+) (?P<relation>was born in|lives in) (?P<tail>\w+)"
    reward = Knowledge(path, pattern, relations={"was born in": "born_in", "lives in": "lives_in"})
    found = scored(reward, "ann was born in rome", "ann lives in rome")
    assert found["score"] == pytest.approx([0.9, 0.0], abs=1e-6)


def test_with_asked_only_facts_about_a_name_of_the_prompt_count(path):
    texts = (
        "ann was born in rome",
        "rome was born in rome. ann was born in rome",
        "rome was born in rome",
        "bob was born in x",
    )
    reward = Knowledge(path, BORN, relation="born_in", asked=True)
    found = scored(reward, *texts, prompt="Tell about ann.")
    assert found["score"] == pytest.approx([0.9, 0.9, 0.0, 0.0])
    assert found["facts"] == [1, 1, 0, 0]
    assert scored(reward, *texts, prompt="Tell about joann.")["facts"] == [0, 0, 0, 0]
    assert scored(reward, *texts, prompt="Ann, ann-marie or rome?")["facts"] == [1, 2, 1, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": "("}, "options.pattern is no regular expression"),
        ({"pattern": r"(?P<head>a)"}, r"no group 'relation'; write .* or set options.relation"),
        ({"pattern": r"(?P<head>a)", "relation": "born_in"}, r"no group 'tail'; write \(\?P<tail>\.\.\.\) in it$"),
        ({"relation": "borne"}, "no relation 'borne'; it has born_in, lives_in"),
        ({"relation": "born_in", "wanted": 0}, "options.wanted is 0; give a number of facts, 1 or more"),
        ({"relation": "born_in", "asked": "ann"}, "options.asked is 'ann'; give true or false"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_edit(path, options, said):
    with pytest.raises(UserError, match=said):
        Knowledge(path, **({"pattern": BORN} | options))


def test_the_command_writes_an_example_and_trains_it(tmp_path, capsys):
    graph, out = tmp_path / "towns.tsv", tmp_path / "out"
    command.main(["--example", str(graph)])
    command.main([str(graph), "--out", str(out), "--steps", "3", "--size", "8", "--batch", "16"])
    printed = capsys.readouterr().out
    assert "entities, 9 relations" in printed
    assert "mrr: 0." in printed
    assert folder.read(out).trained.figures["kept_back"] > 50
    for words, said in (
        ([str(graph), "--out", str(out)], "it exists; name a new folder"),
        ([str(graph), "--out", str(tmp_path / "b"), "--size", "7", "--group", "3"], "it must divide --size 7"),
        ([str(graph)], "name a graph and --out FOLDER"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
