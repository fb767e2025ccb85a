"""Measure tether by the yardsticks of others and paste docs/results.md: `make yardsticks`.

    python scripts/yardsticks.py [--only Y1] [--results docs/results] [--folder runs/yardsticks]

Every measurement is kept in --results under a hash of its settings: a stopped run goes on where it
stopped, also on another machine, and what was measured is not measured again; an empty folder
there measures all anew. Runs and data, which are not kept, go into --folder. A part whose package
cannot be had says so in its row, and the others run. Exits 1 where a part falls short of what
docs/results.md promises.
"""

import argparse
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import yardstick_control
import yardstick_gao
import yardstick_kl
import yardstick_parity
import yardstick_reasoning
import yardstick_search
import yardstick_walks
from measure import machine, paste_markdown
from yardstick_store import KEPT, ROOT, Curve, NotThere, Outcome, Row, Store

from tether.explain.examples import EXAMPLES

OUTSIDE_NUMBERS = "tests/algo/test_outside_numbers.py"
FIGURE = ROOT / "docs" / "figures" / "yardsticks.svg"
MARKER = "yardsticks: made by `make yardsticks`"
PAGES = {
    "en": (ROOT / "docs" / "results.md", ROOT / "README.md"),
    "zh": (ROOT / "docs" / "zh" / "results.md", ROOT / "README.zh-CN.md"),
}
HEADS = {
    "en": ["", "yardstick", "known", "tether", "reached", "minutes of processor", "notes"],
    "zh": ["", "标尺", "已知", "tether", "达到", "处理器分钟", "备注"],
}
REACHED = {"en": {True: "yes", False: "no", None: ""}, "zh": {True: "是", False: "否", None: ""}}
CURVES = {"en": "Score over steps, and the known figure", "zh": "得分随步数的变化，与已知数字"}
NAMES = {
    "Y1": {"en": "classic control", "zh": "经典控制"},
    "Y2": {"en": "random walks", "zh": "随机游走"},
    "Y3": {"en": "20 families of reasoning-gym", "zh": "reasoning-gym 的 20 类题"},
    "Y4": {"en": "over-optimisation of a reward model", "zh": "奖励模型的过度优化"},
    "Y5": {"en": "order of KL placements", "zh": "KL 放在何处的次序"},
    "Y6": {"en": "search with corpora of no use", "zh": "语料没用时的检索"},
    "Y7": {"en": "parity, rare long demonstrations", "zh": "奇偶性，长示范很少"},
    "Y8": {"en": "Schulman's table of k1, k2, k3", "zh": "Schulman 的 k1、k2、k3 表"},
    "Y10": {"en": "numbers of other projects' tests", "zh": "其他项目测试里的数字"},
}


def schulman(store: Store) -> Outcome:
    """Y8: the table is part of `tether examples`; each number is the closed form's."""
    examples = [e for e in EXAMPLES if e.section == "schulman"]
    if not examples:
        raise NotThere("`tether examples` has no table of k1, k2, k3 yet")
    numbers = sum(len(e.right) for e in examples)
    worst = max(e.difference() for e in examples)
    row = Row(
        part="Y8",
        task=NAMES["Y8"],
        known=f"{numbers} numbers in closed form",
        ours=f"largest difference {worst:.0e}",
        reached=worst < 1e-6,
        in_readme=False,
        note={"en": "`tether examples`", "zh": "`tether examples`"},
    )
    return Outcome([row])


def outside_numbers(store: Store) -> Outcome:
    """Y10: run the test, and count its rows."""
    path = ROOT / OUTSIDE_NUMBERS
    if not path.is_file():
        raise NotThere(f"{OUTSIDE_NUMBERS} is not in this installation: clone the repository")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        raise NotThere(f"pytest did not run: {' '.join(last)}")
    rows, sources = count_rows(path)
    row = Row(
        part="Y10",
        task=NAMES["Y10"],
        known=f"{rows} rows from {sources} files",
        ours="all" if done.returncode == 0 else "not all",
        reached=done.returncode == 0 and rows >= 60,
        in_readme=False,
        note={"en": f"`{OUTSIDE_NUMBERS}`", "zh": f"`{OUTSIDE_NUMBERS}`"},
    )
    return Outcome([row])


def count_rows(path: Path) -> tuple[int, int]:
    """Return the rows of the test's tables, and the files they come from."""
    sys.path.insert(0, str(ROOT / "tests"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sum(map(len, module.TABLES)), len(module.SOURCES)


PARTS: dict[str, Callable[[Store], Outcome]] = {
    "Y1": yardstick_control.run,
    "Y2": yardstick_walks.run,
    "Y3": yardstick_reasoning.run,
    "Y4": yardstick_gao.run,
    "Y5": yardstick_kl.run,
    "Y6": yardstick_search.run,
    "Y7": yardstick_parity.run,
    "Y8": schulman,
    "Y10": outside_numbers,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="measure tether by the yardsticks of others")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one part, or several")
    parser.add_argument("--results", type=Path, default=KEPT, help="one file a measurement")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "yardsticks")
    parser.add_argument("--kept", action="store_true", help="measure nothing: paste what is there")
    parser.add_argument("--no-page", action="store_true", help="measure and print, paste nothing")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    store = Store(chosen.results, chosen.folder, chosen.kept)
    outcomes = [measure(part, store) for part in chosen.only or PARTS]
    rows = [row for outcome in outcomes for row in outcome.rows]
    print("\n".join(table(rows, "en")))
    if not chosen.no_page and not chosen.only:  # a page with a part of the rows would mislead
        write_pages(outcomes, [*store.machines] or [machine()])
    return 1 if any(row.promised and row.reached is False for row in rows) else 0


def measure(part: str, store: Store) -> Outcome:
    try:
        return PARTS[part](store)
    except NotThere as reason:
        note = {"en": str(reason), "zh": str(reason)}
        missing = Row(part, NAMES[part], "", "not measured", None, note=note, in_readme=False)
        return Outcome([missing])


def table(rows: list[Row], language: str) -> list[str]:
    """Return the rows as a table of Markdown."""
    return [as_line(cells) for cells in cells_of(rows, language)]


def cells_of(rows: list[Row], language: str) -> list[list[str]]:
    """Return the head, the line below it and the rows."""
    lines = [HEADS[language], ["---"] * len(HEADS[language])]
    for row in rows:
        minutes = f"{row.minutes:.1f}" if row.minutes else ""
        reached, note = REACHED[language][row.reached], row.note.get(language, "")
        lines.append([row.part, row.task[language], row.known, row.ours, reached, minutes, note])
    return lines


def as_line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def short_table(rows: list[Row], language: str) -> list[str]:
    """Return at most ten lines for the README: no minutes, no notes."""
    shown = [row for row in rows if row.in_readme]
    return [as_line(cells[:5]) for cells in cells_of(shown, language)][:10]


def write_pages(outcomes: list[Outcome], machines: list[str]) -> None:
    rows = [row for outcome in outcomes for row in outcome.rows]
    where = "; ".join(name[:-1] for name in machines)
    below = {"en": f"Measured {where}; one thread.", "zh": f"测于 {where}；单线程。"}
    drawn = draw(outcomes)
    for language, (page, readme) in PAGES.items():
        lines = ["", *table(rows, language), "", below[language], ""]
        if drawn:
            path = os.path.relpath(FIGURE, page.parent)
            lines += [f"![{CURVES[language]}]({path})", ""]
        paste_markdown(page, MARKER, lines)
        for outcome in outcomes:
            if outcome.details:
                part = outcome.rows[0].part
                paste_markdown(page, f"{part}: made by `make yardsticks`", own(outcome, language))
        paste_markdown(readme, MARKER, ["", *short_table(rows, language), ""])


def own(outcome: Outcome, language: str) -> list[str]:
    """Return the table of a part's own."""
    details = outcome.details
    assert details
    head = details.head[language]
    return ["", *map(as_line, [head, ["---"] * len(head), *details.rows]), ""]


def draw(outcomes: list[Outcome]) -> bool:
    """Draw one panel for each task with curves, with the known figure as a band, if there are."""
    curves = [curve for outcome in outcomes for curve in outcome.curves]
    panels: dict[str, list[Curve]] = {}
    for curve in curves:
        panels.setdefault(curve.panel, []).append(curve)
    if not panels:
        return False
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "tether"
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
    for unused in axes.flat[len(panels) :]:
        unused.axis("off")
    bands = {panel: band for outcome in outcomes for panel, band in outcome.bands.items()}
    for axis, (panel, lines) in zip(axes.flat, panels.items(), strict=False):
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            axis.plot(xs, ys, linewidth=1, label=line.label)
        if panel in bands:
            mean, spread = bands[panel]
            axis.axhspan(mean - spread, mean + spread, color="0.8", label="known")
        axis.set_title(panel, fontsize=10)
        axis.legend(fontsize=7, frameon=False)
        axis.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    plt.close(figure)
    return True


if __name__ == "__main__":
    sys.exit(main())
