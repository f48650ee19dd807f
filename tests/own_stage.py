"""A whole stage in one file, as a user of the project would add it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stages.context import StageConfig
from stages.cost import Cost, Devices
from stages.faults import Fault
from stages.fields import Count, PathText, Section
from stages.inputs import prose
from stages.prepare.stage import PrepareConfig
from stages.stage import LoadedRecipe, Stage


class WordsConfig(Section):
    """Words of a folder's texts."""

    folder: Annotated[PathText, prose()]
    """Folder of texts."""
    most: Count = 10
    """Words that are counted."""


def run(
    config: StageConfig[WordsConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    texts = [path.read_text() for path in sorted(Path(config.section.folder).iterdir())]
    words = " ".join(texts).split()[: config.section.most]
    (work_dir / "words.txt").write_text("\n".join(words))
    return {"words": len(words), "inputs": sorted(inputs)}


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    most = loaded.recipe[WordsConfig].most
    return Cost(disk=10.0 * most, note=f"{most} words on {devices.count} x {devices.name}")


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    words = loaded.recipe.get(WordsConfig)
    if words is not None and words.most > loaded.recipe[PrepareConfig].train_tokens:
        yield Fault("words.most", f"{words.most:,} is more than prepare.train_tokens")


STAGE = Stage(
    "words",
    f"{__name__}:run",
    WordsConfig,
    version=3,
    field=Field(None, description="Counts words."),
    needs=("prepare",),
    checks=_faults,
    cost=f"{__name__}:cost",
)
