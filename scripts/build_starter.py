"""Build the starter model and its prompts from nothing: `python scripts/build_starter.py`.

The starter is taught in lessons, never with a wrong answer. The first has few sums that carry, the
others none; after them the starter knows every form of dialogue but is mostly wrong where it has to
carry. That is what PPO has to bring back, from rewards alone.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tether
from tether import assets
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary
from tether.stages.sft import SFTSettings, train_sft
from tether.tasks.arithmetic import Form, Problem, Split, carries, draw_distinct, draw_problems

ASSETS = Path(assets.__file__).parent


@dataclass(frozen=True)
class Lesson:
    num_problems: int
    carry_share: float  # of the pairs that carry, how many are kept
    settings: SFTSettings


LESSONS = (
    Lesson(40_000, 0.1, SFTSettings(num_steps=3000, lr=2e-3, weight_decay=0.1)),
    Lesson(10_000, 0.0, SFTSettings(num_steps=240, lr=1.5e-3, weight_decay=0.1)),
    Lesson(10_000, 0.0, SFTSettings(num_steps=60, lr=1e-3, weight_decay=0.1, warmup_steps=20)),
)

SPLITS = ("train", "heldout")
NUM_TRAIN_PROMPTS = 8000
NUM_HELDOUT_PROMPTS = 500
PROMPT_FORMS: tuple[Form, ...] = ("sum", "sum", "chinese", "english")  # bare sums are quick to roll
TRAIN_DIGIT_SHARE = 0.45  # small claims take the most practice
HELDOUT_DIGIT_SHARE = 0.25
NO_CARRY_SHARE = 0.7  # of the pairs that do not carry; makes half of the prompts carry

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(
    texts: Iterable[str], pieces: str, vocab_size: int, min_frequency: int = 0
) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text survives the round trip.

    Only what matches `pieces` is kept apart before the merges: a stock phrase becomes one token.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, width: int, inner: int, layers: int, max_new_tokens: int
) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=max_new_tokens,
    )
    return model


def draw_lesson(lesson: Lesson, rng: random.Random) -> list[Problem]:
    def keep(a: int, b: int) -> bool:
        return not carries(a, b) or rng.random() < lesson.carry_share

    stream = draw_problems(rng, "train", keep=keep)
    return [next(stream) for _ in range(lesson.num_problems)]


def stream_prompts(split: Split, seed: int, digit_share: float) -> Iterator[Problem]:
    rng = random.Random(f"{split} {seed}")

    def keep(a: int, b: int) -> bool:
        return carries(a, b) or rng.random() < NO_CARRY_SHARE

    return draw_problems(rng, split, PROMPT_FORMS, digit_share, keep)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def report(step: int, loss: float) -> None:
    if (step + 1) % 100 == 0:
        print(f"step {step + 1:5d}  loss {loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=ASSETS, help="where starter/ and arithmetic/ go"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # sums of floats depend on the number of threads
    # Repeats stay in: a small sum has one true claim and many false ones, so distinct prompts
    # would teach that small claims are mostly false.
    train = list(islice(stream_prompts("train", args.seed, TRAIN_DIGIT_SHARE), NUM_TRAIN_PROMPTS))
    heldout = draw_distinct(
        stream_prompts("heldout", args.seed, HELDOUT_DIGIT_SHARE), NUM_HELDOUT_PROMPTS
    )
    for name, problems in (("train", train), ("heldout", heldout)):
        write_jsonl(args.out / "arithmetic" / f"{name}.jsonl", map(asdict, problems))

    rng = random.Random(args.seed)
    lessons = [draw_lesson(lesson, rng) for lesson in LESSONS]
    texts = [text for p in lessons[0] for text in (p.prompt, p.answer)]
    tokenizer = build_tokenizer(texts, pieces="[0-9]", vocab_size=384)
    model = build_model(tokenizer, width=128, inner=384, layers=4, max_new_tokens=32)
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{num_params:,} parameters, {len(tokenizer)} tokens")

    vocabulary = Vocabulary(tokenizer, frozenset([tokenizer.eos_token_id]))
    for lesson, problems in zip(LESSONS, lessons, strict=True):
        dialogues = [(p.prompt, p.answer) for p in problems]
        policy = Policy(model, temperature=1.0, microbatch_tokens=16_384)
        train_sft(policy, vocabulary, dialogues, lesson.settings, report)
    model.save_pretrained(args.out / "starter")
    tokenizer.save_pretrained(args.out / "starter", save_jinja_files=False)

    prompts = {f"data.{name}": str(args.out / "arithmetic" / f"{name}.jsonl") for name in SPLITS}
    evaluation = tether.evaluate(str(args.out / "starter"), overrides={**prompts, "threads": 1})
    for name, part in (("greedy", evaluation.greedy), ("sampled", evaluation.sampled)):
        print(f"held-out {name}: {part.mean:.1%} of {part.count}")


if __name__ == "__main__":
    main()
