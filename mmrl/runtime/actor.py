"""A controller as a process of Ray's."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrl.config.loader import LoadedRecipe
    from mmrl.session import Outcome


class Actor:
    """Final class, in a process of its own; ``train`` runs in one thread and the others answer meanwhile."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        from mmrl.session import Stop

        os.chdir(folder)
        self._rank, self._size = rank, size
        self._stop = Stop()
        self._socket: socket.socket | None = None

    def listen(self) -> tuple[str, int]:
        """Where the others find this controller: on the loopback where Ray runs on it."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        host = ray.util.get_node_ip_address()
        self._socket = socket.create_server((host, 0))
        return host, self._socket.getsockname()[1]

    def beat(self) -> bool:
        return True

    def stop(self) -> None:
        """Stop after the step."""
        self._stop.asked = True

    def train(self, loaded: LoadedRecipe, path: str, resume: bool, host: str, port: int) -> Outcome:
        """Train this controller's part; what it prints goes into ``controllers/RANK.log`` of the run."""
        from mmrl.controller import Controller
        from mmrl.controller.peers import Group
        from mmrl.errors import UserError
        from mmrl.report.rundir import RunDir
        from mmrl.session import Outcome, Session

        whole = RunDir(path)
        _log_to(whole.path / "controllers" / f"{self._rank}.log", keep=resume)
        directory = whole.of_controller(self._rank)
        peers = Group(self._rank, self._size, host, port, self._socket)
        controller = Controller(loaded.recipe.seed, self._rank, self._size, peers)
        try:
            return Session(loaded, directory, controller, whole.checkpoints).begin(resume, self._stop)
        except UserError as error:
            return Outcome(False, 0, 0, 0.0, str(error))


def _log_to(path: Path, keep: bool) -> None:
    """Send what this process prints into the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if keep else os.O_TRUNC), 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
