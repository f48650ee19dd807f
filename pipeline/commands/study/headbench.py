"""HeadBench: every selector of heads at the same KV cache, each tested against the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from bosch.analysis.intervals import Estimate, crossed_mean, crossed_test, holm
from bosch.heads import HeadMask
from bosch.model.cache_size import CacheSize
from bosch.model.families import decoder_layers
from bosch.search.methods import METHODS
from bosch.vllm.plan import LARGE_GPU, engine_heads, served_caches
from bosch.window import MOST_WINDOWS, Window, Windows, window_menu, windows_text
from pipeline.commands.paths import model_label
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import Measured, interval_text, measured
from pipeline.commands.study.studied_model import Results, Setting, StudiedModel
from stages.formats import format_length
from stages.pages.charts import Picture, ranking
from stages.pages.tables import Cell, Table
from stages.report.charts import LOOK, POINTS, ranked
from stages.search.stage import SearchConfig

# Sinks of uniform windows; StreamingLLM (arXiv 2309.17453) needs four. Such windows without
# training are what arXiv 2608.28444 asks linear attention to be compared with.
_SINKS = 4
# Context at which the cache in vLLM is stated.
_SERVED = 32 * 1024


@dataclass(frozen=True)
class Row:
    """One selector at one ratio: held-out exact match [S, E], shares of the original's cache.

    `cache` is that of `generate` at the longest held-out example, `served` that of vLLM on one GPU
    at 32k tokens (None: not served), the mean over seeds; `passes` the work of the search.
    """

    method: str
    label: str
    about: str
    ratio: float
    budget: int | None
    scores: Results
    cache: float
    served: float | None
    passes: float

    @property
    def mean(self) -> float:
        return float(self.scores.mean())


def study(model: StudiedModel) -> StudyResult:
    """Search with every method, ratio and seed, and compare at the bytes that they all have."""
    options = model.options
    kappa = max(options.budgets)
    points = measured(
        model,
        [
            _setting(model, method, ratio, kappa)
            for ratio in options.ratios
            for method in options.methods
        ],
    )
    rows = [_row(model, point) for point in points]
    rows += [_uniform(model, ratio, sinks) for ratio in options.ratios for sinks in (0, _SINKS)]
    rows.sort(key=lambda row: (row.ratio, -row.mean))
    records = [record for ratio in options.ratios for record in _records(rows, ratio)]
    data = {
        "seeds": options.seeds,
        "held_out_examples": len(model.held_out_set),
        "rows": records,
    }
    tables = [_table(ratio, records) for ratio in options.ratios]
    pictures = [_picture(ratio, rows) for ratio in options.ratios]
    return StudyResult(
        "headbench", "HeadBench", _text(model, kappa), data, tables, {"scores": pictures}, records
    )


def _setting(model: StudiedModel, method: str, ratio: float, kappa: int) -> Setting:
    own = METHODS[method]
    menu = _menu(model) if own.kind == "profile" or own.several_windows else None
    return Setting(method, ratio, kappa if own.searches else None, menu=menu)


def _menu(model: StudiedModel) -> tuple[Window, ...]:
    """The windows of methods that choose among several: doubled, from a quarter of the recipe's."""
    window = model.recipe[SearchConfig].window
    menu: list[Window] = []
    sets = [model.held_out_set, *(model.calibration(seed) for seed in range(model.options.seeds))]
    shortest = min(one.max_length for one in sets)
    size = max(1, window.size // 4)
    while size + window.sinks < shortest and len(menu) < MOST_WINDOWS:
        menu.append(Window(size, window.sinks))
        size *= 2
    return tuple(menu[::-1])


def _row(model: StudiedModel, point: Measured) -> Row:
    own, method = point.setting, METHODS[point.setting.method]
    windows = own.menu or model.recipe[SearchConfig].window
    sizes = [_cache(model, run.mask, windows) for run in point.runs]
    served = [share for _, share in sizes if share is not None]
    return Row(
        own.method, method.label, method.about, own.ratio, own.budget, point.results["score"],
        fmean(share for share, _ in sizes),
        fmean(served) if len(served) == len(sizes) else None,
        point.cost("full_forward_equivalents"),
    )  # fmt: skip


def _uniform(model: StudiedModel, ratio: float, most_sinks: int) -> Row:
    """Every head slides, with the widest window beside sinks that holds no more than the masks."""
    layers, heads = model.shape
    slots = model.slots(ratio) // (layers * heads)
    sinks = min(most_sinks, max(0, slots - 1))
    window = Window(slots - sinks + 1, sinks)
    mask = HeadMask.all_sliding(layers, heads)
    scores = model.held_out(mask, window)[:, 0]
    return Row(
        f"uniform_{most_sinks}_sinks", f"Uniform, W = {window.size}, {sinks} sinks",
        "every head slides alike", ratio, None, np.tile(scores, (model.options.seeds, 1)),
        *_cache(model, mask, window), 0.0,
    )  # fmt: skip


def _cache(model: StudiedModel, mask: HeadMask, windows: Windows) -> tuple[float, float | None]:
    """Shares of the original's bytes: in `generate`, and in vLLM where it serves the mask."""
    rows = mask.heads_per_layer(windows)
    layers = decoder_layers(model.model.config)
    size = CacheSize.of(rows, layers, model.model.dtype.itemsize)
    tokens = model.held_out_set.max_length
    share = size.dynamic(tokens) / size.original(tokens)
    if window_menu(windows)[0].sinks or layers.windows or layers.states:
        return share, None
    served = next(
        served_caches(engine_heads(rows), size.bytes_per_head, engine=LARGE_GPU, lengths=[_SERVED])
    )
    return share, None if served.refusal else served.hybrid / served.original


def _records(rows: Sequence[Row], ratio: float) -> list[dict[str, object]]:
    """The rows of a ratio, the best first, each with its paired test against that (Holm)."""
    own = [row for row in rows if row.ratio == ratio]
    best = own[0]
    tests = [crossed_test(row.scores, best.scores) for row in own[1:]]
    corrected = [None, *holm([test.p_value for test in tests])]
    records: list[dict[str, object]] = []
    for row, test, p_value in zip(own, [None, *tests], corrected, strict=True):
        estimate = crossed_mean(row.scores, is_score=True)
        records.append(
            {
                "method": row.method, "label": row.label, "about": row.about, "swa_ratio": ratio,
                "budget_per_layer": row.budget, "seeds": len(row.scores),
                "examples": row.scores.shape[1], "score": estimate.mean, "low": estimate.low,
                "high": estimate.high, "difference": None if test is None else test.mean,
                "p_holm": p_value, "cache_generate": row.cache, "cache_vllm": row.served,
                "full_passes": row.passes,
                "score_of_each_seed": row.scores.mean(axis=1).tolist(),
            }
        )  # fmt: skip
    return records


def _table(ratio: float, records: Sequence[dict[str, object]]) -> Table:
    header = (
        "selector", "how", "κ", "full passes", "cache", f"vLLM, {format_length(_SERVED)}",
        "held-out score", "less the best", "p, Holm",
    )  # fmt: skip
    own = [record for record in records if record["swa_ratio"] == ratio]
    near = [one["p_holm"] is None or float(str(one["p_holm"])) >= 0.05 for one in own]
    rows = []
    for record, is_near in zip(own, near, strict=True):
        rank = 0 if not is_near else 1 if sum(near) == 1 else 2
        rows.append(
            [
                str(record["label"]), str(record["about"]),
                _text_of(record["budget_per_layer"], "d"),
                _text_of(record["full_passes"], ".1f"), _text_of(record["cache_generate"], ".1%"),
                _text_of(record["cache_vllm"], ".1%"),
                Cell(_interval(record), rank),
                _text_of(record["difference"], "+.3f"), _text_of(record["p_holm"], ".3f"),
            ]
        )  # fmt: skip
    return Table.of_rows(f"ρ = {ratio:g}", header, rows)


def _interval(record: dict[str, object]) -> str:
    return interval_text(Estimate(record["score"], record["low"], record["high"]))  # type: ignore[arg-type]


def _text_of(value: object, form: str) -> str:
    return "" if value is None else format(value, form)


def _picture(ratio: float, rows: Sequence[Row]) -> Picture:
    """The selectors' scores, the lowest first."""
    bars = []
    for row in reversed([row for row in rows if row.ratio == ratio]):
        found = crossed_mean(row.scores, is_score=True)
        low = found.mean if found.low is None else found.low
        high = found.mean if found.high is None else found.high
        bars.append(ranked(row.label, "untrained", 100 * found.mean, 100 * low, 100 * high))
    axis = POINTS._replace(title="Held-out score (points of 100)")
    text = ", ".join(f"{bar['label']} {bar['text']}" for bar in bars)
    chart = ranking(bars, axis, LOOK, step=26)
    return Picture(f"headbench-{ratio:g}", chart, f"{text}.", f"ρ = {ratio:g}", is_half=True)


def _text(model: StudiedModel, kappa: int) -> str:
    recipe, options = model.recipe, model.options
    layers, heads = model.shape
    return (
        f"`{model_label(recipe.model.path)}`, {layers} layers of {heads} KV heads, "
        f"W = {recipe[SearchConfig].window.size}, {model.about_examples}. {options.seeds} seeds, "
        f"each with its own calibration set; searches have κ = {kappa}. Untrained hybrids. All "
        "selectors of a ratio hold the same bytes in generate at the longest example ('cache', a "
        "share of the original's); in vLLM it depends on how full heads lie in the layers. Uniform "
        "windows, with and without sinks, and masks of several windows hold no more there. The "
        f"former have no seeds; the latter choose among {windows_text(_menu(model))} tokens. "
        "Brackets: 95 % intervals over seeds and examples. Each selector is tested against the "
        "best of its ratio on the same examples (paired, Holm): bold is one that is shown to be "
        "above all others, else those that are not shown to be below the best are underlined."
    )
