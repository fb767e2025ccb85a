"""A trace told: what stands in the sections and on the page."""

import json
from html.parser import HTMLParser

import pytest
from helpers import distinct_letters, table

from tether import api
from tether.explain.document import Section, Table, number, to_html
from tether.explain.trace_text import tell


@pytest.fixture(scope="module")
def record(trained_run) -> dict:
    return api.trace("2+1=?", trained_run, response="abc", reward=distinct_letters)


def texts(sections: list[Section]) -> list[str]:
    found = []
    for section in sections:
        found.append(section.title)
        for block in section.blocks:
            if isinstance(block, Table):
                found += [cell for row in block.rows for cell in row]
            else:
                found.append(block)
    return found


def tables(sections: list[Section], titled: str) -> list[Table]:
    [section] = [s for s in sections if s.title.startswith(titled)]
    return [block for block in section.blocks if isinstance(block, Table)]


def test_the_token_table_has_a_row_a_token_and_every_column(record):
    rows = tables(tell(record, "en", False), "7")[0].rows
    assert rows[0] == [
        *("token", "id", "old", "ref", "KL", "score", "reward", "value", "δ"),
        *("advantage", "return"),
    ]
    assert [row[0] for row in rows[1:]] == ["a", "b", "c", "<|end|>"]
    names = ["old_log_probs", "ref_log_probs", "kl", "token_level_scores", "token_level_rewards"]
    names += ["values", "deltas", "advantages", "returns"]
    for t, row in enumerate(rows[1:]):
        assert row[1] == str(record["tokens"]["response_ids"][t])
        for cell, name in zip(row[2:], names, strict=True):
            assert float(cell) == pytest.approx(record["tokens"][name][t], abs=6e-5, rel=0.06)


def test_every_output_of_every_role_is_named_with_its_shape(record):
    cells = texts(tell(record, "en", False))
    for name in (
        *("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "old_log_probs"),
        *("ref_log_probs", "values", "final_values", "scores", "token_level_scores", "kl"),
        *("token_level_rewards", "deltas", "advantages", "returns", "policy_advantages"),
    ):
        assert name in cells
    assert "[1, 4]" in cells


def test_the_objective_is_written_out_term_by_term(record):
    [line] = [x for x in texts(tell(record, "en", False)) if x.startswith("L^CPI")][:1]
    ratios, advantages = record["before"]["ratio"], record["tokens"]["policy_advantages"]
    for ratio, advantage in zip(ratios, advantages, strict=True):
        wanted = number(advantage) if advantage >= 0 else f"({number(advantage)})"
        assert f"{number(ratio)}·{wanted}" in line
    assert line.startswith("L^CPI = 0.2500·(")
    assert line.endswith(f" = {number(record['before']['l_cpi'])}")


@table(
    ("verdict", "sentence"),
    [
        ("inside", "no: inside the bound (0.8 ≤ r ≤ 1.2)"),
        ("clipped_low", "yes, low: A < 0 and the ratio fell past the bound (0.8 ≤ r ≤ 1.2)"),
        ("kept_low", "no, kept: the ratio fell past the bound (0.8 ≤ r ≤ 1.2) though A > 0"),
        ("clipped_dual", "yes, dual: A < 0 and the ratio rose past the dual clip"),
        ("capped", "yes, capped: the ratio left the bound (0.8 ≤ r ≤ 1.2)"),
    ],
)
def test_why_a_term_is_clipped_is_said_once_for_all_such_tokens(record, verdict, sentence):
    changed = json.loads(json.dumps(record))
    changed["after"]["verdicts"] = [verdict] * 4
    found = [text for text in texts(tell(changed, "en", False)) if text.startswith(sentence)]
    assert len(found) == 1


def test_plain_words_come_only_when_asked_for(record):
    plain, explained = (texts(tell(record, "en", explain)) for explain in (False, True))
    assert "↳ points for the whole answer" not in plain
    assert "↳ points for the whole answer" in explained
    assert len(explained) > len(plain) + 20


def test_the_chinese_story_is_chinese(record):
    english, chinese = tell(record, "en", True), tell(record, "zh", True)
    assert [len(s.blocks) for s in english] == [len(s.blocks) for s in chinese]
    assert all(a.title != b.title for a, b in zip(english, chinese, strict=True))
    assert "裁剪" in "".join(texts(chinese))


def test_a_long_sum_shows_both_ends_and_says_how_many_are_left_out(record):
    long = json.loads(json.dumps(record))
    for part in (long["tokens"], long["before"], long["after"]):
        for name, values in part.items():
            if isinstance(values, list):
                part[name] = values * 20
    long["weights"], long["new_values"] = record["weights"] * 20, record["new_values"] * 20
    [line] = [x for x in texts(tell(long, "en", False)) if x.startswith("L^CPI")][:1]
    assert "… (56 more terms) …" in line
    assert line.count(" + ") == 24


@table(
    ("x", "shown"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1.0000"),
        (-0.12345, "-0.1235"),
        (0.00004, "4.0e-05"),
        (None, "–"),
    ],
)
def test_numbers_keep_what_tells_something(x, shown):
    assert number(x) == shown


class Tags(HTMLParser):
    """All tags and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.text += data


def test_the_page_is_static_and_holds_what_the_story_says(record):
    sections = tell(record, "zh", True)
    page = Tags(to_html(sections, "zh"))
    assert page.tags <= {
        *("html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "p"),
        *("div", "table", "tr", "th", "td"),
    }
    assert page.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class"}
    for text in texts(sections):
        assert text in page.text


def test_model_text_on_the_page_is_only_text(record):
    evil = "</td><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\"'"
    hostile = json.loads(json.dumps(record))
    hostile["response"] = hostile["prompt"] = hostile["model"] = evil
    hostile["tokens"]["response_tokens"] = [evil] * 4
    hostile["prompt_tokens"], hostile["columns"] = [evil], {evil: evil}
    hostile["events"] = [evil]
    page = Tags(to_html(tell(hostile, "en", True), "en"))
    assert not page.tags & {"script", "img"}
    assert "onerror" not in page.attributes
    assert page.text.count(evil) >= 10
