"""UnifiedReward 2.0: alignment, coherence, style of pictures, 1 to 5 (arXiv 2503.05236), for ``mmrl serve``.

Not run here with its real model: see README.md.
"""

import ast
import re
from pathlib import Path

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Failed

PATH = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b"
AXES = ("Alignment", "Coherence", "Style")


@mmrl.reward(inputs=("image",))
class UnifiedReward:
    """``script``: the authors' point_score_ACS_image_generation.py, whose question is asked; ``path``: the model."""

    def __init__(
        self, script: str, path: str = "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b", device="cuda", max_tokens=64
    ):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.parts, self.max_tokens = question(script), max_tokens
        self.processor = AutoProcessor.from_pretrained(path)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype="auto").to(device).eval()

    def score(self, samples, *, context):
        asked = []
        for s in samples:
            text = "".join(s.prompt.text if part is None else part for part in self.parts)
            content = [{"type": "image", "image": s.image}, {"type": "text", "text": text}]
            asked.append([{"role": "user", "content": content}])
        named = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = self.processor.apply_chat_template(asked, **named, padding=True).to(self.model.device)
        tokens = self.model.generate(**inputs, max_new_tokens=self.max_tokens, do_sample=False)
        said = self.processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found = [read(text) for text in said]
        return {axis.lower(): [row if isinstance(row, Failed) else row[axis] for row in found] for axis in AXES}


def question(script: str) -> list[str | None]:
    """The text that the authors' script calls ``problem``; None stands for the prompt. Nothing of it is run."""
    tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "problem":
            pieces = node.value.values if isinstance(node.value, ast.JoinedStr) else []
            found = [piece.value if isinstance(piece, ast.Constant) else None for piece in pieces]
            if found.count(None) == 1:
                return found
    raise UserError(f"options.script: {script} asks nothing about a prompt; give the authors' ACS script")


def read(text: str) -> dict[str, float] | Failed:
    """The three numbers in an answer."""
    found = {axis: re.search(rf"{axis} Score \(1-5\):\s*(\d+(?:\.\d+)?)", text) for axis in AXES}
    numbers = {axis: float(match[1]) for axis, match in found.items() if match}
    if len(numbers) < len(AXES) or not all(1 <= number <= 5 for number in numbers.values()):
        return Failed(f"no three scores from 1 to 5 in {' '.join(text.split())[:120]!r}")
    return numbers


score = UnifiedReward
