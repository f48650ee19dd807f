"""The evaluate stage on a tiny model: scores, what is missing, resuming, several processes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import GenerationConfig

from bosch.errors import LostRankError, RunError, UserError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.documents.tokenizer import TokenizerSpec
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate import models
from stages.evaluate import run as evaluate
from stages.evaluate.answers import AnswerLog
from stages.evaluate.models import EvaluatedModel, evaluate_models
from stages.evaluate.positions import documents, long_documents, token_losses
from stages.evaluate.scores import Scores, read_samples
from stages.evaluate.stage import EvaluateConfig, PositionConfig
from stages.evaluate.vllm import own_gpu
from stages.original import run as original
from stages.prepare import run as prepare
from stages.prepare.stage import PrepareConfig
from stages.train.stage import TrainingSummary
from tests.evaluation_case import evaluation, score_original, write_tasks
from tests.rank_processes import on_ranks
from tests.tiny_data import byte_tokenizer, save_tiny_model, tiny_tokenizer

NAMES = ["original", "hybrid", "tokens-900", "tokens-1000"]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its prepared data, a user's tasks, and checkpoints of other weights."""
    folder = tmp_path_factory.mktemp("evaluate")
    model = save_tiny_model(folder / "model")
    prepared = PrepareConfig(
        sequence_length=128,
        train_tokens=128,
        sources=[{"name": "library", "kind": "python_docs"}],
        calibration={"examples": 2, "length": 512},
    )
    (folder / "prepare").mkdir()
    config = StageConfig(prepared, evaluation(folder).model, seed=5, runtime=Runtime())
    prepare.run(config, {}, folder / "prepare")
    for tokens in (1000, 900):
        save_tiny_model(folder / "train" / "checkpoints" / f"tokens-{tokens}", seed=tokens)
    TrainingSummary(
        final_loss=1.0, tokens=1000, steps=2, seconds=1.0, processes=1, sharding="none",
        checkpoints={"tokens-900": 1, "tokens-1000": 2},
    ).write(folder / "train")  # fmt: skip
    mask = HeadMask(((32, 32), (0, 32)), 1)
    hybrid = materialize(load_model(model, dtype="float32"), mask)
    hybrid.save_pretrained(folder / "materialize" / "model")
    HeadMaskFile(mask, "model", "bosch").save(folder / "materialize" / "model" / "head_mask.json")
    (folder / "own").mkdir()
    write_tasks(folder / "own")
    (folder / "texts").mkdir()
    for index in range(3):
        (folder / f"texts/{index}.txt").write_text(f"Line {index} of a long text. " * 400)
    (folder / "texts/short.txt").write_text("short")
    (folder / "original").mkdir()
    original.run(configured(folder), {}, folder / "original")
    return folder


def configured(folder: Path) -> StageConfig[EvaluateConfig]:
    return evaluation(
        folder,
        tasks=["niah_single_1", "both"],
        include_path=[str(folder / "own")],
        ruler={"lengths": [400, 512], "samples": 3, "max_new_tokens": 4},
        positions={"length": 300, "documents": 2, "path": str(folder / "texts")},
    )


def inputs(folder: Path) -> dict[str, Path]:
    names = ("prepare", "materialize", "train", "original")
    return {name: folder / name for name in names}


@pytest.fixture(scope="module")
def evaluated(stages: Path) -> tuple[dict[str, Any], Path]:
    work = stages / "evaluate"
    work.mkdir()
    return evaluate.run(configured(stages), inputs(stages), work), work


def test_scores_have_the_documented_form(
    stages: Path, evaluated: tuple[dict[str, Any], Path]
) -> None:
    summary, work = evaluated
    scores = json.loads((work / "scores.json").read_text())
    assert list(scores["checkpoints"]) == [*scores["positions"]] == NAMES
    assert scores["corpus"]["name"].startswith("pydoc topics") and scores["prompts"] == "raw"
    for name, suites in scores["checkpoints"].items():
        table = suites["ruler"]
        compared = ["against_original"] if name != "original" else []
        assert set(table) == {
            "average", "low", "high", "niah_single_1", "by_length", *compared,
        }  # fmt: skip
        assert table["low"] < table["high"]
        assert table["niah_single_1"]["400"]["samples"] == 3
        assert set(table["by_length"]) == {"400", "512"}
        assert summary[name]["ruler"] == table["average"]
        assert suites["lm_eval"]["sums"]["0"]["samples"] == 5
        assert suites["lm_eval"]["groups"]["both"]["tasks"] == ["choice"]
    first = Scores.read(stages / "original")
    assert list(first.checkpoints) == ["original"]
    assert Scores.read(work).checkpoints["original"] == first.checkpoints["original"]
    lines = [*read_samples(stages / "original"), *read_samples(work)]
    keys = {(r["checkpoint"], r["suite"], r["task"], r["length"], r["index"]) for r in lines}
    assert len(keys) == len(lines) == 4 * (2 * 3 + 2 * 5 + 2)
    # No two models answer alike.
    outputs = {tuple(r["output"] for r in lines if r["checkpoint"] == n and "output" in r)
               for n in NAMES}  # fmt: skip
    assert len(outputs) == 4 and not (work / "answers").exists()


@pytest.mark.parametrize("killed_at", [4, 31])
def test_a_killed_run_resumes_to_the_same_bytes(
    killed_at: int, stages: Path, evaluated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of RULER, and among the choices of the second model; no answer is made again."""
    stored: list[tuple[Path, str]] = []
    add, killed = AnswerLog.add, tmp_path / "killed"

    def counted(self: AnswerLog, key: str, answer: Any, keep: bool = True) -> None:
        if keep and len(stored) == killed_at and not killed.exists():
            raise KeyboardInterrupt
        add(self, key, answer, keep)
        stored.extend([(self.folder, key)] * keep)

    monkeypatch.setattr(AnswerLog, "add", counted)
    config, work = configured(stages), tmp_path / "work"
    work.mkdir()
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(config, inputs(stages), work)
    killed.touch()
    evaluate.run(config, inputs(stages), work)
    # Of each model: six questions, five sums, fifteen choices, two documents.
    assert len(stored) == len({*stored}) == 3 * (6 + 5 + 15 + 2)
    for name in ("scores.json", "samples.jsonl"):
        assert (work / name).read_bytes() == (evaluated[1] / name).read_bytes()


def score_on_ranks(folder: str, work: str) -> None:
    """Scores on the ranks of a gloo group; prints how many answers this rank made."""
    stored: list[str] = []
    add = AnswerLog.add

    def counted(self: AnswerLog, key: str, answer: Any, keep: bool = True) -> None:
        add(self, key, answer, keep)
        stored.extend([key] * keep)

    AnswerLog.add = counted  # type: ignore[method-assign]
    evaluate.run(configured(Path(folder)), inputs(Path(folder)), Path(work))
    print(f"answered {len(stored)}\n", flush=True)


def test_two_processes_share_the_samples_and_score_as_one(
    stages: Path, evaluated: Any, tmp_path: Path
) -> None:
    """lm-eval takes a model that is passed as an object for one process."""
    said = on_ranks(2, f"{__name__}:score_on_ranks", str(stages), str(tmp_path))
    counts = [int(line.split()[1]) for line in said.splitlines() if line.startswith("answered")]
    assert sum(counts) == 3 * (6 + 5 + 15 + 2) and abs(counts[0] - counts[1]) <= 21
    ours = [[json.loads(line) for line in (work / "samples.jsonl").open()] for work in
            (tmp_path, evaluated[1])]  # fmt: skip
    for one, other in zip(*ours, strict=True):
        assert one.pop("loss", []) == pytest.approx(other.pop("loss", []))
        assert one == other


def test_a_lost_rank_is_reported(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FirstOfTwo:
        is_main_process, process_index, num_processes = True, 0, 2
        device = torch.device("cpu")

        def wait_for_everyone(self) -> None:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1. GLHF!")

    monkeypatch.setattr(models, "process_state", lambda _: FirstOfTwo())
    monkeypatch.setattr("bosch.ranks.dist.is_initialized", lambda: True)
    with pytest.raises(LostRankError, match="another process of this run does not answer"):
        evaluate.run(configured(stages), inputs(stages), tmp_path)


def test_finished_work_loads_no_model(
    stages: Path, evaluated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load_evaluated", lambda *args: pytest.fail("loaded a model"))
    assert evaluate.run(configured(stages), inputs(stages), evaluated[1]) == evaluated[0]


def test_samples_are_checked_against_the_calibration_set(
    stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(needles: Any, *sample: Any) -> None:
        assert needles.pairs and needles.prompts
        raise RunError("shares a needle")

    monkeypatch.setattr(CalibrationNeedles, "check", refuse)
    with pytest.raises(RunError, match="shares a needle"):
        evaluate.run(configured(stages), inputs(stages), tmp_path)


def test_a_hybrid_has_the_recipes_backend(stages: Path) -> None:
    config = configured(stages)
    config = StageConfig(config.section, config.model, 1, Runtime(attention="eager"))
    place = ModelConfig(path=str(stages / "materialize/model"), dtype="float32")
    model = models.load_evaluated(config, EvaluatedModel("hybrid", place), torch.device("cpu"))
    model(torch.ones(1, 2, dtype=int), output_attentions=True)  # refused unless eager


@pytest.mark.parametrize(("before", "seen"), [(None, "1"), ("4,6", "6")])
def test_an_engine_sees_only_the_gpu_of_its_rank(monkeypatch, before, seen) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with own_gpu(2):
        assert os.environ[name] == seen
    assert os.environ.get(name) == before


class FakeVLLM(HFLM):  # type: ignore[misc]
    """Takes vLLM's arguments, and asks for its token lists; answers are transformers'."""

    def __init__(self, pretrained: str, dtype: str, **options: Any) -> None:
        engine = {name: options.pop(name) for name in ("enforce_eager", "tensor_parallel_size")}
        assert engine == {"enforce_eager": True, "tensor_parallel_size": 1}
        assert options.pop("tokenizer_revision") is None
        model = load_model(pretrained, dtype=dtype)
        model.generation_config = GenerationConfig(eos_token_id=model.config.eos_token_id)
        super().__init__(pretrained=model, batch_size=2, **options)
        model.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def tok_batch_encode(self, strings: list[str], **options: Any) -> Any:
        rows = self.tok_encode(tuple(strings))
        assert rows == [tiny_tokenizer()(string)["input_ids"] for string in strings]
        return super().tok_batch_encode(strings, **options)


def test_vllm_answers_the_same_tasks_into_the_same_files(
    stages: Path, evaluated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's class of that name is asked; the loss by position stays transformers'."""
    monkeypatch.setattr("stages.evaluate.vllm.get_model", {"vllm": FakeVLLM}.__getitem__)
    config = configured(stages)
    section = config.section.model_copy(update={"engine": "vllm"})
    evaluate.run(replace(config, section=section), inputs(stages), tmp_path)
    ours, plain = ([json.loads(line) for line in (work / "samples.jsonl").open()] for work in
                   (tmp_path, evaluated[1]))  # fmt: skip
    assert ours == plain
    # A prompt of RULER and its answer: no token is left for vLLM.
    monkeypatch.setattr(FakeVLLM, "max_length", 403)
    with pytest.raises(RunError, match="more than its 403 positions"):
        evaluate.run(replace(config, section=section), inputs(stages), tmp_path / "short")


def test_other_models_are_scored_with_the_original_by_their_own_tokenizer(
    stages: Path, tmp_path: Path
) -> None:
    """As if they were the original themselves; every branch reads their scores."""
    rival = save_tiny_model(tmp_path / "rival/model", seed=3)
    byte_tokenizer().save_pretrained(rival)
    config = configured(stages)
    section = config.section.model_copy(update={"models": {"rival": str(rival)}})
    config = replace(config, section=section)
    work, alone = tmp_path / "original", tmp_path / "alone"
    for folder in (work, alone, tmp_path / "evaluate"):
        folder.mkdir()
    original.run(config, {}, work)
    records = [record for record in read_samples(work) if record["checkpoint"] == "rival"]
    # RULER's lengths would be the rival's tokens.
    plain = configured(stages).section.model_copy(update={"positions": None, "tasks": ["both"]})
    model = config.model.model_copy(update={"path": str(rival)})
    original.run(replace(config, model=model, section=plain), {}, alone)
    own = [{**record, "checkpoint": "rival"} for record in read_samples(alone)]
    assert [record for record in records if record["suite"] == "lm_eval"] == own
    assert {record["suite"] for record in records} == {"ruler", "lm_eval"}
    evaluate.run(config, inputs(stages) | {"original": work}, tmp_path / "evaluate")
    scores = Scores.read(tmp_path / "evaluate")
    assert list(scores.checkpoints) == ["original", "rival", *NAMES[1:]] and not scores.missing
    assert [*scores.positions] == NAMES
    assert scores.checkpoints["rival"]["lm_eval"].against_original is not None


def test_answers_repeat_in_a_chat_template(stages: Path, tmp_path: Path) -> None:
    shutil.copytree(stages / "model", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    section = {"tasks": ["sums", "niah_single_1"], "include_path": [str(stages / "own")]}
    section |= {"ruler": {"lengths": [512], "samples": 2, "max_new_tokens": 4}}
    outputs = []
    for work in (tmp_path / "first", tmp_path / "again"):
        scores = score_original(tmp_path, work, apply_chat_template=True, **section)
        assert scores.prompts == "in the tokenizer's chat template"
        records = list(read_samples(work))
        prompts = [record["question"] for record in records]
        assert all("</user><assistant>" in question for question in prompts)
        assert prompts[0].endswith("mentioned in the provided text is")  # RULER's
        assert prompts[-1].endswith("<assistant>")
        outputs.append([record["output"] for record in records])
    assert outputs[0] == outputs[1]
    raw = score_original(tmp_path, tmp_path / "raw", **section)
    assert raw.prompts == "raw; the tokenizer's chat template is not applied"


def test_a_model_that_cannot_be_evaluated_leaves_the_others_their_scores(
    stages: Path, tmp_path: Path
) -> None:
    """Whether its logits are NaN or its weights cannot be loaded."""
    broken, odd = (save_tiny_model(tmp_path / name) for name in ("broken", "odd"))
    (broken / "model.safetensors").write_bytes(b"no weights")
    model = load_model(odd, dtype="float32")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(odd)
    config, tokenizer = configured(stages), TokenizerSpec(str(stages / "model"))

    def scores(work: str, **places: Path) -> Scores:
        every = [
            EvaluatedModel(name.replace("_", "-"), ModelConfig(path=str(path), dtype="float32"))
            for name, path in places.items()
        ]
        (tmp_path / work).mkdir(exist_ok=True)
        return evaluate_models(config, every, tokenizer, tmp_path / work)

    found = scores("work", hybrid=stages / "model", tokens_1=odd, tokens_2=broken)
    assert set(found.missing["models"]) == {"tokens-1", "tokens-2"}
    assert found.missing["models"]["tokens-1"] == "its logits are no numbers (NaN)"
    assert found.checkpoints["tokens-1"] == found.checkpoints["tokens-2"] == {}
    assert found.checkpoints["hybrid"]["ruler"].samples == 6 and set(found.positions) == {"hybrid"}
    with pytest.raises(UserError, match="tokens-2: "):
        scores("broken", tokens_2=broken)
    with pytest.raises(RunError, match="tokens-1: its logits are no numbers"):
        scores("odd", tokens_1=odd)
    # The weights are valid now, and the earlier attempt left no record of the fault.
    assert not scores("odd", tokens_1=stages / "model").missing


def test_loss_by_position_equals_a_plain_loop(stages: Path, tmp_path: Path) -> None:
    section = {"length": 1100, "documents": 2, "path": str(stages / "texts")}
    table = score_original(stages, tmp_path, positions=section).positions["original"]
    assert table.edges == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1100]
    assert table.documents == 2 and len(table.loss) == 11
    model = load_model(stages / "model", dtype="float32")
    ids = tiny_tokenizer()((stages / "texts/0.txt").read_text())["input_ids"][:1100]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    whole = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    losses = token_losses(model, np.asarray(ids, np.int32))
    np.testing.assert_allclose(losses, whole.numpy(), atol=1e-4)
    record = next(read_samples(tmp_path))
    sizes = [end - first for first, end in itertools.pairwise(table.edges)]
    bins = [float(part.mean()) for part in whole.split(sizes)]
    assert record["loss"] == pytest.approx(bins, abs=1e-4)
    with pytest.raises(UserError, match="no document has 40,000 tokens"):
        score_original(stages, tmp_path / "long", positions=section | {"length": 40000})


@pytest.mark.parametrize(("requested", "count"), [(9, 3), (2, 2)])
def test_documents_are_long_enough_and_differ(tmp_path: Path, requested: int, count: int) -> None:
    """A second copy of a document would narrow the interval without reason."""
    # A character of the last text takes three tokens.
    texts = ["a" * 300, "a" * 301, "b" * 299, "c" * 300, "\u4e2d" * 100]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    section = PositionConfig(length=300, documents=requested, path=str(tmp_path))
    assert len(long_documents(section, byte_tokenizer())) == count


def test_documents_of_transformers_are_long_and_do_not_begin_alike() -> None:
    """Licences and warnings, the same in many files, would count once for each file."""
    assert len(next(documents(None, 10**9))) > 100_000
    beginnings = [text[:100] for text in itertools.islice(documents(None, 100), 32)]
    assert len(set(beginnings)) == 32
    assert all(text.startswith("class ") for text in beginnings)
