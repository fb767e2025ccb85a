"""The Python files that a reward, a tool or an environment consists of: its own file and what it
imports, so far as that lies beside it and is not an installed package. Imports no torch.

Imports are read from the source and not from a process that has run it: what a function imports
when it is called counts as well, and nothing is executed to find out.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tether.errors import RunStopped

MISSING = "missing"
_INSTALLED = [
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib")),
    Path(__file__).resolve().parents[1],  # tether itself, wherever it lies
]


def own_files(kind: str) -> dict[str, Path]:
    """Return the files behind `path/file.py:name` or `package.module:name`, by a name that does
    not depend on where they lie; none of a rule that ships."""
    place, colon, _ = kind.rpartition(":")
    if not colon:
        return {}
    if place.endswith(".py"):
        first = Path(place)
        roots, name = _roots(first.parent), first.name
    else:
        roots = _roots(None)
        found = next(_modules(place, roots), None)
        if found is None:
            return {place: Path(place)}
        name, first = found
    files = {name: first}
    waiting = [first]
    while waiting:
        for inner, path in _imports(waiting.pop(), roots):
            if inner not in files and path.resolve() != first.resolve():
                files[inner] = path
                waiting.append(path)
    return files


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content; `missing` if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return MISSING


class Sources:
    """The files behind some kinds, as they were when this was made."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.kinds = list(kinds)
        self.hashes = self._read()

    def _read(self) -> dict[str, str]:
        files = {name: path for kind in self.kinds for name, path in own_files(kind).items()}
        return {name: hash_file(path) for name, path in files.items()}

    def refuse_changed(self) -> None:
        """Stop the run if a file was edited since: a new process would run another reward."""
        now = self._read()
        changed = [
            name for name in {**self.hashes, **now} if self.hashes.get(name) != now.get(name)
        ]
        if changed:
            raise RunStopped(
                f"{', '.join(sorted(changed))} was edited during the run, so that the rows from "
                f"here on would be scored by another reward; put it back and resume, or resume "
                f"with --allow-changed."
            )


def _roots(beside: Path | None) -> list[Path]:
    """Where a module of the user's own may lie: beside the file, then where Python looks."""
    here = [] if beside is None else [beside]
    return [*here, Path(), *(Path(entry) for entry in sys.path if entry)]


def _imports(path: Path, roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the user's own modules that a file imports, anywhere in it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing it will say why
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _modules(alias.name, roots)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                yield from _modules(name, roots)
        elif isinstance(node, ast.ImportFrom):
            package = path.parent
            for _ in range(node.level - 1):
                package = package.parent
            for alias in node.names:
                inner = [node.module] if node.module else []
                for name in (".".join(inner), ".".join([*inner, alias.name])):
                    yield from _modules(name, [package]) if name else ()


def _modules(dotted: str, roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the file of a module, then those of the packages around it, if it is not installed."""
    parts = dotted.split(".")
    for root in roots:
        inside = root.joinpath(*parts)
        for path in (inside.with_suffix(".py"), inside / "__init__.py"):
            if path.is_file():
                if _is_installed(path):
                    return
                yield str(path.relative_to(root)), path
                packages = (root.joinpath(*parts[:depth]) for depth in range(1, len(parts)))
                for package in packages:
                    if (package / "__init__.py").is_file():
                        file = package / "__init__.py"
                        yield str(file.relative_to(root)), file
                return


def _is_installed(path: Path) -> bool:
    resolved = path.resolve()
    return "site-packages" in resolved.parts or any(
        resolved.is_relative_to(folder) for folder in _INSTALLED
    )
