"""HeadBench: all selectors of heads at an equal KV cache, each tested against the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from bosch.analysis.intervals import LEVEL, Estimate, crossed_mean, crossed_test, holm
from bosch.heads import HeadMask
from bosch.model.cache import state_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import decoder_layers
from bosch.progress import progress
from bosch.search.methods import METHODS
from bosch.vllm.plan import LARGE_GPU, engine_heads, served_caches
from bosch.window import MAX_WINDOWS, Window, Windows, window_menu, windows_text
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import Measured, interval_text, measured
from pipeline.commands.study.studied_model import Results, Setting, StudiedModel
from stages.formats import counted, format_length
from stages.pages.charts import Picture, ranking
from stages.pages.tables import Cell, Table
from stages.report.charts import LOOK, POINTS, ranking_row
from stages.train.stage import TrainConfig

# Sinks of uniform windows; StreamingLLM (arXiv 2309.17453) needs four. arXiv 2608.28444 proposes
# untrained windows of this kind as baseline for linear attention.
_SINKS = 4
# Tokens of a request for the cache in vLLM.
_SERVED_TOKENS = 32 * 1024
_UNTRAINED, _TRAINED = "untrained", "trained"


@dataclass(frozen=True)
class Row:
    """A selector at a ratio: held-out exact match [S, E], and shares of the original's cache.

    `masks` are the seeds' masks (a single one for uniform windows), with the `windows` of sliding
    heads. `cache` is for `generate` at the longest held-out example, `served` for vLLM on one GPU
    at 32k tokens (None: not served), both means over seeds; `passes` is the median work of the
    searches, in full forward passes.
    """

    method: str
    label: str
    about: str
    ratio: float
    budget: int | None
    scores: Results
    masks: Sequence[HeadMask]
    windows: Windows
    cache: float
    served: float | None
    passes: float
    trained: Results | None = None

    def of(self, kind: str) -> Results:
        """The scores of the untrained or the trained hybrids."""
        scores = self.scores if kind == _UNTRAINED else self.trained
        assert scores is not None
        return scores


def study(model: StudiedModel) -> StudyResult:
    """Search with every method, ratio and seed, and compare at equal bytes of cache."""
    options = model.options
    kappa = max(options.budgets)
    menu = headbench_menu(model)
    settings = [
        Setting(
            method, ratio, kappa if METHODS[method].searches else None,
            menu=menu if METHODS[method].several_windows else None,
        )
        for ratio, method in product(options.ratios, options.methods)
    ]  # fmt: skip
    rows = [_row(model, point) for point in measured(model, settings)]
    rows += [_uniform(model, ratio, sinks) for ratio in options.ratios for sinks in (0, _SINKS)]
    rows.sort(key=lambda row: (row.ratio, -row.scores.mean()))
    kinds = [_UNTRAINED]
    if options.with_training:
        rows, kinds = _trained(model, rows), [_UNTRAINED, _TRAINED]
    records = [record for ratio in options.ratios for record in records_of(rows, ratio, kinds)]
    data = {"seeds": options.seeds, "held_out_examples": len(model.held_out_set), "rows": records}
    tables = [table_of(ratio, records, kinds) for ratio in options.ratios]
    pictures = [_picture(ratio, rows, kind) for ratio in options.ratios for kind in kinds]
    return StudyResult(
        "headbench", "HeadBench", _text(model, kappa), data, tables, {"scores": pictures}, records
    )


def headbench_menu(model: StudiedModel) -> tuple[Window, ...]:
    """Windows for methods that choose among several: doubling, from a quarter of the recipe's."""
    window = model.window
    menu: list[Window] = []
    sets = [model.held_out_set, *(model.calibration(seed) for seed in range(model.options.seeds))]
    # The shortest among the longest examples of all sets.
    shortest = min(examples.max_length for examples in sets)
    size = max(1, window.size // 4)
    while size + window.sinks < shortest and len(menu) < MAX_WINDOWS:
        menu.append(Window(size, window.sinks))
        size *= 2
    return tuple(menu[::-1])


def _row(model: StudiedModel, point: Measured) -> Row:
    setting, method = point.setting, METHODS[point.setting.method]
    windows = setting.menu or model.window
    sizes = [cache_shares(model, run.mask, windows) for run in point.runs]
    served = [share for _, share in sizes if share is not None]
    return Row(
        method=setting.method, label=method.label, about=method.about, ratio=setting.ratio,
        budget=setting.budget, scores=point.results["score"],
        masks=[run.mask for run in point.runs], windows=windows,
        cache=fmean(share for share, _ in sizes),
        served=fmean(served) if len(served) == len(sizes) else None,
        passes=point.cost("full_forward_equivalents"),
    )  # fmt: skip


def _uniform(model: StudiedModel, ratio: float, most_sinks: int) -> Row:
    """Every head sliding, with sinks and the widest window within the other masks' bytes."""
    layers, heads = model.shape
    slots = model.slots(ratio) // (layers * heads)
    sinks = min(most_sinks, max(0, slots - 1))
    window = Window(slots - sinks + 1, sinks)
    mask = HeadMask.all_sliding(layers, heads)
    scores = model.held_out(mask, window)[:, 0]
    cache, served = cache_shares(model, mask, window)
    return Row(
        method=f"uniform_{most_sinks}_sinks",
        label=f"Uniform, W = {window.size}, {sinks} sinks",
        about="every head slides alike",
        ratio=ratio,
        budget=None,
        scores=np.tile(scores, (model.options.seeds, 1)),
        masks=[mask],
        windows=window,
        cache=cache,
        served=served,
        passes=0.0,
    )


def cache_shares(
    model: StudiedModel, mask: HeadMask, windows: Windows
) -> tuple[float, float | None]:
    """Shares of the original's bytes in `generate` and, if it serves the mask, in vLLM."""
    rows = mask.heads_per_layer(windows)
    layers = decoder_layers(model.model.config)
    size = CacheSize.of(rows, layers, model.model.dtype.itemsize, state_bytes(model.model))
    tokens = model.held_out_set.max_length
    share = size.dynamic(tokens) / size.original(tokens)
    if window_menu(windows)[0].sinks or layers.windows or layers.states:
        return share, None
    served = next(
        served_caches(
            engine_heads(rows), size.bytes_per_head, engine=LARGE_GPU, lengths=[_SERVED_TOKENS]
        )
    )
    return share, None if served.refusal else served.hybrid / served.original


def _trained(model: StudiedModel, rows: Sequence[Row]) -> list[Row]:
    """The rows with scores after training; equal masks are trained once."""
    with_training = []
    count = sum(len({*row.masks}) for row in rows)
    with progress(count, "trainings", "trainings") as bar:
        for row in rows:
            results = {}
            for mask in dict.fromkeys(row.masks):
                before = len(model.finished)
                results[mask] = model.trained(mask, row.windows)[:, 0]
                bar.update(free=len(model.finished) == before)
            scores = np.stack([results[mask] for mask in row.masks])
            with_training.append(replace(row, trained=np.broadcast_to(scores, row.scores.shape)))
    return with_training


def records_of(rows: Sequence[Row], ratio: float, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a ratio, the best untrained first."""
    at_ratio = [row for row in rows if row.ratio == ratio]
    records: list[dict[str, Any]] = [
        {
            "method": row.method, "label": row.label, "about": row.about, "swa_ratio": ratio,
            "budget_per_layer": row.budget, "seeds": len(row.scores),
            "examples": row.scores.shape[1], "cache_generate": row.cache,
            "cache_vllm": row.served, "full_passes": row.passes,
        }
        for row in at_ratio
    ]  # fmt: skip
    for kind in kinds:
        prefix = "" if kind == _UNTRAINED else f"{kind}_"
        tested = _tested([row.of(kind) for row in at_ratio])
        for record, columns in zip(records, tested, strict=True):
            record.update({f"{prefix}{name}": value for name, value in columns.items()})
    return records


def _tested(scores: Sequence[Results]) -> list[dict[str, Any]]:
    """Mean and interval of each selector, and its paired test against the best one (Holm).

    Since the examples determined the best, each test is corrected as one among all pairs.
    """
    best = max(range(len(scores)), key=lambda number: scores[number].mean())
    rivals = [number for number in range(len(scores)) if number != best]
    tests = {number: crossed_test(scores[number], scores[best]) for number in rivals}
    pairs = len(scores) * len(rivals) // 2
    p_values = holm([test.p_value for test in tests.values()], pairs)
    corrected = dict(zip(tests, p_values, strict=True))
    columns: list[dict[str, Any]] = []
    for number, rows in enumerate(scores):
        estimate, test = crossed_mean(rows, is_score=True), tests.get(number)
        columns.append(
            {
                "score": estimate.mean,
                "low": estimate.low,
                "high": estimate.high,
                "difference": None if test is None else test.mean,
                "p_holm": corrected.get(number),
                "score_of_each_seed": rows.mean(axis=1).tolist(),
            }
        )
    return columns


def table_of(ratio: float, records: Sequence[dict[str, Any]], kinds: Sequence[str]) -> Table:
    served = f"vLLM, {format_length(_SERVED_TOKENS)}"
    header = ["selector", "how", "κ", "full passes", "cache", served]
    at_ratio = [record for record in records if record["swa_ratio"] == ratio]
    rows: list[list[str | Cell]] = [
        [
            record["label"], record["about"], _text_of(record["budget_per_layer"], "d"),
            _text_of(record["full_passes"], ".1f"), _text_of(record["cache_generate"], ".1%"),
            _text_of(record["cache_vllm"], ".1%"),
        ]
        for record in at_ratio
    ]  # fmt: skip
    for kind in kinds:
        prefix = "" if kind == _UNTRAINED else f"{kind}_"
        header += [
            "held-out score" if kind == _UNTRAINED else "after training",
            "less the best",
            "p, Holm",
        ]
        p_values = [record[f"{prefix}p_holm"] for record in at_ratio]
        near = [value is None or value >= LEVEL for value in p_values]
        for row, record, is_near in zip(rows, at_ratio, near, strict=True):
            rank = (1 if sum(near) == 1 else 2) if is_near else 0
            estimate = Estimate(*(record[f"{prefix}{bound}"] for bound in ("score", "low", "high")))
            row += [
                Cell(interval_text(estimate), rank),
                _text_of(record[f"{prefix}difference"], "+z.3f"),
                _text_of(record[f"{prefix}p_holm"], ".3f"),
            ]
    return Table.of_rows(f"ρ = {ratio:g}", header, rows)


def _text_of(value: object, form: str) -> str:
    return "" if value is None else format(value, form)


def _picture(ratio: float, rows: Sequence[Row], kind: str) -> Picture:
    """The selectors' scores, the lowest first."""
    bars = []
    at_ratio = [row for row in rows if row.ratio == ratio]
    for row in sorted(at_ratio, key=lambda row: float(row.of(kind).mean())):
        mean, low, high = crossed_mean(row.of(kind), is_score=True).for_charts
        bars.append(ranking_row(row.label, kind, 100 * mean, 100 * low, 100 * high))
    axis = POINTS._replace(title="Held-out score (points of 100)")
    text = ", ".join(f"{bar['label']} {bar['text']}" for bar in bars)
    chart = ranking(bars, axis, LOOK, step=26)
    title = f"ρ = {ratio:g}, {kind}"
    return Picture(f"headbench-{ratio:g}-{kind}", chart, f"{text}.", title)


def _text(model: StudiedModel, kappa: int) -> str:
    options = model.options
    layers, heads = model.shape
    trained = "Untrained hybrids. "
    if options.with_training:
        train = model.recipe[TrainConfig]
        tokens = train.optimizer_steps * train.batch_tokens
        trained = f"Each hybrid is scored untrained, and trained for {tokens:,} tokens. "
    return (
        f"`{model.label}`, {layers} layers of {heads} KV heads, "
        f"W = {model.window.size}, {model.about_examples}. {counted(options.seeds, 'seed')}, "
        f"each with its own calibration set; searches have κ = {kappa}. {trained}All "
        "selectors of a ratio hold the same bytes in generate at the longest example ('cache', a "
        "share of the original's); in vLLM it depends on how full heads lie in the layers. Uniform "
        "windows, with and without sinks, and masks of several windows hold no more there. The "
        "former have no seeds; the latter choose among "
        f"{windows_text(headbench_menu(model))} tokens. Brackets: 95 % intervals over seeds "
        "and examples. Each selector is tested against the "
        "best of its ratio on the same examples (paired, corrected for all pairs by Holm): bold is "
        "one that is shown to be above all others, else those that are not shown to be below the "
        "best are underlined."
    )
