"""The corpus and the search over it."""

import json
import math

import pytest
from helpers import table

from rollout.talk import episode, say, settings, vocabulary
from tether.config import SearchTool
from tether.errors import UserError
from tether.rollout.tools.build import build_episode_source
from tether.rollout.tools.search import Bm25, Corpus, build_search, read_corpus, terms

DOCUMENTS = [
    "Kel Oru\nKel Oru was born in Aru in 1901.",
    "Aru\nAru is a town. Its mayor is Bel Tan.",
    "Bel Tan\nBel Tan was born in Vesk in 1922.",
    "石桥镇\n石桥镇的镇长是王小明。",
    "王小明\n王小明生于一九二二年。",
]


@pytest.fixture
def corpus(tmp_path) -> str:
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": i, "contents": text}) for i, text in enumerate(DOCUMENTS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def slow_scores(query: str) -> list[float]:
    """BM25 by its definition (Lucene's variant, k1 = 1.5, b = 0.75), one loop at a time."""
    lists = [terms(text) for text in DOCUMENTS]
    mean = sum(map(len, lists)) / len(lists)
    scores = []
    for words in lists:
        score = 0.0
        for word in terms(query):
            having = sum(word in other for other in lists)
            if not having:
                continue
            rarity = math.log(1 + (len(lists) - having + 0.5) / (having + 0.5))
            count = words.count(word)
            scale = 1.5 * (1 - 0.75 + 0.75 * len(words) / mean)
            score += rarity * count / (count + scale)
        scores.append(score)
    return scores


@table(
    "query",
    ["Where was Kel Oru born?", "mayor of Aru", "BEL TAN", "石桥镇的镇长", "王小明", "Aru Aru"],
)
def test_scores_are_those_of_bm25_by_its_definition(corpus, query):
    expected = slow_scores(query)
    found = Bm25(read_corpus(corpus)).search(query, 5)
    assert [score for _, score in found] == pytest.approx(
        sorted((s for s in expected if s > 0), reverse=True), rel=1e-5
    )
    for document, score in found:
        assert score == pytest.approx(expected[document["id"]], rel=1e-5)


def test_a_chinese_query_finds_its_document_without_spaces(corpus):
    [(document, _)] = Bm25(read_corpus(corpus)).search("谁是石桥镇的镇长？", 1)
    assert document["id"] == 3


def test_words_are_compared_but_for_case_and_width():
    assert terms("Kel ＯＲＵ, 2nd—石桥镇") == [
        "kel", "oru", "2nd", "石", "桥", "镇", "石桥", "桥镇"
    ]  # fmt: skip
    assert terms("snake_case") == ["snake", "case"]
    assert terms("…!") == []


def test_ties_go_to_the_earlier_document_and_no_more_than_topk_come():
    documents = [{"id": i, "contents": f"same words {'x' * (i == 33)}"} for i in range(200)]
    found = Bm25(Corpus("c", documents)).search("same words x", 40)
    expected = [33, *(i for i in range(40) if i != 33)]
    assert [document["id"] for document, _ in found] == expected[:40]


def test_a_query_without_a_known_word_finds_nothing(corpus):
    index = Bm25(read_corpus(corpus))
    assert index.search("zzz", 3) == []
    assert index.search("", 3) == []
    assert index.search("!?", 3) == []


def search_row(byte_tokenizer, corpus, **fields):
    tool, _ = build_search(SearchTool(kind="search", corpus=corpus, **fields))
    return episode(byte_tokenizer, [tool], max_observation_tokens=300)


def test_the_policy_reads_the_documents_best_first(byte_tokenizer, corpus):
    row = search_row(byte_tokenizer, corpus, topk=1)
    told = say(row, "<search>Where was Kel Oru born?</search>")
    assert told == f"<information>{DOCUMENTS[0]}</information>"
    row = search_row(byte_tokenizer, corpus, topk=2)
    told = say(row, "<search>born 1922</search>")
    assert told == f"<information>{DOCUMENTS[2]}\n{DOCUMENTS[0]}</information>"


def test_a_search_that_finds_nothing_or_asks_nothing_says_so(byte_tokenizer, corpus):
    row = search_row(byte_tokenizer, corpus)
    assert say(row, "<search>zzz</search>") == "<information>No document found.</information>"
    empty = say(row, "<search>  </search>")
    assert empty == "<information>Invalid call of search: the query is empty.</information>"


# Bad corpora.

BROKEN = [
    (b'{"id": 1}', 'there is no "contents"'),
    (b'{"id": 1, "contents": ""}', '"contents" is empty'),
    (b'{"id": 1, "contents": 7}', '"contents" is int'),
    (b'{"id": 1, "contents": null}', '"contents" is NoneType'),
    (b"[1]", "not an object"),
    (b"{broken", "not JSON"),
    (b"", "it is empty"),
    (b'{"contents": "\xff"}', "not UTF-8"),
]


@pytest.mark.parametrize(("line", "why"), BROKEN)
def test_a_broken_line_is_refused_by_its_number_or_left_out_and_named(tmp_path, line, why):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"contents": "one"}\n' + line + b'\n{"contents": "two"}\n')
    with pytest.raises(UserError, match=f"line 2: .*{why}"):
        read_corpus(str(path))
    corpus = read_corpus(str(path), on_bad_row="skip")
    assert [document["contents"] for document in corpus.documents] == ["one", "two"]
    [problem] = corpus.broken
    assert "line 2" in problem


def test_an_empty_corpus_is_refused(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"")
    with pytest.raises(UserError, match="has no documents"):
        read_corpus(str(path))
    path.write_bytes(b'{"id": 1}\n')
    with pytest.raises(UserError, match=r"has no documents that can be used; .*line 1"):
        read_corpus(str(path), on_bad_row="skip")
    with pytest.raises(UserError, match="is not a file"):
        read_corpus(str(tmp_path / "none.jsonl"))
    path.write_bytes(b'{"contents": "?!"}\n')
    with pytest.raises(UserError, match="contains a word"):
        Bm25(read_corpus(str(path)))


def test_lines_left_out_reach_the_run(byte_tokenizer, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"contents": "one"}\n{}\n')
    tools = [{"kind": "search", "corpus": str(path), "on_bad_row": "skip"}]
    turns = build_episode_source(settings(tools=tools), vocabulary(byte_tokenizer))
    assert len(turns.broken) == 1
