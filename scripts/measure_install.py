"""From nothing to the first number and the first picture, by each way of installing.

    python scripts/measure_install.py [--only make pip uvx notebook] [--write]

Each way begins without an environment and without a cache of pip or uv, and types what
docs/install.md says: `make demo` in a clone; a wheel with pip; a wheel with uvx; a wheel with pip
and the notebook examples/tour.ipynb. The first number is the first line of metrics.jsonl, or what
the notebook's training cell shows; the first picture is a curve that Chromium has drawn of `tether
view --demo`, or the notebook's first figure. uvx takes the wheels that pip is configured to find.
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
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path

from measure import paste_markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "install.md", ROOT / "docs" / "zh" / "install.md"]
MARKER = "install table: made by scripts/measure_install.py"
HEADS = ["way", "installed after", "first number after", "first picture after", "on disk"]
POLL_SECONDS = 0.1
NOTEBOOK_SECONDS = 240  # what examples/tour.ipynb may take
CURVE = ".chart .js-plotly-plot path.js-line"

# Run by the environment's own Python: each cell in a kernel, as Jupyter does it.
RUN_CELLS = """
import json, sys, time
import nbformat
from nbclient import NotebookClient

began, found = time.perf_counter(), {}
notebook = nbformat.read(sys.argv[1], 4)
client = NotebookClient(notebook, timeout=1200, kernel_name="python3")
with client.setup_kernel():
    for number, cell in enumerate(notebook.cells):
        client.execute_cell(cell, number)
        seconds = time.perf_counter() - began
        outputs = cell.get("outputs", [])
        if "tether.train(" in cell.source and any("data" in output for output in outputs):
            found.setdefault("number", seconds)
        if any("image/png" in output.get("data", {}) for output in outputs):
            found.setdefault("picture", seconds)
            found["pictures"] = found.get("pictures", 0) + 1
found["all"] = time.perf_counter() - began
print(json.dumps(found))
"""


class Machine:
    """A folder in which nothing is installed, with caches of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the clock was set."""
        return time.perf_counter() - self.began

    @property
    def environment(self) -> dict[str, str]:
        """Without the way to this source tree."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        own = {"UV_CACHE_DIR": "uv", "PIP_CACHE_DIR": "pip", "MPLCONFIGDIR": "matplotlib",
               "IPYTHONDIR": "ipython"}  # fmt: skip
        return {**kept, **uv_settings(), **{k: str(self.folder / v) for k, v in own.items()}}

    def run(self, *command: str | Path, where: Path | None = None) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=where or self.folder, env=self.environment,
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            said = (done.stderr or done.stdout)[-2000:]
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{said}")
        return done.stdout

    def first_number(self, command: list[str], where: Path) -> float:
        """Run until the first line of metrics is written; return the clock."""
        process = subprocess.Popen(
            command, cwd=where, env=self.environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            while not any(path.stat().st_size for path in where.glob("runs/*/metrics.jsonl")):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
                time.sleep(POLL_SECONDS)
            return self.seconds
        finally:  # make's child as well
            os.killpg(process.pid, 9)
            process.wait()

    def picture(self, command: list[str], where: Path) -> float:
        """Return the seconds from `tether view --demo` to a curve in a browser that is open."""
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page()
            began = time.perf_counter()
            process = subprocess.Popen(
                [*command, "view", "--demo", "--port", "0"], cwd=where, env=self.environment,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            try:
                said = process.stdout.readline() if process.stdout else ""
                page.goto(next(word for word in said.split() if word.startswith("http://")))
                page.locator(CURVE).first.wait_for(state="attached", timeout=120_000)
                return time.perf_counter() - began
            finally:
                process.terminate()
                process.wait()
                browser.close()


@cache
def uv_settings() -> dict[str, str]:
    """Return pip's folders and indexes as uv reads them."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    found = {
        line.partition("=")[0].rpartition(".")[2]: line.partition("=")[2].strip("'\"")
        for line in said.splitlines()
    }
    names = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX",
             "extra-index-url": "UV_INDEX", "cert": "SSL_CERT_FILE"}  # fmt: skip
    made = {uv: found[pip] for pip, uv in names.items() if pip in found}
    # pip looks for the best version everywhere, uv by default at the first place that has any.
    return {**made, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def make_venv(machine: Machine, *packages: str | Path) -> Path:
    """Make an environment with pip and return its bin folder."""
    machine.run(sys.executable, "-m", "venv", machine.folder / "venv")
    bin_folder = machine.folder / "venv" / "bin"
    machine.run(bin_folder / "pip", "install", "--quiet", *packages)
    return bin_folder


Times = tuple[float, float, float, Path]  # installed, first number, first picture; what was made


def by_make(machine: Machine) -> Times:
    clone = machine.folder / "clone"
    machine.run("git", "clone", "--quiet", ROOT, clone)
    machine.began = time.perf_counter()
    machine.run("make", ".venv/.installed", where=clone)  # the first half of `make demo`
    installed = machine.seconds
    number = machine.first_number(["make", "demo"], clone)
    picture = machine.picture([str(clone / ".venv/bin/tether")], clone)
    return installed, number, installed + picture, clone


def by_pip(machine: Machine) -> Times:
    wheel = build_wheel(machine.folder)
    machine.began = time.perf_counter()
    tether = [str(make_venv(machine, wheel) / "tether")]
    installed = machine.seconds
    number = machine.first_number([*tether, "train"], machine.folder)
    return (
        installed,
        number,
        installed + machine.picture(tether, machine.folder),
        tether_venv(tether),
    )


def tether_venv(tether: list[str]) -> Path:
    return Path(tether[0]).parent.parent


def by_uvx(machine: Machine) -> Times:
    wheel = build_wheel(machine.folder)
    uvx = shutil.which("uvx")
    if uvx is None:  # uv itself is not counted
        machine.run(sys.executable, "-m", "venv", machine.folder / "uv-venv")
        machine.run(machine.folder / "uv-venv/bin/pip", "install", "--quiet", "uv")
        uvx = str(machine.folder / "uv-venv/bin/uvx")
    machine.began = time.perf_counter()
    tether = [uvx, "--quiet", "--from", str(wheel), "tether"]
    machine.run(*tether, "--version")
    installed = machine.seconds
    number = machine.first_number([*tether, "train"], machine.folder)
    return (
        installed,
        number,
        installed + machine.picture(tether, machine.folder),
        machine.folder / "uv",
    )


def by_notebook(machine: Machine) -> Times:
    wheel = build_wheel(machine.folder)
    machine.began = time.perf_counter()
    bin_folder = make_venv(machine, f"{wheel}[plots]", "nbclient", "ipykernel")
    installed = machine.seconds
    found = run_notebook(machine, bin_folder)
    print(f"the whole notebook took {found['all']:.0f} s", flush=True)
    return installed, installed + found["number"], installed + found["picture"], bin_folder.parent


def run_notebook(machine: Machine, bin_folder: Path) -> dict[str, float]:
    """Run every cell; return the seconds to the first number, to the first picture, and in all."""
    notebook = ROOT / "examples" / "tour.ipynb"
    said = machine.run(bin_folder / "python", "-c", RUN_CELLS, notebook)
    return json.loads(said.splitlines()[-1])


WAYS: dict[str, tuple[str, Callable[[Machine], Times]]] = {
    "make": ("`make demo` in a clone", by_make),
    "pip": ("wheel with `pip`", by_pip),
    "uvx": ("wheel with `uvx`", by_uvx),
    "notebook": ("wheel with `pip`, notebook", by_notebook),
}


def megabytes(folder: Path) -> float:
    """Return what files take that are not links; one with several names counts once."""
    files = (path.lstat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum({file.st_ino: file.st_size for file in files}.values()) / 1e6


def measure(only: list[str]) -> list[str]:
    lines = [f"| {' | '.join(HEADS)} |", "|---|---|---|---|---|"]
    for name in only:
        words, way = WAYS[name]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
            installed, number, picture, where = way(Machine(Path(made)))
            cells = [words, *(f"{seconds:.0f} s" for seconds in (installed, number, picture))]
            lines.append(f"| {' | '.join([*cells, f'{megabytes(where):,.0f} MB'])} |")
            print(lines[-1], flush=True)
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    note = "packages and torch's CPU build came over this machine's own connection"
    return [*lines, "", f"{date.today()}, {machine}; {note}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--write", action="store_true", help="into docs/install.md and its twin")
    given = parser.parse_args()
    lines = measure(given.only)
    print("\n".join(lines))
    for page in PAGES if given.write else []:
        paste_markdown(page, MARKER, lines)


if __name__ == "__main__":
    main()
