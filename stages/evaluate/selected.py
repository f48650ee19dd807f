"""Scores of any models and the original for the command evaluate; not a stage of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import load_json
from bosch.model.configuration import is_hybrid
from bosch.model.head_table import kv_budgets
from bosch.model.loading import load_config
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.samples import tokenizer_digest
from stages.context import StageConfig
from stages.evaluate.answers import MODELS, EvaluatedModel
from stages.evaluate.models import evaluate_models
from stages.evaluate.run import at_other_budgets
from stages.evaluate.scores import ORIGINAL, SelectedScores
from stages.evaluate.stage import EvaluateConfig


def run(
    config: StageConfig[EvaluateConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write scores.json and samples.jsonl of the models in `inputs` and of the original.

    models.json in `work_dir` holds each model's identity. Returns the content of scores.json.
    Raises UserError when a model's tokenizer differs from that of the recipe's model: the ids of
    samples would decode to other text. Raises RunError as `evaluate_models` does.
    """
    model = config.model
    tokenizer = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
    identities = load_json(work_dir / MODELS)["models"]
    models = [EvaluatedModel(ORIGINAL, model, config.model_identity)]
    for name, folder in inputs.items():
        _check_tokenizer(name, TokenizerSpec(str(folder), None, model.trust_remote_code), tokenizer)
        local = model.model_copy(update={"path": str(folder), "revision": None})
        models.append(EvaluatedModel(name, local, identities[name]))
        hybrid = load_config(local.path, trust_remote_code=local.trust_remote_code)
        if is_hybrid(hybrid) and kv_budgets(hybrid):
            models += at_other_budgets(models[-1], config.section)
    return evaluate_models(config, models, tokenizer, work_dir, scores_type=SelectedScores).content


def _check_tokenizer(name: str, spec: TokenizerSpec, expected: TokenizerSpec) -> None:
    if tokenizer_digest(load_tokenizer(spec)) != tokenizer_digest(load_tokenizer(expected)):
        raise UserError(
            f"{name}: the tokenizer of {spec.path} makes other tokens than that of the recipe's "
            f"model, {expected.path}, so their answers do not compare; name it as model.path in a "
            "recipe of its own"
        )
