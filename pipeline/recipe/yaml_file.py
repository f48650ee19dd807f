"""YAML of recipes: PyYAML's safe loader, with plain words as in YAML 1.2.

Repeated keys are refused. As in YAML 1.2 `no` is a word, 1:30 is not 90, and 010 is not 8.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from bosch.errors import UserError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """The safe loader; a repeated key is an error with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' appears here a second time", key_node.start_mark
                )
            if isinstance(key, Hashable):
                keys.add(key)
        return super().construct_mapping(node, deep=deep)


def _set_resolvers() -> None:
    """Set which plain words are null, booleans or numbers; all others are text."""
    _Loader.yaml_implicit_resolvers = {}
    digits, exponent = r"\d[\d_]*", r"[eE][-+]?\d+"
    for tag, pattern, first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(?:0|[1-9][\d_]*)", list("-+0123456789")),
        ("float", rf"[-+]?(?:\.\d+|{digits}\.\d*)(?:{exponent})?", list("-+.0123456789")),
        ("float", rf"[-+]?{digits}{exponent}", list("-+0123456789")),
        ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
        ("merge", r"<<", ["<"]),
    ):
        resolver = re.compile(rf"(?:{pattern})\Z", re.ASCII)
        _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", resolver, first)


_set_resolvers()


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, with aliases copied; raises UserError with `where` and the line."""
    try:
        return _unshared(yaml.load(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        # PyYAML splits some sentences: "expected a single document", "but found another".
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{where}{line}: not valid YAML: {reason}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML: {reason}") from None


def _unshared(value: Any) -> Any:
    """A copy without shared values from aliases, so that an override changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises UserError if it has none."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read: {reason}") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no mapping; expected keys such as 'model:'")
    return {str(key): item for key, item in value.items()}
