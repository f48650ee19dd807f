"""Stage rival: the hybrid of a rule or ranking, trained by `train_rival` for comparison."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from bosch.search.methods import UnsearchedName
from stages.faults import Fault
from stages.fields import Section
from stages.stage import LoadedRecipe, Stage
from stages.train.stage import TrainConfig


class RivalConfig(Section):
    """A hybrid of a rule or ranking with the same training, to measure what the search adds."""

    method: UnsearchedName = "intr"
    """Layer rule or ranking that chooses its full heads: as many as the search's mask has, or,
    where that has several windows, with one window and no more KV cache. It is trained on the same
    tokens as the search's hybrid, with the same settings: training costs twice as much."""


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    if loaded.recipe.get(TrainConfig) is None:
        yield Fault("rival", "needs a section train; evaluate.rivals scores untrained hybrids")


STAGE = Stage(
    "rival",
    "stages.rival.run:run",
    RivalConfig,
    field=Field(
        None, description="A second hybrid that is trained for comparison; left out, there is none."
    ),
    needs=("search", "materialize"),
    # The search's hybrid is trained first.
    after=("train",),
    model="weights",
    checks=_faults,
    cost="stages.materialize.cost:cost",
)
