"""Run a study by its name and write what it found."""

from __future__ import annotations

import logging
from pathlib import Path

from stages.studying import cost, optimality, stability, turnover
from stages.studying.options import StudyConfig
from stages.studying.result import publish
from stages.studying.subject import Subject

logger = logging.getLogger(__name__)

_STUDIES = {
    "optimality": optimality.study,
    "cost": cost.study,
    "stability": stability.study,
    "turnover": turnover.study,
}


def run(name: str, config: StudyConfig, folder: Path, command: str, docs: Path | None) -> Path:
    """Write NAME.json, NAME.md and pictures into `folder`, and return the page.

    Finished cells are kept in `folder`/cells.jsonl for all studies: a study that was stopped goes
    on, and one that needs the searches of another finds them done. Raises UserError for a model,
    calibration set or size that cannot be studied.
    """
    subject = Subject(config, folder)
    if len(subject.cells):
        logger.info("%d cells are known already", len(subject.cells))
    publish(_STUDIES[name](subject), folder, command, docs)
    return folder / f"{name}.md"
