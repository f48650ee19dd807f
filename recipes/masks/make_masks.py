"""Search head masks and store them with their provenance: recipes/masks/MODEL/METHOD-RATIO.json.

    python -m recipes.masks.make_masks recipes/quickstart.yaml --methods razor --ratios 0.5,0.75
    python -m recipes.masks.make_masks recipes/study/composition_8x8.yaml \
        --study runs/composition_8x8/study

The first runs the search stage of the recipe for each mask. The second takes masks from studies of
the recipe's model: for each method and ratio that of the first seed and the largest budget, without
masks of several windows.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bosch.files import write_text
from bosch.heads import HeadMask, HeadMaskFile
from bosch.journal import Journal
from bosch.model.fingerprint import model_fingerprint
from bosch.model.loading import load_model
from bosch.search.settings import SearchSettings
from bosch.window import Window
from pipeline.commands.paths import model_label
from pipeline.recipe.load import load_recipe
from stages.published import Manifest
from stages.search.stage import HEAD_MASK, SearchSummary

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--methods", default="bosch", help="separated by commas")
    parser.add_argument("--ratios", default="0.75", help="separated by commas")
    parser.add_argument("--granularity", type=int, default=1, help="search.head_granularity")
    parser.add_argument("--study", type=Path, help="the folder of a study of this recipe's model")
    options = parser.parse_args()
    recipe = options.recipe.resolve().relative_to(ROOT)
    if options.study is not None:
        masks = masks_of_study(recipe, options.study)
    else:
        masks = (
            _search(recipe, method, ratio, options.granularity)
            for method in options.methods.split(",")
            for ratio in options.ratios.split(",")
        )
    for name, file, provenance in masks:
        path = FOLDER / recipe.stem / f"{name}.json"
        write_text(path, with_provenance(file, provenance))
        print(path.relative_to(ROOT))


def with_provenance(file: HeadMaskFile, provenance: dict[str, Any]) -> str:
    """The mask file's text, with its provenance as further fields."""
    content = replace(file, model=model_label(file.model)).content | {"provenance": provenance}
    numbers = r"\[\s*([\d,\s]*?)\s*\]"  # a list of numbers, which gets one line
    text = json.dumps(content, indent=1)
    return re.sub(numbers, lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def _search(
    recipe: Path, method: str, ratio: str, granularity: int
) -> tuple[str, HeadMaskFile, dict[str, Any]]:
    """Run the search of a mask, unless it is in the store."""
    name = _name(method, float(ratio), granularity)
    search = load_recipe(ROOT / recipe, []).recipe.search.by_method(method)
    command = [
        "-m", "pipeline", "run", str(recipe), f"name={recipe.stem}-{name}",
        f"search.method={method}", f"search.swa_ratio={ratio}",
        f"search.window_size={search.window_size}", "search.points=null",
        *([f"search.head_granularity={granularity}"] if granularity > 1 else []),
        "--until", "search",
    ]  # fmt: skip
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    folder = load_recipe(ROOT / recipe, []).output_root / f"{recipe.stem}-{name}" / "search"
    manifest, summary = Manifest.read(folder), SearchSummary.read(folder)
    provenance = {
        "recipe": str(recipe),
        "command": shlex.join(["python", *command]),
        "evaluations": summary.evaluations,
        "git_commit": manifest.git_commit,
        "date": (manifest.created or "").partition("T")[0],
        **{name: manifest.packages.get(name) for name in ("torch", "transformers")},
    }
    return name, HeadMaskFile.load(folder / HEAD_MASK), provenance


def masks_of_study(
    recipe: Path, folder: Path
) -> Iterator[tuple[str, HeadMaskFile, dict[str, Any]]]:
    """Names, files and provenance of the masks of one window in a study's results."""
    loaded = load_recipe(ROOT / recipe, []).recipe
    fingerprint = model_fingerprint(load_model(loaded.model.path, **loaded.model.loading))
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    commands = [json.loads(path.read_text())["command"] for path in sorted(folder.glob("*.json"))]
    best: dict[str, dict[str, Any]] = {}
    for entry in Journal(folder / "results.jsonl").read_new(dict):
        key = entry["key"]
        if key["kind"] != "search" or key["settings"]["seed"] != loaded.seed:
            continue
        if key["model"] != fingerprint:  # a study with another model.path
            continue
        if isinstance(key["window_size"], list):  # file names are for masks with one window
            continue
        settings = key["settings"]
        name = _name(key["method"], settings["swa_ratio"], settings.get("head_granularity", 1))
        # Keys omit defaults. Among equal budgets, the mask with the most calibration examples.
        budget = settings.get("budget_per_layer", SearchSettings.budget_per_layer)
        rank = budget, entry["result"].get("examples", 0)
        if name not in best or rank > best[name]["rank"]:
            best[name] = {"rank": rank, **entry}
    for name, entry in best.items():
        key, result = entry["key"], entry["result"]
        mask = HeadMask.from_key(result["mask"])
        file = HeadMaskFile.of(
            mask,
            Window(key["window_size"], key["sinks"]),
            model=loaded.model.path,
            method=key["method"],
            swa_ratio=key["settings"]["swa_ratio"],
            score=result["score"],
            seed=loaded.seed,
        )
        yield (
            name,
            file,
            {
                "recipe": str(recipe),
                "command": "; ".join(commands),
                "settings": key["settings"],
                "full_forward_equivalents": result["costs"]["full_forward_equivalents"],
                "git_commit": commit,
            },
        )


def _name(method: str, ratio: float, granularity: int) -> str:
    units = f"-g{granularity}" if granularity > 1 else ""
    return f"{method}{units}-{ratio:g}"


if __name__ == "__main__":
    main()
