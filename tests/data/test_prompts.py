"""Prompt files: what is read, what is skipped and named, what is refused."""

import gc
import json
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.data.loading import load_prompts

prompts = mmrl.load("datasets", "prompts:prompts")
module = mmrl.load("datasets", "prompts")


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_other_tests():
    """A socket that an earlier test left warns when it is collected: here, before warnings are errors."""
    gc.collect()


@pytest.fixture(autouse=True)
def no_warnings_unless_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def write(tmp_path, text, name="p.txt"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_text_file_is_a_prompt_a_line_and_the_last_are_held_out(tmp_path):
    path = write(tmp_path, "\ufeffa cat \n\n a dog\r\ntwo birds, ünïcode\n")
    train, heldout = prompts("train", path=path, heldout=1), prompts("heldout", path=path, heldout=1)
    assert [p.text for p in train] == ["a cat", "a dog"]
    assert [p.text for p in heldout] == ["two birds, ünïcode"]
    assert [p.id for p in train] == ["p:1", "p:3"]  # the line, so that a prompt can be found again


def test_json_lines_carry_ids_and_what_a_reward_may_know(tmp_path):
    lines = [{"prompt": "a cat", "id": 7, "meta": {"count": 1}}, {"text": "a dog"}]
    path = write(tmp_path, "\n".join(map(json.dumps, lines)), "p.jsonl")
    first, second = prompts("train", path=path, heldout=0)
    assert (first.id, first.text, first.meta) == ("7", "a cat", {"count": 1})
    assert (second.id, second.text, second.meta) == ("p:2", "a dog", {})


@given(n=st.integers(2, 60), heldout=st.one_of(st.integers(1, 59), st.floats(0.01, 0.95)))
@settings(deadline=None, max_examples=60)
def test_the_splits_are_disjoint_and_cover_the_file(tmp_path_factory, n, heldout):
    path = write(tmp_path_factory.mktemp("p"), "\n".join(f"prompt {i}" for i in range(n)))
    try:
        train, held = (prompts(s, path=path, heldout=heldout) for s in ("train", "heldout"))
    except UserError:
        assert heldout >= n or heldout > (n - 1) / n
        return
    assert [p.text for p in train + held] == [f"prompt {i}" for i in range(n)]
    assert train
    assert len(held) == heldout if heldout >= 1 else len(held) - 1 < heldout * n <= len(held)


def test_nothing_held_out_gives_the_whole_file_to_either_split(tmp_path):
    path = write(tmp_path, "a\nb\n")
    assert prompts("train", path=path, heldout=0) == prompts("heldout", path=path, heldout=0)
    assert len(prompts("train", path=path, heldout=0)) == 2


BAD = [
    ("not json", "is not JSON"),
    ("[1]", "is a JSON list"),
    ('{"description": "x"}', 'no text under "prompt"'),
    ('{"prompt": 3}', 'no text under "prompt"'),
    ('{"prompt": "  "}', "is empty"),
    ('{"prompt": "x", "meta": []}', '"meta" is not an object'),
    ('{"prompt": "x", "id": []}', '"id" is neither'),
    ('{"prompt": "a\\u0000b"}', "control characters"),
    ('{"prompt": "again", "id": "0"}', "already taken"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_line_that_cannot_be_read_is_skipped_and_named(tmp_path, line, reason):
    good = [json.dumps({"prompt": f"p{i}", "id": str(i)}) for i in range(20)]
    path = write(tmp_path, "\n".join([*good[:5], line, *good[5:]]), "p.jsonl")
    with pytest.warns(module.SkippedLines, match=r"skipped 1 of 21 lines \(line 6: .*" + re.escape(reason)):
        found = prompts("train", path=path, heldout=0)
    assert [p.text for p in found] == [f"p{i}" for i in range(20)]


def test_bytes_that_are_no_utf8_spoil_one_line_only(tmp_path):
    path = write(tmp_path, b"\n".join([b"p%d" % i for i in range(15)] + [b"caf\xe9"]))
    with pytest.warns(module.SkippedLines, match="line 16: is not UTF-8"):
        assert len(prompts("train", path=path, heldout=0)) == 15


def test_past_a_tenth_the_file_is_refused(tmp_path):
    lines = [json.dumps({"prompt": f"p{i}"}) for i in range(18)]
    with pytest.warns(module.SkippedLines, match="skipped 2 of 20"):
        prompts(path=write(tmp_path, "\n".join([*lines, "x", "y"]), "a.jsonl"))
    with pytest.raises(UserError, match=r"3 of 21 lines .* more than 10% \(line 19: is not JSON"):
        prompts(path=write(tmp_path, "\n".join([*lines, "x", "y", "z"]), "b.jsonl"))


def test_a_prompt_that_comes_twice_is_taken_once(tmp_path):
    """Else a training prompt could stand among the held-out ones."""
    path = write(tmp_path, "a\nb\nc\na\n")
    with pytest.warns(module.SkippedLines, match=r"1 prompts came before .*lines 4"):
        held = prompts("heldout", path=path, heldout=1)
    assert [p.text for p in held] == ["c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.txt"}, "put your prompts there"),
        ({"path": "p.csv"}, "neither .txt"),
        ({"heldout": 2}, "leaves none to train on"),
        ({"heldout": -1}, "give a number"),
        ({"heldout": 1.5}, "is whole"),
        ({"heldout": True}, "give a number"),
        ({"heldout": float("nan")}, "give a number"),
        ({"split": "test"}, "has 'train' and 'heldout'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_edit(tmp_path, options, message):
    path = write(tmp_path, "a\nb\n")
    with pytest.raises(UserError, match=re.escape(message)):
        prompts(**({"path": path, "heldout": 1} | options))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no prompts"):
        prompts(path=write(tmp_path, "\n \n"))


def test_a_relative_path_starts_at_the_recipe_and_is_absolute_in_the_run_directory(tmp_path, monkeypatch):
    """The run directory's recipe must load from any folder (resume, evaluation)."""
    shipped = Path(__file__).resolve().parents[2] / "pipelines" / "diffusion" / "recipes" / "shapes-lora.yaml"
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.parent.mkdir()
    text = shipped.read_text().replace("../models/shapes-sd3", "stand-in/model")
    recipe.write_text(text)
    write(recipe.parent, "a\nb\nc\n", "mine.txt")
    monkeypatch.chdir(tmp_path)
    options = "{path: mine.txt, heldout: 1}"
    loaded = load_recipe([recipe], ["data.name=prompts", f"data.train={options}", f"data.heldout={options}"])
    assert [p.text for p in load_prompts(loaded.recipe, "heldout")] == ["c"]
    for split in ("train", "heldout"):
        assert loaded.resolved()["data"][split]["path"] == str(recipe.parent / "mine.txt")


def test_the_shipped_example_is_clean():
    example = Path(__file__).resolve().parents[2] / "pipelines" / "diffusion" / "recipes" / "prompts-example.txt"
    assert len(prompts("train", path=str(example), heldout=8)) == 40
    assert len(prompts("heldout", path=str(example), heldout=8)) == 8
