"""The model as training starts from it: float32 master weights, options applied and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bosch.errors import RunError, UserError
from bosch.modeling import load_model
from stages.configs import ModelConfig, Runtime, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_for_training(
    model_dir: Path, model: ModelConfig, train: TrainConfig, runtime: Runtime
) -> PreTrainedModel:
    """The model in float32, whatever it was saved in: bf16 weights would lose small updates.

    Raises:
        UserError: Liger kernels were asked for where they cannot run.
        RunError: Liger left a module of the model as it was.
    """
    if train.liger:
        _check_liger_possible()
    loaded: PreTrainedModel = load_model(
        model_dir,
        dtype=torch.float32,
        backend=runtime.attention,
        trust_remote_code=model.trust_remote_code,
    )
    if train.liger:
        _apply_liger(loaded)
    if runtime.gradient_checkpointing:
        loaded.activation_checkpointing_enable({"use_reentrant": False})
    return loaded


def saved_dtype(model_dir: Path) -> torch.dtype:
    """Precision the model's directory says its weights are saved in."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")


def _check_liger_possible() -> None:
    if not torch.cuda.is_available():
        raise UserError("train.liger = true needs a GPU, and none is visible; set it to false")
    try:
        import liger_kernel  # noqa: F401
    except ImportError:
        raise UserError(
            "train.liger = true needs the package liger-kernel, which is not installed; "
            "install it, or set train.liger = false"
        ) from None


def _apply_liger(model: Any) -> None:
    """Patch norms, MLPs, rotary embedding and loss with Liger's, as for the model's base family."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = model.config.model_type.removeprefix("hybrid_")
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(
            f"train.liger = true, and Liger has no kernels for models of type {family}; "
            "set train.liger = false"
        )
    MODEL_TYPE_TO_APPLY_LIGER_FN[family](model=model)
    check_liger_runs(model)


def check_liger_runs(model: Any) -> None:
    """Make sure the loss, every norm and every MLP of `model` run Liger's code.

    Raises:
        RunError: one of them still runs its own.
    """
    patched = {"": model} | {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("RMSNorm", "MLP"))
    }
    for name, module in patched.items():
        code = getattr(module.forward, "__func__", module.forward).__module__
        if not code.startswith("liger_kernel"):
            raise RunError(
                f"train.liger = true, but {name or 'the loss'} ({type(module).__name__}) still "
                f"runs {code}; set train.liger = false"
            )
