"""Studies of the search, one module each, with their common modules."""

from __future__ import annotations

from pydantic import Field

from pipeline.commands import options as shared_options
from stages.fields import Count, Counts, Ratios, Section


class StudyOptions(Section):
    """Size of a study; methods and ratios are in the order of the tables."""

    methods: shared_options.Methods = Field(
        shared_options.METHODS, description="methods to compare, separated by commas"
    )
    ratios: Ratios = Field((0.25, 0.5, 0.75, 0.875), description="SWA ratios")
    seeds: Count = Field(5, description="runs of each method")
    budgets: Counts = Field((4, 8, 16), description="evaluations per layer of the searches (κ)")
    sizes: Counts = Field(
        (4, 8, 16), description="calibration examples that the stability study compares"
    )
    granularities: Counts = Field(
        (1, 2, 4), description="heads that the granularity study chooses together"
    )
    held_out: Count = Field(48, description="examples on which masks are compared")
    examples: str | None = Field(
        None,
        description="JSON lines of input_ids and answer_length to study instead of the recipe's "
        "tasks; the last ones are held out, each seed draws its calibration set from the others",
    )
    with_training: bool = Field(
        False, description="headbench: train each hybrid by the recipe's section train, too"
    )
    output: str | None = Field(None, description="folder of results (default: runs/<recipe>/study)")
    docs: bool = Field(False, description="copy page and plots to docs/notes/study as well")
