"""`[RECIPE] [--section.field VALUE]…`: the words of train, check and eval, and their help."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from tether.errors import UserError

RecipeAndFields = Annotated[
    list[str] | None, typer.Argument(metavar="[RECIPE] [--section.field VALUE]...", hidden=True)
]
CONTEXT = {"ignore_unknown_options": True, "help_option_names": ["--help", "-h"]}


def parse_words(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Plain words, and overrides by dotted name; values are read as YAML."""
    plain, overrides = [], {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("-"):
            plain.append(word)
            continue
        if not word.startswith("--"):
            raise UserError(f"Unknown option {word}; fields are written --section.field VALUE.")
        name, equals, value = word.removeprefix("--").partition("=")
        value = value if equals else next(remaining, None)
        if value is None or (not equals and value.startswith("--")):
            raise UserError(f"--{name} needs a value: --{name} VALUE.")
        overrides[name] = _read_value(name, value)
    return plain, overrides


def _read_value(name: str, value: str) -> Any:
    """As YAML, but text stays text where a field holds text: 007 is a fine name for a run."""
    import yaml

    from tether.config import walk_fields

    annotation = next((info.annotation for dotted, info in walk_fields() if dotted == name), None)
    is_text = bool({str, Path} & {annotation, *get_args(annotation)})
    if is_text and value not in ("null", "~"):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--{name}: {value!r} cannot be read as a YAML value.") from None


def one_word(plain: list[str], default: str, what: str) -> str:
    if len(plain) > 1:
        raise UserError(f"Expected one {what}, got {' '.join(plain)}.")
    return plain[0] if plain else default


class ConfigCommand(TyperCommand):
    """A command whose --help ends with every config field, made from the schema."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from tether.config import walk_fields

        formatter.write("\nFields (--section.field VALUE), in the order in which data flows:\n")
        section = None
        for dotted, info in walk_fields():
            head = dotted.rpartition(".")[0]
            if head != section:
                formatter.write("\n")
                section = head
            if dotted == "actor.update.kind":
                formatter.write(f"  --{dotted} {get_args(info.annotation)[0]}\n")
                formatter.write(f"      {info.description}\n")
                continue
            default = describe_default(dotted, info)
            formatter.write(f"  --{dotted}  [{default}]\n      {info.description}\n")


def describe_default(dotted: str, info: Any) -> str:
    if info.is_required():
        return "required"
    if dotted == "threads":
        return "the cores at hand"
    return "none" if info.default is None else str(info.default)
