"""Scores of the original and of other models: a stage that all recipes on one model share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.documents.tokenizer import TokenizerSpec
from stages.context import StageConfig
from stages.evaluate.models import EvaluatedModel, evaluate_models
from stages.evaluate.scores import ORIGINAL
from stages.evaluate.stage import EvaluateConfig


def run(
    config: StageConfig[EvaluateConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write scores.json and samples.jsonl below `work_dir`; called on every rank.

    This stage does not depend on the calibration set. The stage evaluate has the same samples, and
    checks that none shares a needle with it.

    Raises UserError when the model or the essay folder is missing or damaged.
    """
    model = config.model
    tokenizer = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
    evaluated = [EvaluatedModel(ORIGINAL, model)]
    for name, folder in config.section.models.items():
        own = TokenizerSpec(folder, None, model.trust_remote_code)
        other = model.model_copy(update={"path": folder, "revision": None})
        evaluated.append(EvaluatedModel(name, other, tokenizer=own))
    return evaluate_models(config, evaluated, tokenizer, work_dir).averages
