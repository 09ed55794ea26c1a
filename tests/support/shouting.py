"""``python shouting.py ARGUMENTS`` is ``mmrl ARGUMENTS``, with libraries that warn in each phase in every way there is.

At the end it prints the names of the phases that were. What is said is ``PHASE LIBRARY WAY``, and nobody has listed it.
"""

import atexit
import sys
from collections import Counter

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

import diffusers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from mmrl.cli import command  # noqa: E402

LIBRARIES = ("transformers", "diffusers", "peft", "accelerate", "huggingface_hub", "safetensors", "PIL", "unheard_of")
WAYS = {
    **{kind: f"warnings.warn(said, {kind})" for kind in ("UserWarning", "FutureWarning", "RuntimeWarning")},
    "unfiltered": "with warnings.catch_warnings():\n    warnings.simplefilter('always')\n    warnings.warn(said)",
    "logged": "logging.getLogger(__name__).warning(said)",
    "error": "logging.getLogger(__name__).error(said)",
}
OF_LIBRARIES = {
    "once": ("transformers", "transformers.utils.logging.get_logger('transformers.x').warning_once(said)"),
    "advice": ("transformers", "transformers.utils.logging.get_logger('transformers.x').warning_advice(said)"),
    "own": ("diffusers", "diffusers.utils.logging.get_logger('diffusers.x').warning(said)"),
}
OF_TORCH = "torch.add(torch.ones(2), 1, out=torch.empty(3))"
"""Its C++ warns that an output was resized."""
BEFORE = "import logging, warnings\nimport diffusers, torch, transformers\n"
PHASES: Counter[str] = Counter()


def spoken():
    """Library, way and code of what is said in a phase."""
    yield from ((library, way, code) for library in LIBRARIES for way, code in WAYS.items())
    yield from ((library, way, code) for way, (library, code) in OF_LIBRARIES.items())


COMPILED = [
    (library, way, compile(BEFORE + code, f"/lib/site-packages/{library}/core_{way}.py", "exec"))
    for library, way, code in [*spoken(), ("torch", "C++", OF_TORCH)]
]
MODULES = {(library, way): {"__name__": f"{library}.core"} for library, way, _ in COMPILED}


def shout(phase):
    PHASES[phase] += 1
    for library, way, code in COMPILED:
        said = f"{phase} {library} {way}"
        exec(code, MODULES[library, way] | {"said": said})


def shouting(owner, name, phase):
    """Have the method ``name`` of ``owner`` shout before it does what it does; ``phase`` says which phase it is."""
    usual = vars(owner)[name]
    of_class = isinstance(usual, classmethod)
    function = usual.__func__ if of_class else usual

    def instead(self, *arguments, **named):
        shout(phase())
        return function(self, *arguments, **named)

    setattr(owner, name, classmethod(instead) if of_class else instead)


def computing():
    return "train" if torch.is_grad_enabled() else "sample"


if __name__ == "__main__":
    torch.set_warn_always(True)
    for base in (transformers.PreTrainedModel, diffusers.ModelMixin):
        shouting(base, "from_pretrained", lambda: "load")
        shouting(base, "save_pretrained", lambda: "export")
    for model in (transformers.Qwen3ForCausalLM, diffusers.UNet2DConditionModel):
        shouting(model, "forward", computing)
    atexit.register(lambda: print("phases:", *PHASES, file=sys.stderr))

    command()
