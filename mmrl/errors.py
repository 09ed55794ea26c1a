"""What a user can mend. The command line prints these without a traceback and exits with 2."""


class UserError(Exception):
    """Something in the user's hands is wrong; the message says what failed, why, and the edit that mends it."""
