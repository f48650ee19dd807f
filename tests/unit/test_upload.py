"""`bosch upload` with a stand-in for the hub's interface."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from bosch.files import file_hashes
from pipeline.cli import main
from stages.evaluate.scores import Scores
from stages.published import Manifest
from tests.report_fixture import publish

REPOSITORY = "someone/hybrid"


class Hub:
    """Takes the commit of one repository, and keeps the files by path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.private: bool | None = None
        self.refusal: Exception | None = None
        self.api = create_autospec(HfApi, instance=True)
        self.api.create_repo.side_effect = self._create
        self.api.create_commit.side_effect = self._commit

    def _create(self, repository: str, *, private: bool, exist_ok: bool) -> str:
        if self.refusal is not None:
            raise self.refusal
        assert exist_ok
        self.private = private
        return f"https://hub/{repository}"

    def _commit(self, repository: str, operations: list[Any], *, commit_message: str) -> None:
        assert repository == REPOSITORY and commit_message.startswith("Upload ")
        for operation in operations:
            with operation.as_file() as file:
                self.files[operation.path_in_repo] = file.read()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub.api)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose models are one file each."""
    run = tmp_path_factory.mktemp("run")
    publish(run)
    for folder in (
        run / "materialize" / "model",
        *(run / "train" / "checkpoints" / f"tokens-{n}000000" for n in (1, 4)),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "head_mask.json").write_text(f'"{folder.name}"')
        (folder / "model.safetensors").write_bytes(folder.name.encode())
        (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# A hybrid\n")
    note_files(run)
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def note_files(run: Path) -> None:
    """Make the manifests list the present files."""
    for file in run.glob("*/manifest.json"):
        others = [name for name in os.listdir(file.parent) if name != file.name]
        hashes = file_hashes(file.parent, sorted(others))
        files = [{"path": name, "size": 1, "sha256": digest} for name, digest in hashes.items()]
        content = {**json.loads(file.read_text()), "files": files}
        file.write_text(json.dumps({**content, "sha256": Manifest.digest(content)}))


def test_the_last_checkpoint_is_uploaded_with_card_mask_and_scores(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = json.loads((run / "evaluate" / Scores.FILE).read_text())
    gsm8k = {"score": 41.5, "low": 30.0, "high": 50.0, "standard_error": 2.0, "samples": 64}
    suite = {"average": 41.5, "gsm8k": {"0": gsm8k}}
    scores["checkpoints"]["tokens-4000000"]["harness"] = suite
    (run / "evaluate" / Scores.FILE).write_text(json.dumps(scores))
    note_files(run)
    assert main(["upload", str(run), REPOSITORY, "--private"]) == 0
    assert f"/{REPOSITORY}: 6 files of tokens-4000000" in capsys.readouterr().out
    assert hub.private is True
    assert set(hub.files) == {
        "config.json", "model.safetensors", "README.md", "head_mask.json",
        "evaluation/scores.json", ".eval_results/bosch.yaml",
    }  # fmt: skip
    assert hub.files["model.safetensors"] == b"tokens-4000000"
    assert hub.files["head_mask.json"] == b'"tokens-4000000"'
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlicense: mit\n---") and "| needle | 97.5 | 96.0 |" in card
    assert "| suite | original | this model | samples |\n|---|---:|---:|---:|" in card
    assert yaml.safe_load(hub.files[".eval_results/bosch.yaml"]) == [
        {
            "dataset": {"id": "openai/gsm8k", "task_id": "main"},
            "value": 41.5,
            "notes": "Tasks of lm-eval: gsm8k, 64 samples",
        }
    ]


def test_a_named_checkpoint_and_a_dry_run(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["upload", str(run), REPOSITORY, "--checkpoint", "hybrid", "--dry-run"]) == 0
    assert "model.safetensors\n" in capsys.readouterr().out and not hub.files
    assert main(["upload", str(run), REPOSITORY, "--checkpoint", "hybrid"]) == 0
    assert hub.files["model.safetensors"] == b"model"
    assert hub.private is False


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["no/run", REPOSITORY], 2, "RUN no/run: holds no model of a finished run"),
        (["", REPOSITORY, "--checkpoint", "tokens-5"], 2, "--checkpoint tokens-5: the run has hy"),
        (["", "hybrid"], 2, "REPOSITORY hybrid: expected owner/name"),
        (["", "a/b/c"], 2, "REPOSITORY a/b/c: expected owner/name"),
        (["", f"a/{'b' * 100}"], 2, f"REPOSITORY a/{'b' * 100}: expected owner/name (Repo id"),
    ],
)
def test_models_that_cannot_be_uploaded_give_one_sentence(
    run: Path, hub: Hub, arguments: list[str], status: int, sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(["upload", arguments[0] or str(run), *arguments[1:]]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.parametrize("damage", ["link", "adapter", "card", "weights"])
def test_only_published_outputs_of_the_run_are_uploaded(
    run: Path, hub: Hub, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "train" / "checkpoints" / "tokens-4000000"
    if damage == "link":
        (run / "secret").write_text("password")
        (folder / "notes.txt").symlink_to(run / "secret")
    elif damage == "adapter":
        (folder / "adapter_config.json").write_text("{}")
    elif damage == "card":
        (folder / "README.md").write_bytes(b"\xff")
    else:
        (folder / "model.safetensors").write_bytes(b"snekot-4000000")
    assert main(["upload", str(run), REPOSITORY]) == 2
    assert f"RUN {run}: train: checkpoints/tokens-4000000/" in capsys.readouterr().err
    assert not hub.files


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["files"][0].pop("sha256"),
        lambda manifest: manifest.pop("sha256"),
    ],
)
def test_an_output_with_a_changed_manifest_is_not_uploaded(
    run: Path, hub: Hub, change: Callable[[dict[str, Any]], object],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = run / "materialize" / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    assert main(["upload", str(run), REPOSITORY]) == 2
    said = f"RUN {run}: materialize: manifest.json was changed; run its recipe again"
    assert said in capsys.readouterr().err
    assert not hub.files


def test_a_model_without_scores_has_only_its_own_card(run: Path, hub: Hub) -> None:
    scores = json.loads((run / "evaluate" / Scores.FILE).read_text())
    del scores["checkpoints"]["tokens-1000000"]
    (run / "evaluate" / Scores.FILE).write_text(json.dumps(scores))
    note_files(run)
    own = {"config.json", "model.safetensors", "README.md", "head_mask.json"}
    for files in (own | {"evaluation/scores.json"}, own):
        assert main(["upload", str(run), REPOSITORY, "--checkpoint", "tokens-1000000"]) == 0
        assert set(hub.files) == files
        assert hub.files["README.md"] == b"---\nlicense: mit\n---\n\n# A hybrid\n"
        hub.files.clear()
        shutil.rmtree(run / "evaluate", ignore_errors=True)


@pytest.mark.parametrize("stage", ["evaluate", "train"])
def test_a_stage_whose_output_is_missing_is_reported(
    run: Path, hub: Hub, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / stage).rename(run / "elsewhere")
    (run / stage).symlink_to("nowhere")
    assert main(["upload", str(run), REPOSITORY]) == 1
    assert f"{run / stage}/manifest.json: missing or damaged" in capsys.readouterr().err
    assert not hub.files


def test_a_missing_token_is_reported(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["upload", str(run), REPOSITORY]) == 2
    assert capsys.readouterr().err == (
        "error: upload: there is no token for the hub here; run 'hf auth login' or set HF_TOKEN\n"
    )


@pytest.mark.parametrize(
    ("refusal", "status", "sentence"),
    [
        (OSError("this token\nmay not write"), 1,
         f"the hub did not take {REPOSITORY}: this token may not write\n"),
        (RuntimeError("Error while uploading 'model.safetensors' to the Hub."), 1,
         f"the hub did not take {REPOSITORY}: Error while uploading 'model.safetensors' to the "
         "Hub.\n"),
        (HTTPError("[Errno -2]\nName not known"), 1,
         "the hub cannot be reached ([Errno -2] Name not known); run the same command again\n"),
        (OfflineModeIsEnabled("offline"), 2,
         "HF_HUB_OFFLINE is set, which allows no upload; unset it\n"),
    ],
)  # fmt: skip
def test_a_refusal_of_the_hub_is_one_sentence(
    run: Path, hub: Hub, refusal: Exception, status: int, sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.refusal = refusal
    assert main(["upload", str(run), REPOSITORY]) == status
    assert capsys.readouterr().err == f"error: upload: {sentence}"
