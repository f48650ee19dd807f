"""The configuration a stage runs with: its section of the recipe and what all stages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from bosch.errors import RunError
from bosch.files import Stamp, changed_file
from stages.configs import ModelConfig, Runtime
from stages.fields import Section

AnySection = TypeVar("AnySection", bound=Section)
OwnSection = TypeVar("OwnSection", bound=Section, covariant=True)


@dataclass(frozen=True)
class StageConfig(Generic[OwnSection]):
    """Resolved configuration of one stage.

    `section` is the stage's own section of the recipe; `upstream` holds the sections of the stages
    it depends on, by stage name. `runtime` and `shared` do not enter the stage's key. `shared` is a
    folder that other runs may use too, to pay for nothing twice. `model_identity` is the hash of
    what the stage reads of the base model. `stamps` are those of the input files when the stage
    began.
    """

    section: OwnSection
    model: ModelConfig
    seed: int
    runtime: Runtime
    upstream: Mapping[str, Section] = field(default_factory=dict)
    shared: Path | None = None
    model_identity: str | None = None
    stamps: Mapping[str, Stamp] = field(default_factory=dict)

    def check_inputs(self) -> None:
        """Raise RunError if an input was written since the stage began, also if it was put back.

        A stage calls it after reading and before anything is kept that depends on what was read.
        """
        path = changed_file(self.stamps)
        if path is not None:
            raise RunError(
                f"the input {path} was written or replaced while it was read; run the same command "
                "again"
            )

    def upstream_section(self, kind: type[AnySection]) -> AnySection:
        """The section of type `kind` among those upstream; StopIteration where there is none."""
        return next(section for section in self.upstream.values() if isinstance(section, kind))
