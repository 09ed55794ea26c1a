"""What each kind of plug-in owes the training loop, as checks that anyone can run on theirs: ``mmrl check NAME``.

running.py      a check, what came of it, and how it is printed
algorithms.py   rewards.py   judges.py   datasets.py   engines.py   pipelines.py     the checks of each kind

A check returns a sentence with the figure it found. It raises ``AssertionError`` with what is wrong and what to change,
or ``CannotRun`` with what it lacks. The tests of what mmrl ships call the same functions.
"""
