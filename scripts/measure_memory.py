"""Does `tether check` foresee what a run takes? Random models of at least 1 GB of state train two
iterations each in processes of their own; the kernel's high-water mark above the bare process is
held against the plan's peak. With --write the table goes into docs/scaling.md."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

ROOT = Path(__file__).resolve().parent.parent
BOUND = 0.15  # how far plan and measurement may lie apart


@dataclass(frozen=True)
class Case:
    """A Llama of random weights and what is done with it."""

    what: str
    shape: dict[str, int]
    fields: dict[str, Any]
    processes: int = 1
    rollout: dict[str, int] = field(default_factory=dict)


SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}

CASES = {
    "full": Case(
        "all weights, critic, reference; float32",
        {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 8},
        {"actor.microbatch_tokens": 1024, "critic.microbatch_tokens": 1024},
        rollout={"prompts": 6, "samples_per_prompt": 2, "max_response_tokens": 112},
    ),
    "lora": Case(
        "LoRA, value head on the shared trunk",
        {**LARGE, "num_attention_heads": 16, "num_key_value_heads": 8},
        {"model.lora.rank": 16, "critic.shared_trunk": True, "actor.microbatch_tokens": 512},
        rollout={"prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 80},
    ),
    "lora_both": Case(
        "LoRA on the actor and on a critic of its own",
        {**LARGE, "num_attention_heads": 16, "num_key_value_heads": 8},
        {
            "model.lora.rank": 16,
            "model.critic_lora.rank": 16,
            "actor.microbatch_tokens": 512,
            "critic.microbatch_tokens": 512,
        },
        rollout={"prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 80},
    ),
    "grpo": Case(
        "grpo, no critic, long rows, layers recomputed",
        {**SMALL, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
        {
            "advantage.estimator": "grpo",
            "model.gradient_checkpointing": True,
            "actor.microbatch_tokens": 1024,
        },
        rollout={"prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 400},
    ),
    "replicated": Case(
        "the first on two processes, weights replicated",
        {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 8},
        {"actor.microbatch_tokens": 512, "critic.microbatch_tokens": 512, "launch.num_workers": 2},
        processes=2,
        rollout={"prompts": 4, "samples_per_prompt": 2, "max_response_tokens": 80},
    ),
    "sharded": Case(
        "the same, weights sharded",
        {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 8},
        {
            "actor.microbatch_tokens": 512,
            "critic.microbatch_tokens": 512,
            "launch.num_workers": 2,
            "launch.weights": "sharded",
        },
        processes=2,
        rollout={"prompts": 4, "samples_per_prompt": 2, "max_response_tokens": 80},
    ),
    "bfloat16": Case(
        "grpo, LoRA on a bfloat16 base",
        {**LARGE, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8},
        {
            "advantage.estimator": "grpo",
            "model.dtype": "bfloat16",
            "model.lora.rank": 16,
            "actor.microbatch_tokens": 512,
        },
        rollout={"prompts": 2, "samples_per_prompt": 2, "max_response_tokens": 80},
    ),
}


def make_model(shape: dict[str, int], folder: Path) -> None:
    """Random weights and the starter's tokenizer: next to nothing it says is an end."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from tether import assets

    tokenizer = AutoTokenizer.from_pretrained(assets.resolve("tether:starter"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_recipe(case: Case, folder: Path) -> Path:
    """The arithmetic recipe on that model, for two iterations."""
    from tether.config.load import load_config

    changes = {
        "model.actor": str(folder / "model"),
        "data.heldout": None,
        "run.dir": str(folder / "run"),
        "run.rollouts_every": 0,
        "train.iterations": 2,
        "actor.lr": 1e-6,
        "actor.epochs": 1,
        "actor.minibatch_rows": case.rollout["prompts"] * case.rollout["samples_per_prompt"],
        "critic.epochs": None,
        "critic.minibatch_rows": None,
        "critic.lr": None,
        "reward.max_failed_share": 1.0,
        **{f"rollout.{name}": value for name, value in case.rollout.items()},
        **case.fields,
    }
    path = folder / "recipe.yaml"
    path.write_text(load_config("arithmetic", changes).to_yaml(), encoding="utf-8")
    return path


def high_water() -> int:
    """The most memory that this process has had so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("VmHWM"))


def train(recipe: str, run: str) -> None:
    """In a process of its own: what it has before and after, as JSON."""
    import peft  # noqa: F401 (some runs would import it on the way)

    from tether import api
    from tether.config.load import load_config

    bare = high_water()
    api.train(load_config(recipe, {"run.dir": run}))
    print(json.dumps({"bare": bare, "peak": high_water()}), flush=True)


def measured(recipe: Path, run: Path, processes: int = 1) -> int:
    """The highest peak of any process above its bare self."""
    child = [str(Path(__file__).resolve()), "--child", str(recipe), str(run)]
    command = [sys.executable, *child]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [sys.executable, *torchrun, str(processes), *child]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(one["peak"] - one["bare"] for one in found)


def compare(case: Case, folder: Path) -> list[str]:
    """A line of the table."""
    from tether import api
    from tether.support.units import byte_text

    make_model(case.shape, folder / "model")
    recipe = make_recipe(case, folder)
    found = measured(recipe, folder / "run", case.processes)
    plan = api.check({**_mapping(recipe), "run": {"dir": str(folder / "unused")}})
    planned = plan.memory.peak
    gap = planned.size / found - 1
    row = [case.what, byte_text(plan.state_bytes), byte_text(planned.size), byte_text(found)]
    print(row, f"{gap:+.1%}", planned.when, flush=True)
    for phase in plan.memory.phases:
        print("   ", phase.when, byte_text(phase.size), flush=True)
    return [*row, f"{gap:+.1%}", planned.when]


def _mapping(recipe: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(recipe.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="paste the table into the document")
    parser.add_argument("--only", choices=CASES, action="append", help="some of the cases")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        train(*arguments.child)
        return 0
    from measure import machine, paste

    from tether.cli.terminal import table

    rows = [["run of two iterations", "state", "planned", "measured", "apart", "peak in"]]
    for name in arguments.only or CASES:
        with tempfile.TemporaryDirectory(prefix="tether-memory-", dir=ROOT) as folder:
            rows.append(compare(CASES[name], Path(folder)))
    lines = [*table(rows).splitlines(), "", machine()]
    print("\n".join(lines))
    if arguments.write:
        paste(ROOT / "docs" / "scaling.md", "measure_memory", lines)
    return int(any(abs(float(row[4].rstrip("%"))) > 100 * BOUND for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
