"""A model behind a server: what is asked of it, and what is made of whatever it says."""

import threading

import pytest
from helpers import response, table

from rollout.completions import Server, adds, choice
from tether import api, assets
from tether.errors import UserError
from tether.models.vocabulary import load_vocabulary_without_model
from tether.rollout import openai
from tether.rollout.engine import EngineSampler
from tether.rollout.openai import OpenAIEngine, completions_url
from tether.rollout.sampler import Draw, Greedy, SingleTurn


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(openai, "PAUSE_SECONDS", 0.0)
    servers = []

    def serve(answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield serve
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture(scope="module")
def vocabulary():
    return load_vocabulary_without_model("tether:starter")


def ask(server: Server, vocabulary, prompts=("3+4=",), limit=16, choice=None, **options):
    engine = OpenAIEngine(server.url, "m", vocabulary, **options)
    rows = [SingleTurn(vocabulary.tokenizer(p).input_ids) for p in prompts]
    return EngineSampler(engine, vocabulary.eos_ids, limit, 0.8).run(rows, choice or Greedy())


def ids_of(vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer(text, add_special_tokens=False).input_ids


def test_ids_go_out_and_come_back(serve, vocabulary):
    eos = min(vocabulary.eos_ids)
    server = serve(lambda body: (200, choice("ignored", token_ids=[*body["prompt"][:2], eos])))
    rollout = ask(server, vocabulary, ["3+4=", "5+6="], choice=Draw(3, "evaluate", 0))
    prompts = [ids_of(vocabulary, text) for text in ("3+4=", "5+6=")]
    assert [response(rollout, row) for row in (0, 1)] == [[*ids[:2], eos] for ids in prompts]
    assert rollout.finish_reasons == ("eos", "eos")
    first = server.asked[0]
    assert (first["path"], first["model"], first["key"]) == ("/v1/completions", "m", None)
    assert (first["prompt"], first["max_tokens"], first["temperature"]) == (prompts[0], 16, 0.8)
    assert first["seed"] != server.asked[1]["seed"]
    assert first["stop_token_ids"] == sorted(vocabulary.eos_ids)


def test_a_server_that_knows_only_the_protocol_gets_only_that(serve, vocabulary):
    protocol = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}

    def answer(body):
        odd = body.keys() - protocol
        return (400, {"error": {"message": f"unknown {odd}"}}) if odd else (200, choice("7"))

    server = serve(answer)
    rollout = ask(server, vocabulary, ["3+4="] * 3)
    assert response(rollout, 0) == [*ids_of(vocabulary, "7"), min(vocabulary.eos_ids)]
    assert [len(body.keys() - protocol) > 2 for body in server.asked] == [True] + [False] * 3
    assert "seed" not in server.asked[-1]  # greedy


def test_a_server_that_takes_only_text_gets_text(serve, vocabulary):
    def answer(body):
        return (200, choice("7")) if isinstance(body["prompt"], str) else (422, {"detail": "text"})

    server = serve(answer)
    rollout = ask(server, vocabulary, ["3+4="] * 2)
    assert server.asked[-1]["prompt"] == "3+4="
    assert len(server.asked) == 4  # both other forms were tried once
    assert vocabulary.decode(response(rollout, 1)) == "7"


def test_a_truncated_answer_is_truncated_and_not_asked_for_again(serve, vocabulary):
    server = serve(lambda body: (200, choice("12", finish="length")))
    rollout = ask(server, vocabulary, limit=9)
    assert rollout.finish_reasons == ("length",)
    assert response(rollout, 0) == ids_of(vocabulary, "12")
    assert len(server.asked) == 1


def test_a_longer_answer_than_was_asked_for_is_cut(serve, vocabulary):
    server = serve(lambda body: (200, choice("123456789")))
    rollout = ask(server, vocabulary, limit=4)
    assert rollout.response_lengths.tolist() == [4]


def test_what_may_pass_is_waited_out(serve, vocabulary):
    statuses = [503, 429, 500]
    server = serve(lambda body: (statuses.pop(), {}) if statuses else (200, choice("7")))
    assert ask(server, vocabulary).finish_reasons == ("eos",)
    assert len(server.asked) == 4


@table(
    ("said", "sentence"),
    [
        ((404, {"error": {"message": "no model\n called m"}}), "status 404: no model called m"),
        ((401, b"keys!"), "refuses with status 401: keys!"),
        ((400, {"error": "too long"}), "status 400: too long"),
        ((307, b""), "refuses with status 307: it does not say why"),
        ((500, {}), r"no answer within 120 s and 4 attempts \(its status is 500\)"),
        ((200, b"<html>"), "is not JSON"),
        ((200, b"[" * 100_000), "is not JSON"),
        ((200, []), 'without one text in "choices"'),
        ((200, {"choices": []}), 'without one text in "choices"'),
        ((200, {"choices": [{"message": {"content": "7"}}]}), 'without one text in "choices"'),
        ((200, choice("7", token_ids=[10**6])), "ids that our tokenizer does not have"),
        ((200, choice("7", token_ids=["7"])), "ids that our tokenizer does not have"),
        ((200, b" " * 10_000_001), "more than 10,000,000 bytes"),
    ],
)
def test_a_server_that_is_wrong_is_one_sentence(serve, vocabulary, said, sentence):
    server = serve(lambda body: said)
    with pytest.raises(UserError, match=sentence) as raised:
        ask(server, vocabulary)
    assert "\n" not in str(raised.value)


def test_nobody_there_and_nobody_in_time_are_one_sentence(serve, vocabulary):
    server = serve(lambda body: threading.Event().wait(1) or (200, choice("7")))
    with pytest.raises(UserError, match=r"attempts \(it took longer than 0.05 s\)"):
        ask(server, vocabulary, timeout_seconds=0.05, retries=1)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(UserError, match=r"attempts \(ConnectError"):
        ask(server, vocabulary)


@table("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/completions"])
def test_an_address_may_be_written_short_or_long(url):
    assert completions_url(url) == "http://h:1/v1/completions"


def test_an_address_needs_its_scheme(vocabulary):
    with pytest.raises(UserError, match="write http://HOST:PORT"):
        OpenAIEngine("localhost:8000", "m", vocabulary)


def test_it_cannot_be_trained(serve, vocabulary, tiny_model):
    engine = OpenAIEngine("http://h:1", "m", vocabulary)
    sampler = EngineSampler(engine, vocabulary.eos_ids, 8, 1.0)
    with pytest.raises(UserError, match="can be evaluated"):
        sampler.sync(tiny_model, 0)


def test_the_vocabulary_alone_is_the_one_that_comes_with_the_model(tmp_path):
    import torch

    from tether.models.loading import load_causal_lm
    from tether.models.vocabulary import load_vocabulary

    for name in ("tether:starter", "tether:search_starter"):
        model = load_causal_lm(name, "float32", torch.device("cpu"))
        assert load_vocabulary_without_model(name).eos_ids == load_vocabulary(name, model).eos_ids
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in assets.resolve("tether:starter").iterdir():
        if file.name not in ("generation_config.json", "model.safetensors"):
            (bare / file.name).write_bytes(file.read_bytes())
    assert load_vocabulary_without_model(str(bare)).eos_ids == frozenset({1})


def test_python_may_ask_as_well(serve, vocabulary):
    server = serve(adds(vocabulary))
    fields = {"train.eval_prompts": 5, "reward.kind": "number_match"}
    found = api.evaluate_endpoint(server.url, "m", overrides=fields)
    assert found.greedy.mean == 1.0
    assert found.kl is None
