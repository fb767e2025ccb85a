"""The ladder of sums: a game of several turns with a reward for each."""

import pytest
from helpers import table

from tether.tasks.ladder import Ladder


def answered(game: Ladder, asked: str, right: bool) -> dict:
    a, b = asked.removesuffix("=?").split("+")
    return game.step(f" {int(a) + int(b)}" if right else "10")


def played(pay: str, rights: list[bool]) -> tuple[list[float], list[bool]]:
    game = Ladder(turns=len(rights), pay=pay)
    asked, rewards, over = game.reset({"seed": 4}), [], []
    for right in rights:
        step = answered(game, asked, right)
        asked = step["observation"]
        rewards.append(step["reward"])
        over.append(step["terminated"])
    return rewards, over


@table(
    ("pay", "expected"),
    [("turn", [1.0, 0.0, 1.0, 1.0]), ("end", [0.0, 0.0, 0.0, 3.0])],
)
def test_turns_are_paid_at_once_or_all_together_at_the_end(pay, expected):
    rewards, over = played(pay, [True, False, True, True])
    assert rewards == expected
    assert over == [False, False, False, True]


def test_a_game_follows_from_its_seed_and_asks_for_one_digit():
    first, again, other = Ladder(), Ladder(), Ladder()
    assert first.reset({"seed": 1}) == again.reset({"seed": 1})
    asked = [other.reset({"seed": seed}) for seed in range(50)]
    assert len(set(asked)) > 20
    totals = [sum(map(int, one.removesuffix("=?").split("+"))) for one in asked]
    assert set(totals) <= set(range(10))


def test_a_game_that_cannot_be_played_is_refused():
    with pytest.raises(ValueError, match="pay is turn or end"):
        Ladder(pay="never")
