"""Read YAML as its standard says: safely, and with a repeated key in a mapping as an error.

PyYAML would take the last of two equal keys, so that one of two settings would silently not apply.
"""

from typing import Any

import yaml
from yaml.constructor import ConstructorError, SafeConstructor


def load_yaml(text: str) -> Any:
    """Read one document; an error is a yaml.YAMLError that knows its line."""
    return _read(_Loader, text)


def load_yaml_fast(text: str) -> Any:
    """Read one of many documents, by libyaml where installed; its errors are worded differently."""
    return _read(_FastLoader, text)


def _read(kind: Any, text: str) -> Any:
    loader = kind(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _UniqueKeys(SafeConstructor):
    """For a loader: check keys as they were written, before merged ones (`<<`) are among them."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        seen = self.__dict__.setdefault("seen", set())
        if id(node) not in seen:
            seen.add(id(node))
            _refuse_repeated_keys(node)
        super().flatten_mapping(node)


_Safe: Any = yaml.SafeLoader
_FastSafe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_UniqueKeys, _Safe): ...


class _FastLoader(_UniqueKeys, _FastSafe): ...


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    first: dict[tuple[str, str], yaml.Mark] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        before = first.setdefault((key.tag, key.value), key.start_mark)
        if before is not key.start_mark:
            raise ConstructorError(
                problem=f"{key.value!r} is here a second time, after line {before.line + 1}; "
                f"keep one of the two",
                problem_mark=key.start_mark,
            )
