"""The section ``environment``: what the policy acts in over several turns (docs/environments.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from mmrl.config.section import Count, Duration, Few, Options, OwnClass, Section


class Environment(Section):
    name: str
    """``tools``, a file of environments/, a world of others (``gymnasium:ID``), or path/to/file.py:NAME: a class, or a
    function that the model can call."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of the class; of ``tools`` the list ``tools``, of functions as path/to/file.py:NAME."""
    role: Literal["auto", "tool", "user"] = "auto"
    """Whether answers are shown as results of tools or as messages of the user. ``auto``: of an environment with tools
    as their results, of others as messages; the other way where the chat template shows that alone."""
    calls: OwnClass | None = None
    """A function path/to/file.py:NAME that finds the calls in a text, as a list of mappings with ``name`` and
    ``arguments``. None: the tokenizer's ``response_template``, or Hermes' format."""
    history: Literal["keep", "template"] = "keep"
    """What a turn sees of the turns before. ``keep``: the tokens as they were sampled and told, thoughts too.
    ``template``: the conversation as the chat template shows it anew, without the thoughts of earlier turns for many
    models; what is read anew trains behind its own beginning, at most ``max_turns`` texts of an episode."""
    history_length: Few | None = None
    """So many of the turns before are seen, behind the prompt. None: all. Where that leaves turns out, a turn is read
    anew, and trains behind its own beginning, at most ``max_turns`` texts of an episode."""
    max_turns: Few = 6
    """Turns of the policy in an episode at most."""
    max_tokens: Count = 2048
    """Tokens behind the prompt at most that a turn reads and writes: of the whole episode, where nothing is told anew;
    ``sampling.max_new_tokens`` limits what a turn writes."""
    max_pictures: int = Field(default=16, ge=0, le=4096)
    """Pictures that the environment shows in an episode at most; one that shows more has failed."""
    timeout: Duration = 30.0
    """Seconds for one call (``30s``, ``2m``); then the episode has failed."""
    workers: Few = 16
    """Calls at the same time, for each device that samples."""
    isolate: bool = False
    """Give each episode a process of its own, so that a call that hangs or dies ends nothing else. False: threads."""
    memory: Annotated[ByteSize, Field(ge=1 << 26)] = ByteSize(4 << 30)
    """Memory of such a process at most (``512 MiB``); one that wants more has failed."""
