"""Stage report: one self-contained HTML page, its table as CSV and on the terminal, a summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from bosch.files import write_json, write_text
from stages.context import StageConfig
from stages.published import Summary
from stages.report.page import model_table, page, summarize
from stages.report.results import load_results
from stages.report.stage import PAGE, TABLE, ReportConfig
from stages.train.stage import TrainConfig


def run(
    config: StageConfig[ReportConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write index.html, models.csv and summary.json below `work_dir`; print table and sentences.

    `inputs` maps the names of the recipe's stages, and `<stage>@<branch>`, to their published
    directories. Returns the content of summary.json.
    Raises RunError when a published directory is incomplete.
    """
    train = config.upstream.get("train")
    training = train if isinstance(train, TrainConfig) else None
    results = load_results(inputs, training)
    write_text(work_dir / PAGE, page(results, config))
    summary = summarize(results, config.section)
    write_json(work_dir / Summary.FILE, summary)
    if (table := model_table(results)) is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, table.header)
        writer.writeheader()
        writer.writerows(table.records)
        write_text(work_dir / TABLE, text.getvalue())
        table.print()
    verdict, *more = summary["sentences"]
    if decision := summary["decision"]:
        more = [f"The model: {decision['folder']}, in the run's folder.", *more]
    for sentence in [verdict, *more, *results.notes]:
        Console().print(Text(sentence))
    return summary
