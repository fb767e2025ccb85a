"""Rewards that ask a server: a judge, which is a model with a prompt, and a reward server.

A server is trusted with nothing: what it says is read as text or JSON, within a size and a time,
and anything but a finite number costs the row. All that was said is in the run's record.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.config.rollout import HttpArguments, JudgeArguments, ServerArguments
from tether.errors import UserError
from tether.rewards.functions import IN_BRACES, RewardPart, Row
from tether.rewards.record import Key, VerdictRecord, hash_of
from tether.rewards.scorers import (
    Batch,
    PartScorer,
    Verdict,
)
from tether.rewards.values import LONGEST_EXTRA, number, read_reward
from tether.support.background_loop import wait_for
from tether.support.http import (
    BadAnswer,
    JsonClient,
    NoAnswer,
    bearer,
    key_from_environment,
)

NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
SCORE = rf"(?i)score\W{{0,5}}?({NUMBER})"  # of a judge without a pattern: "**Score**: -7"
COMPLETIONS = "/chat/completions"


class ServerScorer(PartScorer):
    """What a judge and a reward server have in common: the record of what was said."""

    def __init__(self, part: RewardPart, settings: ServerArguments) -> None:
        self.parts = [part]
        self.settings = settings
        self.record = VerdictRecord(settings.record)
        self._failed: dict[Key, str] = {}

    def record_in(self, path: Path) -> None:
        self.record.keep_in(path)

    def accept(self) -> None:
        """Record what failed: the run goes on without those rows, and so must one that repeats it.
        A run that stops for them asks again when it is resumed."""
        for key, problem in self._failed.items():
            self.record.add(key, {"problem": problem})
        self._failed.clear()

    def verdicts(self, rows: Sequence[Row], batch: Batch) -> list[list[Verdict]]:
        self._failed.clear()
        asked = [self.request(row) for row in rows]
        keys: list[Key] = [
            (batch.iteration, row, hash_of(request))
            for row, request in zip(batch.numbers, asked, strict=True)
        ]
        new = [i for i, key in enumerate(keys) if self.record.find(key) is None]
        if new:
            wait_for(self.ask([keys[i] for i in new], [asked[i] for i in new]))
        return [[self._verdict(key)] for key in keys]

    def _verdict(self, key: Key) -> Verdict:
        said = self.record.find(key) or {"problem": self._failed.get(key, "it was not asked")}
        if "problem" in said:
            return Verdict(
                None, f"the {self.parts[0].kind} server gave no score: {said['problem']}"
            )
        return self.read(said["answer"])

    def client(self, url: str, seconds: float) -> JsonClient:
        """Return a client with the key, which is read here and written nowhere."""
        s = self.settings
        headers = {}
        # With a record there may be nothing to ask.
        if s.key_variable is not None and (s.record is None or s.key_variable in os.environ):
            key = key_from_environment(s.key_variable, "reward.arguments.key_variable")
            headers = bearer(key, s.key_variable)
        return JsonClient(url, seconds, s.retries, s.max_bytes, s.pause_seconds, headers)

    def fail(self, key: Key, error: Exception) -> None:
        """Note a request without an answer."""
        self._failed[key] = str(error)

    def request(self, row: Row) -> dict[str, Any]:
        """Return what the server is asked about a row."""
        raise NotImplementedError

    async def ask(self, keys: Sequence[Key], requests: Sequence[dict[str, Any]]) -> None:
        """Ask the server, and put each answer into the record, or into what failed."""
        raise NotImplementedError

    def read(self, answer: Any) -> Verdict:
        """Return the verdict of a recorded answer."""
        raise NotImplementedError


class JudgeScorer(ServerScorer):
    """A model behind an OpenAI-compatible server that is asked for a score of each row.

    POST URL/chat/completions {"model", "messages", "temperature", "max_tokens"}
      -> {"choices": [{"message": {"content": "… Score: 7"}}]}
    """

    settings: JudgeArguments

    def __init__(self, part: RewardPart, timeout_seconds: float, concurrency: int) -> None:
        super().__init__(part, JudgeArguments.model_validate(dict(part.arguments)))
        url = self.settings.url.rstrip("/")
        url = url if url.endswith(COMPLETIONS) else f"{url}{COMPLETIONS}"
        self.http = self.client(url, timeout_seconds)
        self.concurrency = concurrency
        self._next_request = 0.0

    def request(self, row: Row) -> dict[str, Any]:
        s = self.settings
        system = [] if s.system is None else [{"role": "system", "content": fill(s.system, row)}]
        return {
            "model": s.model,
            "messages": [*system, {"role": "user", "content": fill(s.prompt, row)}],
            "temperature": s.temperature,
            "max_tokens": s.max_tokens,
        }

    async def ask(self, keys: Sequence[Key], requests: Sequence[dict[str, Any]]) -> None:
        limit = asyncio.Semaphore(self.concurrency)

        async def one(key: Key, request: dict[str, Any]) -> None:
            async with limit:
                try:
                    answer = await self.http.post_async(request, connections, self._wait)
                    if answer.status != 200:
                        raise BadAnswer(f"its status is {answer.status}")
                    said = content_of(answer.content)
                except (NoAnswer, BadAnswer) as error:
                    return self.fail(key, error)
            self.record.add(key, {"answer": said})

        async with self.http.connections(self.concurrency) as connections:
            await asyncio.gather(*map(one, keys, requests))

    async def _wait(self) -> None:
        """Wait for the next request that the rate limit allows."""
        if self.settings.requests_per_minute is None:
            return
        now = time.monotonic()
        mine = max(now, self._next_request)
        self._next_request = mine + 60 / self.settings.requests_per_minute
        await asyncio.sleep(mine - now)

    def read(self, answer: Any) -> Verdict:
        extras = {"verdict": _shortened(str(answer))}
        try:
            return Verdict(self._score(str(answer)), extras=extras)
        except (ValueError, TypeError) as error:
            return Verdict(None, str(error), extras=extras)

    def _score(self, text: str) -> float:
        s = self.settings
        if s.score_field is None:
            matches = list(re.finditer(s.pattern or SCORE, text))
            found = matches[-1].group(1) if matches else None
            what = "nothing that its pattern matches"
        else:
            found = last_object_with(s.score_field, text)
            what = f"no JSON object with {s.score_field!r}"
        if found is None:
            raise ValueError(f"the judge's answer has {what}")
        try:
            score = float(found) if isinstance(found, str) else number(found)
        except (ValueError, TypeError):
            raise ValueError(f"the judge's score is {_shortened(repr(found), 100)}") from None
        low = -float("inf") if s.lowest is None else s.lowest
        high = float("inf") if s.highest is None else s.highest
        if not low <= score <= high or not abs(score) <= 1e15:
            raise ValueError(f"the judge's score is {score:g}, not within {low:g} and {high:g}")
        return score


class HttpScorer(ServerScorer):
    """A reward server, asked once for all rows of an iteration.

    POST URL {"rows": [{"prompt", "response", "finished", …, and the row's columns}, …]}
      -> {"rewards": [0.5, null, {"turns": [0, 1]}, {"score": 1, "why": "…"}, …]}
    """

    settings: HttpArguments

    def __init__(self, part: RewardPart) -> None:
        super().__init__(part, HttpArguments.model_validate(dict(part.arguments)))
        self.http = self.client(self.settings.url, self.settings.timeout_seconds)

    def request(self, row: Row) -> dict[str, Any]:
        return dict(row)

    async def ask(self, keys: Sequence[Key], requests: Sequence[dict[str, Any]]) -> None:
        try:
            async with self.http.connections() as connections:
                answer = await self.http.post_async({"rows": list(requests)}, connections)
            if answer.status != 200:
                raise BadAnswer(f"its status is {answer.status}")
            rewards = _json(answer.content).get("rewards")
            if not isinstance(rewards, list):
                raise BadAnswer('it has no list "rewards"')
            if len(rewards) != len(requests):
                raise BadAnswer(f"it has {len(rewards)} rewards for {len(requests)} rows")
        except (NoAnswer, BadAnswer) as error:
            for key in keys:
                self.fail(key, error)
            return
        for key, reward in zip(keys, rewards, strict=True):
            self.record.add(key, {"answer": reward})

    def read(self, answer: Any) -> Verdict:
        try:
            return Verdict.of(read_reward(answer))
        except (ValueError, TypeError) as error:
            return Verdict(None, str(error))


def fill(template: str, row: Row) -> str:
    """Return a prompt with the names in braces replaced by the row's. Other braces stay."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in row:
            raise UserError(f"The judge's prompt names {{{name}}}, which a row does not have.")
        return as_text(row[name])

    return IN_BRACES.sub(value, template)


def as_text(value: Any) -> str:
    """Return a column as text; messages with a line for the role of each."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return "\n\n".join(f"{item['role']}: {item['content']}" for item in value)
    return json.dumps(value, ensure_ascii=False)


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("content"), str) and "role" in item


def content_of(content: bytes) -> str:
    """Return the text of a chat completion. Any other shape raises `BadAnswer`."""
    try:
        said = _json(content)["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise BadAnswer("it is not a chat completion") from None
    if not isinstance(said, str):
        raise BadAnswer("its message has no text")
    return said


def _json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadAnswer("it is not UTF-8") from None
    except (ValueError, RecursionError):
        raise BadAnswer("it is not JSON") from None
    if not isinstance(found, dict):
        raise BadAnswer("it is not a JSON object")
    return found


def last_object_with(field: str, text: str) -> Any:
    """Return a field of the last JSON object in a text that has it; None if there is none."""
    decoder, found, start = json.JSONDecoder(), None, text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            if isinstance(value, dict) and field in value:
                found = value[field]
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _shortened(text: str, most: int = LONGEST_EXTRA) -> str:
    return text if len(text) <= most else f"{text[:most]} …"
