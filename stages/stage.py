"""What a stage is to the pipeline: its section, what it needs and reads, its checks, its cost.

Whoever adds a stage adds a package with a `stage.py` that sets STAGE, and a module with its
function. Nothing here or in a `stage.py` imports torch, so that `status` stays instant.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from stages.fields import Section
from stages.recipe import LoadedRecipe

OwnSection = TypeVar("OwnSection", bound=Section)


def no_faults(loaded: LoadedRecipe) -> Iterator[str]:
    """The check of a stage whose fields are right each by itself."""
    yield from ()


def call(function: str, *arguments: Any) -> Any:
    """What the function `module:name` returns, whose module may be heavy; () without a name."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments) if module else ()


@dataclass(frozen=True)
class Stage(Generic[OwnSection]):
    """A stage of the pipeline.

    `function` is imported only in the process that runs it. `section` is the type of the recipe's
    section that configures it, under the key `key` (default: the stage's name); where a recipe
    leaves that out, it has no such stage. `field` declares the key: whether it is required and what
    it is for; None where another stage declares it. `version` is raised when results change.

    `needs` are the stages whose outputs it reads, as far as the recipe has them (None: all before
    it); `after` those that run before it though it reads nothing of them. `model` is what it reads
    of the base model, `card` what the key holds of the model's card, `choices` what it holds of
    other sections than those of the stages it needs; `unread` are fields of the section that it
    does not read. Stages with the same `pool` leave in one folder what they may take from each
    other.

    With `seeded` the recipe's seed is in the key. A `distributed` stage runs in all processes of
    the recipe, any other in one.

    Where the recipe has the section, `checks` yields what is wrong between the fields of a recipe,
    `missing` what a run needs beside the inputs that the section names and that is not there: one
    message each that begins with a dotted path. `slow_checks` names a function of the kind that
    only `validate` calls, `gaps` one that says what a run will continue without.

    `cost` names the function of (recipe, devices) that says what `plan` prints, `refusal` one that
    raises UserError before anything runs where the stage is certain not to fit on this machine.
    """

    name: str
    function: str
    section: type[OwnSection]
    version: int
    field: Any = None  # pydantic types a FieldInfo as what it declares
    key: str = ""
    needs: tuple[str, ...] | None = ()
    after: tuple[str, ...] = ()
    model: Literal["none", "tokenizer", "weights"] = "none"
    seeded: bool = True
    distributed: bool = False
    card: Callable[[LoadedRecipe], dict[str, Any]] | None = None
    choices: Callable[[LoadedRecipe], dict[str, Any]] | None = None
    pool: str | None = None
    unread: tuple[str, ...] = ()
    checks: Callable[[LoadedRecipe], Iterator[str]] = no_faults
    missing: Callable[[LoadedRecipe], Iterator[str]] = no_faults
    slow_checks: str = ""
    gaps: str = ""
    cost: str = ""
    refusal: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.name)

    @property
    def computes(self) -> bool:
        """Whether the stage runs a model, on GPUs where there are some."""
        return self.distributed or self.model == "weights"
