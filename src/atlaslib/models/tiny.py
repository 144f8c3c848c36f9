"""Tiny Llama models built in code, for tests, examples and the from-scratch quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_llama(
    vocab_size: int = 259,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_len: int = 512,
    seed: int = 0,
    tie_embeddings: bool = False,
    eos_token_id: int | None = 2,
    pad_token_id: int | None = 0,
) -> Any:
    """A randomly initialised ``LlamaForCausalLM`` in float32; the same seed gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_len,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


def tiny_model_folder(folder: str | Path, **kwargs: Any) -> Path:
    """Save a tiny Llama and the tiny tokenizer together, as ``from_pretrained`` expects them."""
    from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

    path = make_tiny_tokenizer(folder)
    tiny_llama(**kwargs).save_pretrained(str(path))
    return path
