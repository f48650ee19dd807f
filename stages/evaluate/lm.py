"""A loaded model for lm-eval: `hf` with a log of answers, exact prompts, and requests spread over
the processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import torch
from lm_eval.api.model import hash_args
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
)

from bosch.model.families import max_positions, rope_depends_on_length
from bosch.progress import Progress
from data_prep.tasks.needles import string_match
from data_prep.tasks.tables import ANY_ANSWER
from data_prep.text import encode_answer, encode_prompt
from stages.evaluate.answers import AnswerLog, ModelError
from stages.evaluate.chat import ChatConfig

logger = logging.getLogger(__name__)
# Its remarks on loaded models, one process and cut prompts do not hold here.
logging.getLogger("lm_eval").setLevel(logging.ERROR)

_NAN_LOGITS = "its logits are no numbers (NaN)"
_NO_LIMIT = 2**31
_DATE = datetime(2024, 7, 26)


class LoggedAnswers:
    """Part of a model of lm-eval: answers come from a log, or are added to it by one of the ranks.

    Prompts have one BOS, whether from the tokenizer or a template, and no closing token.
    """

    log: AnswerLog | None = None
    progress: Progress | None = None
    note = ""
    spare = 1  # tokens of a text and its continuation beyond `max_length`: the last is no input
    tokenizer: Any
    max_length: int

    def __init__(self, **options: Any) -> None:
        # By prompt of own tasks: the answers to look for, and whether one is enough.
        self._rows: dict[str, tuple[list[str], bool]] = {}
        self._cut = set[int]()  # hashes of prompts
        self._first_tokens: list[int] | None = None
        super().__init__(**options)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: Any,
    ) -> list[int]:
        bos = self.tokenizer.bos_token
        has_bos = bool(bos) and string.startswith(bos)
        is_plain = add_special_tokens is False or (add_special_tokens is None and has_bos)
        ids = (encode_answer if is_plain else encode_prompt)(self.tokenizer, string)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        # Only the project's own tasks have needles; None: the whole output counts.
        self._rows = {}
        own = [request for request in requests if "needles" in request.doc]
        for one in own:
            answers = [] if one.doc["needles"] is None else one.doc["answers"]
            self._rows[one.args[0]] = answers, one.task_name in ANY_ANSWER
        return self._answers("generate_until", requests)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Any]:
        return self._answers("loglikelihood", requests)

    def _answers(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        """Answers to all requests; those that are not in the log are asked, each by one rank."""
        assert self.log is not None
        keys = [hash_args(kind, request.args) for request in requests]
        for number, request in enumerate(requests):
            # Repeats of a sampled request have different answers, which no log holds.
            if kind == "generate_until" and request.args[1].get("do_sample"):
                keys[number] += f"-{number}"
        if self.progress is not None and self.progress.total is not None:
            # It counted documents, of which each may make several requests.
            self.progress.total += len(requests) - len({one.doc_id for one in requests})
        every = dict(zip(keys, requests, strict=True))
        fresh = {key: one for key, one in every.items() if key not in self.log.known}
        # Choices of one document share a pass.
        documents = {*self.log.share(list(dict.fromkeys(one.doc_id for one in fresh.values())))}
        asked = {key: one for key, one in fresh.items() if one.doc_id in documents}
        with self.log.shared():
            answers = self.computed(kind, [*asked.values()]) if asked else []
            for (key, request), answer in zip(asked.items(), answers, strict=True):
                self.log.add(key, self._entry(request.args, answer), keep=False)
        cut = [one for key, one in every.items() if self.log.known[key].get("cut")]
        self._cut |= {hash(one.args[0]) for one in cut}
        if self.progress is not None:
            self.progress.update(len(requests) - len(asked), free=True)
        return [self.log.known[key]["answer"] for key in keys]

    def computed(self, kind: str, requests: list[Any]) -> list[Any]:
        """The model's answers."""
        answers: list[Any] = getattr(super(), kind)(requests, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Any], **options: Any) -> Any:
        for texts, context, choice in requests:
            self.note_length(texts[0], len(context) + len(choice), self.max_length + self.spare)
        if requests:
            self.note_first(requests[0][1])
        return super()._loglikelihood_tokens(requests, **options)  # type: ignore[misc]

    def note_length(self, prompt: str, tokens: int, most: int) -> None:
        """Note a prompt that loses its beginning; those of own tasks are refused."""
        if tokens > most and prompt in self._rows:
            raise ModelError(
                f"a prompt of {tokens:,} tokens and its answer are more than its "
                f"{self.max_length:,} positions"
            )
        if tokens > most:
            self._cut.add(hash(prompt))

    def add_partial(self, kind: str, arguments: Sequence[Any], answer: Any) -> None:
        """Keep an answer; `hf` calls this for each one."""
        if isinstance(answer, tuple) and not math.isfinite(answer[0]):
            raise ModelError(_NAN_LOGITS)
        sampled = kind == "generate_until" and arguments[1].get("do_sample")
        if self.log is not None and not sampled:
            self.log.add(hash_args(kind, arguments), self._entry(arguments, answer))
        if self.progress is not None:
            self.progress.update(note=self.note)

    def _entry(self, arguments: Sequence[Any], answer: Any) -> dict[str, Any]:
        return {"answer": answer} | ({"cut": True} if self.is_cut(arguments[0]) else {})

    def is_cut(self, prompt: str) -> bool:
        """Whether a prompt lost its beginning, since it is longer than the model reads."""
        return hash(prompt) in self._cut

    def note_first(self, ids: Sequence[int]) -> None:
        if self._first_tokens is None:
            self._first_tokens = list(ids[:4])
            names = [self.tokenizer.decode([token]) for token in self._first_tokens]
            logger.info("the first prompt begins with the tokens %s: %s", names, ids[:4])


class LanguageModel(LoggedAnswers, HFLM):  # type: ignore[misc]
    """lm-eval's interface to a loaded model, on one of the ranks that share a `log`.

    It differs from `hf` where that would change a score:

    - prompts are exact, and answers logged, as `LoggedAnswers` says;
    - the settings of the model's generation_config.json, like a repetition penalty, are not used;
    - a question of RULER ends when the output contains all answers, and is never cut;
    - a template with today's date always gets 26 July 2024, the default of Llama's;
    - NaN logits are an error.
    """

    def __init__(
        self,
        loaded: Any,
        tokenizer: Any,
        chat: ChatConfig,
        batch_size: int,
        log: AnswerLog | None = None,
        progress: Progress | None = None,
    ) -> None:
        ends = loaded.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends
        loaded.generation_config = GenerationConfig(eos_token_id=ends or None)
        super().__init__(
            pretrained=loaded,
            tokenizer=tokenizer,
            # A longer row would change the factors of RoPE of the others.
            batch_size=1 if rope_depends_on_length(loaded.config) else batch_size,
            enable_thinking=chat.enable_thinking,
            think_end_token=chat.think_end_token,
            chat_template_args=template_without_date(tokenizer),
        )
        self.chat, self.log, self.progress = chat, log, progress
        self.cache_hook = self
        self._batch: Sequence[str] = ()
        embeddings = len(loaded.get_input_embeddings().weight)
        tokens = (tokenizer.pad_token_id, *(ends or ()), 0)
        self._pad = next(token for token in tokens if token is not None and token < embeddings)

    @property
    def max_length(self) -> int:  # type: ignore[override]
        # Read anew, since YaRN changes it.
        return max_positions(self.model.config) or _NO_LIMIT

    def prompt(self, text: str, prefix: str) -> str:
        """A question and the beginning of its answer, as lm-eval puts a task with `gen_prefix`."""
        system = self.chat.system_instruction
        if not self.chat.apply_chat_template:
            return f"{system or ''}{text}{prefix}"
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": text})
        if prefix:
            turns.append({"role": "assistant", "content": prefix})
        return str(self.apply_chat_template(turns, add_generation_prompt=not prefix))

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask [B, T], padded on the left."""
        # The last token of an answer is never an input.
        most = left_truncate_len + 1 if left_truncate_len else _NO_LIMIT
        rows = [self.tok_encode(string) for string in strings]
        for string, row in zip(strings, rows, strict=True):
            self.note_length(string, len(row), most)
        self.note_first(rows[0])
        width = min(most, max(map(len, rows)))
        ids = torch.full((len(rows), width), self._pad)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            start = max(0, width - len(row))
            ids[number, start:] = torch.tensor(row[-width:], dtype=torch.long)
            mask[number, start:] = 1
        self._batch = strings
        return ids, mask

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str | None:
        if tokens is None:  # a tokenizer without an end token
            return None
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
    ) -> torch.Tensor:
        start = context.shape[1]
        if not options.setdefault("do_sample", False):
            options.pop("temperature", None)
        criteria = stop_sequences_criteria(self.tokenizer, stop, *reversed(context.shape))
        rows = [self._rows.get(string, ([], False)) for string in self._batch]
        criteria.append(_AllAnswersGiven(self, rows, start))
        nan_check = _NanCheck()
        with torch.inference_mode():
            output: torch.Tensor = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                logits_processor=LogitsProcessorList([nan_check]),
                pad_token_id=self._pad,
                use_cache=True,
                **options,
            )
        if nan_check.has_nan:
            raise ModelError(_NAN_LOGITS)
        return output

    def answer_ids(
        self, asked: Mapping[int, tuple[str, list[str]]], new_tokens: int
    ) -> Iterator[tuple[int, list[int], list[int]]]:
        """Each prompt's number, ids, and the ids of the answer as `generate_until` makes it.

        `asked` are prompts with the answers to look for, by number; the longest are answered first.
        """
        self._rows = {text: (answers, False) for text, answers in asked.values()}
        order = sorted(asked, key=lambda number: -len(self.tok_encode(asked[number][0])))
        most = self.max_length - new_tokens
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            ids, mask = self.tok_batch_encode([asked[n][0] for n in numbers], "left", most)
            ids, mask = ids.to(self.device), mask.to(self.device)
            width = ids.shape[1]
            stop = [end] if (end := self.tok_decode(self.eot_token_id, False)) else []
            output = self._model_generate(ids, width + new_tokens, stop, attention_mask=mask)
            for number, row, used in zip(
                numbers, output.tolist(), mask.sum(1).tolist(), strict=True
            ):
                yield number, row[width - used : width], row[width:]


class _AllAnswersGiven(StoppingCriteria):
    """Ends a row whose text holds every answer: more text cannot change its score."""

    def __init__(
        self, model: LanguageModel, rows: Sequence[tuple[list[str], bool]], start: int
    ) -> None:
        self._model, self._rows, self._start = model, rows, start
        self._done = [False] * len(rows)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for row, (answers, any_answer) in enumerate(self._rows):
            if answers and not self._done[row]:
                text = self._model.tok_decode(input_ids[row, self._start :].tolist()) or ""
                self._done[row] = string_match(text, answers, any_answer) == 1.0
        return torch.tensor(self._done, device=input_ids.device)


class _NanCheck(LogitsProcessor):  # type: ignore[misc]
    """Remembers whether a step had NaN logits, which greedy decoding would choose."""

    def __init__(self) -> None:
        self.has_nan: torch.Tensor | bool = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.has_nan = scores.isnan().any() | self.has_nan
        return scores


def template_without_date(tokenizer: Any) -> dict[str, str]:
    """The argument `chat_template` if the tokenizer's asks for the date: a fixed date for it."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return {}
    codes = "YymdBbAaHIMSp"
    date = "".join(f"|replace('%{code}', '{_DATE:%{code}}')" for code in codes)
    macro = f"{{%- macro strftime_now(format) -%}}{{{{ format{date} }}}}{{%- endmacro -%}}"
    return {"chat_template": macro + tokenizer.get_chat_template()}
