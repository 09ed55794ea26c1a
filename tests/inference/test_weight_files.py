"""Weights on their way to an engine in other processes: their files, their dtype, and where the files lie."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.families.text.engine_sampling import _sending
from mmrl.inference import weight_files
from mmrl.inference.weight_files import Room, checkpoint_dtypes, place_for, transport_for, write_weights
from tests.support.ranks import warm


def written(folder, weights, most=weight_files.BUCKET_BYTES, dtypes=None):
    """What is read back from each file."""
    write_weights(folder, weights, most, dtypes)
    return [load_file(file) for file in sorted(folder.iterdir())]


def test_weights_travel_in_files_of_a_size_whoever_shares_their_memory(tmp_path):
    base = torch.randn(16, 16)
    weights = {"a": base, "b": base, "c": base.T, "d": base[:2].to(torch.bfloat16).requires_grad_()}
    files = written(tmp_path / "w", weights.items(), 1100)
    assert [list(file) for file in files] == [["a"], ["b"], ["c", "d"]]
    read = {name: tensor for file in files for name, tensor in file.items()}
    assert {name: tensor.dtype for name, tensor in read.items()} == {name: t.dtype for name, t in weights.items()}
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700


def test_scalars_empty_tensors_and_odd_sizes_are_read_back(tmp_path):
    """A reader takes a float32 only from a multiple of four bytes: such a tensor begins a file of its own."""
    weights = {
        "half": torch.ones(3, dtype=torch.bfloat16),
        "whole": torch.arange(5.0),
        "scalar": torch.tensor(7.0),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
        "eighth": torch.ones(3).to(torch.float8_e4m3fn),
    }
    files = written(tmp_path / "w", weights.items())
    assert [list(file) for file in files] == [["half"], ["whole", "scalar", "none", "mask", "eighth"]]
    read = {name: tensor for file in files for name, tensor in file.items()}
    assert all(torch.equal(read[name].float(), tensor.float()) for name, tensor in weights.items())
    assert {name: tensor.shape for name, tensor in read.items()} == {name: t.shape for name, t in weights.items()}


def test_more_tensors_than_a_header_has_room_for_begin_a_new_file(tmp_path):
    weights = [(f"layers.{i}.{'x' * 90}", torch.full((1,), float(i))) for i in range(2500)]
    files = written(tmp_path / "w", weights)
    assert len(files) == 2
    read = {name: tensor for file in files for name, tensor in file.items()}
    assert [read[name].item() for name, _ in weights] == list(range(2500))


def test_what_the_checkpoint_has_in_half_is_sent_in_half_and_nothing_else(tmp_path):
    stored = {"w": torch.randn(4).bfloat16(), "bias": torch.randn(4), "count": torch.tensor([3])}
    (tmp_path / "m").mkdir()
    save_file(stored, tmp_path / "m" / "model.safetensors")
    of = {dtype: checkpoint_dtypes(tmp_path / "m", dtype) for dtype in ("auto", "bfloat16", "float32", "float16")}
    assert of["auto"] == {"w": torch.bfloat16, "bias": torch.float32}
    assert (of["bfloat16"], of["float32"], of["float16"]) == ({"w": torch.bfloat16}, {"bias": torch.float32}, {})
    trained = {"w": torch.randn(4), "bias": torch.randn(4), "new": torch.randn(4)}
    (sent,) = written(tmp_path / "w", trained.items(), dtypes=of["bfloat16"])
    assert torch.equal(sent["w"], trained["w"].bfloat16()), "the engine would round it to the same bits"
    assert torch.equal(sent["bias"], trained["bias"])
    assert torch.equal(sent["new"], trained["new"])


def test_auto_takes_memory_of_the_gpu_only_where_engine_and_trainer_can_share_it():
    settings = ("auto", "shm", "files", "gloo", "ipc", "nccl")
    engines = ("transformers", "vllm", "vllm_server", "sglang", "mine.py:Engine")
    flags = (True, False)
    taken = {}
    names = ("engine", "cuda", "first", "devices", "several", "own", "adapter")
    for setting, *case in itertools.product(settings, engines, flags, flags, (1, 2, 8), flags, flags, flags):
        taken[setting, *case] = transport_for(setting, **dict(zip(names, case, strict=True)))
    assert all(took == case[0] for case, took in taken.items() if case[0] != "auto"), "what is written stays"
    by_auto = {case[1:]: took for case, took in taken.items() if took != case[0]}
    assert {case for case, took in by_auto.items() if took == "ipc"} == {
        ("vllm_server", True, True, 1, False, False, False)
    }
    assert {case for case, took in by_auto.items() if took == "nccl"} == {
        ("vllm_server", True, first, devices, False, True, False) for first in flags for devices in (1, 2, 8)
    }
    assert {*by_auto.values()} == {"ipc", "nccl"}


@pytest.mark.parametrize(
    ("settings", "device", "sent"),
    [
        ("{engine: vllm_server}", "cuda", ("ipc", True)),
        ("{engine: vllm_server}", "cuda:1", ("auto", False)),
        ("{engine: vllm_server}", "cpu", ("auto", False)),
        ("{engine: vllm_server, weight_transport: ipc}", "cuda", ("ipc", False)),
        ("{engine: vllm_server, weight_transport: shm}", "cuda", ("shm", False)),
        ("{engine: vllm_server, options: {tensor_parallel_size: 2}}", "cuda", ("auto", False)),
        ("{engine: vllm_server, options: {environment: {CUDA_VISIBLE_DEVICES: '1'}}}", "cuda:0", ("nccl", True)),
        (
            "{engine: vllm_server, options: {data_parallel_size: 2, environment: {CUDA_VISIBLE_DEVICES: '1,2'}}}",
            "cuda",
            ("auto", False),
        ),
        ("{engine: sglang}", "cuda", ("auto", False)),
    ],
)
def test_a_recipe_tells_how_its_weights_are_sent(settings, device, sent):
    recipe = load_recipe(["sums"], [f"rollout={settings}"]).recipe
    made = _sending(recipe, torch.device(device))
    assert (made.transport, made.optional) == sent


def test_files_lie_in_memory_where_it_has_room(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "disk"))
    monkeypatch.setattr(weight_files, "MEMORY", tmp_path / "memory")
    for name in ("disk", "memory"):
        (tmp_path / name).mkdir()
    made = {transport: place_for(transport, 1000) for transport in ("auto", "shm", "files")}
    assert [made[transport].parent.name for transport in made] == ["memory", "memory", "disk"]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in made.values())
    assert place_for("auto", 1 << 60).parent.name == "disk"
    with pytest.raises(UserError, match=r"take 1,073,741,824.00 GiB of .* set rollout.weight_transport=files"):
        place_for("shm", 1 << 60)
    monkeypatch.setattr(weight_files, "MEMORY", tmp_path / "none")
    assert place_for("auto", 1000).parent.name == "disk"
    with pytest.raises(UserError, match="has 0 B free"):
        place_for("shm", 1000)


def test_servers_of_a_host_share_its_memory_and_none_takes_what_another_reserved(tmp_path, monkeypatch):
    """Each asks alone, and only the first ``free // need`` have room: at any moment of their transfers."""
    free, need = 10_000_000, 3_000_000
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(weight_files, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def usage(_):
        left = free - sum(file.stat().st_blocks * 512 for file in (tmp_path / "memory").rglob("*.safetensors"))
        return SimpleNamespace(free=left)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    rooms = [Room(need) for _ in range(3)]
    for written, room in enumerate(rooms):
        folder = room.folder("shm")
        assert folder == room.folder("shm")
        assert folder.parent.parent.name == "memory"
        write_weights(folder, [("w", torch.zeros(written * 150_000))])  # a part, half or most of what it reserved
    for _ in range(2):
        with pytest.raises(UserError, match=r"has .* free, .* of it reserved for weights to other engines on this"):
            Room(need).folder("shm")
    assert Room(need).folder("auto").parent.parent == tmp_path, "on the disk"
    rooms[1].close()
    rooms[1].close()
    assert Room(need).folder("auto").parent.parent.name == "memory"


def asked(memory, need, all_there, all_asked, out):
    weight_files.MEMORY = memory
    all_there.wait(120)
    out.put(place_for("auto", need).parent == memory)
    all_asked.wait(120)


def test_processes_that_ask_at_once_get_no_more_than_there_is(tmp_path):
    out, all_there, all_asked = warm.Queue(), warm.Barrier(6), warm.Event()
    need = int(shutil.disk_usage(tmp_path).free * 0.4)
    started = [warm.Process(target=asked, args=(tmp_path, need, all_there, all_asked, out)) for _ in range(6)]
    for one in started:
        one.start()
    had = [out.get(timeout=120) for _ in started]
    all_asked.set()
    for one in started:
        one.join()
    assert sum(had) == 2


def test_what_a_killed_process_left_in_memory_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "MEMORY", tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    kept = [tmp_path / f"mmrl-weights-{os.getpid()}-a", tmp_path / "mmrl-weights-else", tmp_path / "other-1-a"]
    for folder in (*kept, tmp_path / f"mmrl-weights-{dead.pid}-a"):
        (folder / "weights").mkdir(parents=True)
    made = place_for("shm", 10)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, made])


def test_a_full_disk_is_reported_with_the_edit(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    class Full(weight_files._File):
        def __init__(self, folder, number):
            super().__init__(folder, number)
            self._file.close()
            self._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (close is the class's)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_File", Full)
        with pytest.raises(UserError, match=r"No space left on device.*set TMPDIR to another"):
            write_weights(tmp_path / "w", [("a", torch.ones(4))])
