"""Evaluate any models and a recipe's original outside of a run, with answers in its store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch import files
from bosch.errors import RunError, UserError
from bosch.files import write_text
from pipeline.run.locks import hold, hold_briefly, read_holder
from pipeline.run.runner import Runner
from stages.evaluate.answers import MODELS, content_identity, forget_answers
from stages.evaluate.scores import HYBRID, ORIGINAL, SAMPLES, SelectedScores
from stages.evaluate.stage import EvaluateConfig
from stages.materialize.stage import MODEL
from stages.train.stage import checkpoint_folders

_HYBRID_STAGE, _TRAINING_STAGE = "materialize", "train"
_FUNCTION = "stages.evaluate.selected:run"


class Evaluation:
    """Evaluations with a recipe's settings; raises UserError for a recipe without `evaluate`."""

    def __init__(self, runner: Runner) -> None:
        nodes = {node.name: node for node in runner.nodes}
        if "evaluate" not in nodes:
            raise UserError(
                f"{runner.loaded.file}: has no section evaluate, which says what to evaluate"
            )
        self.runner, self.store = runner, runner.store
        self.node, self.original = nodes["evaluate"], nodes[ORIGINAL]

    @property
    def folder(self) -> Path:
        """Folder of the scores and answers."""
        return self.store.root / self.runner.name / "evaluation"

    def available(self) -> dict[str, Path]:
        """The hybrid and all complete checkpoints, also of a running training.

        Raises RunError if their published output is damaged.
        """
        folders: dict[str, Path] = {}
        for node in self.runner.nodes:
            if node.key is None or node.name not in (_HYBRID_STAGE, _TRAINING_STAGE):
                continue
            damage = self.store.damage(node.name, node.key, self.runner.hasher)
            if damage is not None:
                raise RunError(
                    f"the output of {node.name} is damaged ({damage}); run the recipe, which makes "
                    "it again"
                )
            published = self.store.published(node.name, node.key)
            output = published if published.exists() else self.store.work(node.name, node.key)
            if node.name == _HYBRID_STAGE and (output / MODEL / "config.json").is_file():
                folders[HYBRID] = output / MODEL
            if node.name == _TRAINING_STAGE and (output / "checkpoints").is_dir():
                folders |= checkpoint_folders(output)
        return folders

    def is_finished(self) -> bool:
        """Whether no further model will appear."""
        names = (_HYBRID_STAGE, _TRAINING_STAGE)
        node = [node for node in self.runner.nodes if node.name in names][-1]
        if node.key is None or self.store.manifest(node.name, node.key) is None:
            return False
        return self.store.damage(node.name, node.key, self.runner.hasher) is None

    def is_running(self) -> bool:
        """Whether a process works on a stage of the recipe."""
        keys = [(node.name, node.key) for node in self.runner.nodes if node.key is not None]
        return any(read_holder(self.store.lock(name, key)) is not None for name, key in keys)

    def score(self, folders: Mapping[str, Path]) -> tuple[SelectedScores, str]:
        """Evaluate these models and the original; returns scores and samples (JSON lines)."""
        self.runner.stamps(self.original)
        document: dict[str, Any] = {
            "original": self.original.key,
            "budgets": self.runner.loaded.recipe[EvaluateConfig].budgets,
            "models": self._identities(folders),
        }
        stamps = self.runner.hasher.stamps
        digest = hashlib.sha256(files.canonical_json(document).encode()).hexdigest()
        work = self.store.work("evaluation", digest)
        lock = self.store.lock("evaluation", digest)
        with hold(lock, f"{self.runner.name}: this evaluation", self.runner.name, wait=True):
            scores = SelectedScores.finished(work)
            if scores is None or scores.missing:  # what was missing may exist by now
                files.write_json(work / MODELS, document)
                self._launch(folders, document["models"], stamps, work)
                scores = SelectedScores.read(work)
            return scores, (work / SAMPLES).read_text(encoding="utf-8")

    def publish(self, scores: SelectedScores, samples: str, table: str) -> None:
        """Write the files of one evaluation to `folder`, to which other processes may write."""
        with hold_briefly(self.store.lock("evaluation", self.runner.name)):
            files.write_json(self.folder / SelectedScores.FILE, scores.content)
            write_text(self.folder / SAMPLES, samples)
            write_text(self.folder / "table.md", table)

    def _launch(
        self,
        folders: Mapping[str, Path],
        identities: Mapping[str, str],
        stamps: Mapping[str, files.Stamp],
        work: Path,
    ) -> None:
        """Answer and score; again if training has moved its checkpoints meanwhile."""
        while True:
            (work / SelectedScores.FILE).unlink(missing_ok=True)
            order = {
                **self.runner.order(self.original, work, stamps),
                "stage": "evaluate",
                "function": _FUNCTION,
                "inputs": {name: str(folder) for name, folder in folders.items()},
            }
            failure: UserError | RunError | None = None
            try:
                self.runner.launcher(order, self.runner.loaded.world)
            except (UserError, RunError) as error:
                failure = error
            current = {name: self._current_folder(folder) for name, folder in folders.items()}
            if current == folders:
                self._require_unchanged(folders, identities, stamps, work)
                if failure is not None:
                    raise failure
                return
            folders = current
            self.runner.stamps(self.original)
            self._identities(folders)
            stamps = self.runner.hasher.stamps

    def _current_folder(self, folder: Path) -> Path:
        """Current folder of a checkpoint, which publishing moves out of the work directory."""
        for node in self.runner.nodes:
            work = self.store.work(node.name, str(node.key))
            if work in folder.parents and not folder.exists():
                return self.store.published(node.name, str(node.key)) / folder.relative_to(work)
        return folder

    def _identities(self, folders: Mapping[str, Path]) -> dict[str, str]:
        """Identities of the models by content, under which answers are stored."""
        model, hasher = self.runner.loaded.recipe.model, self.runner.hasher
        try:
            identities = {
                name: content_identity(folder, model, hasher.sha256)
                for name, folder in folders.items()
            }
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
        hasher.save()
        return identities

    def _require_unchanged(
        self,
        folders: Mapping[str, Path],
        identities: Mapping[str, str],
        stamps: Mapping[str, files.Stamp],
        work: Path,
    ) -> None:
        """Raise RunError, and delete the answers, if a file was written while it was read.

        Its content may be unchanged.
        """
        changed_file = files.changed_file(stamps)
        current = self._identities(folders)
        changed = {name for name in folders if current[name] != identities[name]}
        if changed_file is not None:
            parents = Path(changed_file).parents
            changed |= {name for name, folder in folders.items() if folder in parents}
        if changed_file is None and not changed:
            return
        # A changed file outside of these folders belongs to the original or to the samples of all.
        forgotten = {identities[name] for name in changed or folders}
        if not changed:
            forgotten.add(str(self.runner.order(self.original, work)["model_identity"]))
        files.remove(work)
        forget_answers(self.store.shared("evaluate"), forgotten)
        names = ", ".join(f"--model {folders[name]}" for name in folders if name in changed)
        raise RunError(
            f"{names or changed_file}: changed while it was evaluated, so its answers are thrown "
            "away; run the same command again"
        )
