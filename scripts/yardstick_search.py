"""Y6: what a search engine's quality does to searching, after Search-R1 (2503.09516) and Jin et al.
2025 (2505.15117): `search_qa`'s world, with half of its facts learnt by heart before PPO.

In the world as it ships no fact is known, so that with a useless engine there is nothing to learn
from. Here an engine of no use leaves the policy a choice: to answer from memory, or to search.
"""

import json
import random
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from build_search_starter import guess
from yardstick_runs import one_run, one_sft, pooled, shown
from yardstick_store import ROOT, Curve, Details, Outcome, Store, minutes, row_of_signs

from tether.tasks.facts import (
    LANGUAGES,
    Entity,
    Question,
    ask_one_hop,
    draw_world,
)

RECIPES = ROOT / "scripts" / "yardstick_recipes"
CODE = (
    "scripts/build_search_starter.py",
    "scripts/yardstick_recipes",
    "scripts/yardstick_search.py",
    "src/tether",
)
SEEDS = (0, 1, 2)
NUM_PEOPLE, NUM_TOWNS, HELDOUT = 90, 30, 300  # people and towns in each language
PASSES, FRESH = 150, 10_000  # over the facts to know; and transcripts about worlds of a moment
SEARCHES, RIGHT_QUERY = 0.5, 0.8  # habits taught for every question, known or not
CELLS: Mapping[str, dict[str, Any]] = {
    "right": {},
    "right, read text learnt too": {"rollout.state_masking": False},
    "shuffled": {},
    "empty": {},
    "empty, GRPO": {"advantage.estimator": "grpo"},
}
GONE = 0.5  # searching dies out: at most this part of what it was
KNOWN = "masking helps; searching dies out with a random engine, grows with an empty one (PPO)"
HEAD = {
    "en": ["engine", "before", "after", "known by heart", "not known", "searches per question"],
    "zh": ["检索", "之前", "之后", "记住的", "没记住的", "每题检索次数"],
}


def run(store: Store) -> Outcome:
    cells = {name: [one_cell(store, name, seed) for seed in SEEDS] for name in CELLS}
    signs = signs_of(cells)
    row = row_of_signs(
        part="Y6",
        task={
            "en": "search with a right, a shuffled and an empty corpus",
            "zh": "语料正确、打乱、为空时的检索",
        },
        known=KNOWN,
        signs=signs,
        minutes=minutes(result for results in cells.values() for result in results),
    )
    curves = [
        Curve("searches per question", name, mean_curve(results)) for name, results in cells.items()
    ]
    details = Details(HEAD, [line(name, results) for name, results in cells.items()])
    return Outcome([row], curves, details)


def one_cell(store: Store, name: str, seed: int) -> dict[str, Any]:
    def paths() -> dict[str, Any]:
        folder = store.work / f"search-seed{seed}"
        model = supervised(folder, seed)
        engine = name.partition(",")[0]
        own = {"kind": f"{folder / 'search_tools.py'}:{engine}"}
        right = {"kind": "search", "corpus": str(folder / "corpus.jsonl"), "topk": 1}
        return {
            "model.actor": str(model),
            "data.train": str(folder / "train.jsonl"),
            "data.heldout": {
                kind: str(folder / f"heldout-{kind}.jsonl") for kind in ("known", "unknown")
            },
            "rollout.tools": [right if engine == "right" else own],
        }

    beside = {
        "world": [NUM_PEOPLE, NUM_TOWNS, HELDOUT],
        "lesson": [PASSES, FRESH, SEARCHES, RIGHT_QUERY],
        "sft": (RECIPES / "search_sft.yaml").read_text(encoding="utf-8"),
        "engines": (RECIPES / "search_tools.py").read_text(encoding="utf-8"),
        "engine": name.partition(",")[0],
    }
    fields = {"seed": seed, **CELLS[name]}
    slug = name.replace(", ", "-").replace(" ", "-")
    columns = ("score/mean", "tools/calls_mean", "kl/sequence_mean")
    recipe = RECIPES / "search.yaml"
    return one_run(store, f"Y6-{slug}-seed{seed}", recipe, fields, paths, CODE, beside, columns)


def supervised(folder: Path, seed: int) -> Path:
    """Write world, questions and lesson, and teach the search starter."""
    if not (folder / "search_tools.py").is_file():  # written last
        write_files(folder, seed)
    fields = {"seed": seed, "data.train": str(folder / "lesson.jsonl")}
    return one_sft(RECIPES / "search_sft.yaml", fields, folder / "sft-run")


def write_files(folder: Path, seed: int) -> None:
    rng = random.Random(f"Y6 {seed}")
    world: dict[str, Entity] = {}
    for language in LANGUAGES:
        world |= draw_world(rng, language, NUM_PEOPLE, NUM_TOWNS)
    questions = [q for q in ask_one_hop(world) if q.answer not in q.prompt]
    rng.shuffle(questions)
    half = len(questions) // 2
    groups = {"known": questions[:half], "unknown": questions[half:]}
    folder.mkdir(parents=True, exist_ok=True)
    documents = [f"{entity.name}\n{entity.text}" for entity in world.values()]
    write(folder / "corpus.jsonl", [{"id": str(i), "contents": t} for i, t in enumerate(documents)])
    for kind, group in groups.items():
        write(folder / f"heldout-{kind}.jsonl", map(row_of, group[: HELDOUT // 2]))
    rest = [q for group in groups.values() for q in group[HELDOUT // 2 :]]
    rng.shuffle(rest)
    write(folder / "train.jsonl", map(row_of, rest))
    lesson = [transcript(q, world, True, rng) for q in groups["known"] for _ in range(PASSES)]
    lesson += list(fresh_transcripts(rng))
    rng.shuffle(lesson)
    write(folder / "lesson.jsonl", lesson)
    shutil.copy(RECIPES / "search_tools.py", folder)


def write(path: Path, rows: Any) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def row_of(question: Question) -> dict[str, Any]:
    return {"prompt": question.prompt, "ground_truth": question.answer}


def fresh_transcripts(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield transcripts about small worlds that exist for four questions: nothing to know there."""
    for number in range(FRESH // 4):
        world = draw_world(rng, LANGUAGES[number % 2], num_people=8, num_towns=3)
        for question in rng.sample(list(ask_one_hop(world)), 4):
            yield transcript(question, world, False, rng)


def transcript(
    question: Question, world: Mapping[str, Entity], known: bool, rng: random.Random
) -> dict[str, Any]:
    """Return a row of `tether sft`: answered at once, from memory or by a guess, or after a search
    of which some ask for another entity."""
    [subject] = question.path
    space = " " if subject.language == "english" else ""

    def tagged(tag: str, text: str) -> str:
        return f"<{tag}>{space}{text}{space}</{tag}>"

    from_memory = question.answer if known else guess(question, rng)
    if rng.random() >= SEARCHES:
        return {"prompt": question.prompt, "response": [tagged("answer", from_memory)]}
    others = [e for e in world.values() if e is not subject and e.language == subject.language]
    read = subject if rng.random() < RIGHT_QUERY else rng.choice(others)
    response = [
        tagged("search", read.name),
        f"<information>{read.name}\n{read.text}</information>",
        tagged("answer", read.facts.get(question.asked, from_memory)),
    ]
    return {"prompt": question.prompt, "response": response}


def share_of(results: Sequence[Mapping[str, Any]], when: int, kind: str | None = None) -> Any:
    evals = [result["evals"][when] for result in results]
    return pooled([(e if kind is None else e["sets"][kind])["sampled"] for e in evals])


def searches(results: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return searches per sampled held-out question, before and after, over the seeds."""
    first, last = ([r["evals"][when]["calls"] for r in results] for when in (0, -1))
    return statistics.fmean(first), statistics.fmean(last)


def line(name: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    shares = [share_of(results, 0), share_of(results, -1)]
    shares += [share_of(results, -1, kind) for kind in ("known", "unknown")]
    first, last = searches(results)
    return [name, *map(shown, shares), f"{first:.2f} – {last:.2f}"]


def signs_of(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, bool]:
    """Return what was published, and whether it was found here."""
    masked = share_of(cells["right"], -1)
    unmasked = share_of(cells["right, read text learnt too"], -1)
    first, last = searches(cells["shuffled"])
    before, after = searches(cells["empty"])
    return {
        "masking helps": masked.low > unmasked.high,
        "searching dies out with a shuffled corpus": last <= GONE * first,
        "searching grows with an empty one": after > before,
    }


def mean_curve(results: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the mean searches per sampled row over the seeds by iteration."""
    calls = zip(*(result["curves"]["tools/calls_mean"] for result in results), strict=True)
    return [(i + 1, statistics.fmean(column)) for i, column in enumerate(calls)]
