"""CPU-seconds to send weights to another process, by transport and by dtype: writing here, reading there.

    python benchmarks/weight_transport.py                 # 1 GiB of float32 weights, sent as they are and in bfloat16

The reader is a process of its own. It maps the files as an engine does, or receives buckets through a group (gloo). It
copies every tensor into a parameter of its own dtype; a checksum of the bits says whether they arrived. ``before`` is
how weights were sent before: a copy in the host's memory, files written by safetensors, in float32. The last two arms
are a message between the devices of a controller: with its bytes on the socket, and as it is sent. CPU-seconds are user
and system time of both processes; the arms take turns, and the table has medians and quartiles.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles

import torch
from torch import Tensor

from mmrl.inference.weight_files import BUCKET_BYTES, place_for, write_weights
from mmrl.inference.weight_groups import WeightGroup
from mmrl.runtime import wire

WIDTH = 2048
"""Of the square matrices that are sent."""
ARMS = (
    "before",
    "files, float32",
    "shm, float32",
    "gloo, float32",
    "files, bfloat16",
    "shm, bfloat16",
    "gloo, bfloat16",
    "socket, float32",
    "between devices, float32",
)


def seconds() -> float:
    """User and system time of this process."""
    used = os.times()
    return used.user + used.system


def digest(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Of the bits of all tensors, by their names' order."""
    sums = {name: hashlib.blake2b(tensor.view(torch.uint8).numpy()).hexdigest() for name, tensor in tensors}
    return hashlib.blake2b(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]


def before(folder: Path, weights: dict[str, Tensor]) -> None:
    """Buckets of copies, written by safetensors."""
    from safetensors.torch import save_file

    folder.mkdir()
    bucket: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(t.nbytes for t in bucket.values()) >= 2**29 or len(bucket) == len(weights):
            save_file(bucket, folder / f"{name}.safetensors")
            bucket = {}
    if bucket:
        save_file(bucket, folder / "last.safetensors")


def sent(arm: str, weights: dict[str, Tensor]) -> tuple[float, float, bool]:
    """CPU-seconds of writing and of reading, and whether the bits arrived."""
    transport, _, dtype = arm.partition(", ")
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    if transport == "gloo":
        return sent_by_group(weights, wanted)
    if transport in ("socket", "between devices"):
        return sent_to_device(weights, transport == "between devices")
    place = (
        Path(tempfile.mkdtemp()) if arm == "before" else place_for(transport, sum(t.nbytes for t in weights.values()))
    )
    try:
        began = seconds()
        if arm == "before":
            before(place / "weights", weights)
        else:
            write_weights(place / "weights", weights.items(), dtypes=dict.fromkeys(weights, wanted))
        wrote = seconds() - began
        command = [sys.executable, __file__, "--read", str(place / "weights"), "--dtype", str(wanted)[6:]]
        said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    same = said["digest"] == digest((name, tensor.to(wanted)) for name, tensor in weights.items())
    return wrote, said["seconds"], same


def sent_by_group(weights: dict[str, Tensor], wanted: torch.dtype) -> tuple[float, float, bool]:
    """As ``sent``, without a file."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        shapes = json.dumps({name: list(tensor.shape) for name, tensor in weights.items()})
        command = [sys.executable, __file__, "--receive", str(meeting), "--dtype", str(wanted)[6:]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(shapes.encode())
            reader.stdin.close()
            group = WeightGroup(meeting, 0, 2, "gloo", torch.device("cpu"))
            began = seconds()
            group.send(weights.items(), BUCKET_BYTES, dict.fromkeys(weights, wanted))
            wrote = seconds() - began
            said = json.loads(reader.stdout.read())
    return (
        wrote,
        said["seconds"],
        said["digest"] == digest((name, tensor.to(wanted)) for name, tensor in weights.items()),
    )


def sent_to_device(weights: dict[str, Tensor], shared: bool) -> tuple[float, float, bool]:
    """As ``sent``, as a controller sends weights to another of its devices; not ``shared``: with all bytes on the
    socket."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    answers, back = processes.Pipe(duplex=False)
    reader = processes.Process(target=serve, args=(theirs, back))
    reader.start()
    wire.receive(ours)  # it has started
    least, wire.SHARED_FROM = wire.SHARED_FROM, wire.SHARED_FROM if shared else sys.maxsize
    began = seconds()
    wire.send(ours, weights)
    wrote = seconds() - began
    wire.SHARED_FROM = least
    reading, arrived = answers.recv()
    reader.join()
    return wrote, reading, arrived == digest(iter(weights.items()))


def serve(connection: Connection, answers: Connection) -> None:
    """The other device."""
    torch.set_num_threads(1)
    into = torch.ones(WIDTH, WIDTH)
    wire.send(connection, "ready")
    began = seconds()
    got = wire.receive(connection)
    for tensor in got.values():
        into.copy_(tensor)
    answers.send((seconds() - began, digest(iter(got.items()))))


def receive(meeting: Path, dtype: torch.dtype) -> None:
    """The reader of a group: as ``read``."""
    into = {name: torch.ones(shape, dtype=dtype) for name, shape in json.loads(sys.stdin.read()).items()}
    group = WeightGroup(meeting, 1, 2, "gloo", torch.device("cpu"))
    began = seconds()
    for name, tensor in group.received():
        into[name].copy_(tensor)
    print(json.dumps({"seconds": seconds() - began, "digest": digest(iter(into.items()))}))


def read(folder: Path, dtype: torch.dtype) -> None:
    """The reader: prints its CPU-seconds and the digest."""
    from safetensors import safe_open

    files = [safe_open(file, framework="pt") for file in sorted(folder.iterdir())]
    names = [(file, name) for file in files for name in file.keys()]  # noqa: SIM118 (no mapping)
    into = {name: torch.ones(file.get_slice(name).get_shape(), dtype=dtype) for file, name in names}
    began = seconds()
    for file, name in names:
        into[name].copy_(file.get_tensor(name))
    print(json.dumps({"seconds": seconds() - began, "digest": digest(iter(into.items()))}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of float32 weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--read", type=Path, help="be the reader (used by the command itself)")
    parser.add_argument("--receive", type=Path, help="be the reader of a group (used by the command itself)")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.receive:
        receive(given.receive, getattr(torch, given.dtype))
        return
    if given.read:
        read(given.read, getattr(torch, given.dtype))
        return
    count = max(1, given.mib * 2**20 // (4 * WIDTH * WIDTH))
    weights = {f"layers.{i}.weight": torch.randn(WIDTH, WIDTH) for i in range(count)}
    rows: dict[str, list[tuple[float, float, bool]]] = {arm: [] for arm in ARMS}
    for _ in range(given.repeats):
        for arm in ARMS:
            rows[arm].append(sent(arm, weights))
    print(f"{count * WIDTH * WIDTH * 4 / 2**30:.2f} GiB of float32 weights; CPU-seconds")
    print("| transport | writing | reading | both, quartiles | bits arrived |\n|---|---|---|---|---|")
    for arm, made in rows.items():
        wrote, reading = (sorted(row[i] for row in made)[len(made) // 2] for i in (0, 1))
        both = [row[0] + row[1] for row in made]
        low, middle, high = quantiles(both, n=4) if len(both) > 1 else both * 3
        arrived = "yes" if all(row[2] for row in made) else "NO"
        print(f"| {arm} | {wrote:.2f} | {reading:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) | {arrived} |")


if __name__ == "__main__":
    main()
