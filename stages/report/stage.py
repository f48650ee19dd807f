"""Stage report: the HTML page."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from stages.fields import Line, Number, Section
from stages.stage import Recipe, Stage


class ReportConfig(Section):
    """The HTML page."""

    title: Line | None = None
    """Heading of the page; default: the recipe's name."""
    margin: Number = Field(2.0, gt=0, le=100)
    """Loss against the original, in points of 100 over all tasks, that is allowed. The report says
    to ship a hybrid if the whole 95 % interval of its loss lies within this margin."""

    def completed(self, recipe: Recipe) -> Self:
        """The section with the recipe's name as default title."""
        return self if self.title else self.model_copy(update={"title": recipe.name})


PAGE = "index.html"
TABLE = "models.csv"


STAGE = Stage(
    "report",
    "stages.report.page:run",
    ReportConfig,
    field=Field(default_factory=ReportConfig, description="The HTML page."),
    completed=ReportConfig.completed,
    needs=None,
)
