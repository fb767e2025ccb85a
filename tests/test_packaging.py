"""The versions that are tested, and the bounds that are promised."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")
ROOT = Path(__file__).parent.parent


def versions() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_dependency_has_a_tested_version_within_its_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = versions()
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        wanted = Requirement(text)
        assert found[canonicalize_name(wanted.name)] in wanted.specifier, text


def test_constraints_hold_names_and_versions_and_nothing_else():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or (line.count("==") == 1 and not set(line) & set(" @/+;"))


def test_extras_are_not_named_as_if_the_package_were_on_an_index():
    """`pip install 'tether[ray]'` would install somebody else's package."""
    texts = [*ROOT.glob("src/tether/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("README*")]
    assert [path for path in texts if "tether[" in path.read_text(encoding="utf-8")] == []


def test_no_line_installs_from_an_index_entry_that_does_not_exist():
    """What is installed is a clone, a wheel or another project; NAME stands for what may come."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("README*")]
    install = re.compile(
        r"(?:pip|pipx) (?:install|run)(?: --\S+)* '?\"?(?:tether)\b|--from tether\b"
    )
    for page in pages:
        assert not install.search(page.read_text(encoding="utf-8")), page
    assert install.search("pip install tether")
    assert install.search("uvx --from tether tether train")
