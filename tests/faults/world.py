"""A small run with everything that could be lost: critic, adaptive KL, shuffled data, a schedule,
a refreshed reference, evaluations, rollouts, a reward in its own process."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import yaml
from tiny_models import tiny_llama
from transformers import AutoTokenizer

from tether import assets

ITERATIONS = 8
PROMPTS = 12  # 4 an iteration: a data pass takes three, so eight hold two and more


@dataclass(frozen=True)
class World:
    """Where the model, the data and the recipe lie."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def data(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def model(self) -> Path:
        return self.folder / "model"


def make_world(folder: Path) -> World:
    world = World(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(assets.resolve("tether:starter"))
    tokenizer.save_pretrained(world.model)
    model = tiny_llama(len(tokenizer), tokenizer.eos_token_id, initializer_range=0.2)
    model.save_pretrained(world.model)
    rows = [{"prompt": f"{a}+{b}=?", "answer": str(a + b)} for a in range(4) for b in (1, 22, 33)]
    assert len(rows) == PROMPTS
    world.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def variety(response):\n    return len(set(response)) / 8\n")
    world.recipe.write_text(yaml.safe_dump(recipe(world)))
    return world


def recipe(world: World) -> dict:
    return {
        "threads": 1,
        "run": {"rollouts_every": 1, "rollouts_rows": 4},
        "model": {"actor": str(world.model)},
        "data": {"train": str(world.data), "heldout": str(world.data)},
        "rollout": {"prompts": 4, "samples_per_prompt": 2, "max_response_tokens": 6},
        "reward": {"kind": f"{world.folder / 'reward.py'}:variety"},
        "kl": {
            "in_reward": {"coef": 0.1, "controller": "adaptive", "target": 0.5, "horizon": 100},
            "refresh_reference_every": 3,
        },
        "actor": {"lr": 1e-3, "schedule": "linear", "epochs": 2, "minibatch_rows": 3},
        "critic": {"lr": 1e-3},
        "train": {
            "iterations": ITERATIONS,
            "eval_every": 3,
            "eval_prompts": 4,
            "checkpoint_every": 2,
        },
    }


def fingerprint(run: Path) -> dict[str, str]:
    """SHA-256 of all that a finished run must have in common with one that was never stopped:
    metrics, evaluations, rollouts, and every file of the last checkpoint."""
    last = run / "checkpoints" / f"{ITERATIONS:06d}"
    files = [run / "metrics.jsonl", run / "evals.jsonl", *(run / "rollouts").iterdir()]
    files += [path for path in last.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def iterations_written(run: Path, name: str) -> list[int]:
    """The iterations of a file's lines: none lost, none doubled, in order."""
    lines = (run / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["iteration"] for line in lines]
