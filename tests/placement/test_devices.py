"""Several devices to a controller: the same learning wherever samples are drawn and judged, and real moves."""

import itertools
import signal

import pytest

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.rewards.judging.local import LocalModel
from tests.support.runs import JUDGED, ROOT, SMALL, alike, ended, lose_one, placed, rows, run, start, train

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("ray")
pytest.importorskip("torchvision")

VISION = ["train.steps=2", "train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4", *SMALL[4:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one device, with a generative judge."""
    out = tmp_path_factory.mktemp("devices") / "alone"
    run("shapes-judge", out, *JUDGED)
    return out


def test_two_controllers_of_two_devices_learn_as_one_device(alone, tmp_path):
    out = tmp_path / "adaptive"
    said = run("shapes-judge", out, *JUDGED, "controllers=2", "devices_per_controller=2", "placement=adaptive")
    assert "done: 3 steps" in said
    alike(alone, out)
    lines = placed(out)
    work = [line for line in lines if "device" in line]
    assert {(line["controller"], line["device"]) for line in work} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {line["role"] for line in work} == {"rollout", "judge", "train"}
    assert all(0 <= line["began"] <= line["ended"] for line in work)
    for controller in (0, 1):  # a device does one thing at a time
        for device in (0, 1):
            mine = sorted(
                (line["step"], line["began"], line["ended"])
                for line in work
                if (line["controller"], line["device"]) == (controller, device)
            )
            assert all(a[2] <= b[1] + 1e-3 for a, b in itertools.pairwise(mine) if a[0] == b[0])
    assert [line["step"] for line in lines if "decision" in line] == [1, 2, 3]
    assert rows(out)[0]["placement/moves"] >= 1
    assert rows(out)[-1]["sent/numbers"] < 20_000


@pytest.mark.long  # in short: the adaptive placement, above, which begins with all in turn
@pytest.mark.slow
@pytest.mark.parametrize("placement", ["{type: partial, sleep: true}", "colocate", "{type: adaptive, inside: false}"])
def test_every_placement_learns_alike(alone, tmp_path, placement):
    out = tmp_path / "placed"
    run("shapes-judge", out, *JUDGED, "devices_per_controller=2", f"placement={placement}")
    alike(alone, out)
    roles = {(line["device"], line["role"]) for line in placed(out) if "device" in line and line["step"] == 1}
    judges = {device for device, role in roles if role == "judge"}
    assert judges == ({1} if "partial" in placement else {0, 1})  # adaptive begins with all in turn
    if "sleep" in placement:
        assert (1, "wake") in roles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "judge"), [pytest.param("sums-capo", 1, marks=pytest.mark.long), ("scenes-judge", 0)]
)
def test_text_and_vision_with_a_judge_learn_as_one_device(tmp_path, recipe, judge):
    # a micro-batch is judged in several calls, which come at once and wait for both devices
    small = [*JUDGED[:-1], "train.steps=2", "eval.every=2", "sampling.batch_size=12", f"rewards.{judge}.batch_size=4"]
    run(recipe, tmp_path / "one", *small)
    run(recipe, tmp_path / "two", *small, "devices_per_controller=2", "placement=adaptive")
    alike(tmp_path / "one", tmp_path / "two")
    work = [line for line in placed(tmp_path / "two") if "device" in line]
    assert {(line["controller"], line["device"]) for line in work if line["role"] == "judge"} > {(0, 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["shapes-draft", *(pytest.param(name, marks=pytest.mark.long) for name in ("sums", "scenes", "sums-dpo"))]
)
def test_every_kind_of_recipe_trains_on_two_devices(tmp_path, recipe):
    small = {"sums-dpo": [w for w in VISION if "group_size" not in w]}.get(recipe, VISION)
    small = [w for w in small if recipe != "shapes-draft" or "group_size" not in w]
    run(recipe, tmp_path / "one", *small)
    run(recipe, tmp_path / "two", *small, "devices_per_controller=2")
    alike(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def unhurried(tmp_path_factory):
    """A run of one process, of which nothing is lost."""
    out = tmp_path_factory.mktemp("unhurried") / "whole"
    assert ended(start(out))[0] == 0
    return out


AHEAD = "placement={type: disaggregated, staleness: 1}"
LENT = "placement={type: disaggregated, staleness: 1, lend: true}"
SHARDS = "train.backend=fsdp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        (signal.SIGKILL, []),
        pytest.param(signal.SIGSTOP, [AHEAD], marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, [SHARDS], marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, [], marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, [SHARDS], marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, [AHEAD], marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, [LENT], marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, [AHEAD, SHARDS, "controllers=2"], marks=pytest.mark.long),
    ],
    ids=lambda what: " ".join(what) if isinstance(what, list) else what.name,
)
def test_a_device_that_dies_or_freezes_is_found_and_nothing_is_lost(unhurried, tmp_path, how, layout):
    whole, out = unhurried, tmp_path / "lost"
    if AHEAD in layout or LENT in layout:  # it learns from older samples
        whole = tmp_path / "whole"
        assert ended(start(whole, "devices_per_controller=2", AHEAD))[0] == 0
    lose_one(out, how, "devices_per_controller=2", *layout)
    alike(whole, out)
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_the_user_must_mend_on_one_device_alone_is_said(tmp_path):
    file = tmp_path / "picky.py"
    file.write_text(
        "import os\nimport mmrl\n\n@mmrl.reward(inputs=('text',))\nclass Score:\n    def __init__(self):\n"
        "        if os.readlink('/proc/self/fd/1').endswith('/0.1.log'):\n"
        "            raise ValueError('no room here')\n"
        "    def score(self, samples, *, context):\n        return [0.0] * len(samples)\n"
    )
    words = [*SMALL, f'rewards=[{{name: "{file}:Score"}}]', "devices_per_controller=2"]
    code, said = ended(train("sums", tmp_path / "x", *words))
    assert code == 2, said
    assert "no room here" in said
    assert "Traceback" not in said


def test_a_judge_sleeps_for_real_and_answers_as_before():
    from mmrl.rewards.judging.answers import parse_kind
    from mmrl.rewards.judging.asking import Ask, Settings

    model = LocalModel(str(ROOT / "pipelines" / "vlm" / "models" / "shapes-judge"))
    size = sum(p.nbytes for p in model.model.parameters())
    ask = [Ask(["Is 2 + 2 = 4? Answer yes or no."], None, 7)]
    kind = parse_kind("pointwise", {"type": "yes_no"})
    before = model.ask(ask, kind, Settings(0.0, 4, 0), "cpu")[0].verdict
    model.sleep("cpu")
    model.sleep("cpu")
    assert {p.nbytes for p in model.model.parameters()} == {0}  # no byte of the weights is left
    assert size > 1e6
    assert model.ask(ask, kind, Settings(0.0, 4, 0), "cpu")[0].verdict == before
    model.sleep("cpu")
    model.wake("cpu")
    assert sum(p.nbytes for p in model.model.parameters()) == size  # before it is asked
