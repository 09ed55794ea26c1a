"""What the records of a file, a folder or a data set on the hub are read by: each when it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mmrl.core.json_types import Cell


class Rows(ABC):
    """Records by index."""

    name: str
    """Short, for the ids of prompts."""
    in_files = True
    """Whether media are files or inline text, which are checked before the start."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def where(self, i: int) -> str:
        """Where the record stands, for messages."""

    @abstractmethod
    def row(self, i: int) -> Cell:
        """The record. Raises ``ValueError``."""

    def key(self, i: int) -> int:
        """The record's part of the prompt's id."""
        return i
