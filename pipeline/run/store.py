"""Outputs of stages by key: made in a work directory, published by rename, checked before use.

<root>/store/<stage>/<key>/    published output; exists only with its manifest.json
<root>/work/<stage>/<key>/     unfinished work, kept over crashes; <key>.state.json beside it
<root>/locks/                  one lock for each output that is being made
<root>/<recipe>/<node>         link to the output of the recipe's last run
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bosch import files
from bosch.errors import RunError
from bosch.files import replace
from pipeline.run.graph import document_key
from pipeline.run.hashing import FileHasher
from stages.published import Manifest

MANIFEST = Manifest.FILE


class Store:
    """The folders below one output root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def published(self, stage: str, key: str) -> Path:
        return self.root / "store" / stage / key

    def work(self, stage: str, key: str) -> Path:
        return self.root / "work" / stage / key

    def lock(self, stage: str, key: str) -> Path:
        return self.root / "locks" / f"{stage}-{key}.lock"

    def hasher(self, budget_bytes: int | None = None) -> FileHasher:
        return FileHasher(self.root / "store" / "hashes.json", budget_bytes)

    def manifest(self, stage: str, key: str) -> dict[str, Any] | None:
        """The manifest of a published output; None if it is missing or damaged."""
        manifest = files.read_record(self.published(stage, key) / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("key") != key:
            return None
        return manifest if manifest.get("sha256") == Manifest.digest(manifest) else None

    def damage(self, stage: str, key: str, hasher: FileHasher) -> str | None:
        """Fault of an output's folder; None if it is intact or absent.

        Files with the size and time last seen are not read; others are hashed. Raises RunError if
        files were added, which readers might prefer.
        """
        folder = self.published(stage, key)
        if not os.path.lexists(folder):
            return None
        manifest = self.manifest(stage, key)
        if manifest is None:
            return f"{MANIFEST} is missing or damaged"
        hashes = {str(file["path"]): str(file["sha256"]) for file in manifest["files"]}
        if (fault := files.listing_fault(folder, hashes)) is not None:
            return fault
        if added := files.added_entries(folder, hashes, (MANIFEST,)):
            raise RunError(f"{folder / added[0]} was added to the output of {stage}; move it away")
        for name, digest in hashes.items():
            try:
                if hasher.sha256(folder / name) != digest:
                    return f"{name} has other content"
            except OSError as error:
                return files.read_fault(name, error)
        return None

    def begin(
        self, stage: str, key: str, *, inputs: Mapping[str, str] | None = None, gpus: int = 0
    ) -> Path:
        """The work directory of an output, with the work of an earlier attempt on these inputs.

        The attempt runs on `gpus` GPUs.
        """
        work, inputs = self.work(stage, key), dict(inputs or {})
        state = self.state(stage, key)
        if state.get("inputs", inputs) != inputs or not files.is_folder(work) or work.is_symlink():
            self.discard(stage, key)
            state = {}
        files.make_folder(work)
        attempts = state.get("attempts", [])
        if attempts:  # a killed attempt worked until its last write
            attempts[-1].setdefault("ended", files.newest_below(work))
        files.remove(work / MANIFEST)
        for path in list(work.rglob(f"{files.TEMPORARY}*")):  # of killed processes
            files.remove(path)
        attempts.append({"started": time.time(), "gpus": gpus})
        files.write_json(self.state_file(stage, key), {"attempts": attempts, "inputs": inputs})
        return work

    def discard(self, stage: str, key: str) -> None:
        """Delete the work on an output."""
        files.remove(self.work(stage, key))
        files.remove(self.state_file(stage, key))

    def fail(self, stage: str, key: str, message: str) -> None:
        """Record why an attempt failed; keeps the work."""
        state = self.state(stage, key)
        if state:
            state["attempts"][-1]["ended"] = time.time()
            files.write_json(self.state_file(stage, key), state | {"failure": message})

    def state(self, stage: str, key: str) -> dict[str, Any]:
        """Attempts at an unpublished output, and the failure of the last attempt.

        Empty if the file is missing or damaged, since no result depends on it.
        """
        state = files.read_json(self.state_file(stage, key))
        return state if isinstance(state, dict) and state.get("attempts") else {}

    def state_file(self, stage: str, key: str) -> Path:
        """File with the attempts and the failure of an unpublished output."""
        return self.work(stage, key).with_name(f"{key}.state.json")

    def publish(
        self, stage: str, document: Mapping[str, Any], facts: Mapping[str, Any], hasher: FileHasher
    ) -> Path:
        """Make a finished work directory the output of its key; `facts` go into the manifest."""
        key = document_key(document)
        work, target = self.work(stage, key), self.published(stage, key)
        attempts = self.state(stage, key).get("attempts") or [{"started": time.time(), "gpus": 0}]
        attempts[-1]["ended"] = time.time()
        # The clock may have been set back, and a killed attempt may have written nothing.
        seconds = [max(attempt["ended"] - attempt["started"], 0) for attempt in attempts]
        gpus = [attempt["gpus"] for attempt in attempts]
        files.remove_empty_folders(work)
        names = list(files.files_below(work))
        _share_files(work)
        files.sync_tree(work)
        hashes = {name: hasher.sha256(work / name) for name in names}
        manifest = {
            "format": 1,
            "stage": stage,
            "key": key,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(sum(seconds), 3),
            "gpu_seconds": round(sum(map(operator.mul, seconds, gpus)), 3),
            "attempts": len(attempts),
            **facts,
            "identity": dict(document),
            "files": [
                {"path": name, "size": (work / name).stat().st_size, "sha256": digest}
                for name, digest in hashes.items()
            ],
        }
        files.write_json(work / MANIFEST, {**manifest, "sha256": Manifest.digest(manifest)})
        files.make_folder(target.parent)
        replace(work, target)
        files.remove(self.state_file(stage, key))
        for name, digest in hashes.items():
            hasher.record(target / name, digest)
        hasher.save()
        return target

    def last_run(self, recipe: str) -> dict[str, str]:
        """Names and keys of the nodes of a recipe's last run."""
        content = files.read_json(self.root / recipe / "last_run.json")
        stages = content.get("stages") if isinstance(content, dict) else None
        return stages if isinstance(stages, dict) else {}

    def link(self, recipe: str, name: str, key: str, names: Iterable[str]) -> None:
        """Link <root>/<recipe>/<node> to its output; removes links of nodes outside `names`.

        A node is called as its stage, or <stage>@<branch>.
        """
        link = self.root / recipe / name
        target = self.published(name.partition("@")[0], key)
        if not link.is_symlink() or os.path.realpath(link) != os.path.realpath(target):
            files.make_symlink(link, target)
        last = self.last_run(recipe)
        keys = {name: old_key for name, old_key in last.items() if name in names}
        keys[name] = key
        for other in last.keys() - keys.keys():
            self.unlink(recipe, other)
        if keys != last:
            files.write_json(link.with_name("last_run.json"), {"stages": keys})

    def unlink(self, recipe: str, name: str) -> None:
        """Remove the link of a node, whose output no longer belongs to the recipe."""
        link = self.root / recipe / name
        if link.is_symlink():
            link.unlink()


def _share_files(folder: Path) -> None:
    """Give each file its folder's permissions to read and write.

    safetensors makes files that only their owner can read, which a server's user may not be.
    """
    for path in (folder / name for name in files.files_below(folder)):
        mode = path.lstat().st_mode
        shared = mode | path.parent.stat().st_mode & 0o666
        # Only the owner may change the mode, and others may have begun this work.
        if shared != mode:
            path.chmod(shared)
