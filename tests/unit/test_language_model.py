"""A loaded model for lm-eval: exact prompts, greedy answers, what is cut, kept and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import GenerationMixin

from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from data_prep.tasks.ruler import write_rows
from stages.evaluate.answers import ModelError
from stages.evaluate.load import OWN_TASKS
from tests.evaluation_case import generated, language_model
from tests.tiny_data import save_tiny_model, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["One", "Two is the next number", "Three and four come after the first ones"] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture
def model(folder: Path) -> Any:
    """A hybrid without end token."""
    base = load_model(folder, dtype="float32")
    hybrid = materialize(base, HeadMask(((6, 6), (0, 6)), 1))
    hybrid.generation_config.eos_token_id = None
    return hybrid


def greedy(model: Any, prompt: str, tokens: int) -> list[int]:
    """A plain loop without a cache."""
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -tokens:].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 9.0},
        {"num_beams": 3},
        {"do_sample": True},
        {"suppress_tokens": [*range(3, 512, 2)]},
    ],
)
def test_answers_are_greedy_whatever_generation_config_says(
    settings: dict[str, Any], model: Any, tmp_path: Path
) -> None:
    model.generation_config.update(**settings)
    expected = tiny_tokenizer().decode(greedy(model, PROMPTS[1], 9), skip_special_tokens=True)
    assert generated(language_model(model, tmp_path), PROMPTS[1:2], 9) == [expected]


@pytest.mark.parametrize("pad", ["<|end|>", None])
def test_scores_do_not_depend_on_the_batch(pad: str | None, model: Any, tmp_path: Path) -> None:
    """Left padding is exact, also if the tokenizer has no padding token."""

    def answers(rows: int) -> tuple[list[str], list[float]]:
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad
        lm = language_model(model, tmp_path / str(rows), tokenizer, rows)
        requests = [
            Instance("loglikelihood", {}, (prompt, " and so on"), 0, ("task", number, 1))
            for number, prompt in enumerate(PROMPTS)
        ]
        return generated(lm, PROMPTS, 12), [score for score, _ in lm.loglikelihood(requests)]

    alone, together = answers(1), answers(8)
    assert alone[0] == together[0] and len(set(alone[0])) == 3
    assert alone[1] == pytest.approx(together[1], abs=1e-4)
    # Rows that end early do not change the others.
    model.generation_config.eos_token_id = greedy(model, PROMPTS[0], 4)[3]
    short = [answers(rows)[0] for rows in (3, 4)]
    assert short[0] == short[1] != alone[0]


def test_a_question_ends_with_the_last_answer_to_it(model: Any, tmp_path: Path) -> None:
    tokenizer, ids = tiny_tokenizer(), greedy(model, PROMPTS[0], 12)
    texts = [tokenizer.decode(ids[:end]) for end in range(1, 13)]
    whole = [end for end, text in enumerate(texts, 1) if "\ufffd" not in text and end < 12]
    for end in (whole[0], whole[-1]):
        lm, answer = language_model(model, tmp_path / str(end)), texts[end - 1]
        assert generated(lm, PROMPTS[:1], 12, answers=[answer.strip()]) == [answer]
    assert whole[0] < whole[-1]
    lm = language_model(model, tmp_path / "all", rows=2)
    assert generated(lm, PROMPTS[:1], 12, answers=[answer.strip(), "not there"]) == [texts[-1]]
    # The same tokens are the answer of an example of calibration.
    asked = {7: (PROMPTS[0], [answer.strip()])}
    [found] = lm.answer_ids(asked, 12)
    assert found == (7, tokenizer(PROMPTS[0])["input_ids"], ids[: whole[-1]])


def test_answers_of_a_log_are_not_computed_again_and_sampled_ones_are(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    compute = GenerationMixin.generate

    def counting(self: Any, **options: Any) -> Any:
        asked.append(len(options["input_ids"]))
        return compute(self, **options)

    monkeypatch.setattr(GenerationMixin, "generate", counting)
    first = generated(language_model(model, tmp_path), PROMPTS[:3], 5)
    assert sum(asked) == 3  # equal requests are asked once
    assert generated(language_model(model, tmp_path), PROMPTS, 5) == first * 2
    assert sum(asked) == 3
    # A torn line, as of a killed process, is one answer less.
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    assert generated(language_model(model, tmp_path), PROMPTS, 5) == first * 2
    assert sum(asked) == 4
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 50.0}
    once = generated(language_model(model, tmp_path), [PROMPTS[0]] * 3, 5, **drawn)
    assert len(set(once)) == 3 and sum(asked) == 7
    generated(language_model(model, tmp_path), [PROMPTS[0]] * 3, 5, **drawn)
    assert sum(asked) == 10


def test_prompts_begin_with_one_bos_and_have_no_closing_token(folder: Path, caplog: Any) -> None:
    """Whether the tokenizer adds them, the template has them, or both."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "~"
    bos, end = (tokenizer.convert_tokens_to_ids(token) for token in ("~", "<|end|>"))
    words = tokenizer("Say yes", add_special_tokens=False)["input_ids"]
    lm = language_model(folder, tokenizer=tokenizer)
    assert lm.tok_encode("Say yes") == HFLM.tok_encode(lm, "Say yes") == words
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="~ $A <|end|>", special_tokens=[("~", bos), ("<|end|>", end)]
    )
    assert tokenizer("Say yes")["input_ids"] == [bos, *words, end]
    for text in ("Say yes", "~Say yes"):
        assert lm.tok_encode(text) == [bos, *words]
        assert lm.tok_batch_encode([text])[0].tolist() == [[bos, *words]]
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    chat = language_model(folder, tokenizer=tokenizer, apply_chat_template=True)
    caplog.set_level("INFO")
    ids = chat.tok_batch_encode([chat.prompt("Say yes", "")])[0][0].tolist()
    assert ids.count(bos) == 1 and ids[0] == bos and end not in ids
    assert "the first prompt begins with the tokens ['~', '<'" in caplog.text


@pytest.mark.parametrize(
    "chat",
    [
        {},
        {"system_instruction": "Be brief."},
        {"apply_chat_template": True},
        {"apply_chat_template": True, "system_instruction": "Be brief."},
    ],
)
def test_calibration_and_evaluation_put_a_question_alike(
    chat: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """`prompt`, by which calibration asks, against the contexts that lm-eval makes."""
    rows = [{"prompt": "Find it.", "prefix": " It is", "answers": ["5"], "needles": [["k", "5"]]}]
    write_rows(tmp_path / "niah_single_1-600.jsonl", iter(rows))
    metadata: Any = {"files": str(tmp_path), "length": 600}
    manager = TaskManager(include_path=str(OWN_TASKS), include_defaults=False, metadata=metadata)
    task = manager.load(["niah_single_1"])["tasks"]["niah_single_1"]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    lm = language_model(folder, tokenizer=tokenizer, **chat)
    task.set_fewshot_seed(0)
    task.build_all_requests(
        system_instruction=lm.chat.system_instruction,
        apply_chat_template=lm.chat.apply_chat_template,
        fewshot_as_multiturn=True,
        chat_template=lm.apply_chat_template if chat.get("apply_chat_template") else None,
    )
    [request] = task.instances
    assert request.args[0] == lm.prompt("Find it.", " It is")
    assert request.args[0].endswith("It is") and "Find it." in request.args[0]
    assert ("<user>" in request.args[0]) == lm.chat.apply_chat_template
    assert ("Be brief." in request.args[0]) == ("system_instruction" in chat)
    assert task.process_results(rows[0], ["is 5."]) == {"score": 1.0}


def test_a_template_with_todays_date_makes_the_same_prompts_every_day(folder: Path) -> None:
    """As Llama 3's does; otherwise yesterday's answers could not be used."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    lm = language_model(folder, tokenizer=tokenizer, apply_chat_template=True)
    assert lm.prompt("Hi", "") == "26 Jul 2024<user>Hi</user><assistant>"


def test_a_prompt_that_loses_its_beginning_is_noted_and_of_ruler_refused(
    model: Any, tmp_path: Path
) -> None:
    """The last token of an answer is not read by the model."""
    tokenizer = tiny_tokenizer()
    model.config.max_position_embeddings = 30
    texts = {n: tokenizer.decode([37] * n) for n in (26, 27, 28)}
    assert all(len(tokenizer(text)["input_ids"]) == n for n, text in texts.items())
    for n, cut in ((27, False), (28, True)):
        lm = language_model(model, tmp_path / str(n), rows=2)
        generated(lm, [texts[n], texts[26]], 4)
        assert (lm.is_cut(texts[n]), lm.is_cut(texts[26])) == (cut, False)
        again = language_model(model, tmp_path / str(n))
        generated(again, [texts[n]], 4)
        assert again.is_cut(texts[n]) == cut  # as it was noted in the log
    assert generated(language_model(model, tmp_path / "x"), [texts[27]], 4, ["no"])
    with pytest.raises(ModelError, match="28 tokens and its answer are more than its 30 positions"):
        generated(language_model(model, tmp_path / "y"), [texts[28]], 4, ["no"])
    lm = language_model(model, tmp_path / "z")
    choice = tokenizer.decode([38] * 4)
    pairs = [(texts[27], choice), (texts[28], choice)]
    requests = [
        Instance("loglikelihood", {}, pair, 0, ("task", number, 1))
        for number, pair in enumerate(pairs)
    ]
    lm.loglikelihood(requests)
    assert [lm.is_cut(text) for text, _ in pairs] == [False, True]


def test_nan_logits_are_an_error(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    lm = language_model(model, tmp_path)
    with pytest.raises(ModelError, match="no numbers"):
        generated(lm, ["One"], 2)
    with pytest.raises(ModelError, match="no numbers"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("One", " two"), 0, ("task", 0, 1))])
