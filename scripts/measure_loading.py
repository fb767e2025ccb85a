"""What loading takes: the peak memory of a process that loads a random Llama of 500 million weights
whole, and of each of two that read their shards of it, above what they had before. With --write the
table goes into docs/scaling.md."""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOUND = 0.6  # of the whole
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 22,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "tie_word_embeddings": False,
}


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith(f"{name}:"))


def load(folder: str, in_parts: bool) -> None:
    """In a process of its own: what loading the model takes at its peak, and afterwards."""
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401 (before the measurement)

    from tether.dist.fsdp import shard
    from tether.dist.world import entered
    from tether.models.forward import trunk
    from tether.models.loading import load_causal_lm
    from tether.models.stored import read_own_parts

    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    with entered("cpu", 1, 600.0):
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        model = load_causal_lm(folder, "float32", cpu, in_parts=in_parts)
        fill = partial(read_own_parts, device=cpu)
        shard(model, trunk(model), trunk(model), keep_whole=True, fill=fill)
        peak, after = status("VmHWM") - before, status("VmRSS") - before
        print(json.dumps({"peak": peak, "after": after}), flush=True)


def measured(folder: Path, processes: int, in_parts: bool) -> dict[str, int]:
    """The highest of any process."""
    child = [str(Path(__file__).resolve()), "--child", str(folder), str(int(in_parts))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), *child]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {key: max(one[key] for one in found) for key in ("peak", "after")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="paste the table into the document")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        load(arguments.child[0], bool(int(arguments.child[1])))
        return 0
    from measure import machine, paste
    from transformers import LlamaConfig, LlamaForCausalLM

    from tether.cli.terminal import table
    from tether.support.units import byte_text, si

    with tempfile.TemporaryDirectory(prefix="tether-loading-", dir=ROOT) as made:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        weights = sum(weight.numel() for weight in model.parameters())
        model.save_pretrained(made, max_shard_size="500MB")
        del model
        folder = Path(made)
        kinds = [
            ("whole, one process", measured(folder, 1, False)),
            ("whole, then sharded over two", measured(folder, 2, False)),
            ("in parts, two processes", measured(folder, 2, True)),
        ]
    whole = kinds[0][1]["peak"]
    rows = [["loading", "peak of a process", "of the whole", "afterwards"]]
    for what, found in kinds:
        sizes = byte_text(found["peak"]), f"{found['peak'] / whole:.0%}", byte_text(found["after"])
        rows.append([what, *sizes])
    head = f"a Llama of {si(weights)} weights in float32"
    lines = [head, "", *table(rows).splitlines(), "", machine()]
    print("\n".join(lines))
    if arguments.write:
        paste(ROOT / "docs" / "scaling.md", "measure_loading", lines)
    return int(kinds[-1][1]["peak"] > BOUND * whole)


if __name__ == "__main__":
    sys.exit(main())
