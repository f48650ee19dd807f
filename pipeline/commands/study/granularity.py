"""Study granularity: the cost of choosing heads in units, as `search.head_granularity` does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from bosch.budget import admits_granularity
from bosch.errors import UserError
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import Measured, measured
from pipeline.commands.study.studied_model import Setting, StudiedModel, variants
from stages.formats import counted
from stages.pages.tables import Table


def study(model: StudiedModel) -> StudyResult:
    """Search at every granularity; compare with single heads on the same held-out examples.

    Ratios without a mask at a granularity are left out and named. Raises UserError where all are.
    """
    options = model.options
    sizes = sorted({1, *options.granularities})
    if sizes == [1]:
        raise UserError("--granularities 1: single heads are compared with units; name one above 1")
    absent = [
        (ratio, size)
        for ratio, size in product(options.ratios, sizes)
        if not admits_granularity(*model.shape, ratio, size)
    ]
    if len(absent) == len(options.ratios) * (len(sizes) - 1):
        raise UserError(
            f"--granularities: for {model.shape[0]} layers of {model.shape[1]} KV heads no mask in "
            "such units has one of --ratios"
        )
    # The largest budget of each method.
    budgets = dict(variants(options.methods, options.budgets))
    settings = [
        Setting(method, ratio, budgets[method], granularity=size)
        for ratio, method, size in product(options.ratios, options.methods, sizes)
        if (ratio, size) not in absent
    ]
    points = measured(model, settings)
    by_setting = {point.setting: point for point in points}
    pairs = [(point, by_setting[replace(point.setting, granularity=1)]) for point in points]
    data = {
        "seeds": options.seeds,
        "budget_per_layer": budgets,
        "held_out_examples": len(model.held_out_set),
        "points": [
            point.record(head_granularity=point.setting.granularity) | point.differences(single)
            for point, single in pairs
        ],
    }
    tables = [_table(ratio, pairs) for ratio in options.ratios]
    return StudyResult("granularity", "Heads chosen in units", _text(model, absent), data, tables)


def _table(ratio: float, pairs: list[tuple[Measured, Measured]]) -> Table:
    header = (
        "method", "g", "held-out score", "difference from g = 1", "held-out log-likelihood",
        "difference from g = 1",
    )  # fmt: skip
    rows = [
        [
            point.setting.method,
            str(point.setting.granularity),
            *point.cells(single, is_compared=True),
        ]
        for point, single in pairs
        if point.setting.ratio == ratio
    ]
    return Table.of_rows(f"ρ = {ratio:g}", header, rows)


def _text(model: StudiedModel, absent: list[tuple[float, int]]) -> str:
    options = model.options
    ratios = ", ".join(f"ρ = {ratio:g} at g = {size}" for ratio, size in absent)
    exclusions = f" No mask has {ratios}." if absent else ""
    layers, heads = model.shape
    return (
        f"`{model.label}`, {layers} layers of {heads} KV heads, "
        f"W = {model.window.size}, {model.about_examples}. {counted(options.seeds, 'seed')}, "
        f"κ = {max(options.budgets)}, in bosch_plus ten times that, since it makes a tenth of the "
        "evaluations. The full heads of every layer are a multiple of g. "
        "Methods with gradients form units of heads with similar gradients at the original "
        "model, rankings of heads with similar scores, all others of neighbouring "
        "heads. Brackets: 95 % intervals over seeds and examples; "
        f"differences are paired by example.{exclusions}"
    )
