"""Sample from a model behind an OpenAI-compatible server, which cannot be trained.

    POST URL/v1/completions {"model": …, "prompt": ids, "max_tokens": 64, "temperature": 1, …}
      -> {"choices": [{"text": "…", "finish_reason": "stop", "token_ids": […]}]}

Prompts are rendered here and sent as ids. A server that takes only text gets text, and text that
comes without ids is encoded by our tokenizer.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tether.errors import UserError
from tether.models.vocabulary import Vocabulary
from tether.rollout.engine import Completion, GenerationRequest
from tether.support.http import Answer, BadAnswer, JsonClient, NoAnswer, bearer, refuse_userinfo

MAX_PARALLEL_REQUESTS = 16
PAUSE_SECONDS = 0.5  # before the first retry
MAX_BYTES = 10_000_000  # of an answer
REQUEST_FORMS = ("ids, and ids back", "ids", "text")  # of a request, the best first


class OpenAIEngine:
    """Sample from the model that an OpenAI-compatible server calls `model`.

    `timeout_seconds` bounds one completion, with all its attempts.
    """

    def __init__(
        self,
        url: str,
        model: str,
        vocabulary: Vocabulary,
        *,
        key: str | None = None,
        timeout_seconds: float = 120.0,
        retries: int = 3,
    ) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.client = JsonClient(
            completions_url(url),
            timeout_seconds,
            retries,
            MAX_BYTES,
            PAUSE_SECONDS,
            {} if key is None else bearer(key, "the key of the endpoint"),
        )
        self.form = 0  # of REQUEST_FORMS: the first that this server has not refused

    @property
    def url(self) -> str:
        """The address that requests are sent to."""
        return self.client.url

    def load(self, weights: object) -> None:
        """Refuse weights: the server has its own."""
        if weights is not None:
            raise UserError(
                "An endpoint has weights of its own, which no update reaches; it can be evaluated "
                "(tether eval --endpoint URL), not trained."
            )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion per request, in order."""
        pool = ThreadPoolExecutor(MAX_PARALLEL_REQUESTS)
        try:
            first = list(pool.map(self._complete, requests[:1]))  # finds the form
            return first + list(pool.map(self._complete, requests[1:]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def rest(self) -> None:
        """Do nothing: the server is somebody else's."""

    def _complete(self, request: GenerationRequest) -> Completion:
        while True:
            answer = self._post(self._body(request))
            if answer.status == 200:
                return self._read(answer.content, request)
            if answer.status not in (400, 422) or self.form == len(REQUEST_FORMS) - 1:
                raise UserError(
                    f"{self.url} refuses with status {answer.status}: {_reason(answer.content)}"
                )
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

    def _post(self, body: dict[str, Any]) -> Answer:
        try:
            return self.client.post(body)
        except BadAnswer as error:
            raise UserError(f"{self.url} sent an answer that cannot be used: {error}.") from None
        except NoAnswer as error:
            raise UserError(
                f"{self.url} gave no answer within {self.client.timeout_seconds:g} s and "
                f"{self.client.retries + 1} attempts ({error}); is the server up, and the address "
                f"right?"
            ) from None

    def _read(self, content: bytes, request: GenerationRequest) -> Completion:
        """Return the ids that the server sampled, or those of its text by our tokenizer.

        Where the server says that the model stopped, an EOS is appended, as every response here
        ends with one; after a text that ended a turn it is ignored.
        """
        text, ids, stopped = parse_answer(content, self.url, len(self.vocabulary.tokenizer))
        if ids is None:
            ids = self.vocabulary.tokenizer(text, add_special_tokens=False).input_ids
        if stopped and (not ids or ids[-1] not in self.vocabulary.eos_ids):
            ids = [*ids[: request.max_tokens - 1], min(self.vocabulary.eos_ids)]
        ids = ids[: request.max_tokens]
        return Completion(ids, [0.0] * len(ids))  # nothing here needs a log-prob


def completions_url(url: str) -> str:
    """Return the address of a server's completions, from its own with or without /v1."""
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
    """Return text, ids if the server sends them, and whether the model ended by itself."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{url} answered with something that is not JSON.") from None
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    text = choice.get("text") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(text, str):
        raise UserError(
            f'{url} answered without one text in "choices"; is it an endpoint for completions?'
        )
    ids = choice.get("token_ids")
    if ids is not None and not (
        isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary_size for i in ids)
    ):
        raise UserError(
            f"{url} answered with ids that our tokenizer does not have; name the directory of the "
            f"model that it serves: tether eval MODEL --endpoint URL."
        )
    return text, ids, choice.get("finish_reason") == "stop"


def _reason(content: bytes) -> str:
    """Return what the server says is wrong, on one line."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    text = said if isinstance(said, str) else content.decode(errors="replace")
    return " ".join(text.split())[:200] or "it does not say why"
