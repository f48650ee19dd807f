"""Stage search: which KV heads become sliding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from bosch.backends import lacking
from bosch.budget import LayerHeads, check_granularity, swa_budget
from bosch.errors import UserError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.families import DecoderLayers
from bosch.search.loss import Anchors
from bosch.search.methods import METHODS, MethodName
from bosch.search.settings import SearchSettings, SolverName
from bosch.search.trace import TracePoint
from bosch.window import Window, named_share
from stages.evaluate.chat import ChatConfig
from stages.evaluate.stage import EvaluateConfig
from stages.faults import Fault, collected
from stages.fields import MOST, Count, Flag, Number, PathText, Ratio, Section, rising
from stages.inputs import Hasher, Input
from stages.prepare.stage import PrepareConfig
from stages.published import Record, Summary
from stages.search.budget import Budget, RequestCache, sliding_ratio
from stages.stage import LoadedRecipe, ModelInfo, Recipe, Stage, model_processes


def _mask_file(_search: SearchConfig, path: str | None, hasher: Hasher) -> str | None:
    return hasher.sha256(Path(path)) if path is not None else None


def _check_mask(search: SearchConfig, path: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}")


class SearchConfig(Section):
    """Which KV heads become sliding-window attention (BOSCH Algorithms 1 to 3)."""

    ALTERNATIVES: ClassVar = (("swa_ratio", "budget"), ("window_size", "windows"))

    method: MethodName = Field(
        "bosch",
        description="How the head mask is found. "
        + "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
        + ".",
    )
    swa_ratio: Ratio | None = None
    """Share of KV heads that become sliding (rho)."""
    budget: Budget | None = None
    """What the KV cache may hold, in place of swa_ratio."""
    window_size: Count | None = 1024
    """Keys that a sliding head attends to, including the query's own (W)."""
    windows: Annotated[list[Count], AfterValidator(rising)] | None = Field(
        None,
        min_length=1,
        description=(
            "In place of window_size the windows that sliding heads may have, from the smallest "
            "up, like [128, 512, 2k]; for methods "
            + ", ".join(name for name, method in METHODS.items() if method.several_windows)
            + "."
        ),
    )
    points: Annotated[list[Ratio], AfterValidator(rising)] | None = Field(
        None, min_length=1, max_length=64
    )
    """Method front: sizes of its points as shares of the original's KV cache in layers with full
    attention; default: eight, evenly spaced on a logarithmic scale."""
    sinks: int = Field(0, ge=0, le=MOST)
    """First tokens that sliding heads always attend to (attention sinks)."""
    solver: SolverName = SearchSettings.solver
    """Optimiser of sub-problems that are too large for brute force. nomad decodes its points so
    that all are on the budget; nomad_penalty uses the penalty of Eq. 5 instead, as published, and
    needs strict."""
    budget_per_layer: Count = SearchSettings.budget_per_layer
    """Evaluations per layer (kappa)."""
    alpha: Number = Field(SearchSettings.alpha, gt=0)
    """Weight of the budget penalty (Eq. 5), with strict."""
    gamma: Number = Field(SearchSettings.gamma, ge=0)
    """Head room of the upper anchor (Eq. 2), with strict."""
    buckets: Annotated[list[Ratio], AfterValidator(rising)] = Field(
        default=list(SearchSettings.buckets), min_length=2
    )
    """Ratios a layer can get."""
    max_group_variables: Count = SearchSettings.max_group_variables
    """Largest joint sub-problem in Algorithm 3."""
    strict: Flag = SearchSettings.strict
    """Whether bosch and its ablations follow the paper to the letter: ties are broken by index, and
    the last phase's mask is the result. By default log-likelihoods break ties and the best mask on
    budget that was measured is the result."""

    chat: ChatConfig | None = None
    """How calibration prompts are put to the model; default: as the evaluation's."""

    mask: Annotated[PathText | None, Input(_mask_file, _check_mask)] = None
    """File with the head mask for method given (docs/reference/format.md)."""

    head_granularity: Count = SearchSettings.head_granularity
    """The number of full KV heads in each layer is a multiple of this (g): 2 for a hybrid served on
    two tensor-parallel ranks, see docs/guide/serving.md."""

    @classmethod
    def drop_replaced(cls, values: dict[str, Any], overridden: Collection[str]) -> None:
        """A method also replaces what it has no use for: of several windows the widest is left."""
        super().drop_replaced(values, overridden)
        method = METHODS.get(str(values.get("method"))) if "method" in overridden else None
        if method is None:
            return
        used = {
            "points": method.finds_front,
            "budget_per_layer": method.searches,
            "mask": method.kind == "file",
            "windows": method.several_windows,
        }
        for name in [name for name, is_used in used.items() if not is_used]:
            if name not in overridden and (value := values.pop(name, None)) and name == "windows":
                values["window_size"] = value[-1]

    @model_validator(mode="before")
    @classmethod
    def _default_window(cls, values: Any) -> Any:
        """`windows` takes the place of the default `window_size`."""
        if isinstance(values, dict) and values.get("windows") is not None:
            return {"window_size": None, **values}
        if isinstance(values, dict) and values.get("window_size", 0) is None:
            return {name: value for name, value in values.items() if name != "window_size"}
        return values

    @model_validator(mode="after")
    def _check_menu(self) -> Self:
        _ = self.menu  # raises ValueError
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.swa_ratio is None and self.budget is None:
            names = ", ".join(Budget.ALTERNATIVES[0])
            raise ValueError(f"names no budget; set swa_ratio, or one of {names} under budget")
        return self

    def completed(self, recipe: Recipe) -> Self:
        """The section with prompts as the evaluation asks them."""
        if self.chat is not None:
            return self
        evaluate = recipe.get(EvaluateConfig) or ChatConfig()
        fields = {name: getattr(evaluate, name) for name in ChatConfig.model_fields}
        return self.model_copy(update={"chat": ChatConfig(**fields)})

    def settings(self, seed: int, ratio: float | None = None) -> SearchSettings:
        """The library's settings with the recipe's seed; `ratio` replaces the section's."""
        names = {field.name for field in fields(SearchSettings)} - {"seed"}
        values = {name: getattr(self, name) for name in names}
        values["buckets"] = tuple(self.buckets)
        values["swa_ratio"] = self.swa_ratio if ratio is None else ratio
        return SearchSettings(**values, seed=seed)

    @property
    def menu(self) -> tuple[Window, ...]:
        """The windows that sliding heads may have, the widest first; raises ValueError."""
        sizes = [self.window_size] if self.windows is None else self.windows[::-1]
        return tuple(Window(size, self.sinks) for size in sizes if size is not None)

    @property
    def menu_field(self) -> str:
        """The dotted path of the field with the windows."""
        return f"search.{'window_size' if self.windows is None else 'windows'}"

    @property
    def window(self) -> Window:
        """The widest window of sliding heads."""
        return self.menu[0]

    def request_cache(self, kinds: DecoderLayers, dtype: str, length: int) -> RequestCache:
        """The cache at the budget's context, without a budget at `length` tokens."""
        tokens = length if self.budget is None else self.budget.tokens
        return RequestCache(self.budget, kinds, dtype, tokens)

    def slot_range(self, cache: RequestCache) -> tuple[int, int]:
        """KV slots of all heads at the smallest window and of the original, at `cache.tokens`."""
        heads = len(cache.kinds.full) * cache.kinds.heads
        return heads * self.menu[-1].held(cache.tokens), heads * cache.tokens

    def ratio_for(self, kinds: DecoderLayers, dtype: str) -> float:
        """rho: as stated, of the given mask, or from the budget's bytes; raises UserError."""
        if self.swa_ratio is not None:
            return self.swa_ratio
        if self.method == "given":
            return self._given_mask(kinds).swa_ratio
        cache = self.request_cache(kinds, dtype, 1)
        return sliding_ratio(cache, self.menu[-1], self.head_granularity)

    def kv_heads(self, kinds: DecoderLayers, dtype: str) -> Sequence[LayerHeads]:
        """KV heads of each layer by window: of the given mask, else spread evenly.

        With several windows the smallest is used for all. Raises UserError if the mask's file is
        invalid or for another model, or if no mask fits the budget.
        """
        if self.method == "given":
            return self._given_mask(kinds).layers
        layers, heads = len(kinds.full), kinds.heads
        sliding = swa_budget(layers * heads, self.ratio_for(kinds, dtype))
        return HeadMask.evenly(layers, heads, sliding, self.menu[-1]).layers

    def _given_mask(self, kinds: DecoderLayers) -> HeadMask:
        mask, shape = HeadMaskFile.load(str(self.mask)).mask, (len(kinds.full), kinds.heads)
        if mask.shape != shape:
            raise UserError(
                f"{self.mask} is no mask for {shape[0]} layers of {shape[1]} KV heads",
                "search.mask",
            )
        return mask


HEAD_MASK = "head_mask.json"
FRONT, FRONT_PICTURE = "front.json", "front.svg"
EVALUATIONS = "evaluations.jsonl"
EXAMPLES = "calibration.jsonl"
# Plots of a search, by quantity.
TRACES = {"score": "trace_score.svg", "log_likelihood": "trace_log_likelihood.svg"}


class LayerImportance(Record):
    """Results of BOSCH Algorithms 1 and 2 for one layer."""

    layer: int
    best_score: float | None = None
    drop: float | None = None
    weight: float | None = None
    ratio: float | None = None


class SearchSummary(Summary):
    """search/summary.json: scores, path and cost of a search."""

    anchors: Anchors
    best_score: float
    best_log_likelihood: float
    evaluations: int
    model_seconds: float
    solver_seconds: float
    full_forward_equivalents: float
    gradients: int = 0
    layer_importance: list[LayerImportance]
    trace: list[TracePoint]
    notes: list[str]


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    search = loaded.recipe[SearchConfig]
    if (search.method == "given") != (search.mask is not None):
        yield Fault("search.mask", "a head mask is named for method given, and for no other")
    if len(search.menu) > 1 and not METHODS[search.method].several_windows:
        yield Fault(
            "search.windows",
            f"method {search.method} knows one window; name it in search.window_size, or set "
            "search.method: front",
        )
    # Windows must be shorter than the calibration examples.
    length = loaded.recipe[PrepareConfig].calibration.length
    yield from window_faults(search, "prepare.calibration.length", length)
    faults: list[Fault] = []
    with collected(faults, "search"):
        search.settings(loaded.recipe.seed, 0.0)
    with collected(faults, "search.mask"):
        faults += _budget_faults(loaded)
    yield from faults
    yield from _attention_faults(loaded)


def window_faults(search: SearchConfig, path: str, length: int) -> Iterator[Fault]:
    """Windows that hide no tokens in sequences of `length` tokens."""
    for window in search.menu:
        if window.max_keys >= length:
            yield Fault(
                search.menu_field,
                f"{window} is not shorter than {path} = {length:,}; sliding heads would see "
                "everything",
            )


def _budget_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Budgets that no mask of the model fits; raises UserError, too."""
    search = loaded.recipe[SearchConfig]
    if search.swa_ratio is not None:
        yield from _ratio_faults(search, search.swa_ratio)
    if not _is_searchable(loaded.info) or (search.method == "given" and search.mask is None):
        return
    assert loaded.info is not None
    kinds, dtype = loaded.info.kinds, loaded.recipe.model.dtype
    length = loaded.recipe[PrepareConfig].calibration.length
    if METHODS[search.method].finds_front:
        cache = search.request_cache(kinds, dtype, length)
        if search.budget is not None:
            yield from window_faults(search, "search.budget's context", cache.tokens)
        yield from _front_faults(search, cache)
    if search.method == "given" and search.swa_ratio is None:
        return
    ratio = search.ratio_for(kinds, dtype)
    check_granularity(len(kinds.full), kinds.heads, ratio, search.head_granularity)
    if search.swa_ratio is None:
        yield from _ratio_faults(search, ratio)


def _is_searchable(info: ModelInfo | None) -> bool:
    """Whether layers with full attention are known; the model's checks report why not."""
    try:
        return info is not None and bool(info.kinds.full)
    except UserError:
        return False


def _front_faults(search: SearchConfig, cache: RequestCache) -> Iterator[Fault]:
    """Points that a front cannot have."""
    least, most = search.slot_range(cache)
    for share in search.points or ():
        if share < least / most or round(share * most) >= most:
            yield Fault(
                "search.points",
                f"{share:g} of the KV cache at {cache.tokens:,} tokens is no point; choose from "
                f"{named_share(least, most)}, all heads at {search.menu[-1]}, to below 1",
            )


def _ratio_faults(search: SearchConfig, ratio: float) -> Iterator[Fault]:
    if "buckets" not in METHODS[search.method].settings:  # does not use buckets
        return
    low, high = min(search.buckets), max(search.buckets)
    if not low <= ratio <= high:
        yield Fault(
            "search.swa_ratio" if search.budget is None else "search.budget",
            f"{ratio:g} cannot be reached with search.buckets from {low:g} to {high:g}",
        )


def _attention_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    recipe = loaded.recipe
    requests = {}
    if sinks := recipe[SearchConfig].sinks:
        requests["sinks"] = f"search.sinks asks for {sinks}"
        if (evaluate := recipe.get(EvaluateConfig)) is not None and evaluate.engine == "vllm":
            yield Fault("evaluate.engine", "vllm serves no hybrid with search.sinks; set hf")
    if recipe.model.dtype == "float32":
        requests["float32"] = "model.dtype asks for float32"
    if _is_searchable(loaded.info):
        assert loaded.info is not None
        requests |= loaded.info.attention_needs
    yield from backend_faults(loaded, requests)


def backend_faults(loaded: LoadedRecipe, requests: Mapping[str, str]) -> Iterator[Fault]:
    """What the recipe's attention backend lacks of the requests."""
    for message in lacking(loaded.recipe.runtime.attention, requests):
        yield Fault("runtime.attention", message)


STAGE = Stage(
    "search",
    "stages.search.run:run",
    SearchConfig,
    field=Field(description="Which KV heads become sliding."),
    needs=("prepare",),
    model="weights",
    distributed=True,
    processes=model_processes,
    completed=SearchConfig.completed,
    checks=_faults,
    cost="stages.search.cost:cost",
    slow_checks="stages.search.mask_checks:mask_faults",
)
