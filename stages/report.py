"""Stage report: one self-contained HTML page, a summary file and a table on the terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.context import StageConfig

VERSION = 2

logger = logging.getLogger(__name__)


def run(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    """Write index.html and summary.json below `work_dir` and print the headline numbers.

    `inputs` maps the name of every stage that the recipe has to its published directory; what is
    missing there is shown as no part of the recipe. Returns the content of summary.json. Raises
    RunError when a published directory lacks a file it promises.
    """
    from stages.reporting.page import render
    from stages.reporting.provenance import collect_provenance
    from stages.reporting.results import load_results
    from stages.reporting.terminal import print_summary, summarize

    results = load_results(inputs)
    provenance = collect_provenance(config, results)
    work_dir.mkdir(parents=True, exist_ok=True)
    page = work_dir / "index.html"
    page.write_text(render(results, provenance), encoding="utf-8")
    summary = summarize(results, provenance.title)
    text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
    (work_dir / "summary.json").write_text(text, encoding="utf-8")
    print_summary(results, provenance.title)
    logger.info("report written: %s bytes of HTML", f"{page.stat().st_size:,}")
    return summary
