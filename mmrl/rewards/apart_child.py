"""The process of a reward with ``process: true``. Run as a script, with the end of a pipe (``mmrl.rewards.apart``).

It gets the name and the options once, then samples and their context, and answers each time with what the reward
returned, the bytes that it sent to others, and why it failed (empty where it did not). Only the run that started it is
at the other end of the pipe, so both sides send Python objects.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections import Counter
from multiprocessing.connection import Connection

from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import raised
from mmrl.rewards.loading import build, find


def main() -> None:
    """Answer until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    try:
        name, options = pickle.loads(pipe.recv_bytes())
        loaded, broken = None, ""
        try:
            loaded = build(find(name), options)
        except UserError as error:
            broken = str(error)
        while True:
            samples, context = pickle.loads(pipe.recv_bytes())
            meta = samples[0].prompt.meta if samples else {}
            returned, why = None, broken
            try:
                if loaded is not None:
                    returned = loaded.call(samples, context=context)
                    returned = asyncio.run(returned) if asyncio.iscoroutine(returned) else returned
            except UserError as error:
                why = str(error)
            except Exception as error:
                why = "; ".join(raised(error, loaded and loaded.file, meta))
            pipe.send_bytes(pickle.dumps((returned, Counter(context.sent), why)))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
