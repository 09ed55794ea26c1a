"""What leaves a controller, counted by others: the kernel's counters of network interfaces, Ray's of its object store.

Controllers in network namespaces of their own have one interface, and whatever they say to one another passes it.
"""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest
import torch

from mmrl.app.build import build
from mmrl.app.trainer import Trainer
from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group, interface_to
from mmrl.core.clock import Clock
from mmrl.core.episode import Observation
from mmrl.core.signals import Stop
from mmrl.logging.rundir import RunDir
from mmrl.rewards import wire
from mmrl.rewards.serve import RewardServer
from mmrl.training.loop import train_step
from tests.support import judging
from tests.support.hosts import network
from tests.support.tiny_diffusion import two_blocks

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4"]
PICTURES = [*SMALL, "sampling.steps=2", "sampling.window={size: 1}", 'rewards=[{name: "jpeg:compressibility"}]']
TOLD = [*SMALL, "environment.max_turns=2", "environment.max_tokens=200", "environment.max_pictures=1"]
TOLD += ["model.max_pixels=2304"]  # of a picture when the model sees it, however large it was told
RECIPES = {"diffusion": ("shapes-lora", PICTURES), "text": ("sums", SMALL), "vision": ("scenes", SMALL)}
RECIPES["episodes"] = ("scenes-zoom", TOLD)
WORLD = """
import numpy
from PIL import Image
from mmrl.core.episode import Observation

Observation.shown = []

class Environment:
    pictures = True

    def reset(self, prompt, seed):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        if self.turns > 1:
            return None
        noise = numpy.random.default_rng(0).integers(0, 255, ({side}, {side}, 3), dtype=numpy.uint8)
        picture = Image.fromarray(noise)
        Observation.shown.append(len(picture.tobytes()))  # calls run side by side
        return Observation(picture)
"""
STEPS = 3


def serve(name, rank, size, host, port, out, overrides):
    """A controller of a few steps in this process: the script's work."""
    torch.set_num_threads(1)
    recipe, changes = RECIPES[name]
    loaded = load_recipe([recipe], [*changes, *overrides])
    peers = Group(rank, size, host, port)
    run = build(loaded.recipe, Controller(0, rank, size, peers))
    made = 0
    pipeline_sample = run.pipeline.sample

    def sample(*args, **kwargs):
        nonlocal made
        trajectory = pipeline_sample(*args, **kwargs)
        made += sum(t.nbytes for t in vars(trajectory).values() if isinstance(t, torch.Tensor))
        return trajectory

    run.pipeline.sample = sample
    for step in range(STEPS):
        train_step(run, step, Clock(torch.device("cpu")))
    held = run.pipeline.features.bytes
    pixels = loaded.recipe.sampling
    pictures = 3 * getattr(pixels, "height", 0) * getattr(pixels, "width", 0) * STEPS * 16 // size
    told = sum(getattr(Observation, "shown", []))
    found = {"sent": peers.sent, "made": made, "held": held, "pictures": pictures, "told": told}
    Path(out).write_text(json.dumps(found))
    peers.close()


def crossed(name, hosts, folder, *overrides):
    """Of each controller: what it counted, the bytes its interface sent, and TCP's own among these."""
    before = [(host.counted()[1], host.overhead()) for host in hosts]
    outs = [folder / f"{name}-{rank}.json" for rank in range(len(hosts))]
    started = [
        host.warm(__file__, name, rank, len(hosts), hosts[0].address, "29500", out, *overrides)
        for rank, (host, out) in enumerate(zip(hosts, outs, strict=True))
    ]
    try:
        for one in started:
            one.join(300)
        assert [one.exitcode for one in started] == [0] * len(hosts)
    finally:
        for one in started:
            one.kill()
            one.join()
    after = [(host.counted()[1], host.overhead()) for host in hosts]
    moved = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    return [
        json.loads(out.read_text()) | dict(zip(("tx", "tcp"), counts, strict=True))
        for out, counts in zip(outs, moved, strict=True)
    ]


def all_of(one):
    """Bytes that a controller would have sent had it sent what it made: trajectories, features, pictures."""
    return one["made"] + one["held"] + one["pictures"]


def check(found):
    """What passed the interfaces is what the controllers say, the protocol's own, and nothing that could be samples."""
    for one in found:
        said = sum(one["sent"].values())
        protocol = one["tx"] - said - one["tcp"]  # a busy machine cuts the same bytes into more packets
        assert set(one["sent"]) <= {"gradients", "numbers", "statistics"}
        assert said < one["tx"]
        assert protocol < 30_000, one
        assert protocol < all_of(one) / 2, "the samples are too few to be seen beside the protocol"
        assert one["sent"]["numbers"] + one["sent"].get("statistics", 0) < all_of(one) / 4


@pytest.mark.slow
def test_pictures_stay_and_their_size_changes_nothing_on_the_wire(tmp_path):
    with network(2) as hosts:
        small, large = (
            crossed(
                "diffusion",
                hosts,
                tmp_path,
                f"model.path={two_blocks()}",
                f"sampling.height={n}",
                f"sampling.width={n}",
            )
            for n in (16, 32)
        )
    check(large)
    for one, four in zip(small, large, strict=True):
        assert all_of(four) - all_of(one) > 150_000
        assert abs(four["tx"] - four["tcp"] - (one["tx"] - one["tcp"])) < 8_000  # the other's is what this one received


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "group"),
    [pytest.param("text", 3, 256, marks=pytest.mark.long), pytest.param("vision", 2, 4, marks=pytest.mark.long)],
)
def test_tokens_and_processor_outputs_stay(name, size, group, tmp_path):
    if name == "vision" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    with network(size) as hosts:
        check(crossed(name, hosts, tmp_path, f"train.group_size={group}", f"train.micro_batch_size={group}"))


@pytest.mark.slow
def test_pictures_that_an_environment_tells_stay(tmp_path):
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    found = {}
    with network(2) as hosts:
        for side in (24, 1200):
            world = tmp_path / f"world{side}.py"
            world.write_text(WORLD.format(side=side))
            found[side] = crossed("episodes", hosts, tmp_path, f"environment.name={world}:Environment")
    assert sum(one["told"] for one in found[24]) < 200_000
    assert sum(one["told"] for one in found[1200]) > STEPS * 20_000_000  # 20 MB a step and more
    for small, large in zip(found[24], found[1200], strict=True):
        assert set(large["sent"]) <= {"gradients", "numbers", "statistics"}
        more = (large["tx"] - large["tcp"]) - (small["tx"] - small["tcp"])
        assert abs(more) < 200_000, (more, large)


@pytest.mark.slow
def test_the_interface_to_a_host_is_named():
    assert interface_to("127.0.0.1") in ("lo", "lo0")
    assert interface_to("no.such.host.invalid") is None
    with network(1) as (host,):
        program = f"from mmrl.controller.peers import interface_to as to; print(to('{host.address}'), to('127.0.0.1'))"
        said = host.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout.split() == ["eth0", "lo"]


def trained(out, *overrides):
    """The rows of two steps of a run of pictures, evaluation left out."""
    steps = ["train.steps=2", "eval.every=null", "checkpoint.every=2"]
    loaded = load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *PICTURES, *steps, *overrides])
    with RunDir.create(out) as directory:
        assert Trainer(loaded, directory).begin(Stop(), resume=False).finished
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_an_endpoint_judge_gets_each_picture_once_and_the_count_is_what_it_got(tmp_path):
    def answer(server, body):
        if body is not None and len(server.server.requests) == 3:
            server.say(503, "busy")  # asked again, and counted again
        elif body is not None:
            text = str(len(body["messages"][0]["content"][0]["image_url"]["url"]) % 10)
            server.say(200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}))
        return body is not None

    with judging.Served(before=answer) as server:
        options = f"{{model: {{url: '{server.url}', name: tiny}}, rubric: '{{{{ image }}}}How good?', cache: false, "
        options += "answer: {type: number, min: 0, max: 10}}"
        rows = trained(tmp_path / "run", f"rewards=[{{name: judge, options: {options}}}]")
    urls = [b["messages"][0]["content"][0]["image_url"]["url"] for b in server.requests]
    assert len(urls) == 2 * 16 + 1
    assert sum(row["sent/media"] for row in rows) == sum(map(len, urls))
    whole = sum(len(json.dumps(body)) for body in server.requests)
    assert sum(row["sent/questions"] for row in rows) == whole - sum(map(len, urls))


def test_a_remote_reward_gets_each_picture_once_and_the_count_is_what_it_got(tmp_path, monkeypatch):
    bodies, decode = [], wire.decode_request
    monkeypatch.setattr(wire, "decode_request", lambda body, **more: bodies.append(body) or decode(body, **more))
    with RewardServer("jpeg:compressibility", port=0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        rows = trained(tmp_path / "run", f"rewards=[{{name: 'http:score', options: {{url: '{server.url}'}}}}]")
        server.shutdown()
    samples = [sample for body in bodies for sample in json.loads(body)["samples"]]
    assert sorted(sample["place"] for sample in samples) == [
        [t, n, 0, k] for t in (0, 1) for n in range(4) for k in range(4)
    ]
    assert sum(row["sent/media"] for row in rows) == sum(len(sample["image"]) for sample in samples)
    assert sum(row["sent/media"] + row["sent/questions"] for row in rows) == sum(map(len, bodies))


if __name__ == "__main__":
    name, rank, size, host, port, out, *overrides = sys.argv[1:]
    serve(name, int(rank), int(size), host, int(port), out, overrides)
