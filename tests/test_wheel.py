"""The wheel holds all that the command needs, and works in an environment that has nothing else."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tether"
FEW = [
    *("--train.iterations", "2", "--train.eval_prompts", "8", "--threads", "1"),
    *("--rollout.prompts", "8", "--actor.minibatch_rows", "8", "--run.dir", "first"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by the hatchling of the environment, without a network."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    [made] = folder.glob("*.whl")
    return made


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    files = [path for path in SOURCE.rglob("*") if path.is_file()]
    own = {str(path.relative_to(SOURCE.parent)) for path in files if path.suffix != ".pyc"}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == own
    for kind in (".yaml", ".safetensors", ".jsonl", ".js", ".css", ".html"):
        assert any(name.endswith(kind) for name in packed), kind


def test_the_wheel_names_its_command_and_its_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    about = {Path(n).name: n for n in archive.namelist() if ".dist-info/" in n}
    assert "tether = tether.cli.main:main" in archive.read(about["entry_points.txt"]).decode()
    assert "Apache" in archive.read(about["LICENSE"]).decode()
    metadata = archive.read(about["METADATA"]).decode()
    assert re.search(r"^Requires-Dist: torch", metadata, re.MULTILINE)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment that holds the wheel and what it requires."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet"]
    pip += ["--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    yield venv / "bin"
    shutil.rmtree(venv)


def environment() -> dict[str, str]:
    """Without the way to this source tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.long
def test_in_an_empty_environment_demo_trace_and_page_work(installed, tmp_path):
    def tether(*words: str) -> str:
        done = subprocess.run(
            [str(installed / "tether"), *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "held-out" in tether("train", *FEW)
    assert len((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()) == 2
    assert "advantages" in tether("trace", "1+1=?", "--model", "first")
    assert "my-task" in tether("init", "my-task")
    tether("check", "my-task/recipe.yaml")
    tether("view", "first", "--export", "page")
    assert (tmp_path / "page" / "plotly.min.js").stat().st_size > 1_000_000

    command = [str(installed / "tether"), "view", "--demo", "--port", "0"]
    page = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        address = next(word for word in page.stdout.readline().split() if word.startswith("http:"))
        for path in ("/", "/static/main.js", "/plotly.min.js"):
            assert urllib.request.urlopen(address + path).status == 200
        listed = json.load(urllib.request.urlopen(f"{address}/api/runs"))
        assert [run["id"] for run in listed["runs"]] == ["arithmetic"]
    finally:
        page.terminate()
        page.wait()


@pytest.mark.long
def test_the_notebook_runs_from_the_wheel_in_four_minutes(installed, tmp_path, monkeypatch):
    """By a kernel, cell by cell; its pictures are pictures."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from measure_install import NOTEBOOK_SECONDS, Machine, run_notebook

    machine = Machine(tmp_path)
    machine.run(installed / "pip", "install", "--quiet", "matplotlib", "nbclient", "ipykernel")
    found = run_notebook(machine, installed)
    assert found["pictures"] == 3
    assert found["number"] < found["picture"] < found["all"] < NOTEBOOK_SECONDS
