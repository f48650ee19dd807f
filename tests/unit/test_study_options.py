"""Options of a study are checked before anything runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.commands import options
from stages.fields import Section
from tests.pipeline_case import ROOT, Case


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--ratios", "0.5,2", "study: --ratios: expected a value at most 1, found "),
        ("--ratios", "half", "--ratios: 'half' is not a number"),
        ("--seeds", "0", "--seeds: expected a value greater than 0, found "),
        ("--seeds", "2,3", "--seeds: '2,3' is not a count"),
        ("--budgets", "4,x", "--budgets: 'x' is not a count"),
        ("--methods", "bosch,bsch", "--methods: 'bsch' is unknown; did you mean bosch?"),
        ("--methods", "zzz", "--methods: 'zzz' is unknown; choose from all, bosch, "),
    ],
)
def test_options_without_meaning_are_refused(
    option: str,
    value: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Case(tmp_path)
    assert main(["study", "cost", str(case.file), option, value]) == 2
    assert sentence in capsys.readouterr().err
    assert not case.runs.exists()


class Settings(Section):
    """Options of a command."""

    seeds: options.Seeds = Field(default=(4,), description="100 % of them")
    methods: options.Methods = options.METHODS
    is_fast: bool = Field(default=False)


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ([], ((4,), options.METHODS, False)),
        (["--seeds", "2,0,2", "--methods", "rand,bosch,rand"], ((0, 2), ("rand", "bosch"), False)),
        (["--methods", "all", "--is-fast"], ((4,), options.METHODS, True)),
        (["--seeds=-1"], "--seeds: expected a value at least 0"),
        (["--methods", "rnd", "--seeds", "x"], "it: 2 faults\n  --seeds: "),
    ],
)
def test_options_are_a_section(typed: list[str], values: object) -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser, Settings)
    assert "(default: 4)" in parser.format_help() and "(default: all)" in parser.format_help()
    arguments = parser.parse_args(typed)
    if isinstance(values, str):
        with pytest.raises(UserError) as caught:
            options.read_options(Settings, arguments, "it")
        assert values in str(caught.value)
    else:
        read = options.read_options(Settings, arguments, "it")
        assert (read.seeds, read.methods, read.is_fast) == values


def test_options_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    case = Case(tmp_path)
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import sys; from pipeline.cli import main; print(main(sys.argv[1:]), 'torch' in "
            "sys.modules)",
            "study", "cost", str(case.file), "--methods", "bosch,bsch",
        ],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_only_headbench_trains_and_by_the_recipes_own_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path)
    for study, override, sentence in (
        ("cost", "seed=1", "--with-training: headbench is the study that trains, not cost"),
        ("headbench", "train=null", "--with-training: the recipe has no section train"),
    ):
        assert main(["study", study, str(case.file), override, "--with-training"]) == 2
        assert sentence in capsys.readouterr().err
    assert not case.runs.exists()
