"""Credit for turns: what every token of a turn gets, and that a run has it wherever its episodes are played."""

import json
import math
import random
from collections import defaultdict
from statistics import fmean, pstdev

import pytest
import torch

import mmrl
from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.objective import Scored
from mmrl.app.verify import verify
from mmrl.config.errors import RecipeError
from mmrl.config.loader import load_recipe
from mmrl.core.episode import Action, Episode, Exchange, Observation
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Segment, Slot, TextRows
from mmrl.rollout.collect import mask_of
from mmrl.rollout.turn_credit import with_turns
from mmrl.step.batch import Batch

allow_cpu_only()  # before transformers imports torchvision

SMALL = [
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "sampling.max_new_tokens=8",
    "eval.every=null",
    "data.train={count: 64}",
    "data.heldout={count: 64}",
    "environment={name: guess, max_turns: 3, max_tokens: 90}",
    "algorithm.credit=turn",
    "rewards=[{name: environment}]",
]


def recipe_of(*changes):
    return load_recipe(["sums"], [*SMALL, *changes]).recipe


def row_of(episode, lengths):
    """The segments of a row behind a prompt of two tokens: each turn's, and one token of what was told after it."""
    segments, at = [], 2
    for n, length in enumerate(lengths):
        segments.append(Segment(at, at + length, "written", turn=n))
        at += length
        if n + 1 < len(lengths):
            segments.append(Segment(at, at + 1, "told", turn=n + 1))
            at += 1
    return segments


def batch_of(episodes, lengths, parts):
    """A batch of ``episodes`` whose turns have ``lengths`` tokens, in micro-batches of ``parts`` rows."""
    slot, micro_batches, places, first = Slot(0, 0, 0, Prompt("p", "q")), [], [], 0
    for count in parts:
        rows = range(first, first + count)
        behind = [row_of(episodes[n], lengths[n]) for n in rows]
        tokens = [torch.ones(of[-1].stop - 2 if of else 0, dtype=torch.long) for of in behind]
        asked = [("key", torch.zeros(2, dtype=torch.long))] * count
        ids = [SampleId(0, 0, 0, n) for n in rows]
        made = TextRows.answers(
            [slot] * count, ids, asked, tokens, torch.zeros(count, dtype=torch.bool), tokens, behind=behind
        )
        made.episodes = [episodes[n] for n in rows]
        micro_batches.append(made)
        places += [(len(micro_batches) - 1, i) for i in range(count)]
        first += count
    return Batch(micro_batches, places, torch.zeros(first), torch.ones(first), torch.ones(first))


def credited(recipe, episodes, lengths, rewards, groups, parts):
    batch = batch_of(episodes, lengths, parts)
    scored = Scored(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), mask_of(batch))
    plain = group_advantages(scored.rewards, scored.groups, recipe.algorithm.spread)
    return with_turns(recipe, batch, scored, plain), scored


def played(*turns, end="done"):
    """An episode of turns, each a tuple of what was told: (content, reward, anchor)."""
    told = [
        tuple(Observation(c, r, info={} if anchor is None else {"anchor": anchor}) for c, r, anchor in answers)
        for answers in turns
    ]
    reward = sum(one.reward for answers in told for one in answers)
    return Episode(tuple(Exchange(Action("x"), answers) for answers in told), reward, end)


# ---- the formula


def reference(episodes, rewards, groups, *, weight, discount, turn_weight, std):
    """The advantage of each turn, by loops over numbers: eq. 3 and 5 to 8 of the paper."""

    def standardised(values):
        known = [v for v in values if not math.isnan(v)]
        flat = len(known) < 2 or max(known) - min(known) < 1e-9
        scale = 1.0 if flat or std == "none" else pstdev(known) + 1e-4
        return [0.0 if flat or math.isnan(v) else (v - fmean(known)) / scale for v in values]

    of_group, of_state = defaultdict(list), defaultdict(list)
    for n, (episode, reward, group) in enumerate(zip(episodes, rewards, groups, strict=True)):
        of_group[group].append((n, reward))
        arrives = [weight * sum(o.reward for o in turn.told) for turn in episode.turns]
        before = None
        for t, turn in enumerate(episode.turns):
            later = sum(discount ** (k - t) * arrives[k] for k in range(t, len(arrives)))
            rest = (reward - sum(arrives)) * discount ** (len(arrives) - 1 - t)
            of_state[group, before].append((n, t, later + rest))
            anchors = [o.info.get("anchor") for o in turn.told]
            content = [str(o.content) for o in turn.told]
            before = str(content if anchors == [None] * len(anchors) else ("anchor", anchors))
    whole = {}
    for of in of_group.values():
        whole |= dict(zip((n for n, _ in of), standardised([r for _, r in of]), strict=True))
    found = {}
    for of in of_state.values():
        for (n, t, _), value in zip(of, standardised([g for _, _, g in of]), strict=True):
            found[n, t] = whole[n] + turn_weight * value
    return found


PICTURES = [Media("image", data=bytes([n])) for n in range(2)]


@pytest.mark.parametrize("seed", range(40))
def test_advantages_are_those_of_the_paper(seed):
    r = random.Random(seed)
    size, n_groups = r.randint(2, 5), r.randint(1, 3)
    n = size * n_groups
    contents = ["up", "down", "", (PICTURES[0],), (PICTURES[1],), ("a", PICTURES[0])]
    episodes = [
        played(
            *(
                [
                    (r.choice(contents), r.choice([0.0, 0.5, 1.0]), r.choice([None, None, None, [1, 2], "a", 0]))
                    for _ in range(r.randint(0, 2))
                ]
                for _ in range(r.randint(0, 5))
            )
        )
        for _ in range(n)
    ]
    lengths = [[r.randint(0, 4) for _ in episode.turns] for episode in episodes]
    weight, discount, turn_weight = r.choice([0.0, 1.0, 2.5]), r.choice([0.0, 0.9, 1.0]), r.choice([0.0, 1.0, 0.3])
    rewards = [r.choice([math.nan, 0.0, 1.0, weight * one.reward, r.random()]) for one in episodes]
    groups = [k // size for k in range(n)]
    kind = r.choice(["grpo", "dr_grpo"])
    recipe = recipe_of(
        f"algorithm={{type: {kind}, credit: turn, turn_discount: {discount}, turn_weight: {turn_weight}}}",
        f"rewards=[{{name: environment, weight: {weight}}}, {{name: 'answer:number'}}]",
    )
    found, scored = credited(recipe, episodes, lengths, rewards, groups, [size] * n_groups)
    std = "group" if kind == "grpo" else "none"
    wanted = torch.zeros(scored.mask.shape, dtype=torch.float64)
    for (row, turn), value in reference(
        episodes, rewards, groups, weight=weight, discount=discount, turn_weight=turn_weight, std=std
    ).items():
        segment = [s for s in row_of(episodes[row], lengths[row]) if s.kind == "written"][turn]
        wanted[row, segment.start - 2 : segment.stop - 2] = value
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), wanted, rtol=1e-5, atol=1e-5)
    assert (found.values[scored.mask == 0] == 0).all()
    assert (found.values[torch.tensor(rewards).isnan()] == 0).all()


def test_a_turn_is_blamed_for_its_own_choice():
    """Two episodes of the same return. One wins in its first turn, the other in its second, where both are told the
    same: the episodes' advantages are 0, and those of the turns say which was the better one."""
    episodes = [played([("on", 1.0, None)], [("", 0.0, None)]), played([("on", 0.0, None)], [("", 1.0, None)])]
    recipe = recipe_of("algorithm={type: dr_grpo, credit: turn, turn_discount: 0.5}")
    found, _ = credited(recipe, episodes, [[2, 1], [1, 2]], [1.0, 1.0], [0, 0], [2])
    # returns 1 and 0.5 of the first turns, 0 and 1 of the second
    assert found.values.tolist() == [[0.25, 0.25, 0.0, -0.5], [-0.25, 0.0, 0.5, 0.5]]
    assert found.metrics["advantage/shared_states"] == 1.0


def test_one_turn_and_no_discount_is_the_episode_again():
    rewards = [0.0, 1.0, 0.25, 1.0]
    found, scored = credited(recipe_of(), [played([("", 0.0, None)])] * 4, [[3]] * 4, rewards, [0] * 4, [4])
    alone = group_advantages(scored.rewards, scored.groups, "group").values
    torch.testing.assert_close(found.values, 2 * alone.unsqueeze(1).expand(4, 3))


def test_credit_of_episodes_is_untouched():
    recipe = recipe_of("algorithm.credit=episode")
    found, scored = credited(recipe, [played([("", 1.0, None)])] * 2, [[3]] * 2, [0.0, 1.0], [0, 0], [2])
    assert found.values.equal(group_advantages(scored.rewards, scored.groups, "group").values)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["environment=null"], "algorithm.credit: turns are those of an environment.*set algorithm.credit to episode"),
        (["algorithm={type: gspo, credit: turn}"], "algorithm.credit: gspo has no .* grpo, .*remove it"),
        (["algorithm={type: ppo, turn_weight: 2}"], "algorithm.turn_weight: ppo has no .* grpo, .*remove it"),
        (["algorithm={type: capo, credit: turn}"], "algorithm.credit: capo has no"),
        (
            ["algorithm.credit=episode", "algorithm.turn_discount=0.5"],
            "algorithm.turn_discount: .*set algorithm.credit to turn, or remove it",
        ),
        (["algorithm.advantage_aggregation=each"], "algorithm.advantage_aggregation: .* set it to sum"),
        (["rewards=[{name: environment, normalize: group}]"], r"rewards\[0\].normalize: .* remove it"),
        (["algorithm.turn_discount=1.5"], "algorithm.turn_discount"),
        (["algorithm.turn_weight=-1"], "algorithm.turn_weight"),
        (["algorithm.credit=turns"], "algorithm.credit"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, words):
    with pytest.raises(RecipeError, match=words):
        recipe_of("rewards=[{name: 'answer:number'}]" if "environment=null" in changes else "name=x", *changes)


TWO = "rewards=[{name: environment}, {name: 'answer:number'}]"


def test_the_edits_that_refusals_name_are_taken():
    for wrong, edits in (
        (["algorithm.credit=episode", "algorithm.turn_discount=0.5"], ["algorithm.credit=turn"]),
        (["algorithm.credit=episode", "algorithm.turn_weight=2"], ["algorithm.turn_weight=1"]),
        (["algorithm.advantage_aggregation=each"], ["algorithm.advantage_aggregation=sum"]),
        (["algorithm.advantage_aggregation=each", TWO], ["algorithm.credit=episode"]),
    ):
        with pytest.raises(RecipeError, match="credit of"):
            recipe_of("name=x", *wrong)
        assert recipe_of("name=x", *wrong, *edits)


# ---- runs


def figures(run):
    """What a run logged that does not depend on the machine."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "perf/", "plan/", "sent/", "features/", "memory/", "balance/", "mismatch/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "drpo"])
def test_a_real_run_has_it_and_is_verified(tmp_path, kind):
    changes = [*SMALL, f"algorithm={{type: {kind}, credit: turn}}", "checkpoint.every=1", "train.updates_per_step=2"]
    mmrl.train("sums", changes=changes, rewards=["environment"], out=tmp_path / "run")
    rows = figures(tmp_path / "run")
    assert all(0 < row["advantage/shared_states"] <= 1 for row in rows)
    found = verify(tmp_path / "run", 2)
    assert [(part.of, one.name) for part in found.parts for one in part.found if not one.same] == []


@pytest.mark.slow
def test_controllers_and_devices_change_nothing(tmp_path):
    pytest.importorskip("ray")
    mmrl.train("sums", changes=SMALL, out=tmp_path / "one")
    one = figures(tmp_path / "one")
    for name, more in {"controllers": ["controllers=2"], "devices": ["devices_per_controller=2"]}.items():
        mmrl.train("sums", changes=[*SMALL, *more], out=tmp_path / name)
        for row, other in zip(one, figures(tmp_path / name), strict=True):
            for key in ("reward/mean", "episode/turns", "advantage/shared_states", "policy/loss", "optim/grad_norm"):
                assert row[key] == pytest.approx(other[key], abs=1e-5), (name, key)
