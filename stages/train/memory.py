"""What training holds, in bytes: the formulas that `plan` prints and tests measure. No torch.

N tokens of a micro-batch, C hidden size, V vocabulary, L layers, P parameters. Each function is
about one process; `shards` is the number of processes under FSDP or DeepSpeed, else 1.
"""

from __future__ import annotations

# Logits computed at a time by the chunked loss: 256 MiB in float32.
_CHUNK_ELEMENTS = 2**26
_FLOAT32 = 4
# Bytes of one of AdamW's two moments; of 8 bits with a float32 scale for each block of 256.
_MOMENT = {"adamw": _FLOAT32, "adamw_8bit": 1 + _FLOAT32 / 256}


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are computed at a time."""
    return max(1, _CHUNK_ELEMENTS // vocabulary)


def distillation_chunk_tokens(vocabulary: int) -> int:
    """As `chunk_tokens`, with the teacher's logits beside the model's own: half as many."""
    return max(1, chunk_tokens(vocabulary) // 2)


def parameter_bytes(parameters: int, shards: int) -> float:
    """Master weights in float32."""
    return _FLOAT32 * parameters / shards


def teacher_bytes(parameters: int, element_bytes: int, shards: int) -> float:
    """Weights of the model that training distils from, in the precision it computes in."""
    return element_bytes * parameters / shards


def gradient_bytes(trained: int, shards: int) -> float:
    """Gradients in float32, sharded after every micro-batch, whatever the accumulation."""
    return _FLOAT32 * trained / shards


def optimizer_bytes(trained: int, shards: int, optimizer: str) -> float:
    """AdamW's mean and variance, as `train.optimizer` holds them."""
    return 2 * _MOMENT[optimizer] * trained / shards


def layer_input_bytes(layers: int, tokens: int, hidden: int, element_bytes: int) -> int:
    """What gradient checkpointing keeps: the input [N, C] of each layer.

    An element has 2 bytes under FSDP with mixed precision, whose layers compute in bf16. Under
    autocast alone it has 4: the sums between layers stay in float32.
    """
    return layers * tokens * hidden * element_bytes


def kept_attention_bytes(heads: int, width: int, tokens: int, element_bytes: int) -> int:
    """What attention kernels give that is not computed again: outputs, and log-sum-exps in float32.

    `heads` are the query heads of all layers, `width` that of their outputs together.
    """
    return tokens * (width * element_bytes + heads * _FLOAT32)


def loss_bytes(
    tokens: int, hidden: int, vocabulary: int, element_bytes: int, trains_head: bool
) -> int:
    """The chunked loss: a chunk's logits and two copies, gradients of states and of the head.

    The copies are what the scaled logits and the gradient of the logits take; the head's gradient
    [V, C], where it is trained, is summed in float32, beside that of the chunk.
    """
    chunk = min(tokens, chunk_tokens(vocabulary)) * vocabulary * _FLOAT32
    states = tokens * hidden * element_bytes
    head = trains_head * vocabulary * hidden * (_FLOAT32 + element_bytes)
    return 3 * chunk + states + head


def liger_loss_bytes(
    tokens: int, hidden: int, vocabulary: int, element_bytes: int, trains_head: bool
) -> int:
    """Liger's fused loss: a chunk's logits, gradients of states and of the head.

    The head's gradient [V, C], where it is trained, is summed in float32, beside that of a chunk,
    which Liger up to 0.8 turns into float32 before it adds it.
    """
    chunk = -(-tokens // -(-vocabulary // hidden))
    chunk = min(tokens, 1 << (chunk - 1).bit_length())  # the next power of two
    states = tokens * hidden * element_bytes
    copy = _FLOAT32 if element_bytes < _FLOAT32 else 0
    head = trains_head * vocabulary * hidden * (_FLOAT32 + element_bytes + copy)
    return chunk * vocabulary * element_bytes + states + head


def distillation_bytes(
    tokens: int, hidden: int, vocabulary: int, element_bytes: int, trains_head: bool
) -> int:
    """The loss with a teacher: as `loss_bytes`, with its states and both models' logits.

    Of a chunk's tokens there are the logits and log-probabilities of the model, the teacher's
    probabilities, their product, and gradients of two of them.
    """
    chunk = min(tokens, distillation_chunk_tokens(vocabulary)) * vocabulary * _FLOAT32
    states = 3 * tokens * hidden * element_bytes  # the model's chosen ones, gradients, the other's
    head = trains_head * vocabulary * hidden * (_FLOAT32 + element_bytes)
    return 6 * chunk + states + head


def gathered_bytes(layer_parameters: int, hidden: int, vocabulary: int, element_bytes: int) -> int:
    """FSDP's whole weights: the head for all of a step, and two layers, one of them ahead."""
    return element_bytes * (hidden * vocabulary + 2 * layer_parameters)


def restart_point_bytes(parameters: int, trained: int, optimizer: str) -> float:
    """A restart point on disk: all weights in float32, and the moments of the trained ones."""
    return _FLOAT32 * parameters + optimizer_bytes(trained, 1, optimizer)


def restart_disk_bytes(parameters: int, trained: int, optimizer: str) -> float:
    """Restart points on disk at most: the older one stays until the newer one is complete."""
    return 2 * restart_point_bytes(parameters, trained, optimizer)


def load_host_bytes(
    parameters: int,
    saved_bytes: int,
    computed_bytes: int,
    sharding: str,
    processes: int,
    on_gpu: bool,
) -> int:
    """Host memory of a node while the model is loaded, with `processes` on the node.

    Sharded, the first process alone reads the weights, in `saved_bytes` each, and sends them one by
    one; DeepSpeed then has a copy of its shards in `computed_bytes`, the precision of training, in
    the host's memory. What the processes keep on the CPU, float32 shards and DeepSpeed's second
    copy, is not counted. Without sharding the weights go to the GPUs one by one, from files that
    all processes share; on the CPU every process keeps them in float32. A teacher is loaded before
    the model, in no more bytes.
    """
    if sharding == "none" and not on_gpu:
        return _FLOAT32 * parameters * processes
    if sharding == "deepspeed":
        return max(saved_bytes, computed_bytes) * parameters
    return saved_bytes * parameters


def restart_host_bytes(
    parameters: int, trained: int, optimizer: str, sharding: str, processes: int, local: int
) -> float:
    """Host memory of a node, with `local` of all `processes`, while a restart point is written.

    It is a copy of what its processes hold, so that training continues meanwhile; without sharding
    the first process of all has the only one.
    """
    share = 1.0 if sharding == "none" else local / processes
    return restart_point_bytes(parameters, trained, optimizer) * share
