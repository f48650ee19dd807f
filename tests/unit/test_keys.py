"""Changes that a stage's key depends on, and those it ignores; inputs that change during a run.

Also which files of a source of training data are read and counted in the key.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from bosch.errors import RunError
from data_prep.source_files import tokenizer_files
from pipeline.recipe.load import load_recipe
from pipeline.run.graph import resolve
from pipeline.run.hashing import FileHasher
from pipeline.run.runner import Runner, RunOptions
from stages.evaluate.stage import EvaluateConfig, RulerConfig
from stages.inputs import hashed_files, section_identity
from stages.prepare.stage import SourceConfig
from stages.stage import World
from tests.hybrid_case import ALL_FAMILIES
from tests.pipeline_case import Case, fake_table, write_safetensors

EVERY_MODEL_STAGE = {"search", "materialize", "original", "evaluate"}
EVERY_STAGE = {*EVERY_MODEL_STAGE, "prepare", "train", "report"}


def documents(case: Case, *overrides: str, fetch: bool = True) -> dict[str, dict[str, Any]]:
    """The stages' key documents without what they inherit from the stages above them."""
    hasher = FileHasher(case.folder / "hashes.json")
    nodes = resolve(load_recipe(case.file, overrides, stages=fake_table(), fetch=fetch), hasher)
    return {node.name: {**(node.document or {}), "upstream": None} for node in nodes}


def write(case: Case, name: str, text: str = "text") -> None:
    path = case.model / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def shard_in_subfolder(case: Case) -> None:
    (case.model / "parts").mkdir(exist_ok=True)
    write_safetensors(case.model / "parts" / "a.safetensors", 7)


def index(case: Case, name: str) -> None:
    content = json.dumps({"weight_map": {"w": name}})
    (case.model / "model.safetensors.index.json").write_text(content)


def set_field(case: Case, section: str, name: str, value: object) -> None:
    case.content[section][name] = value
    case.save()


@pytest.mark.parametrize(
    ("prepare", "change", "stages"),
    [
        (
            lambda c: (shard_in_subfolder(c), index(c, "parts/a.safetensors")),
            lambda c: write_safetensors(c.model / "parts" / "a.safetensors", 8),
            EVERY_MODEL_STAGE,
        ),
        (
            lambda c: (shard_in_subfolder(c), index(c, "parts/a.safetensors")),
            lambda c: write_safetensors(c.model / "model.safetensors", 8),
            EVERY_MODEL_STAGE,
        ),
        (None, lambda c: write(c, "generation_config.json", "{}"), EVERY_MODEL_STAGE),
        (None, lambda c: c.change_config(model_type="llama"), {"prepare", *EVERY_MODEL_STAGE}),
        (None, lambda c: c.change_config(rope_theta=2.0), EVERY_MODEL_STAGE),
        (None, lambda c: write(c, "README.md", "license: mit"), EVERY_MODEL_STAGE),
        (None, lambda c: write_safetensors(c.model / "adapter.safetensors"), set()),
        (None, lambda c: set_field(c, "model", "trust_remote_code", True), EVERY_MODEL_STAGE),
        (None, lambda c: (c.content.update(seed=7), c.save()), EVERY_STAGE),
        (
            lambda c: set_field(c, "model", "trust_remote_code", True),
            lambda c: write(c, "helpers/bytes.py"),
            {"prepare", *EVERY_MODEL_STAGE},
        ),
    ],
)
def test_a_model_file_changes_the_keys_of_the_stages_that_read_it(
    case: Case,
    prepare: Callable[[Case], object] | None,
    change: Callable[[Case], object],
    stages: set[str],
) -> None:
    if prepare is not None:
        prepare(case)
    before = documents(case)
    change(case)
    after = documents(case)
    assert {name for name in before if before[name] != after[name]} == stages


@pytest.mark.parametrize(
    ("names", "stages"),
    [
        (["code/deep/layers.py", "modeling_own.py", "README.md"], EVERY_MODEL_STAGE),
        (
            ["tekken.json", "sentencepiece.bpe.model", "additional_chat_templates/default.jinja",
             "tokenization_own.py", "own.tiktoken"], {"prepare", *EVERY_MODEL_STAGE},
        ),
        (
            ["LICENSE.txt", "NOTICE.txt", ".hidden.json", ".git/hooks/x.py",
             "training_args.json", "trainer_state.json"], set(),
        ),
    ],
)  # fmt: skip
def test_a_new_file_of_a_model_changes_the_keys_of_the_stages_that_read_it(
    case: Case, names: list[str], stages: set[str]
) -> None:
    before = documents(case)
    for name in names:
        write(case, name)
        after = documents(case)
        assert {one for one in before if before[one] != after[one]} == stages, name
        before = after


def test_a_model_of_the_hub_is_identified_by_name_and_commit(case: Case) -> None:
    """Another revision is another model, also for the data: its tokenizer may differ."""
    main, other = (
        documents(case, "model.path=org/name", f"model.revision={revision}", fetch=False)
        for revision in ("main", "b" * 40)
    )
    assert main["prepare"]["model"] == {"hub": "org/name", "commit": "main"}
    changed = {name for name in main if main[name] != other[name]}
    assert changed == EVERY_MODEL_STAGE | {"prepare"}
    assert other["search"]["model"]["commit"] == "b" * 40
    changes = ("model.path=org/name", "model.revision=main", "model.dtype=float32")
    typed = documents(case, *changes, fetch=False)
    assert {name for name in main if main[name] != typed[name]} == EVERY_MODEL_STAGE


def test_a_branch_of_the_hub_is_resolved_to_the_local_commit(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the key, and for the stage: the branch may move during the run."""
    folder, commit = case.folder / "hub" / "models--org--name", "c" * 40
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(case.folder / "hub"))
    shutil.copytree(case.model, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    for branch, there in (("main", "d" * 40), ("dev", commit)):
        (folder / "refs" / branch).write_text(there)
    changes = ("model.path=org/name", "model.revision=dev")
    model = documents(case, *changes, fetch=False)["search"]["model"]
    assert (model["hub"], model["commit"]) == ("org/name", commit)
    loaded = load_recipe(case.file, changes, stages=fake_table(), fetch=False)
    run = Runner(loaded)
    assert run.order(run.nodes[0], case.folder)["model"]["values"]["revision"] == commit


def test_a_stage_after_one_whose_files_are_not_hashed_has_no_key(case: Case) -> None:
    loaded = load_recipe(case.file, stages=fake_table())
    nodes = resolve(loaded, FileHasher(case.folder / "hashes.json", budget_bytes=0))
    assert [node.key for node in nodes] == [None] * len(nodes)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b", "", ".."])
def test_weights_outside_the_directory_are_refused(case: Case, name: str) -> None:
    write_safetensors(case.folder / "outside.safetensors")
    index(case, name)
    message = case.fault()
    assert "model.safetensors.index.json names the weights" in message
    assert "no file of its directory" in message


def run_with(case: Case, stage: Callable[[Mapping[str, Any]], None]) -> Runner:
    """A run whose stages are all `stage`, which is called with their orders."""

    def launcher(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        (Path(order["work_dir"]) / "output.json").write_text(order["stage"])
        stage(order)
        return {}

    options = RunOptions(until="search")
    return Runner(load_recipe(case.file, stages=fake_table()), options, launcher)


@pytest.mark.parametrize(
    ("stage", "change", "expected"),
    [
        (
            "prepare",
            lambda c: (c.corpus / "a.txt").write_text("other text"),
            "prepare.sources.0.path: a.txt has other content",
        ),
        ("prepare", lambda c: (c.corpus / "a.txt").unlink(), "corpus holds no file"),
        (
            "search",
            lambda c: write_safetensors(c.model / "model.safetensors", 3),
            "model.model.safetensors has other content",
        ),
    ],
)
def test_a_changed_input_is_reported_and_nothing_is_published(
    case: Case, stage: str, change: Callable[[Case], object], expected: str
) -> None:
    before = {path: path.read_bytes() for path in case.folder.rglob("*") if path.is_file()}

    def work(order: Mapping[str, Any]) -> None:
        if order["stage"] == stage:
            change(case)

    runner = run_with(case, work)
    with pytest.raises(RunError, match=rf"^{stage}: its inputs changed while it ran") as caught:
        runner.run()
    assert expected in str(caught.value)
    node = next(node for node in runner.nodes if node.name == stage)
    assert not runner.store.published(stage, str(node.key)).exists()
    assert not runner.store.work(stage, str(node.key)).exists()
    for path, content in before.items():
        path.write_bytes(content)
    assert run_with(case, lambda order: None).run() > 0


def test_an_input_that_changed_before_its_stage_starts_is_reported_at_once(case: Case) -> None:
    begun = []

    def work(order: Mapping[str, Any]) -> None:
        begun.append(order["stage"])
        write_safetensors(case.model / "model.safetensors", 3)

    with pytest.raises(RunError, match=r"^search: its inputs changed since this run began"):
        run_with(case, work).run()
    assert begun == ["prepare"]


SHARDS = Path(__file__).parents[1] / "data" / "mds"


def identity(
    folder: Path, kind: str, store: Path, tokenizer: str | None = None
) -> tuple[dict, set[str]]:
    """The identity, and the names of the files hashed for it."""
    hasher = FileHasher(store / "hashes.json")
    hashed = set()
    sha256 = hasher.sha256
    hasher.sha256 = lambda path: hashed.add(path.name) or sha256(path)
    source = SourceConfig(name="a", kind=kind, path=str(folder), tokenizer=tokenizer)
    return section_identity(source, hasher)[1], hashed


def test_shards_are_identified_by_the_hashes_in_their_index_or_by_content(tmp_path):
    folder = shutil.copytree(SHARDS / "plain", tmp_path / "mds")
    before, hashed = identity(folder, "mds", tmp_path)
    assert hashed == {"index.json"}
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["raw_data"]["hashes"]["sha1"] = "0" * 40
    (folder / "index.json").write_text(json.dumps(index))
    assert identity(folder, "mds", tmp_path)[0] != before
    raw = index["shards"][1]["raw_data"]
    # Nor does the hash of an absent compressed file verify this file.
    index["shards"][1] |= {
        "zip_data": {**raw, "basename": "shard.00001.mds.zstd"}, "compression": "zstd",
        "raw_data": {**raw, "hashes": {}},
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index))
    before, hashed = identity(folder, "mds", tmp_path)
    assert hashed == {"index.json", "shard.00001.mds"}
    shard = folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert identity(folder, "mds", tmp_path)[0] != before


def test_the_tokenizer_of_shards_is_in_the_key_by_content_or_name(tmp_path):
    folder, own = shutil.copytree(SHARDS / "plain", tmp_path / "mds"), tmp_path / "tokenizer"
    own.mkdir()
    (own / "tokenizer.json").write_text("{}")
    before, hashed = identity(folder, "mds", tmp_path, str(own))
    assert hashed == {"index.json", "tokenizer.json"}
    (own / "tokenizer.json").write_text("[]")
    assert identity(folder, "mds", tmp_path, str(own))[0] != before
    named = identity(folder, "mds", tmp_path, "org/name")[0]
    assert {"hub": "org/name"} in named.values()


@pytest.mark.parametrize(
    "field", [{"tokenizer_class": "GPT2Tokenizer"}, {"auto_map": {"AutoConfig": "own.Config"}}]
)
def test_config_jsons_tokenizer_class_is_in_the_key_if_tokenizer_files_name_none(
    case: Case, tmp_path: Path, field: dict[str, Any]
) -> None:
    folder = shutil.copytree(SHARDS / "plain", tmp_path / "mds")

    def keys() -> list[object]:
        return [documents(case)["prepare"], identity(folder, "mds", tmp_path, str(case.model))[0]]

    before = keys()
    case.change_config(**field)
    assert all(new != old for new, old in zip(keys(), before, strict=True))
    write(case, "tokenizer_config.json", '{"tokenizer_class": "Qwen2Tokenizer"}')
    before = keys()
    case.change_config(**dict.fromkeys(field, "other"))
    assert keys() == before


@pytest.mark.parametrize("kind", ["jsonl", "mds"])
def test_only_files_that_are_read_are_in_the_key(tmp_path, kind):
    folder = tmp_path / "corpus"
    shutil.copytree(SHARDS / "plain", folder / "plain")
    (folder / "a.jsonl").write_text("{}")
    before, _ = identity(folder, kind, tmp_path)
    (folder / ".hidden").write_text("x")
    assert identity(folder, kind, tmp_path)[0] == before
    (folder / "README").write_text("x")
    assert identity(folder, kind, tmp_path)[0] == before


@pytest.mark.parametrize(
    ("section", "read", "ignored"),
    [
        (lambda folder: RulerConfig(data_dir=folder), "squad.json", "wiki.json"),
        (lambda folder: EvaluateConfig(include_path=[folder]), "a/task.yaml", "a/utils.pyc"),
        (lambda folder: EvaluateConfig(include_path=[folder]), "a/utils.py", "b.pyc"),
    ],
)
def test_the_files_of_an_evaluation_are_in_its_key_by_content(tmp_path, section, read, ignored):
    data = tmp_path / "data"
    data.mkdir()
    evaluation = section(str(data))
    paths = [data / name for name in (read, ignored)]
    keys = []
    for contents in ((), ("one",), ("two",), ("two", "other")):
        for path, text in zip(paths, contents, strict=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        keys.append(section_identity(evaluation, FileHasher(tmp_path / "hashes.json"))[1])
    missing, one, two, with_other = keys
    assert missing != one != two == with_other
    assert str(data) not in str(section_identity(evaluation, FileHasher(tmp_path / "h"))[0])


@pytest.mark.parametrize("pattern", ["", "*/*.txt"])
def test_a_long_list_of_files_is_one_hash_in_the_key(tmp_path, pattern):
    files = [tmp_path / f"folder{i}" / "a.txt" for i in range(33)]
    for path in files:
        path.parent.mkdir()
        path.write_text("text")
    hasher = FileHasher(tmp_path / "hashes.json")
    named = str(tmp_path / pattern)
    listed = hashed_files(named, files[:32], hasher)["files"]
    assert list(listed) == [f"folder{i}/a.txt" for i in range(32)]
    folded = hashed_files(named, files, hasher)
    assert folded["files"] == 33 and hashed_files(named, files, hasher) == folded
    files[7].write_text("other")
    assert hashed_files(named, files, hasher)["sha256"] != folded["sha256"]


@pytest.mark.skipif(not ALL_FAMILIES, reason="reads all tokenizers; launch/test.sh full")
def test_every_vocabulary_file_of_transformers_tokenizers_is_hashed(tmp_path):
    names = set()
    for name in filter(None, TOKENIZER_MAPPING_NAMES.values()):
        # Some classes need a package that is not installed, and one holds two tokenizers.
        with contextlib.suppress(ImportError, AttributeError):
            names |= set(tokenizer_class_from_name(name).vocab_files_names.values())
    for name in names:
        (tmp_path / name).touch()
    assert len(names) > 10 and names == set(tokenizer_files(tmp_path))
