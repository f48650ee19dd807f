"""Make a hybrid model of a base model and a head mask: weights permuted, layout in the config."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bosch.heads import HeadMask
from bosch.model.configuration import hybrid_config_class
from bosch.model.deploy_mode import hybrid_model_class
from bosch.model.families import family_of, known_family, text_config
from bosch.model.interface import attention_modules
from bosch.model.permutation import reorder_weight
from bosch.model.registration import register_model
from bosch.model.search_mode import check_fit, check_mask
from bosch.window import Window


def permute_heads(model: Any, mask: HeadMask) -> dict[str, Tensor]:
    """Weights of `model` with each layer's full KV heads first, by name (BOSCH B.2).

    Rows of the query, key and value projections with their biases, columns of the output projection
    and norm weights that belong to a head move with it; the model itself is not changed. Norms
    over the head dimension are shared by all heads and stay.
    """
    check_mask(model.config, mask)
    family = known_family(model.config)
    weights = dict(model.state_dict())
    names = {id(module): name for name, module in model.named_modules()}
    modules = attention_modules(model)
    text = text_config(model.config)
    q_per_kv = text.num_attention_heads // mask.num_key_value_heads
    for module, row in zip(modules, mask.is_full, strict=True):
        order = [int(h) for full in (True, False) for h in (row == full).nonzero()[0]]
        prefix = f"{names[id(module)]}."
        for name in [name for name in weights if name.startswith(prefix)]:
            weights[name] = reorder_weight(
                family, name.removeprefix(prefix), weights[name], order, q_per_kv
            )
    return weights


def materialize(model: Any, mask: HeadMask, window: Window) -> Any:
    """The hybrid model of `model` under `mask`, in deploy mode: weights permuted, layout in config.

    `model` is left as it is. The result has its dtype, device and generation settings; it is saved
    by `save_pretrained` and loaded by AutoModelForCausalLM once bosch is imported.
    Raises UserError when the family is not supported, or mask or window do not fit the model.
    """
    family = family_of(model.config)
    register_model(family.model_type)
    check_fit(model.config, mask, window)
    content = model.config.to_dict()
    for name in ("model_type", "architectures", "_name_or_path", "transformers_version"):
        content.pop(name, None)
    config = hybrid_config_class(family)(
        **content,
        hybrid_attention={
            "window_size": window.size,
            "sinks": window.sinks,
            "full_kv_heads_per_layer": mask.full_kv_heads_per_layer,
        },
    )
    hybrid = hybrid_model_class(family)._from_config(config, dtype=model.dtype)
    hybrid.to(model.device)
    hybrid.load_state_dict(permute_heads(model, mask))
    if model.generation_config is not None:
        hybrid.generation_config = type(model.generation_config).from_dict(
            model.generation_config.to_dict()
        )
    return hybrid.eval()
