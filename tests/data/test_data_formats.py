"""Formats that users of TRL, verl and diffusers bring: CSV, saved data sets, the hub's layout, base64, preferences."""

import base64
import io
import json
from pathlib import Path

import datasets
import pytest
from PIL import Image

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.config.names import is_hub_data
from mmrl.core.errors import UserError
from mmrl.core.media import read_bytes
from mmrl.data.loading import load_prompts
from mmrl.data.preferences import BETTER, WORSE, TieError, as_pair
from mmrl.data.record_media import media_from

jsonl = mmrl.load("datasets", "jsonl:prompts")
folder = mmrl.load("datasets", "folder:prompts")
RED, BLUE = (225, 45, 45), (60, 95, 235)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache" / "hf"))


def png(colour=RED) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 12), colour).save(file, "PNG")
    return file.getvalue()


def lines(path: Path, *records) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def test_csv_and_tsv_are_read_record_by_record(tmp_path):
    text = '\ufeffquestion,answer,level\n"2 + 2,\nand ""2""?",4,\n\n  \nwhy?,because,3\n'
    (tmp_path / "q.csv").write_text(text)
    (tmp_path / "q.tsv").write_text("prompt\tanswer\na, b?\t1\n")
    a, b = jsonl("train", path=str(tmp_path / "q.csv"), heldout=0, meta=["level"])
    assert (a.id, a.text, a.meta) == ("q:2", '2 + 2,\nand "2"?', {"answer": "4", "level": None})
    assert (b.id, b.text, b.meta) == ("q:6", "why?", {"answer": "because", "level": "3"})
    assert jsonl("train", path=str(tmp_path / "q.tsv"), heldout=0)[0].text == "a, b?"


def test_bad_records_of_csv_are_named_and_the_rest_is_read(tmp_path):
    (tmp_path / "x.png").write_bytes(png())
    rows = [b"prompt,image", b"a,x.png", b"b,x.png,more", b"\xff,x.png", b"c,../x.png", b",x.png", b'"d', b'e",x.png']
    (tmp_path / "q.csv").write_bytes(b"\n".join(rows))
    found = jsonl("train", path=str(tmp_path / "q.csv"), heldout=0)
    assert [(p.id, p.text) for p in found] == [("q:2", "a"), ("q:7", "d\ne")]
    whys = ["has 3 values, and the header 2 columns", "is not UTF-8", "is outside", "has no text"]
    assert [(r.where, w in r.why) for r, w in zip(found.bad, whys, strict=True)] == [
        (f"q.csv:{n}", True) for n in range(3, 7)
    ]
    (tmp_path / "twice.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(UserError, match="two columns 'prompt'"):
        jsonl("train", path=str(tmp_path / "twice.csv"))


def test_an_unclosed_quote_costs_what_it_swallows(tmp_path):
    (tmp_path / "q.csv").write_text('prompt,answer\na,1\n"b,2\nc,3\n')
    found = jsonl("train", path=str(tmp_path / "q.csv"), heldout=0)
    assert [p.text for p in found] == ["a"]
    assert [str(bad).startswith("q.csv:3: is not CSV") for bad in found.bad] == [True]


def test_folders_of_save_to_disk_are_read_with_their_splits(tmp_path):
    rows = {"prompt": ["a", "b"], "image": [png(), png(BLUE)]}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "both")
    found = jsonl("train", path=str(tmp_path / "one"), heldout=0)
    assert [(p.text, read_bytes(p.media[0])) for p in found] == [("a", png()), ("b", png(BLUE))]
    assert [p.text for p in jsonl("train", path=str(tmp_path / "both"), heldout=0, source_split="test")] == ["b"]
    with pytest.raises(UserError, match="has no split 'val'; it has train, test"):
        jsonl("train", path=str(tmp_path / "both"), source_split="val")


def test_a_name_of_the_hub_is_a_data_set_with_split_and_subset(tmp_path, monkeypatch):
    """Of a folder with the hub's layout: the same reader of ``datasets``, without its downloads."""
    home = tmp_path / "org" / "sums" / "data"
    home.mkdir(parents=True)
    for split, texts in (("train", "abcd"), ("test", "xy")):
        datasets.Dataset.from_dict({"question": list(texts)}).to_parquet(home / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    given = ["data={name: org/sums, train: {split: train}, heldout: {split: test}}"]
    loaded = load_recipe(["sums"], given)
    texts = {s: [p.text for p in load_prompts(loaded.recipe, s)] for s in ("train", "heldout")}
    assert texts == {"train": list("abcd"), "heldout": list("xy")}
    # One split for both is divided; no record is on both sides.
    loaded = load_recipe(["sums"], ["data={name: org/sums, train: {heldout: 1}, heldout: {heldout: 1}}"])
    texts = {s: [p.text for p in load_prompts(loaded.recipe, s)] for s in ("train", "heldout")}
    assert sorted(texts["train"] + texts["heldout"]) == list("abcd")
    assert len(texts["heldout"]) == 1
    loaded = load_recipe(["sums"], ["data={name: org/sums, train: {split: val}}"])
    with pytest.raises(UserError, match="has no split 'val'; it has train, test"):
        load_prompts(loaded.recipe, "train")
    (home.parent / "sums.py").write_text("raise SystemExit('code of the data set was run')")
    with pytest.raises(UserError, match="scripts are no longer supported"):
        jsonl("train", path="org/sums")


def test_a_hub_that_cannot_be_reached_says_how_to_go_on(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"org/gone cannot be read.*hf download --repo-type dataset org/gone"):
        jsonl("train", path="org/gone")


def test_only_names_with_a_slash_are_of_the_hub():
    assert is_hub_data("openai/gsm8k")
    assert not any(map(is_hub_data, ("sums", "mine.py:prompts", "a/mine.py", "/org/name", "../name", "a/b/c")))


def test_base64_is_a_picture_and_a_path_stays_one(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    plain = base64.b64encode(png(BLUE)).decode()
    wrapped = base64.encodebytes(png(BLUE)).decode()
    records = [
        {"prompt": str(n), "image": x} for n, x in enumerate((plain, wrapped, "a.png", plain[:90] + "!", "A" * 90))
    ]
    found = jsonl("train", path=lines(tmp_path / "q.jsonl", *records), heldout=0)
    assert [read_bytes(p.media[0]) for p in found] == [png(BLUE), png(BLUE), png()]
    assert ["base64 cannot be decoded" in found.bad[0].why, "No such file" in found.bad[1].why] == [True, True]


def test_an_address_of_a_file_is_its_path(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a b.png")
    for said in (f"file://{tmp_path}/a b.png", f"file://{tmp_path}/a%20b.png", "file://a b.png", "a b.png"):
        assert media_from("image", {"image": said}, str(tmp_path)).path == str(tmp_path.resolve() / "a b.png")
    for said in ("file:///etc/a.png", "file://..%2Fa.png", "https://a.b/c.png", "s3://a/c.png"):
        with pytest.raises(ValueError, match=r"is outside|is an address"):
            media_from("image", said, str(tmp_path))


def test_columns_are_mapped_in_one_option(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    record = {
        "q": "why?",
        "extra": {"truth": "so"},
        "difficulty": 3,
        "photo": "a.png",
        "prompt": "not me",
        "answer": "no",
    }
    columns = {"prompt": "q", "answer": "extra.truth", "image": "photo", "level": "difficulty"}
    path = lines(tmp_path / "q.jsonl", record)
    (found,) = jsonl("train", path=path, heldout=0, columns=columns)
    assert (found.text, found.meta, len(found.media)) == ("why?", {"answer": "so", "level": 3}, 1)
    for wrong in ({"prompt": "q", "question": "q"}, {"prompt": ["q"]}, {"level": 3}):
        with pytest.raises(UserError, match="columns: "):
            jsonl("train", path=path, columns=wrong)
    with pytest.raises(UserError, match="prompt is given twice"):
        jsonl("train", path=path, prompt="q", columns={"prompt": "q"})


def test_pairs_of_trl_need_no_options(tmp_path):
    def said(text):
        return [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": text}]

    records = [
        {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No.", "margin": 2},
        {"chosen": said("Hello."), "rejected": said("No.")},  # TRL's implicit prompt
        {"prompt": said("")[:1], "chosen": said("Hello.")[1:], "rejected": said("No.")[1:]},
    ]
    a, b, c = jsonl("train", path=lines(tmp_path / "q.jsonl", *records), heldout=0)
    assert (a.text, a.meta) == ("Hi?", {"chosen": "Hello.", "rejected": "No.", "margin": 2})
    assert (b.text, b.meta["chosen"], b.meta["rejected"]) == ("Hi?", said("Hello."), said("No."))
    assert (c.text, c.meta["chosen"]) == ("Hi?", said("Hello.")[1:])
    renamed = lines(tmp_path / "r.jsonl", {"prompt": "Hi?", "a": "Hello.", "b": "No."})
    (d,) = jsonl("train", path=renamed, heldout=0, columns={"chosen": "a", "rejected": "b"})
    assert d.meta == {"chosen": "Hello.", "rejected": "No."}


def test_responses_with_labels_need_no_options(tmp_path):
    rated = {"prompt": "Hi?", "completion": "Hello.", "label": True}
    (found,) = jsonl("train", path=lines(tmp_path / "q.jsonl", rated), heldout=0)
    assert found.meta == {"completion": "Hello.", "label": True}
    (other,) = jsonl("train", path=lines(tmp_path / "r.jsonl", {"prompt": "Hi?", "label": True}), heldout=0)
    assert not other.meta


def test_records_of_verl_have_their_answer(tmp_path):
    record = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}}
    (found,) = jsonl("train", path=lines(tmp_path / "q.jsonl", record), heldout=0)
    assert (found.text, found.meta) == ("1 + 1?", {"answer": "2"})


def test_pick_a_pic_gives_the_better_picture_first(tmp_path):
    labels = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.0, 0.0)]
    rows = {
        "caption": [f"c{n}" for n in range(4)],
        "jpg_0": [png()] * 4,
        "jpg_1": [png(BLUE)] * 4,
        "label_0": [a for a, _ in labels],
        "label_1": [b for _, b in labels],
        "best_image_uid": ["x"] * 4,
    }
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "p.parquet")
    with pytest.warns(match="1 of 4 records are ties and left out"):
        found = jsonl("train", path=str(tmp_path / "p.parquet"), heldout=0, pairs="pick_a_pic")
    assert [(p.text, [read_bytes(m) for m in p.media]) for p in found] == [
        ("c0", [png(), png(BLUE)]),
        ("c1", [png(BLUE), png()]),
    ]
    assert [str(bad) for bad in found.bad] == ["p.parquet row 3: has the labels 0 and 0, which do not add up to 1"]
    with pytest.raises(UserError, match="remove images"):
        jsonl("train", path=str(tmp_path / "p.parquet"), pairs="pick_a_pic", images=["jpg_0", "jpg_1"])
    with pytest.raises(UserError, match="the forms are pick_a_pic, hpd"):
        jsonl("train", path=str(tmp_path / "p.parquet"), pairs="pickapic")


def test_hpd_is_read_from_preferences_ranks_and_annotations(tmp_path):
    (tmp_path / "train").mkdir()
    for n in range(3):
        (tmp_path / "train" / f"{n}.png").write_bytes(png((n, 0, 0)))
    two, three = ["0.png", "1.png"], ["0.png", "1.png", "2.png"]
    records = [
        {"prompt": "a", "file_path": two, "human_preference": [0, 1], "user_hash": "u"},
        {"prompt": "b", "image_path": three, "rank": [2, 3, 1], "raw_annotation": []},
        {
            "prompt": "c",
            "image_path": three,
            "raw_annotation": [{"rank": [1, 2, 3]}, {"rank": [1, 3, 2]}, {"rank": [2, 1, 3]}],
        },
        {"prompt": "d", "image_path": two, "raw_annotation": [{"rank": [1, 2]}, {"rank": [2, 1]}]},
    ]
    (tmp_path / "train.json").write_text(json.dumps(records))
    options = {"path": str(tmp_path / "train.json"), "root": str(tmp_path / "train"), "pairs": "hpd"}
    with pytest.warns(match="1 of 4 records are ties"):
        found = jsonl("train", heldout=0, **options)
    assert [[Path(m.path or "").stem for m in p.media] for p in found] == [["1", "0"], ["2", "1"], ["0", "2"]]


@pytest.mark.parametrize(
    ("form", "record", "why"),
    [
        ("hpd", [], "is a JSON list"),
        ("hpd", {"prompt": "a", "image_path": "x.png"}, "no list of pictures"),
        ("hpd", {"prompt": "a", "image_path": ["x", "y"]}, "no human_preference, rank or raw_annotation"),
        ("hpd", {"prompt": "a", "image_path": ["x", "y"], "rank": [1, 2, 3]}, "2 pictures and 3 preferences"),
        ("hpd", {"prompt": "a", "image_path": ["x", "y"], "rank": [1, "nan"]}, "no number"),
        (
            "hpd",
            {"prompt": "a", "image_path": ["x", "y"], "raw_annotation": [{"rank": [1, 2]}, [1]]},
            "different numbers",
        ),
        ("pick_a_pic", {"caption": "a", "jpg_0": b"x", "jpg_1": b"y", "label_0": 1}, "has no label_1"),
    ],
)
def test_what_is_no_pair_says_why(form, record, why):
    with pytest.raises(ValueError, match=why):
        as_pair(record, form)


def test_a_tie_is_no_fault():
    with pytest.raises(TieError):
        as_pair({"prompt": "a", "image_path": ["x", "y"], "human_preference": [1, 1]}, "hpd")
    found = as_pair({"prompt": "a", "image_path": ["x", "y"], "human_preference": ["0", "1"]}, "hpd")
    assert (found[BETTER], found[WORSE]) == ("y", "x")


def test_a_folder_may_have_its_metadata_as_csv(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a red thing\ngone.png,nothing\n")
    found = folder("train", path=str(tmp_path), heldout=0)
    assert [(p.text, read_bytes(p.media[0])) for p in found] == [("a red thing", png())]
    assert [bad.where for bad in found.bad] == ["metadata.csv:3"]
