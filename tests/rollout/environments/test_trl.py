"""TRL's environment classes: tools by JSON, a reward at the end, against hand-driven ones."""

import asyncio
import json

import pytest
import torch
from helpers import table, tiny_llama

from rollout.talk import say, settings
from rollout.tools.test_functions import CHATML, LLAMA, QWEN, call
from tether.config import DataSection, map_paths
from tether.data.chat_templates import offer_tools
from tether.data.messages import render_prompt
from tether.errors import UserError
from tether.models.vocabulary import Vocabulary
from tether.rollout.environments.trl import plain_state
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Greedy
from tether.rollout.tools.build import build_episode_source
from tether.rollout.turns import close_all
from tether.run.trust import code_and_addresses
from tether.support.user_code import import_file
from tether.types import EnvironmentState, Prompts

CLASSES = '''
import time


class Counter:
    """Reach a target by steps."""

    def reset(self, target=3, **kwargs) -> str | None:
        self.count, self.target, self.seen = 0, target, kwargs
        return f" Reach {target}."

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: What to add.

        Returns:
            The counter.
        """
        if self.count == self.target:
            raise ValueError("Game over.")
        self.count += step
        return self.count

    async def double(self) -> int:
        """Double the counter."""
        self.count *= 2
        return self.count

    def get_reward(self) -> float:
        return 1.0 - abs(self.target - self.count) / 10

    def _hidden(self, x):
        return x

    @staticmethod
    def helper(x):
        return x


class Troubled:
    """Do what `trouble` says."""

    def __init__(self, trouble="none") -> None:
        self.trouble = trouble
        if trouble == "init":
            raise RuntimeError("no room")

    def reset(self, trouble=None):
        self.trouble = trouble or self.trouble
        match self.trouble:
            case "reset":
                raise RuntimeError("no luck")
            case "reset bytes":
                return b"x"
            case "reset long":
                return "é" * 10_000_000
            case "reset hangs":
                time.sleep(1)

    def act(self) -> str:
        """Act."""
        match self.trouble:
            case "tool":
                raise RuntimeError("no luck")
            case "tool bytes":
                return b"x"
            case "tool long":
                return "é" * 10_000_000
            case "tool hangs":
                time.sleep(1)
            case "tool exits":
                raise SystemExit(3)
            case "special":
                return "<|end|></tool_response>"
        return {"acted": True}

    def get_reward(self):
        match self.trouble:
            case "reward":
                raise RuntimeError("no scale")
            case "reward nan":
                return float("nan")
            case "reward none":
                return None
            case "reward text":
                return "1"
            case "reward hangs":
                time.sleep(1)
        return 1


class Adder(Counter):
    get_reward = None

    def reset(self, **kwargs):
        self.total = 0

    def add(self, amount: int) -> int:
        """Add an amount.

        Args:
            amount: How much.
        """
        self.total += amount
        return self.total

    increment = double = None


class Bare:
    def reset(self, **kwargs):
        return None

    def act(self, x: int):
        return x


class NoReset:
    def act(self) -> str:
        """Act."""


def make_counter():
    return Counter()


def broken_maker():
    raise RuntimeError("no counter today")


number = 3
'''
ADD = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''
INCREMENT = {
    "type": "function",
    "function": {
        "name": "increment",
        "description": "Add to the counter.",
        "parameters": {
            "type": "object",
            "properties": {"step": {"type": "integer", "description": "What to add."}},
            "required": ["step"],
        },
        "return": {"type": "integer", "description": "The counter."},
    },
}
DOUBLE = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Double the counter.",
        "parameters": {"type": "object", "properties": {}},
        "return": {"type": "integer"},
    },
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_classes.py"
    path.write_text(CLASSES)
    return path


@pytest.fixture
def source(file, byte_tokenizer, monkeypatch):
    def built(arguments, template=QWEN, timeout=5.0, data=None, **fields):
        monkeypatch.setattr(byte_tokenizer, "chat_template", template)
        vocabulary = Vocabulary(byte_tokenizer, frozenset([byte_tokenizer.eos_token_id]))
        for name in ("class", "classes"):
            if isinstance(arguments.get(name), str):
                arguments = {**arguments, name: f"{file}:{arguments[name]}"}
            elif isinstance(arguments.get(name), dict):
                named = {k: f"{file}:{v}" for k, v in arguments[name].items()}
                arguments = {**arguments, name: named}
        environment = {"kind": "trl", "arguments": arguments, "timeout_seconds": timeout}
        section = settings(**{"tools": [], "environment": environment, **fields})
        return build_episode_source(section, vocabulary, data)

    yield built
    offer_tools(byte_tokenizer, None)


@pytest.fixture
def begin(source, byte_tokenizer):
    def begun(name="Counter", columns=None, prompt="Count.", **fields):
        built = source({"class": name}, **fields)
        asked = [{"role": "user", "content": prompt}]
        ids = render_prompt(byte_tokenizer, asked)
        [row] = built.episodes(Prompts([prompt], [ids], [columns or {}], [0], [""], [asked]))
        return row

    return begun


def turn(*calls):
    return "".join(f"<tool_call>{one}</tool_call>" for one in calls) + "<|end|>"


def shown(*results):
    inner = "".join(f"\n<tool_response>\n{one}\n</tool_response>" for one in results)
    return f"\n<|user|>{inner}<|end|>\n<|assistant|>\n"


def test_an_episode_equals_a_hand_driven_instance_step_by_step(begin, file, byte_tokenizer):
    by_hand = import_file(file).Counter()
    row = begin(columns={"target": 6, "note": "x"})
    tools = f"<|system|>Tools:{json.dumps(DOUBLE)}{json.dumps(INCREMENT)}<|end|>\n"
    opening = by_hand.reset(target=6, note="x")
    prompt = f"{tools}<|user|>\nCount.{opening}<|end|>\n<|assistant|>\n"
    assert byte_tokenizer.decode(row.prompt_ids) == prompt

    seen = say(row, turn(call("increment", {"step": 2})))
    assert seen == shown(by_hand.increment(step=2)) == shown(2)
    seen = say(row, turn(call("double", {}), call("increment", {"step": 1})))
    assert seen == shown(asyncio.run(by_hand.double()), by_hand.increment(step=1)) == shown(4, 5)
    assert say(row, "Five.<|end|>") is None
    close_all([row])
    assert row.turn_rewards == (None, None, by_hand.get_reward()) == (None, None, 0.9)
    assert row.state == EnvironmentState(
        "Counter",
        {"count": 5, "target": 6, "seen": {"note": "x", "prompt": by_hand_prompt("Count.")}},
    )
    assert [(c.name, c.arguments, c.result) for c in row.calls] == [
        ("increment", '{"step": 2}', "2"),
        ("double", "{}", "4"),
        ("increment", '{"step": 1}', "5"),
    ]


def sentence_of(call):
    """What a call says went wrong, without the place in the file."""
    return call.error.partition(" (my_classes.py")[0]


def by_hand_prompt(text):
    return [{"role": "user", "content": text}]


@table(
    "template, said, observed",
    [
        (
            LLAMA,
            call("increment", {"step": 2}, "parameters") + "<|end|>",
            '<|ipython|>\n\n"2"<|end|><|assistant|>\n\n',
        ),
        (
            CHATML,
            f"<tool_call>[{call('increment', {'step': 2})}]</tool_call><|end|>",
            "\n<|tool|>\n2<|end|>\n<|assistant|>\n",
        ),
    ],
)
def test_calls_have_the_form_of_the_models_template(begin, template, said, observed):
    assert say(begin(template=template), said) == observed


def test_only_sampled_tokens_are_in_the_mask_and_the_reward_is_the_last_turns(
    begin, byte_tokenizer
):
    row = begin(columns={"target": 5})
    texts = (turn(call("increment", {"step": 4})), "Done.<|end|>")
    script = byte_tokenizer("".join(texts), add_special_tokens=False).input_ids
    sampler = LocalSampler(frozenset([byte_tokenizer.eos_token_id]), 300, 1.0)
    sampler.sync(tiny_llama(260, byte_tokenizer.eos_token_id).eval(), 0)
    drawn = iter(script)

    def scripted(live, states, choice):
        for one in live:
            one.add_sampled(next(drawn), -1.0, sampler.eos_ids, 300)

    sampler._take_tokens = scripted
    rollout = sampler.run([row], Greedy())
    ids, mask = rollout.response_ids[0], rollout.response_mask[0]
    assert ids[mask].tolist() == script
    assert byte_tokenizer.decode(ids[~mask]) == shown(4)
    assert torch.equal(rollout.rollout_log_probs[0] != 0, mask)
    assert rollout.turn_rewards == ((None, 0.9),)
    assert rollout.states[0].values["count"] == 4
    assert rollout.select(torch.tensor([0])).states == rollout.states
    assert rollout.finish_reasons == ("eos",)


def test_an_episode_that_is_cut_off_is_rewarded_for_where_it_stands(begin, byte_tokenizer):
    row = begin()
    for token in byte_tokenizer("Well", add_special_tokens=False).input_ids:
        assert not row.add_token(token)
    close_all([row])
    assert row.turn_rewards == (0.7,)


def test_reset_may_give_the_prompt_itself(source, byte_tokenizer):
    built = source({"class": "Counter"}, data=DataSection(train="environment"))
    prompts = Prompts(
        ["", ""], [[], []], [{"seed": 1}, {"target": 9}], [0, 1], ["", ""], [None] * 2
    )
    first, second = built.episodes(prompts)
    assert byte_tokenizer.decode(first.prompt_ids).endswith("<|user|>\n Reach 3.<|end|>\n<|assistant|>\n")  # fmt: skip # noqa: E501
    assert second.prompt == " Reach 9."
    assert first.steps.instance.seen == {"seed": 1}  # there is no prompt to hand over


def test_rows_of_a_prompt_have_instances_and_columns_of_their_own(source):
    built = source({"class": "Counter"})
    columns = {"goals": [1]}
    prompts = Prompts(["a"] * 2, [[1]] * 2, [columns] * 2, [0, 0], [""] * 2, [None] * 2)
    first, second = built.episodes(prompts)
    first.steps.instance.seen["goals"].append(2)
    assert second.steps.instance.seen == {"prompt": "a", "goals": [1]}
    assert columns == {"goals": [1]}
    say(first, turn(call("increment", {"step": 2})))
    assert (first.steps.instance.count, second.steps.instance.count) == (2, 0)


def test_a_reset_without_kwargs_gets_what_it_names(begin):
    row = begin("Troubled", {"trouble": "reset", "other": 1})
    assert sentence_of(row.calls[0]) == "RuntimeError: no luck"


def test_what_a_tool_raises_is_read_as_trl_writes_it(begin):
    """A ValueError is the class's way to refuse a call; the reward stays in either case."""
    row = begin(columns={"target": 2})
    say(row, turn(call("increment", {"step": 2})))
    assert say(row, turn(call("increment", {"step": 1}))) == shown("{'error': 'Game over.'}")
    assert (sentence_of(row.calls[-1]), row.calls[-1].fault) == ("ValueError: Game over.", "policy")
    assert say(row, "Oh.<|end|>") is None
    close_all([row])
    assert row.turn_rewards == (None, None, 1.0)

    row = begin("Troubled", {"trouble": "tool"})
    assert say(row, turn(call("act", {}))) == shown("{'error': 'no luck'}")
    assert (sentence_of(row.calls[-1]), row.calls[-1].fault) == ("RuntimeError: no luck", "tool")
    close_all([row])
    assert row.turn_rewards == (1.0,)


@table(
    "one, problem",
    [
        (call("jump", {}), "there is no such tool, only double, increment"),
        (call("reset", {}), "there is no such tool, only double, increment"),
        (call("get_reward", {}), "there is no such tool, only double, increment"),
        (call("_hidden", {"x": 1}), "there is no such tool, only double, increment"),
        (call("helper", {"x": 1}), "there is no such tool, only double, increment"),
        (call("increment", {}), "it needs an argument 'step'"),
        (call("increment", {"step": "2"}), "'step' is str, not integer"),
        (call("increment", {"step": 1, "by": 2}), "it takes no argument 'by', only step"),
        ('{"name": "increment"', "it is not JSON (Expecting ',' delimiter at character 20)"),
    ],
)
def test_a_call_that_does_not_fit_is_the_policys(begin, one, problem):
    row = begin()
    assert problem in say(row, turn(one))
    assert (row.calls[0].error, row.calls[0].fault) == (problem, "policy")
    close_all([row])
    assert row.turn_rewards == (0.7,)


@table(
    "trouble, observed, error",
    [
        ("tool bytes", "The call of act failed.", "it returned bytes, not text"),
        ("tool exits", "The call of act failed.", "SystemExit: 3"),
    ],
)
def test_a_tool_that_fails_costs_an_observation(begin, trouble, observed, error):
    row = begin("Troubled", {"trouble": trouble})
    assert say(row, turn(call("act", {}))) == shown(observed)
    assert (sentence_of(row.calls[0]), row.calls[0].fault) == (error, "tool")


def test_ten_megabytes_are_cut_before_they_are_encoded(begin, byte_tokenizer):
    row = begin("Troubled", {"trouble": "tool long"}, max_observation_tokens=90)
    for token in byte_tokenizer(turn(call("act", {})), add_special_tokens=False).input_ids:
        row.add_token(token)
    observed = row.answer().ids
    assert len(observed) <= 90
    assert "é …\n</tool_response>" in byte_tokenizer.decode(observed)
    assert row.calls[0].cut
    assert len(row.calls[0].result) <= 90


def test_ten_megabytes_of_reset_are_cut_too(begin, byte_tokenizer):
    short = begin("Troubled", max_observation_tokens=90)
    row = begin("Troubled", {"trouble": "reset long"}, max_observation_tokens=90)
    assert len(row.prompt_ids) - len(short.prompt_ids) <= 90
    assert "Count.éé" in byte_tokenizer.decode(row.prompt_ids)
    assert "é …<|end|>" in byte_tokenizer.decode(row.prompt_ids)


def test_special_tokens_in_a_result_stay_letters(begin, byte_tokenizer):
    row = begin("Troubled", {"trouble": "special"})
    for token in byte_tokenizer(turn(call("act", {})), add_special_tokens=False).input_ids:
        row.add_token(token)
    assert row.answer().ids.count(byte_tokenizer.eos_token_id) == 1  # the template's own


def test_a_result_that_is_not_text_is_read_as_its_str(begin):
    assert say(begin("Troubled"), turn(call("act", {}))) == shown("{'acted': True}")


@table(
    "trouble, name, error",
    [
        ("reset", "reset", "RuntimeError: no luck"),
        ("reset bytes", "reset", "reset returned bytes, not text"),
        ("reset hangs", "reset", "it took longer than timeout_seconds = 0.3"),
        ("reward", "get_reward", "RuntimeError: no scale"),
        ("reward nan", "get_reward", "the reward is nan"),
        ("reward none", "get_reward", "it returned None, not a number"),
        ("reward text", "get_reward", "the reward is str, not a number"),
        ("reward hangs", "get_reward", "it took longer than timeout_seconds = 0.3"),
        ("tool hangs", "act", "it took longer than timeout_seconds = 0.3"),
    ],
)
def test_a_class_that_fails_costs_its_row_the_reward(begin, trouble, name, error):
    row = begin("Troubled", {"trouble": trouble}, timeout=0.3)
    said = turn(call("act", {})) if name == "act" else "Hm.<|end|>"
    assert say(row, said) is None
    close_all([row])
    assert row.turn_rewards == ()
    assert [(c.name, sentence_of(c), c.fault) for c in row.calls] == [(name, error, "tool")]
    assert (row.state is None) == (name == "reset" or "hangs" in trouble)


def test_a_class_that_cannot_be_made_costs_its_row(source):
    built = source({"class": "Troubled", "trouble": "init"})
    [row] = built.episodes(Prompts(["a"], [[1]], [{}], [0], [""], [None]))
    assert sentence_of(row.calls[0]) == "RuntimeError: no room"
    assert say(row, "Hm.<|end|>") is None


def test_a_call_in_the_last_turn_is_not_made(begin):
    row = begin(max_turns=1)
    assert say(row, turn(call("increment", {"step": 3}))) is None
    assert row.calls[0].error.startswith("not made: it came with turn 1")
    close_all([row])
    assert row.turn_rewards == (0.7,)


def test_a_row_is_of_the_class_that_its_column_names_and_reads_only_its_tools(
    source, byte_tokenizer
):
    built = source(
        {"classes": {"count": "Counter", "add": "Adder"}}, data=DataSection(train="environment")
    )
    columns = [{"environment": "count"}, {"environment": "add"}, {"environment": ["sub"]}]
    prompts = Prompts(["a"] * 3, [[1]] * 3, columns, [0, 1, 2], [""] * 3, [None] * 3)
    count, add, wrong = built.episodes(prompts)
    assert '"increment"' in byte_tokenizer.decode(count.prompt_ids)
    assert '"add"' not in byte_tokenizer.decode(count.prompt_ids)
    assert byte_tokenizer.decode(count.prompt_ids).endswith("a Reach 3.<|end|>\n<|assistant|>\n")
    assert '"add"' in byte_tokenizer.decode(add.prompt_ids)
    assert say(add, turn(call("add", {"amount": 4}))) == shown(4)
    assert "environment" not in count.steps.instance.seen
    assert wrong.calls[0].error == "the row's column 'environment' is ['sub']; it must be one of count, add"  # fmt: skip # noqa: E501
    close_all([count, add])
    assert add.turn_rewards == ()  # Adder has no `get_reward`
    assert not built.gives_rewards


def test_tools_of_the_run_stand_beside_the_methods(begin, tmp_path):
    (tmp_path / "own.py").write_text(ADD)
    row = begin(tools=[f"{tmp_path}/own.py:add"])
    seen = say(row, turn(call("add", {"a": 2, "b": 3}), call("increment", {"step": 2})))
    assert seen == shown(5, 2)


@table(
    "arguments, sentence",
    [
        ({}, "needs arguments: {class: path/file.py:NAME}"),
        ({"class": "Counter", "classes": {"a": "Counter"}}, "and not both"),
        ({"classes": {}}, "classes must map names"),
        ({"class": 3}, "class is 3; write path/file.py:NAME"),
        ({"class": "Counter", "size": 3}, "does not take rollout.environment.arguments"),
        (
            {"class": "Bare"},
            "its public method 'act', a tool unless its name begins with _, has no schema",
        ),
        ({"class": "NoReset"}, "has no method 'reset'"),
        ({"class": "number"}, "is int; name a class, or what makes one"),
        ({"class": "Nothing"}, "has no 'Nothing'"),
        ({"class": "broken_maker"}, "cannot be made: RuntimeError: no counter today"),
    ],
)
def test_what_cannot_work_is_refused_before_training(source, arguments, sentence):
    with pytest.raises(UserError, match=sentence.replace("{", r"\{")):
        source(arguments)


@table(
    "fields, sentence",
    [
        ({"template": None}, "this model has none"),
        ({"data": DataSection(train="environment", chat_template=False)}, "leave out data.chat_t"),
        ({"tools": ["calculator"], "environment": "a.py:b"}, "exclude each other"),
    ],
)
def test_settings_that_cannot_work_are_refused(source, fields, sentence):
    with pytest.raises((UserError, ValueError), match=sentence):
        source({"class": "Counter"}, **fields)


def test_a_function_may_make_the_instances(begin):
    assert say(begin("make_counter"), turn(call("increment", {"step": 2}))) == shown(2)


def test_a_reward_sees_attributes_that_are_plain_data():
    class Anything:
        def __init__(self):
            self.count, self.words, self.client = 3, ("a", "b"), object()
            self.reward, self.nan, self._secret = torch.tensor(0.5), float("nan"), 1
            self.long = "x" * 200_000

    assert plain_state(Anything()) == {"count": 3, "words": ["a", "b"], "reward": 0.5}


@table(
    "arguments, changed, fields",
    [
        ({"class": "a.py:A"}, {"class": "/b/a.py:A"}, ["class"]),
        (
            {"classes": {"x": "a.py:A", "y": "c.py:C"}, "size": 3},
            {"classes": {"x": "/b/a.py:A", "y": "/b/c.py:C"}, "size": 3},
            ["classes.x", "classes.y"],
        ),
    ],
)
def test_a_runs_files_are_those_of_its_classes(arguments, changed, fields):
    """Relative to the recipe, part of the run's fingerprint, and refused in a copied run."""
    rollout = {"environment": {"kind": "trl", "arguments": arguments}}
    moved = map_paths({"rollout": rollout}, lambda path: f"/b/{path}")["rollout"]["environment"]
    assert moved == {"kind": "trl", "arguments": changed}
    named = [arguments["class"]] if "class" in arguments else list(arguments["classes"].values())
    assert settings(**rollout, tools=[]).environment.code == named
    prefix = "rollout.environment.arguments"
    found = list(code_and_addresses({"rollout": rollout}))
    assert found == [(f"{prefix}.{f}", kind) for f, kind in zip(fields, named, strict=True)]
