"""The stages of a recipe, what each needs, and the key that names its output."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import canonical_json
from bosch.weight_files import code_files, weight_files
from data_prep.source_files import class_of_config, tokenizer_files
from pipeline.recipe.faults import suggest
from pipeline.run.hashing import FileHasher, NotHashed
from stages.fields import Section
from stages.inputs import Hasher, section_identity
from stages.stage import LoadedRecipe, Stage


@dataclass(frozen=True)
class Node:
    """A stage of one recipe. `key` is the hash of `document`.

    Both are None if an input file of the stage or of one it needs would take long to hash.
    """

    stage: Stage[Any]
    needs: tuple[str, ...]
    section: Section
    document: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def key(self) -> str | None:
        return None if self.document is None else document_key(self.document)


def document_key(document: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of everything that determines a stage's result."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def resolve(loaded: LoadedRecipe, hasher: FileHasher) -> list[Node]:
    """A recipe's stages, in order, with keys; raises UserError for an unreadable input file."""
    nodes: dict[str, Node] = {}
    for stage in loaded.present:
        # `needs` is None for a stage that needs all before it.
        needs = tuple(name for name in nodes if stage.needs is None or name in stage.needs)
        keys = {name: nodes[name].key for name in needs}
        section = getattr(loaded.recipe, stage.key)
        document: dict[str, Any] | None = None
        if None not in keys.values():
            with contextlib.suppress(NotHashed):
                document = _document(loaded, stage, keys, hasher)
        nodes[stage.name] = Node(stage, needs, section, document)
    return list(nodes.values())


def current_document(loaded: LoadedRecipe, node: Node, hasher: FileHasher) -> Mapping[str, Any]:
    """The node's document for the current files, with unchanged upstream outputs."""
    assert node.document is not None
    return _document(loaded, node.stage, node.document["upstream"], hasher)


def upstream_of(name: str, nodes: Sequence[Node]) -> list[str]:
    """All stages that a stage depends on, directly or not, in order."""
    by_name = {node.name: node for node in nodes}
    upstream: set[str] = set()
    pending = list(by_name[name].needs)
    while pending:
        stage_name = pending.pop()
        if stage_name not in upstream:
            upstream.add(stage_name)
            pending += by_name[stage_name].needs
    return [node.name for node in nodes if node.name in upstream]


def find_stage(option: str, name: str, nodes: Sequence[Node]) -> str:
    """The stage `name`, given with `option`; raises UserError if the recipe has no such stage."""
    names = [node.name for node in nodes]
    if name in names:
        return name
    suggestion = suggest(name, names)
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    raise UserError(f"{option} {name}: the recipe has the stages {', '.join(names)}{hint}")


def _document(
    loaded: LoadedRecipe,
    stage: Stage[Any],
    upstream: Mapping[str, str | None],
    hasher: FileHasher,
) -> dict[str, Any]:
    try:
        config, inputs = dict[str, Any](), dict[str, Any]()
        for key in (stage.key, *stage.reads):
            if (section := getattr(loaded.recipe, key)) is not None:
                config[key], inputs[key] = section_identity(section, hasher)
        model: dict[str, Any] = {}  # the part of the base model's files that the stage reads
        if stage.model == "tokenizer":
            model = tokenizer_identity(loaded, hasher)
        elif stage.model == "weights":
            model = model_identity(loaded, hasher)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return {
        "format": 1,
        "stage": stage.name,
        "version": stage.version,
        "config": config,
        "inputs": inputs,
        "seed": loaded.recipe.seed,
        "upstream": dict(upstream),
        "model": model,
    }


def model_identity(loaded: LoadedRecipe, hasher: Hasher) -> dict[str, Any]:
    """The base model's files by hash, or its hub name and commit, and the loading options."""
    model, info = loaded.recipe.model, loaded.info
    loading = {"dtype": model.dtype, "trust_remote_code": model.trust_remote_code}
    if info is None or info.directory is None:
        return {**_hub_identity(loaded), **loading}
    directory = info.directory
    names = {"config.json", *weight_files(directory), *tokenizer_files(directory)}
    names |= set(code_files(directory))
    # The model card has the licence, and the length that YaRN stretches.
    optional = ("generation_config.json", "README.md")
    names.update(name for name in optional if (directory / name).is_file())
    return {**_hashes(directory, names, hasher), **loading}


def tokenizer_identity(loaded: LoadedRecipe, hasher: Hasher) -> dict[str, Any]:
    """Identity of the base model's tokenizer, on which data depends instead of the weights."""
    info = loaded.info
    if info is None or info.directory is None:
        return _hub_identity(loaded)
    names = set(tokenizer_files(info.directory))
    if loaded.recipe.model.trust_remote_code:  # a tokenizer's code may import any file
        names |= set(code_files(info.directory))
    family = {**class_of_config(info.directory), "model_type": info.config.get("model_type")}
    return {**_hashes(info.directory, names, hasher), **family}


def _hub_identity(loaded: LoadedRecipe) -> dict[str, Any]:
    commit = loaded.info.commit if loaded.info is not None else None
    return {"hub": loaded.recipe.model.path, "commit": commit or loaded.recipe.model.revision}


def _hashes(directory: Path, names: set[str], hasher: Hasher) -> dict[str, Any]:
    return {name: hasher.sha256(directory / name) for name in sorted(names)}
