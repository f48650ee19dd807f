"""Names of tasks, checked without lm-eval's import, which takes seconds."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stages.evaluate.chat import vocabulary_fault
from stages.evaluate.stage import EvaluateConfig
from stages.faults import Fault
from stages.stage import LoadedRecipe

ALL_TASKS = "`lm-eval ls tasks` lists all"


def slow_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Tasks that no folder has, and a chat template with a token without an embedding."""
    evaluate, info = loaded.recipe[EvaluateConfig], loaded.info
    for name, similar in unknown(evaluate.lm_eval_tasks, evaluate.include_path).items():
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        text = f"there is no task {name}; {hint}{ALL_TASKS} of lm-eval"
        yield Fault("evaluate.tasks", text)
    if evaluate.apply_chat_template and info is not None and info.directory is not None:
        text_config = info.config.get("text_config", info.config)
        fault = vocabulary_fault(info.directory, text_config.get("vocab_size", 10**9))
        if fault is not None:
            yield Fault("evaluate.apply_chat_template", fault)


def default_folder() -> Path | None:
    """lm-eval's folder of tasks; None if it is not installed."""
    spec = importlib.util.find_spec("lm_eval")
    return Path(spec.origin).parent / "tasks" if spec is not None and spec.origin else None


def unknown(names: Sequence[str], include_path: Sequence[str]) -> dict[str, list[str]]:
    """Names that occur in no file of a task, each with the most similar names of files.

    The folder named like a task is searched first. A name that occurs as something other than a
    task passes here; the stage `original` refuses it, before training.
    """
    below = default_folder()
    if below is None:
        return {}
    left = set(names)
    folders = [*map(Path, include_path), *sorted({below / name.split("_")[0] for name in names})]
    for folder in (*folders, below):
        for place, _, files in os.walk(folder) if left else ():
            # Files that others include, with their tags, have no suffix.
            for file in (file for file in files if os.path.splitext(file)[1] in ("", ".yaml")):
                text = Path(place, file).read_text(encoding="utf-8", errors="replace")
                left -= {
                    name
                    for name in left
                    if name in text
                    and re.search(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", text)
                }
    stems = sorted({path.stem for folder in folders for path in folder.rglob("*")}) if left else []
    stems += sorted({path.stem for path in below.rglob("*.yaml")}) if left else []
    return {name: difflib.get_close_matches(name, stems, n=2) for name in names if name in left}
