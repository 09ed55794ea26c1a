"""A torchvision built for CUDA beside a torch without it: imports, and changes nothing where it would have worked."""

import importlib.util
import subprocess
import sys

import pytest

_IMPORT = "import torchvision, torchvision.transforms.v2"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_without_torchvision_nothing_is_imported_and_nothing_breaks():
    code = """
import sys
from mmrl.core.torchvision_on_cpu import allow_cpu_only
allow_cpu_only(); allow_cpu_only()
assert "torchvision" not in sys.modules
assert sum(type(f).__module__ == "mmrl.core.torchvision_on_cpu" for f in sys.meta_path) == 1
import importlib.util, json
try:
    import torchvision
except ModuleNotFoundError as error:
    assert error.name == "torchvision"
assert not any(type(f).__module__ == "mmrl.core.torchvision_on_cpu" for f in sys.meta_path)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
def test_torchvision_and_the_video_processors_import():
    done = run(
        f"from mmrl.core.torchvision_on_cpu import allow_cpu_only; allow_cpu_only(); {_IMPORT}\n"
        "import torch; from PIL import Image\n"
        "from transformers import Qwen2VLVideoProcessor, Qwen2_5_VLProcessor\n"
        "image = torchvision.transforms.v2.functional.pil_to_tensor(Image.new('RGB', (4, 4), (1, 2, 3)))\n"
        "assert image[:, 0, 0].tolist() == [1, 2, 3]"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")
def test_the_hook_is_there_for_a_reason():
    """Where torchvision's operators cannot be loaded, the import fails without the hook; elsewhere it needs none."""
    import torch

    plain = run(_IMPORT)
    if plain.returncode == 0:
        hooked = run(
            f"from mmrl.core import torchvision_on_cpu as _torchvision; _torchvision.allow_cpu_only(); {_IMPORT}\n"
            "assert not _torchvision._kept\nassert torchvision.extension._has_ops()"
        )
        assert hooked.returncode == 0, hooked.stderr
    else:
        assert torch.version.cuda is None
        assert "torchvision::nms" in plain.stderr
