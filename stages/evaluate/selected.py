"""Scores of any models beside the original's, for the command evaluate; no stage of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.tokenizer import TokenizerSpec
from stages.artifacts import ORIGINAL, SelectedScores
from stages.configs import EvaluateConfig
from stages.context import StageConfig
from stages.evaluate.answers import Evaluated, stored_identity
from stages.evaluate.models import evaluate_models


def run(
    config: StageConfig[EvaluateConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write scores.json and samples.jsonl of the models in `inputs` and of the original.

    Returns the content of scores.json. Raises what `evaluate_models` raises.
    """
    model = config.model
    models = [Evaluated(ORIGINAL, model, config.model_identity)]
    for name, folder in inputs.items():
        own = model.model_copy(update={"path": str(folder), "revision": None})
        models.append(Evaluated(name, own, stored_identity(folder)))
    tokenizer = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
    return evaluate_models(config, models, tokenizer, work_dir, kind=SelectedScores).content
