"""What a recipe is refused for: each change names its field, and a neighbour of it is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bosch.errors import UserError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask, mask_shape, prepare_for_search
from bosch.window import Window
from pipeline.recipe.load import load_recipe
from tests.hybrid_case import mask_of, small_model, tokens
from tests.pipeline_case import Case

FRONT = "search.method=front"
DEEPSPEED = "runtime.sharding=deepspeed"
VARLEN = "runtime.attention=varlen"
HUB = "prepare.sources.0={name: a, kind: huggingface, path: a/b, revision: "


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """4 layers of 4 KV heads of 8 numbers, 1,024 positions, 4 calibration examples of 256 tokens,
    W = 32; 4,096 prepared tokens in sequences of 128, batches of 512."""
    return Case(tmp_path_factory.mktemp("refusals") / "case")


# The change, the field that the message names, and a telling word of it.
FIELDS = [
    ("serach.x=1", "serach", "did you mean search?"),
    ("swa_ratio=0.5", "swa_ratio", "did you mean search.swa_ratio?"),
    ("search.zzz=1", "search.zzz", "known here are method"),
    ("prepare.sources.0.filters={1: 2}", "prepare.sources.0.filters.1", "unknown key"),
    ("search.solver=nomda", "search.solver", "did you mean nomad?"),
    ("train.checkpointing=full", "train.checkpointing", "runtime.checkpointing or checkpoint_tok"),
    ("evaluate.lengths=[512]", "evaluate.lengths", "evaluate.ruler.lengths"),
    ("evaluate.ruler.yarn={2k: 0.5}", "evaluate.ruler.yarn.2k", "greater"),
    ("evaluate.ruler.yarn={x: 2}", "evaluate.ruler.yarn.x", "not a count"),
    ("search.swa_ratio=1.5", "search.swa_ratio", "less than or equal to 1"),
    ("name=Store", "name", "reserved"),
    ("name=a/b", "name", "cannot name a folder"),
    ("name=" + "n" * 101, "name", "cannot name a folder"),
    ("train.learning_rate=.inf", "train.learning_rate", "finite"),
    ("search.window_size=true", "search.window_size", "a valid integer"),
    ("search.swa_ratio=true", "search.swa_ratio", "a valid number"),
    ("train.liger=1", "train.liger", "true or false"),
    ("seed=010", "seed", "a valid integer"),
    ("seed=2147483648", "seed", "less than 2147483648"),
    ("runtime.processes=many", "runtime.processes", "auto"),
    ("runtime.output_root=", "runtime.output_root", "nothing"),
    ("runtime.output_root=''", "runtime.output_root", "at least 1 character"),
    ("prepare.sources.0.name=" + "n" * 300, "prepare.sources.0.name", "at most 200 char"),
    ("evaluate.ruler.lengths=[512,512]", "evaluate.ruler.lengths", "512 twice"),
    ("prepare=3", "prepare", "keys below it"),
    ("search=null", "search", "missing"),
    ("prepare.sources=[]", "prepare.sources", "at least 1 item"),
    ("search.windows=[64,16]", "search.windows", "ascending"),
    ("search.swa_ratio=null", "search", "no budget"),
    ("search.gamma=-0.01", "search.gamma", "greater than or equal to 0"),
    ("search.alpha=0", "search.alpha", "greater than 0"),
    ("search.budget.bytes=1kB", "search.budget.bytes", "a size and its context"),
    (f"search.sinks={10**15}", "search", "2^31"),
    ("evaluate.presets=[shorts]", "evaluate.presets.0", "short, long"),
    ("evaluate.tasks=[]", "evaluate.tasks", "nothing to evaluate"),
    ("evaluate.enable_thinking=true", "evaluate.enable_thinking", "needs think_end_token"),
    ("materialize.max_shard_size=5GiB", "materialize.max_shard_size", "[KMGT]B"),
    ("prepare.sources.0.filters.matches={lang: '(a'}", "prepare.sources.0.filters.matches.lang",
     "regular expression"),
    ("measure.lengths=[512,256]", "measure.lengths", "ascending"),
    # Files
    ("model.path=recipes/nothing", "model.path", "no directory"),
    ("model.path=nobody/nothing", "model.path", "neither a directory nor"),
    ("evaluate.ruler.essay_dir=no/where", "evaluate.ruler.essay_dir", "no folder"),
    ("evaluate.include_path=[no/where]", "evaluate.include_path", "no folder"),
    ("prepare.sources.0.path=no/where", "prepare.sources.0.path", "names no file"),
    ("prepare.sources.0.path=null", "prepare.sources.0", "needs a path"),
    ("evaluate.tasks=[qa_2]", "evaluate.ruler.data_dir", "hotpotqa.json"),
    ("evaluate.tasks=[nolima]", "evaluate.data", "nolima needs a folder"),
    ("evaluate.data={mrcr: no/where}", "evaluate.data", "mrcr: "),
    ("evaluate.apply_chat_template=true", "evaluate.apply_chat_template", "no chat template"),
]  # fmt: skip

# The same with the nearest change that is accepted, and further changes of both.
NEIGHBOURS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("search.method=given", "search.mask", "given", "seed=0", ()),
    (f"search.mask={__file__}", "search.mask", "given", "seed=0", ()),
    ("search.strict=false", "search.solver", "strict", "search.strict=true",
     ("search.solver=nomad_penalty",)),
    ("search.windows=[16,32]", "search.windows", "one window", "search.windows=[16]", ()),
    ("search.window_size=256", "search.window_size", "calibration.length = 256",
     "search.window_size=255", ("train=null",)),
    ("search.windows=[16,253]", "search.windows", "253 with 3 sinks", "search.windows=[16,252]",
     (FRONT, "search.sinks=3", "train=null")),
    # A window of 32 holds 31 of 256 tokens, one of 8 holds 7: a share of 0.02734375.
    ("search.points=[0.12,0.5]", "search.points", "0.12", "search.points=[0.122,0.99]", (FRONT,)),
    ("search.points=[0.0273]", "search.points", "0.027344", "search.points=[0.027344]",
     (FRONT, "search.windows=[8,32]")),
    ("search.budget={kv_cache: 0.9 @ 32}", "search.windows", "search.budget's context = 32",
     "search.budget={kv_cache: 0.9 @ 33}", (FRONT, "search.windows=[8,32]")),
    ("search.points=[0.9999999]", "search.points", "below 1", "search.points=[0.99]", (FRONT,)),
    ("search.swa_ratio=0.6", "search.swa_ratio", "0 to 0.5", "search.swa_ratio=0.5",
     ("search.buckets=[0,0.5]",)),
    ("search.method=bosch", "search.swa_ratio", "0.5 to 1", "search.method=rand",
     ("search.swa_ratio=0.4", "search.buckets=[0.5,1]")),
    # Fourteen of sixteen heads have to slide.
    ("search.buckets=[0,0.75]", "search.budget", "0.875", "search.buckets=[0,0.875]",
     ("search.budget={kv_cache: 0.25 @ 256}",)),
    ("search.budget={kv_cache: 0.12 @ 256}", "search.budget.kv_cache", "hold at 256 tokens",
     "search.budget={kv_cache: 0.1211 @ 256}", ()),
    ("search.head_granularity=3", "search.head_granularity", "4 KV", "search.head_granularity=4",
     ()),
    ("search.head_granularity=4", "search.swa_ratio", "7 sliding heads",
     "search.head_granularity=1", ("search.swa_ratio=0.4",)),
    ("model.dtype=float32", "runtime.attention", "float32", "model.dtype=bfloat16", (VARLEN,)),
    ("search.sinks=2", "runtime.attention", "sinks", "search.sinks=0", (VARLEN,)),
    ("search.window_size=128", "search.window_size", "sequence_length = 128",
     "search.window_size=127", ()),
    ("prepare.calibration.length=1025", "prepare.calibration.length", "1,024 positions",
     "prepare.calibration.length=1024", ()),
    ("prepare.sequence_length=2k", "prepare.sequence_length", "1,024 positions",
     "prepare.sequence_length=1k", ("train.batch_tokens=2k",)),
    ("prepare.sources.1.name=a", "prepare.sources", "twice", "prepare.sources.1.name=b",
     ("prepare.sources=[{name: a, kind: retrieval}, {name: c, kind: python_docs}]",)),
    (HUB + "main}", "prepare.sources.0.revision", "commit", HUB + "0" * 40 + "}", ()),
    ("prepare.sources.0.filters.matches.lang=en", "prepare.sources.0.filters.matches", "no fields",
     "seed=0", ()),
    ("train.total_tokens=4608", "prepare.train_tokens", "4,608", "train.total_tokens=4607", ()),
    ("train.batch_tokens=500", "train.batch_tokens", "sequence_length = 128",
     "train.batch_tokens=512", ()),
    ("train.total_tokens=511", "train.total_tokens", "511", "train.total_tokens=512",
     ("train.checkpoint_tokens=[]",)),
    ("train.checkpoint_tokens=[2049]", "train.checkpoint_tokens", "2,049",
     "train.checkpoint_tokens=[2048]", ()),
    ("runtime.micro_batch_size=3", "train.batch_tokens", "batches of 3",
     "runtime.micro_batch_size=4", ()),
    ("train.teacher=original", "train.teacher", "deepspeed", "train.teacher=none", (DEEPSPEED,)),
    (DEEPSPEED, "runtime.context_parallel", "deepspeed", "runtime.sharding=none",
     ("runtime.context_parallel=2",)),
    ("runtime.replicas=2", "runtime.replicas", "fsdp", "runtime.replicas=1", ()),
    ("runtime.context_parallel=2", "runtime.attention", "whole sequences",
     "runtime.context_parallel=1", ("runtime.attention=varlen",)),
    ("runtime.checkpointing=attention", "runtime.attention", "saves its outputs",
     "runtime.checkpointing=full", ("runtime.attention=flex",)),
    ("train.mixed_precision='no'", "runtime.attention", "float32", "train.mixed_precision=bf16",
     (VARLEN,)),
    # For the task with the longest answers.
    ("evaluate={tasks: [vt, fwe], ruler: {lengths: [50]}}", "evaluate.ruler.max_new_tokens", "50",
     "evaluate={tasks: [vt, fwe], ruler: {lengths: [51]}}", ()),
    ("evaluate.ruler.lengths=[1025]", "evaluate.ruler.lengths", "like {1025: 2}",
     "evaluate.ruler.lengths=[1024]", ()),
    ("evaluate.ruler={lengths: [2049], yarn: {2049: 2}}", "evaluate.ruler.yarn",
     "like {2049: 3}", "evaluate.ruler={lengths: [2048], yarn: {2048: 2}}", ()),
    ("evaluate.ruler={lengths: [1100], yarn: {1100: 2}, yarn_original_length: 512}",
     "evaluate.ruler.yarn", "2 times the 512",
     "evaluate.ruler={lengths: [1024], yarn: {1024: 2}, yarn_original_length: 512}", ()),
    ("evaluate.ruler.yarn={600: 2}", "evaluate.ruler.yarn", "not among",
     "evaluate.ruler.yarn={512: 2}", ()),
    ("evaluate.positions.length=1025", "evaluate.positions.length", "1,025",
     "evaluate.positions.length=1024", ()),
    ("measure.lengths=[1025]", "measure.lengths", "1,025", "measure.lengths=[1024]", ()),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field", "word"), FIELDS, ids=[row[0][:60] for row in FIELDS])
def test_a_fault_names_its_field(change: str, field: str, word: str, case: Case) -> None:
    fault = case.fault(change)
    assert fault.startswith(f"{field}: ") and word in fault and "\n" not in fault


@pytest.mark.parametrize(
    ("change", "field", "word", "accepted", "beside"),
    NEIGHBOURS,
    ids=[" ".join(row[:2])[:80] for row in NEIGHBOURS],
)
def test_a_value_is_refused_and_its_neighbour_is_accepted(
    change: str, field: str, word: str, accepted: str, beside: tuple[str, ...], case: Case
) -> None:
    fault = case.fault(*beside, change)
    assert fault.startswith(f"{field}: ") and word in fault and "\n" not in fault
    load_recipe(case.file, [*beside, accepted], env={}, input_files=False)


# Changes of the model's config.json, further changes, the field and a telling word.
MODELS = [
    ({"num_hidden_layers": None}, (), "model.path", "num_hidden_layers"),
    ({"num_key_value_heads": 3}, (), "model.path", "multiple"),
    ({"layer_types": 7}, (), "model.path", "cannot read"),
    ({"model_type": None}, (), "model.path", "model_type"),
    ({"vocab_size": 10**15}, (), "model.path", "vocab_size"),
    ({"hybrid_attention": {"sinks": 0}}, (), "model.path", "hybrid model already"),
    ({"kv_lora_rank": 64}, (), "model.path", "latent attention"),
    ({"model_type": "mistral", "sliding_window": 9, "layer_types": None},
     ("search.budget.bytes=1MiB @ 1k",), "model.path", "in every layer"),
    ({"layer_types": ["linear_attention"] * 4}, (FRONT, "search.points=[0.5]"), "model.path",
     "no layer"),
    ({"text_config": {"a": 1}}, (), "model.path", "text decoder"),
    ({"attn_implementation": "org/kernel"}, (), "model.path", "would load code"),
    ({"_attn_implementation": {"": "org/kernel"}}, (), "model.path", "would load code"),
    ({"text_config": {"a": [{"attn_implementation": "org/kernel"}]}}, (), "model.path",
     "text_config.a.0.attn_implementation"),
    ({"experts_implementation": "sonicmoe"}, (), "model.path", "would load code"),
    ({"transformers_weights": "b.safetensors"}, (), "model.path", "other code or files"),
    ({"quantization_config": {"quant_method": "eetq"}}, (), "model.path", "eetq"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, (), "model.path", "gptq"),
    ({"quantization_config": {"load_in_8bit": True}}, (), "model.path", "bitsandbytes"),
    ({"vision": {"quantization_config": {"quant_method": "awq"}}}, (), "model.path", "awq"),
    ({"model_type": "qwen3_moe", "num_experts": 4, "output_router_logits": True}, (), "model.path",
     "output_router_logits"),
    ({"model_type": "afmoe"}, ("train.document_masking=true",), "train.document_masking",
     "borders"),
    ({"model_type": "olmo3"}, ("train.liger=true",), "train.liger", "norms or MLPs of olmo3"),
    ({"model_type": "gemma2"}, (VARLEN,), "runtime.attention", "capped"),
    ({"model_type": "gpt_oss"}, (VARLEN,), "runtime.attention", "extra logit"),
    ({"head_dim": 264}, (VARLEN,), "runtime.attention", "256 dimensions"),
    ({"attention_dropout": 0.1}, ("runtime.attention=flex",), "runtime.attention", "dropout"),
    ({"attention_dropout": 0.1}, ("runtime.context_parallel=2", "runtime.processes=2"),
     "runtime.context_parallel", "dropout"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("evaluate.ruler.yarn={512: 2}",),
     "evaluate.ruler.yarn", "stretched"),
    ({"rope_scaling": {"type": "llama3", "factor": 8}}, ("evaluate.ruler.yarn={512: 2}",),
     "evaluate.ruler.yarn", "scales RoPE already"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     ("evaluate.ruler.yarn={512: 2}",), "evaluate.ruler.yarn", "several kinds"),
    ({"model_type": "phimoe"}, ("evaluate.ruler.yarn={512: 2}",), "evaluate.ruler.yarn",
     "have no YaRN"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changes", "field", "word"), MODELS, ids=[str(row[0])[:60] for row in MODELS]
)
def test_a_model_is_refused_for_what_it_lacks(
    config: dict[str, object],
    changes: tuple[str, ...],
    field: str,
    word: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = Case(tmp_path_factory.mktemp("model") / "case")
    case.change_config(**config)
    fault = case.fault(*changes)
    assert fault.startswith(f"{field}: ") and word in fault and "\n" not in fault


# Changes of a head_mask.json, and a telling word.
MASKS = [
    ({"format": 3}, "this version reads format 1"),
    ({"windows": [[16, 0], [16]]}, "the same number of KV heads"),
    ({"windows": [[16, "0"]]}, "list of integers"),
    ({"windows": None}, "windows"),
    ({"sinks": 2**31}, "fewer than 2^31 in all"),
    ({"score": "1"}, "score"),
]


@pytest.mark.parametrize(("change", "word"), MASKS)
def test_a_damaged_mask_is_refused(change: dict[str, object], word: str, tmp_path: Path) -> None:
    path = tmp_path / "head_mask.json"
    HeadMaskFile(HeadMask(((16, 16, 0, 0), (0, 0, 16, 16))), "base", "bosch").save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        HeadMaskFile.load(path)
    assert str(path) in str(caught.value) and word in str(caught.value)


_ROWS = [[0, 7, 7, 9], [0, 0, 7, 9]]
# Changes of the config.json of a hybrid of olmo3, and a telling word; a None is a missing field.
HYBRIDS: list[tuple[dict[str, Any], str]] = [
    ({"hybrid_attention": None}, "hybrid_attention is damaged"),
    ({"hybrid_attention": {"windows": _ROWS, "sinks": -1}}, "sinks"),
    (
        {"hybrid_attention": {"windows": [[0, "7", 0, 0], *_ROWS[1:]], "sinks": 0}},
        "list of integers",
    ),
    ({"hybrid_attention": {"windows": _ROWS[:1], "sinks": 0}}, "rows of 4 heads"),
    # The family's own would be another model's.
    ({"layer_types": None}, "rows of 4 heads"),
    ({"layer_types": ["full_attention"]}, "rows of 4 heads"),
]


@pytest.mark.parametrize(("change", "word"), HYBRIDS)
def test_a_damaged_hybrid_is_refused(change: dict[str, Any], word: str, tmp_path: Path) -> None:
    base = small_model("olmo3")
    materialize(base, mask_of(base.config, Window(7))).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value) and word in str(caught.value)
    if "hybrid_attention" in change:
        with pytest.raises(ValueError, match="hybrid_attention is damaged"):
            AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_refuses_what_would_change_its_attention(tmp_path: Path) -> None:
    base, other = small_model(), small_model("olmo3")
    layers, heads = mask_shape(base.config)
    hybrid = materialize(base, mask_of(base.config, Window(7)))
    hybrid.save_pretrained(tmp_path)
    for use in (apply_head_mask, materialize):
        for mask, said in (
            (HeadMask.all_sliding(layers, 2 * heads, Window(7)), f"of {2 * heads} KV heads"),
            (mask_of(base.config, Window(400, 112)), "is 400 with 112 sinks"),
        ):
            with pytest.raises(UserError, match=said):
                use(base, mask)
    prepare_for_search(other)
    for model in (hybrid, other):
        with pytest.raises(ValueError, match=r"takes a 2-D attention mask .* not a 3-D one"):
            model(tokens(2, 12), attention_mask=torch.ones(2, 12, 12))
    with pytest.raises(UserError, match="'triton"):
        load_model(tmp_path, backend="triton")


def test_a_length_without_room_for_a_chat_template_is_refused(case: Case) -> None:
    (case.model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = "evaluate.apply_chat_template=true"
    for accepted, refused, field in (
        ("evaluate.ruler.lengths=[1022]", "evaluate.ruler.lengths=[1024]", "lengths"),
        (
            "evaluate.ruler={lengths: [1024], yarn: {1024: 2}}",
            "evaluate.ruler={lengths: [2048], yarn: {2048: 2}}",
            "yarn",
        ),
    ):
        load_recipe(case.file, [chat, accepted], env={})
        assert case.fault(chat, refused).startswith(f"evaluate.ruler.{field}: ")
    (case.model / "chat_template.jinja").unlink()
