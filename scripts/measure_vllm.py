"""Train the recipe `arithmetic` with each sampler and say how far apart they are (`make vllm`).

With --write the table goes into docs/vllm.md. Exits 1 if a run with vLLM ends below 75% on sampled
held-out prompts, or its intervals before and after overlap.
"""

import argparse
import sys
from pathlib import Path

from measure import machine, paste

from tether import api
from tether.cli.terminal import score_text, table
from tether.config.load import load_config
from tether.run.reader import read_lines
from tether.train.training import Result

DOCS = Path(__file__).resolve().parent.parent / "docs"
ENOUGH = 0.75
SAMPLERS = {
    "local": {},
    "vllm, own process": {"rollout.sampler": "vllm"},
    "vllm, colocated": {"rollout.sampler": "vllm", "rollout.vllm.colocated": True},
    "vllm, bfloat16 base": {  # five iterations: for the mismatch
        "rollout.sampler": "vllm",
        "model.dtype": "bfloat16",
        "model.lora.rank": 16,
        "model.critic_dtype": "float32",
        "train.iterations": 5,
    },
}
HEADING = ["sampler", "before", "after", "mean |d|", "max |d|", "KL", "share", "s/rollout"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/measure-vllm"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="paste the table into docs/vllm.md")
    args = parser.parse_args()
    rows, learnt = [HEADING], []
    for number, (name, fields) in enumerate(SAMPLERS.items()):
        common = {
            "threads": args.threads,
            "seed": args.seed,
            "train.checkpoint_every": 0,
            "run.dir": str(args.folder / str(number)),
            "run.overwrite": True,
        }
        result = api.train(load_config("arithmetic", {**common, **fields}))
        rows.append([name, *summary(result)])
        print(table(rows), flush=True)
        if fields and "model.dtype" not in fields:
            apart = result.after.sampled.apart_from(result.before.sampled)
            learnt.append(apart and result.after.sampled.mean >= ENOUGH)
    lines = [
        *table(rows).split("\n"),
        "",
        "Sampled held-out accuracy, one seed; mismatch over all iterations: mean and largest |d|,",
        "mean of e^d - d - 1, smallest effective share; seconds of the median rollout of 256 rows.",
        "bfloat16: an adapter on a base of it, five iterations only.",
        "",
        f"  Threads {args.threads}. {machine()}",
    ]
    print("\n".join(lines))
    if args.write:
        paste(DOCS / "vllm.md", "scripts/measure_vllm.py --write", lines)
    sys.exit(0 if all(learnt) else 1)


def summary(result: Result) -> list[str]:
    metrics = read_lines(result.run / "metrics.jsonl")
    seconds = sorted(x["time/rollout"] for x in read_lines(result.run / "timings.jsonl"))
    before, after = (score_text(e.sampled.mean, True) for e in (result.before, result.after))
    largest = max(x["rollout/log_prob_diff_max"] for x in metrics)
    rest = ["", f"{largest:.1e}", "", ""]
    if "rollout/mismatch_kl" in metrics[0]:
        gaps = [x["rollout/log_prob_diff_mean"] for x in metrics]
        kls = [x["rollout/mismatch_kl"] for x in metrics]
        share = min(x["rollout/effective_share"] for x in metrics)
        rest = [
            f"{sum(gaps) / len(gaps):.1e}",
            f"{largest:.1e}",
            f"{sum(kls) / len(kls):.1e}",
            f"{share:.6f}",
        ]
    return [before, after, *rest, f"{seconds[len(seconds) // 2]:.2f}"]


if __name__ == "__main__":
    main()
