"""The suites beside RULER on a tiny model: the harness on local data, loss by position."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bosch.errors import UserError
from bosch.model.loading import load_model
from bosch.progress import progress
from data_prep.tokenizer import TokenizerSpec, load_tokenizer
from stages.artifacts import Scores, read_samples
from stages.configs import EvaluateConfig, HarnessEvaluation, ModelConfig, Runtime
from stages.context import StageConfig
from stages.evaluate import harness_suite, harness_tasks
from stages.evaluate.answers import AnswerFolder, Evaluated
from stages.evaluate.harness_suite import HarnessSuite
from stages.evaluate.position_suite import edges, position_table, token_losses
from stages.evaluate.tables import not_shares
from stages.original import run as original
from tests.tiny_data import save_tiny_model

QUESTIONS = [
    {"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
    for n in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suites")
    save_tiny_model(folder / "model")
    _write(folder / "data/gsm8k/train.jsonl", QUESTIONS[:6])
    _write(folder / "data/gsm8k/test.jsonl", QUESTIONS[4:])
    common = {"context": "word " * 400, "answers": ["word"], "length": 400, "_id": "1"}
    trec = [{**common, "input": "Which?", "all_classes": ["word", "number"]}] * 3
    _write(folder / "data/longbench/trec.jsonl", trec)
    trivia = [{**common, "question": "Which?", "all_classes": None}] * 2
    _write(folder / "data/longbench/triviaqa.jsonl", trivia)
    (folder / "texts").mkdir()
    for index in range(3):
        (folder / f"texts/{index}.txt").write_text(f"Line {index} of a long text. " * 400)
    (folder / "texts/short.txt").write_text("short")
    return folder


def _write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _run(folder, work, **section):
    config = StageConfig(
        EvaluateConfig(needle=None, **section),
        ModelConfig(path=str(folder / "model"), dtype="float32"),
        seed=1,
        runtime=Runtime(eval_batch_size=2),
        shared=folder / "pool",
        model_identity="m" * 64,
    )
    work.mkdir()
    original.run(config, {}, work)
    return Scores.read(work)


def _harness(folder, *tasks, **more):
    return {"tasks": list(tasks), "data_dir": str(folder / "data"), "hub": False} | more


def test_harness_on_local_data(folder, tmp_path, monkeypatch):
    tasks = ("gsm8k", "longbench_trec", "longbench_triviaqa", "longbench_qasper", "hellaswag")
    section = _harness(folder, *tasks, max_length=300)
    scores = _run(folder, tmp_path / "first", harness=section)
    suite = scores.checkpoints["original"]["harness"]
    assert {task: by[0].samples for task, by in suite.tasks.items()} == {
        "gsm8k": 4, "longbench_trec": 3, "longbench_triviaqa": 2,
    }  # fmt: skip
    assert set(scores.missing["harness"]) == {"longbench_qasper", "hellaswag"}
    assert "holds no files" in scores.missing["harness"]["hellaswag"]
    group = suite.groups["LongBench"]
    assert (group.tasks, group.of) == (["longbench_trec", "longbench_triviaqa"], 21)
    records = [r for r in read_samples(tmp_path / "first") if r["task"] == "gsm8k"]
    assert set(records[0]["scores"]) == {
        "exact_match,strict-match", "exact_match,flexible-extract",
    }  # fmt: skip
    assert records[0]["question"].count("Question:") >= 1

    # All of it is in the pool: another run asks nothing.
    monkeypatch.setattr("stages.evaluate.models.load_evaluated", lambda *_: pytest.fail("loaded"))
    again = _run(folder, tmp_path / "again", harness=section)
    assert again.checkpoints == scores.checkpoints


def test_harness_asks_and_scores_as_lm_eval_alone(folder, tmp_path, monkeypatch):
    """Worked examples are drawn for all documents in order, whichever are asked together."""
    from lm_eval.evaluator import simple_evaluate

    section = HarnessEvaluation(**_harness(folder, "gsm8k"))
    model = load_model(folder / "model", dtype="float32")
    tokenizer = load_tokenizer(TokenizerSpec(str(folder / "model")))
    manager = harness_tasks.task_manager(["gsm8k"])
    [task] = harness_tasks.load_tasks(manager, "gsm8k", section).tasks.values()
    lm = harness_suite.language_model(model, tokenizer, 2)
    alone = simple_evaluate(lm, tasks=[task], bootstrap_iters=0)["samples"]["gsm8k"]
    prompts = {one["doc_id"]: one["arguments"][0][0] for one in alone}
    assert len(set(prompts.values())) == 4
    assert {prompt.count("Answer:") for prompt in prompts.values()} == {6}
    outputs = {
        one["doc_id"]: one["filtered_resps"][0] for one in alone if one["filter"] == "strict-match"
    }

    monkeypatch.setattr(harness_suite, "CHUNK", 1)
    answers = AnswerFolder(tmp_path / "answers", None, 0)
    found = {}
    for rank in (1, 0):
        suite = HarnessSuite(section, tokenizer, answers, rank, 2, 2)
        suite.prepare()
        [subtask] = suite.subtasks
        assert {
            number: request.args[0] for number, [request] in suite.requests(subtask).items()
        } == prompts
        evaluated = Evaluated("original", ModelConfig(path=str(folder / "model")))
        with progress(4, "evaluation", "samples") as bar:
            suite.run(evaluated, model, bar)
        found = answers.read(evaluated, subtask)
        assert set(found) == ({1, 3} if rank else {0, 1, 2, 3})
    assert {number: record["output"] for number, record in found.items()} == outputs


def test_harness_refuses_unknown_tasks(folder, tmp_path, monkeypatch):
    small = harness_tasks.task_manager(["gsm8k"])
    monkeypatch.setattr(harness_tasks, "whole_index", lambda: small)
    with pytest.raises(UserError, match="lm-eval knows no task gsm9k"):
        _run(folder, tmp_path / "work", harness=_harness(folder, "gsm9k"))


def test_damaged_data_is_missing_and_not_zero(folder, tmp_path):
    broken = tmp_path / "data/longbench/trec.jsonl"
    _write(broken, QUESTIONS[:1])
    broken.write_text(broken.read_text() + "{")
    section = {"tasks": ["longbench_trec"], "data_dir": str(tmp_path / "data"), "hub": False}
    scores = _run(folder, tmp_path / "work", harness=section)
    assert scores.checkpoints["original"] == {}
    assert "line 2: not JSON" in scores.missing["harness"]["longbench_trec"]


def test_tasks_without_worked_examples_need_no_training_split(folder, tmp_path):
    _write(tmp_path / "data/gsm8k/test.jsonl", QUESTIONS)
    manager = harness_tasks.task_manager(["gsm8k"])
    section = {"tasks": ["gsm8k"], "data_dir": str(tmp_path / "data"), "hub": False}
    lacking = harness_tasks.load_tasks(manager, "gsm8k", HarnessEvaluation(**section))
    assert "its 5 worked examples come from train.jsonl, which has" in lacking.missing["gsm8k"]
    zero = HarnessEvaluation(**section, num_fewshot=0)
    [task] = harness_tasks.load_tasks(manager, "gsm8k", zero).tasks.values()
    assert len(task.eval_docs) == len(QUESTIONS)


def test_a_score_that_is_no_share_is_missing():
    logged = {
        "filter": "none", "metrics": ["rouge1"], "rouge1": 31.0, "target": "", "filtered_resps": [],
        "arguments": [[""]],
    }  # fmt: skip
    record = harness_suite.record_of(0, [logged], {"rouge1"})
    reasons = not_shares({("task", 0): [record["score"], 0.5], ("other", 0): [1.0]})
    assert reasons == {"task": "its score is no share of 1 per document"}


def test_loss_by_position(folder, tmp_path):
    section = {"length": 1100, "documents": 2, "path": str(folder / "texts")}
    scores = _run(folder, tmp_path / "work", positions=section)
    table = scores.positions["original"]
    assert table.edges == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1100]
    assert table.documents == 2 and len(table.loss) == 11
    model = load_model(folder / "model", dtype="float32")
    from transformers import AutoTokenizer

    text = (folder / "texts/0.txt").read_text()
    ids = AutoTokenizer.from_pretrained(folder / "model")(text)["input_ids"][:1100]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    whole = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    losses = token_losses(model, np.asarray(ids, np.int32))
    np.testing.assert_allclose(losses, whole.numpy(), atol=1e-4)
    [record] = [r for r in read_samples(tmp_path / "work") if r["index"] == 0]
    assert record["loss"][-1] == pytest.approx(float(whole[1023:].mean()), abs=1e-4)
    with pytest.raises(UserError, match="no document has 40,000 tokens"):
        _run(folder, tmp_path / "long", positions=section | {"length": 40000})


def test_position_table_compares_documents_in_pairs():
    answers, base = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [3.0, 3.0]]
    table = position_table(3, answers, base)
    assert table["edges"] == edges(3) == [1, 2, 3]
    assert table["difference"][1] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert table["loss"][0]["mean"] == 2.0 and table["loss"][0]["low"] < 2.0
