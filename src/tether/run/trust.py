"""Refuse what a run's config.yaml would make a command do.

A run may have been copied from elsewhere. Its weights and numbers are data, but its config can
name Python files, which would be imported, and addresses, which would be connected to. Commands
that only use a run refuse those unless they are told that the run is trusted.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.run.directory import CONFIG

FLAG = "--trust-run"
SECTIONS = ("model", "rollout", "reward")


def refuse_untrusted(
    run: Path,
    sections: Mapping[str, Any],
    used: Collection[str] = SECTIONS,
    typed: Collection[str] = (),
) -> None:
    """Refuse the first field of the `used` sections that names code or an address.

    `typed` are dotted fields that the caller gave, in place of the run's own.
    """
    for field, value in code_and_addresses({name: sections.get(name) for name in used}):
        if any(f"{field}.".startswith(f"{own}.") for own in typed):
            continue
        raise UserError(
            f"{run / CONFIG} names code or an address in {field} ({value[:200]}); if you trust "
            f"where this run came from, add {FLAG}."
        )


def code_and_addresses(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted field, what it names) for all that would be imported or connected to."""
    for name, section in sections.items():
        if name == "model" and isinstance(section, Mapping) and section.get("hub"):
            yield "model.hub", "true: models are fetched from the hub"
        yield from _walk(name, section)


def _walk(field: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _walk(f"{field}.{name}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _walk(f"{field}.{number}", inner)
    elif isinstance(value, str) and (_is_code(field, value) or "://" in value):
        yield field, value


def _is_code(field: str, value: str) -> bool:
    """Return whether it is `file.py:name` or another `where:name`, except `model:PATH`, or a
    command."""
    leaf = field.rsplit(".", 1)[-1]
    if leaf == "command" or field.split(".")[-2:-1] == ["command"]:
        return True
    names_code = leaf in ("kind", "environment", "class") or ".classes." in field
    ours = value.startswith(("model:", "tether.tasks."))
    return names_code and ":" in value and not ours
