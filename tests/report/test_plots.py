"""Charts of a run in a notebook: what it is given to show, and in a real browser."""

import html
import json
import re

import pytest

import mmrl
from mmrl.core.errors import UserError
from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import RunDir
from mmrl.report.plots import plot_of
from tests.support.browser import opened
from tests.support.report import HOSTILE, Page, recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return mmrl.load_run(recorded(tmp_path_factory.mktemp("plots") / "run", mmrl.load("datasets", "shapes")).path)


def lines(plot):
    """By metric, the lines that are drawn of it: values by step."""
    charts = [given for tag, given in Page(plot.html).tags if "data-chart" in given]
    found = [json.loads(given["data-chart"])["series"] for given in charts]
    return {
        name: {line: dict(zip(xs, ys, strict=True)) for line, xs, ys in of}
        for name, of in zip(plot.metrics, found, strict=True)
    }


def test_a_plot_has_the_metrics_that_were_asked_for(run):
    (drawn,) = lines(run.plot("policy/kl")).values()
    assert drawn == {"training": {step: pytest.approx(step * 1e-3) for step in range(1, 21)}}
    drawn = lines(run.plot("reward", "policy/kl"))
    assert list(drawn) == ["reward/mean", "reward/shapes", "policy/kl"]
    assert drawn["reward/shapes"]["held-out"] == pytest.approx({0: 0.4, 10: 0.5, 20: 0.6})
    assert drawn["reward/shapes"]["training"][20] == 0.5
    assert list(lines(run.plot("reward/std"))) == ["reward/std"], "by its whole name"
    assert list(lines(run.plot("reward/shapes"))) == ["reward/shapes"], "and not what is below it"
    assert list(lines(run.plot())) == ["reward/mean", "reward/shapes"]
    assert repr(run.plot("policy/kl")) == "Plot of shapes-lora: policy/kl"
    with pytest.raises(UserError, match=r"no metric 'reward/shape'; did you mean 'reward/shapes'\?"):
        run.plot("reward/shape")


def test_a_notebook_shows_a_run_in_a_frame_that_leaves_the_notebook_alone(run, tmp_path):
    ((tag, frame),) = Page(run._repr_html_()).tags
    assert (tag, frame["sandbox"]) == ("iframe", "allow-scripts")
    page = Page(frame["srcdoc"] or "")
    assert "held-out shapes" in page.text
    assert "20/20" in page.text
    assert not re.search(r"(?:src|href)=|url\(", frame["srcdoc"] or "")
    saved = run.plot("policy/kl").save(tmp_path / "kl.html")
    assert html.unescape(run.plot("policy/kl")._repr_html_()).count(saved.read_text()) == 1


def test_a_run_without_rows_and_names_of_strangers_are_shown(tmp_path):
    (tmp_path / "given.yaml").write_text("name: empty\n")
    with RunDir.create(tmp_path / "run") as made:
        made.write_recipe([tmp_path / "given.yaml"], [], {"name": HOSTILE, "train": {"steps": 2}})
        empty = plot_of(made.path, tiles=True)
        assert empty.metrics == ()
        with MetricsLog(made.metrics) as log:
            log.write(1, {HOSTILE: 1.0})
        plot = plot_of(made.path, [HOSTILE])
    assert {tag for tag, _ in Page(plot._repr_html_()).tags} == {"iframe"}
    tags = [tag for tag, _ in Page(plot.html).tags]
    assert tags.count("script") == 1
    assert "img" not in tags


def test_ipython_takes_the_html(run):
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(run.plot("policy/kl"))
    assert data["text/html"].startswith("<iframe")
    assert data["text/plain"] == "Plot of shapes-lora: policy/kl"
    assert "text/html" in formatters.DisplayFormatter().format(run)[0]


@pytest.mark.slow
def test_a_browser_shows_values_in_the_frame(run, tmp_path):
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><style>b {{ color: red }}</style><b>cell</b>{run._repr_html_()}")
    with opened(tmp_path) as tab:
        tab.shown_at(900)
        tab.tell("Page.navigate", url=cell.as_uri())
        tab.until("document.readyState + document.querySelectorAll('iframe').length", "complete1")
        shown = tmp_path / "shown.png"
        tab.picture(shown)
        assert shown.stat().st_size > 10_000
        assert tab.value("getComputedStyle(document.querySelector('b')).color") == "rgb(255, 0, 0)"
        assert tab.value("document.querySelector('iframe').contentDocument") is None, "it is a document of its own"
