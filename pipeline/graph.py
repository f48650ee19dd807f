"""The stages, what each needs, and the key that names its output."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bosch.errors import RunError, UserError
from pipeline.faults import suggest
from pipeline.files import canonical_json
from pipeline.hashing import FileHasher, NotHashed
from pipeline.identity import (
    essay_identity,
    model_identity,
    source_identity,
    tokenizer_identity,
)
from pipeline.recipe import LoadedRecipe, Recipe
from stages.configs import EvaluateConfig, PrepareConfig, ReportConfig, Section

_VERSION = re.compile(r"^VERSION(?:\s*:\s*[^=]+)?\s*=\s*(\d+)\s*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """One row of the table of stages.

    `function` is imported only in the process that runs it. `section` is the field of the recipe
    the stage is configured by; where that is empty, the recipe has no such stage.
    """

    name: str
    function: str
    needs: tuple[str, ...]
    section: str
    model: Literal["none", "tokenizer", "weights"] = "none"
    seeded: bool = True
    distributed: bool = False

    @property
    def version(self) -> int:
        """The VERSION of the stage's module, read from its source: importing would cost seconds."""
        module = self.function.partition(":")[0]
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise RunError(f"stage {self.name}: there is no module {module}")
        found = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
        if found is None:
            raise RunError(f"stage {self.name}: {spec.origin} sets no VERSION")
        return int(found[1])


STAGES: tuple[Stage, ...] = (
    Stage("prepare", "stages.prepare:run", (), "prepare", model="tokenizer"),
    Stage(
        "search",
        "stages.search:run",
        ("prepare",),
        "search",
        model="weights",
        distributed=True,
    ),
    Stage(
        "materialize",
        "stages.materialize:run",
        ("search",),
        "materialize",
        model="weights",
        seeded=False,
    ),
    Stage("train", "stages.train:run", ("prepare", "materialize"), "train", distributed=True),
    Stage(
        "evaluate",
        "stages.evaluate:run",
        ("prepare", "materialize", "train"),
        "evaluate",
        model="weights",
        distributed=True,
    ),
    Stage(
        "report",
        "stages.report:run",
        ("prepare", "search", "materialize", "train", "evaluate"),
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
            try:
                document = _document(loaded, stage, section, keys, hasher)
            except NotHashed:
                document = None
            except OSError as error:
                raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
        nodes[stage.name] = Node(stage, needs, section, document)
    return list(nodes.values())


def stage_section(recipe: Recipe, stage: Stage) -> Section:
    """The stage's part of the recipe; the report's title falls back to the recipe's name."""
    section: Section = getattr(recipe, stage.section)
    if isinstance(section, ReportConfig) and section.title is None:
        return section.model_copy(update={"title": recipe.name})
    return section


def upstream_of(name: str, nodes: Sequence[Node]) -> list[str]:
    """Every stage that a stage depends on, directly or not, in order."""
    by_name = {node.name: node for node in nodes}
    wanted: set[str] = set()
    pending = list(by_name[name].needs)
    while pending:
        one = pending.pop()
        if one not in wanted:
            wanted.add(one)
            pending += by_name[one].needs
    return [node.name for node in nodes if node.name in wanted]


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
    config, inputs = _section_identity(section, hasher)
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
    if stage.model == "weights":
        document["model"] = model_identity(loaded, hasher)
    elif stage.model == "tokenizer":
        document["model"] = tokenizer_identity(loaded, hasher)
    return document


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
    if isinstance(section, EvaluateConfig) and section.needle is not None:
        del config["needle"]["essay_dir"]
        inputs["needle.essay_dir"] = essay_identity(section.needle.essay_dir, hasher)
    return config, inputs
