"""`[RECIPE] [--section.field VALUE]…`: the words of train, check and eval, and their help."""

from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from tether.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from tether.config.load import Schema

RecipeAndFields = Annotated[
    list[str] | None, typer.Argument(metavar="[RECIPE] [--section.field VALUE]...", hidden=True)
]
TrustRun = Annotated[
    bool,
    typer.Option(
        "--trust-run", help="Use the Python files and addresses that a run's config names."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run at run.dir, if there is one.")
]
AllowChanged = Annotated[
    bool,
    typer.Option("--allow-changed", help="Go on although config, data, model or torch changed."),
]
CONTEXT: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["--help", "-h"]}


def parse_words(
    words: list[str], schema: "type[BaseModel] | None" = None
) -> tuple[list[str], dict[str, Any]]:
    """Split words into plain ones and overrides by dotted name; values are read as YAML.

    `schema` is what they are fields of, if not of `tether train`.
    """
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
        overrides[name] = _read_value(name, value, schema)
    return plain, overrides


def _read_value(name: str, value: str, schema: "type[BaseModel] | None") -> Any:
    """Read a value as YAML, but keep text where a field holds text: 007 is a fine run name."""
    import yaml

    from tether.config import Config, walk_fields
    from tether.support.strict_yaml import load_yaml

    fields = walk_fields(schema or Config)
    annotation = next((info.annotation for dotted, info in fields if dotted == name), None)
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    is_nested = value.startswith(("[", "{")) and not set(members) <= {str, Path, NoneType}
    if {str, Path} & set(members) and not is_nested and value not in ("null", "~"):
        return value
    try:
        return load_yaml(value)
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"--{name}: {value[:200]!r} cannot be read as a YAML value.") from None


def one_word(plain: list[str], default: str, what: str) -> str:
    if len(plain) > 1:
        for word in plain:
            name, equals, value = word.partition("=")
            if equals and "." in name:
                raise UserError(f"Write --{name} {value} in place of {word}.")
        raise UserError(f"Expected one {what}, got {' '.join(plain)}.")
    return plain[0] if plain else default


def read_stage(words: list[str], schema: "type[Schema]") -> "Schema":
    """Return a stage's config: a recipe with overrides, or overrides alone."""
    from tether.config.load import load_config, merge_overrides, validate_config

    plain, overrides = parse_words(words, schema)
    recipe = one_word(plain, "", "recipe")
    if recipe:
        return load_config(recipe, overrides, schema)
    mapping: dict[str, Any] = {}
    merge_overrides(mapping, overrides, schema)
    return validate_config(mapping, schema)


class ConfigCommand(TyperCommand):
    """A command whose --help ends with every config field, made from the schema."""

    def schema(self) -> "type[BaseModel]":
        from tether.config import Config

        return Config

    # typer's base class takes a context of click's, which it no longer gives a public name.
    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from tether.config import walk_fields

        formatter.write("\nFields (--section.field VALUE), in the order in which data flows:\n")
        section = None
        for dotted, info in walk_fields(self.schema()):
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


WITH_FIELDS: dict[str, Any] = {
    "cls": ConfigCommand,
    "context_settings": CONTEXT,
}  # of a command that takes config fields
