"""Runs whose policy talks to tools and environments: what is written, what fails, what repeats.

A random model rarely writes a tag, but often a letter: an environment that answers each letter
gives every row several turns.
"""

import json

import pytest
from helpers import changed

from tether import api
from tether.config.load import validate_config
from tether.errors import RunStopped, UserError

WORLD = '''
import string, time

class Letters:
    """Answers each letter with the next one."""
    stops = tuple(string.ascii_letters)
    seen = 0

    def reset(self, columns):
        self.answer = columns.get("answer", "none")
        return " ready? "

    def step(self, text):
        time.sleep(0.001 * (ord(text[-1]) % 3))
        return f"[{chr(ord(text[-1]) + 1)} of {self.answer}]"

class Fails(Letters):
    def step(self, text):
        if text[-1] < "n":
            raise RuntimeError("out of order")
        return "ok"

class FailsToReset(Letters):
    def reset(self, columns):
        if columns["answer"] == "1":
            raise RuntimeError("no world")
'''


@pytest.fixture
def config(tiny_config, tmp_path) -> dict:
    path = tmp_path / "world.py"
    path.write_text(WORLD)
    return changed(
        tiny_config,
        rollout__max_response_tokens=60,
        rollout__environment=f"{path}:Letters",
        rollout__max_observation_tokens=20,
        rollout__max_turns=3,
        reward__kind="length",
        reward__arguments={"at_most": 30},
    )


def run(config: dict, tmp_path, name: str = "run", **dotted) -> dict:
    """Every file of a finished run, by name."""
    directory = tmp_path / name
    api.train(validate_config(changed(config, run__dir=str(directory), **dotted)))

    def lines(file: str) -> list[dict]:
        path = directory / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return {
        "metrics": lines("metrics.jsonl"),
        "events": [event for event in lines("events.jsonl") if event["kind"] != "started"],
        "rows": lines("rollouts/000001.jsonl"),
        "evals": lines("evals.jsonl"),
        "directory": directory,
    }


def test_a_run_with_an_environment_records_its_calls_and_repeats_bit_for_bit(config, tmp_path):
    first, again = run(config, tmp_path, "a"), run(config, tmp_path, "b")
    assert first["metrics"] == again["metrics"]
    assert first["evals"] == again["evals"]
    one, two = ((tmp_path / name / "rollouts" / "000001.jsonl") for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    timings = json.loads((tmp_path / "a" / "timings.jsonl").read_text().splitlines()[1])
    assert timings["time/tools"] > 0

    called = [row for row in first["rows"] if row["calls"]]
    assert called
    for row in called:
        made = [call for call in row["calls"] if call["error"] is None]
        spans = "".join("w" if own else "o" for own in row["response_mask"]).split("w")
        read = [call for call in made if call["turn"] < 2]  # the last turn's is not read any more
        assert len([span for span in spans if span]) == len(read)
        for call in made:
            after = chr(ord(call["arguments"][-1]) + 1)
            assert call["result"].startswith(f"[{after} of ")
            assert (call["result"] in row["response"]) == (call in read)
            assert "seconds" not in call
        masked = zip(row["response_mask"], row["rollout_log_probs"], strict=True)
        assert all(log_prob == 0 for own, log_prob in masked if not own)
    out_of_turns = [row for row in called if len(row["calls"]) == 3]  # rollout.max_turns
    assert out_of_turns
    assert all(row["finish_reason"] == "truncated" for row in out_of_turns)

    metrics = first["metrics"][1]
    assert metrics["tools/calls_mean"] > 0
    assert metrics["tools/invalid_mean"] == 0  # any text is a step
    assert metrics["tools/observed_tokens_mean"] > 0
    assert not any("seconds" in name for name in metrics)
    assert first["evals"][0]["calls"] > 0


def test_steps_that_fail_cost_their_rows_an_event_each_and_the_run_goes_on(config, tmp_path):
    world = config["rollout"]["environment"].replace("Letters", "Fails")
    found = run(config, tmp_path, rollout__environment=world, rollout__max_failed_share=1)
    assert len(found["metrics"]) == 2
    failed = {
        row["row"] for row in found["rows"] if any(call["fault"] == "tool" for call in row["calls"])
    }
    events = [e for e in found["events"] if e["kind"] == "tool_failed" and e["iteration"] == 1]
    assert failed
    assert [event["row"] for event in events] == sorted(failed)
    assert all("RuntimeError: out of order" in event["message"] for event in events)


@pytest.mark.parametrize(
    ("world", "why"), [("Fails", "out of order"), ("Raises", "RuntimeError: no licence")]
)
def test_tools_that_fail_more_often_than_they_work_stop_the_run(config, tmp_path, world, why):
    (tmp_path / "world.py").write_text(
        WORLD + "\nclass Raises(Letters):\n    def __init__(self):\n"
        '        raise RuntimeError("no licence")\n'
    )
    environment = config["rollout"]["environment"].replace("Letters", world)
    with pytest.raises(RunStopped, match=r"calls failed, more than rollout.max_failed_share = 0.5"):
        run(config, tmp_path, rollout__environment=environment)
    events = [json.loads(x) for x in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(e["kind"] == "tool_failed" and why in e["message"] for e in events)
    assert events[-1]["kind"] == "stopped"


def test_an_environment_that_writes_to_its_row_changes_no_other(config, tmp_path):
    """Each sample of a prompt begins with the row as the file has it."""
    (tmp_path / "world.py").write_text(
        WORLD
        + """
class Writes(Letters):
    def reset(self, columns):
        self.answer = columns["answer"] = columns["answer"] + "!"
        columns["nested"]["list"].append(1)
        return f" {self.answer} {len(columns['nested']['list'])} "
"""
    )
    rows = [{"prompt": f"{i}", "answer": f"{i}", "nested": {"list": []}} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = config["rollout"]["environment"].replace("Letters", "Writes")
    found = run(
        config,
        tmp_path,
        rollout__environment=environment,
        data__train=str(data),
        data__heldout=None,
        rollout__samples_per_prompt=2,
    )
    assert len(found["rows"]) == 12
    openings: dict[str, set] = {}
    for row in found["rows"]:
        openings.setdefault(row["prompt"], set()).add(tuple(row["prompt_ids"]))
    assert len(openings) == 6
    assert all(len(seen) == 1 for seen in openings.values())


def test_a_reset_that_fails_costs_its_rows_an_event(config, tmp_path):
    world = config["rollout"]["environment"].replace("Letters", "FailsToReset")
    found = run(config, tmp_path, rollout__environment=world, rollout__max_failed_share=1)
    assert len(found["metrics"]) == 2
    assert any("reset: RuntimeError: no world" in e["message"] for e in found["events"])


def test_without_state_masking_the_run_says_that_it_is_an_ablation(config, tmp_path):
    found = run(config, tmp_path, rollout__state_masking=False)
    [event] = [e for e in found["events"] if e["kind"] == "ablation"]
    assert "rollout.state_masking" in event["message"]
    row = next(row for row in found["rows"] if row["calls"])
    assert all(row["response_mask"])
    gaps = zip(row["rollout_log_probs"], row["old_log_probs"], strict=True)
    assert all(abs(a - b) < 1e-4 for a, b in gaps)
    assert found["metrics"][0]["rollout/log_prob_diff_max"] < 1e-4


def test_a_corpus_with_broken_lines_is_named_in_events(tiny_config, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "one"}\n{"id": 3}\n')
    tools = [{"kind": "search", "corpus": str(corpus), "on_bad_row": "skip"}, "calculator"]
    fields = {"rollout__tools": tools, "rollout__max_response_tokens": 60}
    fields["rollout__max_observation_tokens"] = 50
    found = run(tiny_config, tmp_path, **fields)
    [event] = [e for e in found["events"] if e["kind"] == "bad_row"]
    assert "corpus.jsonl, line 2" in event["message"]
    tools[0]["on_bad_row"] = "refuse"
    with pytest.raises(UserError, match=r"corpus.jsonl, line 2"):
        run(tiny_config, tmp_path, "again", **fields)


@pytest.mark.long
def test_a_changed_corpus_is_another_run(tiny_config, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "one"}\n')
    fields = {
        "rollout__tools": [{"kind": "search", "corpus": str(corpus)}],
        "rollout__max_response_tokens": 60,
        "rollout__max_observation_tokens": 50,
        "train__iterations": 1,
    }
    directory = run(tiny_config, tmp_path, **fields)["directory"]
    corpus.write_text('{"contents": "two"}\n')
    with pytest.raises(UserError, match=r"rollout.tools\[0\].corpus"):
        api.resume(directory, {"train.iterations": 2})


@pytest.mark.long
def test_generate_goes_on_with_the_tools_of_its_run(config, tmp_path):
    directory = run(config, tmp_path, train__iterations=1)["directory"]
    texts = api.generate("1+1=?", str(directory), samples=8, temperature=1.0, trust_run=True)
    assert any(" of none]" in text for text in texts)  # there is no row that could have a column
