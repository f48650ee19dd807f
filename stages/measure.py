"""Speed and memory of the original model and its hybrids, side by side (BOSCH C.4)."""

from __future__ import annotations

import json
import logging
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from stages.measuring.kept_runs import KeptRuns
from stages.measuring.processes import run_point
from stages.measuring.settings import MeasureSettings, Variant, planned_variants
from stages.versions import installed_versions

logger = logging.getLogger(__name__)

FORMAT = 1
_PACKAGES = ("bosch-pipeline", "torch", "transformers", "flash-attn", "numpy")


def measure(
    model: str, original: str | None, settings: MeasureSettings, output: Path
) -> dict[str, Any]:
    """Write efficiency.json and both figures below `output`, print the table; returns the JSON.

    `model` is the directory of an original model or of a hybrid; `original` that of a hybrid's
    original, which is otherwise the hybrid's own weights with every head full. Models take turns at
    each length, each run in a process of its own; a length at which one has no memory left is a
    result. An interrupted measurement goes on where it was. Raises UserError for faulty input,
    RunError when a run fails otherwise.
    """
    from bosch.progress import progress
    from stages.measuring.figures import draw_figures
    from stages.measuring.results import point_of, set_against_original
    from stages.measuring.table import print_table

    config = _checked_model(model, original, settings)
    variants = planned_variants(config, settings)
    output = _made(output)
    kept = KeptRuns(output / "runs.partial.jsonl")
    if len(kept):
        logger.info("%d runs are kept from an interrupted measurement", len(kept))
    points, facts = [], {}
    total = len(settings.lengths) * len(variants) * settings.repeats
    with progress(total, "measure", "runs") as bar:
        for length in sorted(set(settings.lengths)):
            runs: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
            for repeat in range(settings.repeats):
                for variant in variants:
                    request = _request(model, original, variant, settings, length, repeat)
                    if not any("out_of_memory" in run for run in runs[variant]):
                        runs[variant].append(kept.run(request, _run))
                    bar.update(1, f"{variant.name} at {length:,}")
            for variant in variants:
                facts = next((run for run in runs[variant] if "hardware" in run), facts)
                points.append(point_of(variant, length, settings.batch_size, runs[variant]))
    set_against_original(points)
    report = _report(model, original, config, settings, points, facts)
    (output / "efficiency.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(points)
    draw_figures(points, output, _title(report))
    kept.forget()
    return report


def _checked_model(model: str, original: str | None, settings: MeasureSettings) -> Any:
    """The model's configuration; raises UserError for what can be known before any run."""
    from bosch.configuration import is_hybrid
    from bosch.families import family_of
    from bosch.hybrid import deploy_layouts
    from bosch.modeling import load_config
    from bosch.search_mode import mask_shape

    _check_attention(settings)
    config = load_config(model)
    if not is_hybrid(config):
        if original is not None:
            raise UserError(f"--original: {model} is no hybrid model, it is the original itself")
        family_of(config)
        return config
    deploy_layouts(config)
    if original is not None:
        found = load_config(original)
        family_of(found)
        if mask_shape(found) != mask_shape(config):
            raise UserError(
                f"--original: {original} has {found.num_hidden_layers} layers of "
                f"{found.num_key_value_heads} KV heads, {model} has {config.num_hidden_layers} of "
                f"{config.num_key_value_heads}"
            )
    return config


def _check_attention(settings: MeasureSettings) -> None:
    """Raise UserError for an attention backend that no run could be shown to have used."""
    from bosch.attention import BACKENDS, resolve_backend

    if settings.attention == "flex":
        raise UserError(
            "--attention flex: a model is measured with its KV cache, and passes with a cache are "
            "the sdpa backend's; choose sdpa"
        )
    name = resolve_backend(settings.attention)
    if BACKENDS[name].needs and settings.device == "cpu":
        raise UserError(f"--attention {name}: it needs {BACKENDS[name].needs}, not --device cpu")
    if name == "flash" and settings.dtype == "float32":
        raise UserError(
            "--attention flash: it computes in float16 and bfloat16, not --dtype float32"
        )
    if name == "flash" and settings.sinks:
        raise UserError(f"--attention flash: it has no sinks, --sinks asks for {settings.sinks}")


def _made(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be made ({error.strerror})") from None
    return output


def _request(
    model: str,
    original: str | None,
    variant: Variant,
    settings: MeasureSettings,
    length: int,
    repeat: int,
) -> dict[str, Any]:
    return {
        "model": model,
        "original": original,
        "variant": variant.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json"),
        "length": length,
        "repeat": repeat,
    }


def _run(request: dict[str, Any]) -> dict[str, Any]:
    variant = Variant(**request["variant"])
    return run_point(request, f"{variant.name} at {request['length']:,} tokens")


def _report(
    model: str,
    original: str | None,
    config: Any,
    settings: MeasureSettings,
    points: list[dict[str, Any]],
    facts: dict[str, Any],
) -> dict[str, Any]:
    hybrid = hasattr(config, "hybrid_attention")
    layout = "of the hybrid model" if hybrid else "even over the layers, full heads first"
    shown = "the hybrid's weights, every head full" if hybrid and original is None else None
    return {
        "format": FORMAT,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "path": model,
            "original": original or shown or model,
            "model_type": config.model_type,
            "layers": config.num_hidden_layers,
            "attention_heads": config.num_attention_heads,
            "key_value_heads": config.num_key_value_heads,
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
    where = hardware.get("gpu") or hardware.get("cpu") or "no run had memory"
    weights = ", random weights" if settings["random_weights"] else ""
    name = Path(report["model"]["path"]).resolve().name
    clock = "; processor time" if settings["clock"] == "processor" else ""
    return f"{name}{weights}; {settings['dtype']}, batch {settings['batch_size']}; {where}{clock}"
