"""A hybrid for ONNX Runtime GenAI: a GroupQueryAttention node for each group of heads in a layer.

Each group has its own cache, so the cache of a group that slides holds its window. HQ query heads,
HKV key/value heads and head size D of a layer, C hidden size.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.errors import UserError
from bosch.hybrid import CODE_FILE
from bosch.model.configuration import is_hybrid
from bosch.model.families import decoder_layers, text_config
from bosch.model.loading import load_config, load_model

_MICROSOFT = "com.microsoft"
_SLACK = 16  # tokens that a cache holds beside its window, so that it is moved once in so many
_MOST_DIFFERENT = 1e-3  # of logits, relative to their deviation
_CHECKED = 4  # tokens
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class _Graph:
    """Nodes and weights of a graph, in float32."""

    def __init__(self) -> None:
        import onnx

        self.onnx, self.nodes, self.weights = onnx, list[Any](), list[Any]()

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node, and return the name of its output or the names of its `outputs`."""
        names = [f"{kind}_{len(self.nodes)}_{n}" for n in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any) -> str:
        """Add a weight or a constant, and return its name."""
        if isinstance(value, Tensor):
            value = value.detach().float().numpy()
        name = f"weight_{len(self.weights)}"
        self.weights.append(self.onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def linear(self, states: str, weight: Tensor, bias: Tensor | None) -> str:
        """`states` times the transposed `weight` [out, in], plus the bias."""
        product = self.add("MatMul", states, self.constant(weight.T))
        return product if bias is None else self.add("Add", product, self.constant(bias))

    def norm(self, states: str, norm: Any) -> str:
        """RMSNorm over the last axis."""
        weight = self.constant(norm.weight)
        return self.add(
            "SimplifiedLayerNormalization", states, weight,
            axis=-1, epsilon=float(norm.variance_epsilon), stash_type=1,
        )  # fmt: skip


def export(model_dir: Path, output: Path) -> Path:
    """Write model.onnx, genai_config.json and the tokenizer to the new directory `output`.

    Raises UserError for sinks, a decoder of another form than Llama's and Qwen3's, a missing
    package, and where ONNX Runtime has other logits than the hybrid.
    """
    for package in ("onnx", "onnxruntime_genai"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"the package {package} is missing: pip install onnx onnxruntime-genai")
    config = load_config(str(model_dir))
    if not is_hybrid(config):
        raise UserError(f"{model_dir} is no hybrid model")
    if config.hybrid_attention["sinks"]:
        raise UserError("ONNX Runtime's windows have no sinks: search with search.sinks=0")
    if output.exists():
        raise UserError(f"{output} exists; name a new directory")
    model = load_model(model_dir, dtype="float32", backend="eager")
    _check_form(model)
    left_out = shutil.ignore_patterns(CODE_FILE, "*.safetensors*", "config.json")
    shutil.copytree(model_dir, output, ignore=left_out)
    try:
        groups = _write_graph(model, output)
        _write_config(model, groups, output)
        _check(model, groups, output)
    except BaseException:
        shutil.rmtree(output)
        raise
    return output


def _check_form(model: PreTrainedModel) -> None:
    layers = model.get_decoder().layers
    kinds = decoder_layers(model.config)
    attention = layers[0].self_attn
    is_known = (
        all(set(_PARTS) == {name for name, _ in layer.named_children()} for layer in layers)
        and all(hasattr(attention, name) for name in _PROJECTIONS)
        and set(dict(layers[0].mlp.named_children())) - {"act_fn"}
        == {"gate_proj", "up_proj", "down_proj"}
        and len(kinds.full) == len(layers)
        and text_config(model.config) is model.config
    )
    if not is_known:
        raise UserError(
            f"{model.config.model_type}: ONNX export knows decoders of Llama's and Qwen3's form; "
            "serve this one with vLLM and the plugin (docs/guide/serving.md)"
        )
    if kinds.head_dim % 16:
        raise UserError(
            f"ONNX Runtime's kernel has no heads of {kinds.head_dim}; 16 must divide them"
        )


Group = tuple[int, int]  # KV heads and window (0: full) of a cache


def _groups(row: list[int]) -> list[Group]:
    """The groups of a layer in the order of the weights: full heads, then the widest window."""
    sizes = sorted(set(row), key=lambda size: -(size or 2**31))
    return [(row.count(size), size) for size in sizes]


def _write_graph(model: PreTrainedModel, output: Path) -> list[Group]:
    """Write model.onnx with its weights beside it; returns the groups, in the caches' order."""
    graph = _Graph()
    onnx, decoder, config = graph.onnx, model.get_decoder(), model.config
    kinds, caches = decoder_layers(config), list[Group]()
    positions = torch.arange(config.max_position_embeddings)[None]
    cosine, sine = decoder.rotary_emb(torch.zeros(1, 1, 1), positions)
    half = cosine.shape[-1] // 2
    tables = [graph.constant(table[0, :, :half]) for table in (cosine, sine)]
    one = graph.constant(np.array([1], np.int64))
    total = graph.add("ReduceSum", "attention_mask", one, keepdims=0)
    lengths = graph.add("Cast", graph.add("Sub", total, one), to=onnx.TensorProto.INT32)
    shape = graph.add("Shape", "attention_mask")
    longest = graph.add("Gather", shape, graph.constant(np.array(1, np.int64)))
    longest = graph.add("Cast", longest, to=onnx.TensorProto.INT32)
    states = graph.add("Gather", graph.constant(decoder.embed_tokens.weight), "input_ids")
    for layer, row in zip(decoder.layers, config.hybrid_attention["windows"], strict=True):
        normed, attention = graph.norm(states, layer.input_layernorm), layer.self_attn
        shared = len(attention.q_proj.weight) // (kinds.heads * kinds.head_dim)
        first = 0
        for count, window in _groups(row):
            heads = slice(first, first + count)
            options = {"local_window_size": window, "sliding_window_cache": 1} if window else {}
            query, key, value = (
                _projected(graph, normed, attention, name, heads, kinds.head_dim, group)
                for name, group in (("q", shared), ("k", 1), ("v", 1))
            )
            number = len(caches)
            attended = graph.add(
                "GroupQueryAttention", query, key, value,
                f"past_key_values.{number}.key", f"past_key_values.{number}.value",
                lengths, longest, *tables, outputs=3, domain=_MICROSOFT,
                num_heads=count * shared, kv_num_heads=count, do_rotary=1,
                scale=float(attention.scaling), **options,
            )  # fmt: skip
            attended, *present = attended
            for name, part in zip(("key", "value"), present, strict=True):
                graph.nodes.append(
                    onnx.helper.make_node("Identity", [part], [f"present.{number}.{name}"])
                )
            columns = slice(*(end * shared * kinds.head_dim for end in (first, first + count)))
            bias = getattr(attention.o_proj, "bias", None) if first == 0 else None
            added = graph.linear(attended, attention.o_proj.weight[:, columns], bias)
            states = graph.add("Add", states, added)
            caches.append((count, window))
            first += count
        normed, mlp = graph.norm(states, layer.post_attention_layernorm), layer.mlp
        gate = graph.linear(normed, mlp.gate_proj.weight, mlp.gate_proj.bias)
        gate = graph.add("Mul", gate, graph.add("Sigmoid", gate))
        up = graph.linear(normed, mlp.up_proj.weight, mlp.up_proj.bias)
        down = graph.linear(graph.add("Mul", gate, up), mlp.down_proj.weight, mlp.down_proj.bias)
        states = graph.add("Add", states, down)
    head = model.get_output_embeddings()
    logits = graph.linear(graph.norm(states, decoder.norm), head.weight, head.bias)
    graph.nodes.append(onnx.helper.make_node("Identity", [logits], ["logits"]))
    _save(graph, caches, kinds.head_dim, len(head.weight), output)
    return caches


def _projected(
    graph: _Graph, states: str, attention: Any, name: str, heads: slice, size: int, shared: int
) -> str:
    """Queries, keys or values of a group's heads, normalised by head where the model does."""
    rows = slice(heads.start * shared * size, heads.stop * shared * size)
    linear = getattr(attention, f"{name}_proj")
    bias = None if linear.bias is None else linear.bias[rows]
    projected = graph.linear(states, linear.weight[rows], bias)
    norm = getattr(attention, f"{name}_norm", None)
    if norm is None:
        return projected
    by_head = graph.constant(np.array([0, 0, -1, size], np.int64))
    normed = graph.norm(graph.add("Reshape", projected, by_head), norm)
    return graph.add("Reshape", normed, graph.constant(np.array([0, 0, -1], np.int64)))


def _save(graph: _Graph, caches: list[Group], size: int, vocabulary: int, output: Path) -> None:
    onnx, make = graph.onnx, graph.onnx.helper.make_tensor_value_info
    real, whole = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    inputs = [make("input_ids", whole, ["b", "s"]), make("attention_mask", whole, ["b", "t"])]
    outputs = [make("logits", real, ["b", "s", vocabulary])]
    for number, (count, _) in enumerate(caches):
        for name in ("key", "value"):
            past, present = f"past_key_values.{number}.{name}", f"present.{number}.{name}"
            inputs.append(make(past, real, ["b", count, f"past_{number}", size]))
            outputs.append(make(present, real, ["b", count, f"now_{number}", size]))
    made = onnx.helper.make_graph(graph.nodes, "hybrid", inputs, outputs, graph.weights)
    sets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(_MICROSOFT, 1)]
    onnx.save(
        onnx.helper.make_model(made, opset_imports=sets, ir_version=9),
        str(output / "model.onnx"),
        save_as_external_data=True,  # a file of one message holds 2 GiB
        location="model.onnx.data",
    )


def _write_config(model: PreTrainedModel, caches: list[Group], output: Path) -> None:
    config, kinds = model.config, decoder_layers(model.config)
    sliding = [number for number, (_, window) in enumerate(caches) if window]
    end = model.generation_config.eos_token_id
    end = config.eos_token_id if end is None else end
    decoder: dict[str, Any] = {
        "filename": "model.onnx",
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "head_size": kinds.head_dim,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": kinds.heads,
        "num_hidden_layers": len(caches),
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    if sliding:
        decoder["sliding_window"] = {
            "window_size": max(window for _, window in caches),
            "layers": sliding,
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "cache_slack": _SLACK,
        }
    length = config.max_position_embeddings
    content = {
        "model": {
            "type": "llama",  # any decoder of text: the graph says the rest
            "context_length": length,
            "vocab_size": config.vocab_size,
            "bos_token_id": config.bos_token_id if config.bos_token_id is not None else 0,
            "eos_token_id": end if end is not None else 0,
            "pad_token_id": config.pad_token_id if config.pad_token_id is not None else 0,
            "decoder": decoder,
        },
        "search": {"max_length": length, "past_present_share_buffer": True},
    }
    (output / "genai_config.json").write_text(json.dumps(content, indent=2) + "\n")


@torch.no_grad()
def _check(model: PreTrainedModel, caches: list[Group], output: Path) -> None:
    """Compare logits with the hybrid's, after a prompt longer than the windows and a few tokens."""
    import onnxruntime_genai

    longest = max(window for _, window in caches)
    length = min(2 * longest + 64, model.config.max_position_embeddings - _CHECKED)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    loaded = onnxruntime_genai.Model(str(output))
    options = onnxruntime_genai.GeneratorParams(loaded)
    options.set_search_options(max_length=length + _CHECKED, do_sample=False)
    engine = onnxruntime_genai.Generator(loaded, options)
    engine.append_tokens(ids.numpy().astype(np.int32))
    for _ in range(_CHECKED):
        logits = torch.from_numpy(engine.get_logits()).reshape(-1, model.config.vocab_size)[-1]
        expected = model(input_ids=ids, use_cache=False).logits[0, -1]
        difference = float((logits - expected).abs().max() / expected.std())
        if not difference < _MOST_DIFFERENT:
            raise UserError(
                f"ONNX Runtime's logits differ from the hybrid's by {difference:.1e} of their "
                "deviation; serve it with vLLM and the plugin (docs/guide/serving.md)"
            )
        engine.append_tokens(expected.argmax().reshape(1, 1).numpy().astype(np.int32))
        ids = torch.cat([ids, expected.argmax().reshape(1, 1)], dim=1)
