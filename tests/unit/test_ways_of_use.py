"""The ways of use that docs/guide/using.md lists: each works on a hybrid or fails in a sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedTokenizerFast,
    StaticCache,
    TextStreamer,
    pipeline,
)

from bosch.errors import UserError
from bosch.hybrid import HeadGroupsLayer, HybridCache
from bosch.model.cache import held_bytes
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.hybrid_case import (
    LAYERS,
    VOCABULARY,
    logits_of,
    mask_of,
    random_mask,
    small_model,
    tokens,
)

WINDOW, SINKS, LENGTH, NEW = 6, 2, 20, 8
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


def _hybrid(layers: int = LAYERS) -> Any:
    model = small_model(num_hidden_layers=layers)
    return materialize(model, random_mask(Window(WINDOW, SINKS), layers=layers))


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


def test_generate_takes_embeddings_and_returns_scores_and_hidden_states(hybrid: Any) -> None:
    ids = tokens(1, LENGTH)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    output = [_greedy(hybrid, ids, use_cache=use, **options) for use in (True, False)]
    for with_cache, without in zip(output[0].scores, output[1].scores, strict=True):
        torch.testing.assert_close(with_cache, without, **_NEAR)
    assert len(output[0].hidden_states) == NEW
    embeddings = hybrid.get_input_embeddings()(ids)
    text = hybrid.generate(inputs_embeds=embeddings, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(text, output[0].sequences[:, LENGTH:])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_implementation": "quantized"}, "quantized"),
        ({"cache_implementation": "offloaded"}, "has no hybrid form: choose dynamic or static"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "trust_remote_code=True"),  # transformers' own
        ({"dola_layers": "high"}, "trust_remote_code=True"),
    ],
)
def test_other_caches_and_decoding_methods_are_refused(
    hybrid: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        _greedy(hybrid, tokens(1, LENGTH), **options)
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        hybrid.generate_batch([[5, 6, 7]])


def test_streaming_and_the_pipeline_give_the_text_of_generate(
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


def test_a_cached_prefix_can_be_used_by_many_texts(hybrid: Any) -> None:
    ids, cache = tokens(1, LENGTH), DynamicCache()
    with torch.inference_mode():
        hybrid(ids[:, :12], past_key_values=cache)
        for seed in range(2):
            text = torch.cat([ids[:, :12], tokens(1, 6, seed)], dim=1)
            output = _greedy(hybrid, text, past_key_values=copy.deepcopy(cache))
            assert torch.equal(output, _greedy(hybrid, text))


class _Logits(torch.nn.Module):
    """A pass without a cache, as a program that takes only tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.model(input_ids, use_cache=False).logits)


def test_an_exported_program_takes_texts_of_any_length() -> None:
    model = _hybrid(layers=1)
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


def test_a_copy_and_a_pickle_are_independent_models(tmp_path: Path) -> None:
    hybrid = _hybrid()
    twin = copy.deepcopy(hybrid)
    torch.save(hybrid, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = _greedy(hybrid, tokens(1, LENGTH))
    for model in (twin, again):
        assert torch.equal(_greedy(model, tokens(1, LENGTH)), expected)
        assert isinstance(model(tokens(1, 5)).past_key_values, HybridCache)


def test_embeddings_can_be_resized(tmp_path: Path) -> None:
    model = _hybrid()
    model.resize_token_embeddings(VOCABULARY + 3)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again(tokens(1, LENGTH)).logits.shape[-1] == VOCABULARY + 3
    assert torch.equal(again(tokens(1, LENGTH)).logits, model(tokens(1, LENGTH)).logits)


def test_the_trainer_trains_and_saves_a_hybrid(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments  # they import peft and the inductor

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


def test_rollouts_are_scored_with_the_probabilities_of_their_sampling(hybrid: Any) -> None:
    """As in reinforcement learning: generate with left padding, then one pass with gradients."""
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
    assert placed.past_key_values is None  # training makes no cache
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_an_engines_own_attention_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's transformers backend sets it, which loads the code file's AutoModel."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", lambda *args: None)
    for auto in (AutoModel, AutoModelForCausalLM):
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = "vllm"
        with pytest.raises(ValueError, match="attn_implementation='vllm' has no hybrid form"):
            auto.from_config(config)


@pytest.mark.parametrize("by_position", [False, True])
def test_a_loop_with_positions_and_without_a_mask_works(hybrid: Any, by_position: bool) -> None:
    """Greedy decoding as written for plain transformers models."""
    ids = tokens(2, LENGTH)
    expected = hybrid.generate(ids, max_new_tokens=8, do_sample=False)
    past, step, text = None, ids, ids
    with torch.inference_mode():
        for _ in range(8):
            positions = torch.arange(text.shape[1] - step.shape[1], text.shape[1])[None]
            arguments = (step, None, positions) if by_position else (step,)
            named = {} if by_position else {"position_ids": positions}
            out = hybrid(*arguments, past_key_values=past, **named)
            past, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            text = torch.cat([text, step], dim=1)
    assert isinstance(past, HybridCache)
    assert torch.equal(text, expected)


def test_packed_rows_get_no_cache_and_use_cache_is_refused(hybrid: Any) -> None:
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    assert hybrid(tokens(1, LENGTH), position_ids=packed).past_key_values is None
    for options in ({"use_cache": True}, {"past_key_values": DynamicCache()}):
        with pytest.raises(ValueError, match="packed documents are not kept apart in a pass with"):
            hybrid(tokens(1, LENGTH), position_ids=packed, **options)


def test_positions_of_a_single_token_are_not_read(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would have to synchronise for them in every step."""
    cache = hybrid(tokens(1, 5)).past_key_values
    monkeypatch.setattr(torch.Tensor, "diff", lambda *_, **__: pytest.fail("positions were read"))
    hybrid(tokens(1, 1), past_key_values=cache, position_ids=torch.tensor([[5]]))


def test_image_positions_may_restart_in_height_and_width() -> None:
    """Only the first of four planes has the positions in the text, which separate documents."""
    base, ids = small_model("qwen3_vl"), tokens(1, LENGTH)
    decoder = materialize(base, mask_of(base.config, Window(WINDOW))).get_decoder()
    packed = torch.cat([torch.arange(8), torch.arange(12)])[None]
    of_image, in_order = packed.expand(3, 1, -1), torch.arange(LENGTH)[None]
    for positions, is_cached in (
        (of_image, True),
        (torch.stack([in_order, *of_image]), True),
        (torch.stack([packed, *of_image]), False),
    ):
        past = decoder(ids, position_ids=positions).past_key_values
        assert (past is not None) == is_cached


def _user_caches(model: Any) -> list[Any]:
    return [
        DynamicCache(config=model.config),
        DynamicCache(),
        StaticCache(model.config, max_cache_len=LENGTH),
    ]


@pytest.mark.parametrize("number", range(3))
def test_an_empty_cache_of_transformers_is_as_small_as_a_hybrids(hybrid: Any, number: int) -> None:
    cache, ids = _user_caches(hybrid)[number], tokens(2, LENGTH)
    parts = [hybrid(ids[:, a:b], past_key_values=cache) for a, b in ((0, 12), (12, 19), (19, 20))]
    torch.testing.assert_close(
        torch.cat([part.logits for part in parts], dim=1), logits_of(hybrid, ids), **_NEAR
    )
    assert all(part.past_key_values is cache for part in parts) and len(cache) == LAYERS
    assert all(type(layer) is HeadGroupsLayer for layer in cache.layers)
    assert cache.is_compileable == (number == 2)
    own = hybrid.new_static_cache(LENGTH) if number == 2 else hybrid.new_cache()
    hybrid(ids, past_key_values=own)
    assert held_bytes(cache) == held_bytes(own)


@pytest.mark.parametrize("assisted", [False, True])
def test_generate_continues_with_the_users_cache(hybrid: Any, assisted: bool) -> None:
    """Assisted decoding takes tokens back, so the layers must have recorded them."""
    ids, cache = tokens(1, LENGTH), DynamicCache(config=hybrid.config)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if assisted else {}
    expected = hybrid.generate(ids, max_new_tokens=8, do_sample=False)
    actual = hybrid.generate(
        ids, max_new_tokens=8, do_sample=False, past_key_values=cache, **options
    )
    assert torch.equal(actual, expected)
    assert all(isinstance(layer, HeadGroupsLayer) for layer in cache.layers)


@pytest.mark.parametrize("family", ["falcon_h1", "olmo3"])
def test_the_users_empty_static_cache_works_if_layers_differ(family: str) -> None:
    """If some layers also hold states, or only their own window."""
    base, ids = small_model(family), tokens(2, LENGTH)
    hybrid = materialize(base, mask_of(base.config, Window(7, 2)))
    cache = StaticCache(config=hybrid.config, max_cache_len=LENGTH + 8)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = hybrid.generate(ids, **options)
    assert torch.equal(hybrid.generate(ids, past_key_values=cache, **options), expected)


@pytest.mark.parametrize("static", [False, True])
def test_attention_weights_with_eager(static: bool) -> None:
    """Of a pass, of chunks with a cache, and of `generate`: rows of the same matrix."""
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model = _hybrid()
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "attention_mask": mask}
    with torch.inference_mode():
        whole = model(ids, use_cache=False, **options).attentions
        assert len(whole) == LAYERS and whole[0].shape == (2, 8, LENGTH, LENGTH)
        for weights, count in zip(
            whole, random_mask(Window(WINDOW)).is_full.sum(1).tolist(), strict=True
        ):
            real = weights[:, :, 4:]
            torch.testing.assert_close(real.sum(-1), torch.ones_like(real[..., 0]))
            far = weights[0, :, -1, SINKS : LENGTH - WINDOW]
            assert bool((far[2 * count :] == 0).all()) and bool((far[: 2 * count] > 0).all())
        cache = model.new_static_cache(LENGTH) if static else model.new_cache()
        for start, stop in ((0, 12), (12, 19), (19, 20)):
            part = model(
                ids[:, start:stop], past_key_values=cache, output_attentions=True,
                attention_mask=mask[:, :stop],
            ).attentions  # fmt: skip
            for actual, expected in zip(part, whole, strict=True):
                rows = expected[:, :, start:stop, : actual.shape[3]]
                torch.testing.assert_close(actual[..., : rows.shape[3]], rows, **_NEAR)
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=2, do_sample=False, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    torch.testing.assert_close(output.attentions[0], whole, **_NEAR)


def test_attention_weights_can_be_requested_by_the_configuration(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_attentions=True
    )
    assert len(loaded(tokens(1, 5)).attentions) == LAYERS


def test_auto_model_loads_the_decoder_without_its_head(
    hybrid: Any, folder: Path, tmp_path: Path
) -> None:
    decoder, ids = AutoModel.from_pretrained(folder), tokens(2, LENGTH)
    assert type(decoder).__name__ == "HybridQwen3Model"
    out = decoder(ids, torch.ones_like(ids))
    assert isinstance(out.past_key_values, HybridCache)
    expected = logits_of(hybrid, ids)
    with torch.inference_mode():
        torch.testing.assert_close(hybrid.lm_head(out.last_hidden_state), expected, **_NEAR)
        rest = decoder(ids[:, :1], past_key_values=out.past_key_values).last_hidden_state
        expected = logits_of(hybrid, torch.cat([ids, ids[:, :1]], dim=1))[:, -1:]
        torch.testing.assert_close(hybrid.lm_head(rest), expected, **_NEAR)
    decoder.save_pretrained(tmp_path)
    assert "AutoModel" in json.loads((tmp_path / "config.json").read_text())["auto_map"]
    again = AutoModel.from_pretrained(tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).last_hidden_state, out.last_hidden_state, **_NEAR)


def _damaged(source: Path, target: Path, change: Any) -> Path:
    weights = load_file(source / "model.safetensors")
    change(weights)
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "1 weights are missing or of"),
        (
            lambda w: w.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}),
            r"1 weights of the files have no place in the model of config\.json, model\.layers\.3",
        ),
        (
            lambda w: w.update({"model.layers.1.self_attn.another": torch.ones(4)}),
            "1 weights of the files have no place .*another",
        ),
        (
            lambda w: [w.update({f"language_model.{n}": w.pop(n)}) for n in list(w)],
            "weights are missing",
        ),
    ],
    ids=["missing", "unexpected", "without a place", "renamed"],
)
def test_a_model_with_missing_weights_is_refused(
    folder: Path, tmp_path: Path, change: Any, sentence: str, ordinary: bool
) -> None:
    """By every way to load it; transformers alone would fill in random numbers with a warning."""
    source = folder
    if ordinary:
        source = tmp_path / "base"
        small_model().save_pretrained(source)
    target = tmp_path / "damaged"
    target.mkdir()
    _damaged(source, target, change)
    with pytest.raises(UserError, match=sentence):
        load_model(target, dtype="float32")
    for auto in () if ordinary else (AutoModelForCausalLM, AutoModel):
        with pytest.raises(ValueError, match=sentence):
            auto.from_pretrained(target)
