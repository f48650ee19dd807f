"""Speed and memory of the materialised hybrid, and of its weights with every head full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.context import StageConfig
from stages.materialize.stage import MODEL
from stages.measure.measurement import measure
from stages.measure.stage import Efficiency, MeasureConfig, MeasureSettings


def run(
    config: StageConfig[MeasureConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write efficiency.json, its page and figures below `work_dir`; returns the ratios by length.

    The hybrid with every head full does the same computation as the original, so its times count as
    the original's. `runtime.attention` chooses the backend, which the results name.

    Raises UserError when the backend or the hardware cannot be measured; RunError when a run failed
    for another reason than a lack of memory.
    """
    common = {"dtype": config.model.dtype, "attention": config.runtime.attention}
    settings = MeasureSettings.model_validate(config.section.model_dump() | common, strict=False)
    report = measure(str(inputs["materialize"] / MODEL), None, settings, work_dir)
    return {
        str(point.length): point.model_dump(mode="json")["over_original"]
        for point in Efficiency.check(report, str(work_dir)).hybrids
    }
