"""Where the numbers come from: the resolved recipe, stages, versions, commits, seeds, corpora."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stages.context import StageConfig
from stages.formats import format_path, format_seconds
from stages.published import Manifest
from stages.report.results import Results
from stages.report.stage import ReportConfig

Facts = list[tuple[str, str]]


def provenance(config: StageConfig[ReportConfig], results: Results) -> dict[str, Facts]:
    """Names and values by heading: from `config`, and from the stages' manifests."""
    recipe = {"seed": config.seed, "model": config.model.model_dump(mode="json")}
    recipe |= {key: section.model_dump(mode="json") for key, section in config.upstream.items()}
    stages = {name: _facts(manifest) for name, manifest in results.manifests.items()}
    versions: dict[str, dict[str, None]] = {}
    for manifest in results.manifests.values():
        for name, version in manifest.packages.items():
            versions.setdefault(name, {})[version] = None
    return {
        "Stages": list(stages.items()),
        "Resolved recipe": list(flatten(recipe)),
        "Text of the evaluation": list(flatten(results.main.scores.corpus or {})),
        "Package versions": [(name, ", ".join(found)) for name, found in sorted(versions.items())],
    }


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted paths and values of nested mappings; a list of plain values is one value."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{path}.{index}")
    elif isinstance(value, list):
        yield path, ", ".join(format_path(str(item)) for item in value) or "none"
    elif path:
        yield path, "none" if value is None or value == {} else format_path(str(value))


def _facts(manifest: Manifest) -> str:
    facts = [format_seconds(manifest.seconds)]
    if manifest.gpu_hours:
        facts.append(f"{manifest.gpu_hours:,.2f} GPU hours on {manifest.gpus} GPUs")
    facts.append(f"key {manifest.key[:12]}")
    if manifest.git_commit:
        changed = ", with local changes" if manifest.git_commit.endswith("+") else ""
        facts.append(f"commit {manifest.git_commit[:12]}{changed}")
    return ", ".join([*facts, *([manifest.created] if manifest.created else [])])
