"""What a user can mend. The command line prints these without a traceback and exits with ``exit_code``."""


class UserError(Exception):
    """Something in the user's hands is wrong; the message says what failed, why, and the edit that mends it."""

    exit_code = 2


class UnscoredError(UserError):
    """Too many samples of a step have no score, for longer than the recipe waits; the run resumes as it is.

    ``everywhere``: all controllers raise it after the same step.
    """

    exit_code = 3

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class LostServerError(UserError):
    """A server of ours ended, or stands still and was ended: whoever asked it may start another and ask again."""


class BadPromptError(UserError):
    """One prompt cannot be used (broken media, say). In training another takes its place and it is named."""

    def __init__(self, prompt: str, reason: str) -> None:
        super().__init__(f"the prompt {prompt}: {reason}")
        self.prompt, self.reason = prompt, reason


class NotFiniteError(UserError):
    """Training met numbers that are not finite (nan or infinity). The message says which, and where they first were."""
