"""Memory of two processes above their models, on many long rows: `python scripts/measure_rows.py`.

A random Llama of one layer learns for one iteration from rows that are made up at their greatest
length, so that nearly all of the memory is that of rows: sent, scored, and learnt from. Printed per
process: the kernel's high-water mark minus the memory once the models are loaded, and how many
texts were decoded. Another checkout is measured by PYTHONPATH=ITS/src.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8192}


def make_model(folder: Path) -> None:
    """A random Llama with the starter's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from tether import assets

    tokenizer = AutoTokenizer.from_pretrained(assets.resolve("tether:starter"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), **SMALL, **HEADS, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    rows = [json.dumps({"prompt": f"{i}+1=?"}) for i in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


class MadeUp:
    """A sampler whose tokens are numbers of the row and column."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self.tokens, self.vocabulary = tokens, vocabulary

    def sync(self, weights: object, version: int) -> None:
        """There are no weights."""

    def run(self, episodes: Sequence, choice: object, numbers: Sequence[int] | None = None):
        from tether.data.batching import pad_left
        from tether.types import Rollout

        places = torch.tensor(list(range(len(episodes)) if numbers is None else numbers))
        columns = torch.arange(self.tokens)
        ids = 10 + (places[:, None] * 7919 + columns * 104729) % (self.vocabulary - 10)
        prompts = [episode.prompt_ids for episode in episodes]
        return Rollout(
            prompt_ids=pad_left(prompts),
            prompt_lengths=torch.tensor([*map(len, prompts)]),
            response_ids=ids,
            response_lengths=torch.full((len(episodes),), self.tokens),
            response_mask=torch.ones_like(ids, dtype=torch.bool),
            rollout_log_probs=torch.full(ids.shape, -5.0),
            finish_reasons=("length",) * len(episodes),
        )


def settings(folder: str, rows: int, tokens: int) -> dict:
    batch = 16 * (tokens + 16)
    return {
        "device": "cpu",
        "threads": 1,
        "model": {"actor": folder},
        "data": {"train": f"{folder}/rows.jsonl"},
        "rollout": {
            "prompts": rows // 4, "samples_per_prompt": 4, "max_response_tokens": tokens,
        },
        "actor": {"minibatch_rows": rows // 4, "microbatch_tokens": batch},
        "critic": {"microbatch_tokens": batch},
    }  # fmt: skip


def work(folder: str, rows: int, tokens: int) -> None:
    """One of the processes: print a line of JSON."""
    from tether import api
    from tether.dist.world import entered
    from tether.models.vocabulary import Vocabulary
    from tether.ppo import roles as roles_module
    from tether.ppo.iteration import run_iteration
    from tether.ppo.result import first_controls

    config = api.as_config({**settings(folder, rows, tokens), "reward": {"kind": "repetition"}})
    torch.set_num_threads(1)
    made_up = MadeUp(tokens, 300)
    roles_module.build_sampler = lambda config, vocabulary: made_up
    decoded, decode = [], Vocabulary.decode

    def counted(self: Vocabulary, ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(self, ids)

    Vocabulary.decode = counted  # ty: ignore
    with entered("cpu", 1, 3600.0):
        roles = roles_module.build_roles(config, reward)
        before = current_bytes()
        outcome = run_iteration(0, first_controls(config), roles, config)
        metrics = outcome.metrics(config)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "peak": peak - before, "decoded": len(decoded),
        "loss": metrics["actor/pg_loss"], "value_loss": metrics["critic/vf_loss"],
    }), flush=True)  # fmt: skip


def reward(response: str, **row: object) -> float:
    """A number of the text."""
    return len(set(response.split())) / 100


def current_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a process
    given = parser.parse_args()
    if given.folder:
        work(given.folder, given.rows, given.tokens)
        return
    with tempfile.TemporaryDirectory(prefix="tether-rows-") as folder:
        make_model(Path(folder))
        port, size = free_port(), given.processes
        words = [sys.executable, __file__, "--folder", folder, *sys.argv[1:]]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        processes = [
            subprocess.Popen(
                words, env={**os.environ, **shared, **sizes, **rank}, stdout=subprocess.PIPE
            )
            for rank in ranks
        ]
        for rank, process in enumerate(processes):
            said, _ = process.communicate()
            found = json.loads(said)
            print(
                f"process {rank}: {found['peak'] / 2**20:,.0f} MiB above the models; "
                f"{found['decoded']} texts decoded; pg_loss {found['loss']:.12g}, "
                f"vf_loss {found['value_loss']:.12g}"
            )


if __name__ == "__main__":
    main()
