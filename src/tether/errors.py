"""Ends of a command that are no fault of the program."""

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """One sentence that names the field, file or row and says what to write instead.

    Commands print it without a traceback and exit with code 2.
    """


class RunStopped(Exception):
    """The run ended itself on purpose; the message says why, `events` what led to it."""

    def __init__(self, message: str, events: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.events = events


class OthersLost(RunStopped):
    """Other processes of the run no longer answer; each that is left says so for itself."""


def one_line(error: BaseException) -> str:
    """What somebody else's exception says, short enough to stand inside a sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]
