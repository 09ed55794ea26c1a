"""Wrong pictures and clips of prompts, for every family that takes one: left out, counted and named, or brought to the
size that is sampled."""

import importlib.util
import io
import json
import random
import re
from dataclasses import replace

import pytest
from PIL import Image

from mmrl.app.trainer import Trainer
from mmrl.config.loader import load_recipe
from mmrl.core.errors import BadPromptError
from mmrl.core.media import Media
from mmrl.core.signals import Stop
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.logging.rundir import RunDir
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import EDITORS, folders, recipe  # noqa: E402, F401

FAMILIES = ["ltx2_i2v", "ltx2_v2v", *(f for f in EDITORS if not f.startswith("ltx2")), "wan22_i2v_5b", "wan22_i2v_a14b"]


def picture(width=40, height=40):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "png")
    return file.getvalue()


def clip(frames, side):
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=4)
        stream.width = stream.height = side
        for n in range(frames):
            out.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (side, side), (20 * n, 90, 200)))))
        out.mux(stream.encode())
    return file.getvalue()


def damaged(rng, data):
    """Cut, or with other bytes in its place."""
    if rng.random() < 0.5:
        return data[: rng.randrange(1, len(data) - 1)]
    found = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def wrong(clips, count):
    """Media that a family of ``count`` pictures, or of ``clips``, does not take, each with what is said of them."""
    right = Media("image", data=picture())
    found = [
        ((), r"it has 0 media; give every prompt the "),
        ((right,) * (count + 1), rf"it has {count + 1} media; give every prompt the "),
        ((Media("image", data=b"none"),) * count, r"none of PNG, .*; mend the picture or take the prompt out"),
        ((Media("image", data=picture()[:60]),) * count, r"not a readable picture: .*; mend the picture"),
        ((Media("image", path="/nowhere/a.png"),) * count, r"a.png cannot be read: .*; mend the picture"),
    ]
    if not clips:
        return [*found, ((Media("video", data=b"none"),) * count, r"it has (a clip in pl|2 media, 2 of them cl)")]
    if importlib.util.find_spec("av"):
        film = clip(16, 64)
        found += [
            ((Media("image", data=film),), r"none of PNG, .*; mend the picture"),
            ((Media("video", data=picture()),), r"; mend the clip or take the prompt out"),
            ((Media("video", data=film[:400]),), r"cannot be decoded .*; mend the clip or take the prompt out"),
            ((Media("video", data=clip(3, 64)),), r"its clip has 3 frames, and (5 train|9 stay) \(.*; take it out"),
            ((Media("video", data=clip(16, 16)),), r"its clip is of 16 x 16 pixels, and .*; lower them or take it out"),
            ((Media("video", data=film), right), r"it has 2 media, 1 of them clips; give every prompt the one clip"),
        ]
    return found


def said(case, media):
    """What is said of a prompt with ``media``; where nothing is, whether its features are numbers."""
    prompt = Prompt("p", "make it blue", media=media)
    slot, kept = replace(case.slots[0], prompt=prompt), len(case.pipeline.features)
    try:
        keys = case.pipeline.encode([slot])
    except BadPromptError as error:
        found = (error.prompt, len(case.pipeline.features))
        return error.reason if found == ("p", kept) else found
    finite = all(bool(t.isfinite().all()) for t in case.pipeline.batch_features([slot], guided=False).values())
    case.pipeline.features.release(keys)
    return finite


def check(case, tried, rng):
    """Try all of ``wrong``, pictures of other sizes, and what is ``damaged``, of which some can still be read."""
    adapter = case.pipeline.adapter
    count = 1 if adapter.clips else adapter.pictures
    for media, expected in wrong(adapter.clips, count):
        found = said(case, media)
        tried.check(isinstance(found, str) and re.search(expected, found), (adapter.family, found))
    for size in ((1, 1), (400, 3), (3, 400)):
        tried.check(said(case, (Media("image", data=picture(*size)),) * count) is True, (adapter.family, size))
    for n in range(tried.size(2, 30)):
        film = adapter.clips and importlib.util.find_spec("av") and n % 2
        data = damaged(rng, clip(16, 64) if film else picture())
        found = said(case, (Media("video" if film else "image", data=data),) * count)
        tried.check(found is True or "mend the" in str(found) or "its clip" in str(found), (adapter.family, n, found))
    assert said(case, case.slots[0].prompt.media) is True


@pytest.mark.slow
@pytest.mark.sweep("wrong pictures and clips of prompts")
def test_a_wrong_picture_or_clip_is_named_and_nothing_is_kept_of_it(sweep, folders):
    for family in FAMILIES:
        try:
            check(contract.Case(recipe(family, folders, steps=4)), sweep, random.Random(family))
        except Exception as error:
            sweep.check(False, f"{family}: {type(error).__name__}: {error}")
    sweep.done()


@pytest.mark.slow
def test_a_run_leaves_them_out_counts_and_names_them(folders, tmp_path):
    """What cannot be read is left out of the data; a prompt without its picture is replaced when its turn comes."""
    (tmp_path / "right.png").write_bytes(picture())
    (tmp_path / "broken.png").write_bytes(picture()[:60])
    shown = [{"image": "right.png"}] * 4 + [{"image": "broken.png"}, {}]
    lines = [json.dumps({"prompt": f"it moves {n}"} | one) + "\n" for n, one in enumerate(shown)]
    (tmp_path / "clips.jsonl").write_text("".join(lines))
    (tmp_path / "heldout.jsonl").write_text("".join(lines[:2]))
    made = recipe("ltx2_i2v", folders, steps=2).model_dump(mode="json")
    made["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility"}, "modality": "video"}]
    made["train"] |= {"steps": 1, "prompts_per_step": 5, "group_size": 2, "micro_batch_size": 10}
    made["eval"] = {"samples": 2, "grid": 2}
    of = {part: {"path": f"{name}.jsonl", "heldout": 0} for part, name in (("train", "clips"), ("heldout", "heldout"))}
    made["data"] = {"name": "jsonl", "max_bad_fraction": 0.4} | of
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    loaded = load_recipe([tmp_path / "recipe.yaml"], [])
    planned = plan(loaded)
    assert planned.problems == []
    assert any("1 of 7 prompts looked at cannot be used" in note for note in planned.notes), planned.notes
    strict = plan(load_recipe([tmp_path / "recipe.yaml"], ["data.max_bad_fraction=0.15"]))
    assert any("clips.jsonl:5: " in problem and "broken.png" in problem for problem in strict.problems)
    with RunDir.create(tmp_path / "run") as directory:
        assert Trainer(loaded, directory).begin(Stop(), resume=False).finished
    failed = [json.loads(line) for line in (tmp_path / "run" / "failures.jsonl").read_text().splitlines()]
    assert [one["name"] for one in failed if one["kind"] == "record"] == ["clips.jsonl:5"]
    assert any("it has 0 media" in one["error"] and one["name"] == "it moves 5" for one in failed)
