"""Search on a server: attempts, deadlines, and the shape of an answer. What a hostile server does
to a whole run is in tests/faults."""

import json
import time

import pytest
from faults.hostile_retriever import SHAPES, answer, drip_body, drip_headers, hang, says, serving
from helpers import table

from tether.rollout.tools.search_client import HttpRetriever, parse_answer
from tether.support.http import BadAnswer, NoAnswer


def test_documents_and_scores_come_as_the_server_orders_them():
    with serving(says(answer("one", "two", score=0.5))) as server:
        found = HttpRetriever(server.url).search("q", 2)
    assert found == [({"id": "1", "contents": "one"}, 0.5), ({"id": "1", "contents": "two"}, 0.5)]


def test_the_request_is_search_r1s():
    with serving(says(answer("x"))) as server:
        HttpRetriever(server.url).search("Where was Kel born? 石桥", 3)
        head, _, body = server.heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /retrieve HTTP/1.1\r\n")
    assert b"content-type: application/json" in head.lower()
    asked = json.loads(body)
    assert list(asked.items()) == [
        ("queries", ["Where was Kel born? 石桥"]),
        ("topk", 3),
        ("return_scores", True),
    ]


def test_a_server_that_fails_once_is_asked_again():
    failures = [says(b"", "503 Service Unavailable"), lambda connection: None]

    def behave(connection):
        (failures.pop() if failures else says(answer("x")))(connection)

    with serving(behave) as server:
        [(document, _)] = HttpRetriever(server.url, retries=2).search("q", 1)
        assert document["contents"] == "x"
        assert server.requests == 3


def test_attempts_are_counted():
    with serving(says(b"", "500 Oops")) as server:
        with pytest.raises(NoAnswer, match="status is 500"):
            HttpRetriever(server.url, retries=1).search("q", 1)
        assert server.requests == 2


def test_an_answer_that_is_wrong_is_not_asked_for_again():
    with serving(says(b"[]")) as server:
        with pytest.raises(BadAnswer):
            HttpRetriever(server.url, retries=3).search("q", 1)
        assert server.requests == 1


@pytest.mark.parametrize("behave", [hang, drip_headers, drip_body])
def test_all_attempts_together_have_one_deadline(behave):
    with serving(behave) as server:
        began = time.perf_counter()
        with pytest.raises(NoAnswer, match=r"longer than 0\.5 s"):
            HttpRetriever(server.url, timeout_seconds=0.5, retries=5).search("q", 1)
        assert time.perf_counter() - began < 2


@table("shape", SHAPES)
def test_any_other_shape_is_refused(shape):
    with pytest.raises(BadAnswer):
        parse_answer(SHAPES[shape], topk=3)


def test_fewer_documents_than_asked_for_are_fine():
    assert parse_answer(b'{"result": [[]]}', topk=3) == []
    assert len(parse_answer(answer("a", "b", score=3), topk=3)) == 2
