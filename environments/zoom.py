"""A picture too coarse to answer about (the data set ``coarse``): the model may look at a corner before it answers."""

import re

import mmrl
from mmrl.core.episode import Action, Observation
from mmrl.core.trajectory import Prompt

_ZOOM = re.compile(r"zoom (top|bottom) (left|right)")


class Environment:
    """``zoom top left`` shows that quarter of the picture in full; any other text is the answer, and ends the
    episode."""

    pictures = True

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._coarse = mmrl.load("datasets", "coarse")
        self._picture = self._coarse.fine(prompt) if "shape" in prompt.meta else None

    def step(self, action: Action) -> Observation | None:
        asked = _ZOOM.fullmatch(action.text.strip())
        if asked is None:
            return None
        if self._picture is None:
            return Observation("There is no picture: take the data set coarse.")
        side = self._coarse.SIDE // 2
        left, top = side * (asked[2] == "right"), side * (asked[1] == "bottom")
        return Observation(self._picture.crop((left, top, left + side, top + side)))
