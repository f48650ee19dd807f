"""The suites other than RULER on a tiny model: the harness on local data, loss by position."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bosch.errors import RunError, UserError
from bosch.model.loading import load_model
from bosch.progress import progress
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.answers import AnswerFolder, EvaluatedModel, ModelError
from stages.evaluate.models import evaluate_models
from stages.evaluate.scores import Scores, read_samples
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.evaluate.suites.harness import suite as harness_suite
from stages.evaluate.suites.harness import tasks as harness_tasks
from stages.evaluate.suites.harness.suite import HarnessSuite
from stages.evaluate.suites.positions import PositionEvaluation
from stages.evaluate.suites.positions.suite import (
    PositionSuite,
    documents,
    token_losses,
)
from stages.original import run as original
from tests.evaluation_case import score_original, suites_config
from tests.folders import write_jsonl
from tests.tiny_data import byte_tokenizer, save_tiny_model

QUESTIONS = [
    {"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
    for n in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suites")
    save_tiny_model(folder / "model")
    write_jsonl(folder / "data/gsm8k/train.jsonl", QUESTIONS[:6])
    write_jsonl(folder / "data/gsm8k/test.jsonl", QUESTIONS[4:])
    trec = {"context": "word " * 100, "answers": ["word"], "question": "Which?"}
    trec |= {"all_classes": ["word", "number"]}
    write_jsonl(folder / "data/longbench_trec/test.jsonl", [trec] * 3)
    (folder / "texts").mkdir()
    for index in range(3):
        (folder / f"texts/{index}.txt").write_text(f"Line {index} of a long text. " * 400)
    (folder / "texts/short.txt").write_text("short")
    return folder


def _harness(folder, *tasks, **more):
    return {"tasks": list(tasks), "data_dir": str(folder / "data"), "hub": False} | more


def test_the_harness_scores_local_data(folder, tmp_path):
    section = _harness(folder, "gsm8k", "longbench_trec", "longbench_qasper", "hellaswag")
    scores = score_original(folder, tmp_path / "first", harness=section)
    suite = scores.checkpoints["original"]["harness"]
    assert {task: by[0].samples for task, by in suite.tasks.items()} == {
        "gsm8k": 4, "longbench_trec": 3,
    }  # fmt: skip
    assert set(scores.missing["harness"]) == {"longbench_qasper", "hellaswag"}
    assert "holds no files" in scores.missing["harness"]["hellaswag"]
    answers = list(read_samples(tmp_path / "first"))
    records = [r for r in answers if r["task"] == "gsm8k"]
    assert set(records[0]["scores"]) == {
        "exact_match,strict-match", "exact_match,flexible-extract",
    }  # fmt: skip
    assert records[0]["question"].count("Question:") >= 1


def test_harness_answers_and_scores_equal_lm_evals(folder, tmp_path, monkeypatch):
    """Worked examples are drawn for all documents in order, whichever documents share a batch."""
    from lm_eval.evaluator import simple_evaluate

    section = HarnessEvaluation(**_harness(folder, "gsm8k"))
    model = load_model(folder / "model", dtype="float32")
    tokenizer = load_tokenizer(TokenizerSpec(str(folder / "model")))
    manager = harness_tasks.task_manager(["gsm8k"])
    [task] = harness_tasks.load_tasks(manager, "gsm8k", section).tasks.values()
    lm = harness_suite.language_model(model, tokenizer, 2)
    result = simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0)
    lm_evals_samples = result["samples"]["gsm8k"]
    prompts = {record["doc_id"]: record["arguments"][0][0] for record in lm_evals_samples}
    assert len(set(prompts.values())) == 4
    assert {prompt.count("Answer:") for prompt in prompts.values()} == {6}
    outputs = {
        record["doc_id"]: record["filtered_resps"][0]
        for record in lm_evals_samples
        if record["filter"] == "strict-match"
    }

    monkeypatch.setattr(harness_suite, "CHUNK", 1)
    answers = AnswerFolder(tmp_path / "answers", 0)
    records = {}
    for rank in (1, 0):
        suite = HarnessSuite(
            name="harness", section=section, tokenizer=tokenizer, answers=answers, rank=rank,
            world=2, batch_size=2,
        )  # fmt: skip
        suite.prepare()
        [subtask] = suite.subtasks
        assert {
            number: request.args[0] for number, [request] in suite.requests(subtask).items()
        } == prompts
        evaluated = EvaluatedModel("original", ModelConfig(path=str(folder / "model")))
        with progress(4, "evaluation", "samples") as bar:
            suite.run(evaluated, model, bar)
        records = answers.read(evaluated, subtask)
        assert set(records) == ({1, 3} if rank else {0, 1, 2, 3})
    assert {number: record["output"] for number, record in records.items()} == outputs


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_answers_repeat_in_a_chat_template(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(CHAT)
    section = _harness(folder, "gsm8k", "hellaswag")
    config = StageConfig(
        EvaluateConfig(
            needle={"tasks": ["niah_single_1"], "lengths": [512], "samples": 2,
                    "max_new_tokens": 4},
            harness=section,
            chat_template=True,
        ),
        ModelConfig(path=str(tmp_path / "model"), dtype="float32"),
        seed=1,
        runtime=Runtime(eval_batch_size=2),
    )  # fmt: skip
    outputs = []
    for work in (tmp_path / "first", tmp_path / "again"):
        work.mkdir()
        original.run(config, {}, work)
        scores = Scores.read(work)
        assert scores.prompts == "in the tokenizer's chat template"
        assert scores.missing["harness"].keys() == {"hellaswag"}
        records = list(read_samples(work))
        prompts = [record["question"] for record in records if record["task"] == "gsm8k"]
        assert all("</user><assistant>" in question for question in prompts) and len(prompts) == 4
        outputs.append([record["output"] for record in records])
    assert outputs[0] == outputs[1]
    tokenizer = load_tokenizer(TokenizerSpec(str(tmp_path / "model"), None, False))
    tokenizer.add_tokens("<assistant>")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"makes token 512, and the model has 512 embeddings"):
        original.run(config, {}, tmp_path)


def test_tasks_are_searched_in_folders_of_their_names_before_the_whole_index(monkeypatch):
    """For a group lm-eval must know the members, wherever they are."""
    monkeypatch.setattr(harness_tasks, "whole_index", lambda: "whole")
    names = ("gsm8k", "longproc_countdown", "no_such_folder")
    assert [harness_tasks.task_manager([name]) == "whole" for name in names] == [False, True, True]


def test_tasks_without_worked_examples_need_no_training_split(tmp_path):
    write_jsonl(tmp_path / "data/gsm8k/test.jsonl", QUESTIONS)
    manager = harness_tasks.task_manager(["gsm8k"])
    section = {"tasks": ["gsm8k"], "data_dir": str(tmp_path / "data"), "hub": False}
    lacking = harness_tasks.load_tasks(manager, "gsm8k", HarnessEvaluation(**section))
    assert "its 5 worked examples come from train.jsonl, which has" in lacking.missing["gsm8k"]
    zero = HarnessEvaluation(**section, num_fewshot=0)
    [task] = harness_tasks.load_tasks(manager, "gsm8k", zero).tasks.values()
    assert len(task.eval_docs) == len(QUESTIONS)


def _evaluate(folder, work, models, **section):
    """Scores of the original and of other models."""
    config, tokenizer = suites_config(folder, **section), TokenizerSpec(str(folder / "model"))
    configs = {"original": config.model} | {
        name: ModelConfig(path=str(path), dtype="float32") for name, path in models.items()
    }
    return evaluate_models(
        config, list(itertools.starmap(EvaluatedModel, configs.items())), tokenizer, work
    )


def _model_with_nan(place):
    model = load_model(save_tiny_model(place), dtype="float32")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    model.save_pretrained(place)
    return place


def test_a_model_that_cannot_be_evaluated_leaves_the_others_their_scores(folder, tmp_path):
    """In every suite, whether its logits are NaN or its weights cannot be loaded."""
    broken = save_tiny_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    models = {"rand": _model_with_nan(tmp_path / "nan"), "intr": broken}
    section = {
        "needle": {"tasks": ["niah_single_1"], "lengths": [300], "samples": 1, "max_new_tokens": 4},
        "positions": {"length": 300, "documents": 1, "path": str(folder / "texts")},
    }
    models["bme"] = save_tiny_model(tmp_path / "bme", seed=1)
    models["apl"] = save_tiny_model(tmp_path / "apl", seed=1)
    config = AutoConfig.from_pretrained(models["apl"])
    config.max_position_embeddings = 200
    config.save_pretrained(models["apl"])
    scores = _evaluate(folder, tmp_path / "work", models, **section)
    assert set(scores.missing["models"]) == {"rand", "intr"}
    assert scores.missing["models"]["rand"] == "its logits are no numbers (NaN)"
    assert scores.checkpoints["rand"] == scores.checkpoints["intr"] == {}
    assert scores.checkpoints["bme"]["needle"].tasks["niah_single_1"][300].samples == 1
    assert set(scores.positions) == {"original", "bme", "apl"}
    # Too long prompts in one suite leave the model its scores in the others.
    assert scores.missing["needle"].keys() == {"apl"} and scores.checkpoints["apl"] == {}
    assert "more than its 200 positions" in scores.missing["needle"]["apl"]

    def evaluate_alone(work, *names, **section):
        """Models without the original, in a folder that may hold an earlier attempt."""
        model_configs = [ModelConfig(path=str(models[name]), dtype="float32") for name in names]
        return evaluate_models(
            StageConfig(
                EvaluateConfig(**{"needle": None} | section), model_configs[0], 1, Runtime()
            ),
            list(map(EvaluatedModel, names, model_configs)),
            TokenizerSpec(str(folder / "model")),
            tmp_path / f"alone-{work}",
        )

    for suite, suite_section in section.items():
        with pytest.raises(RunError, match="rand: its logits are no numbers"):
            evaluate_alone(suite, "rand", **{suite: suite_section})
    for names, error in ((["intr"], UserError), (["intr", "rand"], RunError)):
        with pytest.raises(error, match="intr: "):
            evaluate_alone("-".join(names), *names, positions=section["positions"])
    # The weights are valid now, and the earlier attempt left no record of the fault.
    models["rand"] = models["bme"]
    mended = evaluate_alone("positions", "rand", positions=section["positions"])
    assert set(mended.positions) == {"rand"} and not mended.missing


def test_nan_logits_are_reported_for_answers_of_the_harness(folder, tmp_path):
    from lm_eval.api.instance import Instance

    loaded = load_model(_model_with_nan(tmp_path / "nan"), dtype="float32")
    tokenizer = load_tokenizer(TokenizerSpec(str(folder / "model")))
    lm = harness_suite.language_model(loaded, tokenizer, 1)
    requests = {
        "loglikelihood": ("What is 1 plus 1?", " 2"),
        "generate_until": ("What is 1 plus 1?", {"until": [], "max_gen_toks": 2}),
    }
    for kind, arguments in requests.items():
        with pytest.raises(ModelError, match="no numbers"):
            getattr(lm, kind)([Instance(kind, {}, arguments, 0, ("task", 0, 1))])


def test_loss_by_position_equals_a_plain_loop(folder, tmp_path):
    section = {"length": 1100, "documents": 2, "path": str(folder / "texts")}
    scores = score_original(folder, tmp_path / "work", positions=section)
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
    sizes = [end - first for first, end in itertools.pairwise(table.edges)]
    bins = [float(part.mean()) for part in whole.split(sizes)]
    assert record["loss"] == pytest.approx(bins, abs=1e-4)
    with pytest.raises(UserError, match="no document has 40,000 tokens"):
        score_original(folder, tmp_path / "long", positions=section | {"length": 40000})


@pytest.mark.parametrize(("requested", "count"), [(9, 3), (2, 2)])
def test_documents_are_long_enough_and_differ(tmp_path, requested, count):
    """A second copy of a document would narrow the interval without reason."""
    # A character of the last text takes three tokens.
    texts = ["a" * 300, "a" * 301, "b" * 299, "c" * 300, "\u4e2d" * 100]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    suite = PositionSuite(
        name="positions", tokenizer=byte_tokenizer(), rank=0, world=1, batch_size=1,
        section=PositionEvaluation(length=300, documents=requested, path=str(tmp_path)),
        answers=AnswerFolder(tmp_path, 0),
    )  # fmt: skip
    suite.prepare()
    assert suite.samples(suite.subtasks[0]) == count


def test_documents_of_transformers_are_long_and_do_not_begin_alike():
    """Licences and warnings, the same in many files, would count once for each file."""
    assert len(next(documents(None, 10**9))) > 100_000
    beginnings = [text[:100] for text in itertools.islice(documents(None, 100), 32)]
    assert len(set(beginnings)) == 32
    assert all(text.startswith("class ") for text in beginnings)
