"""Cost of a search."""

from __future__ import annotations

import math

from bosch.search.methods import METHODS
from stages.cost import EFFICIENCY, Cost, Devices
from stages.formats import counted
from stages.prepare.stage import PrepareConfig
from stages.search.budget import HELD_OUT_EVERY
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The method's most evaluations and a ranking's own passes, each with every head full."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    search, calibration = recipe[SearchConfig], recipe[PrepareConfig].calibration
    method, examples = METHODS[search.method], calibration.examples
    if method.finds_front:
        examples -= examples // HELD_OUT_EVERY
    settings = search.settings(recipe.seed, search.ratio_for(shape.kinds, recipe.model.dtype))
    evaluations = method.most_evaluations(settings, shape.full_layers, shape.key_value_heads)
    tokens = examples * calibration.length
    passes = evaluations + (method.passes(examples) if method.reads_attention else 0)
    return Cost(
        passes * shape.forward_flops(tokens, calibration.length, logits=0),
        note=f"at most {counted(evaluations, 'evaluation')} of {tokens:,} tokens",
        jobs=math.ceil(examples / recipe.runtime.eval_batch_size),
        efficiency=devices.efficiency or EFFICIENCY,
    )
