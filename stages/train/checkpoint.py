"""Checkpoints of the whole model, written by all processes together.

The weights are gathered one by one, in groups of about a file's size, on the process that writes
the group. So a process holds one file of the checkpoint in memory, not the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from bosch.files import make_folder, remove, replace, sync, write_json
from bosch.model.loading import kept_in_float32
from stages.fields import bytes_of
from stages.materialize.model_card import note_training
from stages.train.parallel import whole_weight
from stages.train.stage import CHECKPOINTS, checkpoint_name
from stages.train.storage import copy_other_files, disk_errors, processes, rank, wait

_LAYER = re.compile(r".*?\.\d+\.")


def save_model(model: Any, folder: Path, max_shard_size: str) -> None:
    """Save the model as `model.save_pretrained` does, with memory for one file at a time.

    `save_pretrained` first splits the experts of all layers, which takes twice the memory.
    """
    model.save_pretrained(folder, state_dict={})
    writer = CheckpointWriter(folder, folder, None, max_shard_size)
    _name_files(folder, writer.write_weights(model, folder))


class CheckpointWriter:
    """Writes `checkpoints/tokens-<n>`: a model directory like the one that training started from.

    Weights are saved in `dtype`; with None each keeps its own.
    """

    def __init__(
        self, work_dir: Path, model_dir: Path, dtype: torch.dtype | None, max_shard_size: str
    ) -> None:
        self._directory = work_dir / CHECKPOINTS
        self._model_dir = model_dir
        self._dtype = dtype
        self._max_shard_size = max_shard_size
        self._in_float32 = set[str]()

    def write(self, tokens: int, model: Any, trained: int | None = None) -> None:
        """Save `model` in the starting model's precision; every process calls it.

        The model card names `trained`, the tokens of whole steps, which may differ from `tokens`.
        """
        writing = self._directory / "writing"
        is_first = rank() == 0
        with disk_errors(f"checkpoint {checkpoint_name(tokens)}", self._directory.parent):
            if is_first:
                remove(writing)
                make_folder(writing)
            wait()
            sizes = self.write_weights(model, writing)
            wait()
            if is_first:
                _name_files(writing, sizes)
                copy_other_files(self._model_dir, writing)
                note_training(writing, trained or tokens)
                replace(writing, self._directory / checkpoint_name(tokens))

    def write_weights(self, model: Any, writing: Path) -> dict[str, int]:
        """Write the weights, each process its groups; returns the totals for the index."""
        not_saved = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
        state = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if name not in not_saved
        }
        self._in_float32 = {*kept_in_float32(model)}
        groups = self._groups(state)
        for number in range(0, len(groups), processes()):
            gathered: dict[str, Tensor] = {}
            for owner, names in enumerate(groups[number : number + processes()]):
                for name in names:
                    with _gathered(state[name]) as whole:
                        if owner == rank():
                            gathered[name] = self._saved(name, whole)
            if gathered:
                self.write_group(model, gathered, writing / f"part-{number + rank():05d}")
        parameters = [value for value in state.values() if isinstance(value, torch.nn.Parameter)]
        return {
            "total_parameters": sum(map(_count, parameters)),
            "total_size": sum(self._bytes(name, value) for name, value in state.items()),
        }

    def _groups(self, state: dict[str, Tensor]) -> list[list[str]]:
        """Names in groups of at most `max_shard_size` that never split a layer.

        transformers combines some weights of a layer when it saves them; weights outside the layers
        stay together, too.
        """
        layers: dict[str, list[str]] = {}
        for name in state:
            match = _LAYER.match(name)
            layers.setdefault(match[0] if match else "", []).append(name)
        limit = bytes_of(self._max_shard_size)  # transformers' own reader takes no 2.5GB
        groups: list[list[str]] = [[]]
        room = limit
        for names in layers.values():
            size = sum(self._bytes(name, state[name]) for name in names)
            if groups[-1] and size > room:
                groups.append([])
                room = limit
            groups[-1] += names
            room -= size
        return groups

    def _saved(self, name: str, value: Tensor) -> Tensor:
        """A copy of a weight on the CPU in the dtype it is saved in."""
        return value.detach().to("cpu", self._saved_dtype(name, value), copy=True)

    def _saved_dtype(self, name: str, value: Tensor) -> torch.dtype:
        if self._dtype is None or not value.is_floating_point() or name in self._in_float32:
            return value.dtype
        return self._dtype

    def _bytes(self, name: str, value: Tensor) -> int:
        return _count(value) * self._saved_dtype(name, value).itemsize

    def write_group(self, model: Any, weights: dict[str, Tensor], stem: Path) -> None:
        """Write `weights` as files whose names begin with `stem`.

        `save_pretrained` would write them on the first process only.
        """
        saved = revert_weight_conversion(model, weights)
        files = split_torch_state_dict_into_shards(
            saved,
            max_shard_size=self._max_shard_size,
            filename_pattern=stem.name + "{suffix}.safetensors",
        ).filename_to_tensors
        for file, names in files.items():
            path = stem.parent / file
            content = {name: saved[name].contiguous() for name in names}
            save_file(content, path, metadata={"format": "pt"})
            sync(path)


def _name_files(writing: Path, sizes: dict[str, int]) -> None:
    """Give the files transformers' names; write an index if there are several."""
    parts = sorted(writing.glob("part-*.safetensors"))
    if len(parts) == 1:
        parts[0].rename(writing / SAFE_WEIGHTS_NAME)
        return
    stem = SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = writing / f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        part.rename(file)
        with safe_open(file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), file.name)
    write_json(writing / SAFE_WEIGHTS_INDEX_NAME, {"metadata": sizes, "weight_map": weight_map})


@contextmanager
def _gathered(value: Any) -> Iterator[Tensor]:
    """The whole of a weight that FSDP or DeepSpeed shards; all processes must call it together."""
    if not hasattr(value, "ds_id"):
        yield whole_weight(value.detach())
        return
    import deepspeed

    if value.requires_grad:  # the float32 weight that is trained, not its copy in bf16
        yield deepspeed.utils.safe_get_full_fp32_param(value)
        return
    with deepspeed.zero.GatheredParameters([value]):
        yield value


def _count(value: Any) -> int:
    """Elements of the whole weight; under DeepSpeed the parameter itself is empty."""
    return int(getattr(value, "ds_numel", value.numel()))
