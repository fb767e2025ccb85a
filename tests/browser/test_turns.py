"""A row of several turns: what the policy only read is dimmed, and every call is told."""

import pytest


def at_row(page, address, number: int = 0) -> None:
    page.goto(f"{address}/#/run/tools/iteration/0/row/{number}")
    page.wait_for_selector(".chip")


def test_what_the_policy_only_read_is_dimmed(page, address):
    at_row(page, address)
    spans = page.locator(".texts .said").nth(1).locator("span")
    texts = spans.evaluate_all("es => es.map(e => e.textContent)")
    dimmed = spans.evaluate_all("es => es.map(e => e.classList.contains('hatched'))")
    assert texts == ["found", " it\n", "so", " 5<|end|>"]
    assert dimmed == [True, False, True, False]
    colours = spans.evaluate_all("es => es.map(e => getComputedStyle(e).color)")
    assert colours[0] == colours[2] != colours[1] == colours[3]


def test_every_call_stands_with_what_was_asked_and_answered_or_its_error(page, address):
    at_row(page, address)
    rows = page.locator(".texts table tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows == [
        ["turn", "tool", "arguments", "result"],
        ["0", "search", "what", "found (cut)"],
        ["1", "search", "what", "Error: no answer"],
    ]


@pytest.mark.long
def test_calls_are_told_in_chinese(browser, address):
    context = browser.new_context(locale="zh-CN")
    page = context.new_page()
    at_row(page, address)
    text = page.locator(".texts").inner_text()
    context.close()
    for word in ("工具调用", "轮次", "参数", "返回", "已截断", "错误：no answer"):
        assert word in text.replace("： ", "："), word


@pytest.mark.long
def test_a_row_without_turns_shows_its_response(page, address):
    at_row(page, address, 1)
    assert page.locator(".texts .said").nth(1).inner_text() == "what was it?"
    assert page.locator(".texts table").count() == 0
