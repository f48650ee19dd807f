"""Load ordinary and hybrid models."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from bosch.backends import check_backend, resolve_backend
from bosch.errors import UserError
from bosch.files import check_hub_cache
from bosch.hybrid import check_weights
from bosch.model.configuration import base_content, hybrid_mask, is_hybrid
from bosch.model.families import attention_needs, base_type, drop_idle_window, text_config
from bosch.model.registration import register_model
from bosch.model.untrusted import DEQUANTISED, check_faults, model_file_fault, model_file_faults
from bosch.weight_files import weight_faults


def load_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Configuration of a model directory or hub name; raises UserError when it cannot be read."""
    folder = Path(path)
    is_local = os.path.isdir(path)
    if is_local:
        if not os.path.isfile(folder / "config.json"):
            raise UserError(f"{path}: not a model directory, it has no config.json")
        check_faults(model_file_faults(folder))
    elif path.startswith((".", "/", "~")) or os.path.exists(path):
        raise UserError(f"{path}: no such model directory")
    try:
        for name in ("config.json", "generation_config.json") if not is_local else ():
            file = cached_file(
                path, name, revision=revision, _raise_exceptions_for_missing_entries=False
            )
            if file is not None:
                check_faults(model_file_fault(Path(file)))
        config = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(f"{path}: is an encoder and a decoder; expected a decoder alone")
        drop_idle_window(config)
        return config
    except _UNREADABLE as error:
        check_hub_cache(error)
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot read the model's configuration: {reason}") from error


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' auto class that loads the whole model, images included."""
    return AutoModelForCausalLM if text_config(config) is config else AutoModelForImageTextToText


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "bfloat16",
    backend: str = "auto",
    device: str | torch.device | Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | None = None,
    weights: bool = True,
) -> Any:
    """An ordinary or a hybrid causal language model, in eval mode.

    `backend` is that of the hybrid attention; an ordinary model keeps transformers' own attention
    until `prepare_for_search`. `dtype` is "float32", "bfloat16", "float16" or a torch dtype.
    `device` "auto" spreads layers over all GPUs, a mapping as it says (accelerate's `device_map`).
    `config` replaces the directory's own, for the same weights in another head layout.
    Without `weights` the parameters are on the meta device and take no memory.
    Raises UserError when the directory, its weights or its head layout are missing or damaged.
    """
    name = str(path)
    if config is None:
        config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    _avoid_hub_kernels(config)
    options: dict[str, Any] = {"attn_implementation": _attention(config, backend)}
    options["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options["trust_remote_code"] = trust_remote_code
    if not weights:
        return _empty_model(config, options)
    if os.path.isdir(name):
        check_faults(weight_faults(Path(name)))
    kind = None
    if device == "auto" or isinstance(device, Mapping):
        options["device_map"], device = device, None
    elif device is not None:
        kind = torch.device(device).type
    if kind == "meta" or (kind == "cuda" and importlib.util.find_spec("accelerate") is not None):
        # Weight by weight onto the GPU; else each process would hold the model in host memory. On
        # the meta device only the headers of the files are read.
        options["device_map"] = {"": device}
    try:
        model, info = auto_class(config).from_pretrained(
            name, config=config, revision=revision, output_loading_info=True,
            ignore_mismatched_sizes=True, use_safetensors=True, **options,
        )  # fmt: skip
        check_weights(model, info)
    except Exception as error:
        check_hub_cache(error)
        if type(error).__name__ not in _DAMAGE:
            raise
        raise UserError(f"{name}: cannot load the model: {_line(error)}") from error
    if device is not None and kind != "meta":
        model.to(device)
    _copy_cpu_weights(model)
    return model.eval()


def _empty_model(config: PreTrainedConfig, options: dict[str, Any]) -> Any:
    """The model with parameters on the meta device, in the dtypes in which they are loaded."""
    with parameters_on_meta():
        model: PreTrainedModel = auto_class(config).from_config(config, **options)
    for tensor in kept_in_float32(model).values():
        tensor.data = tensor.data.float()
    return model.eval()


def _avoid_hub_kernels(config: PreTrainedConfig) -> None:
    """Dequantise weights whose kernels transformers would take from the hub."""
    for part in (config, config.get_text_config(decoder=True)):
        quantisation = getattr(part, "quantization_config", None)
        if isinstance(quantisation, dict) and quantisation.get("quant_method") in DEQUANTISED:
            part.quantization_config = {**quantisation, "dequantize": True}


def _attention(config: PreTrainedConfig, backend: str) -> str | None:
    """The implementation to load with; raises UserError for a hybrid's damaged layout."""
    if not is_hybrid(config):
        # Not that of config.json, which transformers might download from the hub as a kernel.
        return None
    register_model(base_type(config))
    name, mask = resolve_backend(backend), hybrid_mask(config)
    sinks = {"sinks": f"its layout has {mask.sinks}"} if mask.sinks else {}
    check_backend(name, attention_needs(config) | sinks)
    return name


def kept_in_float32(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that transformers always loads in float32, by name, like biases choosing experts."""
    patterns = [part.replace("*", ".*") for part in model._keep_in_fp32_modules_strict or ()]
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if any(re.search(pattern, name) for pattern in patterns)
    }


def _copy_cpu_weights(model: PreTrainedModel) -> None:
    """Copy CPU weights, since a change of the file they map would change or crash the process."""
    for value in (*model.parameters(), *model.buffers()):
        if value.device.type == "cpu":
            value.data = value.data.clone()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Models built inside have meta parameters, but real buffers, some of which no file holds."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def full_attention_config(config: PreTrainedConfig) -> Any:
    """Configuration for a hybrid's weights with full heads; untrained, it is the original model."""
    return AutoConfig.for_model(base_type(config), **base_content(config))


# Errors that configuration classes raise for unexpected values, deliberately or not.
_UNREADABLE = (
    OSError, LookupError, ArithmeticError, ValueError, TypeError, AttributeError,
    StrictDataclassError,
)  # fmt: skip
# Errors that transformers and safetensors raise for unreadable files.
_DAMAGE = (
    "OSError", "SafetensorError", "FileNotFoundError", "ValueError", "RuntimeError",
    "TypeError", "AttributeError", "KeyError", "IndexError", "ZeroDivisionError", "OverflowError",
    "AssertionError", "ImportError",
)  # fmt: skip


def _line(error: BaseException) -> str:
    """First line of an error's text."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, KeyError):
        return f"unknown value {text}"
    return text.splitlines()[0]
