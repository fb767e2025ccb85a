"""Rewards that ship: plain functions, chosen by name in `reward.kind`."""


def exact_answer(response: str, answer: str, finished: bool) -> float:
    """1 for exactly the answer, ended by the model itself; else 0."""
    return float(finished and response == answer)


RULES = {"exact_answer": exact_answer}
