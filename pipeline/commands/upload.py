"""`bosch upload RUN REPOSITORY`: a run's model, card, head mask and scores on the hub."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bosch.commands import Command
from bosch.errors import RunError, UserError
from bosch.files import hash_fault, read_json
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores
from stages.evaluate.suites import SUITES, suite_title
from stages.formats import format_score
from stages.inputs import is_hub_name
from stages.pages.tables import Group, Table
from stages.published import Manifest
from stages.train.stage import CHECKPOINTS, checkpoint_folders

COMMAND = Command("put a run's model, card, head mask and scores on the Hugging Face hub")
_STAGES = ("materialize", "train", "evaluate")
_RESULTS = ".eval_results/bosch.yaml"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the run, the repository and the options."""
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="a run's folder, like runs/quickstart"
    )
    parser.add_argument("repository", metavar="REPOSITORY", help="its name on the hub, owner/name")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="tokens-<n>, or hybrid for the untrained one (default: the last that was trained)",
    )
    parser.add_argument("--private", action="store_true", help="for you and your organisation only")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be uploaded")


def run(options: argparse.Namespace) -> int:
    """Upload all files in one commit; raises UserError if a result is missing."""
    folder, name = _model(options.run, options.checkpoint)
    _check_name(options.repository)
    for stage in _STAGES:
        if os.path.lexists(options.run / stage):
            _check_intact(options.run / stage)
    files = dict(repository_files(options.run, folder, name))
    if options.dry_run:
        print("\n".join(files))
        return 0
    address = _commit(options.repository, files, options.private, name)
    print(f"{address}: {len(files)} files of {name}")
    return 0


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    reason = ""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        reason = f" ({error})"
    if reason or repository.count("/") != 1 or not is_hub_name(repository, Path("/")):
        raise UserError(f"REPOSITORY {repository}: expected owner/name{reason}")


def _check_intact(folder: Path) -> None:
    """Raise UserError if a stage's files differ from those in its manifest."""
    manifest, content = Manifest.read(folder), read_json(folder / Manifest.FILE)
    if content.get("sha256") == Manifest.digest(content):
        fault = hash_fault(folder, manifest.hashes)
    else:
        fault = f"{Manifest.FILE} was changed"
    if fault is not None:
        raise UserError(f"RUN {folder.parent}: {folder.name}: {fault}; run its recipe again")


def _model(run: Path, checkpoint: str | None) -> tuple[Path, str]:
    folders: dict[str, Path] = {}
    if (run / "materialize" / "model" / "config.json").is_file():
        folders[HYBRID] = run / "materialize" / "model"
    if (run / "train" / CHECKPOINTS).is_dir():
        folders |= checkpoint_folders(run / "train")
    if not folders:
        raise UserError(
            f"RUN {run}: holds no model of a finished run; expected runs/<recipe>, with "
            "materialize/model in it"
        )
    name = checkpoint or next(reversed(folders))
    if name not in folders:
        raise UserError(f"--checkpoint {name}: the run has {', '.join(folders)}")
    return folders[name], name


def repository_files(run: Path, model: Path, name: str) -> Iterator[tuple[str, Path | bytes]]:
    """All files of the repository by path; scores only if the run has some."""
    card = ""
    for path in sorted(path for path in model.rglob("*") if path.is_file()):
        if path.name == "README.md":
            card = path.read_text(encoding="utf-8")
        else:
            yield path.relative_to(model).as_posix(), path
    if (run / "evaluate" / Scores.FILE).is_file():
        scores = Scores.read(run / "evaluate")
        yield f"evaluation/{Scores.FILE}", run / "evaluate" / Scores.FILE
        if name in scores.checkpoints:
            original, rows = scores.checkpoints.get(ORIGINAL, {}), []
            for suite, result in scores.checkpoints[name].items():
                base = format_score(original[suite].average if suite in original else None)
                rows.append([suite, base, f"{result.average:.1f}", f"{result.samples:,}"])
            header = ("suite", "original", "this model", "samples")
            card += "\n" + Table("Evaluation", header, [Group(rows)], 1).markdown()
            if entries := hub_results(scores, name):
                yield _RESULTS, yaml.safe_dump(entries, sort_keys=False).encode()
    if card:
        yield "README.md", card.encode()


def hub_results(scores: Scores, name: str) -> list[dict[str, Any]]:
    """Entries of `.eval_results`: scores of tasks whose data is a dataset on the hub."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = [
        EvalResultEntry(
            dataset_id=dataset,
            task_id=config,
            value=round(score.score, 4),
            notes=f"{suite_title(suite)}: {task}, {score.samples} samples",
        )
        for suite, table in scores.checkpoints[name].items()
        if suite in SUITES
        for task, (dataset, config) in SUITES[suite].hub_tasks(list(table.tasks)).items()
        for score in table.tasks[task].values()
    ]
    return list(eval_result_entries_to_yaml(entries))


def _commit(repository: str, files: dict[str, Path | bytes], private: bool, name: str) -> str:
    """Commit the files to the hub; returns the address. Raises a one-line error on refusal."""
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    if get_token() is None:
        raise UserError(
            "upload: there is no token for the hub here; run 'hf auth login' or set HF_TOKEN"
        )
    api = HfApi()
    operations = [
        CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        for path, content in files.items()
    ]
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(repository, operations, commit_message=f"Upload {name}")
    except OfflineModeIsEnabled:
        raise UserError("upload: HF_HUB_OFFLINE is set, which allows no upload; unset it") from None
    # Errors of the hub are OSErrors, failed transfers RuntimeErrors.
    except (OSError, RuntimeError, HTTPError) as error:
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, OSError | RuntimeError):
            raise RunError(f"upload: the hub did not take {repository}: {reason}") from None
        raise RunError(
            f"upload: the hub cannot be reached ({reason}); run the same command again"
        ) from None
    return str(address)
