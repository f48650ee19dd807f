"""The ways of use that docs/guide/using.md lists: each works on a hybrid or ends in a sentence."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from bosch.errors import UserError
from bosch.model.cache import HybridCache
from bosch.model.loading import auto_class
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.hybrid_case import VOCABULARY, mask_of, random_mask, small_model, tokens
from tests.unit.test_paper_map import ROOT, names_in

WINDOW, SINKS, LENGTH, NEW = 6, 2, 20, 8
PAGE = ROOT / "docs" / "guide" / "using.md"
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


def _hybrid() -> Any:
    return materialize(small_model(), random_mask(), Window(WINDOW, SINKS))


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return _hybrid()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


@pytest.fixture(scope="module")
def folder(hybrid: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    hybrid.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _greedy(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)


def test_every_way_on_the_page_has_tests_that_exist() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    ways = [way for way, *_ in cells if way != "way"]
    tests_of_ways = json.loads((ROOT / "tests" / "ways_of_use.json").read_text("utf-8"))
    assert sorted(ways) == sorted(tests_of_ways)
    for way, tests in tests_of_ways.items():
        assert tests, way
        for test in tests:
            path, _, name = test.partition("::")
            assert path.startswith("tests/") and name.startswith("test_"), way
            assert name in names_in(ROOT / path), test


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "num_beams": 2},
        {"do_sample": True, "num_return_sequences": 3, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_sampling_draws_the_same_with_the_cache(hybrid: Any, options: dict[str, Any]) -> None:
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        ids = tokens(2, LENGTH)
        texts.append(hybrid.generate(ids, max_new_tokens=NEW, use_cache=use_cache, **options))
    assert torch.equal(*texts)


def test_embeddings_in_place_of_tokens(hybrid: Any) -> None:
    ids = tokens(2, LENGTH)
    embeddings = hybrid.get_input_embeddings()(ids)
    output = hybrid.generate(inputs_embeds=embeddings, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(output, _greedy(hybrid, ids)[:, LENGTH:])


def test_scores_and_hidden_states_of_generate(hybrid: Any) -> None:
    ids = tokens(1, LENGTH)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    output = [_greedy(hybrid, ids, use_cache=use, **options) for use in (True, False)]
    for with_cache, without in zip(output[0].scores, output[1].scores, strict=True):
        torch.testing.assert_close(with_cache, without, **_NEAR)
    assert len(output[0].hidden_states) == NEW


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("quantized", "quantized"),
        ("offloaded", "'offloaded' has no hybrid form: choose dynamic or static"),
    ],
)
def test_other_caches_of_generate_are_refused(hybrid: Any, name: str, sentence: str) -> None:
    with pytest.raises((UserError, ValueError), match=sentence):
        _greedy(hybrid, tokens(1, LENGTH), cache_implementation=name)


@pytest.mark.parametrize("options", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}])
def test_searches_that_transformers_gave_up_are_refused(hybrid: Any, options: Any) -> None:
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        _greedy(hybrid, tokens(1, LENGTH), **options)


def test_a_stream_and_a_pipeline_give_the_text_of_generate(
    hybrid: Any, folder: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tokens(1, LENGTH)
    expected = tokenizer.decode(_greedy(hybrid, ids)[0, LENGTH:])
    _greedy(hybrid, ids, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == expected.split()
    write = pipeline("text-generation", model=str(folder), tokenizer=tokenizer)
    options = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    prompts = [tokenizer.decode(ids[0]), tokenizer.decode(ids[0, :5])]
    output = write(prompts, batch_size=2, **options)
    assert output[0][0]["generated_text"].split() == expected.split()
    alone = write(prompts[1], **options)
    assert output[1][0]["generated_text"] == alone[0]["generated_text"]


def test_a_prefix_computed_once_is_used_by_many(hybrid: Any) -> None:
    ids, cache = tokens(1, LENGTH), DynamicCache()
    with torch.inference_mode():
        hybrid(ids[:, :12], past_key_values=cache)
        for seed in range(2):
            text = torch.cat([ids[:, :12], tokens(1, 6, seed)], dim=1)
            output = _greedy(hybrid, text, past_key_values=copy.deepcopy(cache))
            assert torch.equal(output, _greedy(hybrid, text))


def test_a_compiled_model_computes_the_same() -> None:
    hybrid = materialize(
        small_model(num_hidden_layers=2), random_mask(layers=2), Window(WINDOW, SINKS)
    )
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    compiled = torch.compile(hybrid, backend="aot_eager")
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        expected = hybrid(ids, use_cache=False).logits
        for options in (
            {"use_cache": False},
            {"attention_mask": mask, "position_ids": positions},
        ):
            out = compiled(ids, **options)
            torch.testing.assert_close(out.logits, expected, **_NEAR)
            assert (out.past_key_values is None) == ("use_cache" in options)


def test_an_exported_program_computes_the_same(hybrid: Any) -> None:
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        program = torch.export.export(hybrid, (ids,), {"use_cache": False, "return_dict": False})
        logits = program.module()(tokens(2, LENGTH, 1), use_cache=False, return_dict=False)[0]
        expected = hybrid(tokens(2, LENGTH, 1), use_cache=False).logits
    torch.testing.assert_close(logits, expected, **_NEAR)


class _Logits(torch.nn.Module):
    """A pass without a cache, as a program that takes tokens alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.model(input_ids, use_cache=False).logits)


def test_an_exported_program_takes_texts_of_any_length() -> None:
    model = _hybrid()
    model.set_attn_implementation("eager")
    shapes = {"input_ids": {1: torch.export.Dim("length", min=3, max=512)}}
    with torch.no_grad():
        exported = torch.export.export(_Logits(model), (tokens(1, LENGTH),), dynamic_shapes=shapes)
        for length in (3, WINDOW, WINDOW + SINKS + 1, 5 * LENGTH):
            ids = tokens(1, length, 1)
            expected = model(ids, use_cache=False).logits
            torch.testing.assert_close(exported.module()(ids), expected, **_NEAR)


def test_layers_on_disk_or_in_host_memory_compute_the_same(folder: Path, tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=places | {"lm_head": "cpu"}, offload_folder=tmp_path
    )
    whole = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert torch.equal(_greedy(model, tokens(2, LENGTH)), _greedy(whole, tokens(2, LENGTH)))


def test_a_copy_and_a_pickle_are_models_of_their_own(tmp_path: Path) -> None:
    hybrid = _hybrid()
    twin = copy.deepcopy(hybrid)
    torch.save(hybrid, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = _greedy(hybrid, tokens(1, LENGTH))
    for model in (twin, again):
        assert torch.equal(_greedy(model, tokens(1, LENGTH)), expected)
        assert isinstance(model(tokens(1, 5)).past_key_values, HybridCache)


def test_more_embeddings(tmp_path: Path) -> None:
    model = _hybrid()
    model.resize_token_embeddings(VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again(tokens(1, LENGTH)).logits.shape[-1] == VOCABULARY + 3
    assert torch.equal(again(tokens(1, LENGTH)).logits, model(tokens(1, LENGTH)).logits)


def test_the_trainer_trains_and_saves_a_hybrid(tmp_path: Path) -> None:
    model, rows = _hybrid(), tokens(4, LENGTH)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[],
        use_cpu=True, gradient_checkpointing=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    assert trainer.train().training_loss > 0 and trainer.evaluate()["eval_loss"] > 0
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if p.ndim == 2)
    trainer.save_model(str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(_greedy(again, rows), _greedy(model.eval(), rows))


def test_rollouts_are_scored_with_the_probabilities_they_were_drawn_by(hybrid: Any) -> None:
    """As reinforcement learning does: generate with left padding, then one pass with gradients."""
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    output = _greedy(
        hybrid, ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True
    )
    full = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1)
    model = copy.deepcopy(hybrid).train()
    logits = model(output.sequences, attention_mask=full).logits[:, LENGTH - 1 : -1]
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    placed = model(output.sequences, attention_mask=full, position_ids=positions)
    expected = torch.stack(output.logits, dim=1)
    torch.testing.assert_close(placed.logits[:, LENGTH - 1 : -1], expected, **_NEAR)
    torch.testing.assert_close(logits[1], expected[1], **_NEAR)
    placed.logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_other_heads_and_the_family_s_class_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(Exception, match="load this model by AutoModelForCausalLM"):
        Qwen3ForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma3"])
def test_the_family_s_class_handed_a_hybrid_s_configuration_is_refused(
    name: str, tmp_path: Path
) -> None:
    """Whichever way the configuration comes; the hybrid class itself takes each of them."""
    model = small_model(name)
    family_class, decoder = type(model), type(model.get_decoder())
    hybrid = materialize(model, mask_of(model.config), Window(WINDOW, SINKS))
    hybrid.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    refusal = "full and sliding heads within a layer: load this model by AutoModelForCausalLM"
    for config in (loaded, copy.deepcopy(loaded), pickle.loads(pickle.dumps(hybrid.config))):
        for wish in ({}, {"attn_implementation": "eager"}):
            with pytest.raises(UserError, match=refusal):
                family_class.from_pretrained(tmp_path, config=config, **wish)
        with pytest.raises(UserError, match=refusal):
            decoder(config.get_text_config())
        auto = auto_class(config)
        assert type(auto.from_config(config)) is type(hybrid)
        again = auto.from_pretrained(tmp_path, config=config, attn_implementation="eager")
        assert torch.equal(_greedy(again, tokens(1, LENGTH)), _greedy(hybrid, tokens(1, LENGTH)))
    with pytest.raises(UserError, match=refusal):
        hybrid.get_decoder().set_attn_implementation("eager")


def test_what_is_pushed_carries_the_code_file(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[set[str]] = []

    def commit(self: Any, *args: Any, operations: Any, **kwargs: Any) -> Any:
        names.append({operation.path_in_repo for operation in operations})

    repo = type("Repo", (), {"repo_id": "someone/hybrid"})
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *a, **k: repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", commit)
    hybrid.push_to_hub("someone/hybrid", token="none")
    assert {"modeling_hybrid.py", "config.json", "model.safetensors"} <= names[0]
    assert not re.search(r"\.bin|\.pt", " ".join(names[0]))


def test_an_engine_s_attention_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's transformers backend asks for it, which finds the code file's AutoModel."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", lambda *args: None)
    for auto in (AutoModel, AutoModelForCausalLM):
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = "vllm"
        with pytest.raises(UserError, match="attn_implementation='vllm' has no hybrid form"):
            auto.from_config(config)
