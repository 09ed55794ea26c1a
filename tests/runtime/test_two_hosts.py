"""One recipe on two hosts of one machine: two network namespaces, a raylet in each with an address of its own."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mmrl.config.loader import find_recipe
from tests.support.hosts import ENVIRONMENT, lose, network, ray
from tests.support.runs import UNHURRIED, learned, rows

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "train.steps=3",
    "train.prompts_per_step=4",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "eval.samples=8",
]
STATISTICS = """
import sys, ray
from ray._private.internal_api import node_stats
ray.init(address=sys.argv[1], logging_level="error")
for node in ray.nodes():
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats
    print(node["NodeManagerAddress"], stats.cumulative_created_objects, stats.cumulative_created_bytes)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two hosts with a cluster, its address, and a folder that the second host sees as another."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "own").mkdir()
    short = tempfile.mkdtemp(prefix="ray")  # the names of its sockets must be short
    with network(2) as hosts:
        address = f"{hosts[0].address}:6399"
        try:
            ray(hosts[0], "--head", "--port=6399", "--include-dashboard=false", f"--temp-dir={short}")
            ray(hosts[1], f"--address={address}", before=f"mount -t tmpfs none {folder}/own &&")
            yield hosts, address, folder
        finally:
            for host in hosts:
                lose(host)
            shutil.rmtree(short, ignore_errors=True)


def train(two, out, *overrides, words=("sums",), **environment):
    """The exit status and what ``mmrl train`` said, started on the first host."""
    process = started(two, out, *overrides, words=words, **environment)
    try:
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, said


def started(two, out, *overrides, words=("sums",), **environment):
    """``mmrl train`` on the first host."""
    hosts, address, _ = two
    words = ["-m", "mmrl.cli", "train", *words, *SMALL, "controllers=2", f"ray={address}", "--out", str(out)]
    return hosts[0].start(
        [sys.executable, *words, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=out.parent,
        env=ENVIRONMENT | environment,
    )


def moved_in(hosts, call):
    """What ``call`` returned, and the bytes that each host received and sent meanwhile."""
    before = [host.counted() for host in hosts]
    found = call()
    after = [host.counted() for host in hosts]
    return found, [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]


def test_a_controller_on_each_host_and_no_samples_between_them(two, tmp_path):
    hosts, address, _ = two
    _, idle = moved_in(hosts, lambda: time.sleep(3))
    resent, began = sum(host.resent() for host in hosts), time.monotonic()
    (code, said), moved = moved_in(hosts, lambda: train(two, tmp_path / "run"))
    seconds = time.monotonic() - began
    assert code == 0, said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sent = sum(value for row in rows for key, value in row.items() if key.startswith("sent/"))
    assert sent > 9_000_000  # the gradients of three updates
    raylets = 600_000 + 2 * max(map(max, idle)) / 3 * seconds  # their words: to start processes, and every second
    again = 1514 * (sum(host.resent() for host in hosts) - resent)  # by TCP, where a busy machine answers late
    for received_and_sent in moved:  # so there was a controller on each
        assert all(sent < n < 1.01 * sent + raylets + again for n in received_and_sent), (moved, raylets, again)
    done = hosts[0].run(
        [sys.executable, "-c", STATISTICS, address], capture_output=True, text=True, env=ENVIRONMENT, timeout=100
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {host.address for host in hosts}, done.stderr
    assert sum(int(line[2]) for line in lines) < 20_000, lines  # ever put into the object stores; one picture is 3,072


def test_a_directory_that_a_node_does_not_see_is_named(two):
    code, said = train(two, two[2] / "own" / "run")
    assert code == 2
    assert "does not see" in said, said
    assert "a directory that all nodes share" in said


def test_other_sources_on_a_node_are_named(two, tmp_path):
    shutil.copytree(ROOT, tmp_path / "other", ignore=shutil.ignore_patterns(".*", "docs", "tests", "results", "runs"))
    with (tmp_path / "other" / "mmrl" / "core" / "errors.py").open("a") as file:
        file.write("# changed\n")
    code, said = train(two, tmp_path / "run", PYTHONPATH=str(tmp_path / "other"))
    assert code == 2
    assert "install the same on all" in said, said


def test_another_version_of_ray_is_named(two, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '9.9.9'\n")
    code, said = train(two, tmp_path / "run", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert code == 2
    assert "differ" in said, said
    assert "9.9.9" in said


def test_a_cluster_that_asks_for_a_token_says_so(two, tmp_path):
    code, said = train(two, tmp_path / "run", RAY_AUTH_TOKEN="x" * 40)
    assert code == 2
    assert "RAY_AUTH_TOKEN" in said, said


NAMED = """
import os
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    assert os.environ["MY_TOKEN"].startswith("drawn"), os.environ["MY_SETTING"]
    return [float(len(sample.text or "") % 2) for sample in samples]
"""


def test_a_node_gets_the_recipes_files_and_variables_and_no_file_has_the_secret(two, tmp_path):
    own, token = two[2] / "own" / "recipe", "drawn0123456789abcdef"
    own.mkdir()
    shutil.copy(find_recipe("sums"), own / "mine.yaml")
    (own / "named.py").write_text(NAMED)
    words = [str(own / "mine.yaml"), "rewards=[{name: named.py:score}]", "env=[MY_TOKEN, MY_SETTING]"]
    short = ["train.steps=1", "eval.every=null"]
    code, said = train(two, tmp_path / "run", *short, words=words, MY_TOKEN=token, MY_SETTING="as it is")
    assert code == 0, said
    written = [p for f in (tmp_path, *Path(tempfile.gettempdir()).glob("ray*")) for p in f.rglob("*") if p.is_file()]
    assert len(written) > 20
    assert [str(path) for path in written if token.encode() in path.read_bytes()] == []
    code, said = train(two, tmp_path / "unset", words=words, MY_TOKEN=token)
    assert code == 2
    assert "env: MY_SETTING is not set here" in said
    (two[2] / "own" / "outside.py").write_text(NAMED)
    words[1] = f"rewards=[{{name: {two[2] / 'own' / 'outside.py'}:score}}]"
    code, said = train(two, tmp_path / "outside", words=words, MY_TOKEN=token, MY_SETTING="as it is")
    assert code == 2
    assert "rewards[0].name: node" in said
    assert "is outside of the recipe's folder" in said


HOLD = """
import sys, time, ray
ray.init(sys.argv[1])
@ray.remote(num_cpus=1)
class Other:
    def here(self):
        return True
other = Other.remote()
ray.get(other.here.remote())
print("held", flush=True)
time.sleep(120)
"""


def test_a_cluster_whose_devices_are_not_free_is_waited_for_and_named(two, tmp_path):
    hosts, address, _ = two
    other = hosts[0].start([sys.executable, "-c", HOLD, address], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        assert "held\n" in iter(other.stdout.readline, "")  # or it ended
        code, said = train(two, tmp_path / "run", "runtime.patience=3s")
    finally:
        other.kill()
        other.wait()
    assert code == 2
    assert "need 2 CPUs, and 1 of Ray's 2 are free after 3.0 s (runtime.patience)" in said, said


def test_a_run_outlives_a_host(two, tmp_path):
    """The last of this file: the second host is lost in the middle of a run, and the first goes on alone."""
    (tmp_path / "slow.py").write_text(UNHURRIED)
    longer = ["train.steps=6", "checkpoint.every=1", f'rewards=[{{name: "{tmp_path / "slow.py"}:score"}}]']
    process, deadline = started(two, tmp_path / "run", *longer), time.monotonic() + 200
    try:
        while len(rows(tmp_path / "run")) < 2:
            assert time.monotonic() < deadline, "no progress"
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        lose(two[0][1])
        said, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "1 of 2 controllers continue" in said, said
    whole = ["train", "sums", *SMALL, *longer, "--out", str(tmp_path / "whole")]
    subprocess.run([sys.executable, "-m", "mmrl.cli", *whole], check=True, env=ENVIRONMENT, timeout=200)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
