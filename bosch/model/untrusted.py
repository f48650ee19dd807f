"""Checks of a model directory before transformers reads it; imports no torch.

transformers reads JSON of any size. A config.json may also name code: attention kernels on the hub,
which transformers downloads and loads as native libraries, kernels for experts, quantisers, other
weight files. Only names that are known to download nothing are accepted, at any depth of the file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch import files
from bosch.errors import UserError, printable
from bosch.weight_files import INDEX

# Files of a model or a tokenizer that transformers reads: JSON with a vocabulary or the names of
# all tensors (`_LARGE`), JSON with settings, and texts that are not JSON.
TOKENIZER_FILE = "tokenizer.json"
VOCABULARIES = (
    TOKENIZER_FILE, "vocab.json", "tekken.json", "vocab-src.json", "vocab-tgt.json", "emoji.json",
    "entity_vocab.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
_LARGE = (*VOCABULARIES, INDEX)
CONFIG_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "normalizer.json", "chat_template.json", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
TOKENIZER_TEXTS = (
    "*.model", "*.spm", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja", "merges.txt",
    "vocab.txt", "vocab.bpe", "bpe.codes", "prophetnet.tokenizer",
)  # fmt: skip
# Special tokens. transformers compares all with all, 32 s for 50,000; Florence 2 has 1,000.
_SPECIAL_TOKENS = ("additional_special_tokens", "extra_special_tokens")
_MAX_SPECIAL_TOKENS = 10_000
# Suffixes of fields that are lengths, for which transformers makes a list of this length.
_COUNTS = ("layers", "n_layer", "blocks", "num_labels", "first_k_dense_replace", "kernel_size")
_MAX_LABELS = 100_000
_ATTENTION = (
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3",
    "flash_attention_4",
)  # fmt: skip
_EXPERTS = ("eager", "grouped_mm", "batched_mm")
# Fields that name code, with the allowed names.
_CODE_NAMES = {
    "attn_implementation": _ATTENTION,
    "_attn_implementation": _ATTENTION,
    "_attn_implementation_internal": _ATTENTION,
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
    "_experts_implementation_internal": _EXPERTS,
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
    """Messages for files over the size limits and configurations that name code."""
    for name in (*_LARGE, *CONFIG_FILES):
        if name not in read_already and os.path.lexists(directory / name):
            yield from model_file_fault(directory / name)
    for pattern in TOKENIZER_TEXTS:
        for path in sorted(directory.glob(pattern)):
            if path.is_file() and path.stat().st_size > files.JSON_LIMITS.max_bytes:
                yield f"{path} is longer than {files.JSON_LIMITS.max_bytes:,} bytes"


def model_file_fault(path: Path) -> Iterator[str]:
    """The messages of `model_file_faults` for one JSON file."""
    try:
        if path.name in _LARGE:
            files.check_json_text(files.read_within(path), files.JSON_LIMITS)
            return
        content = files.load_json(path, files.CONFIG_LIMITS)
        if not isinstance(content, dict):
            raise ValueError("expected a JSON object")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        yield f"{path} cannot be read as JSON ({reason}); get the model again"
        return
    yield from (f"{path}: {fault}" for fault in config_faults(content))
    for name in _SPECIAL_TOKENS:
        tokens = content.get(name)
        if isinstance(tokens, list | dict) and len(tokens) > _MAX_SPECIAL_TOKENS:
            yield f"{path}: {name} has {len(tokens):,} tokens; that is no tokenizer"


def config_faults(content: Any) -> Iterator[str]:
    """At most one message, about content that no configuration may have."""
    yield from itertools.islice(itertools.chain(_code_faults(content), _count_faults(content)), 1)


def _count_faults(content: Any) -> Iterator[str]:
    """Messages for impossible numbers of layers or labels, at any depth."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            is_count = name.endswith(_COUNTS) and isinstance(value, int | float)
            limit = _MAX_LABELS if name == "num_labels" else files.MAX_LAYERS
            if is_count and not value <= limit:
                yield f"{name} = {value!r:.60}; that is no model"
            yield from _count_faults(value)


def check_faults(faults: Iterator[str]) -> None:
    """Raise UserError for the first fault."""
    fault = next(faults, None)
    if fault is not None:
        raise UserError(fault)


def _code_faults(content: Any, place: str = "") -> Iterator[str]:
    """Messages for fields, at any depth, that select code or weights."""
    if isinstance(content, list):
        for index, value in enumerate(content):
            yield from _code_faults(value, f"{place}{index}.")
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
        yield from _code_faults(value, f"{place}{name:.60}.")


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
