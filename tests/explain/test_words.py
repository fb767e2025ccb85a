"""One table of words: both languages say every key, with the same numbers in it."""

import ast
import re
import string
from pathlib import Path

from helpers import table

from tether.explain import words
from tether.explain.words import WORDS, say

FOLDER = Path(words.__file__).parent
TABLES = {"words", "example_words"}
SOURCES = [p.read_text(encoding="utf-8") for p in FOLDER.glob("*.py") if p.stem not in TABLES]


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


@table("key", WORDS)
def test_both_languages_hold_the_same_numbers(key):
    english, chinese = WORDS[key]
    assert english
    assert chinese
    assert fields(english) == fields(chinese)


@table("key", WORDS)
def test_english_holds_no_chinese_but_that_of_the_example(key):
    english = WORDS[key][0].replace("你知道1+1=2吗？", "").replace("是的，1+1=2", "")
    assert not re.search(r"[\u3000-\u9fff\uff00-\uffef]", english)


def test_every_sentence_of_more_than_a_word_is_translated():
    same = {key for key, (english, chinese) in WORDS.items() if english == chinese}
    assert all(len(WORDS[key][0]) < 40 for key in same)
    assert not {key for key in same if key.startswith(("note_", "what_", "why_", "mistake_"))}


def test_no_word_is_there_for_nobody():
    """Whole keys, or the prefix of a key that is put together."""
    literals = {
        node.value
        for source in SOURCES
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    prefixes = tuple(literal for literal in literals if literal.endswith("_"))
    unused = [key for key in WORDS if key not in literals and not key.startswith(prefixes)]
    assert unused == []


def test_a_word_takes_its_numbers():
    assert say("more_terms", "en", count=3) == "3 more terms"
    assert say("more_terms", "zh", count=3) == "另有 3 项"
