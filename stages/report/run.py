"""Stage report: one self-contained HTML page, a summary file and a table on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.files import write_json, write_text
from stages.context import StageConfig
from stages.published import Summary
from stages.report.page import page
from stages.report.provenance import collect_provenance
from stages.report.results import load_results
from stages.report.stage import PAGE, ReportConfig
from stages.report.terminal import print_summary, summarize
from stages.train.stage import TrainConfig

logger = logging.getLogger(__name__)


def run(
    config: StageConfig[ReportConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write index.html and summary.json below `work_dir` and print the headline numbers.

    `inputs` maps the names of the recipe's stages to their published directories; the page shows
    other stages as left out. Returns the content of summary.json. Raises RunError when a published
    directory is incomplete.
    """
    train = config.upstream.get("train")
    training = train if isinstance(train, TrainConfig) else None
    results = load_results(inputs, config.other_stages, training)
    provenance = collect_provenance(config, results)
    file = work_dir / PAGE
    write_text(file, page(results, provenance, config.section))
    summary = summarize(results, provenance.title, config.section)
    write_json(work_dir / Summary.FILE, summary)
    print_summary(results, summary)
    logger.info("report written: %s bytes of HTML", f"{file.stat().st_size:,}")
    return summary
