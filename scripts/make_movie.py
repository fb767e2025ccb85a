"""The moving picture of the README, made from the real program.

    python scripts/make_movie.py [--run RUN --log LOG]

First the lines that `tether train` prints, as they come; then, on the page over that run, a row
whose tokens change their colours while beta moves. Without arguments it trains a short run itself.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from take_screenshots import served

from tether.run.reader import read_lines

TARGET = Path("docs/figures/tour.gif")
WIDTH, HEIGHT = 880, 400
SECONDS = 15
COLOURS = 96
SHORT = {
    "--train.iterations": 12,
    "--train.eval_prompts": 100,
    "--run.rollouts_every": 3,
}
BETAS = [0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.27, 0.35, 0.43, 0.5, 0.35, 0.2, 0.1, 0.05, 0.01]
TERMINAL = """<body style="margin:0;background:#16181b;color:#e4e6e8;
font:14px/1.45 'DejaVu Sans Mono',monospace;padding:14px 18px"><pre style="margin:0"></pre>"""
Frame = tuple[Image.Image, int]  # and for how many milliseconds it is shown


def train(folder: Path) -> list[str]:
    """Train a short run as runs/arithmetic-001 of a folder and return what it printed."""
    options = [str(word) for pair in SHORT.items() for word in pair]
    command = [sys.executable, "-m", "tether", "train", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def picture(data: bytes) -> Image.Image:
    """Put a screenshot at the top left of a frame of the movie's size."""
    frame = Image.new("RGB", (WIDTH, HEIGHT), "#16181b")
    frame.paste(Image.open(io.BytesIO(data)).convert("RGB"), (0, 0))
    return frame


def terminal_frames(browser: Browser, lines: list[str]) -> list[Frame]:
    """Return a frame whenever an iteration is done, and one for the closing table."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_content(TERMINAL)
    frames: list[Frame] = []
    rows = HEIGHT // 21 - 1
    done = [at for at, line in enumerate(lines) if "  score " in line and "/" in line.split()[0]]
    for at in [*done, len(lines) - 1]:
        shown = ["$ tether train", *lines[: at + 1]][-rows:]
        page.locator("pre").evaluate("(e, text) => { e.textContent = text }", "\n".join(shown))
        frames.append((picture(page.screenshot()), 330))
    page.close()
    frames[-1] = (frames[-1][0], 1600)
    return frames


def telling_row(run: Path) -> tuple[int, int]:
    """Return iteration and number of a right answer whose tokens strayed far from the reference."""
    rows = [row for path in sorted((run / "rollouts").glob("*.jsonl")) for row in read_lines(path)]
    right = [row for row in rows if row["score"] == 1 and 6 < len(row["kl"]) < 14] or rows
    best = max(right, key=lambda row: sum(x > 0.5 for x in row["kl"]))
    return best["iteration"], best["row"]


def page_frames(browser: Browser, run: Path) -> list[Frame]:
    """Return a frame for each beta: the slider, and the tokens under it."""
    iteration, row = telling_row(run)
    with served(run) as address:
        context = browser.new_context(
            viewport={"width": WIDTH, "height": 900}, color_scheme="dark", locale="en-GB"
        )
        page = context.new_page()
        page.set_default_timeout(180_000)
        place = f"#/run/{run.name}/iteration/{iteration}/row/{row}?colour=token_level_rewards"
        page.goto(f"{address}/{place}")
        page.locator(".whatif td.after").first.wait_for()
        frames = [(stacked(page, beta), 420) for beta in BETAS]
        context.close()
    return frames


def stacked(page: Page, beta: float) -> Image.Image:
    """Move beta, then put prompt and response, the tokens and the slider over one another.

    The number beside the slider may be larger than the slider's end.
    """
    field = page.locator(".whatif .slider input[type=number]").first
    field.evaluate(
        "(e, x) => { e.value = x; e.dispatchEvent(new Event('input')) }",
        str(beta),
    )
    page.wait_for_timeout(1500)
    texts = page.locator(".texts").bounding_box()
    chips = page.locator(".card:has(.chips)").bounding_box()
    slider = page.locator(".whatif .slider").first.bounding_box()
    low = page.locator(".chips").bounding_box()
    if not (texts and chips and slider and low):
        raise SystemExit("The page does not show a row with tokens and a slider.")
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    parts = [
        whole.crop((0, int(texts["y"]), WIDTH, int(texts["y"] + min(texts["height"], 140)))),
        whole.crop((0, int(chips["y"]), WIDTH, int(low["y"] + low["height"] + 8))),
        whole.crop((0, int(slider["y"] - 6), WIDTH, int(slider["y"] + slider["height"] + 6))),
    ]
    frame = Image.new("RGB", (WIDTH, HEIGHT), "#16181b")
    top = 6
    for part in parts:
        frame.paste(part, (0, top))
        top += part.height + 8
    return frame


def save(frames: list[Frame], target: Path) -> None:
    """Write the movie, shortened to SECONDS if it were longer."""
    total = sum(milliseconds for _, milliseconds in frames)
    share = min(1.0, 1000 * SECONDS / total)
    small = [frame.quantize(COLOURS, dither=Image.Dither.NONE) for frame, _ in frames]
    durations = [int(share * milliseconds) // 10 * 10 for _, milliseconds in frames]
    target.parent.mkdir(parents=True, exist_ok=True)
    small[0].save(
        target, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True
    )
    size = target.stat().st_size / 1e6
    print(f"{target}: {len(frames)} frames, {sum(durations) / 1000:.1f} s, {size:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a finished run, with --log")
    parser.add_argument("--log", type=Path, help="what `tether train` printed about it")
    parser.add_argument("--out", type=Path, default=TARGET)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = arguments.run or Path(folder) / "runs" / "arithmetic-001"
        lines = arguments.log.read_text().splitlines() if arguments.log else train(Path(folder))
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        frames = terminal_frames(browser, lines) + page_frames(browser, run)
        browser.close()
    save(frames, arguments.out)


if __name__ == "__main__":
    main()
