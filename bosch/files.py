"""Write files so that a crash or a power cut leaves either the old or the new content."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_TEMPORARY = ".tmp-"
_MOST_JSON_BYTES = 256 * 1024**2


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no blanks, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    # A lone surrogate, of a file name that is no UTF-8, becomes JSON's own escape.
    write_text(path, text.encode("utf-8", "backslashreplace").decode())


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path for the block to write a file or folder at, which replaces `path` at its end.

    The temporary path lies in the same folder and has the suffix of `path`. It is on disk before it
    is renamed; where the block raises, it is removed and `path` stays as it was.
    """
    make_folder(path.parent)
    temporary = path.with_name(f"{_TEMPORARY}{os.urandom(8).hex()}{path.suffix}")
    try:
        yield temporary
        replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise


def replace(source: Path, target: Path) -> None:
    """Rename a file or folder, on disk before its new name appears; an older target is replaced."""
    old = target.with_name(f"{_TEMPORARY}old-{target.name}")
    if not source.is_symlink():
        sync_tree(source)
    if source.is_dir() and target.exists():
        # No system call replaces a folder that is not empty.
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.replace(source, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; their names are on disk when this returns."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed process left of `replacing` below a folder that nobody writes into."""
    for path in list(folder.rglob(f"{_TEMPORARY}*")):
        _remove(path)


def remove_old_temporaries(folder: Path, seconds: float) -> None:
    """Remove from a folder, not from those in it, temporaries older than any that is in use."""
    for path in list(folder.glob(f"{_TEMPORARY}*")):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > seconds:
                _remove(path)


def read_json(path: Path) -> Any:
    """The value of a JSON file; None where it is missing or torn."""
    try:
        return load_json(path)
    except (OSError, ValueError):
        return None


def load_json(path: Path, most_bytes: int = _MOST_JSON_BYTES) -> Any:
    """The value of a JSON file. Raises OSError, or ValueError for whatever is wrong with it."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"longer than {most_bytes:,} bytes")
    return parse_json(content)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for whatever is wrong with it, deep nesting included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many values inside each other") from None


def file_sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Size in bytes of every file below the named files and folders of `folder`, once on disk.

    A file that is written last and holds them says that all is whole: see `size_fault`.
    """
    sizes = {}
    for name in names:
        sync_tree(folder / name)
        below = files_below(folder / name) if (folder / name).is_dir() else [""]
        for file in below:
            sizes[os.path.normpath(f"{name}/{file}")] = (folder / name / file).stat().st_size
    sync(folder)
    return sizes


def size_fault(folder: Path, sizes: Mapping[str, int]) -> str | None:
    """The first file that is missing or of another size than `file_sizes` saw; None if none is."""
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} holds {path.stat().st_size:,} bytes instead of {size:,}"
    return None


def sync_tree(folder: Path) -> None:
    """Put a file, or every file and folder below a folder, on disk."""
    if not folder.is_dir():
        sync(folder)
    for directory, _, names in os.walk(folder):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def files_below(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, relative to it, in order."""
    files = []
    for directory, _, names in os.walk(folder):
        base = os.path.relpath(directory, folder)
        files += [os.path.normpath(os.path.join(base, name)) for name in names]
    yield from sorted(files)


def make_symlink(link: Path, target: Path) -> None:
    """Point a relative symbolic link at a folder, replacing an older link in one step."""
    with replacing(link) as temporary:
        os.symlink(os.path.relpath(target, link.parent), temporary)


def sync(path: Path) -> None:
    """Put a file's content, or a folder's names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
