"""The stages of a recipe, what each needs, and the key that names its output."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """A stage of a recipe, or of one of its branches: `train`, `train@intr`.

    `loaded` is the recipe of its branch. `inputs` are the names of the nodes whose outputs it
    reads, by the names under which it reads them. `branches` are all branches that share it.
    `key` is the hash of `document`; both are None without hashes of files.
    """

    name: str
    stage: Stage[Any]
    loaded: LoadedRecipe
    inputs: Mapping[str, str]
    branches: tuple[str, ...]
    document: Mapping[str, Any] | None = None

    @property
    def section(self) -> Section:
        section: Section = getattr(self.loaded.recipe, self.stage.key)
        return section

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.inputs.values()))

    @property
    def key(self) -> str | None:
        return None if self.document is None else document_key(self.document)


def document_key(document: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of everything that determines a stage's result."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def resolve(loaded: LoadedRecipe, hasher: FileHasher | None = None) -> list[Node]:
    """The stages of a recipe, then those of its branches, then those that need all; each once.

    A stage of a branch with the key, or all the values, of another node is that node. Without
    `hasher` no node has a key. Raises UserError for an unreadable input file.
    """
    nodes: dict[str, Node] = {}
    places: dict[str, str] = {}  # the node of each stage of each branch
    known: dict[str, str] = {}  # the node with a key, or with values
    for branch, recipe, stage in _stages(loaded):
        suffix = f"@{branch}" if branch else ""
        inputs = dict(places)
        if stage.needs is not None:
            wanted = ((need, need + suffix) for need in stage.needs)
            inputs = {need: places[place] for need, place in wanted if place in places}
        keys = {need: nodes[name].key for need, name in inputs.items()}
        node = Node(stage.name + suffix, stage, recipe, inputs, (branch,))
        identities = [canonical_json(_values(node))]
        if hasher is not None and None not in keys.values():
            with contextlib.suppress(NotHashed):
                node = replace(node, document=_document(node, keys, hasher))
                identities.append(str(node.key))
        shared = next((known[identity] for identity in identities if identity in known), None)
        places[node.name] = shared or node.name
        known |= dict.fromkeys(identities, places[node.name])
        if shared is not None:
            node = replace(nodes[shared], branches=(*nodes[shared].branches, branch))
        nodes[node.name] = node
    return list(nodes.values())


def _stages(loaded: LoadedRecipe) -> Iterator[tuple[str, LoadedRecipe, Stage[Any]]]:
    """Branch ("" for the recipe itself), recipe and stage of every node, in order."""
    last = set[str]()  # stages that need all others, and those that need these
    for stage in loaded.stages:
        if stage.needs is None or last.intersection(stage.needs):
            last.add(stage.name)
    for branch, recipe in {"": loaded, **loaded.branches}.items():
        for stage in recipe.present:
            if stage.name not in last and (stage.compared or not branch):
                yield branch, recipe, stage
    yield from (("", loaded, stage) for stage in loaded.present if stage.name in last)


def _values(node: Node) -> dict[str, Any]:
    """What a node is made of: the recipe's values, and other nodes."""
    stage, unread = node.stage, {"model": {"dtype"}} if node.stage.model == "tokenizer" else {}
    names = {"seed", stage.key, *stage.reads, *(["model"] if stage.model != "none" else [])}
    values = node.loaded.recipe.model_dump(mode="json", include=names, exclude=unread)
    return {"stage": stage.name, "values": values, "inputs": dict(node.inputs)}


def current_document(node: Node, hasher: FileHasher) -> Mapping[str, Any]:
    """The node's document for the current files, with unchanged upstream outputs."""
    assert node.document is not None
    return _document(node, node.document["upstream"], hasher)


def upstream_of(name: str, nodes: Sequence[Node]) -> list[str]:
    """All stages that a stage depends on, directly or not, in order."""
    upstream = {name}
    for node in reversed(nodes):
        upstream |= {*node.needs} if node.name in upstream else set()
    return [node.name for node in nodes if node.name in upstream - {name}]


def find_stage(option: str, name: str, nodes: Sequence[Node]) -> str:
    """The stage `name`, given with `option`; raises UserError if the recipe has no such stage."""
    names = [node.name for node in nodes]
    if name in names:
        return name
    suggestion = suggest(name, names)
    hint = f"; did you mean {suggestion}?" if suggestion else ""
    raise UserError(f"{option} {name}: the recipe has the stages {', '.join(names)}{hint}")


def _document(node: Node, upstream: Mapping[str, str | None], hasher: FileHasher) -> dict[str, Any]:
    loaded, stage = node.loaded, node.stage
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
