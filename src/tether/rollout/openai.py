"""A model behind an OpenAI-compatible server, as an engine: it samples, and cannot be trained.

    POST URL/v1/completions {"model": …, "prompt": ids, "max_tokens": 64, "temperature": 1, …}
      -> {"choices": [{"text": "…", "finish_reason": "stop", "token_ids": […]}]}

Prompts are rendered here and sent as ids. A server that takes only text gets text, and one that
returns only text has it read by our tokenizer.
"""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tether.config import refuse_userinfo
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary
from tether.rollout.engine import Completion, GenerationRequest
from tether.rollout.tools.search_client import bearer

MAX_PARALLEL_REQUESTS = 16  # requests under way
PAUSE_SECONDS = 0.5  # before the first retry; twice as long before each further one
MAX_BYTES = 10_000_000  # of an answer
REQUEST_FORMS = ("ids, and ids back", "ids", "text")  # of a request, the best first


class OpenAIEngine:
    def __init__(
        self,
        url: str,
        model: str,
        vocabulary: Vocabulary,
        key: str | None = None,
        timeout_seconds: float = 120.0,
        retries: int = 3,
    ) -> None:
        self.url, self.model, self.vocabulary = completions_url(url), model, vocabulary
        self.headers = {} if key is None else bearer(key, "the key of the endpoint")
        self.timeout_seconds, self.retries = timeout_seconds, retries
        self.form = 0  # of FORMS: the first that this server has not refused

    def load(self, weights: object) -> None:
        if weights is not None:
            raise UserError(
                "An endpoint has weights of its own, which no update reaches; it can be evaluated "
                "(tether eval --endpoint URL), not trained."
            )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        # Neither proxies nor passwords from the environment, and no redirect: only this address.
        client = httpx.Client(
            trust_env=False,
            follow_redirects=False,
            timeout=self.timeout_seconds,
            headers=self.headers,
        )
        with client:
            first = [self._complete(client, request) for request in requests[:1]]  # finds the form
            pool = ThreadPoolExecutor(MAX_PARALLEL_REQUESTS)
            try:
                rest = list(pool.map(lambda one: self._complete(client, one), requests[1:]))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return first + rest

    def _complete(self, client: httpx.Client, request: GenerationRequest) -> Completion:
        while True:
            status, content = self._post(client, self._body(request))
            if status == 200:
                return self._read(content, request)
            if status not in (400, 422) or self.form == len(REQUEST_FORMS) - 1:
                raise UserError(f"{self.url} refuses with status {status}: {_reason(content)}")
            self.form += 1

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        form = REQUEST_FORMS[self.form]
        tokenizer = self.vocabulary.tokenizer
        text = tokenizer.decode(request.ids, skip_special_tokens=False)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": text if form == "text" else request.ids,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": 1,
        }
        if request.temperature > 0:
            body["seed"] = request.seed
        if form == "ids, and ids back":  # what vLLM understands beyond the protocol
            stops = sorted(self.vocabulary.eos_ids)
            body |= {"return_token_ids": True, "stop_token_ids": stops, "top_k": -1}
            if request.stop:
                body |= {"stop": list(request.stop), "include_stop_str_in_output": True}
        return body

    def _post(self, client: httpx.Client, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of an answer; what may pass is waited out."""
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt > 0:
                time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
            try:
                with client.stream("POST", self.url, json=body) as said:
                    if said.status_code != 429 and said.status_code < 500:
                        return said.status_code, _limited(said, self.url)
                    failure = f"its status is {said.status_code}"
            except httpx.TimeoutException:
                failure = f"it took longer than {self.timeout_seconds:g} s"
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{self.url} gave no answer in {self.retries + 1} attempts ({failure}); is the server "
            f"up, and the address right?"
        )

    def _read(self, content: bytes, request: GenerationRequest) -> Completion:
        """Ids as the server sampled them, or as our tokenizer reads its text. Where it says that
        the model stopped, an EOS stands at the end, as in every response of ours; after a text
        that ended a turn nobody reads it."""
        text, ids, stopped = parse_answer(content, self.url, len(self.vocabulary.tokenizer))
        if ids is None:
            ids = self.vocabulary.tokenizer(text, add_special_tokens=False).input_ids
        if stopped and (not ids or ids[-1] not in self.vocabulary.eos_ids):
            ids = [*ids[: request.max_tokens - 1], min(self.vocabulary.eos_ids)]
        ids = ids[: request.max_tokens]
        return Completion(ids, [0.0] * len(ids))  # nothing here needs a log-prob


def completions_url(url: str) -> str:
    """From the address of a server, with or without /v1, to that of its completions."""
    try:
        refuse_userinfo("--endpoint", url, "name the variable with the key by --endpoint-key")
    except ValueError as error:
        raise UserError(f"{error}.") from None
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--endpoint is {url!r}; write http://HOST:PORT.")
    url = url.rstrip("/").removesuffix("/completions")
    return f"{url.removesuffix('/v1')}/v1/completions"


def parse_answer(
    content: bytes, url: str, vocabulary_size: int
) -> tuple[str, list[int] | None, bool]:
    """Text, ids if the server gives them, and whether the model ended by itself."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{url} answered with something that is not JSON.") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    text = choice.get("text") if isinstance(choice, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f'{url} answered without one text in "choices"; is it an endpoint for completions?'
        )
    ids = choice.get("token_ids")
    if ids is not None and not (
        isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary_size for i in ids)
    ):
        raise UserError(
            f"{url} answered with ids that our tokenizer has not; name the directory of the "
            f"model that it serves: tether eval MODEL --endpoint URL."
        )
    return text, ids, choice.get("finish_reason") == "stop"


def _limited(said: httpx.Response, url: str) -> bytes:
    content = bytearray()
    for chunk in said.iter_bytes():
        content += chunk
        if len(content) > MAX_BYTES:
            raise UserError(f"{url} answered with more than {MAX_BYTES:,} bytes.")
    return bytes(content)


def _reason(content: bytes) -> str:
    """What the server says is wrong, on one line."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    text = said if isinstance(said, str) else content.decode(errors="replace")
    return " ".join(text.split())[:200] or "it does not say why"
