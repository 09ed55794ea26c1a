"""Charts as people use them: with the pointer, with the keyboard, and with a screen reader."""

import json
import math
import re

import pytest

import mmrl
from mmrl.report.charts import Series, line_chart, stacked_chart
from mmrl.report.html import write_report
from tests.support.browser import opened
from tests.support.report import Page, recorded

RATIO = """
((part) => {
  const light = (colour) => {
    const linear = (c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => linear(c / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const chart = part.closest("figure"), a = light(getComputedStyle(part)[part.closest("svg") ? "fill" : "color"]);
  const b = light(getComputedStyle(chart).backgroundColor);
  return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
})
"""
"""The contrast of a text and the card of its chart (WCAG 2.2, relative luminance)."""


def test_a_chart_is_a_slider_over_the_steps_whose_text_is_the_values():
    held = Series("held-out", [(0, 0.25), (10, 0.5), (20, None)])
    training = Series("training", [(n, n / 100) for n in range(1, 13)])
    page = Page(str(line_chart("reward", [held, training], log=True)))
    ((_, svg),) = [(tag, given) for tag, given in page.tags if tag == "svg"]
    assert (svg["role"], svg["tabindex"], svg["aria-label"]) == ("slider", "0", "reward by step")
    assert [svg[f"aria-value{end}"] for end in ("min", "max", "now")] == ["0", "20", "20"]
    assert svg["aria-valuetext"] == "held-out 0.5 at step 10, training 0.12 at step 12"
    assert "values" in page.text
    ((_, figure),) = [(tag, given) for tag, given in page.tags if tag == "figure"]
    data = json.loads(figure["data-chart"] or "")
    assert (data["over"], data["log"], data["stacked"]) == ("step", True, False)
    assert data["y"] == [math.log10(0.01), math.log10(1)]
    stacked = stacked_chart("time", [Series("a", [(1, 1.0)]), Series("b", [(1, 2.0)])])
    assert json.loads(Page(str(stacked)).tags[0][1]["data-chart"] or "")["stacked"]
    assert 'aria-label="score by strength"' in str(line_chart("score", [held], over="strength"))


@pytest.fixture
def page(tmp_path):
    """A tab with the report of a run of 20 steps, evaluated at 0, 10 and 20."""
    report = write_report(recorded(tmp_path / "run", mmrl.load("datasets", "shapes")).path)
    with opened(tmp_path) as tab:
        tab.tell("Page.navigate", url=report.as_uri())
        tab.until("document.readyState + document.querySelectorAll('[data-chart]').length", "complete6")
        yield tab


def said(tab, what="output"):
    """Words of what is shown at a chart, a space between two parts."""
    parts = f"[...document.querySelectorAll('[data-at] {what} > *')].map((part) => part.textContent)"
    return tab.value(f"{parts}.join(' ')")


def point_at(tab, chart, share):
    """Point at so much of the width of the plot of the ``chart``-th chart."""
    tab.value(f"document.querySelectorAll('[data-chart]')[{chart}].scrollIntoView({{block: 'center'}})")
    box = f"document.querySelectorAll('[data-chart] svg')[{chart}].getBoundingClientRect()"
    left, top, width, height = tab.value(f"(({{x, y, width, height}}) => [x, y, width, height])({box})")
    tab.point(left + width * (48 + share * 362) / 420, top + height / 2)


@pytest.mark.slow
def test_values_stand_beside_the_pointer_at_any_width(page):
    for width in (400, 1400):
        page.shown_at(width)
        point_at(page, 0, 0.5)
        assert said(page) == "step 10 held-out 0.5 training samples 0.25"
        point_at(page, 0, 0.65)
        assert said(page) == "step 13 held-out 0.5 (step 10) training samples 0.325"
        inside = "(({left, right}) => left >= 0 && right <= innerWidth)"
        assert page.value(f"{inside}(document.querySelector('[data-at] output').getBoundingClientRect())")
        for share in (0, 1):
            point_at(page, 0, share)
            assert page.value(f"{inside}(document.querySelector('[data-at] output').getBoundingClientRect())")
        assert page.value("document.documentElement.scrollWidth <= innerWidth"), "nothing stands out of the page"
        page.point(1, 1)
        assert page.value("document.querySelectorAll('[data-at], [data-chart] output:not([hidden])').length") == 0


@pytest.mark.slow
def test_the_mark_of_a_value_lies_on_its_line(page):
    page.shown_at(1400)
    for chart in range(6):  # lines, a logarithmic axis, and areas
        point_at(page, chart, 0.5)
        path = "[...document.querySelectorAll('[data-at] path[class^=l], [data-at] path[class^=a]')]"
        drawn = page.value(f"{path}.map((one) => one.getAttribute('d'))")
        circles = "[...document.querySelectorAll('[data-at] g circle')]"
        marks = page.value(f"{circles}.map(({{cx, cy}}) => [cx.baseVal.value, cy.baseVal.value])")
        assert marks
        corners = {tuple(map(float, corner)) for d in drawn for corner in re.findall(r"([\d.]+) ([\d.]+)", d)}
        for x, y in marks:
            assert any(abs(x - a) < 0.06 and abs(y - b) < 0.06 for a, b in corners), (chart, x, y)


@pytest.mark.slow
def test_charts_are_reached_and_read_with_the_keyboard(page):
    focused = (
        "document.activeElement.closest('figure')?.querySelector('b').textContent + document.activeElement.tagName"
    )
    page.press("Tab")
    while page.value(focused) != "shapessvg":
        page.press("Tab")
    text = "document.activeElement.getAttribute('aria-valuetext')"
    assert page.value(text) == "step 20: held-out 0.6, training samples 0.5"
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key, step in (
        *(("ArrowLeft", 19), ("ArrowDown", 18), ("PageDown", 8), ("ArrowRight", 9), ("ArrowUp", 10)),
        *(("Home", 0), ("ArrowLeft", 0), ("End", 20), ("ArrowRight", 20), ("PageDown", 10)),
    ):
        page.press(key)
        assert page.value("document.activeElement.getAttribute('aria-valuenow')") == str(step), key
    assert page.value(text) == "step 10: held-out 0.5, training samples 0.25"
    assert said(page) == "step 10 held-out 0.5 training samples 0.25"
    page.press("Escape")
    assert page.value("document.querySelectorAll('[data-at]').length") == 0
    page.press("Tab")
    assert page.value(focused) == "shapesSUMMARY"
    page.press(" ")
    rows = "[...document.querySelectorAll('.values[open] tr')]"
    rows += ".map((row) => [...row.cells].map((cell) => cell.textContent))"
    page.until(f"{rows}.length", 22)
    table = page.value(rows)
    assert table[0] == ["step", "held-out", "training samples"]
    assert table[1:4] == [["0", "0.4", ""], ["1", "", "0.025"], ["2", "", "0.05"]]
    assert table[-1] == ["20", "0.6", "0.5"]
    assert page.value("document.querySelector('.values caption').textContent") == "shapes"


@pytest.mark.slow
def test_texts_of_charts_are_readable_in_light_and_dark(page):
    for scheme in ("light", "dark"):
        page.shown_at(1400, scheme)
        point_at(page, 0, 0.5)
        for part in (
            "figcaption b",
            "figcaption small",
            "figcaption .key",
            "svg text",
            "output small",
            "output b",
            "summary",
        ):
            found = page.value(f"{RATIO}(document.querySelectorAll('[data-chart] {part}')[0])")
            assert found >= 4.5, (scheme, part, found)
