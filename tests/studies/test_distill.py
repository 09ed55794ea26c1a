"""A judge distilled to a reward: the formulas against closed forms, and real small runs through the command line."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.learned.distilled.encoders import Words
from mmrl.rewards.learned.distilled.folder import load_students
from mmrl.rewards.learned.distilled.sides import Pairs
from mmrl.rewards.learned.distilled.students import Shape, Side, Students, inputs_of, words_of
from mmrl.rewards.learned.formulas import calibrated, logistic, losses, maxsim, platt, sureness, threshold_of
from mmrl.rewards.loading import Loaded, build, find
from mmrl.studies.distill.distilling import agreement, askings, check
from mmrl.studies.distill.training import Settings, Table, scores, split, table_of, train
from tests.support import asleep, tiny
from tests.support.cli import mmrl
from tests.support.distill import JUDGES, RECIPE

allow_cpu_only()  # before transformers is asked for a model
SMALL = Shape(width=16, token_width=8, layers=1, heads=2, buckets=256, words=8, side=16)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_maxsim_is_what_two_loops_give() -> None:
    queries, answers = drawn(3, 4, 5), drawn(3, 6, 5, seed=1)
    query_mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.float64)
    answer_mask = torch.tensor([[1] * 6, [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]], dtype=torch.float64)
    found = maxsim(queries, query_mask, answers, answer_mask)
    for b in range(3):
        tokens = [q for q in range(4) if query_mask[b, q]]
        best = [
            max(
                sum(float(queries[b, q, k] * answers[b, a, k]) for k in range(5)) for a in range(6) if answer_mask[b, a]
            )
            for q in tokens
        ]
        assert float(found[b]) == pytest.approx(sum(best) / len(tokens), rel=1e-12)
    every = maxsim(queries.unsqueeze(1), query_mask.unsqueeze(1), answers, answer_mask)  # each with each
    assert every.shape == (3, 3)
    torch.testing.assert_close(every.diagonal(), found)


def by_hand(dual: Tensor, interaction: Tensor, verdicts: Tensor, mask: Tensor, temperature: float) -> list[float]:
    """The terms with sums over lists, in Python's floats."""

    def shares(logits: list[float]) -> list[float]:
        powers = [math.exp(x / temperature) for x in logits]
        return [p / sum(powers) for p in powers]

    def entropy(logit: float, verdict: float) -> float:
        p = 1 / (1 + math.exp(-logit))
        return -(verdict * math.log(p) + (1 - verdict) * math.log(1 - p))

    lists: list[list[float]] = [[], [], []]
    single: list[list[float]] = [[], []]
    for g in range(len(dual)):
        rows = [n for n in range(dual.shape[1]) if mask[g, n]]
        v, d, i = ([float(x[g, n]) for n in rows] for x in (verdicts, dual, interaction))
        cut = [min(max(x, 0.02), 0.98) for x in v]
        judge, li, de = shares([math.log(x / (1 - x)) for x in cut]), shares(i), shares(d)
        if len(rows) > 1:
            for at, (teacher, student) in enumerate(((judge, li), (judge, de), (li, de))):
                lists[at].append(sum(t * math.log(t / s) for t, s in zip(teacher, student, strict=True)))
        single[0] += [entropy(a, b) for a, b in zip(i, v, strict=True)]
        single[1] += [entropy(a, b) for a, b in zip(d, v, strict=True)]
    return [sum(one) / len(one) for one in (*lists, *single)]


def test_the_losses_are_those_of_the_formulas() -> None:
    dual, interaction = drawn(3, 4), drawn(3, 4, seed=1)
    verdicts = torch.rand(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    verdicts[0, 0], verdicts[0, 1] = 0, 1
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    found = losses(dual, interaction, verdicts, mask, 0.7)
    expected = by_hand(dual, interaction, verdicts, mask, 0.7)
    assert [float(x) for x in vars(found).values()] == pytest.approx(expected, rel=1e-12)
    assert float(found.total()) == pytest.approx(sum(expected), rel=1e-12)


def test_the_gradient_of_the_losses_is_the_finite_difference_and_the_teacher_stands_still() -> None:
    verdicts, mask = torch.rand(2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64), torch.ones(2, 3)
    dual, interaction = drawn(2, 3).requires_grad_(), drawn(2, 3, seed=1).requires_grad_()

    def without_between(d: Tensor, i: Tensor) -> Tensor:
        found = losses(d, i, verdicts, mask)
        return found.total() - found.between

    assert torch.autograd.gradcheck(without_between, (dual, interaction))
    fixed = interaction.detach()
    assert torch.autograd.gradcheck(lambda d: losses(d, fixed, verdicts, mask).between, (dual,))
    between = losses(dual, interaction, verdicts, mask).between
    assert torch.autograd.grad(between, interaction, allow_unused=True) == (None,)


def test_calibration_finds_the_curve_that_made_the_verdicts() -> None:
    logits = torch.linspace(-3, 3, 400, dtype=torch.float64)
    verdicts = torch.sigmoid(1.7 * logits - 0.6)
    slope, shift = platt(logits, verdicts)
    assert slope == pytest.approx(1.7, abs=0.02)  # the pull towards 1 is small, not none
    assert shift == pytest.approx(-0.6, abs=0.02)
    said = calibrated(logits, slope, shift)
    groups = [0] * 400
    assert agreement(said, verdicts, groups, groups).calibration < 0.005
    assert agreement(torch.sigmoid(4 * logits), verdicts, groups, groups).calibration > 0.08
    drawn_ = (torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) < verdicts).double()
    assert platt(logits, drawn_)[0] == pytest.approx(1.7, abs=0.5)
    divided = platt(logits, (logits > 0.2).double())  # without a mistake: finite all the same
    assert all(math.isfinite(x) for x in divided)
    assert platt(logits, 1 - verdicts)[0] < 0


@pytest.mark.parametrize("kind", ["drawn", "scores", "divided", "rare"])
@pytest.mark.parametrize(("count", "width", "pull"), [(20, 1, 1e-3), (40, 8, 1e-3), (40, 128, 1e-1), (300, 8, 1e-3)])
def test_logistic_regression_ends_where_the_gradient_is_zero_and_soon(monkeypatch, kind, count, width, pull) -> None:
    draw, costs = torch.Generator().manual_seed(count + width), []
    rows = torch.randn(count, width, generator=draw, dtype=torch.float64)
    drawn = torch.rand(count, generator=draw, dtype=torch.float64)
    rare = torch.arange(count) == 0
    truth = {"drawn": drawn > 0.5, "scores": drawn, "divided": rows[:, 0] > 0.2, "rare": rare}[kind].double()
    design = torch.cat([rows, torch.ones(count, 1, dtype=torch.float64)], 1)
    pulls = torch.tensor([pull] * width + [1e-9], dtype=torch.float64)  # the bias is as good as free

    def counted(logits: torch.Tensor, verdicts: torch.Tensor) -> torch.Tensor:
        costs.append(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, verdicts)

    monkeypatch.setattr("mmrl.rewards.learned.formulas.binary_cross_entropy_with_logits", counted)
    weights = logistic(design, truth, pulls, torch.zeros_like(pulls))
    gradient = design.T @ (torch.sigmoid(design @ weights) - truth) / count + pulls * weights
    assert gradient.abs().max() < 1e-12
    assert len(costs) < 100, "what a smaller step would take off the cost is not looked for in its rounding"


def test_thresholds_ask_the_share_that_they_promise() -> None:
    said = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sure = sureness(said)
    assert float(sure.min()) >= 0.5
    for share in (0.0, 0.2, 0.55, 1.0):
        below = threshold_of(sure, share)
        assert float((sure < below).double().mean()) == pytest.approx(share, abs=0.006)
    verdicts, groups = (said > 0.5).double(), [n // 4 for n in range(200)]
    for one in askings(1 - said, verdicts, groups):  # a student that is always wrong, and asks where it doubts
        mixed = [float(v) if s < one.threshold else 1 - float(p) for v, s, p in zip(verdicts, sure, said, strict=True)]
        assert one.asked == pytest.approx(np.mean([float(s) < one.threshold for s in sure]))
        assert len(mixed) == 200
        assert one.order < 1
    assert askings(said, verdicts, groups)[-1].order == 1


def test_agreement_is_of_pairs_of_one_group() -> None:
    """A student that knows only which prompts are hard is at chance, however well all ranks agree."""
    draw = torch.Generator().manual_seed(0)
    hard = torch.rand(40, generator=draw, dtype=torch.float64).repeat_interleave(6) / 2
    verdicts = (hard + 0.3 * torch.rand(240, generator=draw, dtype=torch.float64)).clamp(0, 1)
    said = (hard + 0.02 * torch.rand(240, generator=draw, dtype=torch.float64)).clamp(0, 1)
    groups = [n // 6 for n in range(240)]
    found = agreement(said, verdicts, groups, groups)
    assert found.spearman > 0.7
    assert found.order[1] < 0.5 < found.order[2]
    assert not found.better_than_chance
    assert agreement(verdicts, verdicts, groups, groups).order[0] == 1


def test_words_of_any_script_are_read() -> None:
    shape = Shape(words=6)
    assert words_of("Two red circles", shape) == words_of("two  RED\ncircles", shape)
    assert len(words_of("猫が好き", shape)) == 4
    assert len(words_of("x = 12", shape)) == 4  # digits stand alone
    long = words_of("a b c d e f g h", shape)
    assert long == words_of("a b c f g h", shape)
    assert words_of("", shape) == []
    assert all(0 < row < shape.buckets for row in long)


def test_padding_and_absent_pictures_change_nothing() -> None:
    torch.manual_seed(0)
    students = Students(SMALL).double().eval()
    picture = Image.new("RGB", (16, 16), (200, 30, 30))
    one = inputs_of([Side("red")], SMALL, 0)
    many = inputs_of([Side("red"), Side("a b c d e", (picture,))], SMALL, 1)
    many.pictures[0] = 0.7  # what is not there is not seen
    few, more = (students.encode(type(one)(i.ids, i.pictures.double(), i.there), 0) for i in (one, many))
    torch.testing.assert_close(few.vectors[0], more.vectors[0])
    there = few.mask[0].bool()
    torch.testing.assert_close(few.tokens[0][there], more.tokens[0][more.mask[0].bool()])


def coloured(count: int, seed: int) -> Table:
    """Prompts that name a colour, and pictures of three colours: is the picture of that colour?"""
    draw = np.random.default_rng(seed)
    colours = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
    prompts, answers, verdicts, groups = list[Side](), list[Side](), list[float](), list[int]()
    for group in range(count):
        wanted = list(colours)[group % 3]
        for name, rgb in colours.items():
            noisy = np.clip(draw.normal(rgb, 25, (16, 16, 3)), 0, 255).astype(np.uint8)
            prompts.append(Side(wanted))
            answers.append(Side("", (Image.fromarray(noisy),)))
            verdicts.append(0.95 if name == wanted else 0.05)
            groups.append(group)
    return table_of(prompts, answers, verdicts, groups, Words(SMALL))


@pytest.mark.slow
def test_students_learn_what_a_picture_and_a_prompt_have_in_common() -> None:
    learn, check, test = coloured(24, 0), coloured(6, 1), coloured(12, 2)
    before = torch.random.get_rng_state()
    settings = Settings(epochs=40, patience=40, groups=6, lr=5e-3)
    students, again = (train(learn, check, Words(SMALL), settings, "cpu") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for one, other in zip(students.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    numbers = [n // 3 for n in range(36)]
    for logits in scores(students, test):
        assert agreement(torch.sigmoid(logits), test.verdicts, numbers, numbers).order[0] > 0.9


def test_groups_of_one_prompt_are_in_one_part() -> None:
    prompts = [Side(f"prompt {n // 6}") for n in range(120)]
    table = table_of(
        prompts, [Side(str(n)) for n in range(120)], [0.5] * 120, [n // 3 for n in range(120)], Words(SMALL)
    )
    parts = split(table.of_prompt.tolist(), table.groups, 0)
    assert sorted(n for part in parts for n in part) == list(range(40))
    named = [{int(table.of_prompt[table.groups[n][0]]) for n in part} for part in parts]
    assert [len(one) for one in named] == [13, 3, 4]
    assert not any(one & other for i, one in enumerate(named) for other in named[:i])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    tiny.language_model(folder / "tinylm", sharp=0.3)
    (folder / "judges.py").write_text(JUDGES)
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


DIGITS = ["--reward", "digits", "--passes", "8", "--backbone", "none"]


@pytest.fixture(scope="module")
def made(root: Path) -> Path:
    """A distilled counter of digits, without a model that reads."""
    out = root / "distilled"
    assert mmrl("distill", str(root / "tiny.yaml"), "--out", str(out), "--samples", "320", *DIGITS) == 0
    return out


def answers(texts: list[str]) -> list[Sample]:
    return [Sample(Prompt("x", "1 + 1"), SampleId(0, 0, 0, n), text=text) for n, text in enumerate(texts)]


def opened(path: Path, **options: Any) -> Loaded:
    return build(find("distilled"), {"path": str(path), **options})


TEXTS = ["12 34", "none at all", "7", "", "a 9 b 8", "111"]


@pytest.mark.slow
def test_the_folder_holds_no_pickle_and_its_figures(made: Path) -> None:
    assert sorted(file.name for file in made.iterdir()) == ["distilled.json", "model.safetensors", "verdicts.jsonl"]
    said = json.loads((made / "distilled.json").read_text())
    assert said["format"] == 1  # as before there was a model that reads
    assert said["figures"]["new_verdicts"] == 320
    assert said["figures"]["heldout"]["interaction"]["order"][1] > 0.5
    assert len((made / "verdicts.jsonl").read_text().splitlines()) == 320


def test_the_reward_is_the_same_each_time(made: Path) -> None:
    first = opened(made).call(answers(TEXTS), context=Context())["score"]
    again = opened(made).call(answers(TEXTS), context=Context())["score"]
    assert first == again
    assert all(0 < value < 1 for value in first)
    dual = opened(made, student="dual").call(answers(TEXTS), context=Context())["score"]
    other = opened(made, student="interaction").call(answers(TEXTS), context=Context())["score"]
    assert dual != other


def test_it_sleeps_whole_and_scores_the_same(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = opened(made)
    asleep.scores_the_same(reward.sleeper, lambda: reward.call(answers(TEXTS), context=Context())["score"], monkeypatch)


def test_thresholds_of_zero_and_one_never_and_always_ask(made: Path, root: Path) -> None:
    judge = find(f"{root / 'judges.py'}:digits")
    exact = judge.target(answers(TEXTS), context=Context())
    always = opened(made, judge_below=1).call(answers(TEXTS), context=Context())
    assert always["score"] == exact
    assert always["asked"] == [1.0] * len(TEXTS)
    plain = opened(made).call(answers(TEXTS), context=Context())["score"]
    assert always["student"] == plain
    never = opened(made, judge_below=0.5).call(answers(TEXTS), context=Context())  # nobody is less sure than this
    assert never["score"] == plain
    assert never["asked"] == [0.0] * len(TEXTS)
    assert never["off"] == [None] * len(TEXTS)
    sure = [max(p, 1 - p) for p in plain]
    middle = sorted(sure)[3]
    some = opened(made, judge_below=middle).call(answers(TEXTS), context=Context())
    assert some["asked"] == [float(s < middle) for s in sure]
    assert some["score"] == [e if s < middle else p for e, p, s in zip(exact, plain, sure, strict=True)]
    assert some["off"] == [abs(e - p) if s < middle else None for e, p, s in zip(exact, plain, sure, strict=True)]


REFUSED = {
    "same": "all 32 verdicts are equal",
    "none": "the judge gave no verdict for 32 samples",
    "large": "verdicts are from 0 to 1",
}


@pytest.mark.parametrize("name", REFUSED)
def test_verdicts_that_teach_nothing_are_refused(
    name: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = f'rewards=[{{name: "judges.py:{name}", label: mine}}]'
    words = ["distill", str(root / "tiny.yaml"), change, "--out", str(tmp_path / "out"), "--samples", "32"]
    assert mmrl(*words) == 2
    assert "0 judges; name one with --reward (mine)" in capsys.readouterr().err
    assert mmrl(*words, "--reward", "mine") == 2
    assert REFUSED[name] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_question_about_many_pictures_is_many_prompts() -> None:
    def pairs(shades: int) -> Pairs:
        pictures = [Image.new("L", (4, 4), n % shades) for n in range(16)]
        sides = [Side("What is it?", (picture,)) for picture in pictures]
        return Pairs(sides, [Side("yes") for _ in sides], [n % 2 for n in range(16)], list(range(16)))

    check(pairs(8))
    with pytest.raises(UserError, match="are about 7 prompts, and 8 are needed"):
        check(pairs(7))


def test_students_at_chance_are_not_written(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["distill", str(root / "tiny.yaml"), 'rewards=[{name: "judges.py:odd"}]', "--reward", "odd"]
    assert mmrl(*words, "--out", str(tmp_path / "out"), "--samples", "160", "--passes", "3") == 2
    said = capsys.readouterr().err
    assert "no student orders held-out samples" in said
    assert "verdicts are kept: a call with --also" in said
    assert [file.name for file in (tmp_path / "out").iterdir()] == [
        "verdicts.jsonl"
    ]  # the judge need not be asked again
    assert len((tmp_path / "out" / "verdicts.jsonl").read_text().splitlines()) == 160


def test_what_cannot_be_read_is_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no distilled judge"):
        opened(tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(UserError, match="sha256"):
        load_students(broken)
    for options, why in (({"judge_below": 1.5}, "judge_below is 1.5"), ({"student": "best"}, "'best' is no student")):
        with pytest.raises(UserError, match=why):
            opened(made, **options)


@pytest.mark.slow
@pytest.mark.parametrize("controllers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_trains_on_it_asks_the_judge_and_resumes(
    controllers: int, made: Path, root: Path, tmp_path: Path
) -> None:
    if controllers > 1:
        pytest.importorskip("ray")
    reward = f"rewards=[{{name: distilled, options: {{path: {made}, judge_below: 0.9}}}}]"

    def trained(out: Path, *more: str) -> None:
        words = ["train", str(root / "tiny.yaml"), reward, f"controllers={controllers}", *more, "--out", str(out)]
        if controllers == 1:
            assert mmrl(*words) == 0
        else:  # Ray's actors are started from a process of their own
            subprocess.run([sys.executable, "-m", "mmrl", *words], check=True, cwd=root, timeout=300)

    trained(tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["reward/distilled/asked"] <= 1 for row in rows)
    if controllers > 1:  # how a run of several is resumed does not depend on its rewards
        return
    trained(tmp_path / "parts", "train.steps=1")
    trained(tmp_path / "parts", "--resume")
    again = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    kept = ("reward/mean", "reward/distilled/asked", "reward/distilled/off", "policy/loss", "optim/grad_norm")
    assert [[row.get(k) for k in kept] for row in again] == [[row.get(k) for k in kept] for row in rows]


@pytest.mark.slow
def test_a_run_is_distilled_again_with_the_verdicts_of_before(
    made: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"rewards=[{{name: distilled, options: {{path: {made}}}}}]"
    assert mmrl("train", str(root / "tiny.yaml"), reward, "--out", str(tmp_path / "run")) == 0
    capsys.readouterr()
    again = [
        "distill",
        str(tmp_path / "run"),
        "--samples",
        "64",
        "--passes",
        "4",
        "--backbone",
        "none",
        "--also",
        str(made),
        "--out",
        str(tmp_path / "two"),
    ]
    assert mmrl(*again, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["verdicts"], said["new_verdicts"]) == (384, 64)
    rows = [json.loads(line) for line in (tmp_path / "two" / "verdicts.jsonl").read_text().splitlines()]
    assert len({row["group"] for row in rows}) == 96
    assert json.loads((tmp_path / "two" / "distilled.json").read_text())["judge"]["name"].endswith("judges.py:digits")
