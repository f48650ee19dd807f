"""Prompts in a tokenizer's chat template, and templates that do not accept them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers.normalizers import Prepend

from bosch.errors import UserError
from data_prep.text import encode_prompt
from stages.evaluate.chat import ChatTemplate, has_template
from tests.tiny_data import byte_tokenizer, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PREFIX = " The answer is"


def test_a_template_in_a_models_folder_is_found(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert not has_template(tmp_path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    assert has_template(tmp_path)
    (tmp_path / "chat_template.jinja").rename(tmp_path / "chat_template.json")
    assert has_template(tmp_path)
    (tmp_path / "chat_template.json").unlink()
    for config, expected in (("[]", False), ('{"chat_template": ""}', False),
                             ('{"chat_template": "x"}', True)):  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert has_template(tmp_path) is expected


def test_a_prompt_is_the_users_turn_and_may_begin_the_answer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = ChatTemplate(tokenizer)
    body = tokenizer("What is it?")["input_ids"]
    prompt = body + tokenizer(PREFIX)["input_ids"]
    ids = chat.ids(prompt, PREFIX)
    assert tokenizer.decode(ids) == f"<user>What is it?</user><assistant>{PREFIX}"
    assert len(ids) == len(chat.ids([])) + len(prompt)
    for ids in (chat.ids([0, 0, *body]), chat.ids(body, " a beginning that is not there")):
        assert tokenizer.decode(ids) == "<user>What is it?</user><assistant>"
    turns = [{"role": role, "content": role} for role in ("user", "assistant")]
    assert chat.text(turns, add_generation_prompt=False) == "<user>user</user><assistant>assistant"
    digests = {chat.digest}
    for template, bos in ((f"{TEMPLATE}!", "a"), ("{{ bos_token }}" + TEMPLATE, "a"),
                          ("{{ bos_token }}" + TEMPLATE, "b")):  # fmt: skip
        tokenizer.chat_template, tokenizer.bos_token = template, bos
        digests.add(ChatTemplate(tokenizer).digest)
    assert len(digests) == 4


def test_the_beginning_of_an_answer_is_found_if_texts_begin_with_a_space() -> None:
    """Also if a space is a token by itself."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<user>{{ messages[0].content }}<end><assistant>"
    prompt = encode_prompt(tokenizer, f"What is it?{PREFIX}")
    plain = tokenizer.decode(ChatTemplate(tokenizer).ids(prompt, PREFIX))
    assert plain == f"<user>What is it?<end><assistant>{PREFIX}"
    tokenizer.backend_tokenizer.normalizer = Prepend(" ")
    chat = ChatTemplate(tokenizer)
    ids = chat.ids(encode_prompt(tokenizer, f"What is it?{PREFIX}"), PREFIX)
    text = tokenizer.decode(ids)
    places = [text.index(part) for part in ("What is it?", "<end>", "<assistant>", PREFIX)]
    assert places == sorted(places) and text.endswith(PREFIX)
    turn = chat.ids(encode_prompt(tokenizer, "What is it?"))
    assert ids[: len(turn)] == turn


@pytest.mark.parametrize(
    ("template", "fault"),
    [(None, "has no chat template"), ("no prompt", "drops the user's messages")],
)
def test_a_template_without_a_place_for_the_prompt_is_refused(
    template: str | None, fault: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=fault):
        ChatTemplate(tokenizer)


def test_a_template_that_refuses_a_role_is_reported() -> None:
    """Gemma's has no system turns."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    with pytest.raises(UserError, match=r"no conversation of system, user \(no system\)"):
        ChatTemplate(tokenizer).text(turns)


def test_a_template_with_todays_date_makes_the_same_prompts_every_day() -> None:
    """As Llama 3's does; otherwise yesterday's answers could not be reused."""
    tokenizer = tiny_tokenizer()
    for format, date in (("%d %b %Y", "26 Jul 2024"), ("%A, %Y-%m-%d", "Friday, 2024-07-26")):
        tokenizer.chat_template = (
            "{%- if strftime_now is defined %}{{ strftime_now('"
            + format
            + "') }}{% endif %}"
            + TEMPLATE
        )
        text = ChatTemplate(tokenizer).text([{"role": "user", "content": "Hi"}])
        assert text == f"{date}<user>Hi</user><assistant>"
