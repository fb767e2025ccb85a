"""Mistakes that belong to the person at the keyboard, not to the program."""


class UserError(Exception):
    """One sentence that names the field, file or row and says what to write instead.

    Commands print it without a traceback and exit with code 2.
    """


class RunStopped(Exception):
    """The run ended itself on purpose; the message says why and what is left on disk."""
