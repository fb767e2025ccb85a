"""How long the page of a long run takes to show its first curve, and each of its views after that.

    python scripts/measure_page.py [--write]

A run of 10,000 iterations and 40 metrics, with a million tokens in the rows that it kept, and a
second one to compare it with, in Chromium. A time ends when what was asked for has been painted.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from measure import machine, paste
from playwright.sync_api import Browser, Page, sync_playwright
from take_screenshots import served

from tether.cli.terminal import table

DOC = Path(__file__).resolve().parent.parent / "docs" / "view.md"
ITERATIONS, METRICS = 10_000, 40
FILES, ROWS, TOKENS = 1_000, 64, 16
EVALUATIONS, HELDOUT = 40, 100
FIRST_SECONDS, SWITCH_SECONDS = 2.0, 0.5
FIRST_NAMES = (
    *("score/mean", "kl/sequence_mean", "actor/entropy", "actor/pg_clipfrac", "actor/approx_kl"),
    *("actor/pg_loss", "critic/vf_loss", "critic/explained_variance", "response/length_mean"),
)
COLUMNS = (
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "new_log_probs", "kl", "values"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns", "policy_advantages"),
)


def write(path: Path, records: list[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"schema": 1, **record}) + "\n" for record in records)


def make_long_run(run: Path, seed: int = 0, iterations: int = ITERATIONS) -> None:
    """Write a run directory; every file of rows is the same one under another name."""
    chance = random.Random(seed)
    for folder in ("rollouts", "evals"):
        (run / folder).mkdir(parents=True)
    config = f"schema: 1\nseed: {seed}\ntrain: {{iterations: {iterations}}}\n"
    config += "actor: {update: {kind: clip}}\nkl: {in_reward: {coef: 0.05}}\n"
    (run / "config.yaml").write_text(config)
    names = [*FIRST_NAMES, *(f"extra/metric_{i}" for i in range(METRICS - len(FIRST_NAMES)))]
    numbers = range(iterations)
    metrics = [{"iteration": i, **{n: chance.gauss(0, 1) for n in names}} for i in numbers]
    write(run / "metrics.jsonl", metrics)
    write(run / "timings.jsonl", [{"iteration": i, "time/iteration": 1.0} for i in numbers])
    write(run / "events.jsonl", [{"iteration": i, "kind": "note", "message": f"{i}"} for i in
                                 range(0, iterations, 20)])  # fmt: skip
    ends = {"mean": 0.5, "low": 0.4, "high": 0.6, "count": HELDOUT}
    every = iterations // EVALUATIONS
    evaluated = [every * i for i in range(EVALUATIONS + 1)]
    write(run / "evals.jsonl", [{"iteration": i, "sampled": ends, "greedy": ends} for i in
                                evaluated])  # fmt: skip
    for i in evaluated:
        write(run / "evals" / f"{i:06d}.jsonl", [heldout_line(n, chance) for n in range(HELDOUT)])
    first = run / "rollouts" / "000000.jsonl"
    write(first, [row_of(i, chance) for i in range(ROWS)])
    for i in range(1, FILES):
        os.link(first, run / "rollouts" / f"{i * iterations // FILES:06d}.jsonl")


def heldout_line(number: int, chance: random.Random) -> dict:
    said = {"response": " ".join(f"{chance.random():.3f}" for _ in range(20)), "score": 0.5}
    answer = {**said, "finish_reason": "stop", "score_parts": {}, "score_extras": {}}
    prompt = f"question {number}"
    return {"row": number, "prompt": prompt, "columns": {"answer": "5"}, "greedy": answer,
            "sampled": answer}  # fmt: skip


def row_of(number: int, chance: random.Random) -> dict:
    columns = {name: [chance.gauss(0, 0.3) for _ in range(TOKENS)] for name in COLUMNS}
    return {
        "iteration": 0,
        "row": number,
        "data_file": "train.jsonl",
        "data_line": 1 + number // 4,
        "columns": {"answer": str(number)},
        "score_parts": {},
        "score_extras": {},
        "prompt": f"question {number // 4}",
        "response": " ".join(f"t{i}" for i in range(TOKENS)),
        "finish_reason": "stop",
        "score": float(number % 3 == 0),
        "usable": True,
        "greedy_score": None,
        "beta": 0.05,
        "whitening": {"mean": 0.0, "variance": 1.0, "count": ROWS * TOKENS},
        "final_value": 0.0,
        "prompt_ids": [1],
        "response_ids": list(range(TOKENS)),
        "response_tokens": [f" t{i}" for i in range(TOKENS)],
        "response_mask": [True] * TOKENS,
        **columns,
    }


def to(place: str) -> str:
    return f"location.hash = {place!r}"


def press(key: str) -> str:
    return f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"


def change(selector: str, event: str, **properties: object) -> str:
    """Set an element's properties and tell it, as an input by hand would."""
    found = f"const e = document.querySelector({selector!r});"
    sets = "".join(f" e.{name} = {json.dumps(value)};" for name, value in properties.items())
    return f"{found}{sets} e.dispatchEvent(new Event({event!r}, {{bubbles: true}}))"


def fresh(selector: str, count: int = 1) -> str:
    """So many elements that were not there before."""
    return (
        f"[...document.querySelectorAll({selector!r})].filter(e => !old.has(e)).length >= {count}"
    )


RUN, AT = "#/run/long", "#/run/long/iteration/5000"
CURVES = ".chart .js-plotly-plot path.js-line"
PLOT = "document.querySelector('.chart .js-plotly-plot')"
CELLS = "[...document.querySelectorAll('.whatif td.after')].map(e => e.textContent).join()"
# What is done, how, and what then has to be there; `old` are the elements of before.
SWITCHES = [
    ("the run: one curve", to(RUN), fresh(CURVES)),
    ("the run: all curves", to(RUN), fresh(CURVES, len(FIRST_NAMES))),
    ("smoothing", change(".tools input[type=range]", "input", value=0.9),
     f"{PLOT}.data.length > traces"),
    ("log axis", change(".tools input[type=checkbox]", "change", checked=True),
     f"{PLOT}.layout.yaxis.type === 'log'"),
    ("one more curve", change(".more select", "change", value="extra/metric_7"), fresh(".chart")),
    ("table of runs", to("#/table"), fresh(".run-table tbody tr")),
    ("two configs compared", to("#/diff/long/other"), fresh("tbody tr")),
    ("events", to(f"{RUN}/events"), fresh("tbody tr")),
    ("config", to(f"{RUN}/config"), fresh("pre")),
    ("held-out responses", to(f"{RUN}/heldout"), fresh(".rows tbody tr", HELDOUT)),
    ("a held-out prompt over time", to(f"{RUN}/heldout/7"), fresh(".answer", 2)),
    ("rows of an iteration", to(AT), fresh(".rows tbody tr", ROWS)),
    ("rows sorted", "document.querySelectorAll('.rows thead button')[4].click()",
     fresh(".rows tbody tr", ROWS)),
    ("rows filtered by text", change("input[type=search]", "input", value="t7"),
     fresh(".rows tbody tr", ROWS)),
    ("the next iteration", press("]"), fresh(".rows tbody tr", ROWS)),
    ("groups", to(f"{AT}?show=groups"), fresh(".group")),
    ("histograms and heat map", to(f"{AT}?show=pictures"), fresh(".heat .hm")),
    ("what if, for the batch", to(f"{AT}?show=batch"), fresh(".totals td")),
    ("one row's tokens", to(f"{AT}/row/3"), fresh(".chip", TOKENS)),
    ("the row's what-if", to(f"{AT}/row/4"), fresh(".whatif td.after")),
    ("other colours", change(".bar select", "change", value="kl"), "location.hash.includes('kl')"),
    ("beta moved", change(".whatif .slider input[type=number]", "input", value="0.4"),
     f"{CELLS} !== cells"),
    ("the next row", press("j"), fresh(".chip", TOKENS)),
    ("a prompt over all iterations", to(f"{RUN}/prompt/3?file=train.jsonl"), fresh(".answer")),
    ("in Chinese", "document.getElementById('language').click()", fresh("#main > *")),
    ("dark", "document.getElementById('theme').click()",
     "getComputedStyle(document.body).backgroundColor !== colour"),
]  # fmt: skip
TIMED = """async () => {{
  const old = new Set(document.querySelectorAll('*'));
  const traces = {PLOT}?.data?.length, cells = {CELLS};
  const colour = getComputedStyle(document.body).backgroundColor;
  const frame = () => new Promise(requestAnimationFrame);
  const began = performance.now();
  {{ {act}; }}
  while (!({done})) {{
    if (performance.now() - began > 60000) throw new Error('never shown');
    await frame();
  }}
  await frame(); await frame();  // painted
  return (performance.now() - began) / 1000;
}}"""


def measure(browser: Browser, address: str) -> list[tuple[str, float]]:
    """Return what was done and its seconds, the first curve from an empty browser first."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    page = context.new_page()
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.locator(CURVES).first.wait_for(state="attached", timeout=60_000)
    found = [("the first curve", time.perf_counter() - began)]
    page.wait_for_timeout(1500)
    for name, act, done in SWITCHES:
        found.append((name, timed(page, act, done)))
        page.wait_for_timeout(300)  # what else the view loads
        if "one curve" in name:
            page.evaluate(to("#/table"))
            page.wait_for_timeout(500)
    context.close()
    return found


def timed(page: Page, act: str, done: str) -> float:
    return page.evaluate(TIMED.format(PLOT=PLOT, CELLS=CELLS, act=act, done=done))


def too_slow(found: list[tuple[str, float]]) -> list[str]:
    (first, seconds), *switches = found
    late = [first] if seconds >= FIRST_SECONDS else []
    return late + [name for name, seconds in switches if seconds >= SWITCH_SECONDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/view.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        for seed, name in enumerate(("other", "long")):
            make_long_run(Path(made) / name, seed)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        with served(Path(made)) as address:
            found = measure(browser, address)
        browser.close()
    rows = [["shown", "seconds"], *([name, f"{seconds:.2f}"] for name, seconds in found)]
    lines = [table(rows, numbers_from=1), "", f"  {machine()}"]
    print("\n".join(lines))
    if given.write:
        paste(DOC, "page timings: made by scripts/measure_page.py", lines)
    late = too_slow(found)
    sys.exit(f"Too slow: {', '.join(late)}." if late else 0)


if __name__ == "__main__":
    main()
