"""How prompts are put to a model: chat template, system message, thinking; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bosch.files import read_json
from stages.faults import Fault
from stages.fields import Flag, Line, Section


class ChatConfig(Section):
    """Prompts in a chat template. Names and meanings are lm-eval's."""

    apply_chat_template: Flag = False
    """Whether prompts are put into the tokenizer's chat template, which instruct models need."""
    system_instruction: str | None = None
    """System message before every prompt."""
    enable_thinking: Flag | None = None
    """Argument of the chat template of models that think; needs think_end_token."""
    think_end_token: Line | None = None
    """Text after which the answer begins, like </think>; what precedes it is not scored."""

    def faults(self, where: str) -> Iterator[Fault]:
        if self.enable_thinking and self.think_end_token is None:
            yield Fault(f"{where}.enable_thinking", "needs think_end_token, like </think>")


def template_of(folder: Path) -> str:
    """The chat template of the tokenizer in `folder`, or an empty text."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8", errors="replace")
    config = read_json(folder / "tokenizer_config.json")
    return str(config.get("chat_template") or "") if isinstance(config, dict) else ""


def vocabulary_fault(folder: Path, embeddings: int) -> str | None:
    """A token of the template that has no embedding, as where one was added without resizing."""
    template, content = template_of(folder), read_json(folder / "tokenizer.json")
    added: list[dict[str, Any]] = content.get("added_tokens", []) if content else []
    for token in added:
        if token["id"] >= embeddings and token["content"] in template:
            return (
                f"the template in {folder} makes token {token['id']} ({token['content']}), and the "
                f"model has {embeddings:,} embeddings; resize them (resize_token_embeddings), or "
                "set it to false"
            )
    return None
