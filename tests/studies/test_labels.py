"""Labels that spread: the graph and the layer against closed forms, who sees which label, the folder, the reward."""

import csv
import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli import app
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.data.loading import load_prompts
from mmrl.datasets import shapes
from mmrl.rewards.learned.formulas import platt
from mmrl.rewards.learned.labels import baselines
from mmrl.rewards.learned.labels.agreement import TEMPERATURES, Agreement
from mmrl.rewards.learned.labels.embeddings import Encoders, Space
from mmrl.rewards.learned.labels.folder import NAME, WEIGHTS, load_known, read
from mmrl.rewards.learned.labels.graph import Graph, directed, fields, nearest, symmetric
from mmrl.rewards.learned.labels.inputs import HEAD
from mmrl.rewards.learned.labels.items import Item, items_of
from mmrl.rewards.learned.labels.model import GraphAttention, GraphTransformer, Shape
from mmrl.rewards.learned.labels.pixels import of_clips, of_pictures, of_texts
from mmrl.rewards.learned.labels.readers import ModelReader, described
from mmrl.rewards.learned.labels.spreading import GRAPH, spread, write
from mmrl.rewards.learned.labels.training import Settings, masked, parted, to_label_next, train
from mmrl.rewards.loading import build, find
from mmrl.studies.labels import table
from mmrl.studies.labels.pairs import check as check_pairs
from mmrl.studies.labels.pairs import paired

QUICK = Settings(epochs=40, hidden=16, neighbours=4, repeats=1)


@pytest.fixture(scope="module", autouse=True)
def trained_once():
    """The command parts the labels once, and not three times, and trains for 40 epochs; tests of more say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.rewards.learned.labels.training.Settings", partial(Settings, repeats=1, epochs=40))
        yield


def random_graph(nodes=12, edges=40):
    sources, targets = torch.randint(nodes, (2, edges))
    return Graph(sources, targets, torch.rand(edges, dtype=torch.float64), nodes)


@pytest.mark.parametrize("average", [False, True])
def test_a_layer_is_that_of_the_paper_node_by_node(average):
    graph, states = random_graph(), torch.randn(12, 6, dtype=torch.float64)
    layer = GraphAttention(6, 4, 3, average=average).double()
    found = layer(states, graph)
    for i in range(12):
        edges = [n for n in range(40) if graph.targets[n] == i]
        heads = []
        for c in range(3):
            part = slice(4 * c, 4 * c + 4)
            query, message = layer.query(states[i])[part], torch.zeros(4, dtype=torch.float64)
            shift = [layer.edge(graph.cosines[n].view(1))[part] for n in edges]
            keys = [layer.key(states[graph.sources[n]])[part] + e for n, e in zip(edges, shift, strict=True)]
            values = [layer.value(states[graph.sources[n]])[part] + e for n, e in zip(edges, shift, strict=True)]
            raised = [math.exp((query @ key).item() / math.sqrt(4)) for key in keys]
            for weight, value in zip(raised, values, strict=True):
                message = message + weight / sum(raised) * value
            heads.append(message)
        m = torch.stack(heads).mean(0) if average else torch.cat(heads)
        r = layer.own(states[i])
        gate = 1 / (1 + torch.exp(-layer.gate(torch.cat([r, m, m - r]))))
        torch.testing.assert_close(found[i], gate * r + (1 - gate) * m, rtol=1e-12, atol=1e-12)


def small_model(layers=2, features=5):
    model = GraphTransformer(Shape(features, hidden=8, heads=2, layers=layers)).double().eval()
    torch.nn.init.normal_(model.last.weight)  # before training it is 0
    return model


def test_a_label_that_is_not_given_changes_no_logit_to_the_bit():
    model, graph, features = small_model(), random_graph(), torch.randn(12, 5, dtype=torch.float64)
    labels, given = torch.rand(12, dtype=torch.float64), torch.arange(12) % 2 == 0
    before = model(features, graph, labels, given)
    for hidden in (~given).nonzero().flatten().tolist():
        other = labels.clone()
        other[hidden] = math.nan
        assert torch.equal(model(features, graph, other, given), before)
    other = labels.clone()
    other[0] = 1 - other[0]
    assert not torch.equal(model(features, graph, other, given), before), "a given label counts"


def test_training_asks_only_for_labels_that_it_does_not_give(monkeypatch):
    asked, told = [], []
    forward = GraphTransformer.forward

    def spied(self, features, graph, labels, given):
        if self.training:
            told.append(given.clone())
        return forward(self, features, graph, labels, given)

    def loss(logits, labels):
        asked.append(len(labels))
        return torch.nn.functional.mse_loss(logits, labels)

    monkeypatch.setattr(GraphTransformer, "forward", spied)
    monkeypatch.setattr("mmrl.rewards.learned.labels.training.binary_cross_entropy_with_logits", loss)
    features, labels, given = torch.randn(40, 5), (torch.arange(40) % 2).float(), torch.arange(40) < 20
    train(features, symmetric(features, 3), labels, given, Settings(epochs=4, hidden=8, folds=2))
    assert told
    assert all(not bool((one & ~given).any()) for one in told)
    assert {int(one.sum()) for one in told} == {6}, "0.625 of the 10 labels outside of the fold"
    assert {4, 10} >= {*asked}, "the rest of them in training, and the fold's to choose the epoch"


def test_the_fold_of_a_model_is_never_given_to_it():
    features, labels, given = torch.randn(60, 5), (torch.arange(60) % 2).float(), torch.arange(60) < 30
    graph = symmetric(features, 3)
    trained = train(features, graph, labels, given, Settings(epochs=5, hidden=8, repeats=2))
    assert sorted(torch.cat(trained.folds[:5]).tolist()) == list(range(30))
    assert sorted(torch.cat(trained.folds[5:]).tolist()) == list(range(30))
    assert torch.cat(trained.folds[:5]).tolist() != torch.cat(trained.folds[5:]).tolist()
    for n, fold in enumerate(trained.folds):
        other = labels.clone()
        other[fold] = 1 - other[fold]
        known = given.clone()
        known[fold] = False
        assert torch.equal(trained.models[n](features, graph, other, known), trained.logits[n])
    assert len(trained.models) == 10
    for i in range(30):
        mine = torch.stack([trained.logits[n, i] for n in range(10) if i in trained.folds[n]])
        assert len(mine) == 2
        torch.testing.assert_close(trained.out_of_fold()[i], mine.mean())
    torch.testing.assert_close(trained.out_of_fold()[30:], trained.logits[:, 30:].mean(0))


def test_masks_are_a_share_of_the_labels_and_never_all():
    assert int(masked(torch.arange(80), 0.625).sum()) == 50
    for count in (2, 3, 5):
        assert 0 < int(masked(torch.arange(count), 0.99).sum()) < count


def test_folds_have_both_labels_alike():
    labels, given = (torch.arange(100) % 10 == 0).float(), torch.ones(100, dtype=torch.bool)
    folds = parted(labels, given, 5, seed=3)
    assert [int(labels[fold].sum()) for fold in folds] == [2] * 5


def test_the_graph_is_symmetric_and_joins_the_nearest():
    embeddings = torch.randn(50, 6)
    graph = symmetric(embeddings, 4)
    edges = [*zip(graph.sources.tolist(), graph.targets.tolist(), strict=True)]
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    cosines = (unit @ unit.T).fill_diagonal_(-2)
    wanted = {(i, j) for i in range(50) for j in cosines[i].topk(4).indices.tolist()}
    assert len(edges) == len({*edges})
    assert {*edges} == wanted | {(j, i) for i, j in wanted}
    torch.testing.assert_close(graph.cosines, cosines[graph.sources, graph.targets])


def test_nodes_in_another_order_have_their_logits_in_that_order():
    model, graph, features = small_model(), random_graph(), torch.randn(12, 5, dtype=torch.float64)
    labels, given = torch.rand(12, dtype=torch.float64), torch.rand(12) < 0.5
    order = torch.randperm(12)
    place = order.argsort()
    moved = Graph(place[graph.sources], place[graph.targets], graph.cosines, 12)
    found = model(features[order], moved, labels[order], given[order])
    torch.testing.assert_close(found, model(features, graph, labels, given)[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_edges_that_some_samples_depend_on_give_them_the_same_logits(layers):
    embeddings, asked = torch.randn(80, 5), torch.tensor([3, 50])
    graph, model = symmetric(embeddings, 2), small_model(layers).float()
    labels, given = torch.rand(80), torch.rand(80) < 0.5
    parts = fields(graph, asked, layers)
    assert len(parts[-1].targets) < len(graph.targets) / 4
    whole = model(embeddings, graph, labels, given)[asked]
    torch.testing.assert_close(model(embeddings, parts, labels, given)[asked], whole)


def test_a_new_sample_gets_what_it_would_get_as_a_node_that_nobody_reads():
    model, embeddings, new = small_model(), torch.randn(30, 5).double(), torch.randn(3, 5).double()
    graph, labels, given = symmetric(embeddings, 3), torch.rand(30).double(), torch.rand(30) < 0.5
    to_new = directed(new, embeddings, 4)
    read_by_layer, before = model.trace(embeddings, graph, labels, given)
    found = model.added(new, to_new, read_by_layer)
    whole = Graph(
        torch.cat([graph.sources, to_new.sources]),
        torch.cat([graph.targets, 30 + to_new.targets]),
        torch.cat([graph.cosines, to_new.cosines]),
        33,
    )
    more = torch.cat([labels, torch.zeros(3)]), torch.cat([given, torch.zeros(3, dtype=torch.bool)])
    together = model(torch.cat([embeddings, new]), whole, *more)
    torch.testing.assert_close(together, torch.cat([before, found]), rtol=1e-10, atol=1e-10)


def test_training_repeats_itself_and_leaves_the_global_generator_alone():
    features, labels, given = torch.randn(40, 5), (torch.arange(40) % 2).float(), torch.arange(40) < 20
    graph, state = symmetric(features, 3), torch.random.get_rng_state()
    first, second = (train(features, graph, labels, given, Settings(epochs=5, hidden=8)).logits for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), state)


def blobs(count=200, labelled=40, apart=1.5):
    """Two clouds with opposite labels, of which a few are given."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(count) % 2).float()
    embeddings = torch.randn(count, 8, generator=generator)
    embeddings[:, 0] += apart * (2 * labels - 1)
    given = torch.zeros(count, dtype=torch.bool)
    given[torch.randperm(count, generator=generator)[:labelled]] = True
    return embeddings, labels, given


@pytest.mark.slow
def test_labels_spread_over_two_clouds_and_no_method_reads_what_is_not_given():
    embeddings, labels, given = blobs()
    made = spread(embeddings, labels, given, QUICK, GRAPH)
    right = ((made.scores >= 0.5) == (labels >= 0.5))[~given].float().mean()
    assert right > 0.85
    assert set(made.quality) == {GRAPH, HEAD, "label propagation", "nearest neighbours"}
    assert all(one.area[0] > 0.8 and one.labels == 40 for one in made.quality.values())
    assert torch.equal(made.scores[given], labels[given])
    following = made.following(embeddings, 50)
    assert not bool(given[list(following)].any())
    assert len({*following}) == 50
    hidden = torch.where(given, labels, math.nan)
    again = spread(embeddings, hidden, given, QUICK, GRAPH)
    assert torch.equal(again.scores, made.scores)
    assert {k: v.area for k, v in again.quality.items()} == {k: v.area for k, v in made.quality.items()}


@pytest.mark.slow
def test_the_method_that_is_best_on_held_out_labels_gives_the_scores():
    embeddings, labels, given = blobs()
    made = spread(embeddings, labels, given, QUICK)
    areas = {name: made.quality[name].area[0] for name in (GRAPH, HEAD)}
    assert areas[made.by] == max(areas.values())
    for by in (GRAPH, HEAD):
        one = spread(embeddings, labels, given, QUICK, by)
        assert one.by == by
        assert ((one.scores >= 0.5) == (labels >= 0.5))[~given].float().mean() > 0.85


@pytest.mark.parametrize("numbers", [0, 2])
def test_the_weights_of_the_head_are_where_the_gradient_is_zero(numbers):
    embeddings, labels, given = blobs()
    weights = baselines.head_weights(embeddings, labels, given, 0.1, numbers)
    x, y = embeddings[given].double(), labels[given].double()
    error = torch.sigmoid(baselines.head_logits(x, weights)) - y
    pull = torch.tensor([0.1] * (8 - numbers) + [0.01] * numbers).double()
    assert (x.T @ error / len(y) + pull * weights[:-1]).abs().max() < 1e-5
    assert abs(float(error.mean())) < 1e-5


def test_a_size_counts_that_a_row_of_length_1_would_lose():
    """Samples differ in a number alone, whose part of the embedding is 1 or -1."""
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(200, 1, generator=generator)
    parts, labels = [torch.randn(200, 8, generator=generator), size], (size[:, 0] > 1).float()
    given = torch.arange(200) < 60
    space = Space.of(parts, Encoders("image", "model", "", {}))
    assert space(parts).shape == (200, 8)
    torch.testing.assert_close(space.numbers(parts), size - size.mean())
    settings = replace(QUICK, epochs=0)
    with_size = spread(space(parts), labels, given, settings, HEAD, numbers=space.numbers(parts))
    lost = spread(Space.of(parts)(parts), labels, given, settings, HEAD)
    assert with_size.quality[HEAD].area[0] > 0.98
    assert lost.quality[HEAD].area[0] < 0.9


def test_before_it_learns_a_model_is_the_calibrated_head_of_the_labels_that_it_knows():
    embeddings, labels, given = blobs()
    graph, settings = symmetric(embeddings, 4), Settings(epochs=0, folds=4, hidden=8, repeats=1)
    trained = train(embeddings, graph, labels, given, settings)
    for fold, logits in zip(trained.folds, trained.logits, strict=True):
        known = given.clone()
        known[fold] = False
        parts = parted(labels, known, 4, settings.seed)
        weights, held = baselines.head(embeddings, labels, known, parts)
        slope, shift = platt(held[known], labels[known])
        wanted = slope * baselines.head_logits(embeddings, weights) + shift
        torch.testing.assert_close(logits.double(), wanted, atol=1e-5, rtol=1e-5)
        other = torch.where(known, labels, 1 - labels)
        assert torch.equal(baselines.head(embeddings, other, known, parts)[0], weights)


def test_a_labelled_sample_learns_from_a_head_that_does_not_know_its_label(monkeypatch):
    embeddings, labels, given = blobs()
    seen, loss = [], torch.nn.functional.binary_cross_entropy_with_logits

    def spied(logits, asked, **how):
        if torch.is_grad_enabled():
            seen.append(logits.detach())
        return loss(logits, asked, **how)

    monkeypatch.setattr("mmrl.rewards.learned.labels.training.binary_cross_entropy_with_logits", spied)
    monkeypatch.setattr(
        "mmrl.rewards.learned.labels.training.masked", lambda place, rate: torch.arange(len(place)) >= 10
    )
    train(embeddings, symmetric(embeddings, 4), labels, given, Settings(epochs=5, folds=2, hidden=8, repeats=1))
    known = given.clone()
    known[parted(labels, given, 2, 0)[0]] = False
    _, held = baselines.head(embeddings, labels, known, parted(labels, known, 2, 0))
    slope, shift = platt(held[known], labels[known])
    first = known.nonzero().squeeze(1)[:10]
    torch.testing.assert_close(seen[0].double(), slope * held[first] + shift, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("apart", [0.4, 4])
def test_the_heads_decay_is_the_largest_whose_error_on_held_out_labels_is_near_the_smallest(apart):
    embeddings, labels, given = blobs(apart=apart)
    folds = parted(labels, given, 5, 0)
    errors = {}
    for decay in baselines.DECAYS:
        errors[decay] = []
        for fold in folds:
            told = given.clone()
            told[fold] = False
            weights = baselines.head_weights(embeddings, labels, told, decay)
            said = torch.sigmoid(baselines.head_logits(embeddings[fold], weights))
            errors[decay] += (said - labels[fold]).square().tolist()
    least = min(errors.values(), key=mean)
    near = mean(least) + stdev(least) / len(least) ** 0.5
    best = max(decay for decay, found in errors.items() if mean(found) <= near)
    assert best == (10.0 if apart < 1 else 0.1)
    assert torch.equal(
        baselines.head(embeddings, labels, given, folds)[0],
        baselines.head_weights(embeddings, labels, given, best),
    )


@pytest.mark.slow
@pytest.mark.parametrize("high", [1, 3])
def test_samples_that_are_all_alike_say_nothing_of_a_rare_label(high):
    """Without the label in its fold a model expects fewer such labels: turned round, this would look like knowledge."""
    labels, given = (torch.arange(40) < high).float(), torch.arange(40) < 20
    made = spread(torch.ones(40, 6), labels, given, QUICK)
    assert {name: made.quality[name].better_than_chance for name in (GRAPH, HEAD)} == {GRAPH: False, HEAD: False}
    assert made.unknown.std() < 1e-6


def test_agreement_is_the_vote_of_samples_that_look_alike():
    generator = torch.Generator().manual_seed(0)
    looks, prompts = (torch.nn.functional.normalize(torch.randn(20, d, generator=generator), dim=1) for d in (6, 4))
    made, wanted = Agreement.of(looks, prompts), torch.zeros(20, len(TEMPERATURES), dtype=torch.float64)
    for i in range(20):
        for n, t in enumerate(TEMPERATURES):
            weights = {j: math.exp(float(looks[i] @ looks[j]) / t) for j in range(20) if j != i}
            wanted[i, n] = sum(w * float(prompts[i] @ prompts[j]) for j, w in weights.items()) / sum(weights.values())
    wanted = (wanted - wanted.mean(0)) / wanted.std(0)
    torch.testing.assert_close(made.kept.double(), wanted, atol=1e-4, rtol=1e-4)
    rest = torch.arange(20) != 3
    few = Agreement(looks[rest], prompts[rest], made.mean, made.spread, made.kept[rest])
    torch.testing.assert_close(few(looks[3:4], prompts[3:4]), made.kept[3:4])


def drawn_for_others(count=400, kinds=4, wrong=0.4):
    """Samples that look like one of some kinds; a share of them is asked for another kind, and these are wrong."""
    generator = torch.Generator().manual_seed(0)
    looks = torch.randint(kinds, (count,), generator=generator)
    right = torch.rand(count, generator=generator) >= wrong
    asked = torch.where(right, looks, (looks + 1 + torch.randint(kinds - 1, (count,), generator=generator)) % kinds)
    eye, noise = torch.eye(kinds), 0.1 * torch.randn(count, kinds, generator=generator)
    given = torch.zeros(count, dtype=torch.bool)
    given[torch.randperm(count, generator=generator)[:40]] = True
    return [eye[looks] + noise, eye[asked]], right.float(), given


def test_agreement_tells_what_no_linear_head_can():
    parts, labels, given = drawn_for_others()
    space = Space.of(parts)
    one, other = space.moved(parts)
    made = spread(space(parts), labels, given, QUICK, alone=(one, other))
    assert made.by == GRAPH
    assert made.quality[GRAPH].area[0] > 0.95
    assert made.quality[HEAD].area[0] < 0.7
    assert ((made.scores >= 0.5) == (labels >= 0.5))[~given].float().mean() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0, 2])
def test_a_reward_finds_how_new_samples_agree_with_their_prompts(tmp_path, apart):
    parts, labels, given = drawn_for_others()
    if apart:  # what a model reads of both, and the two alone
        parts = [torch.randn(len(labels), 6, generator=torch.Generator().manual_seed(1)), *parts]
        parts.insert(1, torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(2)))  # no part of it
    words = Encoders("image", "model", "words", {}) if apart else Encoders("text", "words", "words")
    space = Space.of(parts, words)
    embeddings, (*_, one, other) = space(parts), space.moved(parts)
    assert embeddings.shape[1] == (6 if apart else 8)
    settings = replace(QUICK, repeats=2)
    made = spread(embeddings, labels, given, settings, GRAPH, (one, other), space.numbers(parts))
    assert len(made.trained.models) == 10
    write(tmp_path, made, embeddings, space, words, settings)
    known = load_known(tmp_path)
    assert known.space.apart == apart
    scores = known.scores([part[:60] for part in parts])
    right = labels[:60] >= 0.5
    assert scores[right].min() > scores[~right].max() - 0.3
    assert scores[right].mean() > scores[~right].mean() + 0.4


def test_propagation_is_the_solution_of_its_equation():
    embeddings, labels, given = blobs(60, 20)
    graph, kept = symmetric(embeddings, 4), 0.5
    weights = torch.zeros(60, 60).index_put_((graph.targets, graph.sources), graph.cosines.clamp(min=0)).double()
    degree = weights.sum(1).clamp(min=1e-9).rsqrt()
    shares = degree[:, None] * weights * degree[None, :]
    inverse = torch.linalg.inv(torch.eye(60).double() - kept * shares) * (1 - kept)
    mass, high = inverse @ given.double(), inverse @ (given * labels).double()
    found = baselines.propagation(graph, labels, given, kept).double()
    reached = mass > 1e-3
    torch.testing.assert_close(found[reached], (high / mass)[reached], atol=1e-3, rtol=0)


def test_neighbours_are_labelled_ones_and_never_the_sample_itself():
    embeddings = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.1, 0.99], [0.9, 0.2]])
    labels, given = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5]), torch.tensor([True, True, True, True, False])
    found = baselines.neighbours(embeddings, labels, given, count=1)
    assert found.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert nearest(embeddings, embeddings, 1, same=True)[1].flatten().tolist() == [1, 0, 3, 2, 1]


def test_what_to_label_next_is_uncertain_and_not_alike():
    embeddings = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.01], [0.0, 0.0, 1.0], [0.0, -1.0, 0.3]])
    scores, given = torch.tensor([0.5, 0.5, 0.5, 0.98, 0.7]), torch.tensor([True, False, False, False, False])
    assert list(to_label_next(scores, torch.zeros(5), embeddings, given, 3)) == [1, 4, 3]
    assert len(to_label_next(scores, torch.zeros(5), embeddings, given, 99)) == 4


def test_embeddings_without_a_model_see_colours_edges_motion_and_words():
    red, blue = Image.new("RGB", (40, 20), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    made = of_pictures([red, blue, red])
    assert torch.equal(made[0], made[2])
    assert made[0] @ made[1] < 0.5 * (made[0] @ made[0])
    half = Image.new("RGB", (32, 32))
    half.paste((255, 255, 255), (16, 0, 32, 32))
    turned = half.transpose(Image.Transpose.ROTATE_90)
    edges = of_pictures([half, turned])[:, 192:320].unflatten(1, (16, 8)).sum(1)
    assert edges.argmax(1).tolist() == [0, 4], "an upright edge and a level one"
    still, moving = of_clips([[half] * 3, [half, turned, half]])
    assert still[384:].abs().max() == 0
    assert moving[384:].abs().max() > 0
    same, other, empty = of_texts(["A red cat", "a green dog runs", ""])
    assert same @ of_texts(["a  red CAT"])[0] > 0.99 > 0.5 > same @ other
    assert empty.abs().max() == 0


def pictures(folder, count=60, prompts=("one red circle", "one blue circle"), labelled=30):
    """A folder of drawn pictures with a table: the first prompt's are good."""
    known = {p.text: p for p in shapes.prompts("all", relations=None)}
    folder.mkdir(parents=True)
    rows = []
    for n in range(count):
        prompt = known[prompts[n % len(prompts)]]
        shapes.picture(prompt, n).save(folder / f"{n:03d}.png")
        if n < labelled:
            rows.append(f"{n:03d}.png,{1 - n % len(prompts)}")
    (folder / table.NAME).write_text("file,label\n" + "\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def spread_out(tmp_path_factory):
    """A folder of pictures, what the command wrote of it, and what it printed."""
    root = tmp_path_factory.mktemp("labels")
    folder, out = pictures(root / "pictures"), root / "spread"
    done = CliRunner().invoke(app, ["spread", str(folder), "--out", str(out), "--next", "7", "--by", "graph"])
    assert done.exit_code == 0, done.output + str(done.exception)
    return folder, out, done.output


def test_the_command_writes_scores_what_to_label_next_and_a_reward_without_pickles(spread_out):
    _, out, said = spread_out
    assert sorted(p.name for p in out.iterdir()) == ["labels.json", "model.safetensors", "next.csv", "scores.csv"]
    rows = list(csv.DictReader((out / "scores.csv").open()))
    assert len(rows) == 60
    high = {row["file"] for row in rows if float(row["score"]) >= 0.5}
    assert len(high & {f"{n:03d}.png" for n in range(0, 60, 2)}) >= 28
    assert [row["label"] for row in rows if row["file"] == "000.png"] == ["1"]
    following = [row["file"] for row in csv.DictReader((out / "next.csv").open())]
    assert len(following) == 7
    assert all(int(name[:3]) >= 30 for name in following)
    assert "60 samples, 30 labels, 15 of them 0.5 or more" in said
    assert "graph transformer: AUC" in said
    record = read(out)
    assert record.encoders.samples == "pixels"
    assert record.encoders.prompts == ""


def test_the_reward_by_the_head_keeps_no_samples(spread_out, tmp_path):
    out = tmp_path / "head"
    done = CliRunner().invoke(app, ["spread", str(spread_out[0]), "--out", str(out), "--by", "head"])
    assert done.exit_code == 0, str(done.exception)
    assert "the scores are those of the supervised head" in done.stdout
    assert (out / WEIGHTS).stat().st_size < (spread_out[1] / WEIGHTS).stat().st_size / 2
    reward = build(find("labels"), {"path": str(out)})
    rows = {row["file"]: float(row["score_without_label"]) for row in csv.DictReader((out / "scores.csv").open())}
    given = [sample(Image.open(spread_out[0] / f"{n:03d}.png"), n) for n in range(30, 40)]
    kept = [rows[f"{n:03d}.png"] for n in range(30, 40)]
    assert reward.call(given, context=Context()) == pytest.approx(kept, abs=1e-4), "samples without a label"


def spread_of(*given):
    return CliRunner().invoke(app, ["spread", *map(str, given)])


@pytest.mark.slow
def test_the_labels_of_several_folders_are_spread_together(spread_out, tmp_path):
    first, second = spread_out[0], pictures(tmp_path / "second", count=20, labelled=4)
    third = pictures(tmp_path / "third", count=6)
    (third / table.NAME).unlink()
    out = tmp_path / "out"
    done = spread_of(first, second, third, "--out", out, "--by", "head", "--next", 80, "--json")
    assert done.exit_code == 0, str(done.exception)
    said = json.loads(done.stdout)
    assert (said["samples"], said["labels"]) == (86, 34)
    counts = [(str(first), 60, 30), (str(second), 20, 4), (str(third), 6, 0)]
    assert said["folders"] == [{"folder": f, "samples": s, "labels": n} for f, s, n in counts]
    assert f"{second}/010.png" in said["label_next"]
    rows = {(row["folder"], row["file"]): row for row in csv.DictReader((out / "scores.csv").open())}
    assert len(rows) == 86
    labels = [rows[str(folder.resolve()), "002.png"]["label"] for folder in (first, second, third)]
    assert labels == ["1", "1", ""], "equal names in two folders are two samples"
    assert len(table.files(out / "next.csv", second)) == 16
    assert {*table.files(out / "next.csv", second)} == {f"{n:03d}.png" for n in range(4, 20)}
    with pytest.raises(UserError, match=r"names no sample of .*spread; leave out --order"):
        table.files(out / "next.csv", spread_out[1])
    whole = tmp_path / "whole"
    whole.mkdir()
    given = []
    for folder in (first, second, third):
        for file in sorted(folder.glob("*.png")):
            (whole / f"{folder.name}-{file.name}").write_bytes(file.read_bytes())
    for folder in (first, second):
        given += [f"{folder.name}-{line}" for line in (folder / table.NAME).read_text().splitlines()[1:]]
    (whole / table.NAME).write_text("file,label\n" + "\n".join(given) + "\n")
    assert spread_of(whole, "--out", tmp_path / "one", "--by", "head").exit_code == 0
    alone = {row["file"]: row["score"] for row in csv.DictReader((tmp_path / "one" / "scores.csv").open())}
    both = {f"{Path(folder).name}-{file}": row["score"] for (folder, file), row in rows.items()}
    assert {k: float(v) for k, v in both.items()} == pytest.approx({k: float(v) for k, v in alone.items()}, abs=2e-3)


@pytest.mark.slow
def test_pairs_are_of_the_best_and_the_worst_of_a_prompt_and_are_data_for_dpo(tmp_path):
    folder = pictures(tmp_path / "pictures")
    for n in range(60):
        (folder / f"{n:03d}.txt").write_text(("a", "b", "c")[n % 3])
    (folder / "059.txt").unlink()
    out = tmp_path / "out"
    done = spread_of(folder, "--out", out, "--by", "head", "--pairs", 3, "--texts", "words")
    assert done.exit_code == 0, str(done.exception)
    rows = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    assert f"{len(rows)} pairs of a better and a worse sample for DPO: {out}/pairs.jsonl" in done.stdout
    scores = {row["file"]: float(row["score"]) for row in csv.DictReader((out / "scores.csv").open())}
    known = {(folder / file).read_bytes(): file for file in scores}
    for number, prompt in enumerate("abc"):
        own = [name for name in scores if int(name[:3]) % 3 == number and name != "059.png"]
        order = sorted(own, key=lambda name: -scores[name])
        found = [row for row in rows if row["prompt"] == prompt]
        assert len(found) == 3
        for key, wanted in (("chosen", order[:3]), ("rejected", order[::-1][:3])):
            names = [known[(out / row[key]).read_bytes()] for row in found]
            assert [scores[name] for name in names] == [scores[name] for name in wanted]
    options = f"{{path: {out / 'pairs.jsonl'}, images: [chosen, rejected], heldout: 0}}"
    loaded = load_recipe(["shapes-dpo"], ["data.name=jsonl", f"data.train={options}", f"data.heldout={options}"])
    read_back = load_prompts(loaded.recipe, "train")
    assert len(read_back) == len(rows)
    assert [len(prompt.media) for prompt in read_back] == [2] * len(rows)


def test_pairs_of_answers_keep_the_pictures_of_their_prompt(tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    shapes.picture(shapes.prompts()[0], 0).save(folder / "shown.png")
    rows, labels = [], ["file,label"]
    for n in range(30):
        word = "yes" if n % 2 else "no"
        rows.append(json.dumps({"prompt": "Is it red?", "text": f"{word} {n}", "pictures": ["shown.png"]}))
        labels.append(f"samples.jsonl#{n + 1},{n % 2}")
    (folder / "samples.jsonl").write_text("\n".join(rows))
    (folder / table.NAME).write_text("\n".join(labels[:21]))
    out = tmp_path / "out"
    assert spread_of(folder, "--out", out, "--texts", "words", "--pairs", 2, "--by", "head").exit_code == 0
    found = [json.loads(line) for line in (out / "pairs.jsonl").read_text().splitlines()]
    assert [(one["chosen"][:4], one["rejected"][:3]) for one in found] == [("yes ", "no ")] * 2
    assert (out / found[0]["images"][0]).read_bytes() == (folder / "shown.png").read_bytes()


def test_samples_without_pairs_are_refused(spread_out, tmp_path):
    single = pictures(tmp_path / "single")
    for n in range(60):
        (single / f"{n:03d}.txt").write_text(f"prompt {n}")
    for folder, said in ((spread_out[0], "have no prompts .a picture a.png needs"), (single, "a prompt of its own")):
        with pytest.raises(UserError, match=f"--pairs: .*{said}"):
            raise spread_of(folder, "--out", tmp_path / "out", "--pairs", 2).exception
    items = [Item(f"{n}", "text", "a", text=f"b{n}") for n in range(4)]
    assert paired(items, [0.9, 0.1, 0.5, 0.4], 9) == [(0, 1)]
    with pytest.raises(UserError, match="no two samples of a prompt have scores that differ by 0"):
        paired(items, [0.9, 0.7, 0.8, 0.7], 9)
    equal = [Item("0", "text", "a", text="b"), Item("1", "text", "a", text="b"), *items[2:]]
    assert paired(equal, [0.9, 0.1, 0.8, 0.2], 2) == [(2, 3)], "equal texts are no pair"
    shown = [Item(f"{n}", "text", "a", text=f"b{n}", pictures=("p.png",), root=Path("xy"[n % 2])) for n in range(4)]
    assert paired(shown, [0.9, 0.8, 0.1, 0.3], 2) == [(0, 2), (1, 3)], "equal names in two folders are two pictures"
    with pytest.raises(UserError, match="these samples are clips"):
        check_pairs([Item("a.mp4", "video", "a")])
    assert not (tmp_path / "out").exists()


def test_one_folder_against_another_needs_no_labels(tmp_path):
    """All samples of the one are 1 and all of the other 0, whatever labels lie beside them."""
    wanted, other = pictures(tmp_path / "wanted", count=24), pictures(tmp_path / "other", count=24)
    for folder, keep in ((wanted, 0), (other, 1)):  # red pictures alone, and blue ones alone
        for n in range(24):
            if n % 2 != keep:
                (folder / f"{n:03d}.png").unlink()
    out = tmp_path / "out"
    done = spread_of(wanted, "--against", other, "--by", "head", "--out", out, "--json")
    assert done.exit_code == 0, str(done.exception)
    said = json.loads(done.stdout)
    assert (said["samples"], said["labels"], said["high_labels"]) == (24, 24, 12)
    rows = {(Path(row["folder"]).name, row["label"]) for row in csv.DictReader((out / "scores.csv").open())}
    assert rows == {("wanted", "1"), ("other", "0")}
    assert said["held_out"]["supervised head"]["auc"][0] > 0.9
    for given, message in (
        (("--against", other, "--labels", wanted / table.NAME), "leave one of the two out"),
        (("--against", wanted), "is named twice"),
        (("--against", tmp_path / "none"), "is no folder"),
    ):
        with pytest.raises(UserError, match=message):
            raise spread_of(wanted, *given, "--out", tmp_path / "no").exception


def test_several_folders_that_cannot_be_spread_are_refused(spread_out, tmp_path):
    folder, out = spread_out[0], tmp_path / "out"
    second = pictures(tmp_path / "second", count=30, labelled=0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("word")
    (tmp_path / "run").mkdir()
    for name in ("recipe.yaml", "resolved.json"):
        (tmp_path / "run" / name).write_text("{}")
    for given, said in (
        ((folder, "--model", tmp_path / "run"), "is a run; name the recipe that it began with"),
        ((folder, second, "--labels", folder / table.NAME), "--labels names one table, and there are 2 folders"),
        ((folder, folder.parent / "." / folder.name), "is named twice"),
        ((folder, tmp_path / "texts"), "of the kind image, and .* of the kind text; spread each kind alone"),
        ((second, tmp_path / "none"), "is no folder"),
    ):
        with pytest.raises(UserError, match=said):
            raise spread_of(*given, "--out", out).exception
    whole = tmp_path / "whole"
    pictures(whole / "part")
    with pytest.raises(UserError, match=r"both have .*part/000\.png; name one of the two alone"):
        raise spread_of(whole, whole / "part", "--out", out).exception
    third = pictures(tmp_path / "third", count=30, labelled=3)
    with pytest.raises(UserError, match=r"labels\.csv of the 2 folders has 3 labels, and 10 or more are needed"):
        raise spread_of(second, third, "--out", out).exception
    assert not out.exists()


def sample(image, number=0, prompt=""):
    return Sample(Prompt("p", prompt), SampleId(0, number, 0, 0), image=image)


def test_its_scores_are_a_reward_of_new_pictures(spread_out):
    known = {p.text: p for p in shapes.prompts("all", relations=None)}
    reward = build(find("labels"), {"path": str(spread_out[1])})
    assert reward.declaration.inputs == ("image",)
    new = [sample(shapes.picture(known[f"one {c} circle"], 900 + n), n) for n in range(8) for c in ("red", "blue")]
    scores = reward.call(new, context=Context())
    assert min(scores[::2]) > max(scores[1::2])
    assert all(0 <= score <= 1 for score in scores)
    alone = [reward.call([one], context=Context())[0] for one in new[:3]]
    assert alone == pytest.approx(scores[:3], abs=1e-6), "a sample's score does not depend on the others"
    assert isinstance(reward.call([sample(None)], context=Context())[0], Failed)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (WEIGHTS, lambda data: data[:-1] + b"x", "sha256"),
        (NAME, lambda data: data.replace(b'"format": 3', b'"format": 9'), "this version reads 3"),
        (NAME, lambda data: data.replace(b'"kind": "image"', b'"kind": "smell"'), "should be 'image'"),
        (NAME, lambda data: b"{", "cannot be read"),
    ],
)
def test_a_folder_that_was_changed_is_refused_by_name(spread_out, tmp_path, file, change, said):
    for name in (NAME, WEIGHTS):
        data = (spread_out[1] / name).read_bytes()
        (tmp_path / name).write_bytes(change(data) if name == file else data)
    with pytest.raises(UserError, match=said):
        load_known(tmp_path)


def test_a_folder_without_spread_labels_is_refused_when_the_recipe_is_read(tmp_path):
    with pytest.raises(UserError, match=r"holds no spread labels .*mmrl spread"):
        find("labels").reads({"path": str(tmp_path)})


@pytest.mark.slow
def test_labels_by_chance_make_tables_and_no_reward(tmp_path):
    folder = pictures(tmp_path / "pictures", prompts=("one red circle",))
    draw = random.Random(0)
    rows = [f"{n:03d}.png,{draw.randint(0, 1)}" for n in range(30)]
    (folder / table.NAME).write_text("file,label\n" + "\n".join(rows) + "\n")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["spread", str(folder), "--out", str(out), "--json"])
    assert done.exit_code == 0, str(done.exception)
    assert json.loads(done.stdout)["reward"] is False
    assert not (out / NAME).exists()
    with pytest.raises(UserError, match="no better than chance"):
        load_known(out)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "there is no .*labels.csv; give labels with: mmrl label"),
        ("name,label\n000.png,1\n", "no column 'file'; its first line must be: file,label"),
        (
            "file,label\nnobody.png,0\n",
            "line 2: there is no sample 'nobody.png' beside it; one that is there is '000.png'",
        ),
        (
            "file,label\n000.pngx,0\n",
            "there is no sample '000.pngx' beside it; did you mean '000.png'.; correct or remove",
        ),
        ("file,label\n000.png,1\n001.png,no\n", "labels of two kinds: words .line 3. and numbers .line 2."),
        ("file,label\n000.png,5\n", "line 2: the label is '5'; write a number from 0 to 1"),
        ("file,label\n000.png,nan\n", "line 2: the label is 'nan'"),
        ("file,label\n000.png,\n", "has no label; give some with"),
        ("file,label\n000.png,1\n", "has 1 labels, and 10 or more are needed"),
        ("file,label\n" + "".join(f"{n:03d}.png,1\n" for n in range(12)), "all 12 labels .* are 1"),
        ("file,label\n" + "".join(f"{n:03d}.png,{int(n > 0)}\n" for n in range(12)), "1 labels 0 and 11 labels 1"),
    ],
)
def test_tables_that_cannot_work_are_refused_with_the_edit(tmp_path, rows, said):
    folder = pictures(tmp_path / "pictures", count=20)
    (folder / table.NAME).unlink()
    if rows is not None:
        (folder / table.NAME).write_text(rows)
    done = CliRunner().invoke(app, ["spread", str(folder), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, UserError)
    with pytest.raises(UserError, match=said):
        raise done.exception
    assert not (tmp_path / "out").exists()


def test_the_last_line_about_a_file_counts_and_an_empty_label_takes_it_away(tmp_path):
    path = tmp_path / table.NAME
    for file, label in (("a", "1"), ("b", "0"), ("a", "0.25"), ("b", "")):
        table.append(path, file, label)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    table.append(path, 'c,"d"\né', "1")
    assert dict(table.read(path, ["a", "b", 'c,"d"\né']).of) == {"a": 0.25, 'c,"d"\né': 1.0}


def test_samples_are_found_in_lists_in_folders_and_in_runs_and_not_outside(tmp_path):
    root = tmp_path / "listed"
    (root / "p").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(root / "p" / "a.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    rows = [{"prompt": "x", "file": "p/a.png"}, {"prompt": "y", "file": "../secret.png"}, {"file": "/etc/passwd"}]
    (root / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (item,) = items_of(root)
    assert (item.name, item.prompt, item.kind) == ("p/a.png", "x", "image")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "samples.jsonl").unlink()
    (root / "p" / "a.txt").write_text("a prompt\n")
    assert [(one.name, one.prompt) for one in items_of(root)] == [("p/a.png", "a prompt")]
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    (run / "resolved.json").write_text("{}")
    (run / "samples" / "step_000000.json").write_text(
        json.dumps({"step": 0, "samples": [{"prompt": "q", "text": "an answer"}, {"prompt": "r", "text": ""}]})
    )
    assert [(one.name, one.text) for one in items_of(run)] == [
        ("step_000000.json#1", "an answer"),
        ("step_000000.json#2", ""),
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: None, "has no samples"),
        (lambda root: (root / "samples.jsonl").write_text("{"), "line 1, cannot be read"),
        (lambda root: (root / "samples.jsonl").write_text("3"), "sample 1, is no object"),
        (lambda root: (root / "step_000000.json").write_text("[]"), "is no list of samples"),
    ],
)
def test_folders_without_samples_are_refused(tmp_path, make, said):
    make(tmp_path)
    with pytest.raises(UserError, match=said):
        items_of(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        items_of(tmp_path / "nowhere")


def test_texts_spread_with_hashed_words(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    words = {1: "good kind helpful", 0: "rude angry wrong"}
    draw = random.Random(0)
    rows = []
    for n in range(40):
        told = " ".join(draw.choices(words[n % 2].split(), k=3) + draw.choices(["one", "two", "three"], k=2))
        rows.append(json.dumps({"prompt": f"question {n % 3}", "text": told}))
    (folder / "samples.jsonl").write_text("\n".join(rows))
    for n in range(20):
        table.append(folder / table.NAME, f"samples.jsonl#{n + 1}", ("no", "yes")[n % 2])
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["spread", str(folder), "--out", str(out), "--texts", "words"])
    assert done.exit_code == 0, str(done.exception)
    reward = build(find("labels"), {"path": str(out)})
    assert reward.declaration.inputs == ("text",)
    made = [Sample(Prompt("p", "question 1"), SampleId(0, n, 0, 0), text=words[n]) for n in (0, 1)]
    bad, good = reward.call(made, context=Context())
    assert good > bad
    draws = load_recipe(["shapes-full"], [])
    with pytest.raises(UserError, match="samples are of the kind text"):
        Encoders.for_items(items_of(folder), model=described(draws.recipe))


def test_a_sample_that_cannot_be_read_is_left_out_and_named(tmp_path, capsys):
    folder = pictures(tmp_path / "pictures", count=40, labelled=20)
    Path(folder / "039.png").write_bytes(b"no picture")
    done = CliRunner().invoke(app, ["spread", str(folder), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, str(done.exception)
    assert "1 samples cannot be read and are left out" in done.stderr
    assert "039.png" in done.stderr


@pytest.fixture(scope="module")
def drawing_model():
    loaded = load_recipe(["shapes-full"], ["model.dtype=float32"])
    return described(loaded.recipe)


def test_the_model_that_draws_knows_which_prompt_a_picture_fits(drawing_model):
    reader = ModelReader(json.loads(json.dumps(drawing_model)))
    known = {p.text: p for p in shapes.prompts("all", relations=None)}
    right = ["one red circle", "one blue square", "one yellow cross"] * 2
    wrong = ["one green cross", "one red triangle", "one blue circle"] * 2
    drawn = [shapes.picture(known[prompt], n) for n, prompt in enumerate(right)]
    states, errors, sizes = reader.parts(drawn, right)
    others = reader.parts(drawn, wrong)
    assert errors.shape == (6, 2 * 64)
    assert states.shape == others[0].shape == (6, 2 * 2 * 128)
    torch.testing.assert_close(sizes, errors.unflatten(1, (2, 64)).mean(2).log())
    assert bool((errors.mean(1) < others[1].mean(1)).all())
    alone = reader.parts(drawn[:1], right[:1])
    torch.testing.assert_close(alone[1], errors[:1], rtol=1e-4, atol=1e-4)


def test_several_noises_give_the_mean_of_their_errors(drawing_model):
    one, two = ModelReader(drawing_model), ModelReader(drawing_model, 2)
    prompt = next(p for p in shapes.prompts("all", relations=None) if p.text == "one red circle")
    drawn, texts = [shapes.picture(prompt, n) for n in range(2)], [prompt.text] * 2
    torch.testing.assert_close(two.reader.noise(1), -one.reader.noise(0))
    first = one.parts(drawn, texts)
    drawn_noise = one.reader.noise
    one.reader.noise = lambda n: -drawn_noise(n)
    opposite = one.parts(drawn, texts)
    states, errors, sizes = two.parts(drawn, texts)
    torch.testing.assert_close(states, (first[0] + opposite[0]) / 2)
    torch.testing.assert_close(errors, (first[1] + opposite[1]) / 2)
    torch.testing.assert_close(sizes, ((first[2].exp() + opposite[2].exp()) / 2).log())


def test_models_that_cannot_read_pictures_are_refused(drawing_model, tmp_path):
    loaded = load_recipe(["sums"], [])
    with pytest.raises(UserError, match="the recipe makes text"):
        described(loaded.recipe)
    moved = {**drawing_model, "model": {**drawing_model["model"], "path": str(tmp_path / "gone")}}
    with pytest.raises(UserError, match=r"is not at .*gone any more; run mmrl spread again"):
        ModelReader(moved)
    with pytest.raises(UserError, match="is not known"):
        ModelReader({"name": "x"})


@pytest.mark.slow
def test_with_a_model_the_reward_reads_the_picture_and_the_prompt_apart_too(tmp_path):
    known = {p.text: p for p in shapes.prompts("all", relations=None)}
    colours, rows, labels = ("red", "blue", "green", "yellow"), [], []
    for n in range(80):
        shown, asked = colours[n % 4], colours[(n + (n // 4 % 2)) % 4]
        shapes.picture(known[f"one {shown} circle"], n).save(tmp_path / f"{n:03d}.png")
        rows.append({"prompt": f"one {asked} circle", "file": f"{n:03d}.png"})
        labels.append(f"{n:03d}.png,{int(shown == asked)}")
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / table.NAME).write_text("file,label\n" + "\n".join(labels[:40]) + "\n")
    out = tmp_path / "out"
    given = ["spread", str(tmp_path), "--out", str(out), "--model", "shapes-full", "--texts", "words", "--by", "graph"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, str(done.exception)
    record = read(out)
    assert record.encoders.prompts == "words"
    assert len(record.widths) == 5
    assert record.figures[GRAPH]["auc"][0] > 0.9
    reward, samples = build(find("labels"), {"path": str(out)}), []
    for n in range(8):
        prompt = Prompt(f"{n}", f"one {colours[(n + n // 4) % 4]} circle")
        picture = shapes.picture(known[f"one {colours[n % 4]} circle"], 100 + n)
        samples.append(Sample(prompt, SampleId(0, n, 0, 0), image=picture))
    scores = reward.call(samples, context=Context())
    assert min(scores[:4]) > max(scores[4:])
