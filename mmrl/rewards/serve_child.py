"""The process that ``mmrl.rewards.subprocess_server`` starts with another interpreter: it serves one reward."""

from __future__ import annotations

import json
import os
import sys
import threading

from mmrl.core.errors import UserError
from mmrl.core.quiet import be_quiet, warn_plainly
from mmrl.rewards.serve import serve
from mmrl.rewards.subprocess_server import READY, TOKEN


def child() -> int:
    """The child's entry: serve what the first argument (JSON) asks for, until the parent is gone."""
    asked = json.loads(sys.argv[1])
    be_quiet()
    warn_plainly()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(**asked, token=os.environ.pop(TOKEN, None), ready=lambda line: print(READY + line, flush=True))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _end_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os._exit(0)
