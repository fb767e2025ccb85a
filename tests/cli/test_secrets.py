"""API keys and passwords: sent where they belong, never printed and never written down."""

import pytest
from rollout.completions import Server, adds

from tether.config.load import validate_config
from tether.errors import UserError
from tether.models.vocabulary import load_vocabulary_without_model


@pytest.fixture(scope="module")
def server():
    server = Server(adds(load_vocabulary_without_model("tether:starter")))
    yield server
    server.http.shutdown()
    server.http.server_close()


def asked(tether, server, key: str, monkeypatch) -> tuple[int, str]:
    monkeypatch.setenv("MY_KEY", key)
    code, out, err = tether(
        *("eval", "--endpoint", server.url, "--endpoint-model", "sums", "--endpoint-key", "MY_KEY"),
        *("--train.eval_prompts", "2"),
    )
    return code, out + err


def test_a_key_that_ends_in_a_newline_is_sent_without_it(server, tether, monkeypatch):
    code, said = asked(tether, server, "hunter2-abc\n", monkeypatch)
    assert code == 0, said
    assert {body["key"] for body in server.asked} == {"Bearer hunter2-abc"}


@pytest.mark.parametrize("key", ["hunter2\nabc", "hunter2 abc", "hunter2-é", "hunter2\x1b[1m"])
def test_a_key_that_no_header_can_carry_is_one_sentence_without_it(
    server, tether, monkeypatch, key
):
    code, said = asked(tether, server, key, monkeypatch)
    assert code == 2
    assert said.count("\n") == 1
    assert "key" in said
    assert "hunter2" not in said


ADDRESSES = {
    "rollout.tools.0": {
        "rollout": {
            "tools": [{"kind": "search", "url": "http://me:hunter2@host:1/retrieve"}],
            "max_observation_tokens": 64,
        }
    },
    "launch": {"launch": {"kind": "ray", "address": "ray://me:hunter2@head:10001"}},
}


@pytest.mark.parametrize("field", ADDRESSES)
def test_a_password_in_an_address_is_refused_by_field_and_not_shown(tiny_config, field):
    with pytest.raises(UserError, match=rf"^{field}: \w+ holds a user or password") as refusal:
        validate_config({**tiny_config, **ADDRESSES[field]})
    assert "hunter2" not in str(refusal.value)


def test_a_password_in_the_address_of_an_endpoint_is_refused_and_not_shown(tether):
    for url in ("http://me:hunter2@host:1", "ftp://me:hunter2@host:1", "me:hunter2@host"):
        code, out, err = tether("eval", "--endpoint", url, "--endpoint-model", "m")
        assert code == 2, url
        assert "--endpoint-key" in " ".join(err.split())
        assert "hunter2" not in out + err


def test_the_key_of_a_search_server_comes_from_the_environment(tiny_config, monkeypatch):
    from tether.rollout.tools.search import build_search

    tool = {"kind": "search", "url": "http://host:1/retrieve", "key_variable": "MY_KEY"}
    rollout = {"tools": [tool], "max_observation_tokens": 64}
    [settings] = validate_config({**tiny_config, "rollout": rollout}).rollout.tools
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match="key_variable names MY_KEY, which is not set"):
        build_search(settings)
    monkeypatch.setenv("MY_KEY", "hunter2\n")
    build_search(settings)
    assert "hunter2" not in repr(settings)


def test_an_export_leaves_the_secrets_of_rewards_out(tiny_config):
    from tether.train.export import shared_settings

    arguments = {"api_key": "hunter2", "MY_PASSWORD": "hunter2", "key": "answer", "max_tokens": 3}
    config = validate_config({**tiny_config, "reward": {"kind": "x.py:f", "arguments": arguments}})
    said = shared_settings(config)
    assert "hunter2" not in said
    assert "key: answer" in said
    assert "max_tokens: 3" in said
