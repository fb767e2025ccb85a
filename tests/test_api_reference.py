"""The API reference covers every public name, each with a docstring, and its examples run."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import tether
import tether.algo

HOOKS = Path(__file__).resolve().parent.parent / "scripts" / "site_hooks.py"


def listed() -> set[str]:
    """What the reference pages are made of: modules, or single objects of them."""
    return set(re.findall(r'"(tether\.[\w.]+)"', HOOKS.read_text(encoding="utf-8")))


def algo_modules() -> list[str]:
    return [f"tether.algo.{info.name}" for info in pkgutil.iter_modules(tether.algo.__path__)]


def public(module: str) -> dict[str, object]:
    """Functions and classes that a module defines itself."""
    here = importlib.import_module(module)
    return {
        name: value
        for name, value in vars(here).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module
    }


def resolve(entry: str) -> object:
    """Return a module, or an object of one."""
    try:
        return importlib.import_module(entry)
    except ModuleNotFoundError:
        module, _, name = entry.rpartition(".")
        return getattr(importlib.import_module(module), name)


def undocumented(entry: str) -> list[str]:
    """Names below an entry that have no words of their own."""
    value = resolve(entry)
    if inspect.ismodule(value):
        found = public(entry)
        return [f"{entry}.{name}" for name, one in found.items() if not one.__doc__]
    methods = {
        name: method
        for name, method in vars(value).items()
        if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, property))
    }
    lacking = [f"{entry}.{name}" for name, method in methods.items() if not method.__doc__]
    return [*lacking, *([] if value.__doc__ else [entry])]


def test_every_public_name_is_in_the_reference():
    entries = listed()
    for name in tether.__all__:
        value = getattr(tether, name)
        home = value.__module__
        if name == "train":
            home = "tether.api"  # the same with a display
        assert {home, f"{home}.{name}"} & entries, f"tether.{name}"
    assert set(algo_modules()) <= entries
    assert "tether.plots" in entries


def test_every_entry_of_the_reference_exists_and_has_words():
    assert len(listed()) > 15
    assert [name for entry in sorted(listed()) for name in undocumented(entry)] == []


def test_functions_of_algo_say_the_shapes_of_their_tensors():
    bare = []
    for module in algo_modules():
        for name, function in public(module).items():
            if not inspect.isfunction(function):
                continue
            for parameter in inspect.signature(function).parameters.values():
                if parameter.annotation is parameter.empty:
                    bare.append(f"{module}.{name}({parameter.name}) has no type")
                elif str(parameter.annotation) == "<class 'torch.Tensor'>":
                    bare.append(f"{module}.{name}({parameter.name}) is a tensor without a shape")
    assert bare == []


def examples(entry: str) -> list[doctest.DocTest]:
    return [t for t in doctest.DocTestFinder().find(resolve(entry), entry) if t.examples]


def test_the_examples_of_the_reference_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [test for entry in ["tether.algo", *sorted(listed())] for test in examples(entry)]
    assert {"tether.algo", "tether.api.start"} <= {test.name for test in found}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        test.globs = {"tether": tether}
        said: list[str] = []
        runner.run(test, out=said.append)
        if runner.failures:
            pytest.fail("".join(said))
