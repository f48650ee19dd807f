"""YAML as recipes need it: the safe loader, with repeated keys refused instead of dropped."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from bosch.errors import UserError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """The safe loader; a mapping that names a key twice is an error with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands here a second time", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; raises UserError naming `where` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(
            f"{where}{line}: not valid YAML: {error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML: {reason}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises UserError when there is none."""
    try:
        text = path.read_text(encoding="utf-8")
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
        raise UserError(f"{path}: holds a {type(value).__name__}; expected keys such as 'model:'")
    return {str(key): item for key, item in value.items()}
