"""Write data and model of the random walks: `python examples/random_walks/make.py DIR`.

The task is the first example of trlx (CarperAI/trlx 3340c2f, examples/randomwalks), after Chen et
al. 2021 (2106.01345): a directed graph of 21 nodes, an edge from one to another with probability
0.1, and walks of at most 10 nodes that go wherever an edge leads until they reach node a. A model
that has read 1000 such walks is to learn the shortest ones. Random numbers are drawn in trlx's
order, so that seed 1000 is trlx's graph.
"""

import json
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

NODES, EDGE_PROBABILITY, WALKS, MAX_NODES, SEED = 21, 0.1, 1000, 10, 1000
GOAL = 0
EVALUATED = 25  # times each start


@dataclass(frozen=True)
class Graph:
    edges: np.ndarray  # (nodes, nodes), True = an edge from row to column
    walks: list[str]

    def shortest(self, start: int) -> int:
        """Return the nodes on the shortest path to the goal, both ends included; at most 10."""
        seen, waiting = {start: 1}, deque([start])
        while waiting:
            node = waiting.popleft()
            if node == GOAL:
                return min(seen[node], MAX_NODES)
            for other in np.flatnonzero(self.edges[node]).tolist():
                if other not in seen:
                    seen[other] = seen[node] + 1
                    waiting.append(other)
        return MAX_NODES

    def row(self, start: str) -> dict[str, object]:
        """Return a prompt with what its reward needs."""
        pairs = [letter(a) + letter(b) for a, b in np.argwhere(self.edges).tolist()]
        return {"prompt": start, "edges": pairs, "shortest": self.shortest(ord(start) - ord("a"))}

    @property
    def starts(self) -> list[str]:
        return sorted({walk[0] for walk in self.walks})


def letter(node: int) -> str:
    return chr(ord("a") + node)


def draw_graph(seed: int = SEED) -> Graph:
    chance = np.random.RandomState(seed)
    while True:
        edges = chance.rand(NODES, NODES) > 1 - EDGE_PROBABILITY
        np.fill_diagonal(edges, False)
        if edges.any(axis=1).all():  # every node has a way out
            break
    edges[GOAL] = False
    edges[GOAL, GOAL] = True
    return Graph(edges, [draw_walk(chance, edges) for _ in range(WALKS)])


def draw_walk(chance: np.random.RandomState, edges: np.ndarray) -> str:
    node = GOAL
    while node == GOAL:
        node = chance.randint(NODES)
    nodes = [node]
    while len(nodes) < MAX_NODES and node != GOAL:
        node = int(chance.choice(np.flatnonzero(edges[node])))
        nodes.append(node)
    return "".join(map(letter, nodes))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, and two more: 23, as in trlx."""
    vocabulary = {letter(i): i for i in range(NODES)} | {"<|pad|>": 21, "<|end|>": 22}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    words.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=16
    )


def build_model(seed: int = 0) -> GPT2LMHeadModel:
    """Return the shape that trlx gives its GPT-2: 6 layers, width 144."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=23,
        n_layer=6,
        n_embd=144,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=22,
        pad_token_id=21,
        # Sampler, trainer and reference must give the same numbers.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path) -> Graph:
    """Write model/, walks.jsonl for supervised training, train.jsonl and heldout.jsonl for PPO."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = draw_graph()
    walks = [{"prompt": walk[0], "response": walk[1:]} for walk in graph.walks]
    write_jsonl(folder / "walks.jsonl", walks)
    write_jsonl(folder / "train.jsonl", [graph.row(walk[0]) for walk in graph.walks])
    write_jsonl(folder / "heldout.jsonl", [graph.row(s) for s in graph.starts] * EVALUATED)
    build_model().save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    return graph


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("python examples/random_walks/make.py DIR")
    made = make(Path(sys.argv[1]))
    print(f"{len(made.starts)} starts, {int(made.edges.sum())} edges, {len(made.walks)} walks")
