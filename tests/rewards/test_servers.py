"""A judge and a reward server over real HTTP: what they say, what they do wrong, and the record."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers import read_jsonl, table

import tether
from tether.config.load import validate_config
from tether.errors import UserError
from tether.rewards.functions import RewardPart
from tether.rewards.scorers import Batch
from tether.rewards.servers import HttpScorer, JudgeScorer, as_text, fill, last_object_with


class Server(ThreadingHTTPServer):
    """`answer(body, number of the request) -> (status, object or bytes, headers)`."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.keys, self.lock = answer, [], [], threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_) -> None:
        """Clients that hang up are part of the tests."""

    def gone(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers["Authorization"])
            number = len(self.server.asked)
        status, said, *headers = self.server.answer(body, number)
        if said is None:  # hang up
            self.close_connection = True
            return
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        for name, value in headers[0].items() if headers else ():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.gone()


def completion(text) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def says(text):
    return lambda body, number: (200, completion(text))


def length_of(body, number):
    """A judge whose score is the length of the response."""
    asked = body["messages"][-1]["content"]
    return 200, completion(f"I counted.\nScore: {len(asked.removeprefix('Judge: '))}")


def judge(server, seconds=5.0, concurrency=32, **more) -> JudgeScorer:
    asked = {"url": server.url, "model": "m", "prompt": "Judge: {response}", "pause_seconds": 0.01}
    return JudgeScorer(RewardPart("judge", {**asked, **more}), seconds, concurrency)


def rows(*responses: str, **more) -> list[dict]:
    return [{"prompt": "?", "response": text, **more} for text in responses]


def test_a_judge_is_asked_by_its_template_and_its_score_is_read(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    server = serve(length_of)
    scorer = judge(server, key_variable="JUDGE_KEY", system="You judge {topic}.", max_tokens=9)
    verdicts = scorer.score(rows("a", "bbb", "", topic="sums"))
    assert [v.score for v in verdicts] == [1, 3, 0]
    assert verdicts[1].extras == {"verdict": "I counted.\nScore: 3"}
    assert server.keys == ["Bearer secret-7"] * 3
    [one] = [body for body in server.asked if body["messages"][1]["content"] == "Judge: bbb"]
    assert one == {
        "model": "m", "temperature": 0.0, "max_tokens": 9,
        "messages": [{"role": "system", "content": "You judge sums."},
                     {"role": "user", "content": "Judge: bbb"}],
    }  # fmt: skip


@table(
    ("text", "settings", "found"),
    [
        ("Score: 7", {}, 7),
        ("score = -2.5, and so on", {}, -2.5),
        ("**Score**: 3. No: **Score**: 1e1", {}, 10),
        ("The response says 'Score: 10'. Score: 2", {}, 2),  # its last word
        ("7/10", {"pattern": r"(\d+)/10"}, 7),
        ('{"score": 3} or {"score": 4, "why": {"deep": 1}} done', {"score_field": "score"}, 4),
        ('```json\n{"a": {"score": 9}, "score": 5}\n```', {"score_field": "score"}, 5),
        ("I will not say", {}, "nothing that its pattern matches"),
        ("", {}, "nothing that its pattern matches"),
        ("{" * 10_000, {"score_field": "score"}, "no JSON object with 'score'"),
        ("[" * 100_000, {"score_field": "score"}, "no JSON object with 'score'"),
        ('{"score": "high"}', {"score_field": "score"}, "the judge's score is 'high'"),
        ('{"score": NaN}', {"score_field": "score"}, "the judge's score is nan"),
        ('{"score": [1]}', {"score_field": "score"}, "the judge's score is [1]"),
        ("Score: 11", {"lowest": 0, "highest": 10}, "is 11, not within 0 and 10"),
        ("Score: 1e300", {}, "is 1e+300, not within"),
        ("nan", {"pattern": "(nan)"}, "is nan, not within"),
    ],
)
def test_a_score_is_the_last_number_of_its_form_or_none(serve, text, settings, found):
    [verdict] = judge(serve(says(text)), **settings).score(rows("x"))
    if isinstance(found, str):
        assert verdict.score is None
        assert found in verdict.problem
    else:
        assert verdict.score == found
    assert verdict.extras["verdict"].startswith(text[:100])


def hang(body, number):
    time.sleep(3)
    return 200, completion("Score: 1")


@table(
    ("answer", "problem"),
    [
        (lambda b, n: (200, b"not json"), "it is not JSON"),
        (lambda b, n: (200, b"\xff\xfe"), "it is not UTF-8"),
        (lambda b, n: (200, [1]), "it is not a JSON object"),
        (lambda b, n: (200, {"choices": []}), "it is not a chat completion"),
        (lambda b, n: (200, completion(None)), "its message has no text"),
        (lambda b, n: (200, completion(["Score: 1"])), "its message has no text"),
        (lambda b, n: (401, {"error": "key"}), "its status is 401"),
        (lambda b, n: (302, {}, {"Location": "http://127.0.0.1:1"}), "its status is 302"),
        (lambda b, n: (500, {}), "its status is 500"),
        (lambda b, n: (429, {}), "its status is 429"),
        (lambda b, n: (200, None), "RemoteProtocolError"),
        (lambda b, n: (200, b" " * 2_000_000), "more than 1,000,000 bytes"),
        (hang, "it took longer than 0.5 s"),
    ],
)
def test_a_server_that_fails_costs_its_rows_and_no_more(serve, answer, problem):
    """The second row is answered rightly by the same server."""

    def mixed(body, number):
        return (
            answer(body, number)
            if "bad" in body["messages"][0]["content"]
            else length_of(body, number)
        )

    scorer = judge(serve(mixed), seconds=0.5, retries=1)
    bad, good = scorer.score(rows("bad", "good"))
    assert bad.score is None
    assert problem in bad.problem, bad.problem
    assert good.score == 4


def test_a_busy_server_is_asked_again_and_when_it_says(serve):
    times = []

    def busy(body, number):
        times.append(time.monotonic())
        if number < 3:
            return 429, {}, {"Retry-After": "0"} if number == 1 else {}
        return length_of(body, number)

    [verdict] = judge(serve(busy), pause_seconds=0.05).score(rows("abc"))
    assert verdict.score == 3
    assert times[1] - times[0] >= 0.05
    assert times[2] - times[1] >= 0.1  # twice as long


def test_a_server_that_is_not_there_is_told_by_row(serve):
    server = serve(length_of)
    server.gone()
    server.gone = lambda: None
    [verdict] = judge(server, retries=0).score(rows("a"))
    assert "ConnectError" in verdict.problem


def test_a_rate_limit_spaces_the_requests(serve):
    scorer = judge(serve(length_of), requests_per_minute=1200)
    began = time.monotonic()
    assert [v.score for v in scorer.score(rows(*"abcdefg"))] == [1] * 7
    assert time.monotonic() - began >= 6 * 0.05


def test_requests_are_in_flight_together_and_no_more_than_allowed(serve):
    flying, most = [0], [0]
    lock = threading.Lock()

    def slow(body, number):
        with lock:
            flying[0] += 1
            most[0] = max(most[0], flying[0])
        time.sleep(0.02)
        with lock:
            flying[0] -= 1
        return length_of(body, number)

    judge(serve(slow), concurrency=8).score(rows(*["x"] * 40))
    assert 2 <= most[0] <= 8


def test_what_was_judged_is_recorded_and_asked_once(serve, tmp_path):
    """By iteration, row and text; half a line from a kill is skipped and never cut off."""
    server, path = serve(length_of), tmp_path / "verdicts.jsonl"
    first = judge(server)
    first.record_in(path)
    batch = Batch([4, 9], iteration=3)
    assert [v.score for v in first.score(rows("a", "bb"), batch)] == [1, 2]
    assert len(server.asked) == 2
    found = {(e["iteration"], e["row"], e["answer"][-1]) for e in read_jsonl(path)}
    assert found == {(3, 4, "1"), (3, 9, "2")}
    with path.open("ab") as file:
        file.write(b'{"iteration": 3, "row')
    second = judge(server)
    second.record_in(path)
    assert second.score(rows("a", "bb"), batch) == first.score(rows("a", "bb"), batch)
    assert len(server.asked) == 2
    assert [v.score for v in second.score(rows("a", "ccc"), batch)] == [1, 3]  # another text
    assert [v.score for v in second.score(rows("a"), Batch([5], iteration=3))] == [1]  # another row
    assert len(server.asked) == 4
    assert path.read_bytes().count(b"\n") == 5
    third = judge(server, record=str(path))
    third.record_in(tmp_path / "other.jsonl")
    server.gone()
    server.gone = lambda: None
    assert [v.score for v in third.score(rows("a", "ccc"), batch)] == [1, 3]
    assert len(read_jsonl(tmp_path / "other.jsonl")) == 2  # complete on its own


def test_a_failure_is_recorded_once_the_run_has_gone_on_without_the_row(serve, tmp_path):
    down = [True]
    server = serve(lambda b, n: (401, {}) if down[0] else length_of(b, n))
    path = tmp_path / "verdicts.jsonl"
    scorer = judge(server)
    scorer.record_in(path)
    assert scorer.score(rows("a"))[0].score is None
    assert not path.exists()
    down[0] = False
    assert scorer.score(rows("a"))[0].score == 1  # asked again
    down[0] = True
    failed = scorer.score(rows("bb"))
    scorer.accept()
    down[0] = False
    again = judge(server)
    again.record_in(path)
    assert again.score(rows("bb")) == failed


def test_a_reward_server_is_asked_once_for_all_rows(serve, tmp_path):
    said = [
        1.5,
        None,
        {"turns": [0.5, 1]},
        {"score": 2, "why": "so"},
        "x",
        [1, 2],
        {"a": 1, "b": 2},
    ]
    server = serve(lambda body, number: (200, {"rewards": said[: len(body["rows"])]}))
    part = RewardPart("http", {"url": f"{server.url}/score"})
    scorer = HttpScorer(part)
    scorer.record_in(tmp_path / "verdicts.jsonl")
    asked = rows(*"abcdefg", policy_turns=["a", "b"], answer=4)
    verdicts = scorer.score(asked)
    assert len(server.asked) == 1
    assert server.asked[0]["rows"][2] == asked[2]
    assert [v.score for v in verdicts] == [1.5, None, 1.5, 2, None, None, 3]
    assert verdicts[2].reward.turns == (0.5, 1)
    assert verdicts[3].extras == {"why": "so"}
    assert verdicts[6].parts == {"a": 1, "b": 2}
    assert "list for one row" in verdicts[5].problem
    assert scorer.score(asked) == verdicts
    assert len(server.asked) == 1
    assert len(read_jsonl(tmp_path / "verdicts.jsonl")) == 7


@table(
    ("answer", "problem"),
    [
        ({"rewards": [1.0]}, "1 rewards for 2 rows"),
        ({"scores": [1.0, 2.0]}, 'no list "rewards"'),
        ([1.0, 2.0], "not a JSON object"),
    ],
)
def test_a_reward_server_of_another_shape_gives_no_scores(serve, answer, problem):
    server = serve(lambda body, number: (200, answer))
    scorer = HttpScorer(RewardPart("http", {"url": server.url, "retries": 0}))
    for verdict in scorer.score(rows("a", "b")):
        assert problem in verdict.problem


def test_a_template_fills_names_and_leaves_other_braces():
    row = {"response": "{prompt} {0}", "prompt": [{"role": "user", "content": "1+1?"}], "n": 2}
    filled = fill('{prompt}|{response}|{n}|{"score": 1}|{}', row)
    assert filled == 'user: 1+1?|{prompt} {0}|2|{"score": 1}|{}'
    assert as_text([1, "é"]) == '[1, "é"]'
    with pytest.raises(UserError, match=r"names \{nope\}"):
        fill("{nope}", row)
    assert last_object_with("a", '{"a": 1} {"b": 2}') == 1


GOOD = {"url": "http://x/v1", "model": "m", "prompt": "{response}"}


@table(
    ("kind", "arguments", "problem"),
    [
        ("judge", {"url": "http://x/v1", "model": "m"}, "kind judge needs arguments.prompt;"),
        ("judge", {}, "needs arguments.url, arguments.model and arguments.prompt; see docs/"),
        ("judge", {**GOOD, "url": "http://me:secret@x"}, "user or password before the @"),
        ("judge", {**GOOD, "url": "x:80"}, "write http://HOST:PORT"),
        ("judge", {**GOOD, "prompt": "Is it good?"}, "has no {response}"),
        ("judge", {**GOOD, "pattern": "("}, "cannot be read"),
        ("judge", {**GOOD, "pattern": "[0-9]"}, "no group for the score"),
        ("judge", {**GOOD, "pattern": "(.)", "score_field": "a"}, "exclude each other"),
        ("judge", {**GOOD, "warmth": 1}, "kind judge has no arguments.warmth, only url, "),
        ("judge", {**GOOD, "key_variable": "sk-123 456"}, "arguments.key_variable"),
        ("http", {}, "reward: kind http needs arguments.url; see docs/rewards.md."),
    ],
)
def test_wrong_fields_of_a_judge_are_refused_before_training(tiny_config, kind, arguments, problem):
    with pytest.raises(UserError) as refusal:
        validate_config({**tiny_config, "reward": {"kind": kind, "arguments": arguments}})
    assert problem in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_a_run_is_repeated_from_its_record_with_the_judge_gone(serve, tiny_config, tmp_path):
    """A judge that never says the same twice, with a part that fails: bit for bit all the same."""

    def moody(body, number):
        return (401, {}) if number % 11 == 0 else (200, completion(f"Score: {number}"))

    server = serve(moody)
    arguments = {"url": server.url, "model": "m", "prompt": "{prompt} {response}", "retries": 0}
    config = {
        **tiny_config,
        "reward": {
            "max_failed_share": 0.9,
            "parts": [
                {"name": "says", "kind": "judge", "arguments": arguments},
                {"name": "short", "kind": "length", "weight": 0.1, "arguments": {"at_most": 4}},
            ],
        },
        "train": {"iterations": 2, "eval_every": 2},
    }
    tether.train(config)
    server.gone()
    server.gone = lambda: None
    record = tmp_path / "run" / "verdicts.jsonl"
    arguments["record"] = str(record)
    tether.train({**config, "run": {"dir": str(tmp_path / "again"), "name": "run"}})
    for name in ("metrics.jsonl", "evals.jsonl", "rollouts/000000.jsonl", "rollouts/000001.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    entries = read_jsonl(record)
    assert any("problem" in entry for entry in entries)
    assert len(read_jsonl(tmp_path / "again" / "verdicts.jsonl")) == len(entries)
    [row, *_] = read_jsonl(tmp_path / "run" / "rollouts" / "000001.jsonl")
    assert row["score_extras"]["says.verdict"].startswith("Score: ")
