"""Checks between the fields of a recipe, the model's shape and the number of processes.

They run when each field by itself is valid. Each yields sentences that begin with a dotted path.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from bosch.budget import check_granularity
from bosch.errors import UserError
from bosch.model.yarn import yarn_fault
from bosch.search.methods import METHODS
from data_prep.source_files import is_local
from pipeline.recipe.inputs import missing_inputs
from pipeline.recipe.recipe import LoadedRecipe
from stages.evaluate.stage import NeedleEvaluation
from stages.prepare.stage import FilterConfig, SourceConfig
from stages.train.schedule import batch_faults, checkpoint_steps, optimizer_steps

_PATH_KINDS = ("text", "jsonl", "parquet", "mds", "huggingface")
# Kinds whose documents are records with further fields.
_RECORD_KINDS = ("jsonl", "parquet", "huggingface")
_NO_FILES = ("/proc", "/sys")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def find_faults(loaded: LoadedRecipe, *, input_files: bool = True) -> list[str]:
    """Everything wrong between the fields of a recipe, one sentence each.

    Without `input_files` it does not matter whether the data is there.
    """
    faults = [fault for check in _CHECKS for fault in check(loaded)]
    if input_files:
        faults += missing_inputs(loaded.recipe.prepare, loaded.recipe.evaluate)
    return faults


def _ratio(loaded: LoadedRecipe) -> Iterator[str]:
    search = loaded.recipe.search
    if "buckets" not in METHODS[search.method].settings:  # meets any ratio by itself
        return
    low, high = min(search.buckets), max(search.buckets)
    if not low <= search.swa_ratio <= high:
        side = f"at most {high:g}" if search.swa_ratio > high else f"at least {low:g}"
        yield (
            f"search.swa_ratio: {search.swa_ratio:g} cannot be reached: with search.buckets "
            f"{[float(bucket) for bucket in search.buckets]} a layer's ratio is {side}"
        )


def _mask(loaded: LoadedRecipe) -> Iterator[str]:
    search = loaded.recipe.search
    if search.method == "given" and search.mask is None:
        yield "search.mask: method given takes the head mask from a file; name one"
    elif search.method == "given" and not Path(str(search.mask)).is_file():
        yield f"search.mask: there is no file {search.mask}"


def _granularity(loaded: LoadedRecipe) -> Iterator[str]:
    search, info = loaded.recipe.search, loaded.info
    if info is None:
        return
    try:
        check_granularity(
            len(info.kinds.full), info.key_value_heads, search.swa_ratio, search.head_granularity
        )
    except UserError as error:
        yield str(error)


def _lengths(loaded: LoadedRecipe) -> Iterator[str]:
    """Sequences are longer than the window, and not longer than the model's positions."""
    recipe = loaded.recipe
    search, needle = recipe.search, recipe.evaluate.needle if recipe.evaluate else None
    lengths = {"prepare.calibration.length": recipe.prepare.calibration.length}
    if recipe.train is not None:
        lengths["prepare.sequence_length"] = recipe.prepare.sequence_length
    for path, length in lengths.items():
        if search.window.most_keys >= length:
            yield (
                f"search.window_size: {search.window} is not shorter than {path} = {length:,}; "
                "sliding heads would see everything"
            )
    if recipe.evaluate is not None and recipe.evaluate.positions is not None:
        lengths["evaluate.positions.length"] = recipe.evaluate.positions.length
    harness = recipe.evaluate.harness if recipe.evaluate is not None else None
    if harness is not None and any(name.startswith("longbench") for name in harness.tasks):
        lengths["evaluate.harness.max_length"] = harness.max_length
    limit = loaded.info.max_positions if loaded.info is not None else None
    for path, length in lengths.items():
        if limit is not None and length > limit:
            yield f"{path}: {length:,} is more than the model's {limit:,} positions"
    if needle is not None:
        yield from _stretched(loaded, needle, limit)


def _stretched(loaded: LoadedRecipe, needle: NeedleEvaluation, limit: int | None) -> Iterator[str]:
    """Lengths beyond the model's positions without a factor for YaRN that reaches so far."""
    for length in set(needle.yarn) - set(needle.lengths):
        yield f"evaluate.needle.yarn: {length:,} is not among evaluate.needle.lengths"
    fault = yarn_fault(loaded.info.config) if loaded.info is not None and needle.yarn else None
    if fault is not None:
        yield f"evaluate.needle.yarn: RoPE cannot be stretched: {fault}"
    for length in needle.lengths:
        factor = needle.yarn_factor(length) or 1.0
        if limit is not None and length > limit * factor:
            name = "yarn" if length in needle.yarn else "lengths"
            yield (
                f"evaluate.needle.{name}: {length:,} is more than the model's {limit:,} positions"
                f"; set evaluate.needle.yarn, like {{{length}: {math.ceil(length / limit)}}}"
            )


def _sources(loaded: LoadedRecipe) -> Iterator[str]:
    sources = loaded.recipe.prepare.sources
    names = [source.name for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"prepare.sources: the name '{name}' stands twice; statistics need it once"
    for index, source in enumerate(sources):
        where = f"prepare.sources.{index}"
        if source.kind in _PATH_KINDS and not source.path:
            yield f"{where}: a source of kind {source.kind} needs a path"
        if source.kind not in _PATH_KINDS and source.path:
            yield f"{where}: a source of kind {source.kind} takes no path"
        if (source.kind == "mds") != (source.tokenizer is not None):
            yield f"{where}: tokenizer is needed by kind mds and by no other kind"
        yield from _dataset(where, source)
        yield from _filters(where, source)


def _dataset(where: str, source: SourceConfig) -> Iterator[str]:
    if source.kind != "huggingface":
        if source.subset or source.revision or source.split != "train":
            yield f"{where}: subset, split and revision are for kind huggingface alone"
    elif source.path and not is_local(source.path):
        if Path(source.path).is_absolute():  # the loader leaves names on the hub as they are
            yield f"{where}.path: {source.path} is neither a directory nor a name like org/dataset"
        elif not _COMMIT.fullmatch(source.revision or ""):
            yield (
                f"{where}.revision: expected the dataset's commit, 40 digits (on the hub under "
                f"Files and versions, History), since a branch may change; there is "
                f"{source.revision or 'none'}"
            )


def _filters(where: str, source: SourceConfig) -> Iterator[str]:
    filters = source.filters
    if source.kind == "retrieval" and filters != FilterConfig():
        yield f"{where}.filters: retrieval writes documents without end and takes no filters"
    if filters.matches and source.kind not in _RECORD_KINDS:
        yield f"{where}.filters.matches: a source of kind {source.kind} has no fields"
    for unit in ("characters", "tokens"):
        low, high = getattr(filters, f"min_{unit}"), getattr(filters, f"max_{unit}")
        if low is not None and high is not None and low > high:
            yield f"{where}.filters: min_{unit} {low:,} is more than max_{unit} {high:,}"


def _batches(loaded: LoadedRecipe) -> Iterator[str]:
    train, prepare, runtime = loaded.recipe.train, loaded.recipe.prepare, loaded.recipe.runtime
    if train is None:
        return
    yield from batch_faults(train, runtime, prepare.sequence_length, loaded.world.size)
    tokens = optimizer_steps(train) * train.batch_tokens
    if prepare.train_tokens < tokens:
        yield (
            f"prepare.train_tokens: {prepare.train_tokens:,} is less than the {tokens:,} "
            "tokens that training reads (train.total_tokens in whole batches)"
        )


def _checkpoints(loaded: LoadedRecipe) -> Iterator[str]:
    train = loaded.recipe.train
    if train is None:
        return
    if max(train.checkpoint_tokens, default=0) > train.total_tokens:
        yield (
            f"train.checkpoint_tokens: ends at {train.checkpoint_tokens[-1]:,}, "
            f"after train.total_tokens = {train.total_tokens:,}"
        )
    counts = [tokens for tokens in train.checkpoint_tokens if tokens <= train.total_tokens]
    steps = checkpoint_steps(train)
    for before, tokens in itertools.pairwise(counts):
        if steps[before] == steps[tokens]:
            yield (
                f"train.checkpoint_tokens: {before:,} and {tokens:,} are reached by the "
                f"same step (of {train.batch_tokens:,} tokens)"
            )


def _bad_steps(loaded: LoadedRecipe) -> Iterator[str]:
    train, runtime = loaded.recipe.train, loaded.recipe.runtime
    if train is None:
        return
    if train.bad_steps == "skip" and runtime.sharding == "deepspeed":
        yield (
            "train.bad_steps: skip cannot leave a step out under runtime.sharding = deepspeed, "
            "which clips and steps at once; set stop, or runtime.sharding = fsdp"
        )
    count = len(checkpoint_steps(train))
    if train.averaged_checkpoints is not None and train.averaged_checkpoints > count:
        yield (
            f"train.averaged_checkpoints: {train.averaged_checkpoints} are to be averaged, and "
            f"train.checkpoint_tokens makes {count}"
        )


def _teacher(loaded: LoadedRecipe) -> Iterator[str]:
    train, runtime = loaded.recipe.train, loaded.recipe.runtime
    if train is None:
        return
    if train.teacher == "none" and (train.teacher_weight, train.teacher_tokens) != (1.0, 1.0):
        yield "train.teacher: teacher_weight and teacher_tokens need a teacher; set original"
    for setting, on in (("teacher = original", train.teacher != "none"), ("lora", train.lora)):
        if on and runtime.sharding == "deepspeed":
            yield (
                f"train.{setting.partition(' ')[0]}: train.{setting} does not run under "
                "runtime.sharding = deepspeed; set fsdp or none"
            )


def _evaluation(loaded: LoadedRecipe) -> Iterator[str]:
    evaluate = loaded.recipe.evaluate
    if evaluate is None:
        return
    if not any(evaluate.suites.values()):
        names = ", ".join(evaluate.suites)
        yield f"evaluate: names nothing to evaluate; set one of {names} or leave it out"
    needle = evaluate.needle
    if needle is None:
        return
    for length in needle.lengths:
        new_tokens = max(needle.new_tokens(task) for task in needle.tasks)
        if new_tokens >= length:
            yield (
                f"evaluate.needle.max_new_tokens: {new_tokens:,} leaves no room "
                f"for a prompt in evaluate.needle.lengths = {length:,}"
            )


def _shards(loaded: LoadedRecipe) -> Iterator[str]:
    world = loaded.world
    if loaded.recipe.runtime.search_parallel != "tensor":
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


def _attention(loaded: LoadedRecipe) -> Iterator[str]:
    recipe = loaded.recipe
    backend, train = recipe.runtime.attention, recipe.train
    if backend in ("flash", "varlen"):
        half = f"runtime.attention: {backend} computes in float16 and bfloat16,"
        if recipe.search.sinks:
            yield (
                f"runtime.attention: {backend} has no sinks, search.sinks asks for "
                f"{recipe.search.sinks}; choose sdpa or flex"
            )
        if recipe.model.dtype == "float32":
            yield f"{half} model.dtype asks for float32; choose sdpa or flex"
        if train is not None and train.mixed_precision == "no":
            yield f"{half} train.mixed_precision = no trains in float32; choose sdpa or flex"
    if backend in ("flex", "flash", "varlen") and _has_other_logits(loaded):
        yield (
            f"runtime.attention: {backend} has neither capped attention scores nor an extra logit "
            "per head, the model has; choose sdpa"
        )
    dropout = loaded.info.config.get("attention_dropout") if loaded.info is not None else None
    if backend == "flex" and train is not None and dropout:
        yield (
            "runtime.attention: flex has no attention dropout, the model's config.json asks for "
            f"{dropout}; choose sdpa or flash"
        )


def _has_other_logits(loaded: LoadedRecipe) -> bool:
    try:
        return loaded.info is not None and not loaded.info.plain_logits
    except UserError:  # said of the model already
        return False


def _output_root(loaded: LoadedRecipe) -> Iterator[str]:
    root = loaded.output_root
    if str(root.resolve()).startswith(_NO_FILES):
        yield f"runtime.output_root: {root} is the system's own and holds no files; choose another"
        return
    for path in (root / loaded.recipe.name, root, *root.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                what = "a link that leads nowhere" if not path.exists() else "a file"
                yield f"runtime.output_root: {path} is {what}; expected a folder"
            return


_CHECKS: tuple[Callable[[LoadedRecipe], Iterator[str]], ...] = (
    _ratio,
    _mask,
    _granularity,
    _lengths,
    _sources,
    _batches,
    _checkpoints,
    _bad_steps,
    _teacher,
    _evaluation,
    _shards,
    _attention,
    _output_root,
)
