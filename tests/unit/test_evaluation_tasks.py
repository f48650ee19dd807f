"""Tasks of lm-eval, RULER's and a user's: how they are found, set and asked; lm-eval as oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from bosch.errors import RunError, UserError
from bosch.model.loading import load_model
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.tasks.ruler import Corpus, make_rows, ruler_task, write_rows
from data_prep.tasks.tables import RulerTask
from data_prep.text import haystack_words, token_counter
from stages.context import Runtime
from stages.evaluate import load
from stages.evaluate.answers import ModelError
from stages.evaluate.load import OWN_TASKS, ask, load_tasks, mean_metrics
from stages.evaluate.models import process_state
from stages.evaluate.names import unknown
from stages.evaluate.stage import NEW_TOKENS, PRESETS, EvaluateConfig, LocalTask
from stages.evaluate.tasks.local import MAKERS
from tests.evaluation_case import evaluation, language_model, write_tasks
from tests.tiny_data import byte_tokenizer, save_tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    save_tiny_model(folder / "model")
    (folder / "own").mkdir()
    write_tasks(folder / "own")
    return folder


def loaded(folder: Path, *tasks: str, work: Path | None = None, **section: Any) -> Any:
    """The tasks of a recipe, among them those of the user's folder."""
    given = {"tasks": list(tasks), "include_path": [str(folder / "own")]} | section
    state = process_state(Runtime())
    config = evaluation(folder, **given)
    return load_tasks(config, tiny_tokenizer(), work or folder / "rows", 4096, state, None)


def test_lm_eval_has_all_tasks_of_the_presets_and_ours_have_rulers_answers() -> None:
    assert unknown([name for names in PRESETS.values() for name in names], []) == {}
    manager = TaskManager(include_path=str(OWN_TASKS), include_defaults=False)
    assert set(manager.all_tasks) == {*get_args(RulerTask), *get_args(LocalTask)}
    for name, entry in manager.task_index.items():
        assert entry.cfg["generation_kwargs"]["max_gen_toks"] == NEW_TOKENS[name]


def test_samples_of_ruler_are_the_generators_to_the_byte(folder: Path, tmp_path: Path) -> None:
    """In the pipeline, and in lm-eval by hand with nothing but --metadata."""
    ruler = {"lengths": [1500, 1600], "samples": 2, "max_new_tokens": 9}
    found = loaded(folder, "vt", "niah_single_1", work=tmp_path, ruler=ruler).tasks
    places = [(task.name, task.length, task.documents) for task in found]
    assert places == [(name, n, 2) for n in (1500, 1600) for name in ("vt", "niah_single_1")]
    corpus, counter = Corpus(haystack_words(None)), token_counter(tiny_tokenizer())
    for asked in found:
        generator = ruler_task(asked.name, corpus, 1, asked.length, 9, counter)
        generator.fit()
        task = asked.build()
        metadata: Any = {
            "tokenizer": str(folder / "model"), "length": asked.length, "samples": 2, "seed": 1,
            "max_new_tokens": 9,
        }  # fmt: skip
        manager = TaskManager(
            include_path=str(OWN_TASKS), include_defaults=False, metadata=metadata
        )
        by_hand = manager.load([asked.name])["tasks"][asked.name]
        drafts = [generator.sample(index) for index in range(2)]
        for one in (task, by_hand):
            one.set_fewshot_seed(0)
            one.build_all_requests()
            assert [request.args[0] for request in one.instances] == [d.text for d in drafts]
            assert [doc["answers"] for doc in one.eval_docs] == [d.answers for d in drafts]
        assert task.instances[0].args[1]["max_gen_toks"] == 9
        assert mean_metrics(task) == {"score"}
    limited = loaded(folder, "vt", work=tmp_path, ruler=ruler, limit=1)
    assert [task.documents for task in limited.tasks] == [1, 1]


def test_all_tasks_that_do_not_fit_are_reported_and_calibrations_needles_refused(
    folder: Path, tmp_path: Path
) -> None:
    ruler = {"lengths": [80, 700], "samples": 1, "max_new_tokens": 9}
    with pytest.raises(UserError, match=r"vt at 80 tokens.*\nniah_single_1 at 80 tokens: it does"):
        loaded(folder, "vt", "niah_single_1", work=tmp_path, ruler=ruler)
    [row] = make_rows(
        "niah_single_1", 700, 1, seed=1, new_tokens=9, corpus=Corpus(haystack_words(None)),
        tokenizer=tiny_tokenizer(),
    )  # fmt: skip
    config = evaluation(folder, tasks=["niah_single_1"], ruler=ruler | {"lengths": [700]})
    for pairs, prompts in ((row["needles"], ()), ((), [row["prompt"]])):
        calibration = CalibrationNeedles(frozenset(map(tuple, pairs)), frozenset(prompts))
        place, state = tmp_path / f"{len(prompts)}", process_state(Runtime())
        with pytest.raises(RunError, match="evaluation sample niah_single_1 0 shares"):
            load_tasks(config, tiny_tokenizer(), place, 4096, state, calibration)


@pytest.mark.parametrize("in_chat", [False, True])
def test_answers_and_scores_equal_lm_evals(in_chat: bool, folder: Path, tmp_path: Path) -> None:
    """Of tasks of a user's folder, with worked examples, against `hf` by hand."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    chat = {"apply_chat_template": in_chat, "system_instruction": "Be right."}
    hf = HFLM(
        pretrained=load_model(folder / "model", dtype="float32"), tokenizer=tokenizer, batch_size=2
    )
    manager = TaskManager(include_path=str(folder / "own"), include_defaults=False)
    expected = simple_evaluate(
        hf, tasks=["both"], task_manager=manager, bootstrap_iters=0, fewshot_as_multiturn=True,
        **chat,
    )  # fmt: skip
    lm = language_model(folder / "model", tmp_path, tokenizer, rows=2, **chat)
    found = loaded(folder, "both", **chat)
    assert [task.name for task in found.tasks] == ["choice", "sums"]
    config = evaluation(folder, **chat)
    metric = {"choice": "acc_norm,none", "sums": "score,none"}
    for task in found.tasks:
        records = ask(lm, task, config.section)
        theirs = expected["samples"][task.name]
        assert [record["prompt"] for record in records] == [s["prompt_hash"][:16] for s in theirs]
        mean = sum(record["score"] for record in records) / len(records)
        assert mean == pytest.approx(expected["results"][task.name][metric[task.name]])
        if task.name == "sums":
            outputs = [record["output"] for record in records]
            assert outputs == [sample["filtered_resps"][0] for sample in theirs]
            assert len({s["prompt_hash"] for s in theirs}) == 5
            shots = theirs[0]["arguments"][0][0]
            assert shots.count("Question:") == 3 and ("assistant:" in shots) == in_chat
    group = found.groups["both"]
    assert (group.tasks, group.metrics) == (("choice", "sums"), ("acc,none",))
    assert group.by_size and group.is_named


def test_settings_of_the_recipe_reach_every_task(folder: Path) -> None:
    section = {"num_fewshot": 1, "gen_kwargs": {"max_gen_toks": 3, "until": ["."]}, "limit": 2}
    sums, choice = loaded(folder, "sums", "choice", **section).tasks
    assert (sums.documents, choice.documents) == (2, 2)
    assert (sums.build().config.num_fewshot, choice.build().config.num_fewshot) == (1, 0)
    assert sums.build().config.generation_kwargs == {
        "max_gen_toks": 3, "until": ["."], "do_sample": False,
    }  # fmt: skip


def test_a_task_without_a_score_has_a_reason_and_the_others_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = folder / "own"
    kinds = {
        "gone": "dataset_kwargs: {data_files: {test: no/where.jsonl}}\ntraining_split: null",
        "code": "unsafe_code: true",
        "text": "output_type: loglikelihood_rolling\ngeneration_kwargs: null\n"
        "process_results: null\nmetric_list: [{metric: word_perplexity}]",
        "median": "metric_list: [{metric: score, aggregation: median, higher_is_better: true}]",
        "long": "generation_kwargs: {until: [], max_gen_toks: 4096}",
        "few": "num_fewshot: 90",
    }
    for name, lines in kinds.items():
        (own / f"{name}.yaml").write_text(f"include: sums.yaml\ntask: {name}\n{lines}\n")
    found = loaded(folder, *kinds, "sums")
    said = {
        "gone": "its data could not be read", "code": "set evaluate.confirm_run_unsafe_code",
        "text": "it measures word_perplexity", "median": "none of which is a mean",
        "long": "4,096 tokens leave none of the model's 4,096 positions",
        "few": "its 90 worked examples",
    }  # fmt: skip
    assert [task.name for task in found.tasks] == ["sums"]
    assert found.missing["lm_eval"].keys() == said.keys()
    for name, text in said.items():
        assert text in found.missing["lm_eval"][name], name
    allowed = loaded(folder, "code", confirm_run_unsafe_code=True)
    assert [task.name for task in allowed.tasks] == ["code"]
    thinking = {"enable_thinking": True, "think_end_token": "</think>"}
    assert loaded(folder, "choice", **thinking).missing["lm_eval"].keys() == {"choice"}
    for name in kinds:
        (own / f"{name}.yaml").unlink()
    with pytest.raises(UserError, match=r"both has choice, which another name of the list has too"):
        loaded(folder, "choice", "both")
    monkeypatch.setattr(load, "is_whole", lambda *_: True)  # the whole index takes a minute
    with pytest.raises(UserError, match="there is no task sumz; `lm-eval ls tasks`"):
        loaded(folder, "sumz")


def test_a_task_of_lm_eval_reads_local_data_by_an_own_file(folder: Path, tmp_path: Path) -> None:
    """GSM8K, as the guide shows it; no network is needed."""
    import lm_eval.tasks

    gsm8k = Path(lm_eval.tasks.__file__).parent / "gsm8k/gsm8k.yaml"
    row = {"question": "2 + 2?", "answer": "It is 4.\n#### 4"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 6)
    (tmp_path / "gsm8k_local.yaml").write_text(
        f"include: {gsm8k}\ntask: gsm8k_local\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {{train: {tmp_path}/rows.jsonl, "
        f"test: {tmp_path}/rows.jsonl}}}}\n"
    )
    [asked] = loaded(folder, "gsm8k_local", include_path=[str(tmp_path)]).tasks
    task = asked.build()
    assert asked.documents == 6 and task.config.num_fewshot == 5
    assert task.process_results(row, ["4"])["exact_match"] == 1.0


def test_nolimas_prompt_and_score_are_as_by_hand(folder: Path, tmp_path: Path) -> None:
    """A token is a byte: at 48 % of 40 the first line break is byte 20, 19 from the start."""
    lines = [f"Line {number} of the book.\n" for number in range(10, 30)]
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack/book.txt").write_text("".join(lines))
    needle = {
        "id": "0401", "needle": "{CHAR} keeps a {1}.", "questions": {"onehop": "Who has a {2}?"},
        "character_set": ["Yuki"], "tests": {"T1": {"input_args": ["lute", "bow"]}},
        "task_template": "Read {haystack}\n{question}", "system_prompt": "",
    }  # fmt: skip
    (tmp_path / "needle_set.json").write_text(json.dumps([needle]))
    rows = list(MAKERS["nolima"](tmp_path, 40, 99, 0, 9, byte_tokenizer()))
    assert len(rows) == 26  # depths
    text = "Read ine 10 of the book. Yuki keeps a lute.\nLine 11 of the book.\nWho has a bow?"
    assert rows[12] == {"prompt": text, "prefix": "", "answers": ["Yuki"], "needles": None}
    asked = {"tasks": ["nolima"], "data": {"nolima": str(tmp_path)}}
    ruler = {"lengths": [40], "samples": 2, "max_new_tokens": 9}
    [one] = loaded(folder, work=tmp_path / "rows", ruler=ruler, **asked).tasks
    task = one.build()
    assert (one.suite, one.length, len(task.eval_docs)) == ("lm_eval", 40, 2)
    for output, score in (("It is Yuki.", 1.0), ("yuki", 0.0)):
        assert task.process_results(task.eval_docs[0], [output]) == {"score": score}
    model = load_model(folder / "model", dtype="float32")
    lm = language_model(model, tmp_path / "log", byte_tokenizer())
    assert [record["task"] for record in ask(lm, one, EvaluateConfig())] == ["nolima"] * 2
    model.config.max_position_embeddings = 90
    lm = language_model(model, tmp_path / "other log", byte_tokenizer())
    with pytest.raises(ModelError, match="and its answer are more than its 90 positions"):
        ask(lm, one, EvaluateConfig())  # upstream cuts the beginning


def test_mrcrs_prompt_and_score_are_as_by_hand(tmp_path: Path) -> None:
    """Of conversations that fit into a length with their answer, and not into half of it."""
    turns = [{"role": "user", "content": "A poem."}, {"role": "assistant", "content": "Roses."}]
    rows = [
        {"prompt": json.dumps(turns * times), "answer": "xyzRoses.",
         "random_string_to_prepend": "xyz"}
        for times in (1, 3, 4)
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    talk = "User: A poem.\n\nAssistant: Roses.\n\n"
    prompt = f"{talk * 3}Assistant:"
    [found] = MAKERS["mrcr"](tmp_path, len(prompt) + 9, 9, 0, 9, byte_tokenizer())
    assert found["prompt"] == prompt
    write_rows(tmp_path / "mrcr-99.jsonl", iter([found]))
    metadata: Any = {"files": str(tmp_path), "length": 99}
    manager = TaskManager(include_path=str(OWN_TASKS), include_defaults=False, metadata=metadata)
    task = manager.load(["mrcr"])["tasks"]["mrcr"]
    task.set_fewshot_seed(0)
    task.build_all_requests()
    assert task.instances[0].args[0] == prompt
    for output, score in (("xyzRoses.", 1.0), (" xyzRose", 2 * 4 / (4 + 6)), ("Roses.", 0.0)):
        found_score = task.process_results(task.eval_docs[0], [output])["score"]
        assert found_score == pytest.approx(score)


def test_a_folder_with_fewer_prompts_than_samples_counts_its_own_and_none_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    row = {"prompt": json.dumps([{"role": "user", "content": "word " * 30}]), "answer": "xyz"}
    (tmp_path / "mrcr").mkdir()
    (tmp_path / "mrcr/a.jsonl").write_text(json.dumps({**row, "random_string_to_prepend": "x"}))
    options: Any = {"data": {"mrcr": str(tmp_path / "mrcr")}, "work": tmp_path / "rows"}
    prompt = len(tiny_tokenizer()("User: " + "word " * 30 + "\n\nAssistant:")["input_ids"])
    ruler = {"lengths": [prompt + 20], "samples": 9, "max_new_tokens": 9}
    [task] = loaded(folder, "mrcr", ruler=ruler, **options).tasks
    assert task.documents == 1
    with pytest.raises(UserError, match="has no prompt of mrcr for 4,000 tokens"):
        loaded(folder, "mrcr", ruler={**ruler, "lengths": [4000]}, **options)
