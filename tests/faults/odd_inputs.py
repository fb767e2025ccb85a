"""I3: models, prompts and batches at the edge of what makes sense.

Each is trained on to finite numbers, or refused by name before training.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from faults.attempt import Attempt, no_traceback, null_metrics, refused, spoiled_weights, train
from faults.row import Row, tally
from faults.world import World

Fields = dict[str, object]


@dataclass(frozen=True)
class Odd:
    """`make` puts the oddity into a copy of the model, or answers with the fields that make it;
    `judge` says what is wrong with how the run took it."""

    name: str
    make: Callable[[World, Path], Fields]
    judge: Callable[[Attempt], str | None]


def row_i3(world: World, folder: Path, tries: int, seed: int) -> Row:
    verdicts = [_try(world, folder / str(i), odd, seed) for i, odd in enumerate(ODDITIES[:tries])]
    return tally("I3", "empty responses, odd tokens, long prompts, lone and masked rows", verdicts)


def _try(world: World, folder: Path, odd: Odd, seed: int) -> str | None:
    shutil.copytree(world.model, folder / "model")
    fields = {
        "model.actor": folder / "model",
        "train.iterations": 3,
        "run.rollouts_rows": 8,
        "seed": seed,
        **odd.make(world, folder),
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    tried = train(folder, world.recipe, *words)
    problem = no_traceback(tried) or odd.judge(tried)
    return None if problem is None else f"{odd.name}: {problem}"


def _edit(path: Path, **changes: object) -> None:
    """Fields of a JSON file; None takes one away."""
    merged = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def _end_at(ids: Callable[[int], list[int]]) -> Callable[[World, Path], Fields]:
    """Every one of these ids ends a response."""

    def make(world: World, folder: Path) -> Fields:
        size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        _edit(folder / "model" / "generation_config.json", eos_token_id=ids(size))
        return {}

    return make


def _no_eos(world: World, folder: Path) -> Fields:
    _edit(folder / "model" / "config.json", eos_token_id=None)
    _edit(folder / "model" / "generation_config.json", eos_token_id=None)
    _edit(folder / "model" / "tokenizer_config.json", eos_token=None)
    return {}


def _no_pad(world: World, folder: Path) -> Fields:
    _edit(folder / "model" / "tokenizer_config.json", pad_token=None)
    _edit(folder / "model" / "config.json", pad_token_id=None)
    return {}


def _pad_is_eos(world: World, folder: Path) -> Fields:
    settings = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    eos = json.loads((folder / "model" / "generation_config.json").read_text())["eos_token_id"]
    _edit(folder / "model" / "tokenizer_config.json", pad_token=settings["eos_token"])
    _edit(folder / "model" / "config.json", pad_token_id=eos)
    return _end_at(lambda size: [eos, *range(0, size, 2)])(world, folder)


def _long_prompt(**fields: object) -> Callable[[World, Path], Fields]:
    def make(world: World, folder: Path) -> Fields:
        data = folder / "long.jsonl"
        data.write_text('{"prompt": "1+1=?"}\n' + json.dumps({"prompt": "7" * 200}) + "\n")
        return {"data.train": data, "data.heldout": "null", **fields}

    return make


def _masked_minibatch(world: World, folder: Path) -> Fields:
    """Steps of one row each, and a reward without an opinion on some rows."""
    (folder / "reward.py").write_text(
        "def some(response):\n    return len(response) if len(set(response)) % 3 else None\n"
    )
    return {
        "reward.kind": f"{folder / 'reward.py'}:some",
        "reward.max_failed_share": 1,
        "actor.minibatch_rows": 1,
    }


def _one_row(world: World, folder: Path) -> Fields:
    return {"rollout.prompts": 1, "rollout.samples_per_prompt": 1, "actor.minibatch_rows": 1}


def _all_alike(world: World, folder: Path) -> Fields:
    """Blocks that add nothing and tokens that stand far apart: each is followed by itself."""
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif "embed_tokens" in name:
            tensor.mul_(5)
    save_file(weights, path, metadata={"format": "pt"})
    return {"advantage.estimator": "grpo", "rollout.samples_per_prompt": 2}


def _finite(tried: Attempt) -> str | None:
    if tried.code != 0:
        return f"code {tried.code}, {tried.complaint!r}"
    if nulls := null_metrics(tried):
        return f"{nulls[0]} is not finite"
    return "weights are not finite" if spoiled_weights(tried.run) else None


def _finite_where(holds: Callable[[list[dict]], bool], what: str) -> Callable:
    """Finite, and the oddity did occur: a condition on the rows of all iterations."""

    def judge(tried: Attempt) -> str | None:
        files = sorted((tried.run / "rollouts").glob("*.jsonl"))
        rows = [row for file in files for row in tried.lines(f"rollouts/{file.name}")]
        return _finite(tried) or (None if rows and holds(rows) else what)

    return judge


def _refused(*words: str) -> Callable[[Attempt], str | None]:
    return lambda tried: refused(tried, *words)


def _is_empty(row: dict) -> bool:
    return (
        row["response"] == "" and len(row["response_ids"]) == 1 and row["response_mask"] == [True]
    )


def _masked_steps(tried: Attempt) -> str | None:
    kinds = {e["kind"] for e in tried.lines("events.jsonl")}
    return _finite(tried) or (None if "empty_minibatch" in kinds else "no minibatch was masked")


ODDITIES = [
    Odd(
        "empty response",
        _end_at(lambda size: list(range(0, size, 2))),
        _finite_where(lambda rows: any(map(_is_empty, rows)), "no response is empty"),
    ),
    Odd(
        "all EOS",
        _end_at(lambda size: list(range(size))),
        _finite_where(lambda rows: all(map(_is_empty, rows)), "a response is not empty"),
    ),
    Odd("no EOS token", _no_eos, _refused("names no EOS token", "eos_token_id")),
    Odd("no pad token", _no_pad, _finite),
    Odd(
        "pad = EOS",
        _pad_is_eos,
        _finite_where(
            lambda rows: all(
                all(r["response_mask"]) and len(r["response_mask"]) == len(r["response_ids"])
                for r in rows
            ),
            "an EOS is masked as if it were padding",
        ),
    ),
    Odd(
        "prompt longer than the context",
        _long_prompt(),
        _refused("long.jsonl, line 2", "the model's positions leave room for 122"),
    ),
    Odd(
        "prompt longer than max_prompt_tokens",
        _long_prompt(**{"data.max_prompt_tokens": 50}),
        _refused("long.jsonl, line 2", "data.max_prompt_tokens = 50"),
    ),
    Odd("all-masked minibatch", _masked_minibatch, _masked_steps),
    Odd("batch of one", _one_row, _finite),
    Odd(
        "samples all alike",
        _all_alike,
        _finite_where(
            lambda rows: all(
                r["policy_advantages"] == [0.0] * len(r["response_ids"]) for r in rows
            ),
            "alike samples have an advantage over each other",
        ),
    ),
]
