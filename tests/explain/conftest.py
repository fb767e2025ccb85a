import json

import pytest
import yaml
from helpers import changed, distinct_letters

import tether


@pytest.fixture
def recipe(tiny_config, tmp_path):
    """Writes the tiny run, changed as a test wants, as a YAML recipe; its path."""

    def write(**dotted) -> str:
        config = changed(tiny_config, **dotted)
        del config["run"]["dir"]
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, tiny_model_dir, tiny_data) -> str:
    """A run of three iterations, so that its critic and actor have left where they began."""
    config = {
        "threads": 1,
        "run": {"dir": str(tmp_path_factory.mktemp("trained") / "run")},
        "model": {"actor": tiny_model_dir},
        "data": {"train": tiny_data},
        "rollout": {"prompts": 6, "samples_per_prompt": 2, "max_response_tokens": 8},
        "reward": {"kind": "exact_answer"},
        "kl": {
            "in_reward": {
                "coef": 0.3,
                "controller": "adaptive",
                "target": 0.001,
                "horizon": 100,
            }
        },
        "actor": {"lr": 1e-3, "epochs": 2, "minibatch_rows": 6},
        "train": {"iterations": 3},
    }
    run = tether.train(config, reward=distinct_letters).run
    # Tests trace it by the rule of its config, which hardly ever has a score to learn from.
    path = run / "fingerprint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "python_reward": False}))
    return str(run)
