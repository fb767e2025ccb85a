"""Evaluate arithmetic exactly, by a small grammar with limits; nothing is run as code.

sum      = product {("+" | "-") product}
product  = signed {("*" | "/") signed}
signed   = {"-" | "+"} atom
atom     = number | "(" sum ")"
number   = digits with or without a decimal point
"""

import re
from fractions import Fraction

from tether.rollout.tool_calls import InvalidArguments

MAX_LENGTH = 200  # characters
MAX_DEPTH = 20  # parentheses inside each other
MAX_DIGITS = 100  # of a numerator or denominator on the way
DECIMALS = 10  # shown of a number that has no end

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|([-+*/()]))", re.ASCII)
EQUIVALENT = str.maketrans("×·÷−–（）", "**/--()")


def calculate(expression: str) -> str:
    """Return the value of an expression as a decimal: exact, or rounded after the word "about"."""
    if len(expression) > MAX_LENGTH:
        raise InvalidArguments(
            f"an expression may have {MAX_LENGTH} characters, not {len(expression)}"
        )
    reader = _Reader(_tokens(expression.translate(EQUIVALENT)))
    value = reader.sum(0)
    if reader.next is not None:
        raise InvalidArguments(f"{reader.next!r} stands where the expression should end")
    return format_number(value)


def format_number(value: Fraction) -> str:
    """Return a number in decimals: 3/8 is 0.375; 1/3 is about 0.3333333333."""
    scaled = value * 10**DECIMALS
    exact = scaled.denominator == 1
    whole, part = divmod(abs(round(scaled)), 10**DECIMALS)
    digits = f"{part:0{DECIMALS}d}".rstrip("0")
    sign = "-" if value < 0 and (whole or digits) else ""
    text = sign + (f"{whole}.{digits}" if digits else str(whole))
    return text if exact else f"about {text}"


def _tokens(expression: str) -> list[str]:
    found, at, text = [], 0, expression.rstrip()
    if not text:
        raise InvalidArguments("the expression is empty")
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise InvalidArguments(
                f"{text[at:].lstrip()[0]!r} is neither a number nor one of + - * / ( )"
            )
        found.append(match.group().strip())
        at = match.end()
    return found


class _Reader:
    """A recursive-descent parser: one method per rule of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str | None:
        token = self.next
        self.at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = _small(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while self.next in ("*", "/"):
            operation, other = self.take(), self.signed(depth)
            if operation == "/" and other == 0:
                raise InvalidArguments("division by zero")
            value = _small(value * other if operation == "*" else value / other)
        return value

    def signed(self, depth: int) -> Fraction:
        sign = 1
        while self.next in ("-", "+"):
            sign = -sign if self.take() == "-" else sign
        return sign * self.atom(depth)

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token is None:
            raise InvalidArguments("the expression ends where a number should stand")
        if token == "(":
            if depth == MAX_DEPTH:
                raise InvalidArguments(f"parentheses are nested more than {MAX_DEPTH} deep")
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise InvalidArguments("a parenthesis is not closed")
            return value
        if token in "+-*/)":
            raise InvalidArguments(f"{token!r} stands where a number should")
        return _small(Fraction(token.rstrip(".")))


def _small(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise InvalidArguments(f"a number on the way has more than {MAX_DIGITS} digits")
    return value
