"""The timeline of a run's devices in the report: which steps, what they show, and files that are large or broken."""

import json
import re
from html.parser import HTMLParser

import pytest

from mmrl.logging.metrics import MetricsLog
from mmrl.logging.rundir import RunDir
from mmrl.report.html import write_report
from mmrl.report.timeline import DECISIONS, DEVICES, timeline

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> {{ 7 * 7 }}"


def span(step, device, role, began, ended, controller=0):
    return {"step": step, "controller": controller, "device": device, "role": role, "began": began, "ended": ended}


def decision(step, rollout, judge, why="because", **numbers):
    return {"step": step, "decision": why, "rollout": rollout, "judge": judge, "numbers": numbers}


def step_of(step, ends=10.0):
    """One device samples for 4 s and trains for 6, the other judges for 2 s after 3 and trains from 4 to the end."""
    return [
        span(step, 0, "rollout", 0.0, 4.0),
        span(step, 1, "judge", 1.0, 3.0),
        span(step, 0, "train", 4.0, 10.0),
        span(step, 1, "train", 4.0, ends),
    ]


def written(path, rows, after=b""):
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode() + after)
    return path


def bars(shown):
    """(class, x in percent, width in percent, title) of every bar of a step."""
    found = re.findall(
        r'<rect class="(\w+)" x="([\d.]+)%?" y="\d+" width="([\d.]+)%" height="\d+"><title>(.*?)</title>', shown.drawing
    )
    return [(kind, float(x), float(width), title) for kind, x, width, title in found]


def test_a_step_worked_out_by_hand(tmp_path):
    found = timeline(written(tmp_path / "placement.jsonl", step_of(1, ends=8.0)))
    (shown,) = found.steps
    assert (shown.step, shown.seconds) == (1, 10.0)
    assert shown.idle == pytest.approx(1 - (4 + 2 + 6 + 4) / 20)
    assert found.labels == ["device 0", "device 1"]
    assert found.roles == ["sampling", "judging", "training", "idle"]
    assert [label for label, _ in found.shares] == ["device 0", "device 1", "all 2"]
    assert found.shares[0][1] == pytest.approx({"sampling": 0.4, "training": 0.6, "idle": 0.0})
    assert found.shares[1][1] == pytest.approx({"judging": 0.2, "training": 0.4, "idle": 0.4})
    assert found.shares[2][1] == pytest.approx({"sampling": 0.2, "judging": 0.1, "training": 0.5, "idle": 0.2})
    assert bars(shown) == [
        ("idle", 0, 100, "device 0: idle 0% of the step"),
        ("a0", 0, 40, "device 0: sampling, 0 s to 4 s"),
        ("a2", 40, 60, "device 0: training, 4 s to 10 s"),
        ("idle", 0, 100, "device 1: idle 40% of the step"),
        ("a1", 10, 20, "device 1: judging, 1 s to 3 s"),
        ("a2", 40, 40, "device 1: training, 4 s to 8 s"),
    ]


def test_work_for_a_later_step_says_so(tmp_path):
    rows = step_of(1)
    rows[0] |= {"of": 2, "round": 1}
    found = timeline(written(tmp_path / "placement.jsonl", rows))
    assert ("a0", 0, 40, "device 0: sampling for step 2, round 2, 0 s to 4 s") in bars(found.steps[0])


def test_rewards_that_compute_elsewhere_have_a_row_below_the_devices(tmp_path):
    call = {"step": 1, "controller": 0, "reward": "<b>", "requests": 4, "seconds": 8.0, "at_once": 4, "role": "call"}
    calls = [{**call, "began": 4.0, "ended": 6.0}, {**call, "began": 5.0, "ended": 9.0}]
    found = timeline(written(tmp_path / "placement.jsonl", [*step_of(1), *calls]))
    (shown,) = found.steps
    assert (found.bad, found.labels, found.outside) == (0, ["device 0", "device 1"], ["outside"])
    assert found.roles == ["sampling", "judging", "training", "idle"]  # a call takes no share of a device
    assert shown.idle == pytest.approx(1 - (4 + 2 + 6 + 6) / 20)
    assert [label for label, _ in found.shares] == ["device 0", "device 1", "all 2"]
    assert ("k3", "rewards outside of the devices") in found.legend
    assert bars(shown)[-3:] == [
        ("idle", 0, 100, "outside: no reward computes"),
        ("a3", 40, 20, "outside: rewards outside of the devices (&lt;b&gt;), 4 s to 6 s"),
        ("a3", 50, 40, "outside: rewards outside of the devices (&lt;b&gt;), 5 s to 9 s"),
    ]
    other = {**call, "controller": 1, "began": 0.0, "ended": 1.0}
    several = [*step_of(1), span(1, 0, "rollout", 0.0, 1.0, controller=1), *calls, other]
    assert timeline(written(tmp_path / "two.jsonl", several)).outside == ["0.outside", "1.outside"]


def test_the_steps_shown_are_the_first_both_sides_of_the_largest_change_and_the_last(tmp_path):
    rows = []
    for step in range(1, 21):
        judges = 1 if step < 5 else 2 if step < 12 else 5
        rows += [*step_of(step), decision(step, 7 - judges, judges)]  # holds from the next step on
    found = timeline(written(tmp_path / "placement.jsonl", rows))
    assert [s.step for s in found.steps] == [1, 12, 13, 20]
    assert [s.about for s in found.steps] == [
        "the first",
        "before the split changed: 5 sampling + 2 judging",
        "after the split changed: 2 sampling + 5 judging",
        "the last: 2 sampling + 5 judging",
    ]
    metrics = [{"step": 1, "placement/rollout_devices": 7.0, "placement/judge_devices": 0.0}]
    assert timeline(tmp_path / "placement.jsonl", metrics).steps[0].about == "the first: all 7 in turn"
    metrics[0]["sampling/stale_steps"] = 1.0
    assert timeline(tmp_path / "placement.jsonl", metrics).steps[0].about == "the first"
    steady = timeline(written(tmp_path / "steady.jsonl", [row for n in range(1, 10) for row in step_of(n)]))
    assert [s.step for s in steady.steps] == [1, 5, 9]
    assert steady.decisions == []


def test_steps_of_very_different_length_have_scales_of_their_own(tmp_path):
    long = [{**row, "began": row["began"] * 10, "ended": row["ended"] * 10} for row in step_of(1)]
    found = timeline(written(tmp_path / "placement.jsonl", [*long, *step_of(2)]))
    assert not found.same_scale
    assert [bars(shown)[0][2] for shown in found.steps] == [100, 100]
    near = timeline(written(tmp_path / "near.jsonl", [*step_of(1), *[r for r in step_of(2) if r["role"] != "train"]]))
    assert near.same_scale
    assert [bars(shown)[0][2] for shown in near.steps] == [100, 40]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"nonsense\n",
        b"\xff\xfe\x00\n",
        b'{"step": 1}\n',
        b'{"step": 1, "device": 0}\n',
        b'{"step": 1, "controller": 0, "device": "a", "role": "train", "began": 0, "ended": 1}\n',
        b'{"step": 1, "controller": 0, "device": 0, "role": 3, "began": 0, "ended": 1}\n',
        b'{"step": 1, "controller": 0, "device": 0, "role": "train", "began": NaN, "ended": 1}\n',
        b'{"step": 1, "controller": 0, "device": 0, "role": "train", "began": 3, "ended": 1}\n',
        b'{"step": 1, "controller": -1, "device": 0, "role": "train", "began": 0, "ended": 1}\n',
        b'{"step": 1, "controller": 0, "device": 0, "role": "train", "began": 0, "ended": 1e300}\n',
        b'{"step": 1, "decision": 3, "rollout": 1, "judge": 1, "numbers": {}}\n',
        b'{"step": 1, ' + b"[" * 100_000 + b"\n",
        b'{"step": 99999999999999999999999, "controller": 0}\n',
    ],
)
def test_a_bad_line_is_left_out_and_counted(tmp_path, line):
    good = timeline(written(tmp_path / "good.jsonl", step_of(1)))
    path = written(tmp_path / "bad.jsonl", step_of(1)[:2], line)
    path.write_bytes(path.read_bytes() + written(tmp_path / "rest.jsonl", step_of(1)[2:]).read_bytes())
    found = timeline(path)
    assert found.steps == good.steps
    assert found.shares == good.shares
    assert found.bad == (0 if line == b"\n" else 1)


def test_a_torn_last_line_is_no_fault_and_odd_decisions_do_no_harm(tmp_path):
    torn = json.dumps(span(1, 0, "train", 10, 30)).encode()
    assert timeline(written(tmp_path / "torn.jsonl", step_of(1), torn[:40])).bad == 0
    odd = [
        {"step": 1, "decision": "no numbers"},
        {"step": 2, "decision": "w" * 9999, "rollout": "x", "judge": None, "numbers": [1]},
        {"step": 3, "decision": "", "rollout": 1e99, "judge": -1, "numbers": {"a": "b", "c": 10**9, "d": None}},
        {"step": 4, "decision": "a number that is none", "rollout": 10**400},
    ]
    path = written(tmp_path / "odd.jsonl", [*step_of(1), *odd])
    found = timeline(path)
    assert [(row["split"], len(row["why"])) for row in found.decisions] == [("-", 10), ("-", 400), ("-", 0)]
    assert found.decisions[2]["numbers"] == {"a": None, "c": 10**9, "d": None}
    assert found.bad == 1  # no number of a record has four hundred digits


def test_nothing_where_there_is_nothing(tmp_path):
    assert timeline(tmp_path / "placement.jsonl") is None
    assert timeline(tmp_path) is None
    for rows in ([], [decision(1, 1, 1)], [{"step": 1, "device": 0}]):
        assert timeline(written(tmp_path / "placement.jsonl", rows)) is None


def test_of_a_large_file_only_what_is_shown_is_read_and_drawn(tmp_path):
    """512 devices, thousands of calls of one device, and lines of other steps that nobody could read."""
    rows = [span(1, d, "rollout", 0.0, 5.0, controller=c) for c in range(64) for d in range(8)]
    rows += [span(1, 0, "train", 5 + n / 1000, 5 + (n + 1) / 1000) for n in range(4000)]
    rows += [span(1, 1, ("rollout", "judge")[n % 2], 5 + n / 1000, 5 + (n + 1) / 1000) for n in range(4000)]
    rows += [{"step": step, "device": "unreadable"} for step in range(2, 200)]
    rows += [row for n in range(200, 203) for row in step_of(n)]
    rows += [decision(n, 4, 4) for n in range(100)] + [decision(n, n % 3 + 1, 5 - n % 3) for n in range(100, 203)]
    found = timeline(written(tmp_path / "placement.jsonl", rows), [{"step": 2, "reward/mean": 0.1}])
    assert [shown.step for shown in found.steps] == [1, 202]
    assert found.bad == 2, "of the lines nobody can read, only those of the chosen steps 102 and 103 were looked at"
    assert found.hidden == 512 - DEVICES
    assert len(found.labels) == DEVICES
    assert found.labels[8] == "1.0"
    assert found.shares[-1][0] == "all 512"
    first = bars(found.steps[0])
    assert len(first) < 2 * DEVICES + 450
    assert ("a2", 50.0, 40.0, "0.0: training, 4000 calls, 5 s to 9 s") in first
    assert len(found.decisions) == DECISIONS
    assert found.decided == 203
    assert found.decisions[0]["step"] == 0
    assert [row["changed"] for row in found.decisions[1:]].count(True) >= DECISIONS - 2


class Page(HTMLParser):
    """The tags and text of a page, as a browser would part them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_report_shows_it_with_whatever_the_file_says(tmp_path):
    with RunDir.create(tmp_path / "run") as run, MetricsLog(run.metrics) as metrics:
        metrics.write(1, {"reward/mean": 0.5})
    assert "Devices" not in Page(write_report(run.path).read_text()).text
    rows = [*step_of(1), decision(1, 1, 1, HOSTILE, rollout_busy=3.25, **{HOSTILE: 1.0}), span(1, 1, HOSTILE, 3, 4)]
    written(run.placement, [*rows, {"step": 1, "device": HOSTILE}])
    html = write_report(run.path).read_text()
    page = Page(html)
    for text in ("Devices", "step 1", "sampling", "judging", "training", "idle", "1 sampling + 1 judging", "3.25"):
        assert text in page.text, text
    assert HOSTILE in page.text
    assert "1 line of placement.jsonl could not be read" in page.text
    assert not [tag for tag, a in page.tags if tag == "img" or any(name.startswith("on") for name in a)]
    assert "<title>device 0: sampling, 0 s to 4 s</title>" in html
    (drawing,) = [a for tag, a in page.tags if tag == "svg" and a.get("class") == "rows"]
    assert drawing["aria-label"] == "what 2 devices did in step 1"


def test_a_device_that_trains_and_was_lent_shows_three_roles_and_the_decision_in_words(tmp_path):
    said = "1 device that trains sampled 2 micro-batches and judged 1 call while waiting"
    rows = [
        span(1, 0, "rollout", 0.0, 2.0),
        span(1, 0, "judge", 2.0, 4.0),
        span(1, 0, "train", 5.0, 10.0),
        span(1, 1, "rollout", 0.0, 10.0),
        {"step": 1, "decision": said, "numbers": {"sampling": 2.0, "judging": 2.0, "price_back": 0.1}},
    ]
    found = timeline(written(tmp_path / "placement.jsonl", rows))
    assert found.shares[0][1] == pytest.approx({"sampling": 0.2, "judging": 0.2, "training": 0.5, "idle": 0.1})
    (row,) = found.decisions
    assert (row["why"], row["split"], row["changed"]) == (said, "-", False)
    assert row["numbers"]["price_back"] == 0.1
