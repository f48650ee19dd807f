"""The sizes of a recipe's model, for `plan` and for checks of memory; imports torch."""

from __future__ import annotations

import functools

from bosch.errors import UserError
from bosch.score.decoder_shape import DecoderShape
from stages.stage import LoadedRecipe, ModelInfo


def shape_of(loaded: LoadedRecipe) -> DecoderShape:
    """Sizes of the decoder. Raises UserError if they are not known here."""
    if loaded.info is None:
        raise UserError(
            f"model.path: the shape of {loaded.recipe.model.path} is not known here; put its "
            "config.json into a folder of its own and plan with model.path=FOLDER"
        )
    return stored_shape(loaded.info)


@functools.cache
def stored_shape(info: ModelInfo) -> DecoderShape:
    """Sizes of the decoder of a config.json."""
    return DecoderShape.of(info.of_transformers())
