"""YAML of recipes: PyYAML's safe loader with limits, and plain words as in YAML 1.2.

Repeated keys are refused. As in YAML 1.2 `no` is a word, 1:30 is not 90, and 010 is not 8.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from bosch.errors import UserError, control_character
from bosch.files import open_regular

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Far beyond any recipe; an untrusted file must neither hang nor crash the parser.
_MAX_BYTES = 2**20
_MAX_DEPTH = 32
_MAX_VALUES = 10_000
_MAX_DIGITS = 64


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
    if len(text) > _MAX_BYTES:
        raise UserError(f"{where}: is longer than {_MAX_BYTES:,} characters; that is no recipe")
    try:
        _check_limits(text)
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


def _check_limits(text: str) -> None:
    """Raise a YAML error for text with too many values, or values nested too deeply.

    Uses only the parser's events, before values are built; an alias counts as its value, in number
    and in depth.
    """
    sizes: dict[str, tuple[int, int]] = {}  # number of values, and depth
    open_nodes: list[tuple[str | None, int]] = []  # anchor, values before it
    deepest = [0]  # greatest depth inside each open node
    values = 0
    event: Any
    for event in yaml.parse(text, Loader=_Base):
        problem = None
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            depth = 1 + deepest.pop()
            deepest[-1] = max(deepest[-1], depth)
            if anchor is not None:
                sizes[anchor] = values - before, depth
            continue
        depth = 0
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                problem = f"the alias '*{event.anchor}' is used before or inside its value"
            size, depth = sizes.get(event.anchor or "", (0, 0))
            values += size
            deepest[-1] = max(deepest[-1], depth)
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            problem = _scalar_problem(event)
            if event.anchor is not None:
                sizes[event.anchor] = 1, 0
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, values))
            deepest.append(0)
            values += 1
        if getattr(event, "tag", None) is not None:
            problem = f"the tag {event.tag}; write the plain value"
        if len(open_nodes) + depth > _MAX_DEPTH:
            problem = f"nested more than {_MAX_DEPTH} levels deep"
        if values > _MAX_VALUES:
            problem = f"more than {_MAX_VALUES:,} values, aliases counted each time"
        if problem is not None:
            raise yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


def _scalar_problem(event: yaml.ScalarEvent) -> str | None:
    character = control_character(event.value)
    if character is not None:
        return f"a text holds the control character {character!r}"
    if sum(map(str.isdigit, event.value)) > _MAX_DIGITS and event.implicit[0]:
        number = event.value.replace("_", "").lstrip("+-").replace(".", "", 1)
        if number.isdigit():
            return f"a number of {len(number)} digits"
    return None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises UserError if it has none."""
    try:
        with open_regular(path) as file:
            text = file.read(4 * _MAX_BYTES + 1).decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such recipe file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; a recipe is one YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    value = parse_yaml(text, str(path))
    if value is None:
        raise UserError(f"{path}: is empty; a recipe needs at least model, prepare and search")
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no mapping; expected keys such as 'model:'")
    return {str(key): item for key, item in value.items()}
