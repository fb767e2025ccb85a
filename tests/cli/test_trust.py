"""A run copied from elsewhere: its config runs nothing and asks nobody unless it is trusted."""

import shutil

import pytest
import yaml
from helpers import changed, distinct_letters
from typer.testing import CliRunner

import tether
from tether.cli.main import app
from tether.errors import UserError

CODE = """
open({canary!r}, "w").close()
def tool(query): return "7"
def score(response): return 0.5
class Game:
    def reset(self, row): return "go"
    def step(self, text): return "", 1.0, True
"""


@pytest.fixture(scope="module")
def plain_run(tiny_model_dir, tiny_data, tmp_path_factory):
    """A finished run that names neither code nor addresses."""
    folder = tmp_path_factory.mktemp("plain")
    config = {
        "threads": 1,
        "run": {"dir": str(folder / "run")},
        "model": {"actor": tiny_model_dir},
        "data": {"train": tiny_data, "heldout": tiny_data},
        "rollout": {"prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 8},
        "reward": {"kind": "exact_answer"},
        "actor": {"minibatch_rows": 4},
        "train": {"iterations": 1, "eval_prompts": 2},
    }
    tether.train(config)
    return folder / "run"


@pytest.fixture
def copied(plain_run, tmp_path, monkeypatch):
    """A function that puts a run into ./runs whose config has other fields."""
    monkeypatch.chdir(tmp_path)
    canary, code = tmp_path / "canary", tmp_path / "x.py"
    code.write_text(CODE.format(canary=str(canary)))

    def copy(**fields: object) -> tuple[str, object]:
        run = tmp_path / "runs" / "cool-run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(plain_run, run)
        config = yaml.safe_load((run / "config.yaml").read_text())
        (run / "config.yaml").write_text(yaml.safe_dump(changed(config, **fields)))
        return str(run), canary

    return copy


ROOM = {"rollout__max_observation_tokens": 40, "rollout__max_response_tokens": 60}
NAMES = {
    "rollout.tools.0.kind": {
        "rollout__tools": [{"kind": "x.py:tool"}],
        **ROOM,
    },
    "rollout.tools.0.url": {
        "rollout__tools": [{"kind": "search", "url": "http://127.0.0.1:9/retrieve"}],
        **ROOM,
    },
    "rollout.environment": {
        "rollout__environment": "x.py:Game",
        **ROOM,
    },
    "reward.kind": {"reward__kind": "x.py:score"},
    "model.hub": {"model__hub": True},
}
NOT_USED = {"generate": ("reward.kind", "model.hub")}  # it asks for neither


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize("command", ["generate", "trace", "eval"])
def test_what_a_run_names_is_neither_imported_nor_asked(copied, command, field):
    """Also without --model, when the newest run under runs/ is taken."""
    run, canary = copied(**NAMES[field])
    use = {
        "generate": lambda: tether.generate("1+1=?", max_tokens=1),
        "trace": lambda: tether.trace("0+1=?"),
        "eval": lambda: tether.evaluate(run),
    }
    if field in NOT_USED.get(command, ()):
        use[command]()
    else:
        with pytest.raises(
            UserError, match=rf"config\.yaml names .* {field}(\.kind)? .*--trust-run"
        ):
            use[command]()
    assert not canary.exists()


@pytest.mark.parametrize("command", ["generate", "trace", "eval"])
def test_a_trusted_run_uses_its_own_code(copied, command):
    fields = NAMES["rollout.tools.0.kind"] | NAMES["reward.kind"]
    run, canary = copied(**fields)
    words = {
        "generate": ["generate", "1+1=?", "--max-tokens", "5"],
        "trace": ["trace", "0+1=?"],
        "eval": ["eval", run, "--train.eval_prompts", "2"],
    }
    result = CliRunner().invoke(app, [*words[command], "--trust-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert canary.exists()


def test_what_the_caller_types_or_passes_needs_no_flag(copied):
    run, canary = copied(**NAMES["reward.kind"])
    tether.evaluate(run, overrides={"reward.kind": "exact_answer"})
    tether.evaluate(run, reward=distinct_letters)
    assert not canary.exists()
    tether.evaluate(run, overrides={"reward.kind": "x.py:score"})
    assert canary.exists()


def test_tools_that_ship_need_no_flag(copied):
    copied(
        rollout__tools=["calculator"],
        **ROOM,
    )
    assert tether.generate("1+1=?", max_tokens=8)


def test_a_field_that_only_begins_like_a_typed_one_needs_the_flag(copied):
    run, canary = copied(**NAMES["reward.kind"])
    for alike in ("rollout.max_turns", "reward.max_failed_share"):
        with pytest.raises(UserError, match=r"reward\.kind"):
            tether.evaluate(run, overrides={alike: 1})
    assert not canary.exists()


@pytest.mark.parametrize("use", ["generate", "export"])
def test_the_base_of_an_adapter_is_fetched_from_the_hub_only_for_a_trusted_run(
    copied, tmp_path, monkeypatch, use
):
    """A whole actor lies in the checkpoint; an adapter's base is where the config says."""
    run, _ = copied(model__hub=True, model__lora={"rank": 2}, model__actor="someone/model")
    monkeypatch.setattr("tether.api.latest_checkpoint", lambda run: tmp_path)  # no whole actor
    uses = {
        "generate": lambda: tether.generate("1+1=?", model=run, max_tokens=1),
        "export": lambda: tether.export(run, tmp_path / "exported"),
    }
    with pytest.raises(UserError, match=r"model\.hub .*--trust-run"):
        uses[use]()
