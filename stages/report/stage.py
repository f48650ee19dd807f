"""Stage report: the HTML page."""

from __future__ import annotations

from pydantic import Field

from stages.fields import Line, Number, Section


class ReportConfig(Section):
    """The HTML page."""

    title: Line | None = Field(None, description="Heading of the page; default: the recipe's name.")
    gpu_hour_price: Number | None = Field(
        None,
        ge=0,
        description="Price of an hour of one GPU, to state costs; default: GPU hours alone.",
    )
    currency: Line = Field("USD", description="What the price is in.")


PAGE = "index.html"
