"""The commands that need the checkout; they are found as `bosch.commands` says."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bosch.commands import Command


@dataclass(frozen=True)
class RecipeCommand(Command):
    """A command that works on a recipe: `run(loaded, options)` returns the exit status.

    `without` are the arguments of `load_recipe` that are false for it, like fetch.
    """

    without: tuple[str, ...] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, see recipes/")
        parser.add_argument(
            "overrides",
            metavar="key.path=value",
            nargs="*",
            default=[],
            help="replaces a value of the recipe, like search.swa_ratio=0.5",
        )
