"""Prompts in the chat template of a tokenizer, for instruct models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import read_json
from data_prep.text import encode_answer

# Stands for the prompt while the template is split around it.
_PLACEHOLDER = "@@prompt@@"
# Version of the prompts made here: answers to prompts of another version are not reused.
_VERSION = 3
# A fixed date in prompts, the default of Llama's templates: a macro put before the template
# replaces the function that transformers gives it.
_DATE_FUNCTION = "strftime_now"
_DATE_MACRO = (
    f"{{%- macro {_DATE_FUNCTION}(format) -%}}{{{{ format"
    + "".join(
        f"|replace('{code}', '{datetime(2024, 7, 26):{code}}')"
        for code in ("%Y", "%y", "%m", "%d", "%B", "%b", "%A", "%a", "%H", "%I", "%M", "%S", "%p")
    )
    + " }}{%- endmacro -%}"
)


class ChatTemplate:
    """A tokenizer's chat template around a prompt, which is one user turn.

    Raises UserError when the tokenizer has no template, or the template leaves the prompt out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._template = tokenizer, None
        if not tokenizer.chat_template:
            raise UserError(
                f"evaluate.chat_template: the tokenizer of {tokenizer.name_or_path} has no chat "
                "template; set it to false"
            )
        if _DATE_FUNCTION in str(tokenizer.chat_template):
            self._template = f"{_DATE_MACRO}{tokenizer.get_chat_template()}"
        turn = {"role": "user", "content": _PLACEHOLDER}
        before, placeholder, after = self.text([turn]).partition(_PLACEHOLDER)
        if not placeholder:
            raise UserError(
                f"evaluate.chat_template: the template of {tokenizer.name_or_path} drops the "
                "user's messages"
            )
        self._before, self._after = (encode_answer(tokenizer, text) for text in (before, after))
        content = json.dumps([_VERSION, str(tokenizer.chat_template), before, after])
        self.digest = hashlib.sha256(content.encode()).hexdigest()

    def text(self, turns: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without `add_generation_prompt` its last turn stays open."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(turns),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                chat_template=self._template,
            )
        except Exception as error:  # templates raise errors of any type
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            raise UserError(
                f"evaluate.chat_template: the template of {self._tokenizer.name_or_path} takes no "
                f"conversation of {roles} ({' '.join(str(error).split()):.200}); set it to false"
            ) from None
        return text

    def ids(self, prompt: Sequence[int], answer_prefix: str = "") -> list[int]:
        """Token ids of a prompt as the user's turn.

        The prompt ends with `answer_prefix`, which is moved to the beginning of the answer.
        """
        special = set(self._tokenizer.all_special_ids)
        prompt_ids = list(prompt)
        while prompt_ids and prompt_ids[0] in special:  # the template adds them
            prompt_ids = prompt_ids[1:]
        prefix_ids: list[int] = []
        # With or without a space before it: some tokenizers put one before any text.
        for text in (answer_prefix, answer_prefix.removeprefix(" ")):
            ids = encode_answer(self._tokenizer, text)
            if ids and prompt_ids[-len(ids) :] == ids:
                prompt_ids, prefix_ids = prompt_ids[: -len(ids)], ids
                break
        return [*self._before, *prompt_ids, *self._after, *prefix_ids]


def checked_template(tokenizer: Any, embeddings: int) -> ChatTemplate:
    """The template of a model with so many embeddings; UserError if it has a token without one."""
    chat = ChatTemplate(tokenizer)
    if (token := max(chat.ids([]), default=0)) >= embeddings:
        raise UserError(
            f"evaluate.chat_template: the template of {tokenizer.name_or_path} makes token "
            f"{token}, and the model has {embeddings:,} embeddings; resize them "
            "(resize_token_embeddings), or set it to false"
        )
    return chat


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a chat template."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = read_json(folder / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))
