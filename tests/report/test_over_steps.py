"""Samples of the same prompts over the steps of a run: a strip, and a picture that moves."""

import numpy
import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.logging.grids import write_samples
from mmrl.logging.rundir import RunDir
from mmrl.report.over_steps import write_over_steps

PROMPTS = [f"prompt {n}" for n in range(6)]


def shade(step, number):
    return (step * 40 + 5, number * 30 + 5, 99)


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "run")
    for step in (0, 2, 4):
        pictures = [Image.new("RGB", (8, 8), shade(step, number)) for number in range(6)]
        write_samples(folder, step, pictures, PROMPTS, [{"own": float(step)}] * 6)
    return tmp_path / "run"


def colours(image):
    return {tuple(map(int, one)) for one in numpy.unique(numpy.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)}


def test_a_moving_picture_has_a_frame_for_each_evaluation(run, tmp_path):
    file = write_over_steps(run, tmp_path / "over.webp", [1, 4])
    with Image.open(file) as image:
        assert image.n_frames == 3
    file = write_over_steps(run, tmp_path / "over.gif")
    with Image.open(file) as image:
        shown = []
        for place in range(image.n_frames):
            image.seek(place)
            shown.append(colours(image))
    for place, step in enumerate((0, 2, 4)):
        assert {shade(step, number) for number in range(4)} <= shown[place]
        assert not shown[place] & {shade(other, n) for other in {0, 2, 4} - {step} for n in range(4)}


def test_a_strip_has_a_row_for_each_prompt_and_a_column_for_each_evaluation(run, tmp_path):
    with Image.open(write_over_steps(run, tmp_path / "over.png", [5, 0])) as image:
        pixels = numpy.asarray(image.convert("RGB"))
    where = {}
    for step in (0, 2, 4):
        for number in (5, 0):
            y, x = numpy.argwhere((pixels == shade(step, number)).all(-1))[0]
            where[step, number] = (int(y), int(x))
    assert where[0, 5][0] == where[2, 5][0] == where[4, 5][0] < where[0, 0][0] == where[4, 0][0]
    assert where[0, 5][1] == where[0, 0][1] < where[2, 5][1] == where[2, 0][1] < where[4, 0][1]


def test_what_cannot_be_drawn_is_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"end its name in \.gif, \.webp or \.png"):
        write_over_steps(run, tmp_path / "over.jpeg")
    with pytest.raises(UserError, match=r"samples 0 to 5, and no 6"):
        write_over_steps(run, tmp_path / "over.gif", [0, 6])
    for step in (2, 4):
        (run / "samples" / f"step_{step:06d}.json").unlink()
    with pytest.raises(UserError, match="pictures of 1 evaluations"):
        write_over_steps(run, tmp_path / "over.gif")
