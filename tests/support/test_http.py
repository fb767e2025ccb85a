"""One bounded exchange with a server that may do anything."""

import socket
import time

import pytest
from faults.hostile_retriever import drip_body, drip_headers, hang, says, serving

from tether.errors import UserError
from tether.support.http import BadAnswer, JsonClient, NoAnswer, bearer, refuse_userinfo


def client(url: str, seconds: float = 10.0, retries: int = 0, max_bytes: int = 100) -> JsonClient:
    return JsonClient(url, seconds, retries, max_bytes, pause_seconds=0.01)


def test_the_answer_comes_as_it_was_sent_with_any_status_below_500():
    for status in ("200 OK", "307 Temporary Redirect", "404 Not Found"):
        with serving(says(b"{}", status)) as server:
            answer = client(server.url).post({"a": "石"})
            assert (answer.status, answer.content) == (int(status[:3]), b"{}")
            assert server.requests == 1


@pytest.mark.parametrize("status", ["429 Too Many Requests", "500 Oops", "503 Busy"])
def test_a_status_that_may_pass_is_tried_again(status):
    with serving(says(b"", status)) as server:
        with pytest.raises(NoAnswer, match=f"its status is {status[:3]}"):
            client(server.url, retries=2).post({})
        assert server.requests == 3


@pytest.mark.parametrize("behave", [hang, drip_headers, drip_body])
def test_one_deadline_covers_every_attempt(behave):
    with serving(behave) as server:
        began = time.perf_counter()
        with pytest.raises(NoAnswer, match=r"^it took longer than 0\.5 s$"):
            client(server.url, 0.5, retries=5, max_bytes=10**6).post({})
        assert time.perf_counter() - began < 2


def test_a_larger_answer_is_refused_and_not_asked_for_again():
    with serving(says(b"x" * 101)) as server:
        with pytest.raises(BadAnswer, match="more than 100 bytes"):
            client(server.url, retries=3).post({})
        assert server.requests == 1


def test_nothing_listening_is_one_sentence():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(NoAnswer, match=r"^ConnectError: [^\n]*$"):
            client(f"http://127.0.0.1:{unused.getsockname()[1]}").post({})


def test_an_address_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ValueError, match="user or password before the @") as raised:
        client("http://me:hunter2@h/")
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ValueError, match="field holds"):
        refuse_userinfo("field", "me@h", "use a key")
    refuse_userinfo("field", "http://h/a@b", "use a key")


@pytest.mark.parametrize("key", ["", " \n", "q w", "q\x00w", "ключ"])
def test_a_key_that_a_header_cannot_carry_is_refused_without_showing_it(key):
    with pytest.raises(UserError, match="THE_KEY is empty, or holds") as raised:
        bearer(key, "THE_KEY")
    assert not key.strip() or key.strip() not in str(raised.value)
    assert bearer("k3y\n", "THE_KEY") == {"Authorization": "Bearer k3y"}
