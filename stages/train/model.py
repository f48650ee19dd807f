"""The model at the start of training: float32 master weights, options applied and verified."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from bosch.attention import fastest_backend
from bosch.backends import BACKENDS, resolve_backend
from bosch.errors import RunError, UserError
from bosch.model.families import HYBRID_PREFIX, attention_needs, text_config
from bosch.model.loading import load_config, load_model
from bosch.parallel.context import ContextParallel
from stages.context import ModelConfig, Runtime
from stages.train.distillation import TeacherLoss
from stages.train.loss import install_loss
from stages.train.stage import TrainConfig
from stages.train.trainable import restrict_training
from stages.versions import require_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_GROUPED = "grouped_mm"  # transformers' name of one product for all experts


def load_for_training(
    model_dir: Path,
    model: ModelConfig,
    train: TrainConfig,
    runtime: Runtime,
    *,
    distillation: TeacherLoss | None = None,
    backend: str = "auto",
    device: torch.device | None = None,
    context_parallel: ContextParallel | None = None,
    untrained: Collection[str] = (),
) -> PreTrainedModel:
    """The model in float32, since bf16 weights would lose small updates.

    Under FSDP its parameters are on the meta device, and filled later with `saved_weights`. Without
    sharding it is loaded onto `device`, if given. `backend` computes its attention;
    `context_parallel` splits its sequences; `untrained` parameters are not trained.

    Raises UserError when train.liger is set and Liger is not installed; RunError when Liger did not
    patch a module of the model, or experts would not be computed in grouped products.
    """
    if train.liger:
        require_package("liger-kernel", "train.liger = true", "set train.liger = false")
    loaded: PreTrainedModel = load_model(
        model_dir,
        dtype=torch.float32,
        backend=backend,
        trust_remote_code=model.trust_remote_code,
        device=device if runtime.sharding == "none" else None,
        weights=runtime.sharding != "fsdp",
    )
    use_grouped_experts(loaded)
    if train.liger:
        apply_liger(loaded)
    restrict_training(loaded, untrained)
    install_loss(
        loaded, liger=train.liger, distillation=distillation, context_parallel=context_parallel
    )
    if context_parallel is not None:
        context_parallel.install(loaded)
    if runtime.checkpointing in ("attention", "full"):
        saves_attention = runtime.checkpointing == "attention"
        kernel = BACKENDS[resolve_backend(backend)].kernel if saves_attention else ""
        recompute_activations(loaded, kernel)
    return loaded


def use_grouped_experts(model: Any) -> None:
    """Compute all experts of a layer in one grouped product, regardless of config.json.

    It is in autocast's precision, like the products of linear layers. Raises RunError when
    transformers would compute the experts differently.
    """
    if not any(type(module).__name__.endswith("Experts") for module in model.modules()):
        return
    model.set_experts_implementation(_GROUPED)
    implementation = getattr(model.config, "_experts_implementation", None)
    if implementation != _GROUPED:
        raise RunError(
            f"transformers computes the experts of {type(model).__name__} by {implementation}, "
            f"not by {_GROUPED}, which training needs"
        )
    ALL_EXPERTS_FUNCTIONS.register(_GROUPED, _autocast_experts)


def _autocast_experts(module: Any, states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """transformers' grouped experts; autocast does not reach the product itself."""
    device = states.device.type
    if not torch.is_autocast_enabled(device):
        return grouped_mm_experts_forward(module, states, index, weights)
    dtype = torch.get_autocast_dtype(device)
    cast: Any = _Cast(module, dtype)
    return grouped_mm_experts_forward(cast, states.to(dtype), index, weights).to(states.dtype)


class _Cast:
    """A module whose parameters read as `dtype`."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, Tensor) else value


def recompute_activations(model: Any, saved: str = "") -> None:
    """Recompute layers in backward, except the outputs of operations whose name contains `saved`.

    An empty `saved` saves none.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if saved:

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_saved = saved in str(operation)
            return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        # runtime.offload_activations moves only layers' inputs; newer versions of torch have this
        # option.
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
            options["respect_saved_tensors_hooks"] = False
    # The method's names since transformers 5.23 and before.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, name) for name in names if hasattr(model, name))(options)


def attention_backend(
    model_dir: Path, model: ModelConfig, train: TrainConfig, runtime: Runtime
) -> str:
    """The recipe's backend; for auto the fastest installed one that supports the model."""
    if runtime.attention != "auto":
        return runtime.attention
    config = load_config(str(model_dir), trust_remote_code=model.trust_remote_code)
    name = fastest_backend(
        torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32,
        sinks=config.hybrid_attention["sinks"],
        dropout=getattr(text_config(config), "attention_dropout", None) or 0.0,
        needs=attention_needs(config),
        chunks=runtime.context_parallel > 1,
        saved_outputs=runtime.checkpointing == "attention",
    )
    logger.info("attention in training: %s", name)
    return name


def saved_weights(model_dir: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The weights as saved, on the CPU, by name."""
    loaded = load_model(
        model_dir, dtype=saved_dtype(model_dir), trust_remote_code=model.trust_remote_code
    )
    return loaded.state_dict()


def saved_dtype(model_dir: Path) -> torch.dtype:
    """Precision of the saved weights, from the model's config.json."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")


def apply_liger(model: Any) -> None:
    """Replace norms, MLPs and rotary embedding by Liger's for the model's base family.

    `install_loss` calls the fused loss. Liger's forward pass of the model is not used: its decoder
    would create a cache, and with a cache a row's documents count as one. Raises UserError for a
    family that Liger does not patch; RunError as `check_liger_runs` does.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = model.config.model_type.removeprefix(HYBRID_PREFIX)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(
            f"train.liger = true, and Liger has no kernels for models of type {family}; "
            "set train.liger = false"
        )
    MODEL_TYPE_TO_APPLY_LIGER_FN[family](model=model, fused_linear_cross_entropy=False)
    check_liger_runs(model)


def check_liger_runs(model: Any) -> None:
    """Raise RunError unless all norms and MLPs of the text decoder run Liger's code."""
    for name, module in model.get_decoder().named_modules():
        if not type(module).__name__.endswith(("RMSNorm", "MLP")):
            continue
        code = getattr(module.forward, "__func__", module.forward).__module__
        if not code.startswith("liger_kernel"):
            raise RunError(
                f"train.liger = true, but {name} ({type(module).__name__}) still "
                f"runs {code}; set train.liger = false"
            )


def shard_and_fill(accelerator: Any, model: Any, weights: dict[str, Tensor]) -> None:
    """Shard `model`, whose parameters are on the meta device, and fill it with `weights`.

    No process holds all weights in float32. Only the first process has `weights`, in their saved
    precision and with their saved names, and sends them one by one.
    """
    # By the layers in the model: transformers' list may name others, or none.
    layers = {type(layer).__name__ for layer in model.get_decoder().layers}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(layers)
    fsdp2_prepare_model(accelerator, model)
    _fill(model, weights, accelerator.device)


def shard_teacher(accelerator: Any, teacher: Any, weights: dict[str, Tensor]) -> None:
    """Shard and fill a model that is not trained, layer by layer, in its own precision."""
    teacher.tie_weights()  # one parameter for both tables, before it is sharded
    device, copies = accelerator.device, accelerator.torch_device_mesh
    if copies is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    else:
        mesh = copies[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    for layer in teacher.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    _fill(teacher, weights, device)


def _fill(model: Any, weights: dict[str, Tensor], device: torch.device) -> None:
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if dist.get_rank() == 0:
                whole = weights.pop(name).to(device, parameter.dtype)
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved:  # other buffers are computed
                if dist.get_rank() == 0:
                    buffer.copy_(weights.pop(name))
                dist.broadcast(buffer, 0)
    weights.clear()
