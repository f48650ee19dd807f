"""Which changes of a source's files change the key, and which files are read for it."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from data_prep.documents.source_files import tokenizer_files
from pipeline.run.hashing import FileHasher
from stages.inputs import section_identity
from stages.prepare.stage import SourceConfig

SHARDS = Path(__file__).parents[1] / "data" / "mds"


def identity(folder: Path, kind: str, store: Path) -> tuple[dict, set[str]]:
    """The identity, and the names of the files that were hashed for it."""
    hasher = FileHasher(store / "hashes.json")
    hashed = set()
    sha256 = hasher.sha256
    hasher.sha256 = lambda path: hashed.add(path.name) or sha256(path)
    source = SourceConfig(name="a", kind=kind, path=str(folder))
    return section_identity(source, hasher)[1], hashed


def test_shards_with_hashes_in_their_index_are_not_read_for_the_key(tmp_path):
    folder = shutil.copytree(SHARDS / "plain", tmp_path / "mds")
    before, hashed = identity(folder, "mds", tmp_path)
    assert hashed == {"index.json"}
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["raw_data"]["hashes"]["sha1"] = "0" * 40
    (folder / "index.json").write_text(json.dumps(index))
    assert identity(folder, "mds", tmp_path)[0] != before


def test_shards_without_hashes_are_identified_by_content(tmp_path):
    folder = shutil.copytree(SHARDS / "plain", tmp_path / "mds")
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["raw_data"]["hashes"] = {}
    (folder / "index.json").write_text(json.dumps(index))
    before, hashed = identity(folder, "mds", tmp_path)
    assert hashed == {"index.json", "shard.00001.mds"}
    shard = folder / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert identity(folder, "mds", tmp_path)[0] != before


@pytest.mark.parametrize("kind", ["jsonl", "mds", "text"])
def test_only_files_that_are_read_stand_in_the_key(tmp_path, kind):
    folder = tmp_path / "corpus"
    shutil.copytree(SHARDS / "plain", folder / "plain")
    (folder / "a.jsonl").write_text("{}")
    before, _ = identity(folder, kind, tmp_path)
    (folder / ".hidden").write_text("x")
    assert identity(folder, kind, tmp_path)[0] == before
    (folder / "README").write_text("x")
    assert (identity(folder, kind, tmp_path)[0] == before) == (kind != "text")


def test_retrieval_is_made_of_this_pythons_help(tmp_path):
    source = SourceConfig(name="a", kind="retrieval")
    identity = section_identity(source, FileHasher(tmp_path / "hashes.json"))[1]
    assert "python" in identity["path"]


def test_dataset_of_the_hub_is_its_name_and_a_directory_its_files(tmp_path):
    source = SourceConfig(name="a", kind="huggingface", path="org/name", revision="0" * 40)
    hasher = FileHasher(tmp_path / "hashes.json")
    assert section_identity(source, hasher)[1] == {"path": {"dataset": "org/name"}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("{}")
    assert identity(tmp_path / "data", "huggingface", tmp_path)[1] == {"a.jsonl"}


def test_every_vocabulary_of_transformers_tokenizers_is_hashed(tmp_path):
    names = set()
    for name in filter(None, TOKENIZER_MAPPING_NAMES.values()):
        # Some classes need a package that is not there, and one holds two tokenizers.
        with contextlib.suppress(ImportError, AttributeError):
            names |= set(tokenizer_class_from_name(name).vocab_files_names.values())
    for name in names:
        (tmp_path / name).touch()
    assert len(names) > 10 and names == set(tokenizer_files(tmp_path))
