"""The stages, what each needs, and the key that names its output."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bosch.errors import RunError, UserError
from bosch.files import canonical_json
from pipeline.recipe.faults import suggest
from pipeline.recipe.recipe import LoadedRecipe, Recipe
from pipeline.run.hashing import FileHasher, NotHashed
from pipeline.run.identity import (
    documents_identity,
    essay_identity,
    harness_identity,
    licence_identity,
    model_identity,
    ruler_identity,
    source_identity,
    tokenizer_identity,
)
from stages.evaluate.stage import EvaluateConfig
from stages.fields import Section
from stages.prepare.stage import PrepareConfig
from stages.report.stage import ReportConfig
from stages.search.stage import SearchConfig

_VERSION = re.compile(r"^VERSION(?:\s*:\s*[^=]+)?\s*=\s*(\d+)\s*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """One row of the table of stages.

    `function` is imported only in the process that runs it. `section` is the field of the recipe
    the stage is configured by; where that is empty, the recipe has no such stage. `model` is what
    it reads of the base model, `card` whether it reads the model's card too; `unread` are fields of
    the section that it does not read. Stages with the same `pool` leave in one folder what they may
    take from each other.
    """

    name: str
    function: str
    needs: tuple[str, ...]
    section: str
    model: Literal["none", "tokenizer", "weights"] = "none"
    seeded: bool = True
    distributed: bool = False
    card: bool = False
    pool: str | None = None
    unread: tuple[str, ...] = ()

    @property
    def computes(self) -> bool:
        """Whether the stage runs a model, on GPUs where there are some."""
        return self.distributed or self.model == "weights"

    @property
    def version(self) -> int:
        """The VERSION of the stage's module, read from its source: importing would cost seconds."""
        module = self.function.partition(":")[0]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise RunError(f"stage {self.name}: there is no module {module}")
        version = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
        if version is None:
            raise RunError(f"stage {self.name}: {spec.origin} sets no VERSION")
        return int(version[1])


STAGES: tuple[Stage, ...] = (
    Stage("prepare", "stages.prepare.run:run", (), "prepare", model="tokenizer"),
    Stage(
        "search",
        "stages.search.run:run",
        ("prepare",),
        "search",
        model="weights",
        distributed=True,
    ),
    Stage(
        "materialize",
        "stages.materialize.run:run",
        ("search",),
        "materialize",
        model="weights",
        card=True,
        seeded=False,
    ),
    # Before training: what is wrong with the evaluation shows before days are spent.
    Stage(
        "original",
        "stages.original.run:run",
        (),
        "evaluate",
        model="weights",
        distributed=True,
        pool="evaluation",
        unread=("rivals", "windows"),
    ),
    Stage("train", "stages.train.run:run", ("prepare", "materialize"), "train", distributed=True),
    Stage(
        "evaluate",
        "stages.evaluate.run:run",
        ("prepare", "materialize", "train", "original"),
        "evaluate",
        model="weights",
        distributed=True,
        pool="evaluation",
    ),
    Stage(
        "report",
        "stages.report.run:run",
        ("prepare", "search", "materialize", "train", "original", "evaluate"),
        "report",
        seeded=False,
    ),
)


@dataclass(frozen=True)
class Node:
    """A stage of one recipe. `document` is what its key is the hash of.

    Both are None while an input file is not hashed that would take long to hash.
    """

    stage: Stage
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


def resolve(
    loaded: LoadedRecipe, hasher: FileHasher, stages: Sequence[Stage] = STAGES
) -> list[Node]:
    """The stages a recipe has, in order, with their keys."""
    present = {
        stage.name: stage for stage in stages if getattr(loaded.recipe, stage.section) is not None
    }
    nodes: dict[str, Node] = {}
    for stage in present.values():
        needs = tuple(name for name in stage.needs if name in present)
        keys = {name: nodes[name].key for name in needs}
        section = stage_section(loaded.recipe, stage)
        document: dict[str, Any] | None = None
        if None not in keys.values():
            with contextlib.suppress(NotHashed):
                document = _document(loaded, stage, section, keys, hasher)
        nodes[stage.name] = Node(stage, needs, section, document)
    return list(nodes.values())


def current_document(loaded: LoadedRecipe, node: Node, hasher: FileHasher) -> Mapping[str, Any]:
    """The node's document for the files as they are now, its upstream outputs unchanged."""
    assert node.document is not None
    return _document(loaded, node.stage, node.section, node.document["upstream"], hasher)


def stage_section(recipe: Recipe, stage: Stage) -> Section:
    """The stage's section of the recipe; the report's title falls back to the recipe's name."""
    section: Section = getattr(recipe, stage.section)
    if isinstance(section, ReportConfig) and section.title is None:
        return section.model_copy(update={"title": recipe.name})
    return section


def upstream_of(name: str, nodes: Sequence[Node]) -> list[str]:
    """Every stage that a stage depends on, directly or not, in order."""
    by_name = {node.name: node for node in nodes}
    upstream: set[str] = set()
    pending = list(by_name[name].needs)
    while pending:
        one = pending.pop()
        if one not in upstream:
            upstream.add(one)
            pending += by_name[one].needs
    return [node.name for node in nodes if node.name in upstream]


def find_stage(option: str, name: str, nodes: Sequence[Node]) -> str:
    """Check that a stage named on the command line is one of the recipe's."""
    names = [node.name for node in nodes]
    if name in names:
        return name
    near = suggest(name, names)
    hint = f"; did you mean {near}?" if near else ""
    raise UserError(f"{option} {name}: the recipe has the stages {', '.join(names)}{hint}")


def _document(
    loaded: LoadedRecipe,
    stage: Stage,
    section: Section,
    upstream: Mapping[str, str | None],
    hasher: FileHasher,
) -> dict[str, Any]:
    try:
        config, inputs = _section_identity(section, hasher)
        config = {name: value for name, value in config.items() if name not in stage.unread}
        model = _model_part(loaded, stage, hasher)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    document: dict[str, Any] = {
        "format": 1,
        "stage": stage.name,
        "version": stage.version,
        "config": config,
        "inputs": inputs,
        "upstream": dict(upstream),
    }
    if stage.seeded:
        document["seed"] = loaded.recipe.seed
    if model:
        document["model"] = model
    return document


def _model_part(loaded: LoadedRecipe, stage: Stage, hasher: FileHasher) -> dict[str, Any]:
    """Files of the base model that a stage reads; empty for a stage that reads none."""
    if stage.model == "none":
        return {}
    if stage.model == "tokenizer":
        return tokenizer_identity(loaded, hasher)
    card = {"licence": licence_identity(loaded)} if stage.card else {}
    return {**model_identity(loaded, hasher), **card}


def _section_identity(
    section: Section, hasher: FileHasher
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A section's values without its paths, and what the paths lead to, by dotted path."""
    config = section.model_dump(mode="json")
    inputs: dict[str, Any] = {}
    if isinstance(section, PrepareConfig):
        for index, source in enumerate(section.sources):
            del config["sources"][index]["path"]
            inputs[f"sources.{index}"] = source_identity(source, hasher)
            if source.tokenizer is not None and "tokenizer" in inputs[f"sources.{index}"]:
                del config["sources"][index]["tokenizer"]
        del config["calibration"]["essay_dir"]
        inputs["calibration.essay_dir"] = essay_identity(section.calibration.essay_dir, hasher)
    if isinstance(section, SearchConfig):
        del config["mask"]
        if section.method == "given" and section.mask is not None:
            inputs["mask"] = hasher.sha256(Path(section.mask))
    if isinstance(section, EvaluateConfig) and section.needle is not None:
        del config["needle"]["essay_dir"], config["needle"]["data_dir"]
        inputs |= ruler_identity(section.needle, hasher)
    if isinstance(section, EvaluateConfig) and section.harness is not None:
        del config["harness"]["data_dir"]
        inputs["harness"] = harness_identity(section.harness, hasher)
    if isinstance(section, EvaluateConfig) and section.positions is not None:
        del config["positions"]["path"]
        inputs["positions"] = documents_identity(section.positions.path, hasher)
    return config, inputs
