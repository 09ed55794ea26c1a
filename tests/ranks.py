"""Ranks of one process group, each the work of a test's own script in a process of its own.

They are forked from a process that has imported the libraries (``tests/warm.py``) and does nothing else: a rank that
imports them takes longer over it than over its test.
"""

import multiprocessing
import runpy
import socket
import sys
from multiprocessing.connection import wait

import torch

warm = multiprocessing.get_context("forkserver")
warm.set_forkserver_preload(["tests.warm"])


def launched(script, outs, words_of):
    """What each rank saved into its file of ``outs``; ``words_of(rank, port, out)`` are the script's arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    each = [[str(word) for word in words_of(rank, port, out)] for rank, out in enumerate(outs)]
    ranks = [warm.Process(target=run, args=(str(script), words), daemon=True) for words in each]
    for rank in ranks:
        rank.start()
    at_work = {rank.sentinel: rank for rank in ranks}
    try:
        while at_work:
            ended = [at_work.pop(sentinel) for sentinel in wait(list(at_work))]
            for rank in ended:
                rank.join()
            assert all(rank.exitcode == 0 for rank in ended), [rank.exitcode for rank in ranks]
    finally:
        for rank in at_work.values():  # one that failed leaves the others waiting for it
            rank.kill()
            rank.join()
    return [torch.load(out, weights_only=True) for out in outs]


def run(script, words):
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
