"""Real tiny runs, made once, and a client that speaks to the page as its own browser would."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import changed, distinct_letters
from starlette.testclient import TestClient

import tether
from tether.rollout.local import LocalSampler
from tether.types import Rollout
from tether.view.run_reader import Folder
from tether.view.server import make_app

PORT = 8377


def sometimes(response: str) -> float | None:
    """A reward that fails on some rows."""
    return len(set(response)) / 8 if ord(response[:1] or "a") % 5 else None


KINDS = {
    "gae": {
        "kl__in_reward": {"coef": 0.3, "controller": "adaptive", "target": 0.01, "horizon": 60},
        "advantage": {"gamma": 0.97, "lam": 0.9},
        "actor__update": {"kind": "clip", "eps_low": 0.05, "eps_high": 0.08, "dual_clip": 1.05},
    },
    "gae-bare": {
        "kl__in_reward": {"coef": 0.2, "estimator": "k3", "ablation": True},
        "advantage": {"whiten": False, "truncation": "bootstrap", "lam": 0.8},
        "rollout__max_response_tokens": 30,
        "actor__entropy_coef": 0.02,
    },
    "grpo": {"advantage__estimator": "grpo", "run__rollouts_rows": 6},
    "rloo": {"advantage": {"estimator": "rloo", "whiten": True}, "run__rollouts_rows": 6},
    "remax": {"advantage": {"estimator": "remax", "gamma": 0.9}},
    "reinforce_plus_plus": {"advantage__estimator": "reinforce_plus_plus"},
    "opo": {"advantage__estimator": "opo", "reward__max_failed_share": 1.0},
    "corrected": {
        "rollout__correction": {"kind": "token", "cap": 1.25},
        "actor__aggregation": "seq_mean_token_mean",
        "actor__epochs": 1,
    },
}


class Off(LocalSampler):
    """A sampler whose log-probs differ from the trainer's: by ln 1.5 and -ln 1.25 in turn."""

    def run(self, episodes, choice, *rest) -> Rollout:
        rollout = super().run(episodes, choice, *rest)
        if choice.purpose == "self-check":  # which stops a run whose sampler is off
            return rollout
        off = torch.zeros_like(rollout.rollout_log_probs)
        off[:, ::2], off[:, 1::2] = math.log(1.5), -math.log(1.25)
        off = torch.where(rollout.response_mask, off, 0.0)
        return replace(rollout, rollout_log_probs=rollout.rollout_log_probs - off)


@pytest.fixture(scope="session")
def tiny_view_config(tiny_model_dir, tiny_data) -> dict:
    """Two iterations of 18 rows, all of them written; a run adds its directory."""
    return {
        "threads": 1,
        "run": {"rollouts_every": 1},
        "model": {"actor": tiny_model_dir},
        "data": {"train": tiny_data},
        "rollout": {"prompts": 6, "samples_per_prompt": 3, "max_response_tokens": 11},
        "reward": {"kind": "exact_answer"},
        "kl": {"in_reward": {"coef": 0.2}},
        "actor": {"lr": 3e-3, "epochs": 2, "minibatch_rows": 6},
        "train": {"iterations": 2},
    }


@pytest.fixture(scope="session")
def runs(tiny_view_config, tmp_path_factory) -> Path:
    """A folder with one run of each kind, two iterations long."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    for name, changes in KINDS.items():
        config = changed(tiny_view_config, **changes, run__dir=str(folder / name))
        reward = sometimes if name == "opo" else distinct_letters
        with pytest.MonkeyPatch.context() as patch:
            if name == "corrected":
                patch.setattr("tether.ppo.roles.LocalSampler", Off)
            tether.train(config, reward=reward)
    return folder


@pytest.fixture(scope="session")
def client(runs) -> TestClient:
    return client_of(runs)


def client_of(folder: Path) -> TestClient:
    app = make_app(Folder(folder), "127.0.0.1", PORT)
    return TestClient(app, base_url=f"http://127.0.0.1:{PORT}", raise_server_exceptions=False)


class MadeRun:
    """A run directory written by hand, so that a test can spoil it."""

    def __init__(self, directory: Path, iterations: int = 5, planned: int = 10) -> None:
        self.directory = directory
        (directory / "rollouts").mkdir(parents=True)
        config = {"schema": 1, "advantage": {"estimator": "gae"}, "train": {"iterations": planned}}
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        for name in ("metrics", "timings", "evals", "events"):
            (directory / f"{name}.jsonl").touch()
        for iteration in range(iterations):
            self.iterate(iteration)

    def iterate(self, iteration: int) -> None:
        self.append("metrics", {"iteration": iteration, "score/mean": iteration / 10})
        self.append("timings", {"iteration": iteration, "time/rollout": 1.0 + iteration})

    def append(self, name: str, record: dict) -> None:
        with (self.directory / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({"schema": 1, **record}) + "\n")

    def cut(self, name: str, lines: int) -> None:
        path = self.directory / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


@pytest.fixture
def made(tmp_path) -> MadeRun:
    return MadeRun(tmp_path / "runs" / "made")


@pytest.fixture
def ask(made):
    """The body of GET /api/runs/made/… on the hand-written run."""
    client = client_of(made.directory.parent)

    def ask(path: str = "") -> dict:
        answer = client.get(f"/api/runs/made{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask
