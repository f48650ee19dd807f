"""Prompts in the chat template of a tokenizer, as instruct models are asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import read_json
from data_prep.text import encode_answer, encode_prompt

Turns = list[dict[str, str]]

# Stands for the prompt while the template is split around it.
_PLACE = "@@prompt@@"
# Of the prompts that a template makes: answers to those of another one are not taken.
_VERSION = 3
# The date in prompts, whatever day it is: the one that Llama's templates fall back to. A template
# can be given no function, so this goes before it.
_NOW = "strftime_now"
_TODAY = (
    f"{{%- macro {_NOW}(format) -%}}{{{{ format"
    + "".join(
        f"|replace('{code}', '{datetime(2024, 7, 26):{code}}')"
        for code in ("%Y", "%y", "%m", "%d", "%B", "%b", "%A", "%a", "%H", "%I", "%M", "%S", "%p")
    )
    + " }}{%- endmacro -%}"
)


class ChatTemplate:
    """A tokenizer's chat template around a prompt, which is one turn of the user.

    Raises UserError when the tokenizer has none, or it leaves the prompt out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._template = tokenizer, None
        if not tokenizer.chat_template:
            raise UserError(
                f"evaluate.chat_template: the tokenizer of {tokenizer.name_or_path} has no chat "
                "template; set it to false"
            )
        if _NOW in str(tokenizer.chat_template):
            self._template = f"{_TODAY}{tokenizer.get_chat_template()}"
        before, place, after = self.text([{"role": "user", "content": _PLACE}]).partition(_PLACE)
        if not place:
            raise UserError(
                f"evaluate.chat_template: the template of {tokenizer.name_or_path} leaves out what "
                "the user says"
            )
        self._before, self._after = (encode_answer(tokenizer, text) for text in (before, after))
        content = json.dumps([_VERSION, str(tokenizer.chat_template), before, after])
        self.digest = hashlib.sha256(content.encode()).hexdigest()

    def text(self, turns: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, its last turn to be answered or, without that, continued."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(turns),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                chat_template=self._template,
            )
        except Exception as error:  # a template refuses turns with errors of its own
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            raise UserError(
                f"evaluate.chat_template: the template of {self._tokenizer.name_or_path} takes no "
                f"conversation of {roles} ({' '.join(str(error).split()):.200}); set it to false"
            ) from None
        return text

    def ids(self, prompt: Sequence[int], answer_prefix: str = "") -> list[int]:
        """Token ids of a prompt as the user's turn.

        `answer_prefix`, with which the prompt ends, begins the answer instead.
        """
        special = set(self._tokenizer.all_special_ids)
        prompt_ids = list(prompt)
        while prompt_ids and prompt_ids[0] in special:  # the template brings its own
            prompt_ids = prompt_ids[1:]
        begun: list[int] = []
        # Some tokenizers put a space before any text; within the prompt there is one alone.
        for text in (answer_prefix, answer_prefix.removeprefix(" ")):
            ids = encode_answer(self._tokenizer, text)
            if ids and prompt_ids[-len(ids) :] == ids:
                prompt_ids, begun = prompt_ids[: -len(ids)], ids
                break
        return [*self._before, *prompt_ids, *self._after, *begun]


def prompt_of(
    tokenizer: Any, turns: Turns, chat: ChatTemplate | None, plain: Callable[[Turns], str]
) -> tuple[str, list[int]]:
    """Text and token ids of a conversation, in the chat template or, without one, by `plain`.

    Only the plain text gets the tokenizer's opening tokens: a template brings its own.
    """
    if chat is None:
        text = plain(turns)
        return text, encode_prompt(tokenizer, text)
    text = chat.text(turns)
    return text, encode_answer(tokenizer, text)


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in a model's folder has a chat template."""
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = read_json(folder / "tokenizer_config.json")
    return isinstance(config, dict) and bool(config.get("chat_template"))
