"""Commands: help, JSON for programs, exit statuses, and what `new` writes."""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from bosch.errors import LostRankError, RunError, StoppedError, UserError
from bosch.masks import HeadMask
from bosch.model.cache import held_bytes
from bosch.model.materialize import materialize
from bosch.version import VERSION
from bosch.window import Window
from pipeline.cli import commands, main
from pipeline.commands.measure import default_output
from pipeline.recipe.load import load_recipe
from pipeline.recipe.yaml_file import parse_yaml
from pipeline.run import log
from pipeline.run.failures import Terminated
from stages.prepare.stage import PrepareConfig
from stages.stage import LoadedRecipe
from tests.elsewhere import ROOT
from tests.hybrid_case import mask_of, small_model
from tests.pipeline_case import Case, fake_table

STATUS = "pipeline.commands.status.run"


@pytest.fixture
def here(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The folder in which the command runs."""
    monkeypatch.chdir(case.folder)
    return case


def test_the_help_has_every_command_and_what_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert "RECIPE [key.path=value ...] [options]" in text
    assert all(f"\n{name} " in text for name in commands())


def test_a_plan_needs_neither_data_nor_weights_and_lists_missing_data(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(case.corpus)
    assert main(["plan", str(case.file)]) == 0
    fault = f"{case.corpus} names no file"
    assert re.search(f"^before it can run: .*{re.escape(fault)}", capsys.readouterr().out, re.M)
    (case.model / "model.safetensors").unlink()
    assert main(["plan", str(case.file)]) == 0
    assert main(["validate", str(case.file)]) == 2
    printed = capsys.readouterr().err
    assert fault in printed and "model.path: " in printed


@pytest.mark.parametrize("name", ["status", "validate"])
def test_with_json_only_json_is_printed(
    case: Case, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, str(case.file), "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (record["recipe"], record["file"]) == ("tiny", str(case.file))
    stages = [stage if name == "validate" else stage["stage"] for stage in record["stages"]]
    assert stages[0] == "prepare" and stages[-1] == "report"
    if name == "validate":
        assert record["fetches"] == []
    if name == "status":
        assert record["results"] == str(case.runs / "tiny")
        assert record["stages"][0] == {
            "stage": "prepare", "state": "to run", "reason": "never made"
        }  # fmt: skip


def _shown(model: Any, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Output of `show` for a model saved in a folder."""
    model.save_pretrained(folder)
    capsys.readouterr()  # which transformers' own imports may have written to
    assert main(["show", str(folder), *options]) == 0
    return capsys.readouterr().out


def test_show_counts_heads_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[True, False, False, False], [False] * 4, [True, True, False, True]]
    model = small_model(num_hidden_layers=3)
    head = 2 * model.config.head_dim * 4
    hybrid = materialize(model, HeadMask.of(rows, Window(6, 2)))
    record = json.loads(_shown(hybrid, tmp_path, capsys, "--json"))
    assert record["windows"] == [[0, 6, 6, 6], [6] * 4, [0, 0, 6, 0]] and record["sinks"] == 2
    for row in record["cache_bytes"]:
        held = 4 * row["tokens"] + 8 * (6 - 1 + 2)
        assert (row["hybrid"], row["original"]) == (head * held, head * 12 * row["tokens"])
    shown = _shown(hybrid, tmp_path, capsys)
    assert "4 of 12 KV heads full; the others see 6 tokens and 2 sinks\n" in shown
    assert "KV heads by layer (full + 6): 0: 1 + 3, 1: 0 + 4, 2: 3 + 1\n" in shown
    first = record["cache_bytes"][0]
    ours, theirs = (first[name] / 2**20 for name in ("hybrid", "original"))
    assert f"    1,024 tokens: {ours:.2f} MiB of KV cache instead of {theirs:.2f}\n" in shown
    full = materialize(model, HeadMask.all_full(3, 4))
    shown = _shown(full, tmp_path, capsys)
    assert "12 of 12 KV heads full\n" in shown and "the others" not in shown
    model.save_pretrained(tmp_path)
    assert main(["show", str(tmp_path)]) == 2
    assert f"{tmp_path} is no hybrid model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "dtype"), [("gemma3", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_show_counts_bytes_in_the_models_dtype(
    family: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model(family).to(dtype)
    hybrid = materialize(model, mask_of(model.config, Window(6)))
    counted = json.loads(_shown(hybrid, tmp_path, capsys, "--json"))["cache_bytes"][0]
    ids = torch.zeros(1, counted["tokens"], dtype=torch.long)
    cache = hybrid(ids, use_cache=True).past_key_values
    assert counted["hybrid"] == held_bytes(cache)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    if "text_config" in content:  # if only the whole model's dtype is recorded
        del content["text_config"]["dtype"]
        file.write_text(json.dumps(content))
        assert main(["show", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cache_bytes"][0] == counted
    halved = json.loads(_shown(hybrid.half(), tmp_path, capsys, "--json"))["cache_bytes"][0]
    assert halved["hybrid"] * dtype.itemsize == counted["hybrid"] * 2


def test_measure_prints_its_report_as_json_or_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def measure(*arguments: Any) -> dict[str, Any]:
        print("512 tokens: 1.5 times as fast")
        asked.append(arguments)
        return {"points": [1]}

    monkeypatch.setattr("stages.measure.measurement.measure", measure)
    assert main(["measure", "a/model", "--ratios", "0.5,1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"points": [1]}
    assert main(["measure", "c/model", "--output", "out"]) == 0
    assert capsys.readouterr().out.endswith("the figures are in out/efficiency.json, its picture "
                                            "beside it\n")  # fmt: skip
    (model, settings, folder), (other, _, output) = asked
    assert (model, settings.ratios, other) == ("a/model", [0.5, 1.0], "c/model")
    assert folder.parent == Path("runs/measure") and folder.name.startswith("model-")
    assert folder == default_output("b/../a/model") != default_output("b/model")
    assert output == Path("out")


def test_plan_uses_the_given_efficiency(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(case.file), "--hardware", "h100x8", "--efficiency", "0.5"]) == 0
    assert "on 8 x h100, at 0.5 of its peak" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(case.file), "--efficiency", "nan"])
    assert "--efficiency: expected a share above 0 and at most 1" in capsys.readouterr().err


def test_completion_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in commands())
    assert "--dry-run" in script and " --version)" in script
    for takes_files in ("run_pos_0", "new___data"):
        assert f"_shtab_bosch_{takes_files}_COMPGEN=_shtab_compgen_files" in script
    script += "\nfor word in train search.me bos; do WORDS $word; done"
    found = [
        subprocess.run(
            ["bash"], input=script.replace("WORDS", f"_bosch_words_{number}"), text=True,
            capture_output=True,
        ).stdout.split()
        for number in (0, 1)
    ]  # fmt: skip
    assert found[0] == ["train"]
    assert {"train.total_tokens=", "search.method=", "bosch_plus"} <= {*found[1]}


def test_the_program_works_from_any_folder(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("bosch"), "status", ROOT / "recipes/quickstart.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quickstart (/")


@pytest.mark.parametrize(
    "name",
    ["a # b", "a, weight: 5", "{a}", "null", "1e3", "- x", "'q", "d\u00e9", "a\u200b\ufeff"],
)
def test_new_quotes_names_that_yaml_reads_otherwise(name: str, here: Case) -> None:
    shutil.copytree("model", name)
    Path(name, "a.txt").write_text("some")
    assert main(["new", name, "--data", name, "--output", "quoted.yaml"]) == 0
    loaded = load_recipe("quoted.yaml", input_files=False, env={})
    assert loaded.recipe.model.path == str(here.folder / name)
    assert loaded.recipe[PrepareConfig].sources[0].path == str(here.folder / name)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["new", "empty/m"], "empty/m: there is no directory empty/m; expected a model directory"),
        (["new", "model", "--data", "no/data/here"], "--data no/data/here: there is no such file"),
        (["new", "model", "--data", "empty"], "--data empty: is an empty folder"),
        (["new", "model", "--output", "tiny.yaml"], "--output tiny.yaml: exists"),
        (["new", "model", "--output", "/proc/a.yaml"], "/proc/a.yaml: No such file"),
    ],
)  # fmt: skip
def test_a_path_that_the_system_refuses_is_one_sentence(
    arguments: list[str],
    sentence: str,
    here: Case,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("empty").mkdir()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


def test_the_version_is_printed_and_a_missing_recipe_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, said in (
        (["run"], "the following arguments are required: RECIPE\n"),
        (["--version"], f"bosch {VERSION}\n"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "".join(capsys.readouterr()).endswith(said)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.jsonl", "README.md", "LICENSE"], "jsonl"),
        (["a.ndjson"], "jsonl"),
        (["a.json", "about", "README.md"], "jsonl"),
        (["a.txt", "about.json"], "text"),
        (["a.jsonl.zst", ".hidden.parquet"], "jsonl"),
        (["index.json"], "jsonl"),
        (["a.py", "b.txt"], "text"),
        (["a.parquet", "b.jsonl", "c.txt"], None),
    ],
)
def test_new_takes_the_kind_of_the_files_that_hold_documents(
    here: Case, names: list[str], kind: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    for name in names:
        Path("mine", name).write_text('{"text": "some"}\n')
    if kind is None:
        assert main(["new", "model", "--data", "mine"]) == 2
        assert "mine: holds jsonl and parquet; name the files of one" in capsys.readouterr().err
        return
    assert main(["new", "model", "--data", "mine"]) == 0
    assert f"kind: {kind}, path" in Path("my_model.yaml").read_text()


@pytest.mark.parametrize(
    ("positions", "status"), [(511, 2), (512, 0), (1500, 0), (40_960, 0), (None, 0)]
)
def test_new_writes_paths_from_the_recipe_and_at_most_4096_tokens(
    here: Case, positions: int | None, status: int
) -> None:
    Path("sub").mkdir()
    here.change_config(max_position_embeddings=positions)
    typed = ["new", "model", "--data", "org/name", "--output", "sub/a.yaml"]
    assert main(typed) == status
    if not status:
        content = parse_yaml(Path("sub/a.yaml").read_text(), "a.yaml")
        assert content["model"]["path"] == "../model"
        (source,) = content["prepare"]["sources"]
        assert (source["kind"], source["path"]) == ("huggingface", "org/name")
        lengths = {512: [512], 1500: [512, "1k"]}.get(positions or 0, ["2k", "4k"])
        assert content["evaluate"]["ruler"]["lengths"] == lengths
        assert content["prepare"]["sequence_length"] == lengths[-1]


@pytest.mark.parametrize("rank", [0, 3])
def test_steps_are_in_the_log_and_progress_on_the_first_ranks_terminal(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("TRANSFORMERS_VERBOSITY", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging, "raiseExceptions", True)
    log.configure("info", tmp_path / "stage.log", rank)
    assert not logging.raiseExceptions, "a full disk would print a traceback"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    logging.getLogger("stages.train").info("step 7")
    logging.getLogger("stages.train").warning("no data")
    logging.getLogger("bosch.progress").info("train: 7/9 steps")
    terminal, file = capsys.readouterr().err, (tmp_path / "stage.log").read_text()
    assert "step 7" not in terminal and ("train: 7/9 steps" in terminal) == (rank == 0)
    assert "no data" in terminal and terminal.startswith("[rank 3] ") == (rank == 3)
    assert "[rank" not in file
    assert "step 7" in file and "no data" in file and "train: 7/9 steps" in file


@pytest.mark.parametrize("name", ["store", "tiny/recipe.json"])
def test_a_path_that_blocks_a_runs_files_is_reported(
    case: Case, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the place of a folder, and a folder in the place of a file."""
    place = case.runs / name
    if place.suffix:
        (place / "x").mkdir(parents=True)
    else:
        case.runs.mkdir()
        place.touch()
    assert main(["run", str(case.file)], fake_table()) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: runtime.output_root: {case.runs} cannot be used (")
    assert str(place) in said


@pytest.mark.parametrize(
    ("ends_with", "status", "said"),
    [
        (1, 1, ""),
        (UserError("no hybrid\x1b"), 2, "error: no hybrid\\x1b"),
        (RunError("no disk"), 1, "error: no disk"),
        (LostRankError("it hangs"), 1, "error: it hangs"),
        (StoppedError("saved"), 75, "saved; the same command resumes from here"),
        (Terminated(), 75, "stopped; the same command resumes from here"),
        (KeyboardInterrupt(), 130, "stopped; the same command resumes from here"),
        (OSError(errno.ENOSPC, "No space", "RUNS/x"), 1, "error: the disk of RUNS/x is full; free"),
        (OSError(errno.ENOSPC, "No space", "RUNS/x", None, "/x"), 1, "error: the disk of /x is"),
        (OSError(errno.EROFS, "no", "RUNS/x"), 2, "error: runtime.output_root: RUNS cannot be u"),
        (OSError(errno.ENOTDIR, "no", "RUNS/file/a/b"), 2, "error: runtime.output_root: RUNS"),
        (OSError(errno.EROFS, "no", "/a"), 1,
         "error: unexpected OSError: [Errno 30] no: '/a'; the traceback is in RUNS/logs/bosch-"),
        (ZeroDivisionError("oh"), 1,
         "error: unexpected ZeroDivisionError: oh; the traceback is in RUNS/logs/bosch-"),
    ],
)  # fmt: skip
def test_the_exit_status_of_a_command(
    ends_with: int | BaseException, status: int, said: str, case: Case,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if isinstance(ends_with, OSError):
        ends_with.filename = ends_with.filename.replace("RUNS", str(case.runs))
    case.runs.mkdir()
    (case.runs / "file").touch()
    monkeypatch.setattr(STATUS, Mock(side_effect=[ends_with]))
    assert main(["status", str(case.file)]) == status
    error = capfd.readouterr().err
    assert error.replace(str(case.runs), "RUNS").startswith(said)
    assert error.count("\n") == bool(said)
    if "traceback" in said:
        assert f"{type(ends_with).__name__}: " in Path(error.split()[-1]).read_text()


STOPS = pytest.mark.parametrize(
    ("stop", "status"),
    [(StoppedError("saved"), 75), (Terminated(), 75), (KeyboardInterrupt(), 130)],
)


@STOPS
def test_a_second_signal_does_not_change_the_exit_status(
    case: Case, monkeypatch: pytest.MonkeyPatch, stop: BaseException, status: int
) -> None:
    """Also while the first one is reported: a scheduler requeues by the status."""

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(os.getpid(), number)
            return super().write(text)

    output = Output()
    monkeypatch.setattr(STATUS, Mock(side_effect=stop))
    monkeypatch.setattr(sys, "stderr", output)
    assert main(["status", str(case.file)]) == status
    assert output.getvalue().count("the same command resumes from here\n") == 1


def test_a_signal_is_not_taken_for_a_fault_of_the_code_it_interrupts(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some code catches any Exception to say which file or model is faulty."""

    def end(loaded: LoadedRecipe, options: Any) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise UserError("the model cannot be built") from error
        return 0

    monkeypatch.setattr(STATUS, end)
    assert main(["status", str(case.file)]) == 75


def _write_table(folder: Path, *fields: str) -> None:
    rows = {name: [f"some {name} " * (i + 1)] * 3 for i, name in enumerate(fields)}
    pq.write_table(pa.table(rows), folder / "a.parquet")


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (
            lambda to: (to / "c4.00000-of-01024.json.gz").write_bytes(
                gzip.compress(b'{"url": "https://some.where", "text": "some"}\n')
            ),
            {"kind": "jsonl"},
        ),
        (lambda to: _write_table(to, "text", "summary"), {"kind": "parquet"}),
        (lambda to: Dataset.from_dict({"text": ["some"]}).save_to_disk(to),
         {"kind": "huggingface"}),
        (lambda to: shutil.copytree(ROOT / "tests/data/mds/text", to, dirs_exist_ok=True),
         {"kind": "mds"}),
        (lambda to: (to / "a.jsonl").write_text('{"id": "a", "body": "some words", "n": 1}\n'),
         {"kind": "jsonl", "text_field": "body"}),
        (lambda to: _write_table(to, "id", "longest_story"),
         {"kind": "parquet", "text_field": "longest_story"}),
        (lambda to: (to / "a.txt.gz").write_bytes(gzip.compress(b"some")), {"kind": "text"}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_what_new_writes_is_valid(
    write: Callable[[Path], object], expected: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    write(Path("mine"))
    assert main(["new", "model", "--data", "mine"]) == 0
    assert "before it can run" not in capsys.readouterr().out
    [source] = load_recipe("my_model.yaml", env={}).recipe[PrepareConfig].sources
    written = {name: getattr(source, name) for name in ("kind", "split", "text_field")}
    assert written == {"split": "train", "text_field": "text"} | expected
    assert main(["validate", "my_model.yaml"]) == 0


@pytest.mark.usefixtures("here")
def test_new_says_that_records_have_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text('{"m": 2, "n": 1}\n')
    assert main(["new", "model", "--data", "a.jsonl"]) == 0
    said = "no field `text` (there is m, n); set text_field"
    assert re.search(f"^before it can run: .*{re.escape(said)}", capsys.readouterr().out, re.M)
