"""The deployable hybrid model: permuted weights, head layout in the config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bosch.errors import RunError, UserError
from bosch.files import exists, remove
from bosch.mask_files import Front, HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.cache import state_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import check_family, decoder_layers, max_positions, text_config
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.search_mode import check_mask, head_mask
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from stages.context import StageConfig
from stages.materialize.cost import FLOAT32_PARAMETERS
from stages.materialize.model_card import base_licence, model_card
from stages.materialize.stage import MODEL, MaterializeConfig, MaterializeSummary
from stages.search.points import chosen_point
from stages.search.stage import FRONT, HEAD_MASK, SearchConfig
from stages.train.checkpoint import save_model

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# Minimum tokens of a probe beyond the widest window.
_PROBE_MARGIN = 64
_CARD_TOKENS = 32 * 1024  # at which the card states the KV cache
# Largest allowed difference between the two modes' logits, relative to their root mean square. The
# permutation changes only the order of sums.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1.5e-1}


def run(
    config: StageConfig[MaterializeConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write model/ (loadable by AutoModelForCausalLM) and summary.json below `work_dir`.

    model/ also holds the tokenizer, the code file for use with transformers alone, and a model
    card.

    The head mask is inputs["search"]/head_mask.json, or the point of inputs["search"]/front.json
    that section or budget chooses. The saved model is
    loaded again and must give the same logits as the base model under the mask.

    Raises UserError when the base model is missing, damaged or unsupported, or the mask is for
    another model; RunError when the saved model's logits differ from the search's, or it cannot be
    written.
    """
    import torch

    device = config.runtime.place("cuda" if torch.cuda.is_available() else "cpu")
    mask_path, point = inputs["search"] / HEAD_MASK, None
    base = _load_base(config, device)
    check_family(base.config)
    if exists(inputs["search"] / FRONT):
        mask_path = inputs["search"] / FRONT
        front = Front.load(mask_path)
        point = _point(config, base, front)
        chosen = front.points[point]
        mask_file = HeadMaskFile(chosen.mask, config.model.path, "front", chosen.score, config.seed)
    else:
        mask_file = HeadMaskFile.load(mask_path)
    try:
        check_mask(base.config, mask_file.mask)
    except UserError as error:
        raise UserError(f"{mask_path}: {error}") from error
    share = mask_file.mask.swa_ratio
    logger.info("materialising %s with a share of %.4g sliding", config.model.path, share)
    summary = {**_memory(base, mask_file.mask), "point": point}
    tokens = _probe(base, mask_file.mask, config.seed)
    in_float32 = summary["parameters"] <= FLOAT32_PARAMETERS
    expected = _searched_logits(base, mask_file.mask, tokens, in_float32)
    if in_float32:  # `_logits` has converted the model to float32
        del base
        base = _load_base(config, device)
    hybrid = materialize(base, mask_file.mask, take_weights=True)
    del base
    target = work_dir / MODEL
    _save(hybrid, target, config)
    mask_file.save(target / HEAD_MASK)
    card = model_card(mask_file, config.model, summary["kv_cache"], base_licence(config.model))
    (target / "README.md").write_text(card, encoding="utf-8")
    del hybrid
    saved = load_model(target, dtype=config.model.dtype, device=device)
    precision = "float32" if in_float32 else config.model.dtype
    summary["check"] = compare_logits(_logits(saved, tokens, in_float32), expected, precision)
    MaterializeSummary.model_validate(summary).write(work_dir)
    return summary


def _load_base(config: StageConfig[MaterializeConfig], device: str) -> Any:
    return load_model(config.model.path, device=device, **config.model.loading)


def _point(config: StageConfig[MaterializeConfig], base: Any, front: Front) -> int:
    """The index of the point that section or budget chooses."""
    check_mask(base.config, front.points[0].mask)
    search = config.upstream_section(SearchConfig)
    cache = search.request_cache(decoder_layers(base.config), config.model.dtype, front.context)
    if (number := config.section.point) is None:
        index = chosen_point(front, search, cache)
    elif number <= len(front.points):
        index = number - 1
    else:
        raise UserError(
            f"materialize.point: there is no point {number} in a front of {len(front.points)}"
        )
    point = front.points[index]
    logger.info(
        "point %d of %d of the front: %d KV heads slide, score %.4f; %s",
        index + 1, len(front.points), point.mask.num_sliding, point.score,
        cache.text(cache.bytes_of(point.mask)),
    )  # fmt: skip
    return index


def _memory(base: Any, mask: HeadMask) -> dict[str, Any]:
    """Parameters, the share of sliding heads, and bytes of the KV cache."""
    layers, states = decoder_layers(base.config), state_bytes(base)
    size = CacheSize.of(mask.layers, layers, base.dtype.itemsize, states)
    tokens = min(max_positions(base.config) or _CARD_TOKENS, _CARD_TOKENS)
    return {
        "parameters": sum(p.numel() for p in base.parameters()),
        "swa_ratio": mask.swa_ratio,
        "kv_cache_bytes_per_token_before": size.original_per_token,
        "state_bytes": size.state_bytes,
        "kv_cache": {
            "tokens": tokens, "bytes": size.dynamic(tokens), "original": size.original(tokens)
        },
    }  # fmt: skip


def _probe(base: Any, mask: HeadMask, seed: int) -> Tensor:
    """Random tokens [2, T], longer than window and sinks, so that a wrong window is noticed."""
    import torch

    text = text_config(base.config)
    limit = max_positions(base.config) or 4096
    widest = max((window.size for window in mask.menu), default=0)
    length = min(widest + max(_PROBE_MARGIN, 2 * mask.sinks), limit)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(text.vocab_size, (2, length), generator=generator)


def _searched_logits(base: Any, mask: HeadMask, tokens: Tensor, in_float32: bool) -> Tensor:
    with head_mask(base, mask):
        return _logits(base, tokens, in_float32)


def _logits(model: Any, tokens: Tensor, in_float32: bool) -> Tensor:
    import torch

    if in_float32:
        model = model.float()
    with torch.inference_mode():
        logits: Tensor = model(tokens.to(model.device), use_cache=False).logits
    return logits.float().cpu()


def compare_logits(actual: Tensor, expected: Tensor, precision: str) -> dict[str, Any]:
    """The largest difference of logits [B, T, V], relative to the root mean square of `expected`.

    Raises RunError if it exceeds the precision's `TOLERANCE`, or is NaN.
    """
    scale = float(expected.square().mean().sqrt()) or 1.0
    difference = float((actual - expected).abs().max()) / scale
    if not difference <= TOLERANCE[precision]:  # a NaN fails too
        raise RunError(
            f"materialize: the saved model differs from the searched one by {difference:.3g} of "
            f"the logits' root mean square; {precision} allows {TOLERANCE[precision]:g}"
        )
    return {
        "largest_difference": difference,
        "precision": precision,
        "tokens": actual.shape[0] * actual.shape[1],
    }


def _save(hybrid: Any, target: Path, config: StageConfig[MaterializeConfig]) -> None:
    from safetensors import SafetensorError

    model = config.model
    spec = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
    tokenizer = load_tokenizer(spec)
    if not tokenizer("text")["input_ids"]:  # transformers' result for missing files
        raise UserError(f"{model.path}: the model has no tokenizer; add its tokenizer files")
    remove(target)
    try:
        save_model(hybrid, target, config.section.max_shard_size)
        tokenizer.save_pretrained(target)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{target}: cannot write the model ({error})") from error
