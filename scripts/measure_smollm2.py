"""Train the recipe `smollm2`, export it, ask the export in plain transformers, paste into docs.

Exits 1 if the held-out reward's intervals before and after overlap, or if the exported directory
answers otherwise than the run's own sampler.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from measure import machine, paste
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether import api
from tether.cli.display import Display, results_table
from tether.cli.terminal import printable, table
from tether.config.load import load_config
from tether.data.files import read_rows
from tether.run.reader import read_lines

DOCS = Path(__file__).resolve().parent.parent / "docs"
ASKED = 6  # questions shown side by side, evenly spaced
COMPARED = 24  # answers of the export that must be the sampler's own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/measure-smollm2"))
    parser.add_argument("--iterations", type=int, default=None, help="default: the recipe's")
    parser.add_argument("--threads", type=int, default=None, help="1 where others use the machine")
    args = parser.parse_args()
    fields = {"run.dir": str(args.run)}
    if args.threads is not None:
        fields["threads"] = args.threads
    if args.iterations is not None:
        fields["train.iterations"] = args.iterations
    config = load_config("smollm2", fields)
    began = time.perf_counter()
    with Display(config) as display:
        result = api.train(config, watch=display)
    minutes = (time.perf_counter() - began) / 60
    display.summary(result)

    prompts = [row["prompt"] for row in read_rows(config.data.heldout)]
    exported = args.run / "exported"
    api.export(args.run, exported)
    few = prompts[:: len(prompts) // COMPARED][:COMPARED]
    longest = config.rollout.max_response_tokens
    own = answers_of_run(args.run, few, longest)
    plain = answers_of_transformers(exported, few, longest)
    same = sum(a == b for a, b in zip(own, plain, strict=True))
    asked = few[:: len(few) // ASKED][:ASKED]
    before = answers_of_run(config.model.actor, asked, longest)
    after = [own[few.index(prompt)] for prompt in asked]

    metrics = read_lines(args.run / "metrics.jsonl")
    parts = [name for name in metrics[0] if name.startswith("score/part/")]
    lines = [
        *results_table(result.before, result.after).split("\n"),
        "",
        *(
            f"  {name}: {metrics[0][name]:.2f} → {metrics[-1][name]:.2f} in training"
            for name in parts
        ),
        f"  {len(metrics)} iterations, {minutes:.0f} minutes with loading and both evaluations.",
        f"  Exported: {same} of {len(few)} greedy answers the same in plain transformers.",
        f"  {machine()}",
    ]
    rows = [["question", "before", "after"], *map(list, zip(asked, before, after, strict=True))]
    shown = table([[printable(cell) for cell in row] for row in rows], numbers_from=9)
    print("\n".join([*lines, "", shown]))
    paste(DOCS / "real-models.md", "table: made by `scripts/measure_smollm2.py`", lines)
    paste(
        DOCS / "real-models.md", "answers: made by `scripts/measure_smollm2.py`", shown.split("\n")
    )
    apart = result.after.sampled.apart_from(result.before.sampled)
    sys.exit(0 if apart and same == len(few) else 1)


def answers_of_run(model: str | Path, prompts: list[str], max_tokens: int) -> list[str]:
    talker = api.Talker(str(model), max_tokens=max_tokens)
    return [talker.respond(prompt)[0][0] for prompt in prompts]


@torch.no_grad()
def answers_of_transformers(directory: Path, prompts: list[str], max_tokens: int) -> list[str]:
    """Greedy, one prompt at a time, with nothing of tether."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    return answers


if __name__ == "__main__":
    main()
