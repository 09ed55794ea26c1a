"""``tools/freeze.py``: what it compares, through the map of renamed keys, and what it refuses."""

import contextlib
import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def record(tools, tmp_path_factory):
    """Of a real run, one step of the smallest recipe."""
    folder = tmp_path_factory.mktemp("freeze")
    log = folder / "log.txt"
    log.touch()
    (case,) = [case for case in tools[0].cases(ROOT, str)[0] if case.name == "sums-reward"]
    words = [*case.overrides, "train.steps=1", "eval.every=1", "eval.samples=4", "train.prompts_per_step=2"]
    before = sys.argv
    try:
        found = tools[2].run(case.recipe, words, ROOT, folder / "run", log)
    finally:
        sys.argv = before
    assert "error" not in found, found
    assert not (folder / "run").exists()
    return found


@pytest.fixture
def renamed(tools):
    """A map with these entries, written as in the file."""

    def make(**sections):
        return tools[1].Renames([tools[1].Rename(s, *pair) for s, pairs in sections.items() for pair in pairs.items()])

    return make


def changed(record, section, name, value=None, now=None):
    """A copy in which ``name`` has another value, or another name, or is not there."""
    found = copy.deepcopy(record)
    before = found[section].pop(name)
    if value is not None or now is not None:
        found[section][now or name] = before if value is None else value
    return found


def compare(tools, base, new, renames=None, **options):
    return tools[1].compare({"sums": base}, {"sums": new}, renames or tools[1].Renames(), **options)


def test_a_record_has_everything_that_a_run_computed(record):
    assert record["metrics"]["optim/grad_norm"]["step 1"] > 0
    assert [*record["heldout"]["samples"]] == ["step 0", "step 1"]
    assert record["recipe"]["train.steps"] == 1
    assert record["recipe"]["model.path"] == "<tree>/pipelines/llm/models/sums-qwen3"
    assert record["state"]["policy.updates"] == 1
    weights = [name for name in record["tensors"] if name.startswith("weights/")]
    assert len(record["tensors"]) > 2 * len(weights) > 0  # and both moments of each
    assert all(text.startswith("float32 [") for text in record["tensors"].values())


def test_a_record_equals_itself(tools, record):
    found = compare(tools, record, copy.deepcopy(record))
    assert found.equal
    assert found.differences == {"sums": []}


def test_one_bit_of_a_metric_differs(tools, record, capsys):
    value = record["metrics"]["optim/grad_norm"]["step 1"]
    after = torch.nextafter(torch.tensor(value, dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64)).item()
    found = compare(tools, record, changed(record, "metrics", "optim/grad_norm", {"step 1": after}))
    (one,) = found.differences["sums"]
    assert (one.section, one.name) == ("metrics", "optim/grad_norm, step 1")
    assert (one.base, one.new) == (repr(value), repr(after))
    assert tools[0].print_compared(found, {"sums": record}) == 1
    printed = capsys.readouterr().out
    assert f"    base  {value!r}\n    new   {after!r}\n" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_zero_with_a_sign_and_a_number_that_is_whole_differ(tools):
    for one, other in ((0.0, -0.0), (1, 1.0), (None, 0.0)):
        found = compare(tools, {"metrics": {"a": {"step 1": one}}}, {"metrics": {"a": {"step 1": other}}})
        assert len(found.differences["sums"]) == 1


def test_a_row_that_is_written_twice_differs(tools, tmp_path):
    row = json.dumps({"step": 1, "reward/mean": 0.5}) + "\n"
    (tmp_path / "once").write_text(row)
    (tmp_path / "twice").write_text(row * 2)
    once, twice = ({"metrics": tools[2].by_step(tmp_path / name)} for name in ("once", "twice"))
    found = compare(tools, once, twice).differences["sums"]
    assert [(d.name, d.base, d.new) for d in found] == [
        ("step, step 1 again", None, "1"),
        ("reward/mean, step 1 again", None, "0.5"),
    ]


def test_a_tensor_is_missing_or_has_another_name(tools, record):
    name = next(name for name in record["tensors"] if name.startswith("weights/"))
    (gone,) = compare(tools, record, changed(record, "tensors", name)).differences["sums"]
    assert (gone.name, gone.new) == (name, None)
    assert "(not there)" in "\n".join(gone.lines())
    moved, there = compare(tools, record, changed(record, "tensors", name, now="policy/first")).differences["sums"]
    assert "policy/first" in moved.hint  # what the map should say
    assert (there.name, there.base) == ("policy/first", None)


def test_every_bit_of_a_tensor_counts(tools):
    digest = tools[2].digest
    one = torch.zeros(3, 2)
    assert digest(one) == digest(torch.zeros(2, 3).t().contiguous())
    other = one.clone()
    other[2, 1] = -0.0
    different = [one, other, torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, 2).int()]
    assert len({digest(t) for t in different}) == len(different)
    assert digest(torch.tensor(3)) != digest(torch.tensor(4))
    assert digest(torch.tensor(True)).startswith("bool []")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_in_shards_is_read_whole(tools, tmp_path):
    """As the ranks of a run write it: pieces of a tensor in files of their own."""
    from torch.distributed import checkpoint as dcp

    whole = {"weights/a": torch.arange(6.0).view(3, 2), "optimizer/a/step": torch.tensor(3.0)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(whole, storage_writer=writer, no_dist=True)
    assert tools[2].tensors(tmp_path) == {name: tools[2].digest(tensor) for name, tensor in whole.items()}


def test_renamed_keys_are_equal_through_the_map(tools, record, renamed):
    renames = renamed(
        metrics={"optim/grad_norm": "gradient/norm"},
        tensors={"weights/*": "policy/weights/*"},
        recipe={"train.*": "training.*", "training.steps": "training.updates"},
        state={"policy.updates": "trainer.updates"},
    )
    new = changed(record, "metrics", "optim/grad_norm", now="gradient/norm")
    new = changed(new, "state", "policy.updates", now="trainer.updates")
    new["tensors"] = {re.sub("^weights/", "policy/weights/", n): t for n, t in new["tensors"].items()}
    new["recipe"] = {re.sub("^train[.]", "training.", n): t for n, t in new["recipe"].items()}
    new = changed(new, "recipe", "training.steps", now="training.updates")
    assert len(compare(tools, record, new).differences["sums"]) > 100
    found = compare(tools, record, new, renames)
    assert found.equal, (found.problems, found.differences)


def test_heldout_rows_have_the_names_of_metrics(tools, record, renamed):
    new = changed(record, "heldout", "samples", now="count")
    assert compare(tools, record, new, renamed(metrics={"samples": "count"})).equal


def test_a_value_that_changed_is_found_under_its_new_name(tools, record, renamed):
    new = changed(record, "state", "policy.updates", 2, now="updates")
    (one,) = compare(tools, record, new, renamed(state={"policy.updates": "updates"})).differences["sums"]
    assert (one.name, one.base, one.new) == ("updates", "1", "2")


def test_an_entry_that_names_nothing_is_reported(tools, record, renamed):
    typing_error = renamed(metrics={"optim/gradnorm": "gradient/norm"})
    (problem,) = compare(tools, record, record, typing_error).problems
    assert "metrics: optim/gradnorm -> gradient/norm: the base has no optim/gradnorm" in problem
    assert compare(tools, record, record, typing_error, whole=False).equal  # a recipe that was not run may have it
    wrong_end = renamed(metrics={"optim/grad_norm": "gradient/nrm"})
    found = compare(tools, record, changed(record, "metrics", "optim/grad_norm", now="gradient/norm"), wrong_end)
    assert "nothing has this new name; correct or remove it" in found.problems[0]
    assert len(found.differences["sums"]) == 2


def test_two_values_cannot_have_one_name(tools, record, renamed):
    found = compare(tools, record, record, renamed(metrics={"optim/lr": "optim/grad_norm"}))
    assert "calls two values optim/grad_norm" in found.problems[0]


def test_measured_values_may_differ_and_must_be_there(tools, record):
    assert compare(tools, record, changed(record, "metrics", "time/train", {"step 1": 99.0})).equal
    assert compare(tools, record, changed(record, "state", "cpu_seconds", 99.0)).equal
    assert not compare(tools, record, changed(record, "metrics", "time/train")).equal
    assert compare(tools, record, changed(record, "state", "balance.workload.measured[0][1]", 99.0)).equal
    assert not compare(tools, record, changed(record, "state", "balance.workload.measured[0][0]", [9.0])).equal


def test_entries_that_the_base_has_are_not_applied_to_it(renamed):
    base = renamed(recipe={"train.steps": "train.updates"})
    now = renamed(recipe={"train.steps": "train.updates", "train.updates": "training.updates"})
    assert now.old_name("recipe", "training.updates") == "train.steps"
    assert now.since(base).old_name("recipe", "training.updates") == "train.updates"


def test_the_map_in_the_repository_can_be_read(tools):
    tools[1].Renames.read(ROOT / "tools" / "freeze_renames.yaml")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("metrics: {a: b", "is not YAML"),
        ("- a", "has no sections; write the sections metrics, recipe, state, tensors"),
        ("metric: {a: b}", "has a section 'metric'; write the sections"),
        ("metrics: [a]", "write {}"),
        ("metrics: {a/*: b}", "with as many * in each"),
        ("metrics: {on: b}", "write two names in quotes"),
    ],
)
def test_a_map_that_is_wrong_is_refused(tools, tmp_path, text, why):
    path = tmp_path / "renames.yaml"
    path.write_text(text)
    with pytest.raises(tools[1].RefusedError) as refused:
        tools[1].Renames.read(path)
    assert why in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_run_that_fails_is_never_equal(tools, record):
    failed = {"error": {"why": "error: train.steps: expected more"}}
    one = compare(tools, record, failed)
    assert not one.equal
    assert "train.steps: expected more" in "\n".join(one.differences["sums"][0].lines())
    both = compare(tools, failed, failed)
    assert not both.equal
    assert "ran on neither" in both.problems[0]
    assert not tools[1].compare({"sums": record}, {}, tools[1].Renames()).equal


def test_a_recipe_that_cannot_run_says_why(tools, tmp_path):
    log = tmp_path / "log.txt"
    before = sys.argv
    try:
        with log.open("w") as file, contextlib.redirect_stderr(file):
            found = tools[2].run("sums", ["train.stps=3"], ROOT, tmp_path / "run", log)
    finally:
        sys.argv = before
    assert [*found] == ["error"]
    assert "train.stps" in found["error"]["why"]


def test_recipes_are_found_by_what_they_need(tools):
    found, left_out = tools[0].cases(ROOT, str)
    recipes = {case.name for case in found if ":" not in case.name}
    assert recipes | left_out.keys() == {path.stem for path in ROOT.glob("pipelines/*/recipes/*.yaml")}
    assert {"shapes-full", "moving-shapes", "sums-capo", "scenes-judge", "clips"} <= recipes
    assert "sd35-medium" in left_out
    for case in found:
        assert yaml.safe_load(Path(case.recipe).read_text()).get("device", "cpu") == "cpu"
    assert {case.name for case in found if ":" in case.name} == {
        f"{recipe}:{spread}=2" for recipe in ("shapes-lora", "sums", "scenes") for spread in ("controllers", "devices")
    }


def test_a_base_gets_overrides_by_their_old_names(tools, renamed, tmp_path):
    folder = tmp_path / "pipelines" / "llm"
    (folder / "recipes").mkdir(parents=True)
    (folder / "models" / "tiny").mkdir(parents=True)
    shipped = "policy: {folder: ../models/tiny}\ntrain: {group: 16, steps: 9}\nrewards: [{name: answer}]\n"
    (folder / "recipes" / "mine.yaml").write_text(shipped)
    (folder / "recipes" / "vast.yaml").write_text("policy: {folder: hub/vast}\n")
    now = {
        "policy.folder": "model.path",
        "train.group": "train.group_size",
        "train.rounds": "train.steps",
        "rewards[*].patience": "rewards[*].timeout",
    }
    old = renamed(recipe=now).old_name
    (case,), left_out = tools[0].cases(tmp_path, lambda key: old("recipe", key))
    assert left_out == {"vast": "its model hub/vast is not shipped"}
    assert {"train.rounds=3", "train.group=4", "rewards[0].patience=600"} <= set(case.overrides)
    assert not [words for words in case.overrides if words.startswith(("train.steps", "train.group_size"))]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--base", "no-such-branch"], "--base: 'no-such-branch' is no revision"),
        (["--base", "HEAD", "--only", "summs"], "there is no CPU recipe 'summs'; give some of clips, "),
        (["--only", "sums:devices=3"], "there is no CPU recipe 'sums:devices=3'"),
        (["--out", "nowhere/frozen.json"], "nowhere; make it, or name another file"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tools, words, why, capsys):
    assert tools[0].main(words) == 2
    assert why in capsys.readouterr().err


@pytest.mark.slow
def test_head_beside_the_working_tree(tools, tmp_path, capsys):
    out = tmp_path / "frozen.json"
    code = tools[0].main(["--base", "HEAD", "--only", "sums-reward", "--out", str(out)])
    printed = capsys.readouterr()
    assert "base  1/1  sums-reward" in printed.err
    edited = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if not edited.stdout:  # what differs by an edit is for its author to judge
        assert code == 0, printed.out
    assert (re.search("^sums-reward +equal", printed.out, re.MULTILINE) is not None) == (code == 0)
    assert json.loads(out.read_text())["sums-reward"]["metrics"]["time/step"] == dict.fromkeys(
        ("step 1", "step 2", "step 3"), "(measured)"
    )
