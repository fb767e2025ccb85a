"""Fingerprints of ten tiny runs: which number of which run a change moved, and by how much.

    python tests/golden/golden.py --check            against golden.json (the default)
    python tests/golden/golden.py --write            make golden.json anew
    python tests/golden/golden.py --compare FOLDER   this checkout against another, file by file

A fingerprint is the SHA-256 of a run's metrics, evaluations, rollouts and final weights. Bits are
comparable only where the same torch does the same arithmetic; elsewhere the stored metrics are held
to a tolerance, and a second run to the bits of the first. Whoever moves a number on purpose writes
the file anew and names both numbers in the commit.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether import api

HERE = Path(__file__).resolve().parent
RECORD = HERE / "golden.json"
# Of a stored metric on another processor, in units of max(1, |metric|). Conjugate gradients
# multiply the rounding of their products.
TOLERANCE = 1e-5
TOLERANCE_OF = {"trpo": 1e-3}
CHARACTERS = "0123456789+-=?abcdefgh[]"
SPECIAL = ["<|end|>", "<|pad|>"]

# 9 rows of different lengths in minibatches of 4: nothing divides evenly.
COMMON: dict[str, Any] = {
    "threads": 1,
    "seed": 5,
    "run": {"rollouts_every": 1},
    "rollout": {"prompts": 3, "samples_per_prompt": 3, "max_response_tokens": 12},
    "reward": {"kind": "length"},  # replaced by `score`
    "actor": {"lr": 3e-4, "epochs": 2, "minibatch_rows": 4, "microbatch_tokens": 60},
    "train": {"iterations": 3, "eval_prompts": 2},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {
        "actor": {"entropy_coef": 0.01, "update": {"kind": "clip", "eps_high": 0.28}},
        "critic": {"lr": 1e-3, "minibatch_rows": 7},
        "kl": {"in_reward": {"controller": "adaptive", "target": 0.5, "horizon": 100}},
    },
    "grpo": {"advantage": {"estimator": "grpo"}, "kl": {"in_loss": {"coef": 0.1}}},
    "remax": {"advantage": {"estimator": "remax"}, "actor": {"update": {"kind": "gspo"}}},
    "trpo": {"actor": {"update": {"kind": "trpo", "cg_iterations": 4}}},
    "penalty": {
        "advantage": {"estimator": "rloo"},
        "actor": {"update": {"kind": "penalty", "estimator": "full"}},
    },
    "shared trunk": {"critic": {"shared_trunk": True, "clip": None}},
    "lora": {"model": {"lora": {"rank": 2}, "critic_lora": {"rank": 2}}},
    "tool": {
        "advantage": {"estimator": "dr_grpo"},
        "rollout": {"max_response_tokens": 30, "max_observation_tokens": 8, "max_turns": 3},
    },
}
ON_TWO_PROCESSES = ("clip", "grpo")
TOOL = '''
class Count:
    """How many characters stand between two of its marks."""
    pattern = "a{}b"
    reply = "[{}]"

    def __call__(self, text):
        return str(len(text))

count = Count()
'''
FILES = ("metrics", "evals", "rollouts", "weights")


def score(response: str) -> float:
    """Coarse, so that some groups tie."""
    return len(set(response)) // 3 / 4


# The world of the runs.


def build_world(folder: Path) -> None:
    """Write a random two-layer model with a token per character, twelve prompts and a tool."""
    alphabet = {token: i for i, token in enumerate([*CHARACTERS, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[1]
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(alphabet),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=96,
            initializer_range=0.1,
            tie_word_embeddings=True,
            eos_token_id=alphabet[SPECIAL[0]],
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    rows = [{"prompt": f"{a}+{b}=?"} for a in range(4) for b in (1, 22, 333)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tool.py").write_text(TOOL)


def config_of(name: str, folder: Path, processes: int = 1) -> dict[str, Any]:
    given = {
        "model": {"actor": str(folder / "model")},
        "data": {"train": str(folder / "prompts.jsonl"), "heldout": str(folder / "prompts.jsonl")},
        "run": {"dir": str(folder / "runs" / run_name(name, processes))},
    }
    if name == "tool":
        given["rollout"] = {"tools": [f"{folder / 'tool.py'}:count"]}
    if processes > 1:
        given["model"]["dtype"] = "float64"
    return _merged(_merged(COMMON, CONFIGS[name]), given)


def _merged(a: dict, b: dict) -> dict:
    both = {k: _merged(a[k], b[k]) for k in a.keys() & b.keys() if isinstance(a[k], dict)}
    return {**a, **b, **both}


def run_name(name: str, processes: int) -> str:
    return name if processes == 1 else f"{name} on {processes} processes"


def all_runs() -> list[str]:
    return [*CONFIGS, *(run_name(name, 2) for name in ON_TWO_PROCESSES)]


def train_alone(folder: Path) -> None:
    for name in CONFIGS:
        train(config_of(name, folder))


def train_on_two(folder: Path) -> None:
    from dist.processes import run_processes  # beside this folder; see `main`

    for name in ON_TWO_PROCESSES:
        run_processes(2, train, config_of(name, folder, 2))


def train(config: dict[str, Any]) -> None:
    api.train(config, reward=score)


# What a run left, and its fingerprint.


def read_run(run: Path) -> dict[str, Any]:
    """Metrics, evaluations and rollouts as lines, weights by name; no time, no place."""
    rollouts = [line for path in sorted(run.glob("rollouts/*.jsonl")) for line in _lines(path)]
    for row in rollouts:
        row["data_file"] = Path(row["data_file"]).name
        for call in row.get("calls", []):
            call.pop("seconds", None)
    checkpoint = max(run.glob("checkpoints/0*"))
    weights = {
        f"{path.relative_to(checkpoint).parts[0].partition('-')[0]}/{name}": tensor
        for path in sorted(checkpoint.rglob("*.safetensors"))
        if "optimizer" not in path.name
        for name, tensor in load_file(path).items()
    }
    return {
        "metrics": _lines(run / "metrics.jsonl"),
        "evals": _lines(run / "evals.jsonl"),
        "rollouts": rollouts,
        "weights": {name: weights[name] for name in sorted(weights)},
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def fingerprint(found: dict[str, Any]) -> dict[str, str]:
    """The SHA-256 of each part of `read_run`."""
    hashes = {}
    for file in FILES:
        digest = hashlib.sha256()
        if file == "weights":
            for name, tensor in found[file].items():
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        else:
            digest.update(json.dumps(found[file], sort_keys=True).encode())
        hashes[file] = digest.hexdigest()
    return hashes


def machine() -> dict[str, str]:
    """What the bits depend on: the names, and the arithmetic itself on fixed numbers."""
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-3, 3, 4096, dtype=dtype).view(32, 128)
        for y in (x @ x.T, x @ x[:7].T, x.exp(), x.softmax(-1), x.sum(0), x.rsqrt(), x.tanh()):
            digest.update(y.contiguous().numpy().tobytes())
    return {
        "torch": torch.__version__.partition("+")[0],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": digest.hexdigest()[:16],
    }


def record_of(folder: Path, runs: list[str]) -> dict[str, Any]:
    """What golden.json holds: fingerprints, and every metric as it was."""
    found = {name: read_run(folder / "runs" / name) for name in runs}
    return {
        "made_with": machine(),
        "runs": {
            name: {
                "sha256": fingerprint(run),
                "metrics": {
                    key: [line.get(key) for line in run["metrics"]]
                    for key in run["metrics"][-1]
                    if key not in ("schema", "iteration")
                },
            }
            for name, run in found.items()
        },
    }


# Comparing.


def moved_metrics(
    stored: dict[str, list], found: dict[str, list], tolerance: float
) -> Iterator[str]:
    """A sentence per metric that is new, gone, or further off than the tolerance, earliest
    iteration first."""
    for key in sorted(stored.keys() ^ found.keys()):
        yield f"metric {key} is {'new' if key in found else 'gone'}"
    moved = []
    for key in stored.keys() & found.keys():
        pairs = enumerate(zip(stored[key], found[key], strict=True))
        far = [(i, a, b) for i, (a, b) in pairs if not _close(a, b, tolerance)]
        moved += [(far[0][0], key, *far[0][1:])] if far else []
    for iteration, key, a, b in sorted(moved, key=lambda item: item[:2]):
        yield f"iteration {iteration}: {key} is {b!r}, was {a!r}"


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) if tolerance else a == b
    return a == b


def check(name: str, stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What differs between a run on record and the run made here, as sentences."""
    same_machine = stored["made_with"] == found["made_with"]
    a, b = stored["runs"].get(name), found["runs"][name]
    if a is None:
        return [f"{name}: not on record; write it with --write"]
    tolerance = 0 if same_machine else TOLERANCE_OF.get(name, TOLERANCE)
    moved = list(moved_metrics(a["metrics"], b["metrics"], tolerance))
    differs = [f for f in FILES if a["sha256"][f] != b["sha256"][f]] if same_machine else []
    if moved and not differs:
        differs = ["metrics"]
    return [f"{name}: {file} differ{_first(moved, file)}" for file in differs]


def _first(moved: list[str], file: str) -> str:
    if file != "metrics" or not moved:
        return ""
    rest = f" ({len(moved) - 1} more metrics differ)" if len(moved) > 1 else ""
    return f"; {moved[0]}{rest}"


def unlike(stored: dict[str, Any]) -> str | None:
    """Why the bits on record cannot be asked of this machine, if so."""
    here, there = machine(), stored["made_with"]
    if here == there:
        return None
    names = [f"{key} {there[key]} (here {here[key]})" for key in here if here[key] != there[key]]
    return (
        f"The record was made with {', '.join(names)}: bits are compared between two runs made "
        f"here, and with the record only metrics, to {TOLERANCE:g}."
    )


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """The first place in which two JSON values or two tensors differ, with both."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == b.dtype and torch.equal(a, b):
            return None
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{where}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        return f"{where}: by up to {float((a - b).abs().max()):.3g}"
    if isinstance(a, dict) and isinstance(b, dict):
        only = sorted(a.keys() ^ b.keys())
        found = [first_difference(a[k], b[k], f"{where} {k}") for k in a if k in b]
        return next(filter(None, found), None) or (
            f"{where} {only[0]}: only in the {'first' if only[0] in a else 'second'}"
            if only
            else None
        )
    if isinstance(a, list) and isinstance(b, list):
        pairs = enumerate(zip(a, b, strict=False))
        found = [first_difference(x, y, f"{where}[{i}]") for i, (x, y) in pairs]
        length = f"{where}: {len(a)} and {len(b)} items" if len(a) != len(b) else None
        return next(filter(None, found), length)
    return None if a == b and type(a) is type(b) else f"{where}: {a!r} and {b!r}"


def compare_folders(a: Path, b: Path) -> list[str]:
    """What differs between the runs of two checkouts, file by file."""
    said = []
    for name in sorted({path.name for path in [*(a / "runs").iterdir(), *(b / "runs").iterdir()]}):
        if not ((a / "runs" / name).exists() and (b / "runs" / name).exists()):
            said.append(f"{name}: run by one checkout only")
            continue
        one, other = read_run(a / "runs" / name), read_run(b / "runs" / name)
        for file in FILES:
            difference = first_difference(one[file], other[file])
            said += [f"{name}: {file} differ; {difference.strip()}"] if difference else []
    return said


# The commands.


def make(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    build_world(folder)
    train_alone(folder)
    train_on_two(folder)
    return record_of(folder, all_runs())


def run_checkout(checkout: Path, folder: Path) -> None:
    """Make the runs with another checkout's source, in its own words where it has this script."""
    if not (checkout / "src/tether").is_dir():
        raise SystemExit(f"{checkout} is not a checkout: it has no src/tether.")
    own = checkout / "tests/golden/golden.py"
    script = own if own.is_file() else Path(__file__)
    paths = os.pathsep.join([str(checkout / "src"), str(script.parents[1])])
    subprocess.run(
        [sys.executable, str(script), "--run", str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )


def command_check(folder: Path) -> list[str]:
    stored = json.loads(RECORD.read_text())
    found = make(folder / "first")
    said = [sentence for name in all_runs() for sentence in check(name, stored, found)]
    why = unlike(stored)
    if why is not None:
        print(why)
        again = make(folder / "second")
        said += [f"{s} (repeated here)" for name in all_runs() for s in check(name, found, again)]
    return said


def write_record(record: dict[str, Any]) -> None:
    """One line per metric, so that a moved number is a changed line."""
    runs = [
        f'  {json.dumps(name)}: {{\n   "sha256": {json.dumps(run["sha256"], indent=4)},\n'
        + '   "metrics": {\n'
        + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in run["metrics"].items())
        + "\n   }\n  }"
        for name, run in record["runs"].items()
    ]
    made_with = json.dumps(record["made_with"])
    RECORD.write_text(
        f'{{\n "made_with": {made_with},\n "runs": {{\n' + ",\n".join(runs) + "\n }\n}\n"
    )


def main() -> int:
    sys.path.insert(0, str(HERE.parent))
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--check", action="store_true", help="against golden.json (the default)")
    wanted.add_argument("--write", action="store_true", help="make golden.json anew")
    wanted.add_argument("--compare", type=Path, metavar="CHECKOUT", help="run both and compare")
    wanted.add_argument("--run", type=Path, metavar="FOLDER", help="only make the runs there")
    given = parser.parse_args()
    if given.run is not None:
        given.run.mkdir(parents=True, exist_ok=True)
        make(given.run)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if given.write:
            write_record(make(Path(folder)))
            return 0
        if given.compare is not None:
            for name, checkout in (("here", HERE.parents[1]), ("there", given.compare.resolve())):
                run_checkout(checkout, Path(folder, name))
            said = compare_folders(Path(folder, "there"), Path(folder, "here"))
        else:
            said = command_check(Path(folder))
    print("\n".join(said) or "Every file of every run is the same.")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
