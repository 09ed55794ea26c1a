"""The contracts of plug-ins, as checks that anyone can run on their own class. Today: rollout engines (``engines``).

A check returns a sentence with the figure it found. It raises ``AssertionError`` with what is wrong and what to change,
or ``CannotRun`` with what it lacks. The tests of what mmrl ships call the same functions.
"""
