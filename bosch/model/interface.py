"""The attention modules of a decoder."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from bosch.errors import UserError
from bosch.hybrid import attention_of
from bosch.model.families import base_type, decoder_layers


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of layers with full attention, one for each row of a head mask."""
    return [attention_module(model, layer) for layer in decoder_layers(model.config).full]


def attention_module(model: PreTrainedModel, layer: int) -> nn.Module:
    """The attention module of a decoder layer; UserError if it is not clear which it is."""
    layers = getattr(model.get_decoder(), "layers", None)
    found = [] if layers is None else attention_of(layers[layer])
    if len(found) != 1:
        raise UserError(
            f"models of type '{base_type(model.config)}' cannot be made hybrid: layer {layer} of "
            f"their decoder has {len(found)} modules of attention"
        )
    return found[0]
