"""What preparing the data costs."""

from __future__ import annotations

from stages.cost import Cost, Devices
from stages.formats import format_hours
from stages.prepare.stage import PrepareConfig
from stages.recipe import LoadedRecipe

# Tokens a core tokenises in a second, with a fast tokenizer on prose and code.
_TOKENS_PER_CORE_SECOND = 250_000


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Tokens to read, and the data on disk."""
    prepare = loaded.recipe[PrepareConfig]
    tokens, length = prepare.train_tokens, prepare.sequence_length
    core_hours = tokens / _TOKENS_PER_CORE_SECOND / 3600
    examples = prepare.calibration.examples
    facts = [
        f"{tokens:,} tokens in {tokens // length:,} sequences of {length:,}",
        f"{examples} calibration examples of {prepare.calibration.length:,}",
        f"about {format_hours(core_hours)} on one core",
    ]
    return Cost(0, tokens * 4.0 + examples * prepare.calibration.length * 6.0, facts)
