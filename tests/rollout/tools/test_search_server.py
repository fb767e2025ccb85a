"""`tether serve-retriever`, asked over real sockets as Search-R1's client asks."""

import http.client
import json
import socket
import threading

import pytest
import uvicorn
from helpers import table
from starlette.testclient import TestClient

from tether.errors import UserError
from tether.rollout.tools.search import Bm25, read_corpus
from tether.rollout.tools.search_client import HttpRetriever
from tether.rollout.tools.search_server import MAX_BYTES, make_app

LINES = [
    '{"id": "0", "contents": "\\"Kel Oru\\"\\nKel Oru was born in Aru."}',
    '{"id": "1", "contents": "Aru\\nA town. 石桥镇", "url": "x"}',
    '{"id": "2", "contents": "Bel\\nborn in Vesk"}',
]


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> int:
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text("\n".join(LINES), encoding="utf-8")
    listener = socket.create_server(("127.0.0.1", 0))
    app = make_app(Bm25(read_corpus(str(corpus))))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(5)


def ask(port: int, body: object, path: str = "/retrieve", verb: str = "POST"):
    """Status and raw bytes of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(verb, path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def test_with_scores_an_answer_has_search_r1s_structure_byte_for_byte(port):
    asked = {"queries": ["Kel Oru", "石桥镇"], "topk": 1, "return_scores": True}
    status, said = ask(port, asked)
    assert status == 200
    scores = [hit["score"] for one in json.loads(said)["result"] for hit in one]
    assert all(isinstance(score, float) for score in scores)
    expected = (
        '{"result":[[{"document":{"id":"0","contents":"\\"Kel Oru\\"\\nKel Oru was born in Aru."},'
        f'"score":{scores[0]}}}],[{{"document":{{"id":"1","contents":"Aru\\nA town. 石桥镇",'
        f'"url":"x"}},"score":{scores[1]}}}]]}}'
    )
    assert said.decode() == expected


def test_without_scores_it_is_the_documents_alone(port):
    status, said = ask(port, {"queries": ["Kel Oru"], "topk": 1})
    document = '{"id":"0","contents":"\\"Kel Oru\\"\\nKel Oru was born in Aru."}'
    assert (status, said.decode()) == (200, f'{{"result":[[{document}]]}}')


def test_each_query_has_its_list_best_first_and_topk_has_a_default(port):
    status, said = ask(port, {"queries": ["born", "zzz", ""], "return_scores": True, "topk": None})
    assert status == 200
    first, *others = json.loads(said)["result"]
    assert others == [[], []]
    assert [hit["document"]["id"] for hit in first] == ["2", "0"]
    assert first[0]["score"] >= first[1]["score"]
    assert ask(port, {"queries": []}) == (200, b'{"result":[]}')


@table(
    ("body", "sentence"),
    [
        (b"hello", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        ([], "must be an object"),
        ({}, '"queries" must be a list'),
        ({"queries": "x"}, '"queries" must be a list'),
        ({"queries": [1]}, '"queries" must be a list'),
        ({"queries": ["x"] * 5000}, "at most 4096"),
        ({"queries": ["x" * 10_001]}, "10000 characters"),
        ({"queries": ["x"], "topk": 0}, '"topk" must be'),
        ({"queries": ["x"], "topk": 101}, '"topk" must be'),
        ({"queries": ["x"], "topk": True}, '"topk" must be'),
        ({"queries": ["x"], "topk": "3"}, '"topk" must be'),
        ({"queries": ["x"], "return_scores": 1}, '"return_scores" must be'),
    ],
)
def test_a_wrong_request_gets_one_sentence(port, body, sentence):
    status, said = ask(port, body)
    assert status == 422
    [detail] = json.loads(said).values()
    assert sentence in detail
    assert "\n" not in detail


def test_a_request_that_is_too_large_is_not_read_to_its_end(port):
    status, said = ask(port, b" " * (MAX_BYTES + 1))
    assert status == 413
    assert b"bytes" in said


def test_other_paths_and_verbs_are_refused(port):
    assert ask(port, b"", "/", "POST")[0] == 404
    assert ask(port, b"", "/retrieve", "GET")[0] == 405


def test_our_own_client_reads_what_our_server_says(port):
    url = f"http://127.0.0.1:{port}/retrieve"
    [(document, score)] = HttpRetriever(url).search("Kel", 1)
    assert document["id"] == "0"
    assert score > 0


def served(lines: list[str], tmp_path, **options) -> TestClient:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(lines), encoding="utf-8")
    app = make_app(Bm25(read_corpus(str(corpus), "skip")), **options)
    return TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)


def test_a_small_request_cannot_be_made_a_huge_answer(tmp_path):
    """4,096 queries of 100 documents of 50 kB would be 20 GB."""
    text = "word " + "x" * 50_000
    client = served([json.dumps({"id": i, "contents": text}) for i in range(120)], tmp_path)
    answer = client.post("/retrieve", json={"queries": ["word"] * 40, "topk": 100})
    assert answer.status_code == 413
    assert "send fewer queries" in answer.json()["detail"]
    assert client.post("/retrieve", json={"queries": ["word"], "topk": 3}).status_code == 200


def test_what_cannot_be_sent_as_json_is_a_broken_line_of_the_corpus(tmp_path):
    odd = [
        '{"contents": "a", "x": NaN}',
        '{"contents": "a \\ud800"}',
        '{"contents": "a", "x": 1e999}',
    ]
    client = served([*odd, '{"id": 4, "contents": "a b"}'], tmp_path)
    answer = client.post("/retrieve", json={"queries": ["a"], "topk": 5})
    assert answer.status_code == 200
    assert answer.json() == {"result": [[{"id": 4, "contents": "a b"}]]}
    with pytest.raises(UserError, match="line 1: it holds NaN, infinity or half"):
        read_corpus(str(tmp_path / "corpus.jsonl"))
