"""From nothing to the first number and the first picture, by each way of installing.

    python scripts/measure_install.py [--write]

Each way begins with an empty environment and an empty cache: a clone with `make demo`, a wheel with
pip, a wheel with uvx (if uv is installed). The first number is the first line of metrics.jsonl; the
first picture is the recorded run's curve in the answers of `tether view --demo`.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "install.md", ROOT / "docs" / "zh" / "install.md"]
BEGIN, END = "<!-- install table: made by scripts/measure_install.py -->", "<!-- end -->"
POLL_SECONDS = 0.2


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def by_make(folder: Path) -> tuple[list[str], Path, Path]:
    """Return the start of a command, its working directory and the environment's folder."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    clone = folder / "clone"
    run(["make", ".venv/.installed"], clone, folder)
    return [str(clone / ".venv" / "bin" / "tether")], clone, clone / ".venv"


def by_pip(folder: Path) -> tuple[list[str], Path, Path]:
    wheel, venv = build_wheel(folder), folder / "venv"
    run([sys.executable, "-m", "venv", str(venv)], folder, folder)
    run([str(venv / "bin" / "pip"), "install", "--quiet", str(wheel)], folder, folder)
    return [str(venv / "bin" / "tether")], folder, venv


def by_uvx(folder: Path) -> tuple[list[str], Path, Path]:
    wheel = build_wheel(folder)
    start = ["uvx", "--quiet", "--from", str(wheel), "tether"]
    run([*start, "--help"], folder, folder)
    return start, folder, folder / "cache"


def run(command: list[str], where: Path, folder: Path) -> None:
    subprocess.run(command, cwd=where, env=environment(folder), check=True, capture_output=True)


def environment(folder: Path) -> dict[str, str]:
    """With caches of its own, and without the way to this source tree."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "UV_CACHE_DIR": str(folder / "cache"), "PIP_CACHE_DIR": str(folder / "pip")}


def seconds_to_number(start: list[str], where: Path, folder: Path) -> float:
    began = time.perf_counter()
    options = ["--run.dir", str(folder / "run"), "--train.eval_prompts", "8"]
    process = subprocess.Popen(
        [*start, "train", *options],
        cwd=where,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
    )
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(start)} train ended with {process.returncode}")
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - began
    process.kill()
    process.wait()
    return seconds


def seconds_to_picture(start: list[str], where: Path, folder: Path) -> float:
    began = time.perf_counter()
    command = [*start, "view", "--demo", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=where, env=environment(folder), stdout=subprocess.PIPE, text=True
    )
    try:
        said = process.stdout.readline() if process.stdout else ""
        address = next(word for word in said.split() if word.startswith("http://"))
        series = f"{address}/api/runs/arithmetic/series?names=score/mean"
        assert json.load(urllib.request.urlopen(series))["values"]["score/mean"]
        urllib.request.urlopen(f"{address}/plotly.min.js").read()
        return time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def megabytes(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def measure() -> str:
    ways = {"`make` in a clone": by_make, "wheel with `pip`": by_pip}
    if shutil.which("uvx"):
        ways["wheel with `uvx`"] = by_uvx
    lines = ["| way | install | first number | first picture | on disk |", "|---|---|---|---|---|"]
    for name, way in ways.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            began = time.perf_counter()
            start, where, installed = way(folder)
            seconds = time.perf_counter() - began
            number, picture = (
                f(start, where, folder) for f in (seconds_to_number, seconds_to_picture)
            )
            cells = f"{seconds:.0f} s | {number:.0f} s | {picture:.1f} s"
            lines.append(f"| {name} | {cells} | {megabytes(installed):,.0f} MB |")
            print(lines[-1], flush=True)
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    note = "the downloads came over this machine's connection, torch as its CPU build"
    return "\n".join([*lines, "", f"{date.today()}, {machine}; {note}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/install.md and its twin")
    write, table = parser.parse_args().write, measure()
    print(table)
    for page in PAGES if write else []:
        text = page.read_text(encoding="utf-8")
        head, _, rest = text.partition(BEGIN)
        tail = rest.partition(END)[2]
        page.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
