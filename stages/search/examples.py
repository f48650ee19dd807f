"""The calibration set: prepare's prompts with the original model's own right answers."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import exists, write_text
from bosch.progress import progress
from bosch.ranks import Ranks
from bosch.score.batches import check_vocabulary
from bosch.score.calibration import CalibrationSet
from data_prep.documents.calibration import Prompt, read_prompts
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.needles import string_match
from stages.context import StageConfig
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from stages.prepare.stage import CALIBRATION, TOKENIZER
from stages.search.stage import EXAMPLES, SearchConfig

logger = logging.getLogger(__name__)

# With fewer examples, or less than this share of those asked for, masks cannot be told apart.
_FEWEST, _FEWEST_SHARE = 4, 0.25


def calibration_set(
    config: StageConfig[SearchConfig], prepared: Path, work_dir: Path, model: Any, ranks: Ranks
) -> tuple[CalibrationSet, list[str]]:
    """The calibration set, and notes about it; called on every rank.

    It is read from calibration.jsonl in `work_dir`. If that is absent, the `model`, which has full
    attention, answers the prompts in `prepared`, and the first rank writes the file. Raises
    UserError as `answered`.
    """
    path, prompts = work_dir / EXAMPLES, read_prompts(prepared / CALIBRATION)
    if not ranks.from_first(exists(path)):
        tokenizer = load_tokenizer(
            TokenizerSpec(str(prepared / TOKENIZER), None, config.model.trust_remote_code)
        )
        chat, rows = config.section.chat or ChatConfig(), config.runtime.eval_batch_size
        records = answered(LanguageModel(model, tokenizer, chat, rows), prompts, ranks)
        if ranks.is_first:
            write_text(path, "".join(json.dumps(record) + "\n" for record in records))
    calibration = ranks.from_first(CalibrationSet.load(path) if ranks.is_first else None)
    assert calibration is not None
    wanted = sum(not prompt.spare for prompt in prompts)
    if len(calibration) == wanted:
        return calibration, []
    return calibration, [
        f"the calibration set has {len(calibration)} of {wanted} examples: the model answered only "
        f"these of {len(prompts)} prompts right"
    ]


def answered(
    lm: LanguageModel, prompts: Sequence[Prompt], ranks: Ranks | None = None
) -> list[dict[str, Any]]:
    """Examples of the prompts that the model answers right, as the evaluation asks and scores them.

    An example ends with the model's own greedy answer, up to the token that makes it right. There
    are as many examples as prompts that are not spare, if so many answers are right. Called on
    every rank. Raises UserError, with the tasks that fail, if too few are right.
    """
    wanted = [prompt for prompt in prompts if not prompt.spare]
    spare = [prompt for prompt in prompts if prompt.spare]
    ranks, asked, right = ranks or Ranks(), list[Prompt](), list[dict[str, Any]]()
    for part in (wanted, spare):
        if len(right) < len(wanted):
            own = _answers(lm, part[ranks.rank :: ranks.size])
            numbers = range(ranks.rank, len(part), ranks.size)
            records = dict(ranks.gather(list(zip(numbers, own, strict=True))))
            right += [record for _, record in sorted(records.items()) if record is not None]
            asked += part
    _check(right, asked, len(wanted))
    return right[: len(wanted)]


def _answers(lm: LanguageModel, prompts: Sequence[Prompt]) -> list[dict[str, Any] | None]:
    """The example of each prompt; None if the answer is wrong."""
    records: list[dict[str, Any] | None] = [None] * len(prompts)
    texts = [lm.prompt(prompt.prompt, prompt.prefix) for prompt in prompts]
    if texts:
        embeddings = len(lm.model.get_input_embeddings().weight)
        check_vocabulary(map(lm.tok_encode, texts), embeddings)
    with progress(len(prompts), "answers of the original model", "answers") as bar:
        for new_tokens in sorted({prompt.new_tokens for prompt in prompts}):
            asked = {
                index: (texts[index], prompt.answers)
                for index, prompt in enumerate(prompts)
                if prompt.new_tokens == new_tokens
            }
            for index, prompt_ids, answer in lm.answer_ids(asked, new_tokens):
                length = _right_length(lm, answer, prompts[index].answers)
                if length is not None:
                    ids = [*prompt_ids, *answer[:length]]
                    task = prompts[index].task
                    records[index] = {"task": task, "input_ids": ids, "answer_length": length}
                bar.update()
    return records


def _right_length(lm: LanguageModel, answer: list[int], answers: Sequence[str]) -> int | None:
    """Tokens after which the evaluation stops an answer because it is right; None if it is not.

    In a batch of a model without end tokens a row goes on until the last one has stopped.
    """
    for length in range(1, len(answer) + 1):
        if string_match(lm.tok_decode(answer[:length]) or "", answers) == 1.0:
            return length
    return None


def _check(right: Sequence[dict[str, Any]], asked: Sequence[Prompt], wanted: int) -> None:
    """Log how many answers are right; raise UserError if they are too few."""
    counts, total = Counter(record["task"] for record in right), Counter(p.task for p in asked)
    length = max(prompt.length for prompt in asked)
    tasks = ", ".join(f"{counts[task]} of {number} in {task}" for task, number in total.items())
    answers = f"the original model answers {tasks} right, at {length:,} tokens"
    logger.info("calibration: %s", answers)
    if len(right) < max(min(_FEWEST, wanted), _FEWEST_SHARE * wanted):
        raise UserError(
            f"search: {answers}: too few to tell masks apart; lower prepare.calibration.length, "
            "choose other prepare.calibration.tasks, ask an instruct model in its chat template "
            "(evaluate.apply_chat_template), or use a model that can retrieve"
        )
