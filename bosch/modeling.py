"""Load models, apply head masks, and make hybrid models that transformers can load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bosch import hybrid
from bosch._registration import register_models
from bosch.attention import resolve_backend
from bosch.configuration import hybrid_config_class, is_hybrid
from bosch.errors import UserError
from bosch.families import FAMILIES, family_of
from bosch.heads import HeadMask
from bosch.interface import attention_modules, layouts_of
from bosch.search_mode import (
    apply_head_mask,
    check_mask,
    effective_mask,
    mask_shape,
    prepare_for_search,
)

__all__ = [
    "apply_head_mask",
    "attention_modules",
    "full_attention_config",
    "layouts_of",
    "load_config",
    "load_model",
    "mask_shape",
    "materialize",
    "permute_heads",
    "prepare_for_search",
]

logger = logging.getLogger(__name__)


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Configuration of a model directory or hub name; raises UserError when it cannot be read."""
    register_models()
    folder = Path(path)
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"{path}: not a model directory, it has no config.json")
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file}: not valid JSON ({error}); get the model again") from error
    elif path.startswith((".", "/", "~")) or folder.exists():
        raise UserError(f"{path}: no such model directory")
    try:
        return AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot read the model's configuration: {reason}") from error


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "bfloat16",
    backend: str = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
    distributed_config: Any = None,
) -> Any:
    """An ordinary or a hybrid causal language model, in eval mode.

    `backend` is that of the hybrid attention; an ordinary model keeps transformers' own attention
    until `prepare_for_search`. `dtype` is "float32", "bfloat16", "float16" or a torch dtype.
    `config` takes the place of the directory's own: its weights, under another head layout.
    `distributed_config` is transformers' own; `bosch.sharding` makes it.
    Raises UserError when the directory, its weights or its head layout are missing or damaged.
    """
    name = str(path)
    if config is None:
        config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {}
    if distributed_config is not None:
        options["distributed_config"] = distributed_config
    if is_hybrid(config):
        hybrid.deploy_layouts(config)
        options["attn_implementation"] = resolve_backend(backend)
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch_dtype, revision=revision,
            trust_remote_code=trust_remote_code, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    except UserError:
        raise
    except Exception as error:
        if type(error).__name__ not in _DAMAGE:
            raise
        raise UserError(f"{name}: cannot load the model's weights: {_line(error)}") from error
    model, info = loaded
    missing = sorted({*info["missing_keys"], *(str(k[0]) for k in info["mismatched_keys"])})
    if missing:
        raise UserError(
            f"{name}: {len(missing)} weights are missing or of another shape than config.json's, "
            f"{missing[0]} first; get the model again"
        )
    if device is not None:
        model.to(device)
    return model.eval()


def full_attention_config(config: Any) -> Any:
    """Configuration under which the weights of a hybrid model have full heads only.

    The order of heads is no part of a model's function, so this is the original, if the hybrid was
    not trained.
    """
    content = config.to_dict()
    for name in (
        "hybrid_attention", "layer_types", "base_layer_types", "model_type", "architectures",
        "auto_map", "_name_or_path", "transformers_version",
    ):  # fmt: skip
        content.pop(name, None)
    if getattr(config, "layer_types", None) is not None:
        content["layer_types"] = config.layer_types
    model_type = next(f.model_type for f in FAMILIES.values() if f.hybrid_type == config.model_type)
    return AutoConfig.for_model(model_type, **content)


# Errors by which transformers and safetensors report unreadable files.
_DAMAGE = ("OSError", "SafetensorError", "FileNotFoundError", "ValueError", "RuntimeError")


def _line(error: BaseException) -> str:
    """First line of an error's text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def permute_heads(model: Any, mask: HeadMask) -> dict[str, Tensor]:
    """Weights of `model` with each layer's full KV heads first, by name (BOSCH B.2).

    Rows of the query, key and value projections with their biases, columns of the output projection
    and norm weights that belong to a head move with it; the model itself is not changed. Norms
    over the head dimension are shared by all heads and stay.
    """
    check_mask(model.config, mask)
    family = family_of(model.config)
    weights = dict(model.state_dict())
    names = {id(module): name for name, module in model.named_modules()}
    modules: list[Any] = attention_modules(model)
    per_kv = model.config.num_attention_heads // model.config.num_key_value_heads
    for module, row in zip(modules, mask.is_full, strict=True):
        order = torch.tensor([h for full in (True, False) for h in (row == full).nonzero()[0]])
        query, key = _entries(order, per_kv * module.head_dim), _entries(order, module.head_dim)
        moves = {"q_proj": query, "k_proj": key, "v_proj": key}
        if family.fused:
            fused = [query, key + len(query), key + len(query) + len(key)]
            moves = {"qkv_proj": torch.cat(fused)}
        prefix = names[id(module)]
        for part, index in moves.items():
            for name in (f"{prefix}.{part}.weight", f"{prefix}.{part}.bias"):
                if name in weights:
                    weights[name] = weights[name].index_select(0, index.to(weights[name].device))
        for part, index in (("q_norm", query), ("k_norm", key)):
            name = f"{prefix}.{part}.weight"
            if family.norms_over_heads and name in weights:
                norm = weights[name]  # [heads * D], or [heads, D] in some families
                weights[name] = norm.flatten()[index.to(norm.device)].view_as(norm)
        if family.head_logits:
            name = f"{prefix}.{family.head_logits}"
            heads = _entries(order, per_kv).to(weights[name].device)
            weights[name] = weights[name].index_select(0, heads)
        name = f"{prefix}.o_proj.weight"
        weights[name] = weights[name].index_select(1, query.to(weights[name].device))
    return weights


def _entries(order: Tensor, size: int) -> Tensor:
    """Indices of blocks of `size` entries in the order given."""
    return (order[:, None] * size + torch.arange(size)).reshape(-1)


def materialize(model: Any, mask: HeadMask, window_size: int, sinks: int = 0) -> Any:
    """The hybrid model of `model` under `mask`, in deploy mode: weights permuted, layout in config.

    `model` is left as it is. The result has its dtype, device and generation settings; it is saved
    by `save_pretrained` and loaded by AutoModelForCausalLM once bosch is imported.
    Raises UserError when the family is not supported, or mask or window do not fit the model.
    """
    register_models()
    family = family_of(model.config)
    mask = effective_mask(model.config, mask, window_size, sinks)
    content = model.config.to_dict()
    for name in ("model_type", "architectures", "_name_or_path", "transformers_version"):
        content.pop(name, None)
    config = hybrid_config_class(family)(
        **content,
        hybrid_attention={
            "window_size": window_size,
            "sinks": sinks,
            "full_kv_heads_per_layer": mask.full_kv_heads_per_layer,
        },
    )
    made = hybrid.hybrid_model_class(family)._from_config(config, dtype=model.dtype)
    made.to(model.device)
    made.load_state_dict(permute_heads(model, mask))
    if model.generation_config is not None:
        made.generation_config = type(model.generation_config).from_dict(
            model.generation_config.to_dict()
        )
    return made.eval()
