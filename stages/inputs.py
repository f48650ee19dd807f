"""Fields of a section that are paths.

    path: Annotated[PathText | None, Input(identity=…, check=…)]

The annotation decides how the path is resolved, its value in the stage's key, and which paths are
refused.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bosch.errors import UserError
from bosch.files import canonical_json
from data_prep.source_files import files_below
from stages.faults import Fault
from stages.fields import Section

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# A longer list of files is replaced by one hash.
_MAX_LISTED = 32
_Section = TypeVar("_Section", bound=Section)


class Hasher(Protocol):
    """Content hashes of files."""

    def sha256(self, path: Path) -> str:
        """SHA-256 of a file's bytes."""


@dataclass(frozen=True)
class Input:
    """Marks a field as a path.

    `identity(section, path, hasher)` is the path's JSON value in the stage's key: a hash of the
    content, or of the default if the path is None; None leaves the field out.
    `check(section, path)` raises UserError for an invalid path.
    `is_name(section, text, root)`: whether the text is a name on the hub, which is not resolved.
    `is_pattern`: whether the path may be a glob.
    """

    identity: Callable[[Any, str | None, Hasher], Any] | None = None
    check: Callable[[Any, str], None] | None = None
    is_name: Callable[[Any, str, Path], bool] | None = None
    is_pattern: bool = False


@dataclass(frozen=True)
class Origins:
    """The folders that relative paths start from, by the place where the path is written.

    `overridden` are the dotted paths, split at the dots, of fields that the command line replaced.
    """

    file: Path
    command: Path
    defaults: Path
    overridden: frozenset[tuple[str, ...]] = frozenset()

    def of(self, place: tuple[str, ...], is_default: bool = False) -> Path:
        """The folder that a relative path of the field at `place` starts from."""
        if is_default:
            return self.defaults
        replaced = (place[:length] in self.overridden for length in range(1, len(place) + 1))
        return self.command if any(replaced) else self.file


def absolute(section: _Section, origins: Origins, place: tuple[str, ...] = ()) -> _Section:
    """The section at `place` of a recipe with its paths absolute."""
    changes: dict[str, Any] = {}
    for name, value in section:
        annotation, path = _annotation(section, name), (*place, name)
        if isinstance(value, Section):
            changes[name] = absolute(value, origins, path)
        elif isinstance(value, list):
            root = origins.of(path)
            changes[name] = [
                absolute(item, origins, (*path, str(i)))
                if isinstance(item, Section)
                else os.path.normpath(root / Path(item).expanduser())
                if annotation is not None
                else item
                for i, item in enumerate(value)
            ]
        elif annotation is not None and isinstance(value, dict):
            root = origins.of(path)
            changes[name] = {
                key: os.path.normpath(root / Path(item).expanduser()) for key, item in value.items()
            }
        elif annotation is not None and isinstance(value, str):
            root = origins.of(path, is_default=name not in section.model_fields_set)
            file = os.path.normpath(root / Path(value).expanduser())
            # Brackets in the root are no part of the pattern.
            if annotation.is_pattern and not os.path.exists(file):
                file = os.path.normpath(glob.escape(str(root)) / Path(value).expanduser())
            is_name = annotation.is_name is not None and annotation.is_name(section, value, root)
            changes[name] = value if is_name and not os.path.exists(file) else file
    return section.model_copy(update=changes)


def section_identity(section: Section, hasher: Hasher) -> tuple[dict[str, Any], dict[str, Any]]:
    """A section's values without its paths, and the paths' values in a key, by dotted path.

    Raises OSError for a file that cannot be read, UserError for one that does not exist.
    """
    config, inputs = section.model_dump(mode="json"), dict[str, Any]()
    for place, owner in _sections(section):
        values: Any = config
        for step in place:
            values = values[step]
        prefix = "".join(f"{step}." for step in place)
        for name, path in owner:
            annotation = _annotation(owner, name)
            if annotation is None or annotation.identity is None:
                continue
            del values[name]
            content = annotation.identity(owner, path, hasher)
            if content is not None:
                inputs[f"{prefix}{name}"] = content
    return config, inputs


def input_faults(key: str, section: Section) -> Iterator[Fault]:
    """The faults of the paths of the section under a recipe's `key`."""
    for place, owner in _sections(section):
        for name, path in owner:
            annotation = _annotation(owner, name)
            if annotation is None or annotation.check is None or path is None:
                continue
            where = ".".join(map(str, (key, *place, name)))
            try:
                annotation.check(owner, path)
            except UserError as error:
                yield Fault.of(error, where)
            except OSError as error:
                yield Fault(where, f"{error.filename} cannot be read: {error.strerror}")


def _annotation(section: Section, name: str) -> Input | None:
    metadata = type(section).model_fields[name].metadata
    return next((entry for entry in metadata if isinstance(entry, Input)), None)


def _sections(
    section: Section, place: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Section]]:
    """A section and all sections inside it, each with its place: field names and list indices."""
    yield place, section
    for name, value in section:
        if isinstance(value, Section):
            yield from _sections(value, (*place, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    yield from _sections(item, (*place, name, index))


def is_hub_name(text: str, root: Path) -> bool:
    """Whether a path that does not exist may be a name on the hub."""
    if _HUB_NAME.fullmatch(text) is None:
        return False
    return not (root / text.partition("/")[0]).is_dir()


def hashed_files(pattern: str, files: Iterable[Path], hasher: Hasher) -> dict[str, Any]:
    """Names and hashes of the files that a path, a folder or a glob names."""
    base = common_folder(pattern)
    hashes = {path.relative_to(base).as_posix(): hasher.sha256(path) for path in files}
    if len(hashes) <= _MAX_LISTED:
        return {"files": hashes}
    digest = hashlib.sha256(canonical_json(hashes).encode()).hexdigest()
    return {"files": len(hashes), "sha256": digest}


def common_folder(pattern: str) -> Path:
    """The folder to which the names of a pattern's files are relative."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        return path
    plain_parts = itertools.takewhile(lambda name: not glob.has_magic(name), path.parts[:-1])
    return Path(*plain_parts)


def python_identity() -> dict[str, Any]:
    """Identity of this Python, whose standard library is the default text."""
    return {"python": f"{platform.python_implementation()} {platform.python_version()}"}


def _check_folder(section: Section, folder: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder {folder}")
    if not any(file.stat().st_size for file in files_below(Path(folder))):
        raise UserError(f"{folder} holds no text")


def prose(default: Callable[[], dict[str, Any]] = python_identity) -> Input:
    """A field for a folder of text files; `default` describes what is read without one."""

    def identity(section: Section, folder: str | None, hasher: Hasher) -> dict[str, Any]:
        if folder is None:
            return default()
        return hashed_files(folder, sorted(files_below(Path(folder))), hasher)

    return Input(identity, _check_folder)
