"""Speed and memory of the original model and its hybrids, side by side (BOSCH C.4)."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bosch.backends import BACKENDS, check_backend, resolve_backend
from bosch.errors import RunError, UserError
from bosch.files import write_json, write_text
from bosch.model.configuration import hybrid_mask, is_hybrid
from bosch.model.families import check_family, decoder_layers, text_config
from bosch.model.loading import load_config
from bosch.model.search_mode import mask_shape
from bosch.progress import progress
from bosch.this_process import killed_by_kernel
from bosch.weight_files import weight_files
from stages.finished import FinishedWork
from stages.measure.measured_model import Variant, planned_variants
from stages.measure.results import (
    add_original_ratios,
    draw_figures,
    figures,
    point_of,
    results_table,
)
from stages.measure.stage import MeasureSettings
from stages.pages.page import render
from stages.versions import installed_versions

logger = logging.getLogger(__name__)

_CHECKOUT = Path(__file__).resolve().parents[2]
# -P keeps the current directory, where a yaml.py may be, out of the path; the checkout is added.
_PROCESS = f"import sys; sys.path.insert(0, {str(_CHECKOUT)!r}); "
_PROCESS += "from stages.measure.process import main; main()"


def measure(
    model: str, original: str | None, settings: MeasureSettings, output: Path
) -> dict[str, Any]:
    """Write efficiency.json and both figures to `output` and print the table; returns the JSON.

    `model` is the directory of an original model or of a hybrid. `original` is the directory of the
    hybrid's original; by default the hybrid's weights with every head full are measured. Models
    take turns at each length, each run in its own process; running out of memory is a result. An
    interrupted measurement resumes, unless the machine, the packages or the models have changed.
    Raises UserError for faulty input, RunError when a run fails otherwise.
    """
    config = _checked_model(model, original, settings)
    variants = planned_variants(config, settings)
    if sinks := max(variant.sinks for variant in variants):
        requests = {"sinks": f"the model has {sinks}"}
        check_backend(resolve_backend(settings.attention), requests, "--attention")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be created ({error.strerror})") from None
    finished, basis = FinishedWork(output / "runs.partial.jsonl"), _basis(model, original)
    if len(finished):
        logger.info("reusing %d runs of an interrupted measurement", len(finished))
    request = {
        "model": model, "original": original, "settings": settings.model_dump(mode="json"),
    }  # fmt: skip
    points, facts = _measure_points(request, variants, settings, finished, basis)
    add_original_ratios(points)
    report = _report(model, original, config, settings, points, facts)
    write_json(output / REPORT, report)
    table, drawn = results_table(points), figures(points)
    table.print()
    draw_figures(drawn, output)
    html = render(
        "stages/pages/results.html",
        title="Throughput and memory",
        subtitle=_title(report),
        text="Medians over runs; a cross marks a length that ran out of memory.",
        command="",
        figures=list(drawn.values()),
        tables=[table],
    )
    write_text(output / PAGE, html)
    finished.forget()
    return report


def _measure_points(
    request: dict[str, Any],
    variants: Sequence[Variant],
    settings: MeasureSettings,
    finished: FinishedWork,
    basis: dict[str, Any],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The points, and the last facts about hardware and model that a run reports.

    A model has no more runs at a length after one that ran out of memory.
    """
    points = []
    facts: dict[str, Any] = {}
    total = len(settings.lengths) * len(variants) * settings.repeats
    with progress(total, "measure", "runs") as bar:
        for length in sorted(set(settings.lengths)):
            runs: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
            for repeat in range(settings.repeats):
                for variant in variants:
                    run_request = request | {
                        "length": length, "repeat": repeat,
                        "variant": variant.model_dump(mode="json"),
                    }  # fmt: skip
                    count = len(finished)
                    name = f"{variant.name} at {length:,}"
                    run = partial(run_in_process, run_request, f"{name} tokens")
                    if not any("out_of_memory" in result for result in runs[variant]):
                        runs[variant].append(finished.once(run_request | basis, run))
                    # `free`: reused, or skipped after a run out of memory.
                    bar.update(1, name, free=len(finished) == count)
            for variant in variants:
                facts = next((run for run in runs[variant] if "hardware" in run), facts)
                points.append(point_of(variant, length, settings.batch_size, runs[variant]))
    return points, facts


def _checked_model(model: str, original: str | None, settings: MeasureSettings) -> Any:
    """The model's configuration; raises UserError for faults that show before any run."""
    _check_attention(settings)
    config = load_config(model)
    if not is_hybrid(config):
        check_family(config)
        return config
    hybrid_mask(config)
    if original is not None:
        original_config = load_config(original)
        if is_hybrid(original_config):
            raise UserError(
                f"--original: {original} is a hybrid model; expected its full-attention base"
            )
        check_family(original_config)
        (layers, heads), (own_layers, own_heads) = mask_shape(original_config), mask_shape(config)
        if (layers, heads) != (own_layers, own_heads):
            raise UserError(
                f"--original: {original} has {layers} layers of {heads} KV heads, {model} has "
                f"{own_layers} of {own_heads}"
            )
    return config


def _check_attention(settings: MeasureSettings) -> None:
    """Raise UserError for a backend that lacks what the settings need, or cannot run here."""
    requests = {"cache": "a model is measured with its KV cache"}
    if settings.device == "cpu":
        requests["cpu"] = "--device is cpu"
    if settings.dtype == "float32":
        requests["float32"] = "--dtype is float32"
    if settings.sinks:
        requests["sinks"] = f"--sinks asks for {settings.sinks}"
    # Limits of the backend itself are reported before those of this machine.
    name = settings.attention
    check_backend(name if name in BACKENDS else resolve_backend(name), requests, "--attention")


def _basis(*models: str | None) -> dict[str, Any]:
    """Machine, versions and files on which the result of a request depends."""
    files = []
    for model in models:
        if model is not None and os.path.isdir(model):
            paths = [Path(model, name) for name in ("config.json", *weight_files(Path(model)))]
            stats = [(path, path.stat()) for path in paths if path.exists()]
            files += [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    versions = installed_versions(_PACKAGES)
    return {"machine": socket.gethostname(), "versions": versions, "files": files}


def _report(
    model: str,
    original: str | None,
    config: Any,
    settings: MeasureSettings,
    points: list[dict[str, Any]],
    facts: dict[str, Any],
) -> dict[str, Any]:
    source, layout = model, "even over the layers, full heads first"
    if is_hybrid(config):
        source, layout = "the hybrid's weights, every head full", "of the hybrid model"
    kinds = decoder_layers(config)
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "path": model,
            "original": original or source,
            "model_type": config.model_type,
            "layers": kinds.count,
            "full_attention_layers": len(kinds.full),
            "attention_heads": text_config(config).num_attention_heads,
            "key_value_heads": kinds.heads,
            "layout": layout,
            **facts.get("model", {}),
        },
        "hardware": facts.get("hardware"),
        "memory_source": facts.get("memory_source"),
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
        "settings": settings.model_dump(mode="json"),
        "points": points,
    }


def _title(report: dict[str, Any]) -> str:
    settings, hardware = report["settings"], report["hardware"] or {}
    where = hardware.get("gpu") or hardware.get("cpu") or "every run was out of memory"
    weights = ", random weights" if settings["random_weights"] else ""
    name = os.path.basename(os.path.realpath(report["model"]["path"]))
    clock = "; processor time" if settings["clock"] == "processor" else ""
    return f"{name}{weights}; {settings['dtype']}, batch {settings['batch_size']}; {where}{clock}"


def run_in_process(request: dict[str, Any], name: str) -> dict[str, Any]:
    """Figures of one run, or {"out_of_memory": reason}; `name` is the run's in messages.

    Raises UserError or RunError with the message that the process wrote, RunError if it wrote none.
    """
    with tempfile.TemporaryDirectory(prefix="bosch-measure-") as folder:
        request_file, result_file, log = (
            Path(folder) / name for name in ("request.json", "result.json", "log")
        )
        request_file.write_text(json.dumps(request))
        command = [sys.executable, "-P", "-c", _PROCESS, str(request_file), str(result_file)]
        killed_before = killed_by_kernel()
        with log.open("wb") as output:
            process = subprocess.run(command, stdout=output, stderr=output)
        output_text = log.read_text(encoding="utf-8", errors="replace").strip()
        if process.returncode == 0:
            return _outcome(json.loads(result_file.read_text()))
        reason = lack_of_memory(process.returncode, output_text, killed_before, killed_by_kernel)
        if reason is not None:
            return {"out_of_memory": reason}
        logger.error("%s", output_text)
        reason = output_text.splitlines()[-1] if output_text else "it printed nothing"
        raise RunError(f"measuring {name} failed with status {process.returncode}: {reason[:300]}")


def _outcome(result: dict[str, Any]) -> dict[str, Any]:
    status, reason = result.pop("status"), result.get("reason")
    if status == "user_error":
        raise UserError(str(reason))
    if status == "run_error":
        raise RunError(str(reason))
    return {"out_of_memory": reason} if status == "out_of_memory" else result


def lack_of_memory(
    status: int, output: str, killed_before: int | None, killed_now: Callable[[], int | None]
) -> str | None:
    """How a process without a result ran out of memory; None when it ended for another reason."""
    if status == -signal.SIGKILL:
        killed = killed_now()
        if killed is None or killed_before is None or killed > killed_before:
            return "killed by the system, which was out of memory"
    if status == -signal.SIGABRT and "std::bad_alloc" in output:
        return "std::bad_alloc"
    return None


FORMAT = 1
REPORT = "efficiency.json"
PAGE = "efficiency.html"
_PACKAGES = ("bosch-pipeline", "torch", "transformers", "numpy")
