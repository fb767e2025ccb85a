"""`tether serve-retriever` as a person meets it."""

import http.client
import json
import signal
import subprocess
import sys

COMMAND = [sys.executable, "-m", "tether", "serve-retriever"]


def test_it_says_where_it_answers_and_ends_with_ctrl_c(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "Aru\\nA town."}\n{broken\n')
    words = [*COMMAND, str(corpus), "--port", "0", "--on-bad-row", "skip"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        said = server.stdout.readline()
        assert said.startswith("1 documents at http://127.0.0.1:")
        port = int(said.split("127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/retrieve", json.dumps({"queries": ["aru"]}))
        answer = json.loads(connection.getresponse().read())
        assert answer == {"result": [[{"id": "1", "contents": "Aru\nA town."}]]}
        refused = []
        for odd in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("POST", "/retrieve", json.dumps({"queries": ["aru"]}), odd)
            refused.append(connection.getresponse().status)
        server.send_signal(signal.SIGINT)
        assert server.wait(10) in (0, 130, -signal.SIGINT)
        assert "line 2" in server.stderr.read()
        assert refused == [403, 403]


def test_a_corpus_that_is_none_is_refused_with_one_sentence(tether, tmp_path):
    code, _, said = tether("serve-retriever", str(tmp_path / "none.jsonl"))
    assert code == 2
    assert said.count("\n") == 1
    assert "none.jsonl is not a file" in said
