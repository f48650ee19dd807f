"""States of a folder that a power cut may leave, as in ALICE (Pillai et al., OSDI 2014).

A disk keeps synced data: a file's content after fsync of the file, its name after fsync of its
folder. Any part of the other data may be lost. `recorded` watches a block of code and collects four
possible states before and after each of its renames, removals and fsyncs: only synced data; all
names, without unsynced content; all names, with half of the unsynced content; everything, as after
a kill of the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_WATCHED = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "truncate")


@dataclass(frozen=True)
class State:
    """A state: files by path (content; None for a folder, Path for a link).

    `after` is the operation after which it was recorded, `progress` what the code had acknowledged
    by then.
    """

    kind: str
    after: str
    progress: Any
    tree: dict[str, bytes | Path | None]

    def restore(self, folder: Path) -> None:
        """Make `folder` equal to the state."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.tree.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir(exist_ok=True)
            elif isinstance(content, Path):
                path.symlink_to(content)
            else:
                path.write_bytes(content)

    def __str__(self) -> str:
        return f"{self.kind} after {self.after}"


@dataclass
class _Disk:
    """The part of a folder that is on disk. Files and folders have numbers that are not reused."""

    root: Path
    numbers: dict[int, int] = field(default_factory=dict)  # by live inode
    synced: dict[int, bytes] = field(default_factory=dict)  # content by number
    # Synced entries of each folder: its number, by name the entry's number, link and is_folder.
    names: dict[int, dict[str, tuple[int, Path | None, bool]]] = field(default_factory=dict)
    count: int = 0

    def number(self, path: Path) -> int:
        inode = path.lstat().st_ino
        if inode not in self.numbers:
            self.count += 1
            self.numbers[inode] = self.count
        return self.numbers[inode]

    def forget_removed(self) -> None:
        """Forget removed inodes, whose inode numbers the system reuses."""
        live = {path.lstat().st_ino for path in [self.root, *self.root.rglob("*")]}
        self.numbers = {inode: number for inode, number in self.numbers.items() if inode in live}

    def sync(self, path: Path) -> None:
        if path.is_dir():
            self.names[self.number(path)] = self.entries(path)
        else:
            self.synced[self.number(path)] = path.read_bytes()

    def entries(self, folder: Path) -> dict[str, tuple[int, Path | None, bool]]:
        return {
            path.name: (
                self.number(path),
                Path(os.readlink(path)) if path.is_symlink() else None,
                path.is_dir(),
            )
            for path in sorted(folder.iterdir())
        }

    def durable_tree(self) -> dict[str, bytes | Path | None]:
        """The tree that is left if only synced data survives."""
        tree: dict[str, bytes | Path | None] = {}

        def visit(number: int, prefix: str) -> None:
            for name, (child, link, is_folder) in self.names.get(number, {}).items():
                if link is not None:
                    tree[prefix + name] = link
                elif is_folder:
                    tree[prefix + name] = None
                    visit(child, f"{prefix}{name}/")
                else:
                    tree[prefix + name] = self.synced.get(child, b"")

        visit(self.number(self.root), "")
        return tree

    def current_tree(self, unsynced: Callable[[bytes], bytes]) -> dict[str, bytes | Path | None]:
        """All current names; `unsynced` gives the part that survives of unsynced content."""
        tree: dict[str, bytes | Path | None] = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                tree[name] = Path(os.readlink(path))
            elif path.is_dir():
                tree[name] = None
            else:
                content, synced = path.read_bytes(), self.synced.get(self.number(path), b"")
                # Appended content can be lost, earlier content cannot.
                start = len(synced) if content.startswith(synced) else 0
                tree[name] = content[:start] + unsynced(content[start:])
        return tree


@contextlib.contextmanager
def recorded(root: Path, progress: Callable[[], Any] = lambda: None) -> Iterator[list[State]]:
    """Collect the states of the folder `root` while the block works on it; it begins synced."""
    disk = _Disk(root)
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            disk.sync(path)
    states: list[State] = []
    trees: set[int] = set()

    def collect(after: str) -> None:
        disk.forget_removed()
        for kind, tree in (
            ("only what was synced", disk.durable_tree()),
            ("all names, nothing unsynced", disk.current_tree(lambda content: b"")),
            ("all names, half unsynced", disk.current_tree(lambda c: c[: len(c) // 2])),
            ("everything", disk.current_tree(lambda content: content)),
        ):
            state = hash((repr(progress()), repr(sorted(tree.items()))))
            if state not in trees:
                trees.add(state)
                states.append(State(kind, after, progress(), tree))

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            label = (
                f"{name} {' '.join(str(argument).replace(str(root), '') for argument in arguments)}"
            )
            if name == "fsync":
                path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                label = f"fsync {str(path).replace(str(root), '')}"
                collect(f"the operations before {label}")
                if path == root or root in path.parents:
                    disk.sync(path)
            result = real(*arguments, **options)
            collect(label)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _WATCHED:
            patch.setattr(os, name, watched(name))
        yield states
        collect("the end")
