"""Whether a long response began with the prompt's letters, told after its end."""

LETTERS = 64


def opening_kept(response: str, opening: str, finished: bool) -> float:
    """Return 1 if the model ended a response of at least 64 letters that begins as asked, else 0.

    All letters after the opening are free.
    """
    return float(finished and len(response) >= LETTERS and response.startswith(opening))
