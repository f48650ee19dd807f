"""Search mode, deploy mode, and transformers' own models: all the same function, and checked so."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import bosch
import bosch.model.materialize as materializing
from bosch.errors import RunError, UserError
from bosch.hybrid import (
    AttentionContext,
    attention_forward,
    context_of_pass,
    head_state,
)
from bosch.masks import HeadMask
from bosch.model.families import check_family
from bosch.model.interface import attention_modules
from bosch.model.loading import load_config, load_model
from bosch.model.materialize import check_hybrid, materialize
from bosch.model.search_mode import apply_head_mask, head_mask, prepare_for_search
from bosch.score.batches import Batch
from bosch.score.gate_gradients import gate_gradients
from bosch.score.patching import replace_attention
from bosch.window import Window
from stages.train.checkpoint import save_model
from tests.hybrid_case import KV_HEADS, LAYERS, logits_of, mask_of, random_mask, small_model, tokens
from tests.peak_memory import TensorBytes

WINDOW = 7
_NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_all_heads_sliding_equals_transformers_own_sliding_model(family: str, length: int) -> None:
    """Token for token, with and without padding."""
    own: dict[str, Any] = {"sliding_window": WINDOW}
    if family != "mistral":
        own |= {"use_sliding_window": True, "layer_types": ["sliding_attention"] * LAYERS}
    model, theirs = small_model(family), small_model(family, **own)
    assert "sliding" in json.dumps(theirs.config.to_dict())
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    apply_head_mask(model, HeadMask.all_sliding(LAYERS, KV_HEADS, Window(WINDOW)))
    torch.testing.assert_close(logits_of(model, ids), logits_of(theirs, ids), **_NEAR)
    real = mask.bool()
    computed, reference = (logits_of(m, ids, attention_mask=mask)[real] for m in (model, theirs))
    torch.testing.assert_close(computed, reference, **_NEAR)
    if length == 40:
        hybrid = materialize(model, HeadMask.all_sliding(LAYERS, KV_HEADS, Window(WINDOW)))
        options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
        assert torch.equal(hybrid.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_base_models_window_as_long_as_its_positions_is_ignored(
    family: str, tmp_path: Path
) -> None:
    theirs = small_model(family, sliding_window=40, max_position_embeddings=40)
    theirs.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", dtype="float32")
    mask, ids = HeadMask.all_full(LAYERS, KV_HEADS), tokens(2, 40)
    materialize(model, mask).save_pretrained(tmp_path / "hybrid")
    hybrid = load_model(tmp_path / "hybrid", dtype="float32")
    prepare_for_search(model)
    apply_head_mask(model, mask)
    for checked in (model, hybrid):
        torch.testing.assert_close(logits_of(checked, ids), logits_of(theirs, ids), **_NEAR)
    theirs.config.sliding_window = 39
    theirs.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"its own \(39 tokens\) in every layer"):
        check_family(load_config(str(tmp_path / "base")))


def test_autocast_computes_attention_in_its_dtype() -> None:
    dtypes: list[torch.dtype] = []
    model, ids = materialize(small_model(), random_mask(Window(WINDOW, 2))), tokens(1, 40)
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: dtypes.append(args[0].dtype)
    )
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        low = logits_of(model, ids)
        for cache in (model.new_cache(), model.new_static_cache(40)):
            parts = [model(part, past_key_values=cache).logits for part in ids.split(13, dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), low, rtol=0.01, atol=0.01)
    assert set(dtypes) == {torch.bfloat16}
    torch.testing.assert_close(low.float(), logits_of(model, ids), rtol=0.02, atol=0.02)


def test_switching_masks_changes_no_weight_and_can_be_undone() -> None:
    model, ids = small_model(), tokens(1, 30)
    weights = {n: (p.data_ptr(), p._version) for n, p in model.named_parameters()}
    prepare_for_search(model)
    outputs = {}
    for _ in range(2):
        for seed in range(4):
            apply_head_mask(model, random_mask(Window(WINDOW), seed))
            logits = logits_of(model, ids)
            assert torch.equal(outputs.setdefault(seed, logits), logits)
    assert len({float(x.sum()) for x in outputs.values()}) == 4
    assert weights == {n: (p.data_ptr(), p._version) for n, p in model.named_parameters()}


def test_a_mask_applies_again_if_attention_was_changed_since() -> None:
    model, ids = small_model(), tokens(1, 30)
    full = logits_of(model, ids)
    prepare_for_search(model, "eager")
    apply_head_mask(model, random_mask(Window(WINDOW)))
    masked = logits_of(model, ids)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits_of(model, ids), full)
    with bosch.head_mask(model, random_mask(Window(WINDOW))):
        assert torch.equal(logits_of(model, ids), masked)
    torch.testing.assert_close(logits_of(model, ids), full)
    apply_head_mask(model, random_mask(Window(WINDOW)))
    assert torch.equal(logits_of(model, ids), masked)


def test_gradients_equal_the_oracle_with_and_without_checkpointing() -> None:
    ids, computed = tokens(2, 30), []
    for backend, checkpointing in (("eager", False), ("sdpa", False), ("sdpa", True)):
        hybrid = materialize(small_model(), random_mask(Window(WINDOW, 2)))
        hybrid.set_attn_implementation(backend)
        hybrid.train()
        if checkpointing:
            hybrid.gradient_checkpointing_enable()
        loss = hybrid(ids, labels=ids).loss
        loss.backward()
        computed.append({n: p.grad for n, p in hybrid.named_parameters()} | {"loss": loss.detach()})
    for other in computed[1:]:
        for name, reference in computed[0].items():
            torch.testing.assert_close(other[name], reference, **_NEAR, msg=name)


@pytest.mark.parametrize("searched", [False, True], ids=["deploy", "search"])
def test_a_pass_with_gradients_may_follow_one_without(searched: bool) -> None:
    model, ids, window = small_model(), tokens(1, 30), Window(WINDOW + 1)
    if searched:
        apply_head_mask(model, random_mask(window))
    else:
        model = materialize(model, random_mask(window))
    with torch.inference_mode():
        model(ids)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bfloat16_and_tied_embeddings_survive_saving(tmp_path: Path) -> None:
    model = small_model("qwen3").to(torch.bfloat16)
    hybrid = materialize(model, random_mask(Window(WINDOW)))
    assert hybrid.lm_head.weight is hybrid.model.embed_tokens.weight
    hybrid.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16 and not loaded.training
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits_of(loaded, tokens(1, 30)), logits_of(hybrid, tokens(1, 30)))


def test_every_implementation_is_a_backend_of_hybrid_attention(tmp_path: Path) -> None:
    hybrid, ids = materialize(small_model(), random_mask(Window(WINDOW))), tokens(1, 30)
    hybrid.save_pretrained(tmp_path)
    for name in ("sdpa", "eager", "bosch"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        torch.testing.assert_close(logits_of(loaded, ids), logits_of(hybrid, ids), **_NEAR)
    with pytest.raises(ValueError, match="paged"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="paged|eager")


@pytest.mark.parametrize(
    ("kwargs", "fault"),
    [
        ({"sliding_window": WINDOW, "position_bias": None}, None),
        ({"attention_mask": AttentionContext(9, 0)}, None),
        ({"sliding_window": WINDOW + 1}, "a window of its own, 8, which its heads do not have"),
        ({"position_bias": torch.zeros(1)}, "does not support position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 9, 9)}, "not a 4-D one"),
    ],
)
def test_options_that_hybrid_attention_does_not_support_are_refused(
    kwargs: dict[str, Any], fault: str | None
) -> None:
    model = small_model()
    module = attention_modules(model)[0]
    states = [torch.randn(1, heads, 9, 8) for heads in (2 * KV_HEADS, KV_HEADS, KV_HEADS)]
    options: dict[str, Any] = {"attention_mask": None, **kwargs}
    with pytest.raises(ValueError, match="no head mask is applied to this model"):
        attention_forward(module, *states, **options)
    apply_head_mask(model, HeadMask.all_sliding(LAYERS, KV_HEADS, Window(WINDOW)))
    if fault is None:
        out, _ = attention_forward(module, *states, **options)
        torch.testing.assert_close(out, attention_forward(module, *states, None)[0])
        return
    for attend in (None, lambda module, call: call.query):
        patched = replace_attention(module, attend) if attend else contextlib.nullcontext()
        with patched, pytest.raises(ValueError, match=fault):
            attention_forward(module, *states, **options)


def test_attention_masks_that_hybrid_attention_does_not_support_are_refused() -> None:
    with pytest.raises(ValueError, match="does not support custom mask functions"):
        context_of_pass(1, 4, 6, use_vmap=True)
    with pytest.raises(ValueError, match="has 5 columns, expected 6: the past included"):
        context_of_pass(1, 4, 6, attention_mask=torch.ones(1, 5), q_offset=2)


@pytest.mark.parametrize("more", [{"attention_mask": torch.ones(1, 4)}, {"q_offset": 2}])
def test_rows_with_padding_or_a_past_are_not_searched_for_documents(more: dict[str, Any]) -> None:
    options = {"allow_is_causal_skip": False, "mask_function": lambda *_: pytest.fail("asked")}
    assert context_of_pass(1, 4, 4, **options, **more).is_plain


def test_only_padding_before_or_between_tokens_is_hidden() -> None:
    for mask, plain in (([1, 1, 1, 0], True), ([1, 0, 1, 1], False), ([0, 1, 1, 1], False)):
        assert context_of_pass(1, 4, 4, attention_mask=torch.tensor([mask])).is_plain == plain


def test_another_head_mask_on_a_hybrid_is_refused() -> None:
    hybrid = materialize(small_model(), random_mask(Window(WINDOW)))
    with pytest.raises(UserError, match="hybrid already"):
        apply_head_mask(hybrid, random_mask(Window(WINDOW)))
    with (
        pytest.raises(UserError, match="hybrid already"),
        head_mask(hybrid, random_mask(Window(WINDOW))),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' expected float, got str"),
        ({"vocab_size": 62}, r"of another shape than config\.json's, .*embed_tokens"),
        ({"is_encoder_decoder": True}, "expected a decoder alone"),
        ({"hidden_act": "other"}, "cannot load the model: unknown value 'other'"),
        ({"_attn_implementation": "org/kernel"}, "= 'org/kernel' would load code"),
    ],
)
def test_an_inconsistent_configuration_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    small_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=sentence) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path)
    small_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="header asks for"):
        load_model(tmp_path)


def test_a_configuration_loads_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package `kernels` transformers would download native code from the hub."""
    small_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    own = {"_attn_implementation": "flash_attention_2"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *_, **__: pytest.fail()
    )
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    assert load_model(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("error", [ValueError, ImportError])
def test_quantised_weights_that_need_a_kernel_are_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    small_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantised))

    def quantizer(config: Any, *args: Any, **options: Any) -> None:
        raise error(json.dumps(config.quantization_config))

    monkeypatch.setattr("transformers.modeling_utils.get_hf_quantizer", quantizer)
    with pytest.raises(UserError, match=r'"mxfp4", "dequantize": true'):
        load_model(tmp_path)


def _state(model: Any) -> Any:
    """All that a head mask changes: attributes of every module, and the attention function."""
    attributes = [(set(vars(m)), head_state(m)) for m in model.modules()]
    return (
        attributes,
        model.config._attn_implementation,
        vars(model).get("create_masks_for_generate"),
    )


@pytest.mark.parametrize("prepared", [False, True])
def test_a_temporary_head_mask_is_undone_completely(prepared: bool) -> None:
    """Also if something fails while it is applied, or while applying it."""
    model, ids = small_model(), tokens(2, 40)
    if prepared:
        prepare_for_search(model, "eager")
        apply_head_mask(model, HeadMask.all_sliding(LAYERS, KV_HEADS, Window(3)))
    before, plain = _state(model), logits_of(model, ids)
    with bosch.head_mask(model, random_mask(Window(WINDOW, 2))) as masked:
        assert masked is model
        backends = {head_state(module).backend for module in attention_modules(model)}
        assert backends == {"eager" if prepared else "sdpa"}
        inside = logits_of(model, ids)
    assert _state(model) == before
    assert torch.equal(logits_of(model, ids), plain) and not torch.allclose(inside, plain)
    expected = small_model()
    apply_head_mask(expected, random_mask(Window(WINDOW, 2)))
    torch.testing.assert_close(logits_of(expected, ids), inside, rtol=1e-4, atol=1e-4)
    with pytest.raises(KeyError), bosch.head_mask(model, random_mask(Window(WINDOW)), "eager"):
        raise KeyError
    assert _state(model) == before
    longest = Window(model.config.max_position_embeddings)
    for wrong, said in (
        (HeadMask.all_full(LAYERS + 1, KV_HEADS), "the head mask is for 4 layers"),
        (random_mask(longest), "no head would ever slide"),
    ):
        with pytest.raises(UserError, match=said), bosch.head_mask(model, wrong):
            pass
        assert _state(model) == before


def test_weights_go_to_a_gpu_without_a_copy_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers gets the device; nothing is moved from the CPU later."""
    small_model().save_pretrained(tmp_path)
    calls: list[dict[str, Any]] = []
    load = AutoModelForCausalLM.from_pretrained

    def loaded(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return load(*args, **{k: v for k, v in options.items() if k != "device_map"})

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    load_model(tmp_path, device=torch.device("cuda", 1))
    load_model(tmp_path, device="cpu")
    assert [options.get("device_map") for options in calls] == [
        {"": torch.device("cuda", 1)}, None,
    ]  # fmt: skip


def test_a_model_spread_over_devices_computes_what_it_does_on_one(tmp_path: Path) -> None:
    """Logits in search and deploy mode, and the gradient of the gates, with accelerate's hooks."""
    small_model().save_pretrained(tmp_path)
    names = ("embed_tokens", "rotary_emb", "norm", *(f"layers.{n}" for n in range(LAYERS)))
    device_map = dict.fromkeys((*(f"model.{name}" for name in names), "lm_head"), "cpu")
    spread = load_model(tmp_path, dtype="float32", device=device_map)
    dispatch_model(spread, device_map, force_hooks=True)
    whole = load_model(tmp_path, dtype="float32", device="cpu")
    mask, ids = mask_of(whole.config, Window(WINDOW)), tokens(2, 20)
    rows = torch.arange(2)
    batch = Batch(rows, ids, rows, torch.tensor([18, 18]), torch.tensor([3, 4]))
    results = []
    for model in (spread, whole):
        check_hybrid(model, ids)
        apply_head_mask(model, mask)
        result = [logits_of(model, ids), gate_gradients(model, batch, mask, mask.menu)]
        hybrid = materialize(model, mask)
        assert hasattr(hybrid.model.norm, "_hf_hook") == (model is spread)
        results.append([*result, logits_of(hybrid, ids), hybrid.generate(ids, max_new_tokens=4)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "gemma2", "glm4_moe"])
def test_weights_that_are_moved_equal_weights_that_are_copied(family: str, tmp_path: Path) -> None:
    """Also in files, as transformers writes them: whole experts and float32 buffers.

    Files may have any size that a recipe may set.
    """
    base = small_model(family).to(torch.bfloat16)
    for buffer in base.buffers():
        buffer.data = buffer.float()
    mask = mask_of(base.config, Window(WINDOW))
    base.generation_config.max_new_tokens = 3
    copied = materialize(base, mask)
    assert copied.generation_config.max_new_tokens == 3
    places = [{weight.data_ptr() for weight in one.parameters()} for one in (base, copied)]
    assert places[0].isdisjoint(places[1])
    assert not any(weight.is_meta for weight in base.state_dict().values())
    hybrid = materialize(base, mask, take_weights=True)
    assert all(weight.is_meta for weight in base.state_dict().values())
    for weights in ("state_dict", "named_buffers"):
        expected, actual = (dict(getattr(model, weights)()) for model in (copied, hybrid))
        assert expected.keys() == actual.keys()
        for name, weight in actual.items():
            assert weight.dtype == expected[name].dtype and torch.equal(weight, expected[name])
    for shard in ("5GB", "20KB", "20.5 kb"):
        folders = tmp_path / f"theirs {shard}", tmp_path / f"ours {shard}"
        copied.save_pretrained(folders[0], max_shard_size=shard)
        save_model(hybrid, folders[1], shard)
        weights = [
            {
                name: x
                for file in folder.glob("*.safetensors")
                for name, x in load_file(file).items()
            }
            for folder in folders
        ]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(value, weights[0][name]) for name, value in weights[1].items())
        others = [
            {f.name: f.read_bytes() for f in folder.iterdir() if "-of-" not in f.name}
            for folder in folders
        ]
        index = "model.safetensors.index.json"
        metadata = [json.loads(files.pop(index, b"{}")).get("metadata") for files in others]
        assert metadata[0] == metadata[1] and others[0] == others[1]


@pytest.mark.parametrize("take_weights", [False, True])
@pytest.mark.parametrize("family", ["dots1", "exaone_moe", "flint"])
def test_float32_weights_of_a_bf16_model_stay_float32(
    family: str, take_weights: bool, tmp_path: Path
) -> None:
    """Biases by which experts are chosen, routers and sinks; also in files."""
    model = small_model(family)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(7 + 0.01 * torch.randn_like(bias))
    model.save_pretrained(tmp_path / "base")
    base = load_model(tmp_path / "base")
    weights = dict(base.state_dict())
    hybrid = materialize(base, mask_of(base.config, Window(WINDOW)), take_weights=take_weights)
    hybrid.save_pretrained(tmp_path / "hybrid")
    file = load_file(tmp_path / "hybrid" / "model.safetensors")
    loaded = load_model(tmp_path / "hybrid")
    assert {torch.float32, torch.bfloat16} == {weight.dtype for weight in file.values()}
    for checked in (hybrid, loaded):
        for name, weight in checked.state_dict().items():
            assert weight.dtype == weights[name].dtype, name
            if ".mlp." in name:
                assert torch.equal(weight, weights[name]), name


def test_materialising_holds_one_model_and_one_file(tmp_path: Path) -> None:
    """Counted by the storages that are alive after each operation."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16}
    base = small_model("qwen3_moe", **sizes).to(torch.bfloat16)
    weights = [weight.nbytes for weight in base.state_dict().values()]
    small, file = 2**16, 2**22  # small ones: indices and buffers
    with TensorBytes() as held:
        hybrid = materialize(base, random_mask(Window(WINDOW)), take_weights=True)
    assert sum(weights) <= held.peak <= held.before + max(weights) + small
    layer = sum(weights) // LAYERS  # its experts are split while they are written
    with TensorBytes() as held:
        save_model(hybrid, tmp_path, f"{file // 2**20}MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert sum(weights) + layer <= held.peak <= held.before + 2 * file + small


def test_a_loaded_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    """On the CPU safetensors maps the file, buffers too; a search reads its weights for days."""
    small_model("glm4_moe").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:
        first = 8 + int.from_bytes(file.read(8), "little")
        file.seek(first)
        file.write(b"x" * (weights.stat().st_size - first))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "gpt_oss", "phi3", "olmo3"])
def test_the_check_leaves_the_model_as_it_was(family: str) -> None:
    model, ids = small_model(family), tokens(1, 20)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    shares_head = model.lm_head.weight is model.get_input_embeddings().weight
    expected = logits_of(model, ids)
    check_hybrid(model, ids)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is shares_head
    assert torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_head_of_its_own_stays_although_the_configuration_ties_it(
    family: str, tmp_path: Path
) -> None:
    model = small_model(family, tie_word_embeddings=True)
    save_model(model, tmp_path / "base", "5GB")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    embeddings = next(w for name, w in weights.items() if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = embeddings * 1.5 + 0.01
    save_file(weights, file, metadata={"format": "pt"})
    ids = tokens(1, 20)
    base = load_model(tmp_path / "base", dtype=torch.float32)
    expected = logits_of(base, ids)
    assert not torch.allclose(expected, logits_of(model, ids), atol=0.01)
    check_hybrid(base, ids)
    save_model(materialize(base, mask_of(base.config, Window(20))), tmp_path / "hybrid", "5GB")
    hybrid = load_model(tmp_path / "hybrid", dtype=torch.float32)
    torch.testing.assert_close(logits_of(hybrid, ids), expected, rtol=1e-4, atol=1e-5)


def test_a_hybrid_that_is_not_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reorder = materializing.in_order

    def wrong(name, weight, places, orders):  # type: ignore[no-untyped-def]
        weight = reorder(name, weight, places, orders)
        return weight.flip(0) if name.endswith("0.self_attn.v_proj.weight") else weight

    monkeypatch.setattr(materializing, "in_order", wrong)
    with pytest.raises(RunError, match="not the model: after layer 0 they differ by"):
        check_hybrid(small_model("llama"), tokens(1, 20))
