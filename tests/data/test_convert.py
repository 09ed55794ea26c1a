"""``mmrl data convert``: sets of prompts from the files that their authors distribute. The records are written here."""

import json

import pytest

import mmrl
from mmrl.cli import app
from mmrl.core.errors import UserError
from mmrl.data.convert import convert
from mmrl.rewards.geneval import read_wishes

jsonl = mmrl.load("datasets", "jsonl:prompts")
WISHES = [
    {
        "tag": "counting",
        "include": [{"class": "cup", "count": 3}],
        "exclude": [{"class": "cup", "count": 4}],
        "prompt": "three cups",
    },
    {
        "tag": "position",
        "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}],
        "prompt": "a dog left of a cat",
    },
]


def test_geneval_is_converted_to_what_its_reward_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = [{"prompt": "no wishes"}, {"tag": "colors", "include": [{"class": "cat"}], "prompt": "a cat"}]
    source = tmp_path / "evaluation_metadata.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in [*WISHES, *bad]))
    code = app(["data", "convert", "geneval", str(source)], standalone_mode=False)
    said = capsys.readouterr().out
    assert code == 1
    assert "geneval.jsonl: 2 prompts; licence of the source: MIT" in said
    assert "bad  evaluation_metadata.jsonl:3: has no tag and include" in said
    found = jsonl("train", path=str(tmp_path / "geneval.jsonl"), heldout=0)
    assert [p.text for p in found] == ["three cups", "a dog left of a cat"]
    for prompt, record in zip(found, WISHES, strict=True):
        assert read_wishes(prompt.meta) == read_wishes(record)
        assert prompt.meta["exclude"] == record.get("exclude", [])


@pytest.mark.parametrize(
    ("name", "file", "text", "found"),
    [
        (
            "partiprompts",
            "p.tsv",
            'Prompt\tCategory\tChallenge\tNote\na cat\tAnimals\tBasic\t\n"H I" on a wall\tArts\tComplex\tquotes\n',
            [
                ("a cat", {"category": "Animals", "challenge": "Basic"}),
                ('"H I" on a wall', {"category": "Arts", "challenge": "Complex", "note": "quotes"}),
            ],
        ),
        ("drawbench", "d.csv", "Prompts,Category\na red car,Colors\n", [("a red car", {"category": "Colors"})]),
        ("drawbench", "d.csv", 'prompts,category\n"one, two",Counting\n', [("one, two", {"category": "Counting"})]),
    ],
)
def test_tables_are_converted(tmp_path, name, file, text, found):
    (tmp_path / file).write_text(text)
    n, bad = convert(name, tmp_path / file, tmp_path / "out.jsonl")
    assert (n, bad) == (text.count("\n") - 1, [])
    prompts = jsonl("train", path=str(tmp_path / "out.jsonl"), heldout=0)
    assert [(p.text, p.meta) for p in prompts] == found


def test_what_cannot_be_converted_is_refused_with_the_edit(tmp_path):
    (tmp_path / "p.tsv").write_text("Text\na cat\n")
    (tmp_path / "there.jsonl").write_text("mine")
    out = tmp_path / "out.jsonl"
    cases = [
        (
            ("coco", tmp_path / "p.tsv", out),
            "there is no set of prompts 'coco'; there are geneval, partiprompts, drawbench",
        ),
        (("partiprompts", tmp_path / "gone.tsv", out), "is no file; download it from"),
        (("partiprompts", tmp_path / "p.tsv", out), "has no prompt of partiprompts"),
        (("partiprompts", tmp_path / "p.tsv", tmp_path / "there.jsonl"), "exists; name another file"),
    ]
    for arguments, says in cases:
        with pytest.raises(UserError, match=says):
            convert(*arguments)
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert not out.exists()
