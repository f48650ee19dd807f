"""Where the numbers come from: the resolved recipe, versions, commits, seeds, corpora."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from stages.context import StageConfig
from stages.formats import format_path, format_seconds
from stages.published import Manifest
from stages.report.results import Results
from stages.report.stage import ReportConfig


@dataclass(frozen=True)
class Provenance:
    """Names and values for the page's last section, and its heading."""

    title: str
    subtitle: str
    recipe: list[tuple[str, str]]
    origin: list[tuple[str, str]]
    versions: list[tuple[str, str]]
    statistics: list[tuple[str, str]]
    summaries: list[tuple[str, str]]


def collect_provenance(config: StageConfig[ReportConfig], results: Results) -> Provenance:
    """The resolved recipe from `config`, the rest from the stages' manifests."""
    model = PurePath(config.model.path).name
    recipe = {"seed": config.seed, "model": config.model.model_dump(mode="json")}
    recipe |= {key: section.model_dump(mode="json") for key, section in config.upstream.items()}
    search = results.main.search
    share = f"ρ = {search.sliding / search.total:.3g}, W = {search.window_sizes}"
    subtitle = f"{model} made hybrid: {share}, method {search.mask.method}"
    return Provenance(
        title=str(config.section.title),  # the recipe's name by default
        subtitle=subtitle,
        recipe=list(flatten(recipe)),
        origin=_origin(config, results),
        versions=_versions(results),
        # Without the counts of document lengths, of which there are many.
        statistics=[row for row in flatten(results.statistics) if ".lengths." not in row[0]],
        summaries=[
            row
            for stage, manifest in results.manifests.items()
            if manifest.summary
            for row in flatten(manifest.summary, stage)
        ],
    )


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
    elif isinstance(value, int):
        yield path, f"{value:,}" if value >= 10_000 else str(value)
    else:
        yield path, "none" if value is None or value == {} else format_path(str(value))


def _origin(config: StageConfig[ReportConfig], results: Results) -> list[tuple[str, str]]:
    rows = [("Model", format_path(config.model.path)), ("Seed", str(config.seed))]
    rows.append(("Parameters", f"{results.main.materialized.parameters:,}"))
    corpus = flatten(results.main.scores.corpus or {})
    rows += [(f"Text of the evaluation, {name}", value) for name, value in corpus]
    rows += [
        (f"Stage {name}", _manifest_facts(manifest)) for name, manifest in results.manifests.items()
    ]
    rows += [(f"Stage {name}", "not part of this recipe") for name in results.absent]
    return rows


def _manifest_facts(manifest: Manifest) -> str:
    facts = [format_seconds(manifest.seconds)]
    if manifest.gpu_hours:
        facts.append(f"{manifest.gpu_hours:,.2f} GPU hours")
    facts.append(f"key {manifest.key[:12]}")
    if manifest.git_commit:
        changed = ", with local changes" if manifest.git_commit.endswith("+") else ""
        facts.append(f"commit {manifest.git_commit[:12]}{changed}")
    fields = {
        "created": manifest.created,
        "Python": manifest.python,
        "processes:": manifest.processes,
        "GPUs:": manifest.gpus,
    }
    return ", ".join([*facts, *(f"{name} {value}" for name, value in fields.items() if value)])


def _versions(results: Results) -> list[tuple[str, str]]:
    """Packages with their distinct versions over all stages."""
    versions: dict[str, dict[str, None]] = {}
    for manifest in results.manifests.values():
        for name, version in manifest.packages.items():
            versions.setdefault(name, {})[version] = None
    return [(name, ", ".join(distinct)) for name, distinct in sorted(versions.items())]
