"""Checks of a model directory before transformers reads it; imports no torch.

A config.json may name code: attention kernels on the hub, which transformers downloads and loads as
native libraries, kernels for experts, quantisers, other weight files. Only names that are known to
download nothing are accepted, at any depth of the file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch import files
from bosch.errors import UserError, printable

_CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
_ATTENTION = (
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
    "flash_attention_4",
)  # fmt: skip
_EXPERTS = ("eager", "grouped_mm", "batched_mm")
# Fields that name code, with the allowed names.
_CODE_NAMES = {
    f"{prefix}{name}_implementation{suffix}": known
    for name, known in (("attn", _ATTENTION), ("experts", _EXPERTS))
    for prefix, suffix in (("", ""), ("_", ""), ("_", "_internal"))
}
# Fields that no model needs: they name kernels, files that are not hashed, or ways of decoding
# whose code transformers downloads from the hub.
_REFUSED = (
    "kernel_config", "use_kernels", "transformers_weights", "fast_tokenizer_files", "gguf_file",
    "custom_generate", "penalty_alpha", "dola_layers", "force_words_ids", "constraints",
)  # fmt: skip
_QUANTISATION = ("quantization_config", "compression_config")
# Loaded dequantised: with the package `kernels`, transformers would use kernels from the hub.
DEQUANTISED = ("fp8", "mxfp4")
_QUANTISERS = (*DEQUANTISED, "awq", "bitsandbytes", "compressed-tensors", "gptq", "torchao")


def model_file_faults(directory: Path, read_already: Collection[str] = ()) -> Iterator[str]:
    """Messages for settings that cannot be read or name code."""
    for name in _CONFIG_FILES:
        if name not in read_already and os.path.lexists(directory / name):
            yield from model_file_fault(directory / name)


def model_file_fault(path: Path) -> Iterator[str]:
    """The messages of `model_file_faults` for one file."""
    try:
        content = files.load_json(path)
        if not isinstance(content, dict):
            raise ValueError("expected a JSON object")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        yield f"{path} cannot be read as JSON ({reason}); get the model again"
        return
    yield from (f"{path}: {fault}" for fault in config_faults(content))


def check_faults(faults: Iterator[str]) -> None:
    """Raise UserError for the first fault."""
    fault = next(faults, None)
    if fault is not None:
        raise UserError(fault)


def config_faults(content: Any, place: str = "") -> Iterator[str]:
    """Messages for fields, at any depth, that select code or weights."""
    if isinstance(content, list):
        for index, value in enumerate(content):
            yield from config_faults(value, f"{place}{index}.")
    if not isinstance(content, Mapping):
        return
    for name, value in content.items():
        path = printable(f"{place}{name:.60}")
        if name in _CODE_NAMES:
            chosen = value.values() if isinstance(value, Mapping) else [value]
            if any(choice is not None and choice not in _CODE_NAMES[name] for choice in chosen):
                known = ", ".join(_CODE_NAMES[name])
                yield f"{path} = {value!r:.80} would load code; take it out, or set one of {known}"
        elif name in _REFUSED and value not in (None, False):
            yield f"{path} = {value!r:.80} would load other code or files; take it out"
        elif name in _QUANTISATION and value is not None and _quantiser(value) not in _QUANTISERS:
            kind = value.get("quant_method") if isinstance(value, Mapping) else value
            yield (
                f"{path}: weights quantised by {kind!r:.60} are not read; take the model's plain "
                f"weights, or those of {', '.join(sorted(_QUANTISERS))}"
            )
        yield from config_faults(value, f"{place}{name:.60}.")


def _quantiser(quantisation: Any) -> Any:
    """The quantiser in a `quantization_config`; None without one."""
    if not isinstance(quantisation, Mapping):
        return None
    by_flag = any(quantisation.get(flag) is True for flag in ("load_in_4bit", "load_in_8bit"))
    return quantisation.get("quant_method", "bitsandbytes" if by_flag else None)


def lasting_quantiser(config: Mapping[str, Any]) -> str | None:
    """The quantiser of weights that stay quantised when loaded; None if `load_model` undoes it."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    named = [_quantiser(part.get(name)) for part in parts for name in _QUANTISATION]
    return next((name for name in named if name not in (None, *DEQUANTISED)), None)
