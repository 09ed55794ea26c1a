"""What is said of each class of diffusers: which family trains it, or why none does and which one is nearest."""

import re
import runpy
from pathlib import Path

import pytest

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def verdict():
    return mmrl.load("pipelines", "diffusion/classes").verdict


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("WanPipeline", "pipeline: diffusion/wan"),
        ("Flux2KleinPipeline", "pipeline: diffusion/flux2_klein or diffusion/flux2_klein_edit"),
        ("FluxImg2ImgPipeline", "it draws with the weights of a FluxPipeline: save it as that; "),
        ("StableDiffusionXLPAGImg2ImgPipeline", "it draws with the weights of a StableDiffusionXLPipeline: save"),
        ("QwenImageInpaintPipeline", "that of a QwenImagePipeline, which is not told image, mask_image, masked_image"),
        (
            "LucyEditPipeline",
            "is that of a WanPipeline, which is not told video; the nearest pipeline is diffusion/wan",
        ),
        ("StableDiffusionControlNetPipeline", "its controlnet is not trained here, nor without it the rest; "),
        ("AnyFlowPipeline", r"no adapter for its transformer \(AnyFlowTransformer3DModel\); .* diffusion/wan "),
        ("AmusedPipeline", r"no adapter for its transformer \(UVit2DModel\)$"),
        ("WanModularPipeline", "it is put together from blocks"),
        ("NobodysPipeline", r"diffusers [0-9.]+ has no NobodysPipeline$"),
    ],
)
def test_a_class_is_trained_or_it_is_said_why_not_and_what_is_nearest(verdict, kind, said):
    assert re.search(said, str(verdict(kind)))


@pytest.mark.slow
def test_the_page_has_every_class_of_diffusers(verdict):
    page = runpy.run_path(str(ROOT / "tools" / "classes_page.py"))["page"]().splitlines()
    written = (ROOT / "docs" / "reference" / "classes.md").read_text().splitlines()
    assert len(page) == len(written) > 250
    for now, then in zip(page, written, strict=True):
        if "a package that is not here" not in now:  # it was there when the page was made
            assert now == then, "python tools/classes_page.py > docs/reference/classes.md"
    rows = [row.split(" | ") for row in page if row.startswith("| `")]
    assert all((families.strip() == "") != (why.strip() == "") for _, families, why, _ in rows)
