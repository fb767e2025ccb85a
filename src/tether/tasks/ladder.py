"""A game of several turns with a reward for each: climb a ladder of sums.

    > 2+5=?        the environment
    < 7            the policy: right, a rung higher, reward 1
    > 3+1=?
    < 7            wrong: the rung stays, reward 0

A game has a fixed number of turns. What a turn earns depends on that turn alone, so the reward of a
turn says all there is to know about it; the total at the end mixes it with luck in the other turns.
The starter knows such sums as a first question, and has never been asked a second one.
"""

import random
from collections.abc import Mapping
from typing import Any, Literal


class Ladder:
    """Pay each turn at once, or the same total with the last one (`pay: end`)."""

    def __init__(self, turns: int = 6, pay: Literal["turn", "end"] = "turn") -> None:
        if turns < 1 or pay not in ("turn", "end"):
            raise ValueError("turns is a number from 1 on, and pay is turn or end")
        self.turns, self.pay = turns, pay
        self.taken = self.rungs = self.answer = 0

    def reset(self, columns: Mapping[str, Any]) -> str:
        """Return the first sum of the game that follows from the row's seed."""
        self.random = random.Random(f"ladder {columns['seed']}")
        self.taken = self.rungs = 0
        return self._ask()

    def step(self, text: str) -> dict[str, object]:
        """Pay for an answer and ask the next sum."""
        right = text.strip() == str(self.answer)
        self.rungs += right
        self.taken += 1
        over = self.taken == self.turns
        reward = float(right)
        if self.pay == "end":
            reward = float(self.rungs) if over else 0.0
        return {"observation": "" if over else self._ask(), "reward": reward, "terminated": over}

    def _ask(self) -> str:
        self.answer = self.random.randint(0, 9)  # one digit
        a = self.random.randint(0, self.answer)
        return f"{a}+{self.answer - a}=?"
