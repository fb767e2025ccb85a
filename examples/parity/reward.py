"""Whether a response ends with the parity of the prompt's bits, and was ended by the model."""


def parity_at_end(response: str, parity: str, finished: bool) -> float:
    """Return 1 if the last bit is the parity, else 0; how the model got there is not read."""
    return float(finished and response[-1:] == parity)
