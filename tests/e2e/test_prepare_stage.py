"""The prepare stage on a small corpus: what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import load_from_disk

from bosch.errors import UserError
from data_prep.documents import tokenization
from data_prep.documents.calibration import read_prompts
from data_prep.documents.encoding import encode
from data_prep.documents.sources import generated
from stages.context import ModelConfig, Runtime, StageConfig
from stages.prepare import run as prepare
from stages.prepare.stage import PrepareConfig
from stages.stage import call
from tests.folders import file_contents
from tests.tiny_data import save_tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def corpus(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02d}.txt").write_text(f"Document {i}. " * (10 + i))
    return tmp_path


@pytest.fixture(autouse=True)
def prose(monkeypatch):
    """Fixed words in place of pydoc's topics, which differ by Python version."""
    words = ["some", "words", "of", "a", "text"] * 1000
    monkeypatch.setattr(generated, "haystack_words", lambda folder: words)


def config(model: Path, sources: list[dict] | Path, workers=1, seed=0, **changes) -> StageConfig:
    """Of `sources`, or of the texts in a folder."""
    if isinstance(sources, Path):
        sources = [{"name": "mine", "kind": "text", "path": str(sources / "*.txt")}]
    fields = {
        "sequence_length": 64,
        "train_tokens": 3000,
        "sources": sources,
        "calibration": {"examples": 5, "length": 420, "max_new_tokens": 20},
    }
    section = PrepareConfig(**{**fields, **changes})
    return StageConfig(section, ModelConfig(path=str(model)), seed, Runtime(data_workers=workers))


def run(stage_config: StageConfig, folder: Path) -> Path:
    folder.mkdir()
    prepare.run(stage_config, {}, folder)
    return folder


def test_outputs_have_their_documented_form(model, corpus, tmp_path):
    sources = [
        {"name": "mine", "kind": "text", "path": str(corpus / "*.txt"), "weight": 3},
        {"name": "made", "kind": "retrieval", "weight": 1},
    ]
    out = run(config(model, sources), tmp_path / "out")
    statistics = json.loads((out / "statistics.json").read_text())
    assert statistics["sequences"] == 47 and statistics["tokens"] == 47 * 64
    # As `plan` states beforehand: tokens that fill no whole sequence take one more.
    loaded = SimpleNamespace(recipe={PrepareConfig: config(model, sources).section})
    planned = call("stages.prepare.stage:cost", loaded, None)
    assert planned.note.startswith("3,008 tokens, ")
    assert planned.disk - planned.removed == 4 * 47 * 64 + 2 * 5 * 420 * 6
    assert planned.removed == 4 * 47 * 64, "tokens of all sources, until they are packed"
    mine, made = (statistics["sources"][name] for name in ("mine", "made"))
    assert (mine["target_share"], made["target_share"]) == (0.75, 0.25)
    assert 0.5 < mine["share"] < 0.85
    train = load_from_disk(str(out / "train"))
    counted = [mine["tokens"], made["tokens"]]
    assert sum(counted) == 47 * 64
    assert [mine["share"], made["share"]] == [tokens / (47 * 64) for tokens in counted]
    assert statistics["documents"] == mine["documents"] + made["documents"]
    assert len(train) == 47 and set(train.column_names) == {"input_ids", "document_lengths"}
    assert all(sum(lengths) == 64 for lengths in train["document_lengths"])
    assert not (out / "tokens").exists()
    assert (out / "tokenizer" / "tokenizer.json").exists()


def test_a_token_without_an_embedding_is_refused_before_the_search(model, corpus, tmp_path):
    """A tokenizer with more tokens than the model; training would end in an index error."""
    grown = shutil.copytree(model, tmp_path / "grown")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["Document"])
    tokenizer.save_pretrained(grown)
    with pytest.raises(UserError, match=r"makes token 512 .* has 512 embeddings; resize"):
        run(config(grown, corpus), tmp_path / "out")


@pytest.mark.parametrize(("length", "share"), [(290, 3.56), (200, None)])
def test_a_source_below_half_of_its_share_is_reported(model, tmp_path, caplog, length, share):
    (tmp_path / "long.txt").write_text("One document. " * length)
    sources = [
        {"name": "long", "kind": "text", "path": str(tmp_path / "long.txt")},
        {"name": "made", "kind": "retrieval"},
    ]
    out = run(config(model, sources), tmp_path / "out")
    statistics = json.loads((out / "statistics.json").read_text())
    made = statistics["sources"]["made"]
    message = f"source made has {share} % of the training data, and its weight asks for 50 %"
    assert (message in caplog.text) == (share is not None) == (made["share"] < 0.25)
    assert "source long has" not in caplog.text


def test_training_data_consists_of_the_filtered_documents(model, corpus, tmp_path):
    """If all fit, each is there once and whole, and ends with the end-of-text token."""
    tokenizer = tiny_tokenizer()
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    texts = [text for text in texts if len(text) >= 200]
    expected = [tuple(encode(tokenizer, text).tolist()) for text in texts]
    total = sum(map(len, expected))
    filters = {"min_characters": 200}
    sources = [{"name": "mine", "kind": "text", "path": str(corpus / "*.txt"), "filters": filters}]
    out = run(config(model, sources, sequence_length=1, train_tokens=total), tmp_path / "out")
    train = load_from_disk(str(out / "train"))
    flat = [row[0] for row in train["input_ids"]]
    result, start = [], 0
    for position, token in enumerate(flat):
        if token == tokenizer.eos_token_id:
            result.append(tuple(flat[start : position + 1]))
            start = position + 1
    assert sorted(result) == sorted(expected)
    assert result != expected
    statistics = json.loads((out / "statistics.json").read_text())
    mine = statistics["sources"]["mine"]
    assert (mine["documents"], mine["left_out"], len(texts)) == (23, 7, 23)
    assert mine["tokens"] == mine["tokens_available"] == total


def test_calibration_prompts_end_before_the_value_that_they_ask_for(model, corpus, tmp_path):
    essays = corpus / "essays"
    essays.mkdir()
    (essays / "a.txt").write_text("Marmalade is made of oranges. " * 100)
    calibration = {"examples": 3, "length": 420, "max_new_tokens": 20, "essay_dir": str(essays)}
    out = run(config(model, corpus, seed=3, calibration=calibration), tmp_path / "out")
    written = json.loads((out / "statistics.json").read_text())["calibration"]
    assert (written["corpus"]["name"], written["corpus"]["words"]) == (str(essays), 500)
    tokenizer = tiny_tokenizer()
    prompts = read_prompts(out / "calibration")
    texts = [prompt.prompt + prompt.prefix for prompt in prompts]
    sizes = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert [prompt.spare for prompt in prompts] == [False] * 3 + [True] * 3
    assert [p.task for p in prompts[:3]] == ["niah_single_2", "niah_multikey_1", "niah_single_2"]
    for prompt, text, size in zip(prompts, texts, sizes, strict=True):
        (answer,) = prompt.answers
        assert text.endswith(prompt.prefix) and "Marmalade" in text
        assert prompt.prefix.endswith(" mentioned in the provided text is")
        assert f"is: {answer}." in text and answer.isdigit()
        assert 350 < size <= 400
        assert (prompt.new_tokens, prompt.length) == (20, 420)


def test_workers_change_no_byte_and_the_seed_changes_data_and_calibration_set(
    model, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenization, "BLOCK_CHARACTERS", 800)
    serial = run(config(model, corpus), tmp_path / "serial")
    parallel = run(config(model, corpus, workers=2), tmp_path / "parallel")
    other_seed = run(config(model, corpus, seed=1), tmp_path / "other_seed")
    assert file_contents(serial) == file_contents(parallel)
    names = ("train/data-00000-of-00001.arrow", "calibration/prompts.jsonl")
    assert all(file_contents(serial)[name] != file_contents(other_seed)[name] for name in names)


def test_a_killed_run_resumes_to_the_same_bytes(model, corpus, tmp_path, monkeypatch):
    """It reuses the documents that were tokenised."""
    monkeypatch.setattr(tokenization, "BLOCK_CHARACTERS", 800)
    stage_config = config(model, corpus)
    undisturbed = run(stage_config, tmp_path / "undisturbed")
    work, blocks = tokenization.tokenise_block, []

    def killed_at_third(block, **settings):
        blocks.append(block)
        if len(blocks) == 3:
            raise KeyboardInterrupt
        return work(block, **settings)

    monkeypatch.setattr(tokenization, "tokenise_block", killed_at_third)
    with pytest.raises(KeyboardInterrupt):
        run(stage_config, tmp_path / "work")
    ids = tmp_path / "work" / "tokens" / "00" / "ids.int32"
    ids.write_bytes(ids.read_bytes() + b"torn")  # written, but not yet in blocks.jsonl
    prepare.run(stage_config, {}, tmp_path / "work")
    assert blocks[3] == blocks[2] and blocks[3] not in blocks[:2]
    assert file_contents(tmp_path / "work") == file_contents(undisturbed)


def test_finished_work_is_not_repeated(model, corpus, tmp_path, monkeypatch):
    stage_config = config(model, corpus)
    out = run(stage_config, tmp_path / "out")
    monkeypatch.setattr(prepare, "write_training_data", lambda *a: pytest.fail("did it again"))
    assert prepare.run(stage_config, {}, out)["sequences"] == 47


def test_a_corpus_without_text_is_refused(model, corpus, tmp_path):
    for file in corpus.iterdir():
        file.write_text("")
    with pytest.raises(UserError, match=r"source \w+: no text is left .* 0 of 30 documents"):
        run(config(model, corpus), tmp_path / "out")


def test_a_damaged_file_is_reported_by_the_process_that_reads_it(model, corpus, tmp_path):
    (corpus / "15.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"15\.txt: not UTF-8 at byte 0"):
        run(config(model, corpus, workers=2), tmp_path / "out")
