"""Checks across the sections of a recipe, the model's shape and the number of processes.

Each check yields sentences that begin with a dotted path; a section that is invalid by itself is
missing here and its checks are left out, so that one run names every fault there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from bosch.errors import UserError
from pipeline.inputs import check_folder, check_source
from pipeline.modelinfo import ModelInfo
from pipeline.world import World
from stages.configs import (
    EvaluateConfig,
    PrepareConfig,
    Runtime,
    SearchConfig,
    Section,
    TrainConfig,
)

# Methods that give layers a ratio out of search.buckets; the others meet any ratio by themselves.
_BUCKET_METHODS = ("bosch",)


def find_faults(
    sections: Mapping[str, Section],
    info: ModelInfo | None,
    world: World,
    *,
    input_files: bool = True,
) -> list[str]:
    """Everything wrong between the sections of a recipe, one sentence each.

    Without `input_files` it does not matter whether the data is there.
    """
    prepare, search = sections.get("prepare"), sections.get("search")
    train, evaluate = sections.get("train"), sections.get("evaluate")
    runtime = sections.get("runtime")
    faults: list[str] = []
    if isinstance(search, SearchConfig):
        faults += _ratio(search)
    if isinstance(prepare, PrepareConfig):
        faults += _names(prepare)
        if isinstance(search, SearchConfig):
            faults += _window(search, prepare, train is not None)
        if isinstance(train, TrainConfig):
            faults += _training(train, prepare)
            if isinstance(runtime, Runtime):
                faults += _batch(train, prepare, runtime, world)
    if isinstance(evaluate, EvaluateConfig):
        faults += _evaluation(evaluate)
    if input_files:
        faults += missing_inputs(prepare, evaluate)
    if info is not None:
        faults += _positions(info, prepare, train, evaluate)
    if isinstance(runtime, Runtime):
        faults += _runtime(runtime)
    return faults


def check_shape(info: ModelInfo) -> None:
    """Raise UserError when config.json lacks the numbers a decoder has, or they do not fit."""
    _ = info.layers, info.hidden_size, info.head_dim
    if info.attention_heads % info.key_value_heads:
        raise UserError(
            f"model.path: config.json has {info.attention_heads} attention heads, "
            f"no multiple of its {info.key_value_heads} KV heads"
        )


def optimizer_steps(train: TrainConfig) -> int:
    """Optimiser steps of a training: whole batches only (2.5B tokens of 2M make 1,192)."""
    return train.total_tokens // train.batch_tokens


def _ratio(search: SearchConfig) -> Iterator[str]:
    if search.method not in _BUCKET_METHODS:
        return
    low, high = min(search.buckets), max(search.buckets)
    if not low <= search.swa_ratio <= high:
        side = f"at most {high:g}" if search.swa_ratio > high else f"at least {low:g}"
        yield (
            f"search.swa_ratio: {search.swa_ratio:g} cannot be reached: with search.buckets "
            f"{[float(bucket) for bucket in search.buckets]} a layer's ratio is {side}"
        )


def _window(search: SearchConfig, prepare: PrepareConfig, trains: bool) -> Iterator[str]:
    seen = search.window_size + search.sinks
    words = f"{search.window_size:,}" + (f" with {search.sinks} sinks" if search.sinks else "")
    if seen >= prepare.calibration.length:
        yield (
            f"search.window_size: {words} is not shorter than prepare.calibration.length = "
            f"{prepare.calibration.length:,}; sliding heads would see everything"
        )
    if trains and seen >= prepare.sequence_length:
        yield (
            f"search.window_size: {words} is not shorter than prepare.sequence_length = "
            f"{prepare.sequence_length:,}; sliding heads would see everything"
        )


def _training(train: TrainConfig, prepare: PrepareConfig) -> Iterator[str]:
    length = prepare.sequence_length
    if train.batch_tokens % length:
        yield (
            f"train.batch_tokens: {train.batch_tokens:,} is no multiple of "
            f"prepare.sequence_length = {length:,}"
        )
    if train.total_tokens < train.batch_tokens:
        yield (
            f"train.total_tokens: {train.total_tokens:,} is less than one batch "
            f"(train.batch_tokens = {train.batch_tokens:,})"
        )
    used = optimizer_steps(train) * train.batch_tokens
    if prepare.train_tokens < used:
        yield (
            f"prepare.train_tokens: {prepare.train_tokens:,} is less than the {used:,} tokens "
            "that training reads (train.total_tokens in whole batches)"
        )
    reached: dict[int, int] = {}
    for tokens in train.checkpoint_tokens:
        step = min(-(-tokens // train.batch_tokens), max(optimizer_steps(train), 1))
        if step in reached:
            yield (
                f"train.checkpoint_tokens: {reached[step]:,} and {tokens:,} are reached by the "
                f"same step (of {train.batch_tokens:,} tokens)"
            )
        reached[step] = tokens


def _batch(
    train: TrainConfig, prepare: PrepareConfig, runtime: Runtime, world: World
) -> Iterator[str]:
    if train.batch_tokens % prepare.sequence_length:
        return
    sequences = train.batch_tokens // prepare.sequence_length
    micro = 1 if runtime.micro_batch_size == "auto" else max(runtime.micro_batch_size, 1)
    if sequences % (micro * world.size):
        yield (
            f"train.batch_tokens: a batch of {sequences} sequences cannot be divided into "
            f"micro batches of {micro} (runtime.micro_batch_size) on {world.size} process(es)"
        )


def _evaluation(evaluate: EvaluateConfig) -> Iterator[str]:
    suites = {name: getattr(evaluate, name) for name in type(evaluate).model_fields}
    if all(suite is None for suite in suites.values()):
        yield f"evaluate: names nothing to evaluate; set one of {', '.join(suites)} or leave it out"
    needle = evaluate.needle
    if needle is None:
        return
    for length in needle.lengths:
        if needle.max_new_tokens >= length:
            yield (
                f"evaluate.needle.max_new_tokens: {needle.max_new_tokens:,} leaves no room "
                f"for a prompt in evaluate.needle.lengths = {length:,}"
            )
    if len(set(needle.lengths)) < len(needle.lengths):
        yield "evaluate.needle.lengths: names a length twice"


def _positions(
    info: ModelInfo, prepare: Section | None, train: Section | None, evaluate: Section | None
) -> Iterator[str]:
    limit = info.max_positions
    if limit is None:
        return
    lengths: dict[str, int] = {}
    if isinstance(prepare, PrepareConfig):
        lengths["prepare.calibration.length"] = prepare.calibration.length
        if train is not None:
            lengths["prepare.sequence_length"] = prepare.sequence_length
    if isinstance(evaluate, EvaluateConfig) and evaluate.needle is not None:
        lengths["evaluate.needle.lengths"] = max(evaluate.needle.lengths)
    for path, length in lengths.items():
        if length > limit:
            yield f"{path}: {length:,} is more than the model's {limit:,} positions"


def missing_inputs(prepare: Section | None, evaluate: Section | None) -> Iterator[str]:
    """Sources and folders of prose that are not there, or not what they should be."""
    folders: dict[str, str | None] = {}
    if isinstance(prepare, PrepareConfig):
        for index, source in enumerate(prepare.sources):
            if source.path is not None:
                where = f"prepare.sources.{index}.path"
                yield from _caught(partial(check_source, where, source.kind, source.path))
        folders["prepare.calibration.essay_dir"] = prepare.calibration.essay_dir
    if isinstance(evaluate, EvaluateConfig) and evaluate.needle is not None:
        folders["evaluate.needle.essay_dir"] = evaluate.needle.essay_dir
    for where, folder in folders.items():
        if folder is not None:
            yield from _caught(partial(check_folder, where, folder))


def _names(prepare: PrepareConfig) -> Iterator[str]:
    names = [source.name for source in prepare.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"prepare.sources: the name '{name}' stands twice; statistics need it once"
    for index, source in enumerate(prepare.sources):
        if not math.isfinite(source.weight):
            yield f"prepare.sources.{index}.weight: expected a finite number"


def _runtime(runtime: Runtime) -> Iterator[str]:
    for field in ("processes", "data_workers", "micro_batch_size"):
        value = getattr(runtime, field)
        if value != "auto" and value < 1:
            yield f"runtime.{field}: expected auto or a value of at least 1, found {value}"
    root = Path(runtime.output_root)
    if root.exists() and not root.is_dir():
        yield f"runtime.output_root: {root} is a file; expected a folder"


def _caught(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except UserError as fault:
        yield str(fault)
    except OSError as error:
        yield f"{error.filename}: cannot be read: {error.strerror}"
