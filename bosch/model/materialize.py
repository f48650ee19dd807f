"""Make a hybrid of a base model and head masks: permuted weights, and the layout in the config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bosch.errors import RunError, UserError
from bosch.hybrid import hybrid_classes
from bosch.masks import HeadMask
from bosch.model.families import check_family, decoder_layers, mixes_documents, text_config
from bosch.model.head_weights import HeadWeights, in_order, measure_head_weights
from bosch.model.loading import parameters_on_meta
from bosch.model.registration import register_model
from bosch.model.search_mode import check_fit, mask_shape
from bosch.window import Window

# Largest difference between a model and its hybrid with wide windows, in root mean squares.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
HeadOrder: TypeAlias = Sequence[Sequence[int]]  # the KV heads of each layer in their new order


def permute_heads(
    model: PreTrainedModel, order: HeadOrder, head_weights: HeadWeights
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of `model`, one by one, each layer's KV heads in `order` (BOSCH B.2).

    Weights without heads are the model's own tensors.
    """
    orders = dict(zip(decoder_layers(model.config).full, order, strict=True))
    layers = model.get_decoder().layers
    prefix = next(name for name, module in model.named_modules() if module is layers)
    weights = dict(model.state_dict())
    for name in list(weights):
        # Popped within the expression, so that no reference to the weight remains here.
        if name.startswith(f"{prefix}."):
            yield name, in_order(name, weights.pop(name), head_weights, orders)
        else:
            yield name, weights.pop(name)


def materialize(model: PreTrainedModel, mask: HeadMask, *, take_weights: bool = False) -> Any:
    """The hybrid model of `model` under `mask`, in deploy mode: weights permuted, layout in config.

    Heads with the same window keep the base model's order. `model` does not change, so there are
    two models in memory; with `take_weights` its weights move to the hybrid one by one, with memory
    for one model and one weight. The hybrid has the model's device, dtypes and generation
    settings; save it with `save_pretrained` and load it with AutoModelForCausalLM after
    `import bosch`. Raises UserError when the family is not supported, the mask does not fit the
    model, or some of its weights are offloaded, adapters or quantised.
    """
    check_family(model.config)  # reported before a mask that does not fit
    check_fit(model.config, mask)
    _check_weights_in_memory(model)
    head_weights, mixes = measure_head_weights(model)
    kinds = decoder_layers(model.config)
    table = {
        **mask.content,
        "layers": list(kinds.full),
        "own_windows": {str(layer): size for layer, size in kinds.windows.items()},
        "own_heads": kinds.own_heads,
        "weights": head_weights,
        "mixes_documents": mixes or mixes_documents(model.config),
    }
    register_model(model.config.model_type)
    content = model.config.to_dict()
    for name in ("model_type", "architectures", "_name_or_path", "transformers_version"):
        content.pop(name, None)
    config_class, _, model_class = hybrid_classes(model.config.model_type)
    config = config_class(**content, hybrid_attention=table)
    if has_own_head(model):
        untie(config)
    with parameters_on_meta():
        hybrid = model_class._from_config(config, dtype=model.dtype)
    _check_plain_weights(model, hybrid)
    device = model.device  # that of the first weight, which is moved first
    for name, weight in permute_heads(model, mask.head_order, head_weights):
        # Keep its dtype: transformers keeps some weights of a bf16 model in float32.
        _replace(hybrid, name, weight if take_weights else weight.clone())
        if take_weights:
            _replace(model, name, weight.to("meta"))
    hybrid.tie_weights()
    if hasattr(model, "_hf_hook"):
        from accelerate import dispatch_model  # it is there, since it spread the model

        skipped = model._skip_keys_device_placement
        dispatch_model(hybrid, model.hf_device_map, skip_keys=skipped, force_hooks=True)
    else:
        hybrid.to(device)
    # Includes the flag with which transformers saves generation settings that it finds odd.
    hybrid.generation_config = deepcopy(model.generation_config)
    return hybrid.eval()


def check_hybrid(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise RunError unless the hybrid of `model` computes what `model` does for `tokens` [B, T].

    Every second KV head slides, with a window as wide as the text, so heads change places and no
    output may change. The weights move into the hybrid and back, so memory holds one model.
    """
    with torch.no_grad():
        expected = _states(model, tokens)
        is_full = np.indices(mask_shape(model.config)).sum(0) % 2 == 1
        mask = HeadMask.of(is_full, Window(tokens.shape[1]))
        hybrid = materialize(model, mask, take_weights=True)
        try:
            actual = _states(hybrid, tokens)
        finally:
            order = [np.argsort(heads).tolist() for heads in mask.head_order]
            names = model.state_dict().keys()
            head_weights = hybrid.config.hybrid_attention["weights"]
            for name, weight in permute_heads(hybrid, order, head_weights):
                if name in names:
                    _replace(model, name, weight)
            if not has_own_head(hybrid):
                model.tie_weights()
    parts = ["the embeddings", *(f"layer {n}" for n in range(len(expected) - 2)), "the output head"]
    for part, one, other in zip(parts, expected, actual, strict=True):
        difference = float((one - other).square().mean().sqrt() / one.square().mean().sqrt())
        if not difference <= TOLERANCE[model.dtype]:  # a NaN fails too
            raise RunError(
                f"{model.config.name_or_path}: its hybrid with windows wider than the text is not "
                f"the model: after {part} they differ by {difference:.3g} of the root mean square, "
                f"where {TOLERANCE[model.dtype]:g} is rounding"
            )


def _states(model: PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Embeddings, the output of each layer, and logits, in float32."""
    output = model(tokens.to(model.device), use_cache=False, output_hidden_states=True)
    return [state.float() for state in (*output.hidden_states, output.logits)]


def has_own_head(model: PreTrainedModel) -> bool:
    """Whether the head's weights are not the embeddings', whatever the configuration says.

    transformers keeps both where a file holds both with different values, and says
    `tie_word_embeddings` all the same.
    """
    head = model.get_output_embeddings()
    return head is not None and head.weight is not model.get_input_embeddings().weight


def untie(config: PreTrainedConfig) -> None:
    """Say in `config`, and in that of its text decoder, that the head has weights of its own."""
    config.tie_word_embeddings = text_config(config).tie_word_embeddings = False


def _check_plain_weights(model: PreTrainedModel, hybrid: PreTrainedModel) -> None:
    """Raise UserError unless `model` holds the weights of its family's class."""
    if others := model.state_dict().keys() ^ hybrid.state_dict().keys():
        name = min(others)
        raise UserError(
            f"the model is not as its class makes it, its weights differ in {name}: before "
            "materialize, merge its adapters into it (merge_and_unload of PEFT), and load it "
            "without quantisation"
        )


def _check_weights_in_memory(model: PreTrainedModel) -> None:
    weights = model.state_dict()
    offloaded = [name for name, weight in weights.items() if weight.is_meta]
    if offloaded:
        raise UserError(
            f"{len(offloaded)} weights of the model are offloaded or have no values, "
            f"{offloaded[0]} first: load it whole into the memory of one device, or of the CPU, "
            "before materialize"
        )


def _replace(model: nn.Module, name: str, weight: Tensor) -> None:
    """Replace a parameter or buffer by a tensor."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    parameter = module._parameters.get(attribute)
    if parameter is None:
        module._buffers[attribute] = weight
    else:
        module._parameters[attribute] = nn.Parameter(weight, parameter.requires_grad)
