"""What a hybrid's configuration says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.families import HYBRID_PREFIX, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a hybrid model."""
    return str(getattr(config, "model_type", "")).startswith(HYBRID_PREFIX)


def hybrid_mask(config: PreTrainedConfig) -> HeadMask:
    """The head mask of a hybrid's configuration; UserError if it is damaged.

    It has a row for each layer with full attention in the base model. The weights hold the heads in
    the mask's `head_order`.
    """
    table: Any = getattr(config, "hybrid_attention", None)
    kinds = decoder_layers(config)
    try:
        mask = HeadMask(table["windows"], table["sinks"])
        if mask.shape == (len(kinds.full), kinds.heads):
            return mask
        reason = f"windows must have {len(kinds.full)} rows of {kinds.heads} heads"
    except (TypeError, KeyError, ValueError) as error:
        reason = str(error)
    raise UserError(
        f"{getattr(config, '_name_or_path', '') or 'config.json'}: hybrid_attention is damaged "
        f"({reason}); found {json.dumps(table, default=str):.500}; make the model again"
    )


def base_content(config: PreTrainedConfig) -> dict[str, Any]:
    """Content of a hybrid model's configuration in its family's form, without the head layout."""
    content: dict[str, Any] = config.to_dict()
    for name in (
        "hybrid_attention", "model_type", "architectures", "auto_map",
        "_name_or_path", "transformers_version",
    ):  # fmt: skip
        content.pop(name, None)
    return content
