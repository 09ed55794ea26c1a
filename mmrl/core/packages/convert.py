"""Write a GGUF file as a directory of transformers: ``python -m mmrl.core.packages.convert FILE.gguf FOLDER``.

It runs in a process of its own, which sees the package ``gguf`` only for this time. The weights become bfloat16.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mmrl.core.torchvision_on_cpu import allow_cpu_only


def convert(gguf: Path, out: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer of ``gguf`` into ``out``."""
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    import torch
    import transformers.utils.logging
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config = read.config
    vars(config).pop("quantization_config")  # it says GGUF, and the weights are plain now
    config.dtype = torch.bfloat16
    with torch.device("meta"):  # transformers refuses to save a model that was read from GGUF
        plain = type(read)(config)
    plain.load_state_dict({name: t.to(torch.bfloat16) for name, t in read.state_dict().items()}, assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
