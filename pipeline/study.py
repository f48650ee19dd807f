"""`python -m pipeline study NAME RECIPE`: from the command line to a study of a recipe's model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bosch.errors import UserError
from pipeline.compare import METHODS
from pipeline.recipe import ROOT, LoadedRecipe
from stages.configs import parse_count
from stages.studying.options import StudyConfig, StudyOptions

_Value = TypeVar("_Value", int, float)
_DEFAULT = StudyOptions()
_DOCS = ROOT / "docs" / "study"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a study can be told besides the recipe."""
    parser.add_argument(
        "--methods", default="all", help="methods to compare, separated by commas (default: all)"
    )
    parser.add_argument(
        "--ratios", default=_joined(_DEFAULT.ratios), help="SWA ratios (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", default=str(_DEFAULT.seeds), help="runs of each method (default: %(default)s)"
    )
    parser.add_argument(
        "--budgets",
        default=_joined(_DEFAULT.budgets),
        help="evaluations per layer of the searches (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        default=_joined(_DEFAULT.sizes),
        help="calibration examples that the stability study compares (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        default=str(_DEFAULT.held_out),
        help="examples on which masks are compared (default: %(default)s)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="folder of results (default: runs/<recipe>/study)"
    )
    parser.add_argument(
        "--docs", action="store_true", help="copy page and pictures to docs/study as well"
    )


def run_study(loaded: LoadedRecipe, options: argparse.Namespace, arguments: Sequence[str]) -> Path:
    """Run the study and return its page. Raises UserError for an option that has no meaning."""
    config = _config(loaded, options)
    folder = Path(options.output or loaded.output_root / loaded.recipe.name / "study")
    command = shlex.join(["python", "-m", "pipeline", *arguments])
    from stages.studying.run import run

    return run(options.study, config, folder, command, _DOCS if options.docs else None)


def _config(loaded: LoadedRecipe, options: argparse.Namespace) -> StudyConfig:
    recipe = loaded.recipe
    return StudyConfig(
        model=recipe.model,
        calibration=recipe.prepare.calibration,
        search=recipe.search,
        runtime=recipe.runtime,
        seed=recipe.seed,
        options=StudyOptions(
            seeds=_numbers("--seeds", options.seeds, _count, single=True)[0],
            ratios=_numbers("--ratios", options.ratios, _ratio),
            methods=_methods(options.methods),
            budgets=_numbers("--budgets", options.budgets, _count),
            sizes=_numbers("--sizes", options.sizes, _count),
            held_out=_numbers("--held-out", options.held_out, _count, single=True)[0],
        ),
    )


def _numbers(
    option: str, text: str, parse: Callable[[str], _Value], *, single: bool = False
) -> tuple[_Value, ...]:
    """Rising numbers of an option."""
    try:
        values = tuple(sorted({parse(part) for part in text.split(",")}))
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None
    if single and len(values) != 1:
        raise UserError(f"{option} {text}: expected one number")
    return values


def _count(text: str) -> int:
    value = parse_count(text)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"'{text}' is not a positive whole number")
    return value


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number") from None
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{text} does not lie between 0 and 1")
    return value


def _methods(text: str) -> tuple[str, ...]:
    if text == "all":
        return METHODS
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in METHODS:
            raise UserError(f"--methods: '{name}' is unknown: choose from {', '.join(METHODS)}")
    return names


def _joined(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
