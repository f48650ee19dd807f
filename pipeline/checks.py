"""Checks between the fields of a recipe, the model's shape and the number of processes.

Each check yields sentences that begin with a dotted path. A check that reads a field which is at
fault itself ends there (see `pipeline.partial`) and no other does, so that one run names every
fault there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.inputs import missing_inputs
from pipeline.modelinfo import ModelInfo
from pipeline.partial import unless_invalid
from pipeline.world import World
from stages.configs import (
    EvaluateConfig,
    ModelConfig,
    PrepareConfig,
    Runtime,
    SearchConfig,
    SourceConfig,
    TrainConfig,
)

# Methods that give layers a ratio out of search.buckets; the others meet any ratio by themselves.
_BUCKET_METHODS = ("bosch",)


@dataclass(frozen=True)
class Parts:
    """What the checks look at. Fields at fault are missing from their sections.

    `info` is None where the model is not known, `world` where the number of processes is not.
    """

    model: ModelConfig
    prepare: PrepareConfig
    search: SearchConfig
    train: TrainConfig | None
    evaluate: EvaluateConfig | None
    runtime: Runtime
    info: ModelInfo | None
    world: World | None


def find_faults(parts: Parts, *, input_files: bool = True) -> list[str]:
    """Everything wrong between the fields of a recipe, one sentence each.

    Without `input_files` it does not matter whether the data is there.
    """
    faults = [fault for check in _CHECKS for fault in unless_invalid(check(parts))]
    if input_files:
        faults += missing_inputs(parts.prepare, parts.evaluate)
    return faults


def optimizer_steps(train: TrainConfig) -> int:
    """Optimiser steps of a training: whole batches only (2.5B tokens of 2M make 1,192)."""
    return train.total_tokens // train.batch_tokens


def _ratio(parts: Parts) -> Iterator[str]:
    search = parts.search
    if search.method not in _BUCKET_METHODS:
        return
    low, high = min(search.buckets), max(search.buckets)
    if not low <= search.swa_ratio <= high:
        side = f"at most {high:g}" if search.swa_ratio > high else f"at least {low:g}"
        yield (
            f"search.swa_ratio: {search.swa_ratio:g} cannot be reached: with search.buckets "
            f"{[float(bucket) for bucket in search.buckets]} a layer's ratio is {side}"
        )


def _calibration_window(parts: Parts) -> Iterator[str]:
    yield from _window(parts.search, "prepare.calibration.length", parts.prepare.calibration.length)


def _training_window(parts: Parts) -> Iterator[str]:
    if parts.train is not None:
        yield from _window(parts.search, "prepare.sequence_length", parts.prepare.sequence_length)


def _window(search: SearchConfig, path: str, length: int) -> Iterator[str]:
    words = f"{search.window_size:,}" + (f" with {search.sinks} sinks" if search.sinks else "")
    if search.window_size + search.sinks >= length:
        yield (
            f"search.window_size: {words} is not shorter than {path} = {length:,}; "
            "sliding heads would see everything"
        )


def _batch_length(parts: Parts) -> Iterator[str]:
    if parts.train is not None and parts.train.batch_tokens % parts.prepare.sequence_length:
        yield (
            f"train.batch_tokens: {parts.train.batch_tokens:,} is no multiple of "
            f"prepare.sequence_length = {parts.prepare.sequence_length:,}"
        )


def _one_batch(parts: Parts) -> Iterator[str]:
    train = parts.train
    if train is not None and train.total_tokens < train.batch_tokens:
        yield (
            f"train.total_tokens: {train.total_tokens:,} is less than one batch "
            f"(train.batch_tokens = {train.batch_tokens:,})"
        )


def _enough_tokens(parts: Parts) -> Iterator[str]:
    if parts.train is None:
        return
    used = optimizer_steps(parts.train) * parts.train.batch_tokens
    if parts.prepare.train_tokens < used:
        yield (
            f"prepare.train_tokens: {parts.prepare.train_tokens:,} is less than the {used:,} "
            "tokens that training reads (train.total_tokens in whole batches)"
        )


def _last_checkpoint(parts: Parts) -> Iterator[str]:
    train = parts.train
    if train is not None and max(train.checkpoint_tokens, default=0) > train.total_tokens:
        yield (
            f"train.checkpoint_tokens: ends at {train.checkpoint_tokens[-1]:,}, "
            f"after train.total_tokens = {train.total_tokens:,}"
        )


def _checkpoint_steps(parts: Parts) -> Iterator[str]:
    train = parts.train
    if train is None:
        return
    reached: dict[int, int] = {}
    for tokens in train.checkpoint_tokens:
        step = min(-(-tokens // train.batch_tokens), max(optimizer_steps(train), 1))
        if tokens <= train.total_tokens and step in reached:
            yield (
                f"train.checkpoint_tokens: {reached[step]:,} and {tokens:,} are reached by the "
                f"same step (of {train.batch_tokens:,} tokens)"
            )
        reached[step] = tokens


def _batch_division(parts: Parts) -> Iterator[str]:
    train, world, chosen = parts.train, parts.world, parts.runtime.micro_batch_size
    if train is None or world is None or train.batch_tokens % parts.prepare.sequence_length:
        return
    sequences = train.batch_tokens // parts.prepare.sequence_length
    micro = 1 if chosen == "auto" else chosen
    if sequences % (micro * world.size):
        yield (
            f"train.batch_tokens: a batch of {sequences} sequences cannot be divided into "
            f"micro batches of {micro} (runtime.micro_batch_size) on {world.size} process(es)"
        )


def _suites(parts: Parts) -> Iterator[str]:
    if parts.evaluate is None:
        return
    names = list(type(parts.evaluate).model_fields)
    if all(getattr(parts.evaluate, name) is None for name in names):
        yield f"evaluate: names nothing to evaluate; set one of {', '.join(names)} or leave it out"


def _needle_prompts(parts: Parts) -> Iterator[str]:
    needle = parts.evaluate.needle if parts.evaluate is not None else None
    for length in needle.lengths if needle is not None else ():
        if needle is not None and needle.max_new_tokens >= length:
            yield (
                f"evaluate.needle.max_new_tokens: {needle.max_new_tokens:,} leaves no room "
                f"for a prompt in evaluate.needle.lengths = {length:,}"
            )


def _needle_lengths(parts: Parts) -> Iterator[str]:
    needle = parts.evaluate.needle if parts.evaluate is not None else None
    if needle is not None and len(set(needle.lengths)) < len(needle.lengths):
        yield "evaluate.needle.lengths: names a length twice"


def _calibration_positions(parts: Parts) -> Iterator[str]:
    length = parts.prepare.calibration.length
    yield from _positions(parts, "prepare.calibration.length", length)


def _training_positions(parts: Parts) -> Iterator[str]:
    if parts.train is not None:
        yield from _positions(parts, "prepare.sequence_length", parts.prepare.sequence_length)


def _needle_positions(parts: Parts) -> Iterator[str]:
    needle = parts.evaluate.needle if parts.evaluate is not None else None
    if needle is not None:
        yield from _positions(parts, "evaluate.needle.lengths", max(needle.lengths))


def _positions(parts: Parts, path: str, length: int) -> Iterator[str]:
    limit = parts.info.max_positions if parts.info is not None else None
    if limit is not None and length > limit:
        yield f"{path}: {length:,} is more than the model's {limit:,} positions"


def _source_names(parts: Parts) -> Iterator[str]:
    names = [source.name for source in parts.prepare.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"prepare.sources: the name '{name}' stands twice; statistics need it once"


def _sources(parts: Parts) -> Iterator[str]:
    for index, source in enumerate(parts.prepare.sources):
        for check in (_source_path, _source_tokenizer):
            yield from unless_invalid(check(f"prepare.sources.{index}", source))


def _source_path(where: str, source: SourceConfig) -> Iterator[str]:
    needs_path = source.kind in ("text", "jsonl", "parquet", "mds")
    if needs_path and not source.path:
        yield f"{where}: a source of kind {source.kind} needs a path"
    if not needs_path and source.path:
        yield f"{where}: a source of kind {source.kind} takes no path"


def _source_tokenizer(where: str, source: SourceConfig) -> Iterator[str]:
    if (source.kind == "mds") != (source.tokenizer is not None):
        yield f"{where}: tokenizer is needed by kind mds and by no other kind"


def _shards(parts: Parts) -> Iterator[str]:
    world = parts.world
    if parts.runtime.search_parallel != "tensor" or world is None:
        return
    if world.nodes > 1:
        yield (
            f"runtime.search_parallel: tensor shards the model over the processes of one node, "
            f"NNODES asks for {world.nodes}"
        )
    elif world.size == 1:
        yield (
            "runtime.search_parallel: tensor needs several processes, there is one "
            "(runtime.processes)"
        )


def _attention_sinks(parts: Parts) -> Iterator[str]:
    if parts.runtime.attention == "flash" and parts.search.sinks:
        yield (
            f"runtime.attention: flash has no sinks, search.sinks asks for {parts.search.sinks}; "
            "choose sdpa or flex"
        )


def _attention_precision(parts: Parts) -> Iterator[str]:
    if parts.runtime.attention == "flash" and parts.model.dtype == "float32":
        yield (
            "runtime.attention: flash computes in float16 and bfloat16, model.dtype asks for "
            "float32; choose sdpa or flex"
        )


def _training_precision(parts: Parts) -> Iterator[str]:
    train = parts.train
    if parts.runtime.attention == "flash" and train is not None and train.mixed_precision == "no":
        yield (
            "runtime.attention: flash computes in float16 and bfloat16, train.mixed_precision = no "
            "trains in float32; choose sdpa or flex"
        )


def _attention_dropout(parts: Parts) -> Iterator[str]:
    dropout = parts.info.config.get("attention_dropout") if parts.info is not None else None
    if parts.runtime.attention == "flex" and parts.train is not None and dropout:
        yield (
            f"runtime.attention: flex has no attention dropout, the model's config.json asks for "
            f"{dropout}; choose sdpa or flash"
        )


def _output_root(parts: Parts) -> Iterator[str]:
    root = Path(parts.runtime.output_root)
    if root.exists() and not root.is_dir():
        yield f"runtime.output_root: {root} is a file; expected a folder"


_CHECKS: tuple[Callable[[Parts], Iterator[str]], ...] = (
    _ratio,
    _calibration_window,
    _training_window,
    _source_names,
    _sources,
    _batch_length,
    _one_batch,
    _enough_tokens,
    _last_checkpoint,
    _checkpoint_steps,
    _batch_division,
    _suites,
    _needle_prompts,
    _needle_lengths,
    _calibration_positions,
    _training_positions,
    _needle_positions,
    _shards,
    _attention_sinks,
    _attention_precision,
    _training_precision,
    _attention_dropout,
    _output_root,
)
