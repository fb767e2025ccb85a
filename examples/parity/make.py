"""Write data and model of parity: `python examples/parity/make.py DIR --share 0.1 --seed 0`.

After Tsilivis et al. 2025 (2510.11495). A prompt is 12 to 20 bits in a field of 20, and the last
bit of a response is to be their parity. A demonstration is long in a share of the rows and short in
the others:

    0110100110110.......=    0100111011011    the parity of the first bit, of the first two, …
    0110100110110.......=    1                the parity alone, which nobody guesses from examples

Which of the two a row has is independent of its bits. A model that has read both writes a right
long one as often as it has seen them, and is at chance where it answers at once. Greedy, with a
share below a third, it does: after a first bit, the end is then the likelier continuation.
"""

import argparse
import json
import random
from itertools import accumulate
from operator import xor
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FEWEST_BITS, MOST_BITS = 12, 20
DEMONSTRATIONS, TRAIN, HELDOUT = 48_000, 10_000, 500
VOCABULARY = {letter: i for i, letter in enumerate(("0", "1", ".", "=", "<|pad|>", "<|end|>"))}
POSITIONS = 2 * MOST_BITS + 2
WIDTH = 64


def draw_bits(rng: random.Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(FEWEST_BITS, MOST_BITS))]


def row_of(bits: list[int]) -> dict[str, object]:
    field = "".join(map(str, bits)).ljust(MOST_BITS, ".")
    return {"prompt": f"{field}=", "parity": str(sum(bits) % 2)}


def demonstrate(bits: list[int], long: bool) -> str:
    """Return the parities of ever longer beginnings, or only the last of them."""
    parities = "".join(map(str, accumulate(bits, xor)))
    return parities if long else parities[-1]


def draw_rows(rng: random.Random, count: int, without: set[str]) -> list[dict[str, object]]:
    """Draw rows with prompts that are not among `without`."""
    rows = []
    while len(rows) < count:
        row = row_of(draw_bits(rng))
        if row["prompt"] not in without:
            rows.append(row)
    return rows


def draw_demonstrations(
    rng: random.Random, count: int, share: float, without: set[str]
) -> list[dict[str, object]]:
    found = []
    for row in draw_rows(rng, count, without):
        bits = [int(bit) for bit in str(row["prompt"]).rstrip(".=")]
        response = demonstrate(bits, long=rng.random() < share)
        found.append({"prompt": row["prompt"], "response": response})
    return found


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<|pad|>"))
    words.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    words.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        model_max_length=POSITIONS,
    )


def build_model(seed: int) -> LlamaForCausalLM:
    """Return a Llama of 2 layers and width 64.

    Its weights start with a deviation of 1/sqrt(width), six times the library's 0.02, which is too
    small at this width for rare long demonstrations to be learnt soon.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        initializer_range=WIDTH**-0.5,
        bos_token_id=None,
        eos_token_id=VOCABULARY["<|end|>"],
        pad_token_id=VOCABULARY["<|pad|>"],
    )
    return LlamaForCausalLM(config)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(folder: Path, share: float, seed: int, demonstrations: int = DEMONSTRATIONS) -> None:
    """Write model/, demonstrations.jsonl for supervised training, train.jsonl and heldout.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"parity {seed}")
    heldout = draw_rows(rng, HELDOUT, set())
    asked = {str(row["prompt"]) for row in heldout}
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "train.jsonl", draw_rows(rng, TRAIN, asked))
    shown = draw_demonstrations(rng, demonstrations, share, asked)
    write_jsonl(folder / "demonstrations.jsonl", shown)
    build_model(seed).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description="data and model of parity")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="of long demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if not 0 <= chosen.share <= 1:
        parser.error(f"--share is {chosen.share}; write a share between 0 and 1")
    make(chosen.folder, chosen.share, chosen.seed)
    print(f"{DEMONSTRATIONS} demonstrations, {chosen.share:.0%} of them long")


if __name__ == "__main__":
    main()
