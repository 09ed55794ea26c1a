"""The Python interface: what ``mmrl.train``, ``mmrl.plan``, ``mmrl.score`` and ``mmrl.load_run`` are."""
