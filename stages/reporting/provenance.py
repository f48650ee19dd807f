"""Where the numbers come from: the resolved recipe, versions, commits, seeds, corpora."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from stages.configs import ReportConfig
from stages.context import StageConfig
from stages.reporting import markup
from stages.reporting.results import STAGES, Results


@dataclass(frozen=True)
class Provenance:
    """Names and values for the page's last section, and its heading."""

    title: str
    subtitle: str
    recipe: list[tuple[str, str]]
    origin: list[tuple[str, str]]
    versions: list[tuple[str, str]]
    statistics: list[tuple[str, str]]


def collect_provenance(config: StageConfig, results: Results) -> Provenance:
    """Gather the resolved recipe from `config` and the rest from the stages' manifests."""
    model = PurePath(config.model.path).name
    title = config.section.title if isinstance(config.section, ReportConfig) else None
    recipe = {"seed": config.seed, "model": config.model.model_dump(mode="json")}
    for stage in (*STAGES, *config.upstream):
        if stage in config.upstream:
            recipe[stage] = config.upstream[stage].model_dump(mode="json")
    subtitle = f"{model} made hybrid"
    if results.search is not None:
        search = results.search
        share = f"ρ = {search.sliding / search.total:.3g}"
        subtitle = f"{model} made hybrid: {share}, W = {search.window_size:,}"
        subtitle += f", method {search.mask.get('method', 'unknown')}"
    return Provenance(
        title=title or f"Hybrid {model}",
        subtitle=subtitle,
        recipe=list(flatten(recipe)),
        origin=_origin(config, results),
        versions=_versions(results),
        statistics=list(flatten(results.statistics or {})),
    )


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted paths and values of nested mappings; lists of plain values stay on one line."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{path}.{index}")
    elif isinstance(value, list):
        yield path, ", ".join(str(item) for item in value) or "none"
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, f"{value:,}" if value >= 10_000 else str(value)
    else:
        yield path, "none" if value is None or value == {} else str(value)


def _origin(config: StageConfig, results: Results) -> list[tuple[str, str]]:
    rows = [("Model", config.model.path), ("Seed", str(config.seed))]
    if results.parameters is not None:
        rows.append(("Parameters", f"{results.parameters:,}"))
    if results.corpus is not None:
        for name, value in flatten(results.corpus):
            rows.append((f"Essays of the evaluation, {name}", value))
    for stage in STAGES:
        manifest = results.manifests.get(stage)
        if manifest is not None:
            rows.append((f"Stage {stage}", _made(manifest)))
        elif stage not in results.present:
            rows.append((f"Stage {stage}", "not part of this recipe"))
    return rows


def _made(manifest: Mapping[str, Any]) -> str:
    """Key, commit and time of a stage's output."""
    key, commit = str(manifest.get("key") or ""), str(manifest.get("git_commit") or "")
    told = [f"key {key[:12]}" if key else "no key"]
    if commit:
        changed = ", with local changes" if commit.endswith("+") else ""
        told.append(f"commit {commit[:12]}{changed}")
    for name, field in (("made", "created"), ("Python", "python"), ("processes:", "processes")):
        if manifest.get(field):
            told.append(f"{name} {manifest[field]}")
    return ", ".join(told)


def _versions(results: Results) -> list[tuple[str, str]]:
    """Package versions over all stages; where stages differ, each version is named once."""
    found: dict[str, list[str]] = {}
    for manifest in results.manifests.values():
        packages = manifest.get("packages") or {}
        for name, version in packages.items():
            versions = found.setdefault(str(name), [])
            if str(version) not in versions:
                versions.append(str(version))
    return [(name, ", ".join(versions)) for name, versions in sorted(found.items())]


def provenance_section(provenance: Provenance) -> str:
    """The page's last section."""
    inner = markup.card(markup.facts(provenance.origin))
    inner += markup.details("Resolved recipe", markup.facts(provenance.recipe))
    if provenance.statistics:
        inner += markup.details("Prepared data", markup.facts(provenance.statistics))
    if provenance.versions:
        inner += markup.details("Package versions", markup.facts(provenance.versions))
    else:
        inner += markup.absent("The stages recorded no package versions.")
    return markup.section(
        "Provenance", "What made these results, so that they can be made again.", inner
    )
