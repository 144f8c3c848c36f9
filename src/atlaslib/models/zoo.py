"""Tiny random models of the architectures the engine is checked on, built in code (no download)."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "smollm2": (
        "Llama",
        {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 12}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "attn_implementation": "eager",  # sdpa leaves the soft cap out
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
"""name -> (class prefix in transformers, what differs from the common config)."""


def tiny_causal_lm(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A randomly initialised float32 model of architecture `name`; large enough weights that tokens differ in likelihood."""
    import torch
    import transformers

    prefix, differs = ARCHITECTURES[name]
    text = "Text" if prefix == "Gemma3" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**_COMMON, **differs, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.15)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()
