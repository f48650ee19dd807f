"""Small models, tasks and configurations of evaluations in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from bosch.model.loading import load_model
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.answers import AnswerLog
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from stages.evaluate.models import process_state
from stages.evaluate.scores import Scores
from stages.evaluate.stage import EvaluateConfig
from stages.original import run as original
from tests.folders import write_jsonl
from tests.tiny_data import tiny_tokenizer

# One task of a user: questions with an answer and choices.
QUESTION = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}}}
training_split: train
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 2
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 6, do_sample: false}}
process_results: !function utils.score
metric_list: [{{metric: score, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """\
include: sums.yaml
task: choice
output_type: multiple_choice
doc_to_choice: ["four", "six of them", "ten"]
doc_to_target: 1
num_fewshot: 0
generation_kwargs: null
process_results: null
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GROUP = """\
group: both
task: [choice, sums]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""
# The share of the output's letters e: any random model has some.
SCORE = """\
def score(doc, results):
    return {"score": min(1.0, results[0].count("e") / 5)}
"""


def write_tasks(folder: Path) -> Path:
    """A folder with the tasks sums (generated, two worked examples), choice, and both."""
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"{2 * n}"} for n in range(10)]
    write_jsonl(folder / "train.jsonl", rows[5:])
    write_jsonl(folder / "test.jsonl", rows[:5])
    (folder / "sums.yaml").write_text(QUESTION.format(folder=folder))
    (folder / "choice.yaml").write_text(CHOICE)
    (folder / "both.yaml").write_text(GROUP)
    (folder / "utils.py").write_text(SCORE)
    return folder


def evaluation(folder: Path, **section: Any) -> StageConfig[EvaluateConfig]:
    """The evaluation of `folder`/model."""
    return StageConfig(
        EvaluateConfig(**{"tasks": []} | section),
        ModelConfig(path=str(folder / "model"), dtype="float32"),
        seed=1,
        runtime=Runtime(eval_batch_size=2),
    )


def score_original(folder: Path, work: Path, **section: Any) -> Scores:
    """Scores of the original model; `work` becomes the stage's output."""
    work.mkdir(exist_ok=True)
    original.run(evaluation(folder, **section), {}, work)
    return Scores.read(work)


def language_model(
    model: Any, work: Path | None = None, tokenizer: Any = None, rows: int = 1, **chat: Any
) -> LanguageModel:
    """A loaded model, or that of a folder, with a log of answers in `work`."""
    loaded = load_model(model, dtype="float32") if isinstance(model, Path) else model
    log = AnswerLog(work, process_state(Runtime())) if work is not None else None
    settings = ChatConfig(**chat)
    return LanguageModel(loaded, tokenizer or tiny_tokenizer(), settings, rows, log)


def generated(
    lm: LanguageModel,
    prompts: Sequence[str],
    tokens: int,
    answers: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Outputs of up to so many tokens; as a question of RULER if there are `answers`."""
    options = {"until": [], "max_gen_toks": tokens, "do_sample": False} | options
    doc = {"needles": [], "answers": list(answers)} if answers else {}
    return lm.generate_until(
        [
            Instance("generate_until", doc, (prompt, options), 0, ("task", number, 1))
            for number, prompt in enumerate(prompts)
        ]
    )
