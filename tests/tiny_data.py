"""Small tokenizers and models for tests, made without any download."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from data_prep.text import pydoc_topics


@lru_cache
def _bpe(vocabulary: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    topics = list(pydoc_topics().values())
    tokenizer.train_from_iterator(topics[:10] if vocabulary <= 512 else topics, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocabulary` tokens with single digits and an end-of-text token."""
    backend = Tokenizer.from_str(_bpe(vocabulary))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>"
    )


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 with two layers and two KV heads beside its tokenizer, in `folder`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        eos_token_id=0,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """Every byte is a token, so tokens are the same everywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
