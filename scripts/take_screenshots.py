"""The pictures of docs/view.md: the page over a folder of runs, as Chromium draws it.

    python scripts/take_screenshots.py [runs] [--out docs/figures]

The folder should hold a finished run with rows and, for the overlay, one or two more. Without one,
two short runs are trained, minutes each.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

DESK, PHONE = (1280, 900), (360, 760)


def train(folder: Path) -> Path:
    """Train two runs that differ in beta, and return their folder."""
    for beta in ("0.1", "0.01"):
        options = {
            "--run.dir": folder / f"beta-{beta}",
            "--run.rollouts_every": 2,
            "--kl.in_reward.coef": beta,
            "--rollout.prompts": 48,
            "--train.iterations": 12,
            "--train.eval_every": 6,
            "--train.eval_prompts": 100,
        }
        words = [str(word) for option in options.items() for word in option]
        subprocess.run([sys.executable, "-m", "tether", "train", *words], check=True)
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `tether view`, on a free port, until the block ends."""
    command = [sys.executable, "-m", "tether", "view", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        yield next(word for word in said.split() if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait()


def choose_run(address: str) -> tuple[list[str], str, int, int]:
    """All runs, newest first; the first that keeps rows, an iteration of it and a telling row."""
    listed = _answer(address, "/api/runs")["runs"]
    runs = [run["id"] for run in sorted(listed, key=lambda run: -run["modified"])]
    for run in runs:
        iterations = _answer(address, f"/api/runs/{run}")["rollouts"]
        if iterations:
            middle = iterations[len(iterations) // 2]
            rows = _answer(address, f"/api/runs/{run}/rollouts/{middle}")["rows"]
            longer = [row for row in rows if row["length"] > 6] or rows
            worst = min(longer, key=lambda row: row["advantage"] or 0.0)  # a mistake tells most
            return runs, run, middle, worst["row"]
    raise SystemExit("No run here keeps rows; train one with --run.rollouts_every 1.")


def _answer(address: str, path: str) -> dict:
    with urllib.request.urlopen(address + path) as response:
        return json.load(response)


def open_page(browser: Browser, size: tuple[int, int], language: str, theme: str) -> Page:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=theme,
        locale="zh-CN" if language == "zh" else "en-GB",
    )
    return context.new_page()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(arguments.runs or train(Path(folder))) as address,
        sync_playwright() as playwright,
    ):
        runs, run, iteration, row = choose_run(address)
        rows = f"#/run/{run}/iteration/{iteration}"
        token = f"{rows}/row/{row}"
        shots = [  # name, address, size, language, theme, what to wait for, what to scroll to
            (
                "curves",
                f"#/?runs={'/'.join(runs[:3])}",
                DESK,
                "en",
                "light",
                ".js-plotly-plot",
                None,
            ),
            ("rows", rows, DESK, "en", "light", "tbody tr", None),
            ("groups", f"{rows}?show=groups", DESK, "en", "light", ".group", None),
            ("pictures", f"{rows}?show=pictures", DESK, "en", "light", ".heat .hm", None),
            ("heldout", f"#/run/{run}/heldout", DESK, "en", "light", "tbody tr", None),
            ("row", token, DESK, "en", "light", ".whatif td.after", None),
            (
                "whatif",
                f"{token}?kl.in_reward.coef=0.1",
                DESK,
                "en",
                "dark",
                "td.differs",
                ".whatif",
            ),
            ("row-zh", token, DESK, "zh", "dark", ".whatif td.after", None),
            ("phone", token, PHONE, "en", "light", ".chips", ".chips"),
        ]
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, place, size, language, theme, awaited, scroll in shots:
            page = open_page(browser, size, language, theme)
            page.goto(f"{address}/{place}")
            page.wait_for_selector(awaited)
            page.wait_for_timeout(1500)  # the rest of the curves
            if scroll:
                page.locator(scroll).first.evaluate("e => e.scrollIntoView()")
            page.screenshot(path=arguments.out / f"view-{name}.png")
            page.context.close()
        browser.close()


if __name__ == "__main__":
    main()
