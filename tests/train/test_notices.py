"""A run from which nothing can be learnt any more says so."""

from helpers import changed, read_jsonl

from tether import api
from tether.config.load import validate_config
from tether.train.notices import NoiseNotice
from tether.train.watch import Watcher


class Listener(Watcher):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, warning: str) -> None:
        self.warnings.append(warning)


def test_five_iterations_without_a_difference_are_said_once(tiny_config, tmp_path):
    heard = Listener()
    config = changed(tiny_config, train__iterations=7, data__heldout=None)
    api.train(validate_config(config), reward=lambda response: 0.0, watch=heard)
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    [event] = [e for e in events if e["kind"] == "nothing_to_learn"]
    assert event["iteration"] == 4
    assert "5 iterations in a row all responses scored alike" in event["message"]
    assert heard.warnings == [event["message"]]


def test_groups_without_spread_count_too(tiny_config, tmp_path):
    """Prompts differ in their scores, the responses to one prompt never do."""
    fields = {"advantage__estimator": "grpo", "train__iterations": 5, "data__heldout": None}
    config = validate_config(changed(tiny_config, **fields))
    api.train(config, reward=lambda prompt: float(len(prompt)))
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    [event] = [e for e in events if e["kind"] == "nothing_to_learn"]
    assert "the responses to each prompt scored alike" in event["message"]


def test_a_policy_that_jumps_is_said(tiny_config, tmp_path):
    heard = Listener()
    fields = {"actor__lr": 1.0, "actor__max_grad_norm": 1e3, "data__heldout": None}
    reward = lambda response: len(set(response)) / 8  # noqa: E731
    api.train(validate_config(changed(tiny_config, **fields)), reward, heard)
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    jumps = [e for e in events if e["kind"] == "policy_jumped"]
    assert len(jumps) == 1
    assert "actor/approx_kl = " in jumps[0]["message"]
    assert jumps[0]["message"] in heard.warnings


def test_a_healthy_run_is_told_nothing(tiny_config, tmp_path):
    heard = Listener()
    fields = {"train__iterations": 6, "actor__lr": 1e-5, "data__heldout": None}
    reward = lambda response: len(set(response)) / 8  # noqa: E731
    api.train(validate_config(changed(tiny_config, **fields)), reward, heard)
    assert heard.warnings == []


def test_tools_that_nobody_calls_are_said_once_per_stretch():
    notice = NoiseNotice()
    means = [0.5, 0.0, 0.0, 0.25, 0.0]
    said = [[e.kind for e in notice.read({"tools/calls_mean": mean})] for mean in means]
    assert said == [[], ["tools_not_called"], [], [], ["tools_not_called"]]
    assert NoiseNotice().read({"score/mean": 0.0}) == []  # a run without tools
