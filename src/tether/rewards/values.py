"""What a reward may say of a row: a number for the response, one per turn of the policy, one per
sampled token, a mapping of named parts to any of these, or None. Imports no torch.

Over JSON `TurnRewards([…])` is {"turns": […]} and `TokenRewards([…])` is {"tokens": […]}. A mapping
with a "score" is verl's: the rest of it is kept beside the score and not added to it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST_SCORE = 1e15  # its square is still finite in float32
LONGEST_EXTRA = 2000  # characters of a text in verl's score dict that are kept
FORMS = ("turns", "tokens")  # of the JSON forms, so no names of parts


class WrongType(TypeError):
    """The reward returned what cannot be the score of any row."""


@dataclass(frozen=True)
class TurnRewards:
    """One number per turn of the policy; each belongs to the last sampled token of its turn."""

    values: Sequence[float]


@dataclass(frozen=True)
class TokenRewards:
    """One number per token that the policy sampled, the EOS included."""

    values: Sequence[float]


@dataclass(frozen=True)
class RowReward:
    """The reward of a row by where it belongs. What it sums to is the row's score."""

    response: float = 0.0  # on the last sampled token
    turns: tuple[float, ...] = ()  # on the last sampled token of each turn; () = nothing by turn
    tokens: tuple[float, ...] = ()  # on each sampled token; () = nothing by token

    @property
    def total(self) -> float:
        """Return the score."""
        return sum((self.response, *self.turns, *self.tokens))

    @property
    def by_token(self) -> bool:
        """Whether it says more than a number for the response."""
        return bool(self.turns or self.tokens)

    def times(self, weight: float) -> "RowReward":
        """Return it with every number multiplied."""
        return RowReward(
            weight * self.response,
            tuple(weight * x for x in self.turns),
            tuple(weight * x for x in self.tokens),
        )

    def problem(self, turns: int, tokens: int) -> str | None:
        """Return what is wrong with it for a row of so many turns and sampled tokens, if anything.

        A row in which nothing was sampled by turn or token gets nothing by turn or token.
        """
        if self.turns and len(self.turns) != turns:
            return f"the reward gave {len(self.turns)} turns a number, but the row has {turns}"
        if self.tokens and len(self.tokens) != tokens:
            return (
                f"the reward gave {len(self.tokens)} tokens a number, but the policy sampled "
                f"{tokens}"
            )
        return None


@dataclass(frozen=True)
class Said:
    """What a reward said of a row: None has no opinion."""

    reward: RowReward | None
    parts: Mapping[str, float] = field(default_factory=dict)  # named parts, in their order
    extras: Mapping[str, Any] = field(default_factory=dict)  # what else verl's score dict holds


def read_reward(said: Any) -> Said:
    """Read what a reward returned. Raises `WrongType` for what cannot be a reward of any row, and
    `ValueError` for a number that is not finite."""
    if isinstance(said, Mapping) and "score" in said:
        inner = read_reward(said["score"])
        return Said(inner.reward, inner.parts, _extras(said))
    if not isinstance(said, Mapping) or any(name in said for name in FORMS):
        return Said(_one(said))
    if not said:
        raise WrongType("the reward returned a mapping without parts")
    found: dict[str, RowReward] = {}
    for name, value in said.items():
        if not isinstance(name, str):
            raise WrongType(f"the reward named a part {name!r}; write a text")
        try:
            part = _one(value)
        except (WrongType, ValueError) as error:
            raise type(error)(f"part {name!r}: {error}") from None
        if part is None:
            return Said(None)
        found[name] = part
    return Said(add_rewards(found.values()), {name: part.total for name, part in found.items()})


def _one(said: Any) -> RowReward | None:
    """Read a reward without named parts."""
    if said is None:
        return None
    if isinstance(said, Mapping):
        others = [name for name in said if name not in FORMS]
        if len(said) != 1:
            more = f"also {others[0]!r}" if others else "both"
            raise WrongType(
                f"the reward returned a mapping of turns or tokens with {more} in it; "
                f"neither is the name of a part"
            )
        [(form, values)] = said.items()
        said = TurnRewards(values) if form == "turns" else TokenRewards(values)
    if isinstance(said, TurnRewards):
        return RowReward(turns=_numbers(said.values, "turn"))
    if isinstance(said, TokenRewards):
        return RowReward(tokens=_numbers(said.values, "token"))
    if isinstance(said, list | tuple) or getattr(said, "ndim", 0):
        raise WrongType(
            f"the reward returned a {type(said).__name__} for one row; write "
            f"tether.TurnRewards(…) for a number per turn, tether.TokenRewards(…) for one per token"
        )
    return RowReward(number(said))


def _numbers(values: Any, what: str) -> tuple[float, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise WrongType(f"the reward returned {type(values).__name__}, not a number per {what}")
    found = []
    for i, value in enumerate(values, start=1):
        try:
            found.append(number(value))
        except (WrongType, ValueError) as error:
            raise type(error)(f"{what} {i}: {error}") from None
    if not found:
        raise ValueError(f"the reward returned no number per {what}: the list is empty")
    if not abs(sum(found)) <= LARGEST_SCORE:
        raise ValueError(f"the numbers per {what} sum to {sum(found):g}")
    return tuple(found)


def number(value: Any) -> float:
    """Return a finite number as a float; raise for anything else."""
    if "complex" in str(getattr(value, "dtype", "")):  # float() of numpy's drops a part
        raise WrongType(f"the reward returned {value}, a complex number; return a real one")
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise WrongType(f"the reward returned {type(value).__name__}, not a number")
    if not abs(float(value)) <= LARGEST_SCORE:  # False for NaN too
        raise ValueError(f"the reward returned {float(value)}")
    return float(value)


def add_rewards(rewards: Iterable[RowReward]) -> RowReward:
    """Return the sum, place by place. Raises ValueError where the numbers of places differ."""
    terms = list(rewards)
    turns, tokens = ([x for x in (getattr(t, form) for t in terms) if x] for form in FORMS)
    for lists in (turns, tokens):
        if len({len(x) for x in lists}) > 1:
            counts = " and ".join(str(len(x)) for x in lists)
            raise ValueError(f"the parts of the reward gave {counts} numbers")
    return RowReward(
        sum(term.response for term in terms),
        tuple(sum(column) for column in zip(*turns, strict=True)),
        tuple(sum(column) for column in zip(*tokens, strict=True)),
    )


def _extras(result: Mapping[Any, Any]) -> dict[str, Any]:
    """Return them as the run's files can hold them: numbers, booleans and text."""
    return {str(name): _plain(value) for name, value in result.items() if name != "score"}


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") and not isinstance(value, str) else value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_EXTRA else f"{text[:LONGEST_EXTRA]} …"
