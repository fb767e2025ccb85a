"""Errors that end a command without being a fault of the program, and errors as text."""

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST_REASON = 300  # characters of a message that stands inside a sentence
LONGEST_DESCRIPTION = 500  # characters; what a reward raises may quote a whole response
_OURS = str(Path(__file__).parent)
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


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


class SamplerLost(Exception):
    """A sampler apart has died, or was given up."""


def one_line(error: BaseException) -> str:
    """Return what an exception says, short enough to stand inside a sentence."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:LONGEST_REASON]


def describe(error: BaseException) -> str:
    """Return on one line what the user's or a library's code raised, and in which line of it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    short = text if len(text) <= LONGEST_DESCRIPTION else f"{text[:LONGEST_DESCRIPTION]} …"
    place = _place(error)
    return short if place is None else f"{short} ({place})"


def _place(error: BaseException) -> str | None:
    """Return the line at fault in the deepest of the user's files, or else of a library; None for
    an error that tether raised itself."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
    ]
    if not frames or _OURS in frames[-1].filename:
        return None
    foreign = [frame for frame in frames if _OURS not in frame.filename]
    own = [f for f in foreign if not any(place in f.filename for place in _LIBRARIES)]
    frame = (own or foreign)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
