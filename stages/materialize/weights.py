"""Checks, before anything runs, that the weights of the model's files are those of its class."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

from bosch.errors import UserError
from bosch.model.loading import load_model
from stages.faults import Fault
from stages.stage import LoadedRecipe


def weight_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Faults of the names and shapes of a local model's weights, from the headers of its files."""
    if loaded.info is None or loaded.info.directory is None:
        return
    model = loaded.recipe.model
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)  # a table of all weights
    transformers_logging.disable_progress_bar()
    try:
        load_model(loaded.info.directory, device="meta", **model.loading)
    except UserError as fault:
        yield Fault.of(fault, "model.path")
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
