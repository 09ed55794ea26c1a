"""examples/served: our glue over real HTTP, with stand-ins for the authors' classes; their models are not run."""

import importlib.util
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from mmrl.cli import app
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Failed
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.loading import build, find
from mmrl.rewards.scoring import RewardSet
from mmrl.rewards.serve import RewardServer
from tests.support import tiny

allow_cpu_only()  # before anything imports torchvision
SERVED = Path(__file__).resolve().parents[2] / "examples" / "served"
HPSV3 = """
import torch
from PIL import Image

class HPSv3RewardInferencer:
    def __init__(self, config_path=None, checkpoint_path=None, device="cuda"):
        self.device = device

    def reward(self, prompts, image_paths):
        if "boom" in prompts:
            raise RuntimeError("out of memory")
        reds = [Image.open(path).getpixel((0, 0))[0] for path in image_paths]
        return torch.tensor([[red + len(p), float("nan") if p == "odd" else 0.5] for red, p in zip(reds, prompts)])
"""
VQA = """
import torch
from PIL import Image

class VQAScore:
    calls = []

    def __init__(self, model, device):
        assert (model, device) == ("clip-flant5-xl", "cpu")

    def __call__(self, images, texts):
        VQAScore.calls.append((len(images), texts))
        reds = [Image.open(path).getpixel((0, 0))[0] for path in images]
        return torch.tensor([[red / 255 + len(text) for text in texts] for red in reds])
"""
VIDEO = """
import av

class VideoVLMRewardInference:
    def __init__(self, load_from_pretrained, load_from_pretrained_step=-1, device="cuda"):
        self.checkpoints = load_from_pretrained

    def reward(self, video_paths, prompts, fps=None, num_frames=None, max_pixels=None, use_norm=True):
        found = []
        for path, prompt in zip(video_paths, prompts):
            with av.open(path) as file:
                rate = float(file.streams.video[0].average_rate)
                reds = [f.to_image().getpixel((4, 4))[0] for f in file.decode(video=0)]
            found.append({"VQ": sum(reds), "MQ": rate, "TA": num_frames, "Overall": len(reds) + len(prompt)})
        return found
"""


def samples(*items):
    return [
        Sample(Prompt(f"id{i}", text), SampleId(0, i, 0, 0), Image.new("RGB", (16, 16), (red, 0, 0)))
        for i, (text, red) in enumerate(items)
    ]


@contextmanager
def served(name, *, inputs=("image",), **options):
    """The reward behind a real server, asked as a recipe asks it."""
    with RewardServer(str(SERVED / f"{name}_reward.py"), port=0, options=options) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        asked = {"url": server.url, "inputs": list(inputs)}
        try:
            yield RewardSet([Reward(name="http:score", label="far", on_failure="drop", options=asked)])
        finally:
            server.shutdown()


def score(rewards, made):
    return rewards.score(made, [[i] for i in range(len(made))], step=0)


def test_hpsv3_gets_files_and_prompts_and_an_error_is_named(tmp_path, monkeypatch):
    (tmp_path / "hpsv3.py").write_text(HPSV3)
    monkeypatch.syspath_prepend(tmp_path)
    with served("hpsv3", device="cpu") as rewards:
        found = score(rewards, samples(("a cat", 10), ("a dog!", 200)))
        assert found.parts["far"].tolist() == [15, 206]
        assert found.parts["far/uncertainty"].tolist() == [0.5, 0.5]
        found = score(rewards, samples(("boom", 1)))
        assert "out of memory" in found.failures[0].reason
        assert score(rewards, samples(("after", 1))).parts["far"].tolist() == [6]  # the server lives on


def test_vqascore_is_called_once_for_each_prompt(tmp_path, monkeypatch):
    (tmp_path / "t2v_metrics.py").write_text(VQA)
    monkeypatch.syspath_prepend(tmp_path)
    with served("vqascore", model="clip-flant5-xl", device="cpu") as rewards:
        found = score(rewards, samples(("cat", 255), ("a dog", 0), ("cat", 51)))
    assert found.parts["far"].tolist() == pytest.approx([4, 5, 3.2])
    import t2v_metrics

    assert t2v_metrics.VQAScore.calls == [(2, ["cat"]), (1, ["a dog"])]


def test_videoalign_reads_the_frames_that_were_made(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "inference.py").write_text(VIDEO)
    clip = tuple(Image.new("RGB", (16, 16), (red, 40, 90)) for red in (20, 120, 220))
    made = [Sample(Prompt("a", "moves"), SampleId(0, 0, 0, 0), video=clip)]
    with served("videoalign", inputs=("video",), repo=str(tmp_path), num_frames=2, fps=8) as rewards:
        found = score(rewards, made)
    assert found.parts["far"].tolist() == [3 + len("moves")]
    assert found.parts["far/visual"].tolist()[0] == pytest.approx(360, abs=12)
    assert (found.parts["far/motion"].tolist(), found.parts["far/text"].tolist()) == ([8], [2])


def test_a_folder_that_is_no_clone_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"options\.repo: .* has no inference\.py"):
        build(find(str(SERVED / "videoalign_reward.py")), {"repo": str(tmp_path)})


SCRIPT = """
raise SystemExit("this is never run")
prompt = ''
problem = ("Rate the picture.\\n" f"Caption: [{prompt}]")
"""


def test_unifiedreward_reads_the_question_and_three_numbers(tmp_path):
    spec = importlib.util.spec_from_file_location("unifiedreward_reward", SERVED / "unifiedreward_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "acs.py").write_text(SCRIPT)
    assert module.question(str(tmp_path / "acs.py")) == ["Rate the picture.\nCaption: [", None, "]"]
    (tmp_path / "other.py").write_text("problem = 'no caption'\n")
    with pytest.raises(UserError, match=r"options\.script: .*other\.py asks nothing about a prompt"):
        module.question(str(tmp_path / "other.py"))
    said = "Alignment Score (1-5): 2.69\nCoherence Score (1-5): 3\nStyle Score (1-5): 5"
    assert module.read(said) == {"Alignment": 2.69, "Coherence": 3.0, "Style": 5.0}
    for wrong in ("I like it.", said.replace("2.69", "7"), said.rpartition("\n")[0]):
        assert isinstance(module.read(wrong), Failed)


def test_unifiedreward_asks_a_real_model_about_its_pictures(tmp_path):
    """A tiny Qwen3-VL with random weights: it writes no scores, and every sample fails with what it wrote."""
    pytest.importorskip("torchvision")
    tiny.vision_model(tmp_path / "model", "qwen3_vl")
    (tmp_path / "acs.py").write_text(SCRIPT)
    options = {"script": str(tmp_path / "acs.py"), "path": str(tmp_path / "model"), "device": "cpu", "max_tokens": 4}
    with served("unifiedreward", **options) as rewards:
        found = score(rewards, samples(("a cat", 10), ("a longer caption of a dog", 200)))
    assert ["no three scores from 1 to 5 in" in failure.reason for failure in found.failures] == [True, True]


def test_they_keep_the_contract_of_a_reward_and_the_page_names_them(tmp_path, monkeypatch, capsys):
    (tmp_path / "hpsv3.py").write_text(HPSV3)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["check", str(SERVED / "hpsv3_reward.py"), "--options", "device=cpu"]
    assert app(arguments, standalone_mode=False) == 0, capsys.readouterr().out
    page = (SERVED / "README.md").read_text()
    for file in SERVED.glob("*_reward.py"):
        assert f"`{file.name}`" in page
        assert "Not run here with its real model" in file.read_text()
        requirements = file.name.replace("_reward.py", ".txt")
        assert (SERVED / requirements).is_file()
        assert requirements in page
