"""What leaves a controller, counted by others: the kernel's counters of network interfaces, Ray's of its object store.

Controllers in network namespaces of their own have one interface, and whatever they say to one another passes it.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.controller import Controller
from mmrl.controller.peers import Group, interface_to
from mmrl.loop import train_step
from mmrl.report.clock import Clock
from mmrl.run import build
from tests.hosts import network

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4"]
PICTURES = [*SMALL, "sampling.steps=2", "sampling.window={size: 1}", 'rewards=[{name: "jpeg:compressibility"}]']
RECIPES = {"diffusion": ("shapes-lora", PICTURES), "text": ("sums", SMALL), "vision": ("scenes", SMALL)}
STEPS = 3


def serve(name, rank, size, host, port, out, overrides):
    """A controller of a few steps in this process: the script's work."""
    torch.set_num_threads(1)
    recipe, changes = RECIPES[name]
    loaded = load_recipe([recipe], [*changes, *overrides])
    peers = Group(rank, size, host, port)
    run = build(loaded.recipe, loaded.root, Controller(0, rank, size, peers))
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
    Path(out).write_text(json.dumps({"sent": peers.sent, "made": made, "held": held, "pictures": pictures}))
    peers.close()


def crossed(name, hosts, folder, *overrides):
    """Of each controller: what it counted, and the bytes its interface received and sent."""
    before = [host.counted() for host in hosts]
    outs = [folder / f"{name}-{rank}.json" for rank in range(len(hosts))]
    started = [
        host.start(
            [
                *(sys.executable, "-m", "tests.test_bytes", name, str(rank), str(len(hosts)), hosts[0].address),
                *("29500", str(out), *overrides),
            ],
            cwd=ROOT,
        )
        for rank, (host, out) in enumerate(zip(hosts, outs, strict=True))
    ]
    try:
        assert [one.wait(timeout=300) for one in started] == [0] * len(hosts)
    finally:
        for one in started:
            one.kill()
    after = [host.counted() for host in hosts]
    moved = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    return [json.loads(out.read_text()) | {"rx": rx, "tx": tx} for out, (rx, tx) in zip(outs, moved, strict=True)]


def all_of(one):
    """Bytes that a controller would have sent had it sent what it made: trajectories, features, pictures."""
    return one["made"] + one["held"] + one["pictures"]


def check(found):
    """What passed the interfaces is what the controllers say, the protocol's own, and nothing that could be samples."""
    for one in found:
        said = sum(one["sent"].values())
        protocol = one["tx"] - said
        assert set(one["sent"]) <= {"gradients", "numbers", "statistics"}
        assert 0 < protocol < 0.006 * said + 30_000, one
        assert protocol < all_of(one) / 2, "the samples are too few to be seen beside the protocol"
        assert one["sent"]["numbers"] + one["sent"].get("statistics", 0) < 12_000


@pytest.mark.slow
def test_pictures_stay_and_their_size_changes_nothing_on_the_wire(tmp_path):
    with network(2) as hosts:
        small, large = (
            crossed("diffusion", hosts, tmp_path, f"sampling.height={n}", f"sampling.width={n}") for n in (16, 32)
        )
    check(large)
    for one, four in zip(small, large, strict=True):
        assert all_of(four) - all_of(one) > 150_000
        assert abs(four["tx"] - one["tx"]) < 8_000
        assert abs(four["rx"] - one["rx"]) < 8_000


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "group"), [("text", 3, 64), ("vision", 2, 4)])
def test_tokens_and_processor_outputs_stay(name, size, group, tmp_path):
    if name == "vision":
        pytest.importorskip("torchvision")
    with network(size) as hosts:
        check(crossed(name, hosts, tmp_path, f"train.group_size={group}"))


def test_the_interface_to_a_host_is_named():
    assert interface_to("127.0.0.1") in ("lo", "lo0")
    assert interface_to("no.such.host.invalid") is None
    with network(1) as (host,):
        program = f"from mmrl.controller.peers import interface_to as to; print(to('{host.address}'), to('127.0.0.1'))"
        said = host.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert said.stdout.split() == ["eth0", "lo"]


if __name__ == "__main__":
    name, rank, size, host, port, out, *overrides = sys.argv[1:]
    serve(name, int(rank), int(size), host, int(port), out, overrides)
