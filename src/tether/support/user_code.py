"""Import the user's own code, and list the files it consists of. Imports no torch.

A reward, a tool or an environment is named `path/file.py:name` or `package.module:name`. Its files
are the named one and what that imports, unless it is an installed package. Imports are read from
the source, without running it: what a function imports when it is called counts as well.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from tether import assets
from tether.errors import RunStopped, UserError, describe

MISSING = "missing"
_INSTALLED = [
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib")),
    Path(__file__).resolve().parents[1],  # tether itself, wherever it lies
]


def load_user_code(kind: str, field: str, what: str = "") -> object:
    """Return what `path/file.py:name` or `package.module:name` names.

    For messages, `field` is where the config names it and `what` the noun before its name.
    """
    place, _, name = kind.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UserError(f"{field} names {place}, which is not a file{assets.looked_at(place)}.")
        module = import_file(Path(place))
    else:
        module = import_module(place, field)
    if not hasattr(module, name):
        raise UserError(f"{field}: {place} has no {what}{name!r}.")
    return getattr(module, name)


def refuse_async(function: Callable[..., object], name: str) -> None:
    """Refuse an `async def`: its coroutine would pass for a result."""
    call = getattr(function, "__call__", None)  # noqa: B004 (an object's method may be async)
    for one in (function, call):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            raise UserError(
                f"{name} is an `async def`, which tether does not await; write a plain function, "
                f"with asyncio.run(...) inside if it needs one."
            )


def import_file(path: Path) -> ModuleType:
    """Import one of the user's files, which may import the files beside it."""
    spec = importlib.util.spec_from_file_location(f"tether_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look their module up there
    try:
        with _importing_from(path.resolve().parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file may raise anything when it is imported
        raise UserError(f"{path} does not import: {describe(error)}.") from None
    return module


def import_module(name: str, field: str) -> ModuleType:
    """Import `package.module` from the working directory or the installed packages."""
    try:
        with _importing_from(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):  # something that it imports
            raise UserError(f"{name} does not import: {describe(error)}.") from None
        raise UserError(
            f"{field} names the module {name}, which is neither in {Path.cwd()} nor installed; "
            f"write path/file.py:NAME or package.module:NAME."
        ) from None
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise UserError(f"{name} does not import: {describe(error)}.") from None


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Search this folder first, as Python does for a script. Afterwards it is searched last, for
    what a function imports when it is called, so that no file of the user's hides a module of
    another package."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file itself may have taken it out
            sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def own_files(kind: str) -> dict[str, Path]:
    """Return the files behind `path/file.py:name` or `package.module:name`, keyed by a name that
    does not depend on where they lie. A rule that ships has none."""
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
    """Return the SHA-256 of a file's content, or `missing` where it cannot be read."""
    try:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):  # weights may be larger than memory
                digest.update(chunk)
        return digest.hexdigest()
    except OSError:
        return MISSING


class Sources:
    """The hashes of the files behind some kinds, as they were when this object was made."""

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
    """Return where the user's modules may lie: beside the file, then where Python looks."""
    here = [] if beside is None else [beside]
    return [*here, Path(), *(Path(entry) for entry in sys.path if entry)]


def _imports(path: Path, roots: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the user's modules that a file imports, anywhere in it, as (name, path)."""
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
    """Yield the file of a module and then those of its packages, unless it is installed."""
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
