"""The sections of sampling and scoring: rollout with its tools, reward."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from tether.config.base import OWN_CODE, OwnCode, Section, Share
from tether.support.http import refuse_userinfo

WITH_TOOLS = 384  # default of rollout.max_response_tokens where observations count as well


class ToolSection(Section):
    """What every tool has."""

    timeout_seconds: PositiveFloat = 10.0
    """time one call may take before it counts as failed"""


class SearchTool(ToolSection):
    """`<search>query</search>`: documents of a local corpus, or of a server."""

    kind: Literal["search"]
    """retrieval"""
    corpus: str | None = None
    """JSON lines of {"id": …, "contents": "title\\ntext"}, searched by BM25 in this process"""
    url: str | None = None
    """a server of Search-R1's protocol instead: http://HOST:PORT/retrieve"""
    key_variable: Annotated[str, Field(pattern=r"^\w+$")] | None = None
    """the environment variable that holds the server's API key, sent as a bearer token"""
    topk: PositiveInt = 3
    """documents returned per query"""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """what to do with a malformed corpus line: stop before training, or skip it and report it"""
    retries: NonNegativeInt = 2
    """times a failed request to the server is repeated, within timeout_seconds for all of them"""
    max_bytes: PositiveInt = 1_000_000
    """a larger response of the server is refused"""

    @model_validator(mode="after")
    def _one_source(self) -> SearchTool:
        if (self.corpus is None) == (self.url is None):
            raise ValueError("search needs either a corpus or a url, and not both")
        if self.url is not None:
            refuse_userinfo("url", self.url, "name the variable with the key by key_variable")
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url is {self.url!r}; write http://HOST:PORT/retrieve")
        if self.key_variable is not None and self.url is None:
            raise ValueError("key_variable goes with a url; a corpus needs no key")
        return self


class CalculatorTool(ToolSection):
    """`<calculate>1 + 2 * 3</calculate>`: exact arithmetic."""

    kind: Literal["calculator"]
    """arithmetic"""


class McpTool(ToolSection):
    """The tools of an MCP server, each `<its_name>{"argument": …}</its_name>`."""

    kind: Literal["mcp"]
    """a server of the Model Context Protocol"""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """a program and its arguments, which is started and spoken to over stdio"""
    url: str | None = None
    """a server over HTTP instead: http://HOST:PORT/mcp"""
    only: Annotated[list[str], Field(min_length=1)] | None = None
    """names of the tools that the policy may call; default: all of them"""
    variables: list[str] = []
    """environment variables that the program gets beside PATH, HOME and the like"""
    key_variable: Annotated[str, Field(pattern=r"^\w+$")] | None = None
    """the environment variable that holds the server's API key, sent as a bearer token"""
    connect_seconds: PositiveFloat = 30.0
    """time that starting or reaching the server may take"""

    @model_validator(mode="after")
    def _one_server(self) -> McpTool:
        if (self.command is None) == (self.url is None):
            raise ValueError("mcp needs either a command or a url, and not both")
        if self.url is not None:
            refuse_userinfo("url", self.url, "name the variable with the key by key_variable")
            if not self.url.startswith(("http://", "https://")):
                raise ValueError(f"url is {self.url!r}; write http://HOST:PORT/mcp")
        if self.key_variable is not None and self.url is None:
            raise ValueError("key_variable goes with a url; a program gets its key by variables")
        return self


class OwnTool(ToolSection):
    """A function of the user, or an object with a name, a pattern and a call."""

    kind: OwnCode
    """path/file.py:function or package.module:function"""


def _tool_kind(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in TOOL_TAGS else "own"


TOOL_TAGS = ("search", "calculator", "mcp", "own")
AnyTool = Annotated[
    Annotated[SearchTool, Tag("search")]
    | Annotated[CalculatorTool, Tag("calculator")]
    | Annotated[McpTool, Tag("mcp")]
    | Annotated[OwnTool, Tag("own")],
    Discriminator(_tool_kind),
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]


TRL = "trl"
ENVIRONMENT_KINDS = ("textarena", "openenv", TRL)


class EnvironmentSection(Section):
    """What answers the turns of the policy, and may reward them."""

    kind: str
    """path/file.py:make or package.module:make, `textarena`, `openenv` or `trl`"""
    arguments: dict[str, Any] = {}
    """what it is made with, by name"""
    timeout_seconds: PositiveFloat = 10.0
    """time that making and resetting one, or a step, may take before it counts as failed"""

    @property
    def code(self) -> list[str]:
        """Return the names of the user's code that it runs."""
        if self.kind != TRL:
            return [self.kind]
        several = self.arguments.get("classes")
        named = several.values() if isinstance(several, dict) else [self.arguments.get("class")]
        return [kind for kind in named if isinstance(kind, str)]

    @model_validator(mode="after")
    def _known_kind(self) -> EnvironmentSection:
        if self.kind not in ENVIRONMENT_KINDS and not re.match(OWN_CODE, self.kind):
            raise ValueError(
                f"kind is {self.kind!r}; write path/file.py:make, package.module:make or one of "
                f"{', '.join(ENVIRONMENT_KINDS)}"
            )
        return self


AnyEnvironment = Annotated[
    EnvironmentSection,
    BeforeValidator(lambda value: {"kind": value} if isinstance(value, str) else value),
]


class VllmSection(Section):
    """Settings of vLLM, used with rollout.sampler vllm."""

    colocated: bool = False
    """run it inside the training process; false: in a process of its own"""
    cache_gigabytes: PositiveFloat = 1.0
    """memory for its key-value cache; rows that do not fit wait"""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """share of a GPU that must be free when it starts; weights and cache may then take more"""
    eager: bool = True
    """false: CUDA graphs, which decode faster and take memory and a minute at the start"""
    tensor_parallel: PositiveInt = 1
    """GPUs that share its copy of the model; needs a single training process"""
    sleep: bool = False
    """on a GPU: give its memory to the updates between two samplings"""

    @model_validator(mode="after")
    def _parallel_is_apart(self) -> VllmSection:
        if self.colocated and self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} starts processes of vLLM's own, so it "
                f"does not go with colocated; leave one out"
            )
        return self


class CorrectionSection(Section):
    """Rollout correction: importance weights of the loss where sampler and trainer differ."""

    kind: Literal["none", "token", "sequence"] = "token"
    """the trainer's probability over the sampler's: of each token, or of the row as a whole"""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """the largest weight"""


class DynamicSamplingSection(Section):
    """DAPO's dynamic sampling: further prompts in place of groups whose scores are all equal."""

    max_rounds: Annotated[int, Field(ge=2)] = 10
    """rounds of sampling per iteration; if none gives a group with a spread, the run stops"""
    round_prompts: PositiveInt | None = None
    """prompts of each round; default: rollout.prompts"""


class RolloutSection(Section):
    """How responses are sampled."""

    prompts: PositiveInt = 64
    """prompts per iteration"""
    samples_per_prompt: PositiveInt = 4
    """responses sampled for each prompt"""
    dynamic_sampling: DynamicSamplingSection | None = None
    """sample further prompts in place of groups whose scores are all equal; null = do not"""
    max_response_tokens: PositiveInt = 128
    """a response that has not ended by then is truncated; with tools the default is 384"""
    temperature: PositiveFloat = 1.0
    """divides the logits, both in sampling and in every log-prob"""
    sampler: Literal["local", "vllm"] = "local"
    """what samples: the training process with its own weights, or vLLM with a copy of them"""
    cache_tokens: PositiveInt = 16_384
    """tokens that the local sampler's key-value cache holds; rows that do not fit wait"""
    vllm: VllmSection = VllmSection()
    """settings of vLLM"""
    lag: Annotated[int, Field(ge=0, le=64)] = 0
    """k: iteration i trains on rows sampled with the weights after max(0, i - k) iterations"""
    chunk_tokens: PositiveInt | None = None
    """rows are sampled in chunks of so many tokens; null: all together, or 4096 with samplers"""
    sampler_threads: PositiveInt | None = None
    """CPU threads of each of launch.samplers; the same number gives the same bits; null: threads"""
    correction: CorrectionSection | None = None
    """importance weights; default: token, cap 2, for lag, vllm and bfloat16 compute, else none"""
    reuse_log_probs: bool = False
    """use the sampler's log-probs as the old ones and save a pass; ratios start at 1 ± 1e-4"""
    tools: list[AnyTool] = []
    """what the policy may call: `calculator`, {kind: search | mcp, …}, path/file.py:name"""
    tool_calls: Literal["tags", "json"] = "tags"
    """how tools are called: by tags of their own, or by JSON in the chat template's form"""
    environment: AnyEnvironment | None = None
    """path/file.py:make of an object with `reset` and `step`, or {kind, arguments}"""
    max_turns: PositiveInt = 4
    """times the policy may write in an episode; a call that ends its last turn is not made"""
    max_observation_tokens: PositiveInt = 128
    """output of a tool or environment is cut to this many tokens, with a mark"""
    max_failed_share: Share = 0.5
    """stop the run when more than this share of an iteration's calls failed; 1 = never"""
    state_masking: bool = True
    """keep observations out of the loss; false is an ablation that trains on them as well"""

    @property
    def is_multi_turn(self) -> bool:
        return bool(self.tools) or self.environment is not None

    @model_validator(mode="before")
    @classmethod
    def _room_for_observations(cls, given: Any) -> Any:
        """Raise the default length with tools, whose output counts as part of a response."""
        if not isinstance(given, dict) or "max_response_tokens" in given:
            return given
        talks = given.get("tools") or given.get("environment") is not None
        return {**given, "max_response_tokens": WITH_TOOLS} if talks else given

    @model_validator(mode="after")
    def _groups_can_differ(self) -> RolloutSection:
        if self.dynamic_sampling is not None and self.samples_per_prompt < 2:
            raise ValueError(
                "dynamic_sampling compares the responses to one prompt, so samples_per_prompt must "
                "be 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _sampler_fits(self) -> RolloutSection:
        if self.sampler == "vllm" and self.temperature < 0.01:
            raise ValueError(
                f"temperature is {self.temperature:g}, but vLLM samples at no less than 0.01; "
                f"raise it"
            )
        return self

    @model_validator(mode="after")
    def _turns_fit(self) -> RolloutSection:
        is_trl = self.environment is not None and self.environment.kind == TRL
        if self.tools and self.environment is not None and not is_trl:
            raise ValueError("tools and environment exclude each other; let `step` call the tools")
        if self.tool_calls == "json" and not self.tools and not is_trl:
            raise ValueError("tool_calls: json needs tools, or an environment of kind trl")
        if self.is_multi_turn and self.max_observation_tokens >= self.max_response_tokens:
            raise ValueError(
                f"max_response_tokens is {self.max_response_tokens} and counts observations too, "
                f"so it must be more than max_observation_tokens = {self.max_observation_tokens}"
            )
        if not self.is_multi_turn and not self.state_masking:
            raise ValueError("state_masking: false needs tools or an environment; leave it out")
        return self


class ServerArguments(Section):
    """What rewards that ask a server have in common."""

    url: str
    """the server's address, http:// or https://"""
    key_variable: Annotated[str, Field(pattern=r"^\w+$")] | None = None
    """the environment variable that holds the server's API key, sent as a bearer token"""
    retries: NonNegativeInt = 4
    """times a request that failed is repeated, within the time limit for all attempts"""
    pause_seconds: PositiveFloat = 0.5
    """wait before the first repetition, twice as long before each further one"""
    max_bytes: PositiveInt = 1_000_000
    """a larger answer is refused"""
    record: str | None = None
    """verdicts of an earlier run to take from where they fit: RUN/verdicts.jsonl"""

    @model_validator(mode="after")
    def _address(self) -> ServerArguments:
        refuse_userinfo("url", self.url, "name the variable with the key by key_variable")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; write http://HOST:PORT/…")
        return self


class HttpArguments(ServerArguments):
    """`reward.arguments` of kind http: a reward server."""

    timeout_seconds: PositiveFloat = 60.0
    """time that the one request for all rows of an iteration may take, with all attempts"""


class JudgeArguments(ServerArguments):
    """`reward.arguments` of kind judge: a model behind an OpenAI-compatible server."""

    model: str
    """its name at the server"""
    prompt: str
    """what it is asked; {prompt}, {response} and any column in braces are filled in"""
    system: str | None = None
    """a system message before it"""
    pattern: str | None = None
    """regular expression; the score is its first group where it matches last in the answer"""
    score_field: str | None = None
    """take the score from this field of the last JSON object in the answer instead"""
    lowest: float | None = None
    """an answer below is not a score"""
    highest: float | None = None
    """an answer above is not a score"""
    temperature: NonNegativeFloat = 0.0
    """of the judge's sampling"""
    max_tokens: PositiveInt = 512
    """of the judge's answer"""
    requests_per_minute: PositiveFloat | None = None
    """rate limit of each training process; default: none"""

    @model_validator(mode="after")
    def _readable(self) -> JudgeArguments:
        if self.pattern is not None and self.score_field is not None:
            raise ValueError("pattern and score_field exclude each other; write one of them")
        try:
            groups = re.compile(self.pattern or "()").groups
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} cannot be read: {error}") from None
        if groups < 1:
            raise ValueError(
                f"pattern {self.pattern!r} has no group for the score; write (…) around it"
            )
        if "{response}" not in self.prompt and "{policy_turns}" not in self.prompt:
            raise ValueError("prompt has no {response}, so the judge would not see it")
        return self


SERVERS: dict[str, type[ServerArguments]] = {"judge": JudgeArguments, "http": HttpArguments}


def _check_arguments(kind: str | None, arguments: dict[str, Any]) -> None:
    """Refuse arguments that do not fit a judge or a reward server."""
    if kind not in SERVERS:
        return
    try:
        SERVERS[kind].model_validate(arguments)
    except ValidationError as error:
        errors = error.errors()
        needed = [f"arguments.{e['loc'][0]}" for e in errors if e["type"] == "missing"]
        if needed:
            *others, last = needed
            needed = f"{', '.join(others)} and {last}" if others else last
            raise ValueError(f"kind {kind} needs {needed}; see docs/rewards.md") from None
        [first, *_] = errors
        field = ".".join(map(str, ("arguments", *first["loc"])))
        if first["type"] == "extra_forbidden":
            known = ", ".join(SERVERS[kind].model_fields)
            raise ValueError(f"kind {kind} has no {field}, only {known}") from None
        raise ValueError(f"{field}: {first['msg'].removeprefix('Value error, ')}") from None


class RewardPart(Section):
    """One of several rewards that are summed."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """its name in metrics and rollouts"""
    kind: str
    """a rule that ships, `path/file.py:function`, `judge`, `http` or `environment`"""
    weight: float = 1.0
    """factor of its value in the score"""
    arguments: dict[str, Any] = {}
    """constants for the function, by the names of its parameters; or the fields of a judge"""

    @model_validator(mode="after")
    def _arguments_fit(self) -> RewardPart:
        _check_arguments(self.kind, self.arguments)
        return self


RewardParts = Annotated[list[RewardPart], Field(min_length=1)]


class OverlongSection(Section):
    """DAPO's overlong shaping: a penalty that grows over the last tokens a response may have."""

    buffer_tokens: PositiveInt
    """tokens before max_tokens over which the penalty grows from 0"""
    max_tokens: PositiveInt | None = None
    """length from which the penalty is whole; default: rollout.max_response_tokens"""
    penalty: PositiveFloat = 1.0
    """what a response of that length loses"""


class RewardSection(Section):
    """What turns a response into a score: one reward by `kind`, or several by `parts`."""

    kind: str | None = None
    """a rule, `path/file.py:function`, `model:PATH`, `judge`, `http` or `environment`"""
    arguments: dict[str, Any] = {}
    """constants for the function, by the names of its parameters; or the fields of a judge"""
    parts: RewardParts | None = None
    """rewards that are summed: a list of {name, kind, weight, arguments}"""
    overlong: OverlongSection | None = None
    """a penalty on long responses, added to training scores only; null = none"""
    workers: PositiveInt = 1
    """child processes per training process that run the function, each with a part of the rows"""
    concurrency: PositiveInt = 32
    """calls of an `async` function, and requests to a judge, that each worker has in flight"""
    memory_gigabytes: PositiveFloat | None = None
    """memory that a worker may take once it has imported the function; default: no limit"""
    timeout_seconds: PositiveFloat = 10.0
    """time one row may take before its score counts as failed"""
    import_timeout_seconds: PositiveFloat = 120.0
    """time that importing the function may take, at the start and after a row that hung"""
    max_failed_share: Share = 0.1
    """stop the run when more than this share of an iteration's rows could not be scored"""

    @model_validator(mode="after")
    def _one_or_several(self) -> RewardSection:
        if self.kind is None and self.parts is None:
            raise ValueError("kind is missing; name a rule, write path/file.py:function, or parts")
        if self.parts and (self.kind is not None or self.arguments):
            raise ValueError("kind and parts exclude each other; write one more part instead")
        _check_arguments(self.kind, self.arguments)
        names = [part.name for part in self.parts or ()]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two parts are called {twice[0]!r}; give each a name of its own")
        return self

    @property
    def label(self) -> str:
        """Return the kind, or the weighted sum in a few words."""
        parts = self.parts or ()
        return self.kind or " + ".join(f"{part.weight:g} x {part.name}" for part in parts)
