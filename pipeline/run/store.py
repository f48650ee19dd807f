"""Outputs of stages by key: made in a work directory, published by rename, checked before use.

<root>/store/<stage>/<key>/    published output; exists only with its manifest.json
<root>/work/<stage>/<key>/     unfinished work, kept over crashes; <key>.state.json beside it
<root>/shared/<section>/       results that outputs of a stage may reuse; each has its own copy
<root>/locks/                  one lock for each output that is being made
<root>/damaged/<stage>/<key>/  outputs that were changed on disk
<root>/damaged/<stage>/<key>.added/  files that were added to an otherwise unchanged output
<root>/<recipe>/<stage>        link to the output of the recipe's last run
"""

from __future__ import annotations

import logging
import math
import operator
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bosch import files
from bosch.errors import RunError
from bosch.files import replace
from pipeline.run.graph import document_key
from pipeline.run.hashing import FileHasher
from stages.published import Manifest

logger = logging.getLogger(__name__)

MANIFEST = Manifest.FILE
_FORMAT = 2
# Temporary files exist only for a moment; older ones were left by a killed process.
_OLD_SECONDS = 3600.0


class Store:
    """The folders below one output root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def published(self, stage: str, key: str) -> Path:
        return self.root / "store" / stage / key

    def work(self, stage: str, key: str) -> Path:
        return self.root / "work" / stage / key

    def shared(self, section: str) -> Path:
        """A folder for all runs of the stages that a section configures, on any model."""
        return self.root / "shared" / section

    def lock(self, stage: str, key: str) -> Path:
        return self.root / "locks" / f"{stage}-{key}.json"

    def hasher(self, budget_bytes: int | None = None) -> FileHasher:
        return FileHasher(self.root / "store" / "hashes.json", budget_bytes)

    def manifest(self, stage: str, key: str) -> dict[str, Any] | None:
        """The manifest of a published output; None if it is missing or damaged."""
        return _valid_manifest(self.published(stage, key), key)

    def damage(self, stage: str, key: str, hasher: FileHasher) -> str | None:
        """Fault of an output's folder; None if it is intact or absent."""
        folder = self.published(stage, key)
        return damage_of(folder, key, hasher) if os.path.lexists(folder) else None

    def begin(
        self,
        stage: str,
        key: str,
        *,
        inputs: Mapping[str, str] | None = None,
        force: str | None = None,
        gpus: int = 0,
    ) -> Path:
        """The work directory of an output, with the work of an earlier attempt.

        Earlier work is deleted if its inputs differ from `inputs`, or if `force` is a forced run
        that did not begin it. The attempt runs on `gpus` GPUs.

        Raises RunError if it contains something that cannot be published, such as a link.
        """
        work, inputs = self.work(stage, key), dict(inputs or {})
        state = self.state(stage, key)
        can_resume = state.get("inputs", inputs) == inputs and force in (None, state.get("force"))
        if not can_resume or not files.is_folder(work) or work.is_symlink():
            self.discard(stage, key)
            state = {}
        files.make_folder(work)
        last_written = files.newest_below(work)  # before files are removed
        files.remove(work / MANIFEST)
        for path in list(work.rglob(f"{files.TEMPORARY}*")):  # of killed processes
            files.remove(path)
        files.remove_empty_folders(work)
        fault = files.listing_fault(work, list(files.files_below(work)), ())
        if fault is not None:
            raise RunError(
                f"{stage}: its work directory {work} cannot be published: {fault}; put the file or "
                "folder itself there, or remove it"
            )
        attempts = state.get("attempts", [])
        if attempts and "ended" not in attempts[-1]:
            attempts[-1]["ended"] = last_written
        attempts.append({"started": time.time(), "gpus": gpus})
        state = {"attempts": attempts, "inputs": inputs, "force": force or state.get("force")}
        files.write_json(self.state_file(stage, key), state)
        return work

    def discard(self, stage: str, key: str) -> None:
        """Delete the work on an output."""
        files.remove(self.work(stage, key))
        files.remove(self.state_file(stage, key))

    def tidy(self, recipe: str) -> None:
        """Remove leftovers of killed processes in folders that several runs write to."""
        folders = [self.root / recipe, self.root / "locks", self.root / "store"]
        for pattern in ("store/*", "work/*", "shared/*", "shared/*/*", f"{recipe}/*"):
            folders += [path for path in self.root.glob(pattern) if not path.is_symlink()]
        for folder in folders:
            files.remove_old_temporaries(folder, _OLD_SECONDS)

    def fail(self, stage: str, key: str, message: str) -> None:
        """Record why an attempt failed; keeps the work."""
        state = self.state(stage, key)
        attempts = state.get("attempts", [])
        if attempts:
            attempts[-1]["ended"] = time.time()
        state |= {"attempts": attempts, "failure": message}
        files.write_json(self.state_file(stage, key), state)

    def state(self, stage: str, key: str) -> dict[str, Any]:
        """Attempts at an unpublished output, and the failure of the last attempt.

        Empty if the file is missing or damaged, since no result depends on it.
        """
        state = files.read_json(self.state_file(stage, key))
        attempts = state.get("attempts", []) if isinstance(state, dict) else None
        is_valid = isinstance(attempts, list) and all(map(_is_attempt, attempts))
        return state if is_valid and isinstance(state.get("failure", ""), str) else {}

    def state_file(self, stage: str, key: str) -> Path:
        """File with the attempts and the failure of an unpublished output."""
        return self.work(stage, key).with_name(f"{key}.state.json")

    def publish(
        self, stage: str, document: Mapping[str, Any], facts: Mapping[str, Any], hasher: FileHasher
    ) -> Path:
        """Make a finished work directory the output of its key; `facts` go into the manifest."""
        key = document_key(document)
        work = self.work(stage, key)
        attempts = self.state(stage, key).get("attempts") or [{"started": time.time()}]
        attempts[-1]["ended"] = time.time()
        # The clock may have been set back, and a killed attempt may have written nothing.
        seconds = [max(attempt["ended"] - attempt["started"], 0) for attempt in attempts]
        gpus = [attempt.get("gpus", facts.get("gpus", 0)) for attempt in attempts]
        files.remove_empty_folders(work)
        names = list(files.files_below(work))
        fault = files.listing_fault(work, names, ())
        if fault is not None:
            raise RunError(f"{stage}: its output cannot be published: {fault}")
        _share_files(work)
        files.sync_tree(work)
        hashes = {name: hasher.sha256(work / name) for name in names}
        manifest = {
            "format": _FORMAT,
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
        return self._move_in(stage, key, hashes, hasher)

    def finish_interrupted(self, stage: str, key: str, hasher: FileHasher) -> bool:
        """Publish a complete work directory that was not renamed because of a crash."""
        work = self.work(stage, key)
        manifest = _valid_manifest(work, key)
        if manifest is None or damage_of(work, key, hasher) is not None:
            return False
        hashes = {file["path"]: file["sha256"] for file in manifest["files"]}
        self._move_in(stage, key, hashes, hasher)
        return True

    def _move_in(self, stage: str, key: str, hashes: Mapping[str, str], hasher: FileHasher) -> Path:
        work, target = self.work(stage, key), self.published(stage, key)
        files.make_folder(target.parent)
        replace(work, target)
        self.state_file(stage, key).unlink(missing_ok=True)
        for name, digest in hashes.items():
            hasher.record(target / name, digest)
        hasher.save()
        return target

    def set_aside(self, stage: str, key: str) -> Path:
        """Move a damaged output out of the store; replaces an earlier one of this key."""
        aside = self.root / "damaged" / stage / key
        files.remove(aside)
        aside.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.published(stage, key), aside)
        return aside

    def added_files(self, stage: str, key: str) -> Path:
        """The folder for files that somebody added to an output."""
        return self.root / "damaged" / stage / f"{key}.added"

    def set_added_files_aside(self, stage: str, key: str) -> list[str]:
        """Move files that somebody added out of a valid output; returns their names."""
        folder, manifest = self.published(stage, key), self.manifest(stage, key)
        if manifest is None:
            return []
        listed = [file["path"] for file in manifest["files"]]
        names = files.added_entries(folder, listed, (MANIFEST,))
        for name in names:
            target = self.added_files(stage, key) / f"{time.time_ns()}" / name
            target.parent.mkdir(parents=True)
            shutil.move(folder / name, target)
        return names

    def force_id(self, recipe: str, stages: Sequence[str]) -> str | None:
        """Name of the unfinished forced run of these stages; None if there is none."""
        content = files.read_json(self._force_file(recipe))
        if not isinstance(content, dict) or content.get("stages") != list(stages):
            return None
        return content["id"] if isinstance(content.get("id"), str) else None

    def note_force(self, recipe: str, stages: Sequence[str]) -> None:
        """Name a new forced run of these stages, unless it continues that of `force_id`."""
        if self.force_id(recipe, stages) is None:
            content = {"stages": list(stages), "id": os.urandom(8).hex()}
            files.write_json(self._force_file(recipe), content)

    def forget_force(self, recipe: str) -> None:
        files.remove(self._force_file(recipe))

    def _force_file(self, recipe: str) -> Path:
        return self.root / recipe / "force.json"

    def last_run(self, recipe: str) -> dict[str, str]:
        """Stage names and keys of a recipe's last run."""
        content = files.read_json(self.root / recipe / "last_run.json")
        stages = content.get("stages") if isinstance(content, dict) else None
        return stages if isinstance(stages, dict) else {}

    def link(self, recipe: str, stage: str, key: str, stages: Iterable[str]) -> None:
        """Link <root>/<recipe>/<stage> to an output; removes links of stages outside `stages`."""
        link, target = self.root / recipe / stage, self.published(stage, key)
        if not link.is_symlink() or os.path.realpath(link) != os.path.realpath(target):
            files.make_symlink(link, target)
        last = self.last_run(recipe)
        keys = {name: old_key for name, old_key in last.items() if name in stages} | {stage: key}
        for name in last.keys() - keys.keys():
            self.unlink(recipe, name)
        if keys != last:
            files.write_json(link.with_name("last_run.json"), {"stages": keys})

    def unlink(self, recipe: str, stage: str) -> None:
        """Remove the link of a stage, whose output no longer belongs to the recipe."""
        link = self.root / recipe / stage
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


def damage_of(folder: Path, key: str, hasher: FileHasher) -> str | None:
    """Fault of a folder that should hold the output of `key`; None if it is intact.

    Its files must be exactly those of the manifest, since readers might prefer an added file. Files
    with the size and times last seen are not read; others are hashed.
    """
    manifest = _valid_manifest(folder, key)
    if manifest is None:
        return f"{MANIFEST} is missing or damaged"
    fault = files.listing_fault(folder, [entry["path"] for entry in manifest["files"]], (MANIFEST,))
    if fault is not None:
        return fault
    for entry in manifest["files"]:
        path = folder / entry["path"]
        try:
            if path.stat().st_size != entry["size"]:
                return f"{entry['path']} has another size"
            if hasher.sha256(path) != entry["sha256"]:
                return f"{entry['path']} has other content"
        except OSError as error:
            return files.read_fault(entry["path"], error)
    return None


def _valid_manifest(folder: Path, key: str) -> dict[str, Any] | None:
    manifest = files.read_record(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        return None
    if manifest.get("sha256") != Manifest.digest(manifest):
        return None
    identity, listed = manifest.get("identity"), manifest.get("files")
    if not isinstance(identity, dict) or document_key(identity) != key:
        return None
    if not isinstance(listed, list) or not all(
        isinstance(file, dict) and {"path", "size", "sha256"} <= file.keys() for file in listed
    ):
        return None
    return manifest


def _is_attempt(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    numbers = [value.get("started"), value.get("ended", 0.0), value.get("gpus", 0)]
    return all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
