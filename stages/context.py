"""What a stage is given: its own section of the recipe and the little it shares with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stages.configs import ModelConfig, Runtime, Section


@dataclass(frozen=True)
class StageConfig:
    """Resolved configuration of one stage.

    `section` is the stage's own part of the recipe; `upstream` holds the sections of the stages it
    depends on, by stage name. Only `runtime` and `shared` are no part of the stage's key: `shared`
    is a folder that all runs of this stage on the same model may use, to pay for nothing twice.
    """

    section: Section
    model: ModelConfig
    seed: int
    runtime: Runtime
    upstream: Mapping[str, Section] = field(default_factory=dict)
    shared: Path | None = None
