"""For each stage of a recipe: cached, to run, running or failed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from bosch.files import exists
from pipeline.run.graph import Node, document_key
from pipeline.run.hashing import FileHasher, NotHashed
from pipeline.run.locks import holder
from pipeline.run.store import Store
from stages.stage import TIMED

_SHOWN_CHANGES = 3


@dataclass(frozen=True)
class StageState:
    """The state of a stage; `reason` is why it is not cached."""

    node: Node
    state: Literal["cached", "to run", "running", "failed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


def inspect(
    nodes: Sequence[Node],
    store: Store,
    hasher: FileHasher,
    recipe: str,
    forced: frozenset[str] = frozenset(),
) -> list[StageState]:
    """The state of every stage; those in `forced` must run."""
    last_keys = store.last_run(recipe)
    states = []
    for node in nodes:
        if node.name in forced:
            state = StageState(node, "to run", "--force")
        elif node.key is not None and (who := holder(store.lock(node.stage.name, node.key))):
            state = StageState(node, "running", who)
        else:
            inputs = contents(node, nodes, store)
            state = inspect_output(node, store, hasher, last_keys.get(node.name), inputs)
        states.append(state)
    return states


def contents(node: Node, nodes: Sequence[Node], store: Store) -> dict[str, str]:
    """Content hashes of the existing outputs that a node reads, by the names under which it does.

    If results differ between runs, as on a GPU, a new output under the same key has other content.
    """
    hashes = {}
    by_name = {upstream.name: upstream for upstream in nodes}
    for name, upstream in ((name, by_name[found]) for name, found in node.inputs.items()):
        manifest = store.manifest(upstream.stage.name, str(upstream.key))
        if manifest is not None:
            files = {
                file["path"]: file["sha256"]
                for file in manifest["files"]
                if not any(fnmatchcase(file["path"], pattern) for pattern in TIMED)
            }
            hashes[name] = document_key(files)
    return hashes


def inspect_output(
    node: Node, store: Store, hasher: FileHasher, last_key: str | None, inputs: Mapping[str, str]
) -> StageState:
    """The state of one stage's output, ignoring runs in progress.

    `last_key` is that of its output in the recipe's last run, `inputs` is from `contents`.
    """
    if node.key is None or node.document is None:
        return StageState(node, "to run", "input files are new or changed, and not yet hashed")
    reason, stage = "", node.stage.name
    if exists(store.published(stage, node.key)):
        try:
            damage = store.damage(stage, node.key, hasher)
        except NotHashed as file:
            damage, reason = None, f"not yet checked: {file}"
        manifest = store.manifest(stage, node.key)
        recorded = manifest.get("inputs", {}) if manifest is not None else {}
        for name, digest in inputs.items():
            if recorded.get(name, digest) != digest:
                reason = f"input {name} was made again, and is not as it was"
                return StageState(node, "to run", reason)
        if damage is None:
            return StageState(node, "cached", reason)
        reason = f"its output is damaged: {damage}"
    state = store.state(stage, node.key)
    if state.get("failure"):
        return StageState(node, "failed", str(state["failure"]))
    reason = reason or _reason(node, store, last_key)
    if state.get("attempts"):
        reason += "; resumes what was begun"
    return StageState(node, "to run", reason)


def _reason(node: Node, store: Store, last_key: str | None) -> str:
    if last_key is None:
        return "never made"
    if last_key == node.key:
        return "its output is gone"
    manifest = store.manifest(node.stage.name, last_key)
    if manifest is None or node.document is None:
        return "recipe or inputs changed"
    changes = list(differences(manifest["identity"], node.document))
    more = len(changes) - _SHOWN_CHANGES
    shown = "; ".join(changes[:_SHOWN_CHANGES])
    return f"{shown}; and {more} more" if more > 0 else shown or "recipe or inputs changed"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Differences between the documents of two keys of a stage; hashes are not shown."""
    if old.get("version") != new.get("version"):
        versions = f"version {old.get('version')} → {new.get('version')}"
        yield f"the code of {new['stage']} changed: {versions}"
    parts = {"config": "", "seed": "seed", "model": "model", "inputs": "", "upstream": "input"}
    for part, name in parts.items():
        for path, before, after in _changes(old.get(part), new.get(part), name):
            path = path.replace(".files.", ": ") if part == "inputs" else path
            path = path.replace("input.", "input ") if part == "upstream" else path
            is_hash = any(isinstance(one, str) and len(one) == 64 for one in (before, after))
            if before is _MISSING or after is _MISSING:
                yield f"{path} is {'new' if before is _MISSING else 'gone'}"
            elif part == "upstream":
                yield f"{path} changed"
            elif is_hash:
                yield f"{path} has other content"
            else:
                yield f"{path} changed {_show(before)} → {_show(after)}"


_MISSING = object()


def _changes(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Differences between two JSON values: dotted path, old and new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            yield from _changes(
                old.get(key, _MISSING), new.get(key, _MISSING), f"{path}.{key}".lstrip(".")
            )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _changes(before, after, f"{path}.{index}")
    elif old != new:
        yield path, old, new


def _show(value: Any) -> str:
    text = "nothing" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."
