"""I4: data rows broken in every way that a file can break, by seeded mutation of good ones.

A mutation knows by itself what must become of its row; the loader is not asked.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from faults.attempt import attempt, no_traceback, refused
from faults.row import Row, tally
from faults.world import World
from tether.config import DataSection
from tether.data.prompts import load_prompts
from tether.errors import UserError

FILE_ROWS = 50
COMMANDS = 24  # files that also go through `tether check`
LONGEST_SENTENCE = 600

Fate = Literal["kept", "broken", "either"]


@dataclass(frozen=True)
class Line:
    content: bytes
    fate: Fate
    mutation: str


def row_i4(world: World, folder: Path, tries: int, seed: int) -> Row:
    """All rows through the loader under both policies, and some files through the command."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    draw = random.Random(seed)
    verdicts: list[str | None] = []
    commands = max(2, min(COMMANDS, tries // 100))
    for number in range(-(-tries // FILE_ROWS)):
        lines = [_draw_line(draw) for _ in range(min(FILE_ROWS, tries - len(verdicts)))]
        path = folder / f"{number:04d}.jsonl"
        path.write_bytes(b"".join(line.content + b"\n" for line in lines))
        problem = _load(path, lines, tokenizer)
        if problem is None and number < commands:
            problem = _check(world, folder, path, lines)
        verdicts += [problem] * len(lines)
        if problem is None:
            path.unlink()
    return tally("I4", "broken data rows, by mutation", verdicts)


def _load(path: Path, lines: list[Line], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Under skip, every line is kept or named, as its fate says; under refuse, the first of the
    named is the one that the refusal names."""
    try:
        kept, named = _load_skipping(path, tokenizer)
        refusal = _load_refusing(path, tokenizer)
    except Exception as error:  # the finding itself: only a UserError may come out
        return f"{path.name}: {type(error).__name__}: {str(error)[:200]}"
    if sorted([*kept, *named]) != list(range(len(lines))):
        return f"{path.name}: lines were lost or doubled"
    for position, line in enumerate(lines):
        if line.fate != "either" and (position in named) is not (line.fate == "broken"):
            return f"{path.name}, line {position + 1} ({line.mutation}) should be {line.fate}"
    for sentence in named.values():
        if "\n" in sentence or len(sentence) > LONGEST_SENTENCE:
            return f"{path.name}: not one readable sentence: {sentence[:200]!r}"
    if refusal != (named[min(named)] if named else None):
        return f"{path.name}: refused with {refusal!r}"
    for position, text in kept.items():
        if (
            lines[position].mutation == "none"
            and text != json.loads(lines[position].content)["prompt"]
        ):
            return f"{path.name}, line {position + 1}: the text changed"
    return None


def _load_skipping(
    path: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[int, str], dict[int, str]]:
    """Texts of the kept lines and sentences of the named ones, by position."""
    data = DataSection(train=str(path), on_bad_row="skip", max_prompt_tokens=100)
    found = load_prompts(str(path), data, tokenizer, ["answer"], context=120)
    start = f"{path}, line "
    named = {int(s.removeprefix(start).split(":")[0]) - 1: s for s in found.broken}
    return dict(zip(found.prompts.positions, found.prompts.texts, strict=True)), named


def _load_refusing(path: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    data = DataSection(train=str(path), max_prompt_tokens=100)
    try:
        load_prompts(str(path), data, tokenizer, ["answer"], context=120)
    except UserError as error:
        return str(error)
    return None


def _check(world: World, folder: Path, path: Path, lines: list[Line]) -> str | None:
    fields = ("--data.train", path, "--data.heldout", "null", "--data.max_prompt_tokens", "100")
    reward = ("--reward.kind", "exact_answer")
    tried = attempt(folder / f"check_{path.stem}", "check", world.recipe, *fields, *reward)
    if any(line.fate == "broken" for line in lines):
        return refused(tried, f"{path}, line ")
    return no_traceback(tried)


def _draw_line(draw: random.Random) -> Line:
    a, b = draw.randrange(1000), draw.randrange(1000)
    row = {
        "prompt": f"{a}+{b}=? {draw.choice(['', '好', 'é', '𝄞', chr(0x2028)])}",
        "answer": f"{a + b}",
    }
    name = draw.choice(["none", *MUTATIONS])
    if name == "none":
        return Line(_dump(row), "kept", name)
    content, fate = MUTATIONS[name](row, draw)
    return Line(content.replace(b"\n", b" "), fate, name)


def _dump(row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _without(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    missing = draw.choice(["prompt", "answer"])
    other = draw.choice(["Prompt", "question\n", "x" * 5000, "\ud800", ""])
    return json.dumps(
        {other: 1, **{k: v for k, v in row.items() if k != missing}}
    ).encode(), "broken"


def _wrong_type(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    value = draw.choice([None, 7, -1.5, True, [], ["a"], {}, {"text": "a"}, float("nan"), 1e308])
    return _dump({**row, "prompt": value}), "broken"


def _not_an_object(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump(draw.choice([[row], "text", 5, None, True, [], float("inf")])), "broken"


def _blank(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump(
        {**row, "prompt": draw.choice(["", " ", "\t\n", "\u3000", "\x85", "\u2028"])}
    ), "broken"


def _bad_utf8(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    content = _dump(row)
    place = draw.randrange(len(content) + 1)
    bad = draw.choice([b"\xff", b"\xfe\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"])
    return content[:place] + bad + content[place:], "broken"


def _huge(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump({**row, "prompt": draw.choice("x7 é好") * 9_999 + "?"}), "broken"


def _huge_number(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    digits = "9" * draw.choice([300, 4000, 5000, 20_000])
    return _dump(row)[:-1] + f', "n": {digits}}}'.encode(), "either"


def _nested(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    depth = draw.choice([10, 40, 60, 940, 990, 1100, 100_000])
    begin, end = draw.choice([("[", "]"), ('{"a":', "}")])
    inside = begin * depth + "0" + end * depth
    return _dump(row)[:-1] + f', "deep": {inside}}}'.encode(), "kept" if depth < 50 else "broken"


def _surrogate(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    column = draw.choice(["prompt", "answer", "other"])
    half = draw.choice(["\\ud800", "\\udfff", "\\udc00\\ud800"])
    text = json.dumps({**row, column: "HALF"}).replace("HALF", half)
    return text.encode(), "broken" if column == "prompt" else "kept"


def _not_a_number(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump(
        {**row, "weight": draw.choice([float("nan"), float("inf"), -float("inf")])}
    ), "kept"


def _doubled_keys(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    """JSON's readers take the last one."""
    return _dump(row)[:-1] + b', "prompt": "1+1=?"}', "kept"


def _nul(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    if draw.random() < 0.5:
        return _dump({**row, "prompt": "1\x001=?"}), "kept"  # written as an escape
    return _dump(row).replace(b"=", b"\x00"), "broken"


def _bom(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    """At the head of the first line it is taken off, elsewhere it is no JSON."""
    return b"\xef\xbb\xbf" + _dump(row), "either"


def _windows(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump(row) + b"\r", "kept"


def _truncated(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    content = _dump(row)
    return content[: draw.randrange(len(content))], "broken"


def _flipped(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    content = bytearray(_dump(row))
    for _ in range(draw.randint(1, 4)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content), "either"


def _two_on_a_line(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump(row) + draw.choice([b"", b" ", b","]) + _dump(row), "broken"


def _special_tokens(row: dict, draw: random.Random) -> tuple[bytes, Fate]:
    return _dump(
        {**row, "prompt": draw.choice(["{{ 7*7 }}", "<|im_end|>", "{% raw %}", "</s>"])}
    ), "kept"


Mutation = Callable[[dict, random.Random], tuple[bytes, Fate]]
MUTATIONS: dict[str, Mutation] = {
    function.__name__.strip("_"): function
    for function in (
        _without,
        _wrong_type,
        _not_an_object,
        _blank,
        _bad_utf8,
        _huge,
        _huge_number,
        _nested,
        _surrogate,
        _not_a_number,
        _doubled_keys,
        _nul,
        _bom,
        _windows,
        _truncated,
        _flipped,
        _two_on_a_line,
        _special_tokens,
    )
}
