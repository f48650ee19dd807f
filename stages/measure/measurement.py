"""Speed and memory of the original model and its hybrids, side by side (BOSCH C.4)."""

from __future__ import annotations

import json
import logging
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bosch.backends import BACKENDS, check_backend, resolve_backend
from bosch.errors import RunError, UserError
from bosch.files import write_json
from bosch.masks import HeadMask
from bosch.model.configuration import is_hybrid
from bosch.model.families import check_family
from bosch.model.loading import load_config
from bosch.progress import progress
from bosch.this_process import killed_by_kernel
from bosch.weight_files import weight_files
from stages.context import StageConfig
from stages.finished import FinishedWork
from stages.materialize.stage import MODEL
from stages.measure.measured_model import label, planned_masks
from stages.measure.results import add_original_ratios, draw_figure, point_of, results_table
from stages.measure.stage import Efficiency, MeasureConfig, MeasureSettings
from stages.versions import installed_versions

logger = logging.getLogger(__name__)

_CHECKOUT = Path(__file__).resolve().parents[2]
# -P keeps the current directory, where a yaml.py may be, out of the path; the checkout is added.
_PROCESS = f"import sys; sys.path.insert(0, {str(_CHECKOUT)!r}); "
_PROCESS += "from stages.measure.process import main; main()"
_PACKAGES = ("bosch-pipeline", "torch", "transformers", "numpy")


def run(
    config: StageConfig[MeasureConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Measure the materialised hybrid; returns its ratios to the original's figures by length."""
    common = {"dtype": config.model.dtype, "attention": config.runtime.attention}
    settings = MeasureSettings.model_validate(config.section.model_dump() | common)
    report = measure(str(inputs["materialize"] / MODEL), settings, work_dir)
    return {
        str(point.length): point.model_dump(mode="json")["over_original"]
        for point in Efficiency.check(report, str(work_dir)).hybrids
    }


def measure(model: str, settings: MeasureSettings, output: Path) -> dict[str, Any]:
    """Write efficiency.json and its figure to `output` and print the table; returns the JSON.

    `model` is the directory of an original model or of a hybrid, whose weights with every head full
    stand for its original: they do the same computation. Models take turns at each length, each run
    in its own process; running out of memory is a result. An interrupted measurement resumes,
    unless the machine, the packages or the model have changed. Raises UserError for faulty input,
    RunError when a run fails otherwise.
    """
    config = load_config(model)
    if not is_hybrid(config):
        check_family(config)
    masks = planned_masks(config, settings)
    _check_attention(settings, max(mask.sinks for mask in masks))
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be created ({error.strerror})") from None
    points, facts = _measure_points(model, masks, settings, output)
    add_original_ratios(points)
    report = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"path": model, "model_type": config.model_type, **facts.get("model", {})},
        "hardware": facts.get("hardware"),
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
        "settings": settings.model_dump(mode="json"),
        "points": points,
    }
    write_json(output / Efficiency.FILE, report)
    results_table(points).print()
    draw_figure(points, output)
    return report


def _measure_points(
    model: str, masks: Sequence[HeadMask], settings: MeasureSettings, output: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The points, and the last run that was not out of memory, which names the hardware.

    A model has no more runs at a length after one that ran out of memory.
    """
    points, facts, basis = [], dict[str, Any](), _basis(model)
    finished = FinishedWork(output / "runs.partial.jsonl")
    total = len(settings.lengths) * len(masks) * settings.repeats
    with progress(total, "measure", "runs") as bar:
        for length in settings.lengths:
            runs: dict[HeadMask, list[dict[str, Any]]] = {mask: [] for mask in masks}
            for repeat in range(settings.repeats):
                for mask in masks:
                    request = {"model": model, "mask": mask.content, "length": length}
                    request["settings"] = settings.model_dump(mode="json")
                    name, count = f"{label(mask)} at {length:,} tokens", len(finished)
                    make = partial(run_in_process, request, name)
                    if not any("out_of_memory" in result for result in runs[mask]):
                        key = {**request, **basis, "repeat": repeat}
                        runs[mask].append(finished.once(key, make))
                    # `free`: reused, or skipped after a run out of memory.
                    bar.update(1, name, free=len(finished) == count)
            for mask in masks:
                facts = next((run for run in runs[mask] if "hardware" in run), facts)
                points.append(point_of(mask, length, settings.batch_size, runs[mask]))
    finished.forget()
    return points, facts


def _check_attention(settings: MeasureSettings, sinks: int) -> None:
    """Raise UserError for a backend that lacks what the settings need, or cannot run here."""
    requests = {"cache": "a model is measured with its KV cache"}
    if settings.dtype == "float32":
        requests["float32"] = "--dtype is float32"
    if sinks:
        requests["sinks"] = f"the heads have {sinks}"
    # Limits of the backend itself are reported before those of this machine.
    name = settings.attention
    check_backend(name if name in BACKENDS else resolve_backend(name), requests, "--attention")


def _basis(model: str) -> dict[str, Any]:
    """Machine, versions and files on which the result of a request depends."""
    folder = Path(model)
    paths = [folder / name for name in ("config.json", *weight_files(folder))]
    stats = [(path, path.stat()) for path in paths if path.exists()]
    files = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    versions = installed_versions(_PACKAGES)
    return {"machine": socket.gethostname(), "versions": versions, "files": files}


def run_in_process(request: dict[str, Any], name: str) -> dict[str, Any]:
    """Figures of one run, or {"out_of_memory": reason}; `name` is the run's in messages.

    Raises UserError or RunError with the message that the process wrote, RunError if it wrote none.
    """
    with tempfile.TemporaryDirectory(prefix="bosch-measure-") as folder:
        files = [Path(folder) / name for name in ("request.json", "result.json", "log")]
        request_file, result_file, log = files
        request_file.write_text(json.dumps(request))
        command = [sys.executable, "-P", "-c", _PROCESS, str(request_file), str(result_file)]
        killed_before = killed_by_kernel()
        with log.open("wb") as output:
            process = subprocess.run(command, stdout=output, stderr=output)
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        if process.returncode == 0:
            result: dict[str, Any] = json.loads(result_file.read_text())
            for kind, error in (("user_error", UserError), ("run_error", RunError)):
                if kind in result:
                    raise error(result[kind])
            return result
    reason = lack_of_memory(process.returncode, text, killed_before, killed_by_kernel)
    if reason is not None:
        return {"out_of_memory": reason}
    logger.error("%s", text)
    reason = text.splitlines()[-1] if text else "it printed nothing"
    raise RunError(f"measuring {name} failed with status {process.returncode}: {reason[:300]}")


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
