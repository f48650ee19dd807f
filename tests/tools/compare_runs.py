"""Compare the results of two runs of one recipe, bit for bit.

    python -m tests.tools.compare_runs runs/before/quickstart runs/after/quickstart

Compares the training data, the calibration set, every evaluated mask with its score and
log-likelihood and every gradient in order, the head masks, losses and all weights, those of the
rival's hybrid too, the evaluation's scores and answers. Prints what differs and exits 1 if anything
does. Timings, manifests, checksums and the form of the files are not compared; scores may lie in
one stage's folder or in several.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_EVALUATION = ("mask", "score", "log_likelihood", "is_bound")
_GRADIENT = ("mask", "share")
_CALIBRATION = ("task", "index", "input_ids", "answer_length")
_METRICS = ("step", "tokens", "loss", "learning_rate", "grad_norm")
_SAMPLE = ("checkpoint", "suite", "task", "length", "index")
_RESULT = ("score", "output", "loss")  # of a sample; a suite has some of them
_SHOWN = 5
_MASKS = (
    "search/head_mask.json", "search/front.json", "materialize/model/head_mask.json",
    "rival/mask/head_mask.json",
)  # fmt: skip


def run_results(run: Path) -> dict[str, dict[str, Any]]:
    """All results of a run folder: section → name → value; two equal runs give equal values.

    A section whose files are missing is empty.
    """
    models = sorted([*run.glob("*/model"), *run.glob("*/checkpoints/*")])
    examples = _records(run / "prepare/calibration/calibration.jsonl")
    searched = _records(run / "search/evaluations.jsonl")
    samples = [r for file in run.glob("*/samples.jsonl") for r in _records(file)]
    return {
        "training data": {f.name: _digest(f.read_bytes()) for f in run.glob("prepare/train/*")},
        "calibration set": _numbered(examples, _CALIBRATION),
        "head mask": {
            f"{file.relative_to(run)} {name}": value
            for pattern in _MASKS
            for file in run.glob(pattern)
            for name, value in _leaves(_masks(json.loads(file.read_text())), ())
        },
        "evaluations": {f"line {n}": _searched(r) for n, r in enumerate(searched, start=1)},
        "metrics": {
            f"{file.parent.name} {line}": values
            for file in run.glob("*/metrics.jsonl")
            for line, values in _numbered(_records(file), _METRICS).items()
        },
        "weights": {
            f"{folder.relative_to(run)} {tensor}": digest
            for folder in models
            for tensor, digest in _tensors(folder)
        },
        "scores": {
            name: value
            for file in run.glob("*/scores.json")
            for name, value in _leaves(json.loads(file.read_text())["checkpoints"], ())
        },
        "answers": {
            " ".join(map(str, _values(record, _SAMPLE))): {
                field: record[field] for field in _RESULT if field in record
            }
            for record in samples
        },
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each result of a section that differs or that one of the runs lacks.

    A section that is empty in both runs counts as a difference: it proves nothing.
    """
    lines = [] if before or after else ["neither run has any"]
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            lines.append(f"{name}: only in the first run")
        elif name not in before:
            lines.append(f"{name}: only in the second run")
        elif before[name] != after[name]:
            lines.append(f"{name}: {_short(before[name])} → {_short(after[name])}")
    return lines


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a JSONL file, whose lines may begin with a checksum."""
    if file.exists():
        for line in file.read_text().splitlines():
            yield json.loads(line[line.index("{") :])


def _values(record: Mapping[str, Any], fields: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(record[field] for field in fields)


def _searched(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """A line of a search's journal: an evaluation, a gradient at a mask, or its held-out score."""
    if "gradient" in record:
        return (*_values(record, _GRADIENT), record["gradient"]["values"])
    if "held_out" in record:
        return (record["mask"], *_values(record["held_out"], ("score", "log_likelihood")))
    return _values(record, _EVALUATION)


def _masks(content: Mapping[str, Any]) -> dict[str, Any]:
    """The heads of a mask file, or of each point of a front by its KV slots."""
    if "points" in content:
        return {f"{point['kv_slots']} slots": point["layout"] for point in content["points"]}
    return {"heads": content["swa_kv_heads"]}


def _numbered(records: Iterable[Mapping[str, Any]], fields: tuple[str, ...]) -> dict[str, Any]:
    return {f"line {n}": _values(record, fields) for n, record in enumerate(records, start=1)}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything inside nested objects; null is the same as absent."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    elif value is not None:
        yield ".".join(path), value


def _tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and digest (of type, shape and bytes) of each tensor of a model directory."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not iterable itself)
                tensor = tensors.get_tensor(name)
                head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                yield name, _digest(head + tensor.flatten().view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="a run's folder, runs/NAME")
    parser.add_argument("after", type=Path, help="the folder of another run of the same recipe")
    arguments = parser.parse_args()
    before, after = run_results(arguments.before), run_results(arguments.after)
    equal = True
    for section, values in before.items():
        lines = differences(values, after[section])
        equal = equal and not lines
        print(f"{section}: {len(values)} results, {len(lines) or 'no'} differences")
        for line in lines[:_SHOWN]:
            print(f"  {line}")
        if len(lines) > _SHOWN:
            print(f"  and {len(lines) - _SHOWN} more")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
