"""The calculator, against Python's own fractions and against what it must refuse."""

import contextlib
from fractions import Fraction

import pytest
from helpers import table
from hypothesis import given
from hypothesis import strategies as st

from tether.rollout.tool_calls import InvalidArguments
from tether.rollout.tools.calculator import calculate, format_number


@table(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("2 - 3 - 4", "-5"),  # from the left
        ("24 / 4 / 2", "3"),
        ("0.1 + 0.2", "0.3"),  # exact, as no float is
        ("-(2.5 - .5)", "-2"),
        ("2 * -3", "-6"),
        ("--3", "3"),
        ("+4", "4"),
        ("7.", "7"),
        ("3 × 4 ÷ 6 − 1", "1"),
        ("（1+2）*2", "6"),
        ("10 / 4", "2.5"),
        ("1 / 3", "about 0.3333333333"),
        ("2 / 3", "about 0.6666666667"),
        ("-1 / 100000000000", "about 0"),
        ("12345678901234567890 * 2", "24691357802469135780"),
    ],
)
def test_values_are_exact_or_say_that_they_are_not(expression, value):
    assert calculate(expression) == value


@table(
    ("expression", "why"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("1 +", "ends where a number"),
        ("* 2", r"'\*' stands where a number"),
        ("2 ** 3", r"'\*' stands where a number"),
        ("1 2", "'2' stands where the expression should end"),
        ("(1", "not closed"),
        ("1)", r"'\)' stands where the expression"),
        ("()", r"'\)' stands where a number"),
        ("1 / (2 - 2)", "division by zero"),
        ("1,000", "',' is neither"),
        ("x + 1", "'x' is neither"),
        ("__import__('os')", "'_' is neither"),
        ("1e9", "'e' is neither"),
        ("٣ + 1", "'٣' is neither"),  # digits of other scripts are no numbers here
        ("1" * 201, "200 characters"),
        ("(" * 30 + "1" + ")" * 30, "20 deep"),
        ("9" * 60 + "*" + "9" * 60, "100 digits"),
    ],
)
def test_what_is_no_expression_is_refused_with_the_reason(expression, why):
    with pytest.raises(InvalidArguments, match=why):
        calculate(expression)


expressions = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
        lambda t: (f"({t[0][0]}{t[1]}{t[2][0]})", _apply(t[1], t[0][1], t[2][1]))
    ),
    max_leaves=8,
)


def _apply(operation, a, b):
    if a is None or b is None or (operation == "/" and b == 0):
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operation]


@given(expressions)
def test_nested_expressions_agree_with_fractions(pair):
    expression, value = pair
    if value is None:
        with pytest.raises(InvalidArguments, match="zero"):
            calculate(expression)
    else:
        assert calculate(expression) == format_number(value)


@given(st.text(max_size=40))
def test_any_text_gives_a_number_or_a_refusal(text):
    with contextlib.suppress(InvalidArguments):
        assert calculate(text)
