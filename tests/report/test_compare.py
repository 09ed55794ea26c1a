"""``mmrl compare``: runs side by side on their held-out measure."""

from __future__ import annotations

import json
import re

import pytest
import scipy
from PIL import Image
from typer.testing import CliRunner

import mmrl
from mmrl.cli import app
from mmrl.core.errors import UserError
from mmrl.logging.grids import write_samples
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import RunDir
from mmrl.report.charts import WIDTH
from mmrl.report.compare import compare_runs
from mmrl.report.compare_page import apart, sentences, write_comparison
from tests.support.verdict import accuracy, made


def run_of(folder, name, *shares, seed=0, **changes):
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return made(folder / name, accuracy(*shares), changes={"seed": seed, "name": name, **settings})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds of one setting, three of another, and one of a third."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, (low, high) in enumerate([(0.5, 0.75), (0.53, 0.8), (0.55, 0.78)]):
        run_of(folder, f"a{seed}", 0.25, low, seed=seed)
        run_of(folder, f"b{seed}", 0.25, high, seed=seed, optim__lr=1e-3)
    run_of(folder, "c", 0.25, 0.5, train__group_size=16)
    return folder


def named(folder, *names):
    return [folder / name for name in names]


def values(run):
    rows = [json.loads(line) for line in RunDir(run).heldout.read_text().splitlines()]
    return rows[-1]["reward/number/correct"]


def test_runs_that_differ_by_their_seed_are_one_group(runs):
    found = compare_runs(named(runs, "b1", "a0", "b0", "a1", "a2", "b2"))
    assert [[run.path.name for run in group.runs] for group in found.groups] == [["b1", "b0", "b2"], ["a0", "a1", "a2"]]
    assert [group.seeds for group in found.groups] == [[1, 0, 2], [0, 1, 2]]
    assert found.settings == {"optim.lr": [1e-3, 3e-4]}
    assert found.makes == "texts"


def test_groups_of_seeds_are_compared_over_seeds(runs):
    names = [[f"{of}{seed}" for seed in range(3)] for of in "ab"]
    found = compare_runs(named(runs, *names[0], *names[1]))
    first, second = found.groups
    a, b = ([values(runs / name) for name in of] for of in names)
    welch = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval()
    differs = found.difference(second)
    assert (differs.low, differs.high, differs.over) == (pytest.approx(welch.low), pytest.approx(welch.high), "seeds")
    assert differs.verdict == "higher"
    final, student = first.final(found.measure), scipy.stats.ttest_1samp(a, 0).confidence_interval()
    assert (final.low, final.high, final.count) == (pytest.approx(student.low), pytest.approx(student.high), 3)
    step, mean, std = first.curve(found.measure)[-1]
    assert (step, mean, std) == (10, pytest.approx(sum(a) / 3), pytest.approx(scipy.stats.tstd(a)))


def test_single_runs_are_compared_over_the_prompts_of_both(runs):
    found = compare_runs(named(runs, "c", "b0"))
    differs = found.difference(found.groups[1])
    assert (differs.over, differs.count, differs.verdict) == ("prompts", 64, "higher")
    assert differs.value == pytest.approx(values(runs / "b0") - values(runs / "c"))
    equal = compare_runs(named(runs, "c", "a0"))  # the same samples are right
    assert equal.difference(equal.groups[1]).verdict == "unclear"


def test_the_terminal_has_a_table_in_80_columns(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    paths = [str(path) for path in named(runs, "a0", "a1", "a2", "b0", "b1", "b2", "c")]
    out = tmp_path / "deep" / "page.html"
    done = CliRunner().invoke(app, ["compare", *paths, "--out", str(out)])
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.output.splitlines() if str(out) not in line]
    assert max(map(len, lines)) <= 80
    assert re.search(r"^ *A +a0 \+2 +0, 1, 2 +10 +0\.25 +0\.5\d +0\.\d\d to 0\.\d\d *$", done.output, re.MULTILINE)
    assert re.search(r"^B is higher than A: \+0\.25 \(0\.\d\d to 0\.\d\d\) over 6 seeds\.$", done.output, re.MULTILINE)
    assert re.search(r"^ *optim\.lr +0\.0003 +0\.001 +0\.0003 *$", done.output, re.MULTILINE)
    page = out.read_text()
    assert page.count("<figure") == 2
    assert "train.group_size" in page
    assert str(WIDTH) in page


@pytest.mark.parametrize(
    ("text", "first", "same", "other"),
    [
        ("0.4381", "0.4375", "0.43", "81"),
        ("0.44", "0.437", "0.4", "4"),
        ("0.440", "0.44", "0.440", ""),
        ("0.44", "0.440", "0.44", ""),
        ("0.5", "0.5", "0.5", ""),
        ("10.2", "9.2", "", "10.2"),
        ("-0.5", "0.5", "", "-0.5"),
        ("12", "10", "1", "2"),
        ("flow_grpo", "flow_dppo", "flow_grpo", ""),
        ("[1, 2]", "0.1", "[1, 2]", ""),
        ("-", "1", "-", ""),
    ],
)
def test_digits_that_differ_are_told_apart(text, first, same, other):
    assert apart(text, first) == (same, other)


def test_the_page_and_the_terminal_mark_the_digits_that_differ(runs, tmp_path, monkeypatch):
    found = compare_runs(named(runs, "a0", "b0", "b1"))
    html = write_comparison(found, tmp_path / "page.html").read_text()
    assert '<td class="n">0.25</td><td class="n">0.50</td>' in html, "the first row has no marks"
    assert '<td class="n">0.25</td><td class="n">0.<mark>77</mark></td>' in html
    assert "<td><code>0.0003</code></td><td><code>0.00<mark>1</mark></code></td>" in html
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = CliRunner().invoke(app, ["compare", *map(str, named(runs, "a0", "b0")), "--out", str(tmp_path / "x.html")])
    assert "0.\x1b[1;4m75\x1b[0m" in said.output


def test_json_has_the_same_and_nothing_else(runs, capfd):
    done = CliRunner().invoke(app, ["compare", *map(str, named(runs, "a0", "b0")), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout or capfd.readouterr().out)
    assert (found["measure"], found["baseline"], found["page"]) == ("reward/number/correct", "A", None)
    assert found["groups"][0]["difference"] is None
    assert found["groups"][1]["difference"]["verdict"] == "higher"
    assert found["groups"][1]["after"] == {"value": 0.75, **found["groups"][1]["after"]}
    assert found["groups"][1]["curve"] == [[0, 0.25, None], [10, 0.75, None]]
    assert found["settings"] == {"optim.lr": [3e-4, 1e-3]}


def test_the_same_prompts_stand_side_by_side(tmp_path):
    for name, colour in (("red", "#ff0000"), ("blue", "#0000ff")):
        path = run_of(tmp_path, name, 0.25, 0.75, sampling={"steps": 4, "frames": None}, optim__lr=len(name) / 1000)
        for step in (0, 10):
            shown = [Image.new("RGB", (8, 8), colour if step else "white")] * 2
            write_samples(RunDir(path), step, shown, ["a <b>", "c"], [{"number": 0.5}] * 2)
    found = compare_runs(named(tmp_path, "red", "blue"))
    assert found.makes == "pictures"
    page = write_comparison(found, tmp_path / "page.html").read_text()
    titles = re.findall(r'alt="([^"]*): a &lt;b&gt;"', page)
    assert titles == ["before training", "A, step 10", "B, step 10"]
    assert len(set(re.findall(r'src="(data:[^"]*)"', page))) == 3
    assert "<b>c" not in page


def bad(tmp_path):
    other = made(tmp_path / "other", {0: {"reward/else": [0.0] * 8}, 10: {"reward/else": [1.0] * 8}})
    both = accuracy(0.25, 0.75)
    for of in both.values():
        of["reward/else"] = [1.0] * 64
    shared = made(tmp_path / "shared", both, changes={"rewards": [{"name": "else", "weight": 1.0}]})
    pictures = run_of(tmp_path, "pictures", 0.25, 0.75, sampling={"steps": 4})
    prompts = run_of(tmp_path, "prompts", 0.25, 0.75, train__group_size=4)
    lines = RunDir(prompts).heldout_samples.read_text()
    RunDir(prompts).heldout_samples.write_text(re.sub(r'"p(\d)', r'"q\1', lines))
    empty = made(tmp_path / "empty", {})
    return other, shared, pictures, prompts, empty


def test_what_cannot_be_compared_is_named_with_the_edit(runs, tmp_path):
    other, shared, pictures, prompts, empty = bad(tmp_path)
    a = runs / "a0"
    for paths, measure, said in (
        ([], None, "needs two runs or more, and got 0"),
        ([a], None, f"the report of {a} shows one run"),
        ([a, a], None, "is given twice"),
        ([a, tmp_path], None, f"there is no run in {tmp_path}"),
        ([a, pictures], None, "different modalities"),
        ([a, empty], None, "has no held-out evaluation to compare; set eval.every"),
        ([a, other], None, "give eval.rewards the same reward in all"),
        ([a, shared], None, r"give one that all have: --measure reward/number/correct \(or reward/number\)"),
        ([a, shared], "reward/x", "has no held-out reward/x; give one that all have"),
        ([a, prompts], None, "was evaluated on other prompts"),
    ):
        with pytest.raises(UserError, match=said):
            compare_runs(paths, measure)
    assert compare_runs([a, shared], "reward/number").measure == "reward/number"


def test_a_measure_by_rewards_with_other_options_is_said_not_to_be_the_same(runs, tmp_path, capsys):
    def judged(name, rubric, lr, where="rewards"):
        reward = {"name": "answer:number", "label": None, "weight": 1.0, "options": {"rubric": rubric}}
        changes = {"optim__lr": lr, where: [reward], **({} if where == "rewards" else {"rewards": []})}
        return run_of(tmp_path, name, 0.25, 0.75, **changes)

    first, same = judged("first", "Is it right?", 1e-4), judged("same", "Is it right?", 1e-3)
    other, measured = judged("other", "Is it kind?", 1e-4), judged("measured", "Is it kind?", 1e-4, "eval__rewards")
    assert not [line for line in sentences(compare_runs([first, same])) if "measure" in line]
    for paths, names in (([first, same, other], "C"), ([first, other, measured], "B and C")):
        line = next(sentences(compare_runs(paths)))
        assert line.startswith(f"Not the same measure: number has other options in {names} than in A, ")


def test_from_python_the_messages_name_arguments(runs, tmp_path):
    _, shared, *_ = bad(tmp_path)
    with pytest.raises(UserError, match=r"all have: measure='reward/number/correct' \(or reward/number\)"):
        mmrl.compare(runs / "a0", shared)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give another file with out="):
        mmrl.compare(runs / "a0", shared, measure="reward/number", out=tmp_path / "file" / "page.html")


def test_runs_without_figures_of_samples_are_compared_without_an_interval(tmp_path):
    paths = [run_of(tmp_path, "x", 0.25, 0.5), run_of(tmp_path, "y", 0.25, 0.75, optim__lr=1e-3)]
    RunDir(paths[0]).heldout_samples.unlink()
    found = compare_runs(paths)
    page = write_comparison(found, tmp_path / "page.html").read_text()
    assert "B against A: +0.25, without an interval: a run kept no figures of single samples." in page


def test_a_run_that_ended_earlier_is_compared_at_the_steps_of_all(tmp_path):
    paths = [run_of(tmp_path, f"s{seed}", 0.25, 0.5, 0.75, seed=seed) for seed in range(2)]
    RunDir(paths[0]).truncate_after(10)
    paths.append(run_of(tmp_path, "z", 0.25, 0.5, optim__lr=1e-3))
    found = compare_runs(paths)
    assert [step for step, *_ in found.groups[0].curve(found.measure)] == [0, 10]
    assert "10 to 20" in write_comparison(found, tmp_path / "page.html").read_text()
    with MetricsLog(RunDir(paths[2]).heldout) as log:
        log.write(
            20, {"reward/number": float("nan"), "reward/number/correct": float("nan"), "samples": 64, "dropped": 64}
        )
    assert compare_runs(paths).groups[1].at(-1, found.measure) == [0.5]


def test_python_has_the_figures_of_the_command(runs, tmp_path, capfd):
    names = ["a0", "a1", "b0", "b1"]
    done = CliRunner().invoke(app, ["compare", *map(str, named(runs, *names)), "--json"])
    groups = json.loads(done.stdout or capfd.readouterr().out)["groups"]
    found = mmrl.compare(str(runs / "a0"), *named(runs, *names[1:]), out=tmp_path / "page.html")
    table = found.table
    assert table["label"] == ["A", "B"]
    assert table["before"] == [of["before"] for of in groups]
    assert table["after"] == [of["after"]["value"] for of in groups]
    assert (table["low"][1], table["high"][1]) == (groups[1]["after"]["low"], groups[1]["after"]["high"])
    assert table["difference"] == [None, groups[1]["difference"]["value"]]
    assert table["verdict"] == [None, groups[1]["difference"]["verdict"]]
    assert "B" in str(found)
    assert found.page == tmp_path / "page.html"
    assert found.page.is_file()
    opened = mmrl.Run(runs / "b0", mmrl.Recipe.model_construct())
    assert mmrl.compare(runs / "a0", opened).table["run"] == ["a0", "b0"]
    assert mmrl.compare(*named(runs, "a0", "b0")).page is None
    with pytest.raises(mmrl.UserError, match="needs two runs or more"):
        mmrl.compare(runs / "a0")
