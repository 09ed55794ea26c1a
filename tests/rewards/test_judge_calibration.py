"""The calibration of a judge: against closed forms and another implementation, and as ``mmrl judge`` shows it."""

import json
import math
import re

import numpy as np
import pytest

from mmrl.rewards.judging.calibration import calibration
from mmrl.rewards.judging.statistics import wilson
from tests.support import judging
from tests.support.cli import mmrl


def test_bins_compare_mean_scores_with_the_share_that_is_right():
    found = calibration([0.1, 0.15, 0.15, 0.8, 0.9, 1.0], [False, False, True, True, True, False], bins=5)
    first, last = found.bins  # the empty ones are left out; 1.0 is in the last
    assert (first.low, first.high, first.cases, last.low, last.high, last.cases) == (0.0, 0.2, 3, 0.8, 1.0, 3)
    assert (first.score, last.score) == pytest.approx((0.4 / 3, 0.9))
    assert (first.truth, last.truth) == pytest.approx((1 / 3, 2 / 3))
    assert (last.truth_low, last.truth_high) == pytest.approx(wilson(2, 3))
    assert found.error[0] == pytest.approx(3 / 6 * (1 / 3 - 0.4 / 3) + 3 / 6 * (0.9 - 2 / 3))


def ece(scores, truth, bins):
    """As in Guo et al. (2017), equation 3, by a loop."""
    total, edges = 0.0, np.linspace(0, 1, bins + 1)
    for k in range(bins):
        rows = [i for i, s in enumerate(scores) if edges[k] <= s < edges[k + 1] or (k == bins - 1 and s == 1)]
        if rows:
            gap = np.mean([scores[i] for i in rows]) - np.mean([truth[i] for i in rows])
            total += len(rows) / len(scores) * abs(gap)
    return total


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_the_error_is_guos(bins):
    draw = np.random.default_rng(bins)
    scores = draw.random(300)
    truth = draw.random(300) < scores**2
    found = calibration(scores.tolist(), truth.tolist(), bins)
    assert found.error[0] == pytest.approx(ece(scores, truth, bins))
    assert found.error[1] <= found.error[0] <= found.error[2] + 0.02


def test_a_calibrated_judge_is_within_chance_and_a_sure_one_is_not():
    draw = np.random.default_rng(0)
    scores = draw.random(400)
    truth = (draw.random(400) < scores).tolist()
    found = calibration(scores.tolist(), truth)
    assert found.error[0] <= found.by_chance
    assert 0.02 < found.by_chance < 0.1
    sure = calibration([float(s > 0.5) for s in scores], truth)
    assert sure.error[0] > sure.by_chance
    assert sure.error[0] == pytest.approx(0.25, abs=0.05)  # half of the scores' mean distance to 0 or 1
    assert sure.error[1] < sure.error[0] < sure.error[2]


def test_true_values_between_have_a_mean_and_no_chance():
    found = calibration([0.2, 0.25, 0.7], [0.5, 0.3, 0.6])
    assert found.bins[0].truth == pytest.approx(0.4)
    half = 1.959964 * math.sqrt(0.02) / math.sqrt(2)
    assert (found.bins[0].truth_low, found.bins[0].truth_high) == pytest.approx((0.4 - half, 0.4 + half))
    assert math.isnan(found.bins[1].truth_low)
    assert math.isnan(found.by_chance)


def says_what_it_reads(handler, body):
    """The score is the number in the response."""
    if body is None:
        return False
    said = re.findall(r"[\d.]+", body["messages"][-1]["content"])[0]
    handler.say(200, json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}))
    return True


def test_mmrl_judge_shows_the_table_in_80_columns_and_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "p", "response": f"{s} of case {i}", "truth": int(i % 10 < 7)}
        for s in (0.05, 0.95)
        for i in range(20)
    ]
    (tmp_path / "truth.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with judging.Served(before=says_what_it_reads) as server:
        options = {"model": {"url": server.url, "name": "tiny"}, "rubric": "{{ response }}"}
        options["answer"] = {"type": "number", "min": 0, "max": 1}
        (tmp_path / "judge.yaml").write_text(json.dumps(options))
        assert mmrl("judge", "judge.yaml", "--truth", "truth.jsonl", "--bins", "4") == 0
        shown = capsys.readouterr().out
        assert mmrl("judge", "judge.yaml", "--truth", "truth.jsonl", "--json") == 0
    assert max(map(len, shown.splitlines())) <= 80
    table = [line.split() for line in shown.splitlines() if re.match(r"\s*0\.\d\d to", line)]
    assert [line[:5] for line in table] == [
        ["0.00", "to", "0.25", "20", "0.050"],
        ["0.75", "to", "1.00", "20", "0.950"],
    ]
    assert "calibration error 0.450; by chance up to" in shown
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["calibration error"]["value"] == pytest.approx(0.45)
    assert [(one["low"], one["cases"], one["truth"]) for one in found["calibration"]["bins"]] == [
        (0.0, 20, 0.7),
        (0.9, 20, 0.7),
    ]
