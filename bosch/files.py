"""Files: written so that a crash leaves the old or the new content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import RunError, UserError, is_disk_full

TEMPORARY = ".tmp-"
_ALMOST_FULL_BYTES = 1024**2
# A file server is away, the file is another user's, the process is at its limits.
_FILE_MAY_BE_INTACT = frozenset(
    {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EACCES, errno.EPERM, errno.EMFILE,
     errno.ENFILE, errno.ENOMEM}
)  # fmt: skip


def almost_full(folder: Path) -> bool:
    """Whether the disk of a folder has almost no space left; False if it is unknown."""
    with contextlib.suppress(OSError):
        space = os.statvfs(folder)
        return space.f_bavail * space.f_frsize < _ALMOST_FULL_BYTES
    return False


def check_hub_cache(error: BaseException) -> None:
    """For a full disk's error, raise one that names the hub's cache, as libraries do not."""
    if is_disk_full(error):
        from huggingface_hub.constants import HF_HUB_CACHE

        place = os.path.join(HF_HUB_CACHE, "models")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place) from error


def canonical_json(value: Any) -> str:
    """Canonical JSON text of a value: keys sorted, no blanks, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    # A lone surrogate, from a file name that is not UTF-8, is written as an escape.
    write_text(path, text.encode("utf-8", "backslashreplace").decode())


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Temporary path for a file or folder, which replaces `path` at the end of the block.

    The temporary path is in the same folder and has the suffix of `path`. It is synced before it is
    renamed; if the block raises, it is removed and `path` is unchanged. An OSError names `path`.
    """
    make_folder(path.parent)
    name = f"{TEMPORARY}{os.urandom(8).hex()}{path.suffix}"
    temporary = path.with_name(name)
    try:
        yield temporary
        replace(temporary, path)
    except BaseException as error:
        # Writes and syncs name no file.
        if isinstance(error, OSError) and name in str(error.filename or name):
            error.filename = str(path)
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def replace(source: Path, target: Path) -> None:
    """Sync a file or folder and rename it; replaces an older target.

    Raises OSError if that fails; the target is then unchanged.
    """
    old = target.with_name(f"{TEMPORARY}old-{target.name}")
    is_link = source.is_symlink()
    if not is_link:
        sync_tree(source)
    # Python cannot replace a non-empty folder, or replace anything by a folder, in one call.
    moved = source.is_dir() and not is_link and os.path.lexists(target)
    if moved:
        remove(old)
        os.rename(target, old)
    try:
        os.replace(source, target)
    except BaseException:
        if moved and not os.path.lexists(target):
            os.rename(old, target)
        raise
    sync(target.parent)
    remove(old)


def exists(path: Path) -> bool:
    """As `Path.exists`, but raises OSError if the system cannot tell; Python 3.14 returns False."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def is_folder(path: Path) -> bool:
    """Whether a folder, or a link to one, exists. Raises OSError if the system cannot tell."""
    return exists(path) and stat.S_ISDIR(os.stat(path).st_mode)


def names_in(folder: Path) -> list[str]:
    """Names of the entries of a folder, sorted; empty if there is no folder. Raises OSError."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync their names to disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def read_json(path: Path) -> Any:
    """The value of a JSON file; None if it is missing, truncated or invalid."""
    try:
        return load_json(path)
    except (OSError, ValueError):
        return None


def read_record(path: Path) -> Any:
    """As `read_json`, for a file that nobody replaces; OSError if unreadable but perhaps intact."""
    try:
        return load_json(path)
    except OSError as error:
        read_fault(path.name, error)
    except ValueError:
        pass
    return None


def load_json(path: str | os.PathLike[str]) -> Any:
    """The value of a JSON file. Raises OSError, or ValueError for any fault in the content."""
    try:
        return json.loads(Path(path).read_bytes().decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def load_user_json(path: str | os.PathLike[str], advice: str) -> Any:
    """JSON that a user names; UserError with `advice` if it is missing or damaged."""
    try:
        return load_json(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            raise UserError(f"{path}: there is no such file; {advice}") from None
        raise UserError(f"{path} cannot be read as JSON ({reason}); {advice}") from None


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError with the file's name."""
    with path.open("rb", buffering=0) as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            error.filename = str(path)
            raise


def file_hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Sync every file below the named files and folders of `folder`; returns their SHA-256.

    `hash_fault` compares them later. Raises RunError for a link to a file, which may change.
    """
    hashes: dict[str, str] = {}
    for name in names:
        sync_tree(folder / name)
        below = files_below(folder / name) if (folder / name).is_dir() else [""]
        for file in below:
            path = os.path.normpath(f"{name}/{file}")
            hashes[path] = file_digest(folder / path)
    if fault := listing_fault(folder, hashes):
        raise RunError(f"{folder}: {fault}")
    sync(folder)
    return hashes


def hash_fault(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """The first of the files that differs from `file_hashes`, or None."""
    if fault := listing_fault(folder, hashes):
        return fault
    for name, digest in hashes.items():
        try:
            if file_digest(folder / name) != digest:
                return f"{name} has other content"
        except OSError as error:
            return read_fault(name, error)
    return None


def read_fault(name: str, error: OSError) -> str:
    """Message for a file that cannot be read. Raises the error if the file may be intact."""
    if error.errno in _FILE_MAY_BE_INTACT:
        raise error
    return f"{name} cannot be read ({error.strerror})"


def listing_fault(folder: Path, files: Collection[str]) -> str | None:
    """The first of `files` that is missing or no regular file, or None."""
    for name in files:
        try:
            if not stat.S_ISREG(os.lstat(folder / name).st_mode):
                return f"{name} is no regular file"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return read_fault(name, error)
    return None


def added_entries(folder: Path, files: Collection[str], beside: Collection[str]) -> list[str]:
    """Names of files, links and folders below `folder` that are neither `files` nor their folders.

    The contents of an added folder are not listed.
    """
    files = set(files)
    folders = {str(parent) for name in files for parent in Path(name).parents}
    added = []
    for directory, names, others in os.walk(folder):
        base = os.path.relpath(directory, folder)
        for name in [*names, *others]:
            path = os.path.normpath(os.path.join(base, name))
            is_link = os.path.islink(os.path.join(directory, name))
            expected = folders if name in names and not is_link else files
            if path not in expected and path not in beside:
                added.append(path)
        names[:] = [n for n in names if os.path.normpath(os.path.join(base, n)) in folders]
    return sorted(added)


def remove_empty_folders(folder: Path) -> None:
    """Remove empty folders below `folder`."""
    for directory, _, _ in os.walk(folder, topdown=False):
        if Path(directory) != folder and not os.listdir(directory):
            os.rmdir(directory)


def sync_tree(folder: Path) -> None:
    """Sync a file, or every file and folder below a folder, to disk."""
    if not folder.is_dir():
        sync(folder)
    for directory, _, names in os.walk(folder):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def files_below(folder: Path) -> Iterator[str]:
    """Sorted relative names of all files below a folder; none for a file. Raises OSError."""
    files = []
    for directory, _, names in os.walk(folder, onerror=_raise_unless_missing):
        base = os.path.relpath(directory, folder)
        files += [os.path.normpath(os.path.join(base, name)) for name in names]
    yield from sorted(files)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def newest_below(folder: Path) -> float:
    """Time of the last write to a file below a folder; 0 without files."""
    return max((os.lstat(folder / name).st_mtime for name in files_below(folder)), default=0.0)


def make_symlink(link: Path, target: Path) -> None:
    """Make or replace, in one step, a relative link to a folder; OSError if `link` is a folder."""
    with replacing(link) as temporary:
        # The link's folder may itself be a link.
        place = os.path.relpath(os.path.realpath(target), os.path.realpath(link.parent))
        os.symlink(place, temporary)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
