"""What a run shows: sample grids, charts and the HTML report."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from functools import partial
from pathlib import Path

import numpy
import pytest
from PIL import Image, ImageSequence

import mmrl
from mmrl.api.run import Run, load_run
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.logging.card import _table
from mmrl.logging.grids import LARGE, before_after, grid, score_line, write_samples
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.pictures import pairs, read_evaluations
from mmrl.logging.rundir import FILES, LOCK, RunDir
from mmrl.report.charts import Series, line_chart, short, stacked_chart, ticks
from mmrl.report.html import curve_png, write_report
from mmrl.rewards.learned.labels.items import items_of
from tests.support import hostile
from tests.support.report import HOSTILE, RECIPE, Page, recorded


@pytest.fixture
def shapes():
    return mmrl.load("datasets", "shapes")


# ---- grids


def test_grid_enlarges_small_pictures_without_smoothing(shapes):
    prompts = shapes.prompts("heldout")[:5]
    pictures = [shapes.picture(p, 1) for p in prompts]
    sheet = grid(pictures, [f"{p.text}\nshapes=1" for p in prompts], columns=3)
    assert sheet.mode == "RGB"
    first = sheet.crop((12, 12, 12 + 128, 12 + 128))
    assert first.tobytes() == pictures[0].resize((128, 128), Image.Resampling.NEAREST).tobytes()


def test_grid_takes_any_size_mode_and_caption():
    modes = ("RGB", "L", "RGBA", "P", "1", "I;16", "F", "CMYK", "LA")
    pictures = [Image.new(mode, size) for mode, size in zip(modes, [(1000, 9), (9, 1000), (64, 64)] * 3, strict=True)]
    captions = ["a " * 500, "x" * 5000, "", HOSTILE, "日本語 \x00\u202e", "\n\n", "a\nb", " ", "é"]
    sheet = grid(pictures, captions, columns=4)
    assert sheet.width < 4 * 400
    assert sheet.height < 2000
    with pytest.raises(ValueError, match="captions"):
        grid(pictures, captions[:2], 4)
    with pytest.raises(ValueError, match="at least one"):
        grid([], [], 4)


def test_captions_are_drawn_under_the_pictures():
    picture = Image.new("RGB", (128, 128), "white")
    plain, named = grid([picture], ["a"], 1), grid([picture], ["a red circle left of a blue square\nshapes=0.25"], 1)
    assert named.height > plain.height
    text = named.crop((0, 142, named.width, named.height)).convert("L")
    assert min(text.tobytes()) < 90, "no ink under the picture"


def test_before_after_sets_pairs_side_by_side():
    sheet = before_after([Image.new("RGB", (128, 128), "red")], [Image.new("RGB", (128, 128), "blue")], ["a circle"])
    middle = 12 + 64
    assert sheet.getpixel((middle, middle)) == (255, 0, 0)
    assert sheet.getpixel((middle + 128 + 4, middle)) == (0, 0, 255)
    with pytest.raises(ValueError, match="before"):
        before_after([], [Image.new("RGB", (8, 8))], [""])


def test_write_samples_keeps_pictures_prompts_and_scores(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes, steps=10)
    listing = json.loads((run.samples / "step_000010.json").read_text())
    assert listing["step"] == 10
    first = listing["samples"][0]
    assert first["scores"] == {"shapes": 0.0, "shapes/colour": 1.0, "jpeg": 0.0}
    with Image.open(run.samples / first["file"]) as kept:
        assert kept.convert("RGB").tobytes() == shapes.picture(shapes.prompts("heldout")[0], 10).tobytes()
    assert Image.open(run.samples / "step_000010.png").width > 6 * 128
    write_samples(run, 10, [Image.new("I;16", (9, 5))], ["again"], [{"shapes": float("nan")}])
    listing = json.loads((run.samples / "step_000010.json").read_text())
    assert [s["scores"] for s in listing["samples"]] == [{"shapes": None}]
    assert len(list((run.samples / "step_000010").iterdir())) == 1, "pictures of the earlier evaluation stayed"
    assert not list(run.samples.glob(".*")), "temporary files stayed"
    assert score_line({"a": 0.51234, "a/b": 1}) == "a=0.512"


def test_clips_are_kept_as_they_move_and_lie_in_the_report(tmp_path):
    def clip(side):
        return [Image.new("RGB", (side, side), (40 * i, 9, 200 - 40 * i)) for i in range(5)]

    run = RunDir(tmp_path)
    sheet = write_samples(run, 0, [clip(8), clip(300)], ["small", "large"], [{"a": 1.0}, {"a": 0.0}])
    assert sheet.width > 2 * LARGE  # film strips, shrunk
    listing = json.loads((run.samples / "step_000000.json").read_text())["samples"]
    assert [s["file"] for s in listing] == ["step_000000/000.webp", "step_000000/001.webp"]
    with Image.open(run.samples / listing[0]["file"]) as kept:
        assert [f.convert("RGB").tobytes() for f in ImageSequence.Iterator(kept)] == [f.tobytes() for f in clip(8)]
    cells = pairs(read_evaluations(run.samples))["cells"]
    for cell, side in zip(cells, (8, 256), strict=True):
        head, _, data = cell["frames"][0]["src"].partition(",")
        assert head == "data:image/webp;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
            assert (shown.n_frames, shown.size) == (5, (side, side))


# ---- report


def page_of(run: RunDir) -> tuple[str, Page]:
    html = write_report(run.path).read_text()
    return html, Page(html)


def test_report_loads_nothing_and_shows_everything(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes)
    run.failure(5, "reward", "jpeg", "TimeoutError: slow\ntrace", prompt="a red circle")
    run.failure(6, "reward", "jpeg", "TimeoutError: slow\ntrace", prompt="a red circle")
    html, page = page_of(run)
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), attributes
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket", html)
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "embed"})
    charts = [a["data-chart"] for tag, a in page.tags if "data-chart" in a and tag == "figure"]
    series = {name: dict(zip(xs, ys, strict=True)) for c in charts for name, xs, ys in json.loads(c or "")["series"]}
    assert series["held-out"] == pytest.approx({0: 0.4, 10: 0.5, 20: 0.6})
    assert series["KL to the reference"][20] == 0.02
    assert {"sample", "train", "colour", "before the first"} <= series.keys()
    for shown in (
        "shapes-lora",
        "finished",
        "20/20",
        "+0.2",
        "TimeoutError: slow",
        "command line",
        "1 min 02 s",
        "Lowest",
    ):
        assert shown in page.text or shown in html, shown
    frames = json.loads(re.findall(r'id="frames">(.*?)</script>', html, re.S)[0])
    assert frames["steps"] == [0, 10, 20]
    assert all(frame["src"].startswith("data:image/png;base64,") for cell in frames["cells"] for frame in cell)


def test_report_and_card_show_what_a_run_on_pairs_measures(tmp_path):
    (tmp_path / "given.yaml").write_text("name: pairs\n")
    with (
        RunDir.create(tmp_path / "run") as run,
        MetricsLog(run.metrics) as metrics,
        MetricsLog(run.heldout) as heldout,
    ):
        run.write_recipe([tmp_path / "given.yaml"], [], {"name": "pairs", "rewards": [], "train": {"steps": 2}})
        for step in range(3):
            row = {"dpo/accuracy": step / 2, "dpo/margin": 0.3 * step, "dpo/chosen_reward": 0.2 * step}
            heldout.write(step, {"samples": 8, **row, "reward/my_reward": 0.5})
            if step:
                metrics.write(step, row)
    html, page = page_of(run)
    for label, value, detail in (
        ("dpo/accuracy", "1", "from 0 (+1)"),
        ("dpo/margin", "0.6", "from 0 (+0.6)"),
        ("my_reward (not trained on)", "0.5", "from 0.5 (+0)"),
    ):
        assert f"<span>held-out {label}</span><b>{value}</b><span>{detail}</span>" in html, label
    assert "<span>held-out dpo/chosen_reward</span>" not in html
    charts = [json.loads(a["data-chart"] or "") for tag, a in page.tags if tag == "figure" and "data-chart" in a]
    named = {name: ys for chart in charts for name, _, ys in chart["series"] if ys[-1] == pytest.approx(0.4)}
    assert {"held-out", "training samples"} <= named.keys()
    table = _table([{"step": n, "samples": 8, "dpo/accuracy": n / 2} for n in (0, 2)], 2, "drawn")
    assert "| held-out figure | before (step 0) | after (step 2) | change |" in table
    assert "| dpo/accuracy | 0.000 | 1.000 | +1.000 |" in table


def test_report_escapes_hostile_text_everywhere(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes, prompts=[f"{HOSTILE}{i}" for i in range(6)])
    clean_run = recorded(tmp_path / "clean", shapes)
    with MetricsLog(run.metrics) as log, MetricsLog(run.heldout) as heldout:
        log.write(21, {f"reward/{HOSTILE}": 1.0, HOSTILE: float("nan"), f"time/{HOSTILE}": 1.0})
        heldout.write(30, {f"reward/{HOSTILE}": 1.0, f"reward/{HOSTILE}/{HOSTILE}": 1.0})
    run.failure(5, HOSTILE, HOSTILE, HOSTILE, prompt=HOSTILE)
    run.resolved.write_text(json.dumps(json.loads(run.resolved.read_text()) | {"name": HOSTILE, HOSTILE: HOSTILE}))
    run.env.write_text(json.dumps({HOSTILE: HOSTILE}))
    run.recipe.write_text(f"# override: {HOSTILE.splitlines()[0]}\n{RECIPE}")
    clean_run.failure(5, "a", "b", "c", prompt="d")
    page, clean = page_of(run)[1], page_of(clean_run)[1]
    scripts = [a for tag, a in page.tags if tag == "script"]
    assert scripts == [a for tag, a in clean.tags if tag == "script"], "a script came in"
    assert all((a.get("src") or "").startswith("data:image/png") for tag, a in page.tags if tag == "img")
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    assert "<script>alert('x')</script>" in page.text, "the prompt is shown as text"


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    ["heldout.jsonl", "metrics.jsonl", "samples", "resolved.json", "recipe.yaml", "env.json", "failures.jsonl", "all"],
)
def test_report_of_a_run_with_parts_missing(tmp_path, shapes, missing):
    from mmrl.core.files import remove

    run = recorded(tmp_path / "run", shapes)
    names = (
        ["heldout.jsonl", "metrics.jsonl", "samples", "resolved.json", "recipe.yaml"] if missing == "all" else [missing]
    )
    for name in names:
        remove(run.path / name)
    html, _ = page_of(run)
    assert "</html>" in html
    assert ("there is no held-out evaluation yet" in html) == (missing in ("heldout.jsonl", "all"))


def test_report_while_the_run_goes_on_and_after_it_was_killed(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes)
    run.truncate_after(15)
    run.metrics.write_bytes(run.metrics.read_bytes() + b'{"step": 16, "rew')
    with RunDir.create(run.path, resume=True):
        (run.samples / "step_000020.json").write_text('{"step": 20, "sam')
        html, _ = page_of(run)
    assert 'class="status running"' in html
    assert "15/20" in html
    assert 'class="status stopped"' in page_of(run)[0]


def test_report_takes_no_picture_from_outside_the_run(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes)
    Image.new("RGB", (8, 8), (1, 2, 3)).save(tmp_path / "secret.png")
    (run.samples / "step_000010" / "000.png").write_text("not a picture")
    rows = [{"prompt": "outside", "file": f, "scores": {}} for f in ("../../secret.png", str(tmp_path / "secret.png"))]
    listing = {"step": 30, "samples": [*rows, {"prompt": "inside", "file": "step_000020/001.png", "scores": {"a": 1}}]}
    (run.samples / "step_000030.json").write_text(json.dumps(listing))
    _, page = page_of(run)
    assert "outside" not in page.text
    assert "inside" in page.text


def strange_names(samples: Path, outside: Path) -> list[object]:
    """Names under which a list of samples may not find a picture; what they stand for is made in ``samples``."""
    (samples / "link.png").symlink_to(outside / "secret.png")
    (samples / "up").symlink_to(outside)
    (samples / "zero.png").symlink_to("/dev/zero")
    (samples / "folder.png").mkdir()
    os.mkfifo(samples / "pipe.png")
    paths = ["../../outside/secret.png", str(outside / "secret.png"), "up/secret.png"]
    names = ["link.png", "zero.png", "folder.png", "pipe.png", "gone.png", "a\0.png", "\ud800.png", "..", ""]
    return [*paths, *names, None, 5, []]


@pytest.mark.slow
@pytest.mark.sweep("names that a list of samples gives its pictures, through all that read it")
def test_no_reader_of_samples_opens_what_is_no_file_of_the_run(tmp_path, shapes, sweep):
    run = recorded(tmp_path / "run", shapes)
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(outside / "secret.png")
    one = Run(run.path, load_recipe(["shapes-lora"]).recipe)
    whole = {"prompt": "inside", "file": "step_000020/001.png", "scores": {}}
    found: dict[str, list[str]] = {}
    readers = {
        "report": lambda: found.update(report=[of for of in ("outside", "inside") if of in page_of(run)[1].text]),
        "label": lambda: found.update(label=[item.prompt for item in items_of(run.path)]),
        "python": lambda: found.update(python=[of.prompt for of in one.samples(30)]),
    }
    for name in strange_names(run.samples, outside):
        for key, prompt in (("file", {}), ("pictures", {"text": "a text"})):
            odd = {"prompt": "outside", key: name if key == "file" else [name], "scores": {}, **prompt}
            for old in run.samples.glob("step_*.json"):
                old.unlink()
            listing = json.dumps({"step": 30, "samples": [odd, *([] if prompt else [whole])]})
            (run.samples / "step_000030.json").write_text(listing)
            for reader, read in readers.items():
                found.clear()
                wrong = hostile.attempt(read, seconds=2)
                sweep.check(not wrong, f"{reader} of {key} {name!r}: {wrong}")
                if key == "file":
                    sweep.check("outside" not in found.get(reader, []), f"{reader} shows {name!r}")
    sweep.done()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, LOCK])
def test_a_file_of_a_run_that_is_a_link_to_another_is_neither_read_nor_written(tmp_path, shapes, name):
    run = recorded(tmp_path / "run", shapes)
    other = tmp_path / "other"
    other.write_text("precious\n")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(other)
    for read in (write_report, partial(RunDir.create, resume=True), load_run):
        with pytest.raises(UserError, match=rf"{name} is not used: it is a link that leads out of"):
            read(run.path)
    assert other.read_text() == "precious\n"


def test_samples_of_a_run_that_are_a_link_to_another_folder_get_no_labels(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes)
    run.samples.rename(tmp_path / "other")
    run.samples.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="samples is not read: it is a link that leads out of"):
        items_of(run.path)


def test_to_show_a_run_of_somebody_else_runs_none_of_its_code(tmp_path, shapes):
    run = recorded(tmp_path / "run", shapes)
    evil = tmp_path / "evil.py"
    evil.write_text("import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n")
    resolved = json.loads(run.resolved.read_text())
    for more in ({"algorithm": {"type": f"{evil}:Mine"}}, {"pipeline": str(evil)}, {"data": {"name": str(evil)}}):
        run.resolved.write_text(json.dumps({**resolved, **more}))
        write_report(run.path)
        loaded = load_run(run.path)
        assert f"{loaded.steps} of " in repr(loaded)
        assert loaded.finished
        assert not evil.with_suffix(".ran").exists(), more


@pytest.mark.slow
def test_report_shrinks_large_pictures(tmp_path):
    noise = Image.effect_noise((1024, 768), 90).convert("RGB")
    with RunDir.create(tmp_path / "run") as run:
        for step in (0, 10):
            write_samples(run, step, [noise] * 4, ["noise"] * 4, [{"a": i} for i in range(4)])
        MetricsLog(run.metrics).write(1, {"reward/mean": 0.0})
        html, _ = page_of(run)
    assert html.count("data:image/jpeg;base64,") > 8
    assert len(html) < 3_000_000


def test_no_run_and_a_broken_file_are_told(tmp_path, shapes):
    with pytest.raises(UserError, match="no run"):
        write_report(tmp_path)
    run = recorded(tmp_path / "run", shapes)
    run.resolved.write_text("{")
    with pytest.raises(UserError, match=r"resolved\.json cannot be read"):
        write_report(run.path)


def test_curve_png_draws_one_run_and_the_mean_of_seeds(tmp_path, shapes):
    runs = [recorded(tmp_path / name, shapes).path for name in ("a", "b")]
    one, both = curve_png(runs[0], tmp_path / "one.png"), curve_png(runs, tmp_path / "both.png", label="shapes")
    with Image.open(one) as picture:
        assert picture.size == (480, 280)
        blue = int((numpy.asarray(picture.convert("RGB")).astype(int) @ [-1, 0, 1] > 80).sum())
    assert blue > 300, "no line"
    assert both.stat().st_size < 40_000
    with pytest.raises(UserError, match="no held-out reward/none"):
        curve_png(runs[0], tmp_path / "x.png", label="none")


# ---- charts


def test_charts_keep_spikes_gaps_and_zeros():
    points = [(i, 1.0) for i in range(5000)]
    points[3210] = (3210, 50.0)
    chart = line_chart("x", [Series("a", points)])
    assert chart is not None
    _, xs, ys = json.loads(Page(chart).tags[0][1]["data-chart"] or "")["series"][0]
    assert len(xs) <= 400
    assert dict(zip(xs, ys, strict=True))[3210] == 50.0
    gap = line_chart("x", [Series("a", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)])])
    assert gap is not None
    assert re.search(r'd="M[\d. ]+M[\d. ]+L[\d. ]+"', gap), "a gap is not bridged"
    assert line_chart("x", [Series("a", [(1, None)])]) is None
    assert line_chart("x", [Series("a", [(1, 0.0), (2, 0.0)])], log=True) is not None
    assert line_chart("x", [Series("a", [(1, 0.0), (2, 1e-7), (3, 1e3)])], log=True) is not None
    assert stacked_chart("x", [Series("a", [(1, 0.0)])]) is None
    stack = stacked_chart("x", [Series("a", [(1, 1.0), (2, None)]), Series("b", [(1, 1.0), (2, 2.0)])])
    assert stack is not None
    assert stack.count('class="a') == 2


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.4, 0.41), (-3, 250), (1e-7, 3e-7), (5, 5), (0, 0), (-2, -2), (1e9, 3e9), (0, 3e-16), (1 - 1e-15, 1)],
)
def test_ticks_are_few_round_and_around_the_data(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 7
    assert len({short(t) for t in found}) == len(found)
