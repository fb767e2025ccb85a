"""`tether …` with a sampler that keeps what it returned, or returns what another run kept.

    python scripts/replay.py record FOLDER train arithmetic …
    torchrun --nproc-per-node 2 scripts/replay.py replay FOLDER train arithmetic …

Tokens that were sampled once are then the same for every number of processes, and what is left of
a difference is the rounding of training.
"""

import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tether.cli.main import main
from tether.rollout.local import LocalSampler
from tether.types import Rollout

REASONS = ("eos", "stop", "length", "truncated")


def install(mode: str, folder: Path) -> None:
    """From here on every local sampler of this process records or replays, call by call."""
    sample, calls = LocalSampler.run, count()

    def record(self: LocalSampler, *arguments: object) -> Rollout:
        rollout = sample(self, *arguments)
        reasons = torch.tensor([REASONS.index(reason) for reason in rollout.finish_reasons])
        tensors = {k: v.contiguous() for k, v in vars(rollout).items() if torch.is_tensor(v)}
        save_file({**tensors, "reasons": reasons}, folder / f"{next(calls):04d}.safetensors")
        return rollout

    def replay(
        self: LocalSampler, episodes: Sequence[object], choice: object, numbers: Sequence[int]
    ) -> Rollout:
        kept = load_file(folder / f"{next(calls):04d}.safetensors")
        mine = {name: tensor[list(numbers)] for name, tensor in kept.items()}
        reasons = mine.pop("reasons").tolist()
        return Rollout(**mine, finish_reasons=tuple(REASONS[i] for i in reasons))

    folder.mkdir(parents=True, exist_ok=True)
    LocalSampler.run = record if mode == "record" else replay


if __name__ == "__main__":
    mode, folder, *sys.argv[1:] = sys.argv[1:]
    install(mode, Path(folder))
    main()
