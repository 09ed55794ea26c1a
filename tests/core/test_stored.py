"""The reader of stored files: what it refuses, and that the message names the file and the place in it."""

import errno
import json
import os
import struct
import subprocess
import sys

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import save, save_file

from mmrl.cli import of_system
from mmrl.core import checkpoint_manifest as manifest
from mmrl.core import stored, tensor_files
from mmrl.core.plugins import user_code
from mmrl.core.stored import BadFileError, Number


class Schema(BaseModel):
    step: int
    rate: Number = 0.0


TEXTS = {
    b"[" * 100_000: "over 64 levels",
    b'{"a":' * 70 + b"1" + b"}" * 70: "over 64 levels",
    b'{"step": 1, "step": 2}': "'step' stands twice",
    b'{"step": NaN}': "NaN is no JSON number",
    b'{"step": 1e999}': "larger than any float",
    b"1" * 5000: "more than 64 bits",
    b'{"step": 1000000000000000000000000000000}': "more than 64 bits",
    b'{"step": 1, "more": "a\\ud800"}': "half of a surrogate pair",
    b"\xff\xfe\x00": "is not UTF-8",
    b"": "is not JSON",
    b"{" * 3: "is not JSON",
    b"[" + b"1," * 1_000_001 + b"1]": "more than 1,000,000 values",
    b"[1]": "holds a list",
    b"null": "holds null",
    b'{"step": "x"}': "step: Input should be a valid integer",
    b'{"step": 1, "rate": "0.5"}': "rate: Input should be a valid number",
    b"{}": "step: Field required",
}


@pytest.mark.parametrize("text", TEXTS, ids=list(TEXTS.values()))
def test_what_does_not_fit_names_the_file_and_the_place(text, tmp_path):
    file = tmp_path / "state.json"
    file.write_bytes(text)
    with pytest.raises(BadFileError, match=TEXTS[text]) as found:
        stored.read_as(Schema, file)
    assert str(file) in str(found.value)


def test_what_fits_is_read(tmp_path):
    file = tmp_path / "state.json"
    file.write_text(json.dumps({"step": 2**64 - 1, "rate": 1.5e308, "more": ["1" * 20, [[]] * 500, "\U0001f600"]}))
    assert stored.read_as(Schema, file).step == 2**64 - 1
    with pytest.raises(FileNotFoundError):
        stored.read_as(Schema, tmp_path / "none.json")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket", "large"])
def test_what_is_no_regular_file_is_not_opened(kind, tmp_path, monkeypatch):
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        import socket

        monkeypatch.chdir(tmp_path)
        socket.socket(socket.AF_UNIX).bind("it")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(BadFileError, match="it cannot be read"):
        stored.read_bytes(path)


def test_a_step_that_no_run_has_is_no_checkpoint(tmp_path):
    for step in (10**30, 10**10, -1, True, 1.5):
        folder = tmp_path / "step_000002"
        folder.mkdir(exist_ok=True)
        (folder / "state.json").write_text("{}")
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
        (entry,) = manifest.entries(tmp_path)
        assert not entry.usable
        assert entry.step == 2
    (tmp_path / ("step_" + "9" * 200)).mkdir()
    assert len(manifest.entries(tmp_path)) == 1


def _file(path, header, body=b"\0" * 16, size=None):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)
    return path


GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
}
BAD = {
    "overlap": GOOD | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
    "hole": {"b": GOOD["b"]},
    "negative": GOOD | {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
    "huge": GOOD | {"a": {"dtype": "F32", "shape": [10**12, 10**12], "data_offsets": [0, 8]}},
    "beyond": GOOD | {"c": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}},
    "short": {"a": GOOD["a"]},
    "shape": GOOD | {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
    "type": GOOD | {"a": {"dtype": 3, "shape": [2], "data_offsets": [0, 8]}},
    "metadata": GOOD | {"__metadata__": {"a": 1}},
    "list": [],
}


@pytest.mark.parametrize("case", BAD)
def test_a_header_that_does_not_fit_its_file_is_refused(case, tmp_path):
    path = _file(tmp_path / "x.safetensors", BAD[case])
    for read in (
        tensor_files.header,
        lambda p: tensor_files.check_shards([p]),
        lambda p: tensor_files.load(p.read_bytes(), p.name),
    ):
        with pytest.raises(BadFileError, match=r"x\.safetensors"):
            read(path)


def test_a_header_that_fits_is_read_as_the_library_reads_it(tmp_path):
    tensors = {
        "a": torch.arange(6).view(2, 3),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(2).bfloat16(),
        "one": torch.tensor(True),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = tensor_files.header(tmp_path / "x.safetensors")
    assert {name: one.shape for name, one in found.items()} == {name: list(t.shape) for name, t in tensors.items()}
    loaded = tensor_files.load(save(tensors), "x")
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    for size in (0, 1, 2**63, 99_999_999):
        with pytest.raises(BadFileError, match="header would have"):
            tensor_files.header(_file(tmp_path / "y.safetensors", GOOD, size=size))


@pytest.mark.parametrize(
    "offsets", ["[]", '{"a": {"saved_offsets": [10000000]}}', '{"a": {"saved_offsets": [-1]}}', "{", "[" * 9999]
)
def test_shards_that_make_no_whole_tensor_are_refused(offsets, tmp_path):
    path = _file(
        tmp_path / "x.safetensors", {"a": GOOD["a"], "__metadata__": {"DCP_SHARDING_INFO": offsets}}, b"\0" * 8
    )
    with pytest.raises(BadFileError):
        tensor_files.check_shards([path])


def test_nothing_is_allocated_for_weights_of_other_shapes():
    with pytest.raises(BadFileError, match="weight is not as the settings"):
        tensor_files.filled(lambda: torch.nn.Linear(10**6, 10**6, bias=False), {"weight": torch.zeros(2, 2)}, "x")
    filled = tensor_files.filled(lambda: torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).state_dict(), "x")
    assert filled.weight.shape == (2, 2)


def test_what_the_place_of_a_file_is_the_reason_of_is_no_traceback():
    for number in (errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.EFBIG, errno.ENOSPC):
        assert "/place/report.html" in (of_system(OSError(number, os.strerror(number), "/place/report.html")) or "")
    assert of_system(OSError(errno.EBADF, "ours")) is None


def test_a_report_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "resolved.json").write_text("{}")
    code = "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nfrom mmrl.cli import main\nmain()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "report", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith("error: cannot read or write")


class _Name(type):
    @property
    def __name__(cls):
        raise ValueError("no name")


class _BadError(Exception, metaclass=_Name):
    def __str__(self):
        raise SystemExit(3)


class _OddError(AttributeError):
    obj = property(lambda _: 1 / 0)

    def __str__(self):
        return 3  # type: ignore[return-value]


@pytest.mark.parametrize(
    "error", [_BadError(), _OddError(), SyntaxError("x", (1, 2, 3, 4)), KeyError(object()), KeyError()]
)
def test_an_error_may_misbehave_itself(error):
    reason, mend = user_code.raised(error, None, {})
    assert reason.startswith("raised ")
    assert mend.startswith("mend ")
