"""Query and key weights of a hybrid, taken or interpolated from an earlier checkpoint of it.

Fine-tuning on short text changes them and loses recall over long contexts. The earlier weights
restore the recall and keep what was learned (QK-Restore, arXiv 2606.11052).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cosine_similarity

from bosch.errors import DiskFullError, RunError, UserError, is_disk_full
from bosch.files import NOT_REGULAR, irregular_entries, replacing
from bosch.model.families import known_family, text_config
from bosch.model.loading import load_config
from bosch.model.untrusted import check_faults
from bosch.weight_files import WEIGHTS, weight_faults, weight_files

_SUFFIX = ".safetensors"
_LEAST_SIMILARITY = 0.9  # the cosine is near 0 for other heads or another order
_SAME_FIELDS = ("model_type", "hybrid_attention")


def repair(model_dir: Path, source: Path, output: Path, share: float) -> int:
    """Write `model_dir` to the new directory `output`, its query and key weights mixed with those
    of `source`: `share`, in (0, 1], times the older plus 1 - `share` times its own.

    Returns the number of such weights. Raises UserError if a model is not a directory, is damaged,
    or has such a weight quantised; if the two are not hybrids with the same head mask, or one was
    not fine-tuned from the other; if a mixed weight is not finite; and if `output` exists or lies
    in `model_dir`. Raises RunError if it cannot be written.
    """
    if not 0 < share <= 1:
        raise UserError(f"--share = {share:g}: expected more than 0 and at most 1")
    if os.path.lexists(output):
        raise UserError(f"--output: {output} exists; name a new directory")
    if Path(os.path.realpath(model_dir)) in Path(os.path.realpath(output)).parents:
        raise UserError(f"--output: {output} lies in {model_dir}, which is copied; name another")
    for folder in (model_dir, source):
        if not folder.is_dir():  # names on the hub are refused, too
            raise UserError(f"{folder}: no such model directory")
        check_faults(weight_faults(folder))
    for name in irregular_entries(model_dir):
        raise UserError(f"{model_dir / name} {NOT_REGULAR}; remove it")
    config = _common_config(model_dir, source)
    older_files = {name: file for file in _files(source) for name in _names(file)}
    count = 0
    with replacing(output) as writing:
        _copy(model_dir, writing, output)
        for file in _files(writing):
            with safe_open(file, framework="pt") as opened:
                weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                metadata = opened.metadata()
            for name, weight in weights.items():
                rows = _rows(config, name, weight)
                if not rows:
                    continue
                if name not in older_files:
                    raise UserError(f"--from: {source} has no weight {name}, which {model_dir} has")
                with safe_open(older_files[name], framework="pt") as opened:
                    older = opened.get_tensor(name)
                if fault := _fault(name, weight, older, model_dir, source):
                    raise UserError(fault)
                mean = share * older[:rows].float() + (1 - share) * weight[:rows].float()
                weight[:rows] = older[:rows] if share == 1 else mean
                if not weight[:rows].isfinite().all():
                    raise UserError(
                        f"--from: with {name} of {source}, that of {model_dir} would not be finite "
                        f"in {str(weight.dtype).removeprefix('torch.')}; name another checkpoint"
                    )
                count += 1
            try:
                save_file(weights, file, metadata=metadata)
            except SafetensorError as error:
                error_type = DiskFullError if is_disk_full(error) else RunError
                raise error_type(f"{output}: cannot write the model ({error})") from error
        if not count:
            raise UserError(f"{model_dir}: has no query and key weights of their own to restore")
    return count


def _common_config(model_dir: Path, source: Path) -> Any:
    """The configuration of `model_dir`; raises UserError if its family or head mask differs."""
    config, source_config = (load_config(str(folder)) for folder in (model_dir, source))
    for name in _SAME_FIELDS:
        value, source_value = (getattr(c, name, None) for c in (config, source_config))
        if value != source_value or value is None:
            raise UserError(
                f"--from: {source} has {name} = {source_value}, and {model_dir} has {value}; "
                "expected two hybrids of one head mask, such as a checkpoint and what was "
                "fine-tuned from it"
            )
    return config


def _copy(model_dir: Path, writing: Path, output: Path) -> None:
    """Copy the model's files to `writing`, which becomes `output`."""
    try:
        shutil.copytree(model_dir, writing)
    except shutil.Error as error:
        if is_disk_full(error):
            raise DiskFullError(f"{output}: no space is left where it is written") from error
        file, _, reason = error.args[0][0]
        reason = reason.partition(": ")[0]  # without the names of files
        raise UserError(f"{file} cannot be copied to {output} ({reason})") from None


def _fault(name: str, weight: Tensor, older: Tensor, model_dir: Path, source: Path) -> str:
    """Why a weight of `model_dir` cannot be mixed with `source`'s older one; else empty."""
    if _is_quantised(weight):
        return f"{model_dir}: {name} is quantised; repair the model before it is quantised"
    if _is_quantised(older):
        return (
            f"--from: {name} of {source} is quantised; name the checkpoint before it was quantised"
        )
    if older.shape != weight.shape:
        return f"--from: {name} of {source} has another shape"
    # Matrices only: a bias may be zero, or small enough to change direction in training. The cosine
    # may be NaN.
    left, right = (side.float().flatten() for side in (older, weight))
    if weight.ndim > 1 and not cosine_similarity(left, right, dim=0) >= _LEAST_SIMILARITY:
        return (
            f"--from: {name} of {source} is not what {model_dir} was fine-tuned from; name the "
            "checkpoint that was"
        )
    return ""


def _rows(config: Any, name: str, weight: Tensor) -> int:
    """Number of a weight's first rows that compute queries or keys of the text decoder."""
    text, path = text_config(config), name.split(".")
    if text is not config and "language_model" not in path:  # an image encoder also has queries
        return 0
    module = path[-2] if len(path) > 2 else ""
    if module in ("q_proj", "k_proj"):
        return len(weight) if weight.ndim else 1
    family = known_family(config)
    if module and module == family.fused and module not in family.per_head:
        q_per_kv: int = text.num_attention_heads // text.num_key_value_heads
        return len(weight) // (q_per_kv + 2) * (q_per_kv + 1)
    return 0


def _is_quantised(weight: Tensor) -> bool:
    """Whether a weight is quantised, or the scale of a quantised weight."""
    return not weight.ndim or not weight.is_floating_point() or weight.itemsize == 1


def _files(folder: Path) -> list[Path]:
    """The files from which transformers reads a model's weights, each once."""
    # If both exist, transformers reads this file and not the index.
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else weight_files(folder)
    return [folder / name for name in names if name.endswith(_SUFFIX)]


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())
